"""Token graying: the small singular values of an image's tokens raised, all else kept."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.attention import without_autocast
from ssl_bench.models.config import GrayingKind

Tokens = Float[Tensor, "batch tokens dim"]


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
        gray = gray_by_svd if self.kind == "svd" else gray_by_dct
        # No decomposition takes bfloat16, and its cosines are not orthogonal.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device):
            return gray(wide, self.exponent).to(x.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind}, exponent={self.exponent}"


def gray_by_svd(x: Tokens, exponent: float) -> Tokens:
    """U diag(s_max (s / s_max)^exponent) V^T of x = U diag(s) V^T.

    The largest singular value stays, the condition number is raised to the exponent. Cubic in the
    shorter side. Gradients are finite for repeated singular values and for singular matrices,
    where those of `torch.linalg.svd` are not; second derivatives are not to be had.
    """
    # The decomposition stops at what is not finite; such an image shall give NaN instead.
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
    Cost: 2 tokens dim (tokens + dim) multiplications forwards, as many backwards.
    """
    of_tokens, of_dim = (dct_matrix(size, like=x) for size in x.shape[1:])
    coefficients = of_tokens @ (x @ of_dim.mT)
    largest = coefficients.abs().amax(dim=(1, 2), keepdim=True)
    ratio = coefficients / largest.clamp_min(torch.finfo(x.dtype).tiny)
    return of_tokens.mT @ (coefficients * _gain(ratio, exponent)) @ of_dim


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
