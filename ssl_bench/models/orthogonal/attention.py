"""Orthogonal self-attention: a rotation of the tokens in place of weighted means of them."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.orthogonal.exponential import phi
from ssl_bench.models.precision import without_autocast

Basis = Literal["qr", "newton_schulz"]
Tokens = Float[Tensor, "batch tokens dim"]
HeadTokens = Float[Tensor, "batch heads tokens width"]
Columns = Float[Tensor, "*batch rows cols"]

NEWTON_SCHULZ_ITERATIONS = 6
_NORM_FLOOR = 1e-7


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
        with without_autocast(m.device):
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
