"""Token graying: the small singular values of an image's tokens raised, all else kept."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.fields import GrayingKind
from ssl_bench.models.matrix_functions.power import raised
from ssl_bench.models.matrix_functions.precision import without_autocast

Tokens = Float[Tensor, "batch tokens dim"]
Rows = Float[Tensor, "batch rows size"]


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

    def forward(self, x: Tokens) -> Tokens:
        if self.kind == "none":
            return x
        gray = gray_by_dct if self.kind == "dct" else _svd_graying(x)
        # No decomposition takes bfloat16, and its cosines are not orthogonal.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device):
            return gray(wide, self.exponent).to(x.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind}, exponent={self.exponent}"


def _svd_graying(x: Tokens) -> Callable[[Tokens, float], Tokens]:
    """For a GPU the way without a decomposition, unless float64 is asked for, which probes do."""
    return raised if x.is_cuda and x.dtype != torch.float64 else gray_by_svd


def gray_by_svd(x: Tokens, exponent: float) -> Tokens:
    """U diag(s_max (s / s_max)^exponent) V^T of x = U diag(s) V^T.

    The largest singular value stays, the condition number is raised to the exponent. Cubic in the
    shorter side. Gradients are finite for repeated singular values and for singular matrices,
    where those of `torch.linalg.svd` are not; second derivatives are not to be had. On CUDA the
    host waits for the decomposition: see `ssl_bench.models.matrix_functions.power`.
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
