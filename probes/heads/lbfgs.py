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
class _Ended:
    """Which problems have ended, and how."""

    converged: Bool[Tensor, " problems"]
    stalled: Bool[Tensor, " problems"]

    @property
    def done(self) -> Bool[Tensor, " problems"]:
        return self.converged | self.stalled


@dataclass(frozen=True)
class _Tolerances:
    gradient: float
    loss: float

    def ended(self, before: _Point, after: _Point, stalled: Bool[Tensor, " problems"]) -> _Ended:
        """Where a step from one point to another leads; what has stalled once stays so."""
        decrease = before.loss - after.loss
        gained_nothing = decrease <= self.loss * before.loss.abs()
        return _Ended(_is_flat(after, self.gradient), stalled | gained_nothing)


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
    tolerances = _Tolerances(gradient_tolerance, loss_tolerance)
    converged, iteration = _is_flat(point, gradient_tolerance), 0
    ended = _Ended(converged, torch.zeros_like(converged))
    is_over = bool(ended.done.all())
    while iteration < max_iterations and not is_over:
        search = _LineSearch(objective, point, _direction(point.gradient, pairs), tolerances)
        following, ended, is_over = search.step(ended)
        pairs = [*pairs, _pair(point, following)][-memory:]
        point, iteration = following, iteration + 1
    return Minimum(point.values, ended.converged, ended.stalled & ~ended.converged, iteration)


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


@dataclass(frozen=True)
class _LineSearch:
    """Halve each problem's step until its loss falls enough; those that never do stay."""

    objective: Callable[[_Values], tuple[_Each, _Values]]
    point: _Point
    direction: _Values
    tolerances: _Tolerances

    def step(self, before: _Ended) -> tuple[_Point, _Ended, bool]:
        """Where the step leads, which problems end there, and whether all do."""
        point, following, is_over = self.point, self.point, False
        slope, ended = _dot(point.gradient, self.direction), before
        length = torch.where(before.done, 0.0, 1.0).to(point.loss)
        for _ in range(_HALVINGS):
            values = point.values + length[:, None] * self.direction
            loss, gradient = self.objective(values)
            fell = (loss <= point.loss + _SUFFICIENT * length * slope) | (length == 0)
            following = _Point(
                torch.where(fell[:, None], values, point.values),
                torch.where(fell, loss, point.loss),
                torch.where(fell[:, None], gradient, point.gradient),
            )
            ended = self.tolerances.ended(point, following, before.stalled)
            # Both at once: on a device the host waits for each answer.
            have_fallen, is_over = torch.stack([fell.all(), ended.done.all()]).tolist()
            if have_fallen:
                break
            length = torch.where(fell, length, length / 2)
        return following, ended, is_over


def _pair(before: _Point, after: _Point) -> _Pair:
    step, change = after.values - before.values, after.gradient - before.gradient
    curvature = _dot(step, change)
    says = curvature > 1e-12 * _dot(step, step)
    return _Pair(step, change, torch.where(says, 1 / curvature.where(says, 1.0), 0.0))


def _dot(one: _Values, other: _Values) -> _Each:
    return (one * other).sum(1)
