"""Heads fitted to the end by L-BFGS: logistic regressions of all sources and penalties at once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from probes.features.journal import Journal
from probes.features.split import LayerGroup
from probes.features.tiers import TrainingFeatures
from probes.heads.sgd import (
    HeadSpec,
    LinearHeads,
    RunningStatistics,
    TrainedHeads,
    Training,
    joined,
)
from ssl_bench.composition.fields import Count, Positive
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import to_float64

_Values = Float64[Tensor, "problems parameters"]
_Each = Float64[Tensor, " problems"]
# A step, how the gradient changed on it, and a weight: zero where that says nothing.
_Pair = tuple[_Values, _Values, _Each]

# Of the decrease that the slope promises; and halvings of a step before a problem is given up.
_SUFFICIENT = 1e-4
_HALVINGS = 20


@dataclass(frozen=True)
class LogisticRegression(Training):
    """Logistic regressions, each fitted to its end by L-BFGS; values are C.

    C multiplies the sum of the loss beside half the squared weights, of two classes half the
    squared difference of theirs; the bias is free, as in scikit-learn. The result does not depend
    on the size of the batches.

    Attributes:
        c_values: C of scikit-learn's: weight of the loss against the penalty. All are fitted;
            which one counts is chosen afterwards.
        gradient_tolerance: A head has converged where no entry of the mean loss's gradient exceeds
            it.
    """

    c_values: Sequence[Positive]
    max_iterations: Count = 1000
    batch_size: Count = 16

    gradient_tolerance: ClassVar[float] = 1e-6
    hyperparameter = "c_value"

    def settings(self) -> dict[str, Any]:
        return {
            "optimizer": "lbfgs",
            "c_values": list(self.c_values),
            "max_iterations": self.max_iterations,
        }

    def train(
        self,
        heads: HeadSpec,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        journal: Journal | None = None,
    ) -> TrainedHeads:
        """Train one head per source and C. A killed run starts again, so `journal` is unused."""
        del journal
        start = time.monotonic()
        read = features.reader([*chain(*sources)], heads.device)
        batches = entries.split(self.batch_size)
        # From one pass: scale of the channels, and how many patches of each batch count.
        found, counted = RunningStatistics.none(heads.device), []
        for batch in progress(read(batches), "mean and deviation", len(batches)):
            found.add(batch.features)
            counted.append(heads.targets(batch).counted.sum())
        statistics = found.standardization(len(sources), heads.device)
        numbers = to_float64(torch.stack(counted))
        total = numbers.sum().clamp(min=1)
        shares = (numbers / total).tolist()
        c_values = torch.tensor(self.values, dtype=torch.float64, device=numbers.device)
        # At the minimum the weights of two classes are opposite, so that the sum of their squares
        # is half the square of the difference, which is all that scikit-learn has there.
        squares = 2 if heads.classes == 2 else 1
        penalty = squares / (c_values.repeat(len(sources)) * total)
        scale = statistics if heads.standardize else statistics.identity()
        shape = (len(sources), len(self.values), heads.classes, scale.mean.shape[1])
        weight = scale.mean.new_zeros(shape)
        bank = LinearHeads(scale, weight, weight[..., 0].clone())

        def by_head(weight: Tensor, bias: Tensor) -> Float64[Tensor, "heads parameters"]:
            return to_float64(torch.cat([weight.flatten(2), bias], 2).flatten(0, 1))

        def place(values: Float64[Tensor, "heads parameters"]) -> None:
            parts = values.to(bank.weight).view(*shape[:2], -1)
            bank.weight = parts[..., : -heads.classes].reshape(shape)
            bank.bias = parts[..., -heads.classes :].contiguous()

        def objective(
            values: Float64[Tensor, "heads parameters"],
        ) -> tuple[Float64[Tensor, " heads"], Float64[Tensor, "heads parameters"]]:
            """Mean loss of every head over all patches that count, and its share of the penalty."""
            place(values)
            loss, gradient = values.new_zeros(len(values)), torch.zeros_like(values)
            for batch, share in zip(read(batches), shares, strict=True):
                x = joined(batch.features, len(sources))
                losses, parts = bank.loss_and_gradients(x, heads.loss, heads.targets(batch))
                loss += share * to_float64(losses.flatten())
                gradient += share * by_head(*parts)
            weights = values[:, : -heads.classes]
            gradient[:, : -heads.classes] += penalty[:, None] * weights
            return loss + penalty * weights.square().sum(1) / 2, gradient

        # One item a fit: how many steps it takes is not known before.
        name = f"L-BFGS on layers {sources[0][-1]} to {sources[-1][-1]}"
        (minimum,) = (
            minimise(
                objective,
                by_head(bank.weight, bank.bias),
                max_iterations=self.max_iterations,
                gradient_tolerance=self.gradient_tolerance,
            )
            for _ in progress(range(1), name, 1)
        )
        place(minimum.values)
        flags = torch.stack([~minimum.converged, minimum.stalled])
        unfinished, stalled = flags.view(2, *shape[:2]).sum(2).tolist()
        return TrainedHeads(
            tuple(sources),
            *bank.folded(),
            constant_channels=statistics.constant_channels(),
            seconds=time.monotonic() - start,
            unfinished=tuple(unfinished),
            stalled=tuple(stalled),
        )


@dataclass(frozen=True)
class Minimum:
    """Where all problems ended.

    Attributes:
        converged: Where the gradient is as small as was asked.
        stalled: Where it is not, and yet a step gained next to nothing; the others that did not
            converge reached the limit of iterations.
    """

    values: Float64[Tensor, "problems parameters"]
    converged: Bool[Tensor, " problems"]
    stalled: Bool[Tensor, " problems"]
    iterations: int


def minimise(
    objective: Callable[[_Values], tuple[_Each, _Values]],
    start: Float64[Tensor, "problems parameters"],
    *,
    max_iterations: int,
    memory: int = 5,
    gradient_tolerance: float = 1e-6,
    loss_tolerance: float = 1e-10,
) -> Minimum:
    """Minimise smooth convex functions of the rows of `start`, each with steps of its own.

    `objective` gives the losses of all problems and their gradients. A problem converges where no
    entry of its gradient exceeds `gradient_tolerance`, and stalls where a step lowers its loss by a
    smaller share than `loss_tolerance`; either ends it. `memory` is how many steps approximate the
    curvature.

    Source: Nocedal and Wright, Numerical Optimization, algorithms 7.4 and 3.1. Backtracking alone
    is enough: a convex function curves upwards along every step.
    """
    values, (loss, gradient), pairs, iteration = start, objective(start), list[_Pair](), 0
    converged = gradient.abs().amax(1) <= gradient_tolerance
    stalled = torch.zeros_like(converged)
    is_over = bool((converged | stalled).all())
    while iteration < max_iterations and not is_over:
        before, direction = (values, loss, gradient), _direction(gradient, pairs)
        # Halve each problem's step until its loss falls enough; those that never do stay.
        slope, stalled_before = _dot(gradient, direction), stalled
        length = torch.where(converged | stalled, 0.0, 1.0).to(loss)
        for _ in range(_HALVINGS):
            tried = before[0] + length[:, None] * direction
            tried_loss, tried_gradient = objective(tried)
            fell = (tried_loss <= before[1] + _SUFFICIENT * length * slope) | (length == 0)
            values = torch.where(fell[:, None], tried, before[0])
            loss = torch.where(fell, tried_loss, before[1])
            gradient = torch.where(fell[:, None], tried_gradient, before[2])
            converged = gradient.abs().amax(1) <= gradient_tolerance
            # What has stalled once stays so.
            stalled = stalled_before | (before[1] - loss <= loss_tolerance * before[1].abs())
            # Both at once: on a device the host waits for each answer.
            have_fallen, is_over = torch.stack([fell.all(), (converged | stalled).all()]).tolist()
            if have_fallen:
                break
            length = torch.where(fell, length, length / 2)
        step, change = values - before[0], gradient - before[2]
        curvature = _dot(step, change)
        says = curvature > 1e-12 * _dot(step, step)
        weight = torch.where(says, 1 / curvature.where(says, 1.0), 0.0)
        pairs = [*pairs, (step, change, weight)][-memory:]
        iteration += 1
    return Minimum(values, converged, stalled & ~converged, iteration)


def _direction(gradient: _Values, pairs: Sequence[_Pair]) -> _Values:
    """Minus the approximate inverse Hessian times the gradient, by the two loops."""
    if not pairs:
        # The first step is at most of length one.
        return -gradient / gradient.abs().sum(1, keepdim=True).clamp(min=1)
    direction, shares = gradient.clone(), []
    for step, change, weight in reversed(pairs):
        share = weight * _dot(step, direction)
        direction -= share[:, None] * change
        shares.append(share)
    # Scaled by the latest pair of each problem that says something.
    scale = torch.ones_like(pairs[0][2])
    for step, change, weight in pairs:
        ratio = _dot(step, change) / _dot(change, change).clamp(min=1e-300)
        scale = torch.where(weight > 0, ratio, scale)
    direction *= scale[:, None]
    for (step, change, weight), share in zip(pairs, reversed(shares), strict=True):
        direction += (share - weight * _dot(change, direction))[:, None] * step
    return -direction


def _dot(one: _Values, other: _Values) -> _Each:
    return (one * other).sum(1)
