"""Heads fitted to the end: logistic regressions for all sources and penalties at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from probes.features.sources import LayerGroup
from probes.features.tiers import FeatureBatch, TrainingFeatures
from probes.heads.kept import KeptState
from probes.heads.lbfgs import minimise
from probes.heads.sgd import (
    Heads,
    LinearHeads,
    RunningStatistics,
    TrainedHeads,
    Training,
    floats,
    joined,
    layers_of,
)
from ssl_bench.composition.fields import Count, Positive, check_fields, require_some
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import in_float64


@dataclass(frozen=True)
class LogisticRegression:
    """Logistic regressions, each fitted to its end by L-BFGS.

    Attributes:
        c_values: C of scikit-learn's: weight of the loss against the penalty. All are fitted;
            which one counts is chosen afterwards.
        batch_size: Images that are looked at together; the result does not depend on it.
        gradient_tolerance: A head has converged where no entry of the mean loss's gradient exceeds
            it.
    """

    c_values: Sequence[Positive]
    max_iterations: Count = 1000
    batch_size: Count = 16

    gradient_tolerance: ClassVar[float] = 1e-6

    def __post_init__(self) -> None:
        check_fields(self, "probe.training")
        require_some("probe.training.c_values", self.c_values)

    def settings(self) -> dict[str, Any]:
        return {
            "optimizer": "lbfgs",
            "c_values": floats(self.c_values),
            "max_iterations": self.max_iterations,
        }

    def of_heads(self, heads: "Heads") -> "LogisticTraining":
        return LogisticTraining(
            values=tuple(floats(self.c_values)),
            max_iterations=self.max_iterations,
            batch_size=self.batch_size,
            gradient_tolerance=self.gradient_tolerance,
            **vars(heads),
        )


@dataclass(frozen=True)
class LogisticTraining(Training):
    """Logistic regressions of the heads that it was told of; values are C.

    C multiplies the sum of the loss beside half the squared weights, of two classes half the
    squared difference of theirs; the bias is free, as in scikit-learn. The result does not depend
    on the size of the batches.
    """

    max_iterations: int
    gradient_tolerance: float

    hyperparameter = "c_value"

    def train(
        self,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        kept: KeptState | None = None,
    ) -> TrainedHeads:
        """Fit one head for each source and C; nothing is random in it, and nothing is kept."""
        del kept
        start = time.monotonic()
        read = features.of_layers(layers_of(sources), self.device)
        batches = entries.split(self.batch_size)
        # From one pass: scale of the channels, and how many patches of each batch count.
        found, counted = RunningStatistics.none(self.device), []
        for batch in progress(read(batches), "mean and deviation", len(batches)):
            found.add(batch.features)
            counted.append(self.targets(batch).counted.sum())
        statistics = found.standardization(len(sources)).on(self.device)
        numbers = in_float64(torch.stack(counted))
        total = numbers.sum().clamp(min=1)
        c_values = torch.tensor(self.values, dtype=torch.float64, device=numbers.device)
        # At the minimum the weights of two classes are opposite, so that the sum of their squares
        # is half the square of the difference, which is all that scikit-learn has there.
        squares = 2 if self.classes == 2 else 1
        scale = statistics if self.standardize else statistics.identity()
        shape = (len(sources), len(self.values), self.classes, scale.mean.shape[1])
        weight = scale.mean.new_zeros(shape)
        objective = _Objective(
            training=self,
            heads=LinearHeads(scale, weight, weight[..., 0].clone()),
            read=partial(read, batches),
            shares=(numbers / total).tolist(),
            penalty=squares / (c_values.repeat(len(sources)) * total),
        )
        # One item a fit: how many steps it takes is not known before.
        (minimum,) = (
            minimise(
                objective,
                objective.start(),
                max_iterations=self.max_iterations,
                gradient_tolerance=self.gradient_tolerance,
            )
            for _ in progress(
                range(1), f"L-BFGS on layers {sources[0][-1]} to {sources[-1][-1]}", 1
            )
        )
        objective.place(minimum.values)
        return TrainedHeads(
            tuple(sources),
            *objective.heads.folded(),
            constant_channels=statistics.constant_channels(),
            seconds=time.monotonic() - start,
            unfinished=int((~minimum.converged).sum()),
            stalled=int(minimum.stalled.sum()),
        )


@dataclass(frozen=True, eq=False)
class _Objective:
    """Mean loss of every head over all patches that count, and its share of the penalty.

    Attributes:
        read: Gives all batches, in one order.
        shares: Of the patches that count, for each batch.
        penalty: Of half the squared weights, beside the mean loss.
    """

    training: LogisticTraining
    heads: LinearHeads
    read: Callable[[], Iterator[FeatureBatch]]
    shares: Sequence[float]
    penalty: Float64[Tensor, " heads"]

    def start(self) -> Float64[Tensor, "heads parameters"]:
        by_head = torch.cat([self.heads.weight.flatten(2), self.heads.bias], 2).flatten(0, 1)
        return in_float64(by_head)

    def place(self, values: Float64[Tensor, "heads parameters"]) -> None:
        """Write parameters into the heads."""
        shape = self.heads.weight.shape
        by_head = values.to(self.heads.weight).view(*shape[:2], -1)
        self.heads.weight = by_head[..., : -shape[2]].reshape(shape)
        self.heads.bias = by_head[..., -shape[2] :].contiguous()

    def __call__(
        self, values: Float64[Tensor, "heads parameters"]
    ) -> tuple[Float64[Tensor, " heads"], Float64[Tensor, "heads parameters"]]:
        self.place(values)
        sources, _, classes, _ = self.heads.weight.shape
        loss, gradient = values.new_zeros(len(values)), torch.zeros_like(values)
        for batch, share in zip(self.read(), self.shares, strict=True):
            features, targets = joined(batch.features, sources), self.training.targets(batch)
            losses, parts = self.heads.loss_and_gradients(features, self.training.loss, targets)
            loss += share * in_float64(losses.flatten())
            by_head = torch.cat([parts[0].flatten(2), parts[1]], 2).flatten(0, 1)
            gradient += share * in_float64(by_head)
        weights = values[:, :-classes]
        gradient[:, :-classes] += self.penalty[:, None] * weights
        return loss + self.penalty * weights.square().sum(1) / 2, gradient
