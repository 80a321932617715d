"""Attention without a softmax: linear attention and orthogonal self-attention.

Orthogonal self-attention rotates the values instead of averaging them. On a GPU, its matrix
functions only use operations that process all matrices of a batch at once.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import ViTConfig
from ssl_bench.models.vit import Attention, HeadTokens, Tokens
from ssl_bench.system.device import disable_autocast, float64_device

Basis = Literal["qr", "newton_schulz"]
QueriesKeys = Float[Tensor, "batch heads tokens twice_width"]
Columns = Float[Tensor, "*batch rows cols"]
Square = Float[Tensor, "*batch rank rank"]
Product = Callable[[Tensor, Tensor], Tensor]

NEWTON_SCHULZ_ITERATIONS = 6
_NORM_FLOOR = 1e-7
# Degree of the Taylor polynomial of the exponential function.
_DEGREE = 12
# With more doublings, small numbers in float32 would become 0.
_MAX_DOUBLINGS = 100
# Rotation angles must be exact to this number of binary digits after the point.
_ANGLE_BITS = 7


class LinearAttention(Attention):
    """Attention with weights Q K^T / (sqrt(head width) sqrt(tokens)) instead of a softmax.

    The cost is linear in the number of tokens.

    Source: "Always Skip Attention", section 4. The paper divides by neither square root. The
    division by sqrt(tokens) comes from Saratchandran et al., "Rethinking Softmax" (arXiv
    2410.18613), which the paper cites.
    """

    def mix_values(self, q: HeadTokens, k: HeadTokens, v: HeadTokens) -> HeadTokens:
        return q @ (k.mT @ ((q.shape[2] * q.shape[3]) ** -0.5 * v))


class OrthogonalAttention(nn.Module):
    """Multi-head attention without biases, whose attention matrix A is orthogonal.

    A = exp(S) with the skew-symmetric matrix S = alpha / sqrt(d_v) (Q K^T - K Q^T), where d_v is
    the width of a head. The matrix A is never computed. Let B be a basis of the column space of M =
    [Q, K]. The small matrix s = B^T S B has at most 2 d_v rows. Then the result of the attention is
    A V = V + B (exp(s) - I) B^T V. The cost is linear in the number of tokens.

    Args:
        dim: Width of the tokens.
        num_heads: Number of heads.
        basis: Method that computes B. "qr" is the reduced QR decomposition. "newton_schulz" is six
            iterations that start from M / ||M||_F. In directions with small singular values, the
            basis vectors of "newton_schulz" are shorter than 1. A is then only approximately
            orthogonal.
        alpha: Initial value of alpha, which is a learned parameter of each head.

    Source: Zhang and Martens, "Orthogonal Self-Attention", equations 5-9. Only the gradients with
    the QR decomposition differ from the paper. In the paper, the gradients are divided by the
    diagonal of R, so they explode if M almost lacks full rank. Here, no gradients flow through the
    basis, because exp(S) does not depend on the basis. Components of M outside the span of the
    basis are included to first order, which gives the derivative of the paper without a division.
    """

    def __init__(self, dim: int, num_heads: int, basis: Basis = "qr", alpha: float = 0.1) -> None:
        super().__init__()
        if basis not in get_args(Basis):
            raise ConfigurationError(
                f"basis must be one of {', '.join(get_args(Basis))}, got {basis!r}"
            )
        self.num_heads, self.basis = num_heads, basis
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.alpha = nn.Parameter(torch.full((num_heads,), alpha))

    @classmethod
    def from_config(cls, config: ViTConfig) -> "OrthogonalAttention":
        if config.qkv_bias:
            raise ConfigurationError(
                f"model.attention={config.attention} has no biases",
                hint=("model.qkv_bias=false",),
            )
        basis = "qr" if config.attention == "osa_qr" else "newton_schulz"
        return cls(config.dim, config.num_heads, basis)

    def forward(self, x: Tokens) -> Tokens:
        heads = self._rotate(*self._project(x))
        return self.proj(heads.transpose(1, 2).flatten(2))

    def attention(self, x: Tokens) -> Float[Tensor, "batch heads tokens tokens"]:
        """Compute the orthogonal attention matrix A = exp(S) of each head.

        The cost is quadratic in the number of tokens. `forward` does not call this method.
        """
        queries_keys, values = self._project(x)
        identity = torch.eye(x.shape[1], dtype=values.dtype, device=x.device)
        return self._rotate(queries_keys, identity.expand(*values.shape[:2], -1, -1))

    def _project(self, x: Tokens) -> tuple[QueriesKeys, HeadTokens]:
        """Return M = [Q, K] (queries and keys) and the values V of each head.

        The dtype is float32 or float64.
        """
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        # PyTorch has no decompositions in bfloat16.
        q, k, v = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).permute(2, 0, 3, 1, 4)
        return torch.cat([q, k], dim=-1), v

    def _rotate(self, m: QueriesKeys, v: HeadTokens) -> HeadTokens:
        """Return the product A V of each head without forming the matrix A = exp(S)."""
        with disable_autocast(m.device):
            scale = (self.alpha / math.sqrt(m.shape[-1] // 2))[:, None, None]
            if self.basis == "qr":
                return _rotate_in_span(m, v, scale)
            # V + B (exp(s) - I) B^T V, where exp(s) - I = phi(s) s.
            basis = newton_schulz_basis(m)
            inside = basis.mT @ m
            turned = scale * _turn(inside)
            exponential = phi(turned @ inside.mT)
            return v + basis @ (exponential @ (turned @ (inside.mT @ (basis.mT @ v))))


def _rotate_in_span(m: QueriesKeys, v: HeadTokens, scale: Float[Tensor, "heads 1 1"]) -> HeadTokens:
    """Return A V for A = exp(S), using an orthonormal basis of the column space of M = [Q, K].

    No gradients flow through the basis. Let `outside` be the part of M outside the span of the
    basis. A term with `outside` is added, which is 0 up to rounding but makes the derivative exact.
    With this term, the derivative equals the derivative of exp(S) V = V + M phi(J M^T M) J M^T V.
    Here, phi(X) = (exp(X) - I) X^-1, and J is defined by M J = scale [-K, Q], so that S = M J M^T.

    Args:
        m: Queries and keys of each head, M = [Q, K].
        v: Values V of each head.
        scale: The factor alpha / sqrt(d_v) of S, where d_v is the width of a head.
    """
    basis = orthonormal_basis(m)
    inside = basis.mT @ m
    outside = m - basis @ inside
    turned = scale * _turn(inside)
    exponential = phi(turned @ inside.mT)
    within = basis @ (exponential @ (turned @ (m.mT @ v)))
    across = scale * _turn(outside) @ (inside.mT @ (exponential @ (basis.mT @ v)))
    return v + within + across


def _turn(m: Columns) -> Columns:
    """Return [-K, Q] for M = [Q, K]. The product [-K, Q] M^T is Q K^T - K Q^T."""
    q, k = m.chunk(2, dim=-1)
    return torch.cat([-k, q], dim=-1)


def newton_schulz_basis(
    m: Float[Tensor, "*batch tokens rank"], iterations: int = NEWTON_SCHULZ_ITERATIONS
) -> Float[Tensor, "*batch tokens rank"]:
    """Approximate an orthonormal basis of the columns of M by Newton-Schulz iterations.

    Starting from M / ||M||_F, each iteration replaces M by M (3 I - M^T M) / 2. The singular values
    grow towards 1 and stay in [0, 1]. Each iterate is the starting matrix times a polynomial in M^T
    M. An iteration only updates this polynomial, so its cost does not depend on the number of
    tokens.
    """
    norm = torch.linalg.matrix_norm(m, keepdim=True)
    start = m / (norm + _NORM_FLOOR)
    gram = start.mT @ start
    identity = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    product = step = 1.5 * identity - 0.5 * gram
    for _ in range(iterations - 1):
        gram = step @ gram @ step
        step = 1.5 * identity - 0.5 * gram
        product = product @ step
    return start @ product


def orthonormal_basis(m: Columns) -> Float[Tensor, "*batch rows rank"]:
    """Return an orthonormal basis of a space that contains the columns of `m`, without gradients.

    The method is Householder QR. In float32 on CUDA, `cholesky_basis` is used instead, because
    PyTorch's QR decomposes the matrices of a batch one by one.
    """
    if m.is_cuda and m.dtype == torch.float32:
        return cholesky_basis(m)
    return torch.linalg.qr(m.detach()).Q


@torch.no_grad()
def cholesky_basis(m: Columns) -> Columns:
    """Compute an approximately orthonormal basis of the columns of M by Cholesky QR.

    Each of two rounds replaces M by M R^-1 in float64. Here, R is the Cholesky factor in R^T R =
    M^T M + shift I. All products, Cholesky factors and triangular solves are batched, and the CPU
    does not wait for the GPU. With the shift, singular matrices have a Cholesky factor too. A
    direction whose singular value is at least 1e-7 times the largest one has less than 1e-6 of its
    length outside the basis.

    Source: Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", 2015. The shift
    comes from Fukaya et al., "Shifted Cholesky QR", 2020. Our shift has a smaller factor and is
    used in both rounds.
    """
    basis = m.double()
    limits = torch.finfo(basis.dtype)
    for _ in range(2):
        gram = basis.mT @ basis
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        shift = (m.shape[-1] * limits.eps * trace).clamp_min(limits.tiny)
        gram = gram + torch.diag_embed(shift[..., None].expand(*shift.shape, m.shape[-1]))
        upper = torch.linalg.cholesky_ex(gram, upper=True).L
        basis = torch.linalg.solve_triangular(upper, basis, upper=True, left=False)
    return basis.to(m.dtype)


def phi(skew: Square) -> Square:
    """Return (exp(S) - I) S^-1 for each skew-symmetric matrix S in `skew`.

    For singular S, the result is defined as the sum of S^n / (n + 1)! over n >= 0. A Taylor
    polynomial gives phi(S / 2^n). Then n doublings apply phi(2 X) = phi(X) + phi(X) X phi(X) / 2.
    Since all steps are matrix products, the gradients cost only twice as much as the values. In
    contrast, the gradients of `torch.matrix_exp` need the exponential of a matrix of twice the
    size. In float32 on CUDA and in compiled code, `phi_without_sync` is called instead.
    """
    if skew.dtype == torch.float32 and (skew.is_cuda or torch.compiler.is_compiling()):
        return phi_without_sync(skew)
    doublings = _count_doublings(skew, _MAX_DOUBLINGS)
    small = skew * torch.exp2(-doublings.to(skew.dtype))
    # The CPU waits for this number. Tensors on the meta device, which are used to count FLOPs,
    # have no values.
    count = 0 if skew.is_meta else int(doublings.max())
    return _double(small, doublings, count, torch.matmul, _identity(skew))


def phi_without_sync(skew: Square) -> Square:
    """Compute (exp(S) - I) S^-1 as `phi` does, but never make the CPU wait for the GPU.

    `phi` doubles the argument of a polynomial several times, and reads the number of doublings from
    the GPU. This function always makes the maximum number of doublings and ignores unnecessary
    doublings. The result is bitwise identical to the result of `phi`, unless the norm of S is above
    1e5 in float32 (16 doublings). The norm has no bound, because queries, keys and alpha are
    learned. For norms above 1e5, rounding would change rotation angles by 2^-7 or more. An S with
    such a norm is therefore multiplied by the factor w < 1 that reduces the norm to 1e5, and the
    result is w phi(w S). The product of this result and S is phi(w S) (w S), so phi(S) S + I
    remains a rotation.

    The backward pass treats w as a constant, and recomputes all intermediate values to save memory.
    Second derivatives are not supported.
    """
    return _Phi.apply(skew)


def max_doublings(dtype: torch.dtype) -> int:
    """Return the number of doublings that `phi_without_sync` makes for a dtype.

    It is 16 for float32.
    """
    return -round(math.log2(torch.finfo(dtype).eps)) - _ANGLE_BITS


class _Phi(torch.autograd.Function):
    """Autograd function that computes `phi_without_sync`."""

    @staticmethod
    def forward(ctx: Any, skew: Tensor) -> Tensor:
        ctx.save_for_backward(skew)
        factor, doublings = _choose_scaling(skew)
        small = skew * factor * torch.exp2(-doublings.to(skew.dtype))
        count = max_doublings(skew.dtype)
        return factor * _double(small, doublings, count, torch.matmul, _identity(skew))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient for S: the derivative at S^T in the direction of `gradients`."""
        # The adjoint of the derivative at S is the derivative at S^T.
        skew, gradient = ctx.saved_tensors[0].mT, gradients[0]
        factor, doublings = _choose_scaling(skew)
        identity = _identity(skew).expand_as(skew)
        unit = torch.stack([identity, torch.zeros_like(identity)])
        both = torch.stack([skew, gradient]) * factor * torch.exp2(-doublings.to(skew.dtype))
        with disable_autocast(skew.device):
            count = max_doublings(skew.dtype)
            return factor * _double(both, doublings, count, _product_rule, unit)[1]


def _choose_scaling(
    skew: Square,
) -> tuple[Float[Tensor, "*batch 1 1"], Int64[Tensor, "*batch 1 1"]]:
    """Return the factor and the number of doublings that `phi_without_sync` uses for each matrix S.

    Returns:
        The factor w <= 1, which limits the norm of w S, and the number of doublings for phi(w S).
    """
    count = max_doublings(skew.dtype)
    factor = (_largest_norm(skew.dtype) * 2**count / _norm_bound(skew)).clamp(max=1)
    return factor, _count_doublings(skew, count)


def _product_rule(
    left: Float[Tensor, "2 *batch rank rank"], right: Float[Tensor, "2 *batch rank rank"]
) -> Float[Tensor, "2 *batch rank rank"]:
    """Return the product of two matrices and the derivative of this product, stacked.

    Each argument consists of a matrix and its derivative, stacked along the first axis.
    """
    change = left[1] @ right[0] + left[0] @ right[1]
    return torch.stack([left[0] @ right[0], change])


def _double(
    small: Tensor, doublings: Tensor, count: int, product: Product, identity: Tensor
) -> Tensor:
    """Return phi(2^n X) for each matrix X in `small`, where n is its entry in `doublings`.

    Here, phi(S) = (exp(S) - I) S^-1.

    Args:
        small: Matrices whose norm is small enough for the Taylor polynomial of phi.
        doublings: Number of doublings of each matrix.
        count: Number of iterations, at least the largest number in `doublings`.
        product: Function that multiplies two matrices.
        identity: Identity matrix in the form that `product` expects.
    """
    value = _taylor(small, product, identity)
    for number in range(count):
        is_due = number < doublings
        value = torch.where(is_due, value + product(product(value, small), value) / 2, value)
        small = torch.where(is_due, 2 * small, small)
    return value


def _count_doublings(skew: Square, maximum: int) -> Int64[Tensor, "*batch 1 1"]:
    """Return how often each matrix must be halved until the Taylor polynomial of phi is accurate.

    Here, phi(S) = (exp(S) - I) S^-1. The result is at most `maximum`.
    """
    exponent = torch.log2(_norm_bound(skew) / _largest_norm(skew.dtype)).ceil().nan_to_num(0.0)
    return exponent.clamp(0, maximum).long()


def _norm_bound(skew: Square) -> Float[Tensor, "*batch 1 1"]:
    # The singular values of a skew-symmetric matrix occur in pairs.
    return torch.linalg.matrix_norm(skew.detach(), keepdim=True) / math.sqrt(2)


def _largest_norm(dtype: torch.dtype) -> float:
    """Return the largest norm of a matrix for which `_taylor` is exact up to rounding.

    `_taylor` computes a Taylor polynomial of phi(S) = (exp(S) - I) S^-1.
    """
    return (torch.finfo(dtype).eps * math.factorial(_DEGREE + 1)) ** (1 / (_DEGREE + 1))


def _identity(like: Square) -> Float[Tensor, "rank rank"]:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _taylor(small: Tensor, product: Product, identity: Tensor) -> Tensor:
    """Return the Taylor polynomial of phi: the sum of X^n / (n + 1)! for n < 12."""
    square = product(small, small)
    powers = torch.stack([identity.expand_as(small), small, square, product(square, small)])
    # Create the numbers on the device, because a copy from the CPU would wait for the device.
    numbers = torch.arange(1, _DEGREE + 1, dtype=torch.float64, device=float64_device(small.device))
    coefficients = numbers.cumprod(0).reciprocal().to(small.dtype).to(small.device).view(-1, 4)
    low, middle, high = torch.tensordot(coefficients, powers, dims=1)
    fourth = product(square, square)
    return low + product(fourth, middle + product(fourth, high))
