"""Heads fitted to the end: logistic regressions for all sources and penalties at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from probes.features.sources import LayerGroup
from probes.features.statistics import RunningStatistics, Standardization
from probes.features.tiers.training import Chosen, FeatureBatch, Read, TrainingFeatures
from probes.heads.kept import KeptState
from probes.heads.lbfgs import minimise
from probes.heads.linear import LinearHeads
from probes.heads.losses import PixelLoss
from probes.heads.sgd import TrainedHeads, joined, layers_of
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import in_float64


@dataclass(frozen=True)
class LogisticTraining:
    """Hyperparameters of the heads.

    Attributes:
        values: C, which multiplies the sum of the loss beside half the squared weights, of two
            classes half the squared difference of theirs; the bias is free, as in scikit-learn.
        batch_size: Images that are looked at together; the result does not depend on it.
        gradient_tolerance: See `probes.heads.fitting.LogisticRegression`.
    """

    values: tuple[float, ...]
    max_iterations: int
    batch_size: int
    loss: PixelLoss
    standardize: bool
    classes: int
    seed: int
    device: torch.device
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
        statistics, counted = self._looked_at(read, batches, len(sources), progress)
        standardization = statistics if self.standardize else statistics.identity()
        objective = self._objective(read, batches, counted, standardization)
        name = f"L-BFGS on layers {sources[0][-1]} to {sources[-1][-1]}"
        # One item a fit: how many steps it takes is not known before.
        (found,) = (
            minimise(
                objective,
                objective.start(),
                max_iterations=self.max_iterations,
                gradient_tolerance=self.gradient_tolerance,
            )
            for _ in progress(range(1), name, 1)
        )
        objective.place(found.values)
        return TrainedHeads(
            tuple(sources),
            *objective.heads.folded(),
            constant_channels=statistics.constant_channels(),
            seconds=time.monotonic() - start,
            unfinished=int((~found.converged).sum()),
            stalled=int(found.stalled.sum()),
        )

    def _looked_at(
        self, read: Read, batches: Chosen, sources: int, progress: Progress
    ) -> tuple[Standardization, list[Tensor]]:
        """From one pass: scale of the channels, and how many patches of each batch count."""
        found, counted = RunningStatistics.none(self.device), []
        for batch in progress(read(batches), "mean and deviation", len(batches)):
            found.add(batch.features)
            counted.append(self.loss.targets(batch.labels, self.classes).counted.sum())
        return found.standardization(sources).on(self.device), counted

    def _objective(
        self,
        read: Read,
        batches: Chosen,
        counted: Sequence[Tensor],
        standardization: Standardization,
    ) -> "_Objective":
        sources, dim = standardization.mean.shape
        weight = standardization.mean.new_zeros(sources, len(self.values), self.classes, dim)
        numbers = in_float64(torch.stack(list(counted)))
        total = numbers.sum().clamp(min=1)
        c_values = torch.tensor(self.values, dtype=torch.float64, device=numbers.device)
        # At the minimum the weights of two classes are opposite, so that the sum of their squares
        # is half the square of the difference, which is all that scikit-learn has there.
        weights = 2 if self.classes == 2 else 1
        return _Objective(
            heads=LinearHeads(standardization, weight, weight[..., 0].clone()),
            read=partial(read, batches),
            shares=(numbers / total).tolist(),
            loss=self.loss,
            penalty=weights / (c_values.repeat(sources) * total),
        )


@dataclass(frozen=True, eq=False)
class _Objective:
    """Mean loss of every head over all patches that count, and its share of the penalty.

    Attributes:
        read: Gives all batches, in one order.
        shares: Of the patches that count, for each batch.
        penalty: Of half the squared weights, beside the mean loss.
    """

    heads: LinearHeads
    read: Callable[[], Iterator[FeatureBatch]]
    shares: Sequence[float]
    loss: PixelLoss
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
            features = joined(batch.features, sources)
            targets = self.loss.targets(batch.labels, classes)
            losses, parts = self.heads.loss_and_gradients(features, self.loss, targets)
            loss += share * in_float64(losses.flatten())
            by_head = torch.cat([parts[0].flatten(2), parts[1]], 2).flatten(0, 1)
            gradient += share * in_float64(by_head)
        weights = values[:, :-classes]
        gradient[:, :-classes] += self.penalty[:, None] * weights
        return loss + self.penalty * weights.square().sum(1) / 2, gradient
