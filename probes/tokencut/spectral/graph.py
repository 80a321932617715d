"""Thresholded similarity graphs of the tokens of an image."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64

from ssl_bench.errors import DataError


@dataclass(frozen=True)
class Graph:
    """The weights A = eps 1 1^T + scale * links of one image.

    Attributes:
        links: Symmetric; 1 (or nearly the cosine) where two tokens are linked, 0 elsewhere.
        degrees: Row sums of A, the diagonal included.
    """

    links: Float32[np.ndarray, "tokens tokens"]
    degrees: Float64[np.ndarray, " tokens"]
    scale: float
    eps: float

    def normalised_product(
        self, vector: Float64[np.ndarray, " tokens"], *, exact: bool = False
    ) -> Float64[np.ndarray, " tokens"]:
        """D^-1/2 A D^-1/2 times a vector; the links are summed in float32, in float64 if exact."""
        roots = np.sqrt(self.degrees)
        scaled = vector / roots
        linked = self._product64(scaled) if exact else self.links @ scaled.astype(np.float32)
        return (self.scale * linked + self.eps * scaled.sum()) / roots

    def is_uniform(self) -> bool:
        """Whether all tokens are linked or none, so that no partition is better than another."""
        num_tokens = len(self.degrees)
        zero = self.eps * num_tokens
        alone = zero + 1 - self.eps
        return any(bool((abs(self.degrees - d) < 1e-6).all()) for d in (num_tokens, alone, zero))

    def trivial_eigenvector(self) -> Float64[np.ndarray, " tokens"]:
        """The eigenvector of the normalised graph that is known beforehand, of unit length."""
        return np.sqrt(self.degrees / self.degrees.sum())

    def isolated(self, tokens: Bool[np.ndarray, " tokens"]) -> "Graph":
        """The graph in which some tokens are linked to nothing, as if their features were zero."""
        links = self.links * ~tokens
        links[tokens] = 0
        return Graph.of(links, self.scale, self.eps)

    @classmethod
    def of(cls, links: Float32[np.ndarray, "tokens tokens"], scale: float, eps: float) -> "Graph":
        """A graph with the degrees that its links make."""
        degrees = eps * len(links) + scale * links.sum(1, dtype=np.float64)
        return cls(links, degrees, scale, eps)

    def _product64(self, vector: Float64[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
        # In slices: a float64 copy of all links would triple the memory.
        starts = range(0, len(vector), 128)
        return np.concatenate([self.links[i : i + 128].astype(np.float64) @ vector for i in starts])


def similarity_graph(
    features: Float32[np.ndarray, "tokens dim"], *, tau: float, eps: float, weighted: bool = False
) -> Graph:
    """Link tokens whose cosine similarity exceeds `tau`, themselves too; other pairs weigh `eps`.

    Args:
        features: One token a row. The cosines of a zero row are 0, also with itself.
        tau: In [-1, 1]; compared strictly, in float32.
        eps: Keeps the graph connected.
        weighted: Links weigh their cosine instead of 1.

    Raises:
        DataError: a token is NaN or infinite.
    """
    links = cosines(features)
    # Exactly, because the cosine of a token with itself may round to less than 1.
    np.fill_diagonal(links, features.any(1))
    if weighted:
        links = np.where(links > tau, links - np.float32(eps), np.float32(0))
        return Graph.of(links, scale=1.0, eps=eps)
    np.greater(links, tau, out=links, casting="unsafe")
    return Graph.of(links, scale=1 - eps, eps=eps)


def cosines(
    features: Float32[np.ndarray, "tokens dim"],
) -> Float32[np.ndarray, "tokens tokens"]:
    """Of every token with every other.

    Raises:
        DataError: a token is NaN or infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("td,td->t", features, features))
    num_broken = int((~np.isfinite(norms)).sum())
    if num_broken:
        raise DataError(f"features must be finite, {num_broken} of {len(norms)} tokens are not")
    unit = features / np.maximum(norms, np.float32(1e-12))[:, None]
    return unit @ unit.T
