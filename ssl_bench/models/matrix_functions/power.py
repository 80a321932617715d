"""Singular values raised to a power without a decomposition, which a device would be waited for."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_bench.models.matrix_functions.precision import without_autocast

Matrix = Float[Tensor, "batch rows cols"]
Square = Float[Tensor, "batch rank rank"]

# Of the logarithms of poles. The sum differs from the integral by 2 exp(-2 pi^2 / step), 5e-7.
_STEP = 1.3
# The largest pole; of those above, two terms in a series suffice.
_LAST_POLE = 300.0
# The largest eigenvalue is right to 2^-20 / e of itself however near the next one is.
_SQUARINGS = 20


def raised(x: Matrix, exponent: float) -> Matrix:
    """U diag(s_max (s / s_max)^exponent) V^T of x = U diag(s) V^T, by products and solutions.

    With G = x^T x / s_max^2 it is x G^((exponent - 1) / 2), and the power of G is an integral of
    shifted inverses, here a sum of about thirty of them with Cholesky factors, all at once. In
    float64, because G has the squares of the singular values. Right to 1e-5 of the largest one;
    those below 1e-6 of it are raised less and less. Gradients are those of the sum: no singular
    values stand in a denominator. They compute all anew; they are no further differentiable.

    Cost: thirty Cholesky factors and inverses of the shorter side forwards, with two products more
    backwards; 8 bytes x 30 x batch x side^2 of memory, several times, until the next block.

    Args:
        x: Each matrix by itself.
        exponent: In (0, 1].

    Source: the integral is equation 5.18 of Higham, "Functions of matrices", 2008, by the
    trapezoidal rule in the logarithm.
    """
    if exponent == 1:
        return x
    if x.shape[1] < x.shape[2]:
        return raised(x.mT, exponent).mT
    return _Raised.apply(x, exponent)  # pyright: ignore[reportReturnType]


class _Raised(torch.autograd.Function):
    """`raised` of tall matrices with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exponent: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.exponent = exponent
        with without_autocast(x.device):
            wide = x.double()
            return (wide @ _power(wide, exponent).value).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with without_autocast(x.device):
            return _adjoint(x.double(), gradients[0].double(), ctx.exponent).to(x.dtype), None


@dataclass(frozen=True)
class _Power:
    """G^((exponent - 1) / 2) of G = x^T x / largest, as the sum of weights times inverses.

    Attributes:
        value: The sum.
        inverses: Of G and each of the shifts.
        slope: What follows the shifts is a constant less this times G.
        largest: Eigenvalue of x^T x.
        projector: On its eigenvectors, divided by their number.
    """

    value: Square
    weights: Float[Tensor, "poles 1 1 1"]
    inverses: Float[Tensor, "poles batch rank rank"]
    slope: float
    largest: Float[Tensor, "batch 1 1"]
    projector: Square


def _power(x: Matrix, exponent: float) -> _Power:
    gram = x.mT @ x
    largest, projector = _largest_eigenvalue(gram)
    gram = gram / largest
    identity = torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device)
    shifts, weights, constant, slope = _poles((1 - exponent) / 2, gram)
    lower = torch.linalg.cholesky_ex(gram + shifts * identity).L
    roots = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    inverses = roots.mT @ roots
    value = (weights * inverses).sum(0) + constant * identity - slope * gram
    return _Power(value, weights, inverses, slope, largest, projector)


def _adjoint(x: Matrix, gradient: Matrix, exponent: float) -> Matrix:
    """The gradient by x, given that by the result.

    Of x (x^T x + t)^-1 = x R it is g R - x R (x^T g + g^T x) R; the largest eigenvalue moves along
    its eigenvectors.
    """
    power = _power(x, exponent)
    unit = x / power.largest.sqrt()
    cross = unit.mT @ gradient
    cross = cross + cross.mT
    bent = (power.weights * (power.inverses @ cross @ power.inverses)).sum(0)
    fixed = gradient @ power.value - unit @ (bent + power.slope * cross)
    share = (gradient * (unit @ power.value)).sum(dim=(1, 2), keepdim=True)
    return fixed + (1 - exponent) * share * (unit @ power.projector)


def _largest_eigenvalue(gram: Square) -> tuple[Float[Tensor, "batch 1 1"], Square]:
    """With the projector on its eigenvectors, whose trace is 1: a high power of the matrix."""
    projector = _of_trace_one(gram)
    for _ in range(_SQUARINGS):
        projector = _of_trace_one(projector @ projector)
    largest = (gram * projector).sum(dim=(1, 2), keepdim=True)
    return largest.clamp_min(torch.finfo(gram.dtype).tiny), projector


def _of_trace_one(matrix: Square) -> Square:
    trace = matrix.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    return matrix / trace.clamp_min(torch.finfo(matrix.dtype).tiny)


def _poles(power: float, like: Square) -> tuple[Tensor, Tensor, float, float]:
    """Shifts t and weights w, c and d so that l^-power = sum of w / (l + t) + c - d l, l <= 1.

    The shifts are a geometric series. What would come before the first is one term with the same
    sum and the same mean, what would come after the last the first two of its powers of l.
    """
    first = 4 * like.shape[-1] * torch.finfo(like.dtype).eps
    count = 1 + math.ceil(math.log(_LAST_POLE / first) / _STEP)
    factor = _STEP * math.sin(math.pi * power) / math.pi
    # Made where they are used: to send them, the host would have to wait for the device.
    number = torch.arange(count, dtype=like.dtype, device=like.device).view(-1, 1, 1, 1)
    shifts = first * (_STEP * number).exp()
    weights = factor * shifts ** (1 - power)
    sums, moments = (_geometric(one - power) for one in (1, 2))
    is_first = number == 0
    shifts = torch.where(is_first, shifts * (moments / sums), shifts)
    weights = torch.where(is_first, weights * sums, weights)
    after = first * math.exp(_STEP * count)
    constant, slope = (factor * after ** (-one - power) * _geometric(one + power) for one in (0, 1))
    return shifts, weights, constant, slope


def _geometric(rate: float) -> float:
    """1 + exp(-rate step) + exp(-2 rate step) + ..."""
    return -1 / math.expm1(-rate * _STEP)
