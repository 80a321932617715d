"""Train logistic regressions by L-BFGS until convergence, for many layers and values of C.

C is the weight of the loss relative to the penalty. All heads are trained in the same passes over
the features, but each head has its own curvature and step length. Heads that have converged or
stalled (made no more progress) are left out of later passes. The function `minimise` accepts any
smooth convex functions.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from probes.features.journal import Journal
from probes.features.moments import Moments
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
from ssl_bench.system.device import to_device, to_float64

_Parameters = Float64[Tensor, "problems parameters"]
_Losses = Float64[Tensor, " problems"]
_Indices = Int64[Tensor, " problems"]
# A step, the change of the gradient, and the inverse of their dot product. The third element is 0
# if the dot product is not positive.
_Correction = tuple[_Parameters, _Parameters, _Losses]

# A step is accepted if it gives at least this fraction of the decrease that the slope predicts.
_SUFFICIENT_DECREASE = 1e-4
# Relative rounding error of a loss in float32. A step that increases the loss by less than this is
# accepted if the slope falls to the given fraction.
_LOSS_NOISE, _SUFFICIENT_FLATTENING = 1e-7, 0.5
# Maximum number of lengths that are tried for a step.
_MAX_TRIALS = 10
# Number of past steps that approximate the curvature.
_MEMORY = 5
# A step makes progress if it lowers the loss by more than this fraction, or if it lowers the
# largest entry of the gradient.
_LOSS_TOLERANCE = 1e-10
# A problem stalls after this number of steps without progress.
_PATIENCE = 10
# Lower limits for rare classes, because a frequency of 0 would have an infinite logarithm and a
# curvature of 0.
_LEAST_FREQUENCY, _LEAST_CURVATURE = 1e-7, 1e-4
# Share of the mean variance that is added to all variances, because the probabilities of a trained
# head vary.
_ADDED_VARIANCE = 0.05


@dataclass(frozen=True)
class LogisticRegression(Training):
    """Logistic regressions that are trained by L-BFGS until they converge.

    As in scikit-learn, each regression minimises C * (sum of the losses) + (sum of the squared
    weights) / 2. The bias is not penalised. The result does not depend on the batch size.

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
            "optimizer": "preconditioned_lbfgs",
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
        """Train one head for each source (group of layers) and each value of C.

        The training involves no randomness.

        Args:
            spec: Properties of the heads, such as the number of classes.
            features: Features and labels of the training images.
            sources: Groups of layers. The heads of a group receive the concatenated features of its
                layers.
            entries: Indices of the training views to use. A view is a crop of an image.
            progress: Function that shows a progress bar.
            journal: File with unfinished work. It is ignored, so an interrupted training starts
                from the beginning.
        """
        del journal
        start = time.monotonic()
        read = features.reader([*chain(*sources)], spec.device)
        batches = entries.split(self.batch_size)

        # In one pass, measure all channels and count the labels of each batch.
        statistics, labelled = RunningStatistics.start(spec.device), []
        moments = [Moments() for _ in sources]
        for batch in progress(read(batches), "mean and covariance", len(batches)):
            statistics.add(batch.features)
            x = concatenate_layers(batch.features, len(sources))
            for source, own in enumerate(moments):
                own.add(x[source].flatten(0, 2))
            labelled.append(spec.targets(batch).label_weights.flatten(1).sum(1))
        standardization = statistics.standardization(len(sources), spec.device)
        counts = to_float64(torch.stack(labelled))  # batches classes
        total = counts.sum().clamp(min=1)
        shares = (counts.sum(1) / total).tolist()
        frequencies = (counts.sum(0) / total).clamp(min=_LEAST_FREQUENCY)

        # For two classes, scikit-learn penalises one weight vector, the difference of our two
        # vectors. At the minimum, our vectors are opposite, and the sum of their squared norms is
        # half of the squared norm of the difference.
        squares = 2 if spec.classes == 2 else 1
        c_values = torch.tensor(self.values, dtype=torch.float64, device=counts.device)
        penalty = squares / (c_values.repeat(len(sources)) * total)
        scale = standardization if spec.standardize else standardization.identity()
        num_values, dim = len(self.values), scale.mean.shape[1]
        num_weights = spec.classes * dim

        def make_heads(source: int, values: _Parameters) -> LinearHeads:
            """Build the heads that receive the features of one source (group of layers).

            Each row of `values` contains the parameters of one head.
            """
            weight, bias = values[None].to(scale.mean).split([num_weights, spec.classes], 2)
            return LinearHeads(scale.select(source), weight.unflatten(2, (-1, dim)), bias)

        def objective(chosen: _Indices, values: _Parameters) -> tuple[_Losses, _Parameters]:
            """Return the mean loss plus the penalty of each chosen head, and the gradients."""
            all_heads = []
            for source in range(len(sources)):
                own = (chosen // num_values == source).nonzero()[:, 0]
                if len(own):
                    own = to_device(own, values.device)
                    all_heads.append((source, own, make_heads(source, values[own])))
            loss, gradient = values.new_zeros(len(values)), torch.zeros_like(values)
            for batch, share in zip(read(batches), shares, strict=True):
                x, targets = concatenate_layers(batch.features, len(sources)), spec.targets(batch)
                for source, own, heads in all_heads:
                    losses, gradients = heads.loss_and_gradients(
                        x[source, None], spec.loss, targets
                    )
                    loss[own] += share * to_float64(losses[0])
                    flat = torch.cat([gradients[0][0].flatten(1), gradients[1][0]], 1)
                    gradient[own] += share * to_float64(flat)
            weights, penalties = values[:, :num_weights], penalty[to_device(chosen, values.device)]
            gradient[:, :num_weights] += penalties[:, None] * weights
            return loss + penalties * weights.square().sum(1) / 2, gradient

        covariances = torch.stack([own.covariance for own in moments])
        precondition = make_preconditioner(
            covariances, to_float64(scale.scale), penalty, frequencies
        )
        # If all weights are zero, these biases minimise the loss.
        start_bias = frequencies.log().expand(len(penalty), -1)
        name = (
            f"L-BFGS on layers {sources[0][-1]} to {sources[-1][-1]}, may converge in fewer steps"
        )
        minimum = minimise(
            objective,
            torch.cat([penalty.new_zeros(len(penalty), num_weights), start_bias], 1),
            precondition=precondition,
            iterations=progress(range(self.max_iterations), name, self.max_iterations),
            gradient_tolerance=self.gradient_tolerance,
        )
        parts = [
            make_heads(source, values).fold_standardization()
            for source, values in enumerate(minimum.values.split(num_values))
        ]
        flags = torch.stack([~minimum.converged, minimum.stalled])
        unconverged, stalled = flags.view(2, len(sources), num_values).sum(2).tolist()
        return TrainedHeads(
            tuple(sources),
            *map(torch.cat, zip(*parts, strict=True)),
            constant_channels=standardization.constant_channels(),
            seconds=time.monotonic() - start,
            unconverged=tuple(unconverged),
            stalled=tuple(stalled),
        )


def make_preconditioner(
    covariances: Float64[Tensor, "sources dim dim"],
    scale: Float64[Tensor, "sources dim"],
    penalty: _Losses,
    frequencies: Float64[Tensor, " classes"],
) -> Callable[[_Parameters], _Parameters]:
    """Return a function that multiplies gradients by an approximation of the inverse Hessian.

    For a class with the frequency f, the Hessian of the loss with respect to the weights of this
    class is approximately f (1 - f) times the covariance of the features, plus the penalty.

    Args:
        covariances: Covariance of the features of each source (group of layers).
        scale: Factor of each channel, applied before the heads.
        penalty: Second derivative of the penalty on the weights of each head.
        frequencies: Fraction of the training labels that belong to each class.
    """
    classes, dim = len(frequencies), scale.shape[1]
    variances, axes = torch.linalg.eigh(covariances * scale[:, :, None] * scale[:, None])
    variances = variances.clamp(min=0) + _ADDED_VARIANCE * variances.mean(1, keepdim=True)
    by_class = (frequencies * (1 - frequencies)).clamp(min=_LEAST_CURVATURE)
    by_source = (variances[:, None] * by_class[:, None])[:, None]  # sources 1 classes dim
    by_head = penalty.view(len(scale), -1, 1, 1)

    def multiply(gradient: _Parameters) -> _Parameters:
        weights, bias = gradient.split([classes * dim, classes], 1)
        rotated = weights.reshape(len(axes), -1, dim) @ axes
        rotated = rotated.view(*by_head.shape[:2], classes, dim) / (by_source + by_head)
        product = rotated.flatten(1, 2) @ axes.mT
        return torch.cat([product.reshape(weights.shape), bias / by_class], 1)

    return multiply


@dataclass(frozen=True)
class Minimum:
    """The result of minimising several functions, which are called problems.

    Attributes:
        values: Parameters of each problem at the end.
        converged: Whether each problem has converged, which means that no entry of its gradient
            exceeds the tolerance. The tensor is on the CPU.
        stalled: Whether each problem stopped early because several steps lowered neither its loss
            nor its gradient. A problem that neither converged nor stalled reached the maximum
            number of steps.
        iterations: Number of steps.
    """

    values: Float64[Tensor, "problems parameters"]
    converged: Bool[Tensor, " problems"]
    stalled: Bool[Tensor, " problems"]
    iterations: int


def minimise(
    objective: Callable[[_Indices, _Parameters], tuple[_Losses, _Parameters]],
    start: Float64[Tensor, "problems parameters"],
    *,
    precondition: Callable[[_Parameters], _Parameters],
    iterations: Iterable[int],
    gradient_tolerance: float,
) -> Minimum:
    """Minimise several smooth convex functions (problems) at once by L-BFGS.

    Args:
        objective: Function that returns the losses and gradients of some problems, given their
            indices (on the CPU) and their parameters.
        start: Initial parameters, one row for each problem.
        precondition: Function that multiplies the gradients of all problems by an approximate
            inverse Hessian.
        iterations: Iterable with one item for each step. Its length is the maximum number of steps.
        gradient_tolerance: A problem converges if no entry of its gradient exceeds this value.

    Sources: Nocedal and Wright, Numerical Optimization, algorithms 7.4 and 3.1. The source for
    steps that change the loss by at most a rounding error is Hager and Zhang, "A New Conjugate
    Gradient Method with Guaranteed Descent and an Efficient Line Search" (2005).
    """
    values, corrections, num_steps = start.clone(), list[_Correction](), 0
    everything = torch.arange(len(start))
    loss, gradient = objective(everything, start)
    largest = gradient.abs().amax(1)
    # These flags are on the CPU, so that the CPU waits for the device only once after each trial.
    converged = (largest <= gradient_tolerance).cpu()
    without_progress = torch.zeros(len(start), dtype=torch.int64)
    for _ in iterations:
        pending = everything[~converged & (without_progress < _PATIENCE)]
        if not len(pending):
            break
        direction = _descent_direction(gradient, corrections, precondition)
        slope, length = _dot(gradient, direction), torch.ones_like(loss)
        old_values, old_gradient = values.clone(), gradient.clone()
        # Shorten each step until the loss of its problem decreases enough.
        for _ in range(_MAX_TRIALS):
            own = to_device(pending, start.device)
            before, predicted = loss[own], slope[own]
            new_values = values[own] + length[own, None] * direction[own]
            new_loss, new_gradient = objective(pending, new_values)
            new_slope = _dot(new_gradient, direction[own])
            falls = new_loss <= before + _SUFFICIENT_DECREASE * length[own] * predicted
            flattens = new_slope <= -_SUFFICIENT_FLATTENING * predicted
            flattens &= new_loss <= before + _LOSS_NOISE * (1 + before.abs())
            accepted = falls | flattens
            new_largest = new_gradient.abs().amax(1)
            is_progress = before - new_loss > _LOSS_TOLERANCE * before.abs()
            is_progress |= new_largest < largest[own]
            values[own] = torch.where(accepted[:, None], new_values, values[own])
            gradient[own] = torch.where(accepted[:, None], new_gradient, gradient[own])
            loss[own] = torch.where(accepted, new_loss, before)
            largest[own] = torch.where(accepted, new_largest.minimum(largest[own]), largest[own])
            # If the slope changes linearly along the step, it is 0 at this length.
            length[own] *= (predicted / (predicted - new_slope)).clamp(0.1, 0.5)
            flags = torch.stack([accepted, is_progress, new_largest <= gradient_tolerance]).cpu()
            chosen = pending[flags[0]]
            without_progress[chosen] = (without_progress[chosen] + 1) * ~flags[1, flags[0]]
            converged[chosen] = flags[2, flags[0]]
            pending = pending[~flags[0]]
            if not len(pending):
                break
        # A problem for which no step was accepted cannot continue.
        without_progress[pending] = _PATIENCE
        step, change = values - old_values, gradient - old_gradient
        curvature = _dot(step, change)
        is_positive = curvature > 1e-12 * _dot(step, step)
        weight = torch.where(is_positive, 1 / curvature.where(is_positive, 1.0), 0.0)
        corrections = [*corrections, (step, change, weight)][-_MEMORY:]
        num_steps += 1
    stalled = ~converged & (without_progress >= _PATIENCE)
    return Minimum(values, converged, stalled, num_steps)


def _descent_direction(
    gradient: _Parameters,
    corrections: Sequence[_Correction],
    precondition: Callable[[_Parameters], _Parameters],
) -> _Parameters:
    """Return the search direction of L-BFGS, computed by the two-loop recursion.

    The search direction is the negative gradient times an approximation of the inverse Hessian.
    `corrections` contains the last steps, and the changes of the gradient in these steps.
    `precondition` multiplies gradients by an initial approximation of the inverse Hessian.
    """
    direction, shares = gradient.clone(), []
    for step, change, weight in reversed(corrections):
        share = weight * _dot(step, direction)
        direction -= share[:, None] * change
        shares.append(share)
    direction = precondition(direction)
    if corrections:
        # The last step corrects the scale of the approximated Hessian.
        step, change, weight = corrections[-1]
        ratio = _dot(step, change) / _dot(change, precondition(change)).clamp(min=1e-300)
        direction *= torch.where(weight > 0, ratio, 1.0)[:, None]
    for (step, change, weight), share in zip(corrections, reversed(shares), strict=True):
        direction += (share - weight * _dot(change, direction))[:, None] * step
    return -direction


def _dot(first: _Parameters, second: _Parameters) -> _Losses:
    return (first * second).sum(1)
