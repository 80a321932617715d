"""Singular values raised to a power without a decomposition, which a device would be waited for."""

import math
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
    shifted inverses, here a sum of about thirty of them by Cholesky factors. In float64, because G
    has the squares of the singular values. Right to 1e-5 of the largest one; those below 1e-6 of
    it are raised less and less. Gradients are those of the sum: no singular values stand in a
    denominator. They compute all anew; they are no further differentiable.

    Cost: thirty Cholesky factors and inverses of the shorter side forwards, with two products more
    backwards; 8 bytes x batch x side^2 of memory, several times.

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
            return _value(x.double(), exponent).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with without_autocast(x.device):
            return _adjoint(x.double(), gradients[0].double(), ctx.exponent).to(x.dtype), None


def _value(x: Matrix, exponent: float) -> Matrix:
    gram, _, _ = _scaled(x)
    identity, poles, constant, slope = _poles((1 - exponent) / 2, gram)
    power = constant * identity - slope * gram
    for shift, weight in poles:
        power += weight * _inverse(gram + shift * identity)
    return x @ power


def _adjoint(x: Matrix, gradient: Matrix, exponent: float) -> Matrix:
    """The gradient by x, given that by the result.

    Of x (x^T x + t)^-1 = x R it is g R - x R (x^T g + g^T x) R; the largest eigenvalue moves along
    its eigenvectors.
    """
    gram, largest, projector = _scaled(x)
    identity, poles, constant, slope = _poles((1 - exponent) / 2, gram)
    unit = x / largest.sqrt()
    cross = unit.mT @ gradient
    cross = cross + cross.mT
    power, bent = constant * identity - slope * gram, slope * cross
    for shift, weight in poles:
        inverse = _inverse(gram + shift * identity)
        power += weight * inverse
        bent += weight * (inverse @ cross @ inverse)
    fixed = gradient @ power - unit @ bent
    share = (gradient * (unit @ power)).sum(dim=(1, 2), keepdim=True)
    return fixed + (1 - exponent) * share * (unit @ projector)


def _scaled(x: Matrix) -> tuple[Square, Float[Tensor, "batch 1 1"], Square]:
    """x^T x over its largest eigenvalue, that, and the projector on its eigenvectors."""
    gram = x.mT @ x
    largest, projector = _largest_eigenvalue(gram)
    return gram / largest, largest, projector


def _inverse(matrix: Square) -> Square:
    """Of a positive definite matrix."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    lower = torch.linalg.cholesky_ex(matrix).L
    root = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return root.mT @ root


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


def _poles(power: float, like: Square) -> tuple[Tensor, list[tuple[Tensor, Tensor]], float, float]:
    """The identity, shifts t with weights w, c and d of l^-power = sum of w / (l + t) + c - d l.

    The shifts are a geometric series. What would come before the first is one term with the same
    sum and the same mean, what would come after the last the first two of its powers of l <= 1.
    """
    first = 4 * like.shape[-1] * torch.finfo(like.dtype).eps
    count = 1 + math.ceil(math.log(_LAST_POLE / first) / _STEP)
    factor = _STEP * math.sin(math.pi * power) / math.pi
    # Made where they are used: to send them, the host would have to wait for the device.
    number = torch.arange(count, dtype=like.dtype, device=like.device)
    shifts = first * (_STEP * number).exp()
    weights = factor * shifts ** (1 - power)
    sums, moments = (_geometric(one - power) for one in (1, 2))
    is_first = number == 0
    shifts = torch.where(is_first, shifts * (moments / sums), shifts)
    weights = torch.where(is_first, weights * sums, weights)
    after = first * math.exp(_STEP * count)
    constant, slope = (factor * after ** (-one - power) * _geometric(one + power) for one in (0, 1))
    identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return identity, list(zip(shifts, weights, strict=True)), constant, slope


def _geometric(rate: float) -> float:
    """1 + exp(-rate step) + exp(-2 rate step) + ..."""
    return -1 / math.expm1(-rate * _STEP)
