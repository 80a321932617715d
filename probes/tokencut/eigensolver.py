"""Compute the second eigenvectors of normalised cuts, usually by Lanczos iterations."""

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
_RESIDUAL_TOLERANCE = 1e-7
_REFINEMENT_TOLERANCE = 1e-6
# The dense solver is faster for graphs of at most this many tokens.
_DENSE_TOKENS = 64
_MAX_PRODUCTS = 240
_PRODUCTS_BEFORE_TESTS = 12
_MAX_REFINEMENTS = 4


@dataclass(frozen=True)
class Graph:
    """A graph between the tokens of an image, with the weight matrix A = eps 1 1^T + scale * links.

    In the docstrings of the methods, D is the diagonal matrix of the degrees.

    Attributes:
        links: Symmetric matrix. An entry is 0 for two tokens without a link, and 1 for linked
            tokens. If the links are weighted, the entry of linked tokens is their cosine similarity
            minus eps.
        degrees: Row sums of A, including the diagonal.
        scale: Factor of `links`. It is 1 if the links are weighted, and 1 - eps otherwise.
        eps: Weight of two tokens without a link.
    """

    links: Float32[np.ndarray, "tokens tokens"]
    degrees: Float64[np.ndarray, " tokens"]
    scale: float
    eps: float

    @classmethod
    def from_links(
        cls, links: Float32[np.ndarray, "tokens tokens"], scale: float, eps: float
    ) -> "Graph":
        """Create a graph from its link matrix, and compute the degrees of the tokens."""
        if scale == 1:
            linked = links.sum(1, dtype=np.float64)
        else:
            # float32 counts zeros and ones exactly, and takes a fifth of the time of float64.
            linked = (links @ np.ones(len(links), np.float32)).astype(np.float64)
        return cls(links, eps * len(links) + scale * linked, scale, eps)

    def isolate(self, tokens: Bool[np.ndarray, " tokens"]) -> "Graph":
        """Return a copy of the graph in which some tokens have no links."""
        links = self.links * ~tokens
        links[tokens] = 0
        return Graph.from_links(links, self.scale, self.eps)

    def is_uniform(self) -> bool:
        """Return whether the graph links all pairs of different tokens, or no pair at all.

        In such a graph, all partitions have the same cost.
        """
        num_tokens = len(self.degrees)
        zero = self.eps * num_tokens
        only_itself = zero + 1 - self.eps
        uniform_degrees = (num_tokens, only_itself, zero)
        return any(bool((abs(self.degrees - d) < 1e-6).all()) for d in uniform_degrees)

    def trivial_eigenvector(self) -> Float64[np.ndarray, " tokens"]:
        """Return the unit eigenvector of D^-1/2 A D^-1/2 with the largest eigenvalue, which is 1.

        A is the weight matrix of the graph, and D is the diagonal matrix of the degrees. The
        entries of this eigenvector are proportional to the square roots of the degrees, so no
        solver is needed.
        """
        return np.sqrt(self.degrees / self.degrees.sum())

    def normalised_product(
        self, vector: Float64[np.ndarray, " tokens"], *, exact: bool = False
    ) -> Float64[np.ndarray, " tokens"]:
        """Return D^-1/2 A D^-1/2 times a vector.

        A is the weight matrix of the graph, and D is the diagonal matrix of the degrees. The
        product is computed in float64 if `exact` is true, and otherwise in float32.
        """
        roots = np.sqrt(self.degrees)
        scaled = vector / roots
        if exact:
            # The links are converted in slices, because a float64 copy would triple the memory.
            slices = (self.links[i : i + 64] for i in range(0, len(scaled), 64))
            linked = np.concatenate([part.astype(np.float64) @ scaled for part in slices])
        else:
            linked = self.links @ scaled.astype(np.float32)
        return (self.scale * linked + self.eps * scaled.sum()) / roots


def similarity_graph(
    features: Float32[np.ndarray, "tokens dim"], *, tau: float, eps: float, weighted: bool = False
) -> Graph:
    """Return the graph that links tokens whose cosine similarity exceeds a threshold.

    Each token is also linked to itself. A token with zero features has no links at all.

    Args:
        features: Feature of each token.
        tau: The threshold, in [-1, 1]. Cosines are compared with it in float32.
        eps: Weight of each pair without a link. It keeps the graph connected.
        weighted: Whether the weight of a link is the cosine similarity instead of 1.

    Raises:
        DataError: The features of a token are NaN or infinite.
    """
    links = cosine_similarities(features)
    # The cosine of a token with itself may be rounded to less than 1.
    np.fill_diagonal(links, features.any(1))
    if weighted:
        links = np.where(links > tau, links - np.float32(eps), np.float32(0))
        return Graph.from_links(links, scale=1.0, eps=eps)
    np.greater(links, tau, out=links, casting="unsafe")
    return Graph.from_links(links, scale=1 - eps, eps=eps)


def cosine_similarities(
    features: Float32[np.ndarray, "tokens dim"],
) -> Float32[np.ndarray, "tokens tokens"]:
    """Return the cosine similarity of each pair of tokens, also for very small or large norms.

    Raises:
        DataError: The features of a token are NaN or infinite.
    """
    largest = np.abs(features).max(1, initial=0.0, keepdims=True)
    num_broken = int((~np.isfinite(largest)).sum())
    if num_broken:
        raise DataError(
            f"{num_broken} of {len(features)} tokens have features that are NaN or infinite. "
            "Check the features"
        )
    # Scaling by a power of two causes no rounding error, and prevents overflow and underflow of
    # squares.
    scaled = np.ldexp(features, -np.frexp(largest)[1])
    norms = np.sqrt(np.einsum("td,td->t", scaled, scaled))
    unit = scaled / np.maximum(norms, np.float32(1e-12))[:, None]
    return unit @ unit.T


@dataclass(frozen=True)
class FiedlerVector:
    """The second eigenvector of the normalised cut of a graph.

    Attributes:
        vector: The solution y of (D - A) y = lambda D y with the second smallest eigenvalue. A is
            the weight matrix of the graph, and D is the diagonal matrix of its degrees. y^T D y is
            1. The sign is chosen so that the first entry of largest magnitude is positive.
        eigenvalue: lambda_2, in [0, 2].
        gap: lambda_3 - lambda_2. It is 0 if there is no third eigenvalue.
        error_bound: Upper bound of the error: the angle between the computed and the exact D^1/2 y,
            in radians.
        degenerate: Whether the gap is so small that the vector depends on rounding errors.
    """

    vector: Float64[np.ndarray, " tokens"]
    eigenvalue: float
    gap: float
    error_bound: float
    degenerate: bool

    @classmethod
    def from_eigenpair(
        cls,
        graph: Graph,
        vector: Float64[np.ndarray, " tokens"],
        value: float,
        gap: float,
        residual: float,
    ) -> "FiedlerVector":
        """Create a `FiedlerVector` from the second largest eigenvalue of D^-1/2 A D^-1/2.

        A is the weight matrix of the graph, and D is the diagonal matrix of its degrees.

        Args:
            graph: The graph.
            vector: Eigenvector of the eigenvalue.
            value: The eigenvalue, which is 1 - lambda_2.
            gap: lambda_3 - lambda_2.
            residual: Norm of the residual of the eigenpair.
        """
        scaled = vector / np.linalg.norm(vector) / np.sqrt(graph.degrees)
        return cls(
            vector=scaled * np.sign(scaled[np.argmax(abs(scaled))]),
            eigenvalue=1 - value,
            gap=gap,
            error_bound=min(residual / gap, np.pi / 2) if gap > 0 else np.pi / 2,
            degenerate=gap < DEGENERATE_GAP,
        )


def second_eigenvector(
    features: Float32[np.ndarray, "tokens dim"], *, tau: float, eps: float, weighted: bool = False
) -> FiedlerVector:
    """Return the second eigenvector of the normalised cut of a similarity graph between tokens.

    The function needs 4 * tokens^2 bytes of memory in addition to the features. Several graphs can
    be solved in parallel threads.

    Args:
        features: Feature of each token.
        tau: Cosine similarity above which two tokens are linked, in [-1, 1].
        eps: Weight of each pair without a link.
        weighted: Whether the weight of a link is the cosine similarity instead of 1.

    Raises:
        DataError: The features of a token are NaN or infinite.
    """
    return solve(similarity_graph(features, tau=tau, eps=eps, weighted=weighted))


def solve(graph: Graph) -> FiedlerVector:
    """Return the second eigenvector of the normalised cut of a graph.

    The Lanczos method with deflation and full reorthogonalisation usually needs 12 to 60 products
    of the link matrix with a vector. The iteration starts from two vectors, so that it can find a
    double eigenvalue, whose gap is 0. The last product is computed in float64, so the bound on the
    eigenvector's error (`error_bound`) includes the rounding errors of earlier products. If this
    bound is not small enough, `solve_dense` solves the graph again.

    Source: Equation 3 of TokenCut, https://arxiv.org/abs/2202.11539. The band form of the Lanczos
    method is by Ruhe, Mathematics of Computation 33 (1979).
    """
    trivial = graph.trivial_eigenvector()
    if len(trivial) < 3 or graph.is_uniform():
        if len(trivial) < 3:
            # There is no third eigenvalue.
            vector = trivial[::-1] * [1, -1][: len(trivial)]
        else:
            # Every vector that is orthogonal to the trivial one is a solution.
            vector = np.random.default_rng(0).standard_normal(len(trivial))
            vector -= (trivial @ vector) * trivial
            vector /= np.linalg.norm(vector)
        value = float(vector @ graph.normalised_product(vector, exact=True))
        return FiedlerVector.from_eigenpair(graph, vector, value, gap=0.0, residual=0.0)
    if len(trivial) > _DENSE_TOKENS:
        found = _solve_lanczos(graph)
        if found.error_bound < _ACCEPTED_ANGLE:
            return found
    return solve_dense(graph)


def solve_dense(graph: Graph) -> FiedlerVector:
    """Return the second eigenvector of the normalised cut of a graph, computed with LAPACK.

    The time is proportional to tokens^3. The computation takes 24 * tokens^2 bytes of memory.
    """
    roots = np.sqrt(graph.degrees)
    matrix = (graph.scale * graph.links.astype(np.float64) + graph.eps) / np.outer(roots, roots)
    trivial = graph.trivial_eigenvector()
    # This moves the trivial eigenvalue from 1 to -1, the lower end of the spectrum.
    matrix -= 2 * np.outer(trivial, trivial)
    last = len(roots) - 1
    # The type stubs of scipy do not state that the result is a pair of arrays.
    eigenpairs: Any = scipy.linalg.eigh(
        matrix, subset_by_index=[last - 1, last], overwrite_a=True, check_finite=False
    )
    values, vectors = eigenpairs
    value, gap = float(values[1]), float(values[1] - values[0])
    residual = 1e-15 * len(roots)
    return FiedlerVector.from_eigenpair(graph, vectors[:, 1], value, gap, residual)


def _solve_lanczos(graph: Graph) -> FiedlerVector:
    """Return the second eigenvector of the normalised cut of a graph, by Lanczos iterations.

    The iterations compute matrix-vector products in float32. The eigenvector is then refined in
    float64.
    """
    random = np.random.default_rng(0)
    num_tokens = len(graph.degrees)
    limit = min(_MAX_PRODUCTS, num_tokens - 4)
    # Orthonormal rows: the trivial eigenvector, two start vectors, and then the new direction of
    # each product.
    rows = np.empty((64, num_tokens))
    rows[0] = graph.trivial_eigenvector()
    num_rows = 1
    projection = np.zeros((_MAX_PRODUCTS + 2, _MAX_PRODUCTS))

    def append(vector: Float64[np.ndarray, " tokens"]) -> tuple[np.ndarray, float]:
        """Make a vector orthogonal to all earlier rows, and append its direction to `rows`.

        Return the dot products of the vector with the earlier rows, and the length of its
        orthogonal part. If the orthogonal part is almost 0, append a random direction instead, and
        return a length of 0.
        """
        nonlocal rows, num_rows
        products = rows[:num_rows] @ vector
        vector = vector - products @ rows[:num_rows]
        # The first pass leaves rounding errors, which the second pass removes.
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
        # The first row, the trivial eigenvector, is not part of the projection.
        projection[: len(products), count - 1] = [*products[1:], length]
        if count >= _PRODUCTS_BEFORE_TESTS and (count % 2 == 0 or count == limit):
            values, vectors = np.linalg.eigh(projection[:count, :count])
            residual_norm = np.linalg.norm(projection[count : count + 2, :count] @ vectors[:, -1])
            if residual_norm < max(_RESIDUAL_TOLERANCE * float(values[-1] - values[-2]), 1e-10):
                break
    basis = rows[1 : 1 + len(values)]

    def compute_residual(
        vector: Float64[np.ndarray, " tokens"],
    ) -> tuple[np.ndarray, float, np.ndarray]:
        """Return D^-1/2 A D^-1/2 times a unit vector, the Rayleigh quotient, and the residual.

        The residual is zero if the vector is an eigenvector.
        """
        product = graph.normalised_product(vector, exact=True)
        value = float(vector @ product)
        return product, value, product - value * vector

    # Remove the error of the float32 products from the last Ritz vector.
    gap = float(values[-1] - values[-2])
    product, value, residual = compute_residual(vectors[:, -1] @ basis)
    for _ in range(_MAX_REFINEMENTS):
        if np.linalg.norm(residual) < _REFINEMENT_TOLERANCE * gap:
            break
        inside = vectors.T @ (basis @ residual)
        inside[:-1] *= values[:-1] / (values[:-1] - value)
        inside[-1] = 0
        vector = (product - (vectors @ inside) @ basis) / value
        vector /= np.linalg.norm(vector)
        product, value, residual = compute_residual(vector)
    # The product is one more power step, which reduces the part outside the basis.
    return FiedlerVector.from_eigenpair(graph, product, value, gap, float(np.linalg.norm(residual)))


def map_graphs(function: Callable[[T], R], graphs: Iterable[T], *, num_threads: int) -> list[R]:
    """Apply a function to graphs in parallel threads, and return the results in order.

    Within each of these threads, matrix operations (BLAS) run on a single thread. For many small
    graphs, single-threaded matrix operations are faster than parallel ones.
    """
    blas = ThreadpoolController().select(user_api="blas")
    # A BLAS that is built on OpenMP has a limit for each thread, so every thread sets its limit.
    with (
        blas.limit(limits=1),
        ThreadPoolExecutor(num_threads, initializer=lambda: blas.limit(limits=1)) as pool,
    ):
        return list(pool.map(function, graphs))
