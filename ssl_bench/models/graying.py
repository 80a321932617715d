"""Token graying: increase the small singular values of each image's token matrix.

The blocks of this suite contain the module `TokenGraying`. Blocks of timm call this module in a
forward pre-hook. `TokenGraying` calls one of three functions:

- `gray_by_svd` changes the singular values.
- `gray_by_cholesky` approximates `gray_by_svd` on CUDA, where an SVD would make the CPU wait for
  the GPU. In float64, `gray_by_svd` is used, because it is more accurate.
- `gray_by_dct` changes cosine coefficients instead of singular values.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.config import GrayingKind, ViTConfig
from ssl_bench.system.device import disable_autocast

if TYPE_CHECKING:
    from ssl_bench.models.timm_config import TimmConfig

Tokens = Float[Tensor, "batch tokens dim"]
Rows = Float[Tensor, "batch rows size"]
Matrix = Float[Tensor, "batch rows cols"]
Square = Float[Tensor, "batch rank rank"]

# Constants of `gray_by_cholesky`.
# Distance between the logarithms of neighbouring shifts t in the sum over inverses of G + t I. The
# sum approximates an integral with a relative error of 2 exp(-2 pi^2 / step), which is 5e-7.
_STEP = 1.3
# The largest shift. The sum over all larger shifts is approximated by two terms of its power
# series.
_LAST_POLE = 300.0
# Number of squarings of the Gram matrix, which bounds the relative error of its largest eigenvalue
# by 2^-20 / e.
_SQUARINGS = 20


class TokenGraying(nn.Module):
    """Module for token graying, which reduces the condition number of the token matrix.

    All tokens of an image, including [CLS] and registers, form one matrix. The module has no
    parameters and computes in float32 or float64.

    Args:
        kind: "svd" changes singular values, and "dct" changes cosine coefficients.
        exponent: Exponent in (0, 1]. It is applied to the ratio of each value to the largest value.
            1 changes nothing.

    Source: Ji et al., "Always Skip Attention", algorithms 1 and 2. The paper does not state where
    in the block token graying is applied. We apply token graying at the start of the block, so the
    skip connection adds the changed tokens. We chose this place because table 3 of the paper
    reports similar condition numbers before and after the attention. Unlike the paper, we replace
    ratios below the machine epsilon by the machine epsilon, so that the gradients of singular
    matrices are finite.
    """

    def __init__(self, kind: GrayingKind, exponent: float) -> None:
        super().__init__()
        self.kind, self.exponent = kind, exponent

    @classmethod
    def from_config(cls, config: "ViTConfig | TimmConfig") -> "TokenGraying":
        return cls(config.graying, config.graying_exponent)

    def forward(self, x: Tokens) -> Tokens:
        # Probes that compute in float64 need more accuracy than `gray_by_cholesky` has.
        is_fast = x.is_cuda and x.dtype != torch.float64
        by_svd = gray_by_cholesky if is_fast else gray_by_svd
        gray = gray_by_dct if self.kind == "dct" else by_svd
        # PyTorch has no decompositions in bfloat16, and cosines in bfloat16 are not orthogonal.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with disable_autocast(x.device):
            return gray(wide, self.exponent).to(x.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind}, exponent={self.exponent}"


def gray_by_svd(x: Tokens, exponent: float) -> Tokens:
    """Return U diag(s_max (s / s_max)^exponent) V^T for x = U diag(s) V^T.

    The largest singular value does not change, and the condition number is raised to the power
    `exponent`. The cost is cubic in the shorter side of the matrix. Unlike those of
    `torch.linalg.svd`, the gradients are finite for repeated singular values and for singular
    matrices. Second derivatives are not supported. On CUDA, the CPU waits for the decomposition.
    """
    # The decomposition would raise an error for non-finite values. Return NaN for such images
    # instead.
    finite = x.isfinite().all(dim=(1, 2), keepdim=True)
    point = torch.where(finite, x, 0.0).detach()
    u, s, vh = torch.linalg.svd(point, full_matrices=False)
    largest = s[:, :1].clamp_min(torch.finfo(s.dtype).tiny)
    value = (u * (s * _gain(s / largest, exponent))[:, None]) @ vh
    # The second term is 0, and its derivative is the derivative of the result.
    return value + _derivative_along(x - point, (u, s / largest, vh), exponent)


def _derivative_along(
    change: Tokens, svd: tuple[Tensor, Tensor, Tensor], exponent: float
) -> Tokens:
    """Return the derivative of `gray_by_svd` in the direction of `change`.

    Let U diag(s) V^T be the singular value decomposition of the tokens. `gray_by_svd` replaces each
    singular value s by f(s) = s g(s) with a gain g(s). Let dX be `change`, and let M = U^T dX V. In
    the symmetric part of M, the entry i, j is multiplied by (f(s_i) - f(s_j)) / (s_i - s_j). In the
    skew-symmetric part, the entry i, j is multiplied by (f(s_i) + f(s_j)) / (s_i + s_j). Both
    factors are computed without dividing by a difference of singular values. Parts of dX outside
    the span of U or of V are multiplied by the gain.

    Args:
        change: Direction dX, one matrix for each image.
        svd: U, the ratios of all singular values to the largest one, and V^T.
        exponent: Exponent of the graying in (0, 1].

    Source: Noferini, "A formula for the Frechet derivative of a generalized matrix function", 2017,
    rewritten for functions s g(s). We add the derivative with respect to the largest singular
    value, because the gain depends on it.
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
    by_largest_value = (1 - exponent) * ratio**3 * gain / (ratio.square() + _floor(ratio))
    inside = inside + torch.diag_embed(by_largest_value) * core[:, :1, :1]
    rows = (change @ vh.mT - u @ core) * gain[:, None]
    cols = gain[:, :, None] * (u.mT @ change - core @ vh)
    return u @ (inside @ vh + cols) + rows @ vh


def _divided_difference(
    ratio: Float[Tensor, "batch rank"], exponent: float
) -> Float[Tensor, "batch rank rank"]:
    """Return (g(a) - g(b)) / (a^2 - b^2) for each pair of ratios, or g'(a) / (2 a) if a = b.

    A ratio is a singular value divided by the largest one. The gain is g(a) = m^p with m = a^2 +
    floor and p = (exponent - 1) / 2. Likewise, g(b) = n^p with n = b^2 + floor. Here, `floor` is
    the square of the machine epsilon. With L = log(m / n), the result is (m n)^((p - 1) / 2) sinh(p
    L / 2) / sinh(L / 2). This form of the result is also exact if a is close to b.
    """
    power = (exponent - 1) / 2
    logs = (ratio.square() + _floor(ratio)).log()
    distance = (logs[:, :, None] - logs[:, None, :]) / 2
    quotient = torch.where(distance == 0, power, (power * distance).sinh() / distance.sinh())
    return ((power - 1) * (logs[:, :, None] + logs[:, None, :]) / 2).exp() * quotient


def gray_by_dct(x: Tokens, exponent: float) -> Tokens:
    """Reduce the condition number of each token matrix by changing its cosine coefficients.

    Let Z = D_tokens x D_dim^T be the discrete cosine transform of the tokens, and let m = max |Z|.
    The result is the inverse transform of sign(Z) m (|Z| / m)^exponent. The condition number
    decreases if the singular vectors of the token matrix are similar to cosines. For each image,
    the forward pass and the backward pass each need tokens x dim x (tokens + dim) multiplications.
    """
    token_dct, dim_dct = (_halve_dct(size, x) for size in x.shape[1:])
    coefficients = _transform(_transform(x, dim_dct).mT, token_dct)
    largest = coefficients.abs().amax(dim=(1, 2), keepdim=True)
    ratio = coefficients / largest.clamp_min(torch.finfo(x.dtype).tiny)
    gray = coefficients * _gain(ratio, exponent)
    return _transform_back(_transform_back(gray, token_dct).mT, dim_dct)


def _halve_dct(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left halves of the even rows and of the odd rows of the DCT matrix.

    Even rows are symmetric about the middle, and odd rows are antisymmetric. The left halves
    therefore determine the whole matrix.

    Args:
        size: Number of rows and columns of the DCT matrix.
        like: Tensor whose dtype and device the result has.
    """
    matrix = dct_matrix(size, like=like)
    return matrix[0::2, : (size + 1) // 2], matrix[1::2, : size // 2]


def _transform(x: Rows, halves: tuple[Tensor, Tensor]) -> Rows:
    """Return the DCT coefficients of each row of `x`.

    Coefficients with even indices come first, followed by coefficients with odd indices. Each row
    is folded in the middle, which halves the number of multiplications.

    Args:
        x: The rows to transform.
        halves: Result of `_halve_dct`, the left halves of the even rows and the odd rows of the DCT
            matrix.
    """
    even, odd = halves
    half, rest = odd.shape[1], even.shape[1]
    front, middle, back = x[..., :half], x[..., half:rest], x[..., rest:].flip(-1)
    sums = torch.cat([front + back, middle], dim=-1)
    return torch.cat([sums @ even.mT, (front - back) @ odd.mT], dim=-1)


def _transform_back(coefficients: Rows, halves: tuple[Tensor, Tensor]) -> Rows:
    """Invert `_transform`: return the rows whose DCT coefficients are given."""
    even, odd = halves
    half = odd.shape[1]
    sums = coefficients[..., : len(even)] @ even
    differences = coefficients[..., len(even) :] @ odd
    front, back = sums[..., :half] + differences, sums[..., :half] - differences
    return torch.cat([front, sums[..., half:], back.flip(-1)], dim=-1)


def dct_matrix(size: int, *, like: Tensor) -> Float[Tensor, "{size} {size}"]:
    """Return the orthonormal DCT-II matrix, whose rows are cosines of increasing frequency.

    The entry in row k and column n is sqrt(2 / size) cos(pi k (2 n + 1) / (2 size)). Row 0 is
    divided by sqrt(2). The matrix has the dtype and device of `like`.
    """
    number = torch.arange(size, device=like.device)
    # Subtract full rotations while the angles are integers. In float32, four digits would be lost.
    quarters = number[:, None] * (2 * number + 1) % (4 * size)
    rows = (quarters.to(like.dtype) * (math.pi / (2 * size))).cos() * math.sqrt(2 / size)
    return torch.where(number[:, None] == 0, 1 / math.sqrt(size), rows)


def _gain(ratio: Tensor, exponent: float) -> Tensor:
    """Return the factor |ratio|^(exponent - 1), bounded for ratios below the machine epsilon.

    Each entry of `ratio` is a singular value, or a cosine coefficient, divided by the largest one.
    """
    return (ratio.square() + _floor(ratio)).pow((exponent - 1) / 2)


def _floor(ratio: Tensor) -> float:
    return torch.finfo(ratio.dtype).eps ** 2


def gray_by_cholesky(x: Matrix, exponent: float) -> Matrix:
    """Return U diag(s_max (s / s_max)^exponent) V^T for x = U diag(s) V^T without an SVD.

    Let G = x^T x / s_max^2. The result is x G^((exponent - 1) / 2). The power of G is an integral
    over t of weighted inverses of G + t I. The integral is approximated by a sum of about thirty
    weighted inverses, which are computed from Cholesky factors. The eigenvalues of G are squares of
    singular values, so G is computed in float64. Errors are below 1e-5 times the largest singular
    value. Singular values below 1e-6 times the largest one are increased too little.

    The backward pass differentiates the sum, so it never divides by a difference of singular
    values. The backward pass recomputes all intermediate values. Second derivatives are not
    supported. Let n be the shorter side of the matrix. The cost is about thirty Cholesky
    factorisations and inversions of n x n matrices. The memory is a few times 8 x batch x n^2
    bytes.

    Args:
        x: One matrix for each image.
        exponent: Exponent in (0, 1].

    Source: equation 5.18 of Higham, "Functions of matrices", 2008. We integrate over log t by the
    trapezoidal rule.
    """
    if exponent == 1:
        return x
    if x.shape[1] < x.shape[2]:
        return gray_by_cholesky(x.mT, exponent).mT
    return _GrayByCholesky.apply(x, exponent)


class _GrayByCholesky(torch.autograd.Function):
    """Autograd function that computes `gray_by_cholesky` for tall matrices."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, exponent: float) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.exponent = exponent
        with disable_autocast(tokens.device):
            x = tokens.double()
            gram, _, _ = _scale_gram(x)
            identity, poles, constant, slope = _expand_power((1 - exponent) / 2, gram)
            power = constant * identity - slope * gram
            for shift, weight in poles:
                power += weight * _inverse(gram + shift * identity)
            return (x @ power).to(tokens.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient with respect to the tokens.

        The result of the forward pass is a weighted sum of terms x R with R = (x^T x + t I)^-1. For
        an incoming gradient g, a term x R contributes g R - x R (x^T g + g^T x) R. The forward pass
        divides x^T x by its largest eigenvalue. The derivative of the largest eigenvalue is the
        projector onto its eigenvectors.
        """
        (tokens,), exponent = ctx.saved_tensors, ctx.exponent
        with disable_autocast(tokens.device):
            x, gradient = tokens.double(), gradients[0].double()
            gram, largest, projector = _scale_gram(x)
            identity, poles, constant, slope = _expand_power((1 - exponent) / 2, gram)
            unit = x / largest.sqrt()
            cross = unit.mT @ gradient
            cross = cross + cross.mT
            power, change = constant * identity - slope * gram, slope * cross
            for shift, weight in poles:
                inverse = _inverse(gram + shift * identity)
                power += weight * inverse
                change += weight * (inverse @ cross @ inverse)
            with_fixed_scale = gradient @ power - unit @ change
            share = (gradient * (unit @ power)).sum(dim=(1, 2), keepdim=True)
            by_scale = (1 - exponent) * share * (unit @ projector)
            return (with_fixed_scale + by_scale).to(tokens.dtype), None


def _scale_gram(x: Matrix) -> tuple[Square, Float[Tensor, "batch 1 1"], Square]:
    """Divide the Gram matrix x^T x by its largest eigenvalue.

    Returns:
        The scaled Gram matrix, the largest eigenvalue, and the projector onto the eigenvectors of
        this eigenvalue. The projector is a high power of x^T x, divided by its trace.
    """
    gram = x.mT @ x
    projector = _normalise_trace(gram)
    for _ in range(_SQUARINGS):
        projector = _normalise_trace(projector @ projector)
    largest = (gram * projector).sum(dim=(1, 2), keepdim=True)
    largest = largest.clamp_min(torch.finfo(gram.dtype).tiny)
    return gram / largest, largest, projector


def _inverse(matrix: Square) -> Square:
    """Invert a positive definite matrix."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    lower = torch.linalg.cholesky_ex(matrix).L
    root = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return root.mT @ root


def _normalise_trace(matrix: Square) -> Square:
    trace = matrix.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    return matrix / trace.clamp_min(torch.finfo(matrix.dtype).tiny)


def _expand_power(
    power: float, like: Square
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], float, float]:
    """Return the terms of a sum that approximates M^-power for symmetric matrices M.

    M has the size of `like`, and its eigenvalues l are at most 1. The terms are a constant c, a
    slope d, and pairs of a shift t and a weight w. For each eigenvalue, l^-power is approximated by
    c - d l plus the sum of w / (l + t) over all pairs. The exact sum has infinitely many shifts,
    which form a geometric sequence. The smallest shifts are merged into one, with the sum of their
    weights and their mean position. The sum over the largest shifts is replaced by c - d l, the
    first two terms of its power series.

    Returns:
        The identity matrix with the size and dtype of `like`, the pairs (t, w), c and d.
    """
    first = 4 * like.shape[-1] * torch.finfo(like.dtype).eps
    count = 1 + math.ceil(math.log(_LAST_POLE / first) / _STEP)
    factor = _STEP * math.sin(math.pi * power) / math.pi
    # Create the numbers on the device, because a copy from the CPU would wait for the device.
    number = torch.arange(count, dtype=like.dtype, device=like.device)
    shifts = first * (_STEP * number).exp()
    weights = factor * shifts ** (1 - power)
    sums, moments = (_geometric_sum(order - power) for order in (1, 2))
    is_first = number == 0
    shifts = torch.where(is_first, shifts * (moments / sums), shifts)
    weights = torch.where(is_first, weights * sums, weights)
    after = first * math.exp(_STEP * count)
    constant, slope = (
        factor * after ** (-order - power) * _geometric_sum(order + power) for order in (0, 1)
    )
    identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return identity, list(zip(shifts, weights, strict=True)), constant, slope


def _geometric_sum(rate: float) -> float:
    """Return the sum of exp(-n * rate * _STEP) over all integers n >= 0."""
    return -1 / math.expm1(-rate * _STEP)
