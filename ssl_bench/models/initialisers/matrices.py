"""Random matrices of initialisers as pure functions of their sizes and a generator."""

from collections.abc import Callable

import scipy.linalg
import torch
from jaxtyping import Float, Float64
from torch import Generator, Tensor

DEFAULT_STD = 0.02
# Keeps the factors of a zero matrix zero instead of 0 / 0.
TINY = 1e-300


def truncated_normal(
    rows: int, cols: int, generator: Generator, std: float = DEFAULT_STD
) -> Float64[Tensor, "{rows} {cols}"]:
    """Normal, cut at -2 and 2 as in official DINO: absolute bounds, which 0.02 never reaches."""
    weights = torch.empty(rows, cols, dtype=torch.float64)
    return torch.nn.init.trunc_normal_(weights, std=std, generator=generator)


def xavier_uniform(rows: int, cols: int, generator: Generator) -> Float64[Tensor, "{rows} {cols}"]:
    """Uniform between -b and b, b = sqrt(6 / (rows + cols))."""
    return _uniform(rows, cols, generator) * (2 / (rows + cols)) ** 0.5


def noisy_identity_heads(
    dim: int, num_heads: int, generator: Generator, *, alpha: float, beta: float, noise: str
) -> tuple[Float64[Tensor, "dim dim"], Float64[Tensor, "dim dim"]]:
    """W_Q and W_K whose product is, per head, the best rank-d_h version of alpha Z + beta I.

    Every head has a Z of its own. Cost: cubic in dim, once a head.
    """
    head_dim = dim // num_heads
    queries, keys = [], []
    for _ in range(num_heads):
        product = alpha * noise_matrix(dim, generator, noise)
        product += beta * torch.eye(dim, dtype=product.dtype)
        query, key = balanced_factors(product, head_dim)
        queries.append(query)
        keys.append(key)
    return torch.cat(queries, dim=1), torch.cat(keys, dim=1)


def balanced_factors(
    matrix: Float64[Tensor, "dim dim"], rank: int
) -> tuple[Float64[Tensor, "dim {rank}"], Float64[Tensor, "dim {rank}"]]:
    """(U sqrt(S), V sqrt(S)) of the `rank` largest singular values of U S V^T.

    From the largest eigenvectors of M^T M: their product is as exact as that of the full SVD, and 8
    times faster at dim 384, rank 64.
    """
    dim = len(matrix)
    gram = (matrix.T @ matrix).numpy()
    squares, right = scipy.linalg.eigh(gram, subset_by_index=[dim - rank, dim - 1])
    roots = torch.from_numpy(squares).clamp(min=TINY) ** 0.25
    right = torch.from_numpy(right)
    return matrix @ right / roots, right * roots


def uniform_orthogonal(
    rows: int, cols: int, generator: Generator, *, gain: bool
) -> Float64[Tensor, "{rows} {cols}"]:
    """A Haar-distributed semi-orthogonal matrix, scaled by max(sqrt(cols / rows), 1) if asked.

    Source: Martens et al., "Rapid training of deep neural networks without skip connections or
    normalization layers", https://arxiv.org/abs/2110.01765 (SUO). rows is the input width here.
    """
    tall = normal(max(rows, cols), min(rows, cols), generator)
    basis, upper = torch.linalg.qr(tall)
    # Without the signs the distribution would depend on how QR chooses them.
    basis = basis * upper.diagonal().sign()
    weights = basis if rows >= cols else basis.T
    return weights * (max((cols / rows) ** 0.5, 1.0) if gain else 1.0)


def normal(rows: int, cols: int, generator: Generator) -> Float[Tensor, "{rows} {cols}"]:
    return torch.randn(rows, cols, generator=generator, dtype=torch.float64)


def _uniform(rows: int, cols: int, generator: Generator) -> Float[Tensor, "{rows} {cols}"]:
    unit = torch.rand(rows, cols, generator=generator, dtype=torch.float64)
    return (2 * unit - 1) * 3**0.5


_NOISES: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "normal": normal,
    "uniform": _uniform,
}


def noise_matrix(dim: int, generator: Generator, noise: str) -> Float[Tensor, "{dim} {dim}"]:
    return _NOISES[noise](dim, dim, generator) / dim**0.5
