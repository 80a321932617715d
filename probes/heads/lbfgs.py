"""L-BFGS for many independent convex problems at once, which share their evaluations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

_Values = Float64[Tensor, "problems parameters"]
_Each = Float64[Tensor, " problems"]
# A step, how the gradient changed on it, and a weight: zero where that says nothing.
_Pair = tuple[_Values, _Values, _Each]

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
        pairs = [*pairs, _pair(values - before[0], gradient - before[2])][-memory:]
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


def _pair(step: _Values, change: _Values) -> _Pair:
    curvature = _dot(step, change)
    says = curvature > 1e-12 * _dot(step, step)
    return step, change, torch.where(says, 1 / curvature.where(says, 1.0), 0.0)


def _dot(one: _Values, other: _Values) -> _Each:
    return (one * other).sum(1)
