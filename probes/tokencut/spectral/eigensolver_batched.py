"""The second eigenvectors of many graphs at once, for devices."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from probes.tokencut.spectral.eigensolver import (
    ACCEPTED_ANGLE,
    DENSE_TOKENS,
    FiedlerVector,
    second_eigenvector,
)
from ssl_bench.errors import DataError
from ssl_bench.system.transfers import fetched, sent

Tau = float | Float[Tensor, " graphs"]
"""Of all graphs, or of each."""
BlockProduct = Callable[[Tensor], Tensor]

_WIDTH = 2
# Largest error of a product in float32 that was seen on graphs of 196 to 4,800 tokens.
_ROUNDING = 2e-7


@dataclass(frozen=True)
class SecondEigenvectors:
    """As `probes.tokencut.spectral.eigensolver.FiedlerVector`, for graphs padded to one size.

    Attributes:
        vectors: 0 at tokens that are not valid.
        certificates: Bounds on the angle in radians; a large one means more steps are needed.
    """

    vectors: Float64[Tensor, "graphs tokens"]
    eigenvalues: Float64[Tensor, " graphs"]
    gaps: Float64[Tensor, " graphs"]
    certificates: Float64[Tensor, " graphs"]


def second_eigenvectors(
    features: Float[Tensor, "graphs tokens dim"],
    valid: Bool[Tensor, "graphs tokens"],
    *,
    tau: Tau,
    eps: float,
    steps: int = 24,
) -> SecondEigenvectors:
    """Second eigenvectors of the normalised cut of several images' similarity graphs.

    Block Lanczos with two start vectors and a fixed number of steps: no graph waits for a test on
    the host. Sums over links in float32, everything else in float64. Memory: 4 tokens^2 bytes a
    graph. Graphs need more than 2 * `steps` valid tokens.

    Args:
        features: Tokens of different images, padded to the same number.
        valid: False at padding, which is left out of the graphs.
        tau: As in `probes.tokencut.spectral.graph.similarity_graph`.
        eps: As in `probes.tokencut.spectral.graph.similarity_graph`.
        steps: Each costs one pass over the links.

    Raises:
        DataError: a valid token is NaN or infinite.
    """
    krylov = krylov_space(features, valid, tau=tau, eps=eps, steps=steps)
    basis, projection, inverse_roots = krylov.basis, krylov.projection, krylov.inverse_roots
    # The host waits once for both; graphs of what is not finite are finite, and of no use.
    projection, are_finite = fetched([projection, krylov.are_finite])
    if not are_finite:
        raise DataError("features must be finite, some tokens are not")
    values, weights, residual = (sent(x, basis.device) for x in _last_ritz_pair(projection))
    found = torch.einsum("gtk,gk->gt", basis[..., : weights.shape[-1]], weights)
    gaps = values[:, 1] - values[:, 0]
    vectors = inverse_roots * found
    return SecondEigenvectors(
        vectors=vectors * _sign_of_largest(vectors),
        eigenvalues=1 - values[:, 1],
        gaps=gaps,
        certificates=(residual.clamp(min=_ROUNDING) / gaps).clamp(max=torch.pi / 2),
    )


@dataclass(frozen=True)
class KrylovSpace:
    """What block Lanczos leaves on the device; see `second_eigenvectors`.

    Attributes:
        basis: Orthonormal, without the trivial vector.
        projection: The product's lower band on it.
        inverse_roots: Of the degrees, 0 at tokens that are not valid.
        are_finite: Whether all valid tokens are.
    """

    basis: Float64[Tensor, "graphs tokens vectors"]
    projection: Float64[Tensor, "graphs rows vectors"]
    inverse_roots: Float64[Tensor, "graphs tokens"]
    are_finite: Bool[Tensor, ""]


def krylov_space(
    features: Float[Tensor, "graphs tokens dim"],
    valid: Bool[Tensor, "graphs tokens"],
    *,
    tau: Tau,
    eps: float,
    steps: int = 24,
) -> KrylovSpace:
    """The part of `second_eigenvectors` before the host's, for which nobody waits."""
    norms = features.float().norm(dim=-1, keepdim=True)
    links = _links(features, norms, valid, tau)
    # Exact, for they are ones; summed as float64 they would be copied first.
    counts = links.sum(-1).double()
    num_tokens = valid.sum(-1, keepdim=True)
    degrees = eps * num_tokens + (1 - eps) * counts
    inverse_roots = torch.where(valid, degrees.rsqrt(), 0)
    trivial = F.normalize(torch.where(valid, degrees.sqrt(), 0), dim=-1)

    def product(
        block: Float64[Tensor, "graphs tokens width"],
    ) -> Float64[Tensor, "graphs tokens width"]:
        scaled = inverse_roots[..., None] * block
        linked = torch.bmm(links, scaled.float()).double()
        everywhere = eps * scaled.sum(1, keepdim=True)
        return inverse_roots[..., None] * ((1 - eps) * linked + everywhere)

    basis, projection = _krylov_space(product, trivial, steps)
    are_finite = (norms[..., 0].isfinite() | ~valid).all()
    return KrylovSpace(basis, projection, inverse_roots, are_finite)


def certified_batch(
    tokens: Float[Tensor, "graphs tokens dim"],
    *,
    tau: Tau,
    eps: float,
    links_at_once: int = 2**29,
) -> list[FiedlerVector | None]:
    """Graphs of one size on their device; None where their angle is not certified.

    None for all small graphs, whose dense decomposition is the faster way.

    Args:
        tokens: As in `second_eigenvectors`.
        tau: As in `second_eigenvectors`.
        eps: As in `second_eigenvectors`.
        links_at_once: Pairs of tokens, over all graphs, whose similarity is kept together; four
            bytes each.
    """
    if tokens.shape[1] <= DENSE_TOKENS:
        # Too few for the steps: directions that do not exist would pass for eigenvectors.
        return [None] * len(tokens)
    at_once = max(1, links_at_once // tokens.shape[1] ** 2)
    parts = tokens.split(at_once)
    taus = tau.split(at_once) if isinstance(tau, Tensor) else [tau] * len(parts)
    return [
        found
        for part, of_part in zip(parts, taus, strict=True)
        for found in _certified(part, tau=of_part, eps=eps)
    ]


def _certified(
    tokens: Float[Tensor, "graphs tokens dim"], *, tau: Tau, eps: float
) -> list[FiedlerVector | None]:
    valid = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    found = second_eigenvectors(tokens, valid, tau=tau, eps=eps)
    vectors, *scalars = fetched([found.vectors, found.eigenvalues, found.gaps, found.certificates])
    (eigenvalues, gaps, angles), vectors = (x.tolist() for x in scalars), vectors.numpy()
    return [
        FiedlerVector(vectors[i], eigenvalues[i], gaps[i], angles[i], degenerate=False)
        if angles[i] < ACCEPTED_ANGLE
        else None
        for i in range(len(tokens))
    ]


def solve_batch(
    tokens: Float[Tensor, "graphs tokens dim"],
    *,
    tau: Tau,
    eps: float,
    each: Callable[..., Iterable[FiedlerVector]] = map,
) -> list[FiedlerVector]:
    """Graphs of one size on their device; what that does not certify is solved on the host.

    Args:
        tokens: As in `second_eigenvectors`.
        tau: As in `second_eigenvectors`.
        eps: As in `second_eigenvectors`.
        each: Maps over the graphs on the host, such as `GraphPool.map`.
    """

    def finished(found: tuple[Tensor, float | Tensor, FiedlerVector | None]) -> FiedlerVector:
        graph, own, certified = found
        if certified is not None:
            return certified
        return second_eigenvector(graph.float().cpu().numpy(), tau=float(own), eps=eps)

    certified = certified_batch(tokens, tau=tau, eps=eps)
    taus = [*tau] if isinstance(tau, Tensor) else [tau] * len(tokens)
    return list(each(finished, zip(tokens, taus, certified, strict=True)))


def _links(
    features: Float[Tensor, "graphs tokens dim"],
    norms: Float32[Tensor, "graphs tokens 1"],
    valid: Bool[Tensor, "graphs tokens"],
    tau: Tau,
) -> Float32[Tensor, "graphs tokens tokens"]:
    unit = (features.float() / norms.clamp(min=1e-12)).masked_fill(~valid[..., None], 0)
    links = torch.bmm(unit, unit.mT)
    links.diagonal(dim1=1, dim2=2).copy_(valid & (norms[..., 0] > 0))
    if not isinstance(tau, Tensor) and tau >= 0:
        return links.gt_(tau)
    least = tau[:, None, None] if isinstance(tau, Tensor) else tau
    return links.gt_(least).mul_(valid[:, None] & valid[..., None])


def _krylov_space(
    product: BlockProduct, trivial: Float64[Tensor, "graphs tokens"], steps: int
) -> tuple[Float64[Tensor, "graphs tokens vectors"], Float64[Tensor, "graphs rows vectors"]]:
    """Orthonormal basis without the trivial vector, and the product's lower band on it."""
    num_graphs, num_tokens = trivial.shape
    size = _WIDTH * steps
    basis = trivial.new_zeros(num_graphs, num_tokens, 1 + size + _WIDTH)
    projection = trivial.new_zeros(num_graphs, size + _WIDTH, size)
    basis[..., 0] = trivial
    start = torch.randn(num_tokens, _WIDTH, generator=torch.Generator().manual_seed(0))
    start = sent(start, trivial.device).to(trivial.dtype) * (trivial != 0)[..., None]
    _append_block(basis, 1, start)
    for first in range(0, size, _WIDTH):
        block = product(basis[..., 1 + first : 1 + first + _WIDTH])
        inside = basis[..., 1 + first : 1 + first + _WIDTH].mT @ block
        projection[:, first : first + _WIDTH, first : first + _WIDTH] = inside
        triangle = _append_block(basis, 1 + first + _WIDTH, block)
        projection[:, first + _WIDTH : first + 2 * _WIDTH, first : first + _WIDTH] = triangle
    return basis[..., 1 : 1 + size], projection


def _append_block(
    basis: Float64[Tensor, "graphs tokens vectors"],
    first: int,
    block: Float64[Tensor, "graphs tokens width"],
) -> Float64[Tensor, "graphs width width"]:
    """Orthogonalise a block against the first vectors and itself, store it; returns its R."""
    triangle = block.new_zeros(len(block), _WIDTH, _WIDTH)
    for column in range(_WIDTH):
        known = basis[..., : first + column]
        vector = block[..., column : column + 1]
        for _ in range(2):
            inside = known.mT @ vector
            triangle[:, :column, column] += inside[:, first:, 0]
            vector = vector - known @ inside
        length = vector.norm(dim=1)
        length = torch.where(length > 1e-12, length, 0)
        triangle[:, column, column] = length[:, 0]
        basis[..., first + column] = torch.where(length > 0, vector[..., 0] / length, 0)
    return triangle


def _last_ritz_pair(
    projection: Float64[Tensor, "graphs rows vectors"],
) -> tuple[
    Float64[Tensor, "graphs 2"], Float64[Tensor, "graphs vectors"], Float64[Tensor, " graphs"]
]:
    """The two largest Ritz values, rising, the weights of the larger, its residual.

    On the host: batched eigh of small matrices is slow on devices.
    """
    size = projection.shape[-1]
    values, vectors = np.linalg.eigh(projection[:, :size].numpy())
    weights = torch.from_numpy(vectors[..., -1].copy())
    outside = projection[:, size:] @ weights[..., None]
    return torch.from_numpy(values[:, -2:].copy()), weights, outside.norm(dim=(1, 2))


def _sign_of_largest(
    vectors: Float64[Tensor, "graphs tokens"],
) -> Float64[Tensor, "graphs 1"]:
    largest = vectors.abs().argmax(dim=-1, keepdim=True)
    return vectors.gather(1, largest).sign()
