"""Orthogonal self-attention: a rotation of the tokens in place of weighted means of them.

Behind it stand the matrix functions that it needs, in products alone where a GPU computes them.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.system.device import disable_autocast, float64_device

Basis = Literal["qr", "newton_schulz"]
Tokens = Float[Tensor, "batch tokens dim"]
HeadTokens = Float[Tensor, "batch heads tokens width"]
Columns = Float[Tensor, "*batch rows cols"]
Square = Float[Tensor, "*batch rank rank"]
Product = Callable[[Tensor, Tensor], Tensor]

NEWTON_SCHULZ_ITERATIONS = 6
_NORM_FLOOR = 1e-7
# Taylor polynomial of the exponential: three groups of four terms, all but the constant one.
_DEGREE = 12
# More would scale to zero what float32 can hold.
_MOST_DOUBLINGS = 100
# Digits of an angle behind the point, to the base 2, that must be left.
_ANGLE_BITS = 7


class OrthogonalAttention(nn.Module):
    """Multi-head attention with A = exp(S), S = alpha / sqrt(d_v) (Q K^T - K Q^T), no biases.

    S is skew-symmetric, so that A is orthogonal; the tokens x tokens matrix is never formed. With
    B a basis of the columns of M = [Q, K] and s = B^T S B, of at most 2 d_v rows,
    A V = V + B (exp(s) - I) B^T V. Linear in tokens; no order of the tokens matters.

    Args:
        basis: "qr" by reduced QR, "newton_schulz" by six iterations from M / ||M||_F, which leave
            the directions of small singular values short and A less than orthogonal.
        alpha: At the start, in every head; each head learns its own.

    Source: Zhang and Martens, "Orthogonal Self-Attention", equations 5-9. Different here: the
    gradients through QR. The paper's divide by the diagonal of R and explode near rank deficiency;
    exp(S) does not depend on the basis, so that B is held fixed here, and what leaves its span
    counts to first order: the same derivative, finite everywhere.
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

    def forward(self, x: Tokens) -> Tokens:
        queries_keys, values = self._projected(x)
        heads = self._rotated(queries_keys, values)
        return self.proj(heads.transpose(1, 2).flatten(2))

    def attention(self, x: Tokens) -> Float[Tensor, "batch heads tokens tokens"]:
        """The matrix A of every head, for figures and tests; quadratic in tokens."""
        queries_keys, values = self._projected(x)
        identity = torch.eye(x.shape[1], dtype=values.dtype, device=x.device)
        return self._rotated(queries_keys, identity.expand(*values.shape[:2], -1, -1))

    def _projected(
        self, x: Tokens
    ) -> tuple[Float[Tensor, "batch heads tokens twice_width"], HeadTokens]:
        """M = [Q, K] and V of every head, float32 or wider."""
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        # Nothing below is meant for bfloat16, and no decomposition takes it.
        q, k, v = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).permute(2, 0, 3, 1, 4)
        return torch.cat([q, k], dim=-1), v

    def _rotated(
        self, m: Float[Tensor, "batch heads tokens twice_width"], v: HeadTokens
    ) -> HeadTokens:
        """A V without A."""
        with disable_autocast(m.device):
            scale = (self.alpha / math.sqrt(m.shape[-1] // 2))[:, None, None]
            if self.basis == "qr":
                return _rotated_in_span(m, v, scale)
            # V + B (exp(s) - I) B^T V, where exp(s) - I = phi(s) s.
            basis = newton_schulz_basis(m)
            inside = basis.mT @ m
            turned = scale * _turned(inside)
            exponential = phi(turned @ inside.mT)
            return v + basis @ (exponential @ (turned @ (inside.mT @ (basis.mT @ v))))


def _rotated_in_span(
    m: Float[Tensor, "batch heads tokens twice_width"],
    v: HeadTokens,
    scale: Float[Tensor, "heads 1 1"],
) -> HeadTokens:
    """A V with an orthonormal basis of M's columns that is held fixed.

    `outside` is zero but for rounding. Its derivative is not: with it the derivative is that of
    V + M phi(J M^T M) J M^T V = exp(S) V, where S = M J M^T.
    """
    basis = orthonormal_basis(m)
    inside = basis.mT @ m
    outside = m - basis @ inside
    turned = scale * _turned(inside)
    exponential = phi(turned @ inside.mT)
    within = basis @ (exponential @ (turned @ (m.mT @ v)))
    across = scale * _turned(outside) @ (inside.mT @ (exponential @ (basis.mT @ v)))
    return v + within + across


def _turned(
    m: Float[Tensor, "*batch rows twice_width"],
) -> Float[Tensor, "*batch rows twice_width"]:
    """[-K, Q] of [Q, K]: its product with [Q, K]^T is skew-symmetric, Q K^T - K Q^T."""
    q, k = m.chunk(2, dim=-1)
    return torch.cat([-k, q], dim=-1)


def newton_schulz_basis(
    m: Float[Tensor, "*batch tokens rank"], iterations: int = NEWTON_SCHULZ_ITERATIONS
) -> Float[Tensor, "*batch tokens rank"]:
    """M_K of M <- M (3 I - M^T M) / 2 from M / ||M||_F; its singular values lie in [0, 1].

    All iterates are M times a polynomial of M^T M, so that they cost nothing that grows with the
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
    """A basis of a space that holds the columns; no gradients.

    By Householder's QR. In float32 on CUDA it is `cholesky_basis`, because the library takes the
    matrices one by one there.
    """
    if m.is_cuda and m.dtype == torch.float32:
        return cholesky_basis(m)
    return torch.linalg.qr(m.detach()).Q


@torch.no_grad()
def cholesky_basis(m: Columns) -> Columns:
    """Cholesky-QR twice: M R^-1, where R^T R = M^T M + shift I; float64 inside.

    Products, Cholesky factors and triangular solutions, all of them batched, and nothing that the
    host waits for. The shift lets singular matrices pass: what lies within 1e-7 of the largest
    singular value of them, float32's rounding, leaves less than 1e-6 of itself outside of the
    basis; the columns are orthonormal otherwise.

    Source: Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", 2015; the shift
    is that of Fukaya et al., "Shifted Cholesky QR", 2020, with a smaller factor. It is added in
    both rounds here.
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
    """(exp(S) - I) S^-1 = I + S / 2 + S^2 / 6 + ... of skew-symmetric matrices, singular ones too.

    Taylor polynomial of S / 2^n, then n times phi(2 X) = phi(X) + phi(X) X phi(X) / 2. Products
    alone, so that gradients cost twice the values; those of `torch.matrix_exp` take the exponential
    of a matrix of twice the side. In float32 on CUDA, or compiled, it is `phi_without_waiting`.
    """
    if skew.dtype == torch.float32 and (skew.is_cuda or torch.compiler.is_compiling()):
        return phi_without_waiting(skew)
    doublings = _doublings(skew, _MOST_DOUBLINGS)
    small = skew * torch.exp2(-doublings.to(skew.dtype))
    # The host waits for this number. A copy without values, such as FLOPs are counted on, cannot
    # say how many.
    count = 0 if skew.is_meta else int(doublings.max())
    return _doubled(small, doublings, count, torch.matmul, _identity(skew))


def phi_without_waiting(skew: Square) -> Square:
    """The same, bit by bit, without a look at values: as many doublings as are ever needed.

    The norm has no bound, for queries, keys and their factor are learned. Where rounding moves an
    angle by 2^-7 (norms of 1e5 in float32, 16 doublings), it is phi(w S) w, and phi(S) S still a
    rotation less I, that of a norm within this limit. The gradient holds w fixed, computes all
    anew, so that nothing but the matrix is kept for it, and is no further differentiable.
    """
    return _Phi.apply(skew)


def most_doublings(dtype: torch.dtype) -> int:
    """How many doublings `phi_without_waiting` has for all matrices."""
    return -round(math.log2(torch.finfo(dtype).eps)) - _ANGLE_BITS


class _Phi(torch.autograd.Function):
    """`phi_without_waiting` with its gradient."""

    @staticmethod
    def forward(ctx: Any, skew: Tensor) -> Tensor:
        ctx.save_for_backward(skew)
        within, doublings = _limited(skew)
        small = skew * within * torch.exp2(-doublings.to(skew.dtype))
        count = most_doublings(skew.dtype)
        return within * _doubled(small, doublings, count, torch.matmul, _identity(skew))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The adjoint of the derivative at S is the derivative at S^T."""
        skew, gradient = ctx.saved_tensors[0].mT, gradients[0]
        within, doublings = _limited(skew)
        identity = _identity(skew).expand_as(skew)
        one = torch.stack([identity, torch.zeros_like(identity)])
        both = torch.stack([skew, gradient]) * within * torch.exp2(-doublings.to(skew.dtype))
        with disable_autocast(skew.device):
            count = most_doublings(skew.dtype)
            return within * _doubled(both, doublings, count, _product_rule, one)[1]


def _limited(skew: Square) -> tuple[Float[Tensor, "*batch 1 1"], Int64[Tensor, "*batch 1 1"]]:
    """What keeps each matrix within the limit, and how often it is doubled then."""
    count = most_doublings(skew.dtype)
    within = (_largest(skew.dtype) * 2**count / _norm_bound(skew)).clamp(max=1)
    return within, _doublings(skew, count)


def _product_rule(
    left: Float[Tensor, "2 *batch rank rank"], right: Float[Tensor, "2 *batch rank rank"]
) -> Float[Tensor, "2 *batch rank rank"]:
    """The product of two matrices and its derivative, of the matrices and theirs."""
    change = left[1] @ right[0] + left[0] @ right[1]
    return torch.stack([left[0] @ right[0], change])


def _doubled(
    small: Tensor, doublings: Tensor, count: int, product: Product, identity: Tensor
) -> Tensor:
    """Function phi of 2^doublings times what is small, each matrix as often as it says."""
    value = _taylor(small, product, identity)
    for number in range(count):
        is_due = number < doublings
        value = torch.where(is_due, value + product(product(value, small), value) / 2, value)
        small = torch.where(is_due, 2 * small, small)
    return value


def _doublings(skew: Square, most: int) -> Int64[Tensor, "*batch 1 1"]:
    """How often each matrix must be halved until the polynomial is exact to rounding."""
    exponent = torch.log2(_norm_bound(skew) / _largest(skew.dtype)).ceil().nan_to_num(0.0)
    return exponent.clamp(0, most).long()


def _norm_bound(skew: Square) -> Float[Tensor, "*batch 1 1"]:
    # Singular values of a skew-symmetric matrix come in pairs.
    return torch.linalg.matrix_norm(skew.detach(), keepdim=True) / math.sqrt(2)


def _largest(dtype: torch.dtype) -> float:
    """Norm up to which the polynomial is exact to rounding."""
    return (torch.finfo(dtype).eps * math.factorial(_DEGREE + 1)) ** (1 / (_DEGREE + 1))


def _identity(like: Square) -> Float[Tensor, "rank rank"]:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _taylor(small: Tensor, product: Product, identity: Tensor) -> Tensor:
    """Sum of X^n / (n + 1)! for n below the degree, in five products."""
    square = product(small, small)
    powers = torch.stack([identity.expand_as(small), small, square, product(square, small)])
    # Made where they are used: to send them, the host would have to wait for the device.
    numbers = torch.arange(1, _DEGREE + 1, dtype=torch.float64, device=float64_device(small.device))
    coefficients = numbers.cumprod(0).reciprocal().to(small.dtype).to(small.device).view(-1, 4)
    low, middle, high = torch.tensordot(coefficients, powers, dims=1)
    fourth = product(square, square)
    return low + product(fourth, middle + product(fourth, high))
