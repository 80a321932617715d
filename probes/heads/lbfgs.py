"""L-BFGS for many independent convex problems at once, which share their evaluations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

_Values = Float64[Tensor, "problems parameters"]
_Each = Float64[Tensor, " problems"]

# Of the decrease that the slope promises; and halvings of a step before a problem is given up.
_SUFFICIENT = 1e-4
_HALVINGS = 20


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


@dataclass(frozen=True)
class _Point:
    values: _Values
    loss: _Each
    gradient: _Values


@dataclass(frozen=True)
class _Pair:
    """A step and how the gradient changed on it; of weight zero where that says nothing."""

    step: _Values
    change: _Values
    weight: _Each


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
    point, pairs = _Point(start, *objective(start)), []
    converged, iteration = _is_flat(point, gradient_tolerance), 0
    stalled = torch.zeros_like(converged)
    while iteration < max_iterations and not (converged | stalled).all():
        direction = _direction(point.gradient, pairs)
        following = _line_search(objective, point, direction, converged | stalled)
        decrease = point.loss - following.loss
        converged = _is_flat(following, gradient_tolerance)
        stalled |= decrease <= loss_tolerance * point.loss.abs()
        pairs = [*pairs, _pair(point, following)][-memory:]
        point, iteration = following, iteration + 1
    return Minimum(point.values, converged, stalled & ~converged, iteration)


def _is_flat(point: _Point, tolerance: float) -> Bool[Tensor, " problems"]:
    return point.gradient.abs().amax(1) <= tolerance


def _direction(gradient: _Values, pairs: Sequence[_Pair]) -> _Values:
    """Minus the approximate inverse Hessian times the gradient, by the two loops."""
    if not pairs:
        # The first step is at most of length one.
        return -gradient / gradient.abs().sum(1, keepdim=True).clamp(min=1)
    direction, shares = gradient.clone(), []
    for pair in reversed(pairs):
        share = pair.weight * _dot(pair.step, direction)
        direction -= share[:, None] * pair.change
        shares.append(share)
    direction *= _curvature_scale(pairs)[:, None]
    for pair, share in zip(pairs, reversed(shares), strict=True):
        back = pair.weight * _dot(pair.change, direction)
        direction += (share - back)[:, None] * pair.step
    return -direction


def _curvature_scale(pairs: Sequence[_Pair]) -> _Each:
    """Of the latest pair of each problem that says something."""
    scale = torch.ones_like(pairs[0].weight)
    for pair in pairs:
        ratio = _dot(pair.step, pair.change) / _dot(pair.change, pair.change).clamp(min=1e-300)
        scale = torch.where(pair.weight > 0, ratio, scale)
    return scale


def _line_search(
    objective: Callable[[_Values], tuple[_Each, _Values]],
    point: _Point,
    direction: _Values,
    done: Bool[Tensor, " problems"],
) -> _Point:
    """Halve each problem's step until its loss falls enough; those that never do stay."""
    slope, following = _dot(point.gradient, direction), point
    length = torch.where(done, 0.0, 1.0).to(point.loss)
    for _ in range(_HALVINGS):
        values = point.values + length[:, None] * direction
        loss, gradient = objective(values)
        fell = (loss <= point.loss + _SUFFICIENT * length * slope) | (length == 0)
        following = _Point(
            torch.where(fell[:, None], values, point.values),
            torch.where(fell, loss, point.loss),
            torch.where(fell[:, None], gradient, point.gradient),
        )
        if fell.all():
            break
        length = torch.where(fell, length, length / 2)
    return following


def _pair(before: _Point, after: _Point) -> _Pair:
    step, change = after.values - before.values, after.gradient - before.gradient
    curvature = _dot(step, change)
    says = curvature > 1e-12 * _dot(step, step)
    return _Pair(step, change, torch.where(says, 1 / curvature.where(says, 1.0), 0.0))


def _dot(one: _Values, other: _Values) -> _Each:
    return (one * other).sum(1)
