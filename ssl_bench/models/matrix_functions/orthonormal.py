"""Orthonormal bases of the columns of many matrices."""

import torch
from jaxtyping import Float
from torch import Tensor

Columns = Float[Tensor, "*batch rows cols"]


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
    for _ in range(2):
        basis = _one_round(basis)
    return basis.to(m.dtype)


def _one_round(m: Columns) -> Columns:
    gram = m.mT @ m
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    limits = torch.finfo(m.dtype)
    shift = (m.shape[-1] * limits.eps * trace).clamp_min(limits.tiny)
    gram = gram + torch.diag_embed(shift[..., None].expand(*shift.shape, m.shape[-1]))
    upper = torch.linalg.cholesky_ex(gram, upper=True).L
    return torch.linalg.solve_triangular(upper, m, upper=True, left=False)
