"""Compute or bound the singular values of a transformer block's Jacobians.

`block_functions` returns the functions to differentiate. `exact_spectra` computes all singular
values of each Jacobian. `lanczos_bounds` bounds the extreme singular values of each Jacobian by
Lanczos iterations.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from probes.conditioning.decomposition import BlockRecord, Function, Tokens, find_mismatch
from probes.spectra import condition_number, singular_values
from ssl_bench.errors import ConfigurationError

_EXACT_LIMIT = 8192
_ROWS_PER_CHUNK = 128
# Maximum probability that one of the two Lanczos bounds does not hold.
_FAILURE = 0.05


def block_functions(record: BlockRecord) -> Mapping[str, tuple[Function, Tokens]]:
    """Return the parts of a block whose Jacobians are scored, as functions of tokens.

    The keys of the result are the names of the functions, which are called facets. Each value is a
    pair of a function and the tokens at which its Jacobian is computed. The functions are:

    - "attention" and "mlp" map the normed tokens to the output of the attention or of the MLP, and
      have the Jacobians K and K-hat in equation 7 of the paper "Cutting the Skip".
    - "attention_skip" is the attention plus the identity, and has the Jacobian K + I in equation 8.
    - "block" is the original block with its norms and skip connections.
    - "dominant" and "perturbation" have the Jacobians B and E of K = B + E in proposition 2. B is
      the derivative with fixed attention matrices. E is the derivative with fixed values. B and E
      are sums over the heads, and contain the scale 1 / sqrt(head width), which the paper omits.

    A facet is left out if the block cannot be split into the parts that the facet needs. The facet
    "block" is left out if calling the block alone does not reproduce its output in the encoder.

    Source: "Cutting the Skip", equations 7, 8 and 10, proposition 2 and appendix A.1.
    """
    functions: dict[str, tuple[Function, Tokens]] = {}
    if not find_mismatch(record.run_block, record.input, record.output):
        functions["block"] = record.run_block, record.input
    parts = record.parts
    if parts is None:
        return functions
    normed = parts.norm1(parts.graying(record.input))
    attention, heads = parts.attention, parts.heads
    functions["attention"] = attention, normed
    functions["attention_skip"] = lambda x: x + attention(x), normed
    functions["mlp"] = parts.mlp, parts.norm2(parts.apply_attention(record.input))
    if heads is not None:
        weights, values = heads.matrices(normed), heads.values(normed)
        functions["dominant"] = lambda x: heads.combine(weights, heads.values(x)), normed
        functions["perturbation"] = lambda x: heads.combine(heads.matrices(x), values), normed
    return functions


@contextmanager
def differentiable_attention() -> Generator[None]:
    """In a `with` statement, disable fused attention, which has no forward-mode derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def exact_jacobian(function: Function, x: Tokens) -> Float64[Tensor, "outputs inputs"]:
    """Return the Jacobian of a function at the tokens `x`, with outputs as rows.

    Outputs and inputs are flattened in row-major order. The computation needs (tokens * dim)^2 * 8
    bytes of memory and one backward pass for each output.
    """
    with differentiable_attention():
        rows = torch.func.jacrev(function, chunk_size=_ROWS_PER_CHUNK)(x)
    return rows.reshape(-1, x.numel())


def exact_spectra(record: BlockRecord) -> dict[str, Float64[Tensor, " values"]]:
    """Return all singular values of each Jacobian of a block.

    The keys of the dictionary are the names of the differentiated parts of the block, such as
    "attention".

    Raises:
        ConfigurationError: The number of tokens times their dimension exceeds 8192.
    """
    tokens, dim = record.input.shape
    if tokens * dim > _EXACT_LIMIT:
        raise ConfigurationError(
            f"probe.protocol=jacobian_exact needs tokens * dim <= {_EXACT_LIMIT}, got {tokens} * "
            f"{dim}. Lower probe.image_size or estimate the singular values",
            hint=("probe.protocol=jacobian_lanczos",),
        )
    return {
        facet: singular_values(exact_jacobian(function, point)).detach().cpu()
        for facet, (function, point) in block_functions(record).items()
    }


def rank_details(values: Float64[Tensor, " values"]) -> dict[str, Any]:
    """Return the rank of a square matrix, and its condition number without zero singular values.

    The condition number without zeros is the ratio of the largest to the smallest nonzero singular
    value. This ratio is useful for singular matrices, whose condition number is infinite. Singular
    values that are 0 up to rounding count as zeros.

    Args:
        values: All singular values of the matrix, in descending order.

    Returns:
        A dictionary with "rank", "size" (number of rows) and "condition_number_of_rank". It is
        stored as details of a score.
    """
    noise = len(values) * torch.finfo(torch.float64).eps * values[0]
    rank = int((values > noise).sum())
    condition = float(values[0] / values[rank - 1]) if rank else 0.0
    return {"rank": rank, "size": len(values), "condition_number_of_rank": condition}


@dataclass(frozen=True)
class SingularValueBounds:
    """Bounds of the largest and smallest singular value of a matrix, from Lanczos iterations.

    Attributes:
        size: Number of rows and of columns of the matrix.
        steps: Number of iterations.
        largest: Lower bound of the largest singular value.
        smallest: Upper bound of the smallest singular value.
        largest_residual: Maximum distance from `largest` to the nearest singular value.
        smallest_residual: Maximum distance from `smallest` to the nearest singular value. It is
            infinite if `smallest` was computed from a given test vector instead of by the
            iterations.
        largest_at_most: Upper bound of the largest singular value. It holds for at least 97.5 % of
            all random start vectors.
        smallest_at_least: Lower bound of the smallest singular value. It holds for at least 97.5 %
            of all random start vectors.
        effective_rank: Effective rank, estimated by quadrature from one start vector.
    """

    size: int
    steps: int
    largest: float
    smallest: float
    largest_residual: float
    smallest_residual: float
    largest_at_most: float
    smallest_at_least: float
    effective_rank: float

    @property
    def condition_number_at_least(self) -> float:
        """Return a lower bound of the condition number of the matrix.

        The lower bound holds for every start vector of the Lanczos iterations. The lower bound is
        infinite if the iterations show that the matrix is singular.
        """
        ends = torch.tensor([self.largest, self.smallest], dtype=torch.float64)
        return float(condition_number(ends, self.size))

    @property
    def condition_number_at_most(self) -> float:
        """Return an upper bound of the condition number of the matrix.

        The upper bound holds for at least 95 % of all random start vectors.
        """
        ends = [self.largest_at_most, self.smallest_at_least]
        return float(condition_number(torch.tensor(ends, dtype=torch.float64), self.size))

    def details(self) -> dict[str, Any]:
        """Return the bounds as a dictionary, which is stored with a score."""
        excluded = ("size", "effective_rank")
        bounds = {name: value for name, value in vars(self).items() if name not in excluded}
        return {"at_most_with_95_percent": self.condition_number_at_most, **bounds}


def lanczos_bounds(record: BlockRecord, *, steps: int, seed: int) -> dict[str, SingularValueBounds]:
    """Bound the smallest and the largest singular value of each Jacobian of a block.

    The keys of the dictionary are the names of the differentiated parts of the block, such as
    "attention". `steps` is the number of Lanczos iterations.
    """
    bounds = {}
    for facet, (function, point) in block_functions(record).items():
        # A LayerNorm removes the mean of each token. If a block begins with a norm and has no skip,
        # its Jacobian therefore maps a constant shift of all channels to zero.
        shift = torch.zeros_like(point)
        shift[0] = 1
        jacobian = jacobian_map(function, point)
        bounds[facet] = bound_singular_values(
            jacobian, steps=steps, seed=seed, test_vector=shift.flatten()
        )
    return bounds


@dataclass(frozen=True)
class LinearMap:
    """A square matrix with `size` rows, given by two functions.

    `apply` multiplies the matrix by a vector, and `apply_transposed` multiplies its transpose by a
    vector.
    """

    size: int
    apply: Function
    apply_transposed: Function


def jacobian_map(function: Function, x: Tokens) -> LinearMap:
    """Return the Jacobian of a function at the tokens `x`, as a linear map of flattened tokens.

    The linear map computes Jacobian-vector and vector-Jacobian products, and never the full matrix.
    """

    def flat_function(vector: Tensor) -> Tensor:
        return function(vector.reshape(x.shape)).flatten()

    point = x.flatten()
    with differentiable_attention():
        pullback = torch.func.vjp(flat_function, point)[1]

    def apply(vector: Tensor) -> Tensor:
        with differentiable_attention():
            return torch.func.jvp(flat_function, (point,), (vector,))[1]

    return LinearMap(point.numel(), apply, lambda vector: pullback(vector)[0])


def bound_singular_values(
    matrix: LinearMap, *, steps: int, seed: int, test_vector: Float64[Tensor, " size"]
) -> SingularValueBounds:
    """Bound the smallest and the largest singular value of a matrix A by Lanczos iterations.

    From a random start vector, k iterations give a bidiagonal k x k matrix B, whose singular values
    lie between the smallest and the largest singular value of A. The condition number of B is
    therefore a lower bound of the condition number of A. The upper bound is finite only if the
    condition number of A is at most about k / 5.

    Args:
        matrix: The matrix A.
        steps: Number of iterations.
        seed: Seed of the start vector, which is uniform on the unit sphere.
        test_vector: A vector w that A may map to zero. ||A w|| / ||w|| is a further upper bound of
            the smallest singular value.

    Source: the bounds are theorem 4.2 of Kuczynski and Wozniakowski, "Estimating the largest
    eigenvalue by the power and Lanczos algorithms with a random start", 1992. Theorem 4.2 is
    applied to A^T A and to ||A||^2 I - A^T A. The effective rank uses the quadrature of Golub and
    Meurant, "Matrices, Moments and Quadrature", 1994.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.size, generator=generator, dtype=torch.float64)
    diagonal, off_diagonal = bidiagonalise(matrix, start.to(test_vector.device), steps)
    bidiagonal = torch.diag(diagonal) + torch.diag(off_diagonal[:-1], 1)
    left, values, right = torch.linalg.svd(bidiagonal)
    residuals = (off_diagonal[-1] * left[-1]).abs()
    test_value = float(matrix.apply(test_vector).norm() / test_vector.norm())
    largest, smallest = float(values[0]), float(values[-1])
    if off_diagonal[-1] == 0:
        # The iterations have covered the whole space, so both values are exact.
        at_most, at_least = largest, smallest
    else:
        log_term = math.log(1.648 * math.sqrt(matrix.size) / (_FAILURE / 2))
        error = (log_term / (2 * len(diagonal) - 1)) ** 2
        at_most, at_least = math.inf, 0.0
        if error < 1:
            square = largest**2 / (1 - error)
            square_at_least = max(0.0, (smallest**2 - error * square) / (1 - error))
            at_most, at_least = math.sqrt(square), math.sqrt(square_at_least)
    return SingularValueBounds(
        size=matrix.size,
        steps=len(values),
        largest=largest,
        smallest=min(smallest, test_value),
        largest_residual=float(residuals[0]),
        smallest_residual=math.inf if test_value < smallest else float(residuals[-1]),
        largest_at_most=at_most,
        smallest_at_least=min(at_least, test_value),
        effective_rank=_estimate_effective_rank(values, right[:, 0].square(), matrix.size),
    )


def _estimate_effective_rank(
    values: Float64[Tensor, " steps"], weights: Float64[Tensor, " steps"], size: int
) -> float:
    """Estimate the effective rank of a matrix from Lanczos iterations, by quadrature.

    The effective rank is exp(log S - T / S), where S is the sum of all singular values s of the
    matrix, and T is the sum of s log s. S and T are estimated by quadrature, with the nodes
    `values` and the weights `weights`. `size` is the number of rows of the matrix.
    """
    total = size * (weights * values).sum()
    if not total > 0:
        return 0.0
    with_logs = -size * (weights * torch.special.entr(values)).sum()
    return float((total.log() - with_logs / total).exp())


def bidiagonalise(
    matrix: LinearMap, start: Float64[Tensor, " size"], steps: int
) -> tuple[Float64[Tensor, " steps"], Float64[Tensor, " steps"]]:
    """Run Golub-Kahan bidiagonalisation with full reorthogonalisation.

    For a matrix A, k steps give A V = U B and A^T U = V B^T + b v e_k^T. B is upper bidiagonal. U
    and V have orthonormal columns. Each step takes two matrix-vector products. All steps together
    take steps^2 * size * 8 operations and store 2 * steps * size numbers.

    Args:
        matrix: The matrix A.
        start: Start vector. Its direction is the first column of V.
        steps: Maximum number of steps.

    Returns:
        The diagonal of B, and the entries above the diagonal followed by b. The last entry of the
        diagonal is 0 if the iterations have shown that A is singular. b is 0 if the iterations have
        covered the whole space.

    Source: Golub and Kahan, 1965, and Golub and Van Loan, "Matrix Computations", section 10.4.
    """
    right, left = [start / start.norm()], []
    diagonal, above = [], []
    noise = matrix.size * torch.finfo(torch.float64).eps
    for _ in range(min(steps, matrix.size)):
        u, length = _orthonormalise(matrix.apply(right[-1]), left)
        scale = max([length, *diagonal, *above])
        # There is a vector y with B y = 0, so A V y = 0. A is singular, and no next vector exists.
        if length <= noise * scale:
            diagonal, above = [*diagonal, 0.0], [*above, 0.0]
            break
        left.append(u)
        diagonal.append(length)
        v, length = _orthonormalise(matrix.apply_transposed(u), right)
        if length <= noise * scale:
            above.append(0.0)
            break
        right.append(v)
        above.append(length)
    return start.new_tensor(diagonal), start.new_tensor(above)


def _orthonormalise(vector: Tensor, basis: list[Tensor]) -> tuple[Tensor, float]:
    """Make a vector orthogonal to the orthonormal vectors of a basis, and scale it to unit length.

    Return the unit vector, and the length that the orthogonal vector had before scaling.
    """
    if basis:
        matrix = torch.stack(basis)
        # The second pass removes the rounding errors that the first pass leaves.
        for _ in range(2):
            vector = vector - matrix.T @ (matrix @ vector)
    length = float(vector.norm())
    return (vector / length if length else vector), length
