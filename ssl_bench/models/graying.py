"""Token graying: the small singular values of an image's tokens raised, all else kept.

`TokenGraying` is what a block has; the functions behind it do it by singular values, by cosines,
and, for a GPU, without a decomposition, which a device would be waited for; hooks at the end put
it in front of somebody else's blocks and leave their weights alone.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.config import ViTConfig
from ssl_bench.models.registry import GrayingKind
from ssl_bench.system.device import disable_autocast

Tokens = Float[Tensor, "batch tokens dim"]
Rows = Float[Tensor, "batch rows size"]
Matrix = Float[Tensor, "batch rows cols"]
Square = Float[Tensor, "batch rank rank"]

# Of `raised`. Of the logarithms of poles; the sum differs from the integral by
# 2 exp(-2 pi^2 / step), 5e-7.
_STEP = 1.3
# The largest pole; of those above, two terms in a series suffice.
_LAST_POLE = 300.0
# The largest eigenvalue is right to 2^-20 / e of itself however near the next one is.
_SQUARINGS = 20


class TokenGraying(nn.Module):
    """Replaces the tokens that enter a block; no parameters, float32 or wider inside.

    All tokens of an image are one matrix, [CLS] and registers among them, each image by itself.

    Source: Ji et al., "Always Skip Attention", algorithms 1 and 2. The text does not say where in
    the block it sits, nor in which. Here the skip carries the new tokens too: in its table 3 the
    tokens after attention are conditioned like those before. Different here: values below rounding
    are raised no further than rounding itself, which keeps the gradients of singular matrices
    finite.
    """

    def __init__(self, kind: GrayingKind, exponent: float) -> None:
        super().__init__()
        self.kind, self.exponent = kind, exponent

    @classmethod
    def from_config(cls, config: ViTConfig) -> "TokenGraying":
        return cls(config.graying, config.graying_exponent)

    def forward(self, x: Tokens) -> Tokens:
        if self.kind == "none":
            return x
        # For a GPU the way without a decomposition, unless float64 is asked for, as probes do.
        by_svd = raised if x.is_cuda and x.dtype != torch.float64 else gray_by_svd
        gray = gray_by_dct if self.kind == "dct" else by_svd
        # No decomposition takes bfloat16, and its cosines are not orthogonal.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with disable_autocast(x.device):
            return gray(wide, self.exponent).to(x.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind}, exponent={self.exponent}"


def gray_by_svd(x: Tokens, exponent: float) -> Tokens:
    """U diag(s_max (s / s_max)^exponent) V^T of x = U diag(s) V^T.

    The largest singular value stays, the condition number is raised to the exponent. Cubic in the
    shorter side. Gradients are finite for repeated singular values and for singular matrices,
    where those of `torch.linalg.svd` are not; second derivatives are not to be had. On CUDA the
    host waits for the decomposition, see `raised`.
    """
    # The decomposition stops at what is not finite, and to know it the host waits for a device;
    # such an image shall give NaN instead.
    finite = x.isfinite().all(dim=(1, 2), keepdim=True)
    point = torch.where(finite, x, 0.0).detach()
    u, s, vh = torch.linalg.svd(point, full_matrices=False)
    largest = s[:, :1].clamp_min(torch.finfo(s.dtype).tiny)
    value = (u * (s * _gain(s / largest, exponent))[:, None]) @ vh
    # Zero, but what is differentiated.
    return value + _derivative_along(x - point, (u, s / largest, vh), exponent)


def _derivative_along(
    change: Tokens, svd: tuple[Tensor, Tensor, Tensor], exponent: float
) -> Tokens:
    """Derivative of `gray_by_svd` in the direction of `change`, and linear in it.

    With M = U^T dX V, the function acts on the symmetric part of M by its divided differences and
    on the skew-symmetric part by its divided sums; both are written without a quotient of
    differences of singular values. What leaves the span of U or V is scaled like the value.

    Source: Noferini, "A formula for the Frechet derivative of a generalized matrix function", 2017,
    rewritten for s g(s), with the derivative by s_max added.
    """
    u, ratio, vh = svd
    gain = _gain(ratio, exponent)
    core = u.mT @ change @ vh.mT
    symmetric, skew = (core + core.mT) / 2, (core - core.mT) / 2
    mean_gain = (gain[:, :, None] + gain[:, None, :]) / 2
    slope = _divided_difference(ratio, exponent) / 2
    plus = (ratio[:, :, None] + ratio[:, None, :]).square() * slope
    minus = (ratio[:, :, None] - ratio[:, None, :]).square() * slope
    inside = (mean_gain + plus) * symmetric + (mean_gain + minus) * skew
    by_largest = (1 - exponent) * ratio**3 * gain / (ratio.square() + _floor(ratio))
    inside = inside + torch.diag_embed(by_largest) * core[:, :1, :1]
    rows = (change @ vh.mT - u @ core) * gain[:, None]
    cols = gain[:, :, None] * (u.mT @ change - core @ vh)
    return u @ (inside @ vh + cols) + rows @ vh


def _divided_difference(
    ratio: Float[Tensor, "batch rank"], exponent: float
) -> Float[Tensor, "batch rank rank"]:
    """(g(a) - g(b)) / (a^2 - b^2) for every pair of ratios; half the slope over a where a = b.

    For g = m^p, m = a^2 + floor: with L = log(m / n) it is (m n)^((p - 1) / 2) times
    sinh(p L / 2) / sinh(L / 2), to rounding however near a and b are.
    """
    power = (exponent - 1) / 2
    logs = (ratio.square() + _floor(ratio)).log()
    distance = (logs[:, :, None] - logs[:, None, :]) / 2
    quotient = torch.where(distance == 0, power, (power * distance).sinh() / distance.sinh())
    return ((power - 1) * (logs[:, :, None] + logs[:, None, :]) / 2).exp() * quotient


def gray_by_dct(x: Tokens, exponent: float) -> Tokens:
    """The two-dimensional cosine coefficients in the place of the singular values.

    With Z = D_tokens x D_dim^T and m = max |Z|: the inverse transform of sign(Z) m (|Z| / m)^e,
    entry by entry. The condition number falls as far as cosines resemble singular vectors.
    Cost: tokens dim (tokens + dim) multiplications forwards, as many backwards.
    """
    of_tokens, of_dim = (_halved_dct(size, x) for size in x.shape[1:])
    coefficients = _transformed(_transformed(x, of_dim).mT, of_tokens)
    largest = coefficients.abs().amax(dim=(1, 2), keepdim=True)
    ratio = coefficients / largest.clamp_min(torch.finfo(x.dtype).tiny)
    gray = coefficients * _gain(ratio, exponent)
    return _transformed_back(_transformed_back(gray, of_tokens).mT, of_dim)


def _halved_dct(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What even cosines, symmetric about the middle, and odd ones do with one half of their row."""
    matrix = dct_matrix(size, like=like)
    return matrix[0::2, : (size + 1) // 2], matrix[1::2, : size // 2]


def _transformed(x: Rows, halves: tuple[Tensor, Tensor]) -> Rows:
    """The cosine coefficients of every row, first the even ones, then the odd ones.

    The row is folded in the middle, so that half of the multiplications are left.
    """
    even, odd = halves
    half, rest = odd.shape[1], even.shape[1]
    front, middle, back = x[..., :half], x[..., half:rest], x[..., rest:].flip(-1)
    sums = torch.cat([front + back, middle], dim=-1)
    return torch.cat([sums @ even.mT, (front - back) @ odd.mT], dim=-1)


def _transformed_back(coefficients: Rows, halves: tuple[Tensor, Tensor]) -> Rows:
    """The rows whose coefficients `_transformed` gives."""
    even, odd = halves
    half = odd.shape[1]
    sums = coefficients[..., : len(even)] @ even
    differences = coefficients[..., len(even) :] @ odd
    front, back = sums[..., :half] + differences, sums[..., :half] - differences
    return torch.cat([front, sums[..., half:], back.flip(-1)], dim=-1)


def dct_matrix(size: int, *, like: Tensor) -> Float[Tensor, "{size} {size}"]:
    """Orthonormal DCT-II: row k holds sqrt(2 / size) cos(pi k (2 n + 1) / (2 size)).

    Row 0 is divided by sqrt(2). In the dtype and on the device of `like`.
    """
    number = torch.arange(size, device=like.device)
    # Whole turns are taken off in integers: float32 would lose four digits in the angle.
    quarters = number[:, None] * (2 * number + 1) % (4 * size)
    rows = (quarters.to(like.dtype) * (math.pi / (2 * size))).cos() * math.sqrt(2 / size)
    return torch.where(number[:, None] == 0, 1 / math.sqrt(size), rows)


def _gain(ratio: Tensor, exponent: float) -> Tensor:
    """|ratio|^(exponent - 1), levelling off below rounding."""
    return (ratio.square() + _floor(ratio)).pow((exponent - 1) / 2)


def _floor(ratio: Tensor) -> float:
    return torch.finfo(ratio.dtype).eps ** 2


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
    return _Raised.apply(x, exponent)


class _Raised(torch.autograd.Function):
    """`raised` of tall matrices with its gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, exponent: float) -> Tensor:
        ctx.save_for_backward(given)
        ctx.exponent = exponent
        with disable_autocast(given.device):
            x = given.double()
            gram, _, _ = _scaled(x)
            identity, poles, constant, slope = _poles((1 - exponent) / 2, gram)
            power = constant * identity - slope * gram
            for shift, weight in poles:
                power += weight * _inverse(gram + shift * identity)
            return (x @ power).to(given.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Of x (x^T x + t)^-1 = x R it is g R - x R (x^T g + g^T x) R.

        The largest eigenvalue moves along its eigenvectors.
        """
        (given,), exponent = ctx.saved_tensors, ctx.exponent
        with disable_autocast(given.device):
            x, gradient = given.double(), gradients[0].double()
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
            return (fixed + (1 - exponent) * share * (unit @ projector)).to(given.dtype), None


def _scaled(x: Matrix) -> tuple[Square, Float[Tensor, "batch 1 1"], Square]:
    """x^T x over its largest eigenvalue, that, and the projector on its eigenvectors.

    The projector, whose trace is 1, is a high power of the matrix.
    """
    gram = x.mT @ x
    projector = _of_trace_one(gram)
    for _ in range(_SQUARINGS):
        projector = _of_trace_one(projector @ projector)
    largest = (gram * projector).sum(dim=(1, 2), keepdim=True)
    largest = largest.clamp_min(torch.finfo(gram.dtype).tiny)
    return gram / largest, largest, projector


def _inverse(matrix: Square) -> Square:
    """Of a positive definite matrix."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    lower = torch.linalg.cholesky_ex(matrix).L
    root = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return root.mT @ root


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
