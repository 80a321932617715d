"""Train logistic regressions to convergence by L-BFGS, for many layers and values of C at once.

All heads share each pass over the features, but each head has its own curvature and step length.
`minimise` works for any smooth convex functions.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from probes.features.journal import Journal
from probes.features.tiers import TrainingFeatures
from probes.features.training_images import LayerGroup
from probes.heads.sgd import (
    HeadSpec,
    LinearHeads,
    RunningStatistics,
    TrainedHeads,
    Training,
    concatenate_layers,
)
from ssl_bench.composition.fields import Count, Positive
from ssl_bench.evaluation import Progress
from ssl_bench.system.device import to_float64

_Values = Float64[Tensor, "problems parameters"]
_Losses = Float64[Tensor, " problems"]
# A step, the change of the gradient, and the inverse of their dot product (0 if not positive).
_Pair = tuple[_Values, _Values, _Losses]

# A step is accepted if it gives at least this fraction of the decrease that the slope predicts.
_SUFFICIENT_DECREASE = 1e-4
_MAX_HALVINGS = 20
# Number of past steps that approximate the curvature.
_MEMORY = 5
# A problem stalls if a step lowers its loss by at most this fraction.
_LOSS_TOLERANCE = 1e-10


@dataclass(frozen=True)
class LogisticRegression(Training):
    """Logistic regressions that are trained to convergence by L-BFGS.

    As in scikit-learn, they minimise C * (sum of the losses) + (sum of the squared weights) / 2.
    The bias is not penalised. The result does not depend on the batch size.

    Attributes:
        c_values: Values of C, the weight of the loss relative to the penalty, as in scikit-learn.
            One head is trained for each value, and one of these heads is selected afterwards.
        max_iterations: Maximum number of L-BFGS steps.
        gradient_tolerance: A head has converged if no entry of the gradient of its mean loss
            exceeds this value.
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
        spec: HeadSpec,
        features: TrainingFeatures,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
        progress: Progress,
        journal: Journal | None = None,
    ) -> TrainedHeads:
        """Train one head for each source (the layers of a head) and each C. Nothing is random.

        The journal is ignored, so an interrupted training starts from the beginning.
        """
        del journal
        start = time.monotonic()
        read = features.reader([*chain(*sources)], spec.device)
        batches = entries.split(self.batch_size)

        # Measure the channels and count the labelled patches of each batch in one pass.
        statistics, labelled = RunningStatistics.start(spec.device), []
        for batch in progress(read(batches), "mean and deviation", len(batches)):
            statistics.add(batch.features)
            labelled.append(spec.targets(batch).counted.sum())
        standardization = statistics.standardization(len(sources), spec.device)
        counts = to_float64(torch.stack(labelled))
        total = counts.sum().clamp(min=1)
        shares = (counts / total).tolist()

        # For two classes, scikit-learn penalises one weight vector, the difference of our two
        # vectors. At the minimum, our vectors are opposite, and the sum of their squared norms is
        # half of the squared norm of the difference.
        squares = 2 if spec.classes == 2 else 1
        c_values = torch.tensor(self.values, dtype=torch.float64, device=counts.device)
        penalty = squares / (c_values.repeat(len(sources)) * total)
        scale = standardization if spec.standardize else standardization.identity()
        shape = (len(sources), len(self.values), spec.classes, scale.mean.shape[1])
        weight = scale.mean.new_zeros(shape)
        bank = LinearHeads(scale, weight, weight[..., 0].clone())

        def to_rows(weight: Tensor, bias: Tensor) -> _Values:
            return to_float64(torch.cat([weight.flatten(2), bias], 2).flatten(0, 1))

        def set_parameters(values: _Values) -> None:
            rows = values.to(bank.weight).view(*shape[:2], -1)
            bank.weight = rows[..., : -spec.classes].reshape(shape)
            bank.bias = rows[..., -spec.classes :].contiguous()

        def objective(values: _Values) -> tuple[_Losses, _Values]:
            """Return the mean patch loss of each head plus its penalty, and the gradients."""
            set_parameters(values)
            loss, gradient = values.new_zeros(len(values)), torch.zeros_like(values)
            for batch, share in zip(read(batches), shares, strict=True):
                x = concatenate_layers(batch.features, len(sources))
                losses, gradients = bank.loss_and_gradients(x, spec.loss, spec.targets(batch))
                loss += share * to_float64(losses.flatten())
                gradient += share * to_rows(*gradients)
            weights = values[:, : -spec.classes]
            gradient[:, : -spec.classes] += penalty[:, None] * weights
            return loss + penalty * weights.square().sum(1) / 2, gradient

        # The number of iterations is unknown, so the progress bar has a single item.
        name = f"L-BFGS on layers {sources[0][-1]} to {sources[-1][-1]}"
        (minimum,) = (
            minimise(
                objective,
                to_rows(bank.weight, bank.bias),
                max_iterations=self.max_iterations,
                gradient_tolerance=self.gradient_tolerance,
            )
            for _ in progress(range(1), name, 1)
        )
        set_parameters(minimum.values)
        flags = torch.stack([~minimum.converged, minimum.stalled])
        unconverged, stalled = flags.view(2, *shape[:2]).sum(2).tolist()
        return TrainedHeads(
            tuple(sources),
            *bank.fold_standardization(),
            constant_channels=standardization.constant_channels(),
            seconds=time.monotonic() - start,
            unconverged=tuple(unconverged),
            stalled=tuple(stalled),
        )


@dataclass(frozen=True)
class Minimum:
    """Result of `minimise`. A problem is one of the minimised functions.

    Attributes:
        converged: Whether no entry of the gradient exceeds the tolerance.
        stalled: Whether a problem ended unconverged because a step hardly lowered its loss. All
            other unconverged problems reached the maximum number of iterations.
    """

    values: Float64[Tensor, "problems parameters"]
    converged: Bool[Tensor, " problems"]
    stalled: Bool[Tensor, " problems"]
    iterations: int


def minimise(
    objective: Callable[[_Values], tuple[_Losses, _Values]],
    start: Float64[Tensor, "problems parameters"],
    *,
    max_iterations: int,
    gradient_tolerance: float,
) -> Minimum:
    """Minimise several smooth convex functions at once by L-BFGS, one for each row of `start`.

    Args:
        objective: Function that returns the loss and the gradient of each problem.
        start: Initial parameters of each problem.
        max_iterations: Maximum number of steps.
        gradient_tolerance: A problem converges if no entry of its gradient exceeds this value.

    Source: Nocedal and Wright, Numerical Optimization, algorithms 7.4 and 3.1. Backtracking is
    sufficient, because a convex function has positive curvature along every step.
    """
    values, (loss, gradient), pairs, iteration = start, objective(start), list[_Pair](), 0
    converged = gradient.abs().amax(1) <= gradient_tolerance
    stalled = torch.zeros_like(converged)
    is_over = bool((converged | stalled).all())
    while iteration < max_iterations and not is_over:
        old_values, old_loss, old_gradient, old_stalled = values, loss, gradient, stalled
        direction = _direction(gradient, pairs)
        # Halve each step until the loss of its problem decreases enough. Finished problems stay.
        slope = _dot(gradient, direction)
        length = torch.where(converged | stalled, 0.0, 1.0).to(loss)
        for _ in range(_MAX_HALVINGS):
            new_values = old_values + length[:, None] * direction
            new_loss, new_gradient = objective(new_values)
            predicted = _SUFFICIENT_DECREASE * length * slope
            accepted = (new_loss <= old_loss + predicted) | (length == 0)
            values = torch.where(accepted[:, None], new_values, old_values)
            loss = torch.where(accepted, new_loss, old_loss)
            gradient = torch.where(accepted[:, None], new_gradient, old_gradient)
            converged = gradient.abs().amax(1) <= gradient_tolerance
            stalled = old_stalled | (old_loss - loss <= _LOSS_TOLERANCE * old_loss.abs())
            # Copy both flags together, because the CPU waits for each copy from a GPU.
            flags = torch.stack([accepted.all(), (converged | stalled).all()])
            all_accepted, is_over = flags.tolist()
            if all_accepted:
                break
            length = torch.where(accepted, length, length / 2)
        step, change = values - old_values, gradient - old_gradient
        curvature = _dot(step, change)
        is_positive = curvature > 1e-12 * _dot(step, step)
        weight = torch.where(is_positive, 1 / curvature.where(is_positive, 1.0), 0.0)
        pairs = [*pairs, (step, change, weight)][-_MEMORY:]
        iteration += 1
    return Minimum(values, converged, stalled & ~converged, iteration)


def _direction(gradient: _Values, pairs: Sequence[_Pair]) -> _Values:
    """Return the negative gradient times the approximate inverse Hessian (two-loop recursion)."""
    if not pairs:
        # The first step has a length of at most 1.
        return -gradient / gradient.abs().sum(1, keepdim=True).clamp(min=1)
    direction, shares = gradient.clone(), []
    for step, change, weight in reversed(pairs):
        share = weight * _dot(step, direction)
        direction -= share[:, None] * change
        shares.append(share)
    # The scale comes from the last used pair of each problem.
    scale = torch.ones_like(pairs[0][2])
    for step, change, weight in pairs:
        ratio = _dot(step, change) / _dot(change, change).clamp(min=1e-300)
        scale = torch.where(weight > 0, ratio, scale)
    direction *= scale[:, None]
    for (step, change, weight), share in zip(pairs, reversed(shares), strict=True):
        direction += (share - weight * _dot(change, direction))[:, None] * step
    return -direction


def _dot(first: _Values, second: _Values) -> _Losses:
    return (first * second).sum(1)
