"""Second eigenvectors of thresholded similarity graphs, without a dense eigendecomposition."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import scipy.linalg
from jaxtyping import Bool, Float32, Float64
from threadpoolctl import ThreadpoolController

from ssl_bench.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

DEGENERATE_GAP = 1e-5
_ACCEPTED_ANGLE = 1e-5
_CONVERGED = 1e-7
_REFINED = 1e-6
# Below this many tokens the dense solver is the faster one.
_DENSE_TOKENS = 64
_MAX_PRODUCTS = 240
_PRODUCTS_BEFORE_TESTS = 12
_MAX_REFINEMENTS = 4


@dataclass(frozen=True)
class Graph:
    """The weights A = eps 1 1^T + scale * links of one image.

    Attributes:
        links: Symmetric; 1 (nearly the cosine where `scale` is 1) where two tokens are linked, 0
            elsewhere.
        degrees: Row sums of A, the diagonal included.
    """

    links: Float32[np.ndarray, "tokens tokens"]
    degrees: Float64[np.ndarray, " tokens"]
    scale: float
    eps: float

    @classmethod
    def of(cls, links: Float32[np.ndarray, "tokens tokens"], scale: float, eps: float) -> "Graph":
        """A graph with the degrees that its links make."""
        if scale == 1:
            linked = links.sum(1, dtype=np.float64)
        else:
            # Zeros and ones: counted without rounding in float32, at a fifth of the time.
            linked = (links @ np.ones(len(links), np.float32)).astype(np.float64)
        return cls(links, eps * len(links) + scale * linked, scale, eps)

    def isolated(self, tokens: Bool[np.ndarray, " tokens"]) -> "Graph":
        """The graph in which some tokens are linked to nothing, as if their features were zero."""
        links = self.links * ~tokens
        links[tokens] = 0
        return Graph.of(links, self.scale, self.eps)

    def is_uniform(self) -> bool:
        """Whether all tokens are linked or none, so that no partition is better than another."""
        num_tokens = len(self.degrees)
        zero = self.eps * num_tokens
        alone = zero + 1 - self.eps
        return any(bool((abs(self.degrees - d) < 1e-6).all()) for d in (num_tokens, alone, zero))

    def trivial_eigenvector(self) -> Float64[np.ndarray, " tokens"]:
        """The eigenvector of the normalised graph that is known beforehand, of unit length."""
        return np.sqrt(self.degrees / self.degrees.sum())

    def normalised_product(
        self, vector: Float64[np.ndarray, " tokens"], *, exact: bool = False
    ) -> Float64[np.ndarray, " tokens"]:
        """D^-1/2 A D^-1/2 times a vector; the links are summed in float32, in float64 if exact."""
        roots = np.sqrt(self.degrees)
        scaled = vector / roots
        if exact:
            # In slices: a float64 copy of all links would triple the memory.
            slices = (self.links[i : i + 64] for i in range(0, len(scaled), 64))
            linked = np.concatenate([part.astype(np.float64) @ scaled for part in slices])
        else:
            linked = self.links @ scaled.astype(np.float32)
        return (self.scale * linked + self.eps * scaled.sum()) / roots


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


def cosines(features: Float32[np.ndarray, "tokens dim"]) -> Float32[np.ndarray, "tokens tokens"]:
    """Return the cosine of every token with every other, however short or long they are.

    Raises:
        DataError: A token is NaN or infinite.
    """
    largest = np.abs(features).max(1, initial=0.0, keepdims=True)
    num_broken = int((~np.isfinite(largest)).sum())
    if num_broken:
        raise DataError(f"features must be finite, {num_broken} of {len(features)} tokens are not")
    # An exact change, after which no square leaves the range of float32.
    scaled = np.ldexp(features, -np.frexp(largest)[1])
    norms = np.sqrt(np.einsum("td,td->t", scaled, scaled))
    unit = scaled / np.maximum(norms, np.float32(1e-12))[:, None]
    return unit @ unit.T


@dataclass(frozen=True)
class FiedlerVector:
    """Smallest non-trivial solution of (D - A) y = lambda D y.

    Attributes:
        vector: y, of unit length in the metric of D; its first largest entry by magnitude is
            positive.
        eigenvalue: lambda_2, in [0, 2].
        gap: lambda_3 - lambda_2, 0 or more; 0 where there is no lambda_3.
        certificate: Bound on the angle between D^1/2 y and the exact vector, in radians.
        degenerate: The gap is so small that rounding chooses the vector, not the image.
    """

    vector: Float64[np.ndarray, " tokens"]
    eigenvalue: float
    gap: float
    certificate: float
    degenerate: bool

    @classmethod
    def of(
        cls,
        graph: Graph,
        vector: Float64[np.ndarray, " tokens"],
        value: float,
        gap: float,
        residual: float,
    ) -> "FiedlerVector":
        """From an eigenvector and eigenvalue of the normalised graph."""
        scaled = vector / np.linalg.norm(vector) / np.sqrt(graph.degrees)
        return cls(
            vector=scaled * np.sign(scaled[np.argmax(abs(scaled))]),
            eigenvalue=1 - value,
            gap=gap,
            certificate=min(residual / gap, np.pi / 2) if gap > 0 else np.pi / 2,
            degenerate=gap < DEGENERATE_GAP,
        )


def second_eigenvector(
    features: Float32[np.ndarray, "tokens dim"], *, tau: float, eps: float, weighted: bool = False
) -> FiedlerVector:
    """Second eigenvector of the normalised cut of one image's similarity graph.

    See `similarity_graph` for the arguments and the error, `solve` for the method. Memory beyond
    the features: 4 tokens^2 bytes. Runs without the interpreter's lock, one graph a thread.
    """
    return solve(similarity_graph(features, tau=tau, eps=eps, weighted=weighted))


def solve(graph: Graph) -> FiedlerVector:
    """Smallest non-trivial eigenpair of the normalised cut of a graph.

    Deflated Lanczos with full reorthogonalisation. It is started with two vectors, so that a
    double eigenvalue shows as a gap of 0, and ends with a product in float64, so that the
    certificate holds for the graph and not for its rounding. 12 to 60 products with the links are
    usual; what cannot be certified goes to the dense solver, which is cubic.

    Source: equation 3 of TokenCut, https://arxiv.org/abs/2202.11539; the band form of Lanczos
    after Ruhe, Math. Comp. 33 (1979).
    """
    trivial = graph.trivial_eigenvector()
    if len(trivial) < 3 or graph.is_uniform():
        if len(trivial) < 3:
            # No third eigenvalue, so no gap.
            vector = trivial[::-1] * [1, -1][: len(trivial)]
        else:
            # Every vector is right: one that is the same in every run.
            vector = np.random.default_rng(0).standard_normal(len(trivial))
            vector -= (trivial @ vector) * trivial
            vector /= np.linalg.norm(vector)
        value = float(vector @ graph.normalised_product(vector, exact=True))
        return FiedlerVector.of(graph, vector, value, gap=0.0, residual=0.0)
    if len(trivial) > _DENSE_TOKENS:
        found = _solve_lanczos(graph)
        if found.certificate < _ACCEPTED_ANGLE:
            return found
    return solve_dense(graph)


def solve_dense(graph: Graph) -> FiedlerVector:
    """As `solve`, by LAPACK: cubic in tokens, 24 tokens^2 bytes of memory."""
    roots = np.sqrt(graph.degrees)
    matrix = (graph.scale * graph.links.astype(np.float64) + graph.eps) / np.outer(roots, roots)
    trivial = graph.trivial_eigenvector()
    # Moves the trivial eigenvalue from 1 to -1, the other end of the spectrum.
    matrix -= 2 * np.outer(trivial, trivial)
    last = len(roots) - 1
    # Two arrays, which scipy's own types do not say.
    found: Any = scipy.linalg.eigh(
        matrix, subset_by_index=[last - 1, last], overwrite_a=True, check_finite=False
    )
    values, vectors = found
    gap = float(values[1] - values[0])
    return FiedlerVector.of(
        graph, vectors[:, 1], float(values[1]), gap, residual=1e-15 * len(roots)
    )


def _solve_lanczos(graph: Graph) -> FiedlerVector:
    random = np.random.default_rng(0)
    num_tokens = len(graph.degrees)
    limit = min(_MAX_PRODUCTS, num_tokens - 4)
    # Orthonormal: the trivial one, two to start with, then what is new in each product.
    rows = np.empty((64, num_tokens))
    rows[0] = graph.trivial_eigenvector()
    num_rows = 1
    projection = np.zeros((_MAX_PRODUCTS + 2, _MAX_PRODUCTS))

    def append(vector: Float64[np.ndarray, " tokens"]) -> tuple[np.ndarray, float]:
        """Append what is orthogonal to all rows; returns the products with them and its length."""
        nonlocal rows, num_rows
        products = rows[:num_rows] @ vector
        vector = vector - products @ rows[:num_rows]
        # Twice is enough: the first pass leaves rounding of the size of what it removed.
        vector = vector - (rows[:num_rows] @ vector) @ rows[:num_rows]
        length = float(np.linalg.norm(vector))
        if length < 1e-14:
            append(random.standard_normal(num_tokens))
            return products, 0.0
        if num_rows == len(rows):
            rows = np.concatenate([rows, np.empty_like(rows)])
        rows[num_rows] = vector / length
        num_rows += 1
        return products, length

    for _ in range(2):
        append(random.standard_normal(num_tokens))
    values, vectors = np.zeros(1), np.zeros((1, 1))
    for count in range(1, limit + 1):
        products, length = append(graph.normalised_product(rows[count]))
        # The trivial row, the first, is left out.
        projection[: len(products), count - 1] = [*products[1:], length]
        if count >= _PRODUCTS_BEFORE_TESTS and (count % 2 == 0 or count == limit):
            values, vectors = np.linalg.eigh(projection[:count, :count])
            left = np.linalg.norm(projection[count : count + 2, :count] @ vectors[:, -1])
            if left < max(_CONVERGED * float(values[-1] - values[-2]), 1e-10):
                break
    basis = rows[1 : 1 + len(values)]

    def residual_of(vector: Float64[np.ndarray, " tokens"]) -> tuple[np.ndarray, float, np.ndarray]:
        """Product with a unit vector, its Rayleigh quotient, and what the two leave, in float64."""
        product = graph.normalised_product(vector, exact=True)
        value = float(vector @ product)
        return product, value, product - value * vector

    # Remove what the float32 products left in the last Ritz vector.
    gap = float(values[-1] - values[-2])
    product, value, residual = residual_of(vectors[:, -1] @ basis)
    for _ in range(_MAX_REFINEMENTS):
        if np.linalg.norm(residual) < _REFINED * gap:
            break
        inside = vectors.T @ (basis @ residual)
        inside[:-1] *= values[:-1] / (values[:-1] - value)
        inside[-1] = 0
        vector = (product - (vectors @ inside) @ basis) / value
        vector /= np.linalg.norm(vector)
        product, value, residual = residual_of(vector)
    # The product, not the vector: one power step shrinks what lies outside of the basis.
    return FiedlerVector.of(graph, product, value, gap, float(np.linalg.norm(residual)))


def map_graphs(function: Callable[[T], R], graphs: Iterable[T], *, num_threads: int) -> list[R]:
    """The function's values in order, one graph a thread and one thread of BLAS each.

    Many small graphs in parallel are faster than one after the other with a parallel BLAS.
    """
    blas = ThreadpoolController().select(user_api="blas")
    # Each thread for itself too: a BLAS built on OpenMP keeps its setting per thread.
    with (
        blas.limit(limits=1),
        ThreadPoolExecutor(num_threads, initializer=lambda: blas.limit(limits=1)) as pool,
    ):
        return list(pool.map(function, graphs))
