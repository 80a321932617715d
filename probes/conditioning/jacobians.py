"""Jacobians of one block, B and E among them: all singular values, or the extreme ones by Lanczos.

First the functions that are differentiated, then exact spectra, then bounds of them.
"""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from probes.conditioning.decomposition import BlockPass
from probes.spectra import condition_number, singular_values
from ssl_bench.errors import ConfigurationError

Point = Float64[Tensor, "tokens dim"]
Function = Callable[[Tensor], Tensor]
"""Tokens of one image in, as many tokens out."""

JACOBIANS = ("attention", "attention_skip", "mlp", "block", "dominant", "perturbation")
_EXACT_LIMIT = 8192
_ROWS_AT_ONCE = 128
_FAILURE = 0.05


def block_functions(one: BlockPass) -> Mapping[str, tuple[Function, Point]]:
    """What is differentiated and at which tokens, by facet; what cannot be had is not there.

    "attention" and "mlp": the sub-block as a function of its normed input, K and K^ of equation 7
    of the paper. "attention_skip": K + I of its equation 8. "block": the block as it is, norms and
    skips included. "dominant" and "perturbation": K = B + E of proposition 2. B holds the attention
    matrices still and lets the values move, E the other way round; summed over the heads, with the
    layer's own 1 / sqrt(head width), which the paper leaves out.

    Source: "Cutting the Skip", equations 7, 8, 10 and proposition 2; the terms are derived in its
    appendix A.1.
    """
    found: dict[str, tuple[Function, Point]] = {}
    if torch.allclose(one.whole(one.entered), one.left, rtol=1e-9, atol=1e-12):
        found["block"] = one.whole, one.entered
    parts = one.parts
    if parts is None:
        return found
    normed = parts.norm1(parts.graying(one.entered))
    attention, heads = parts.attention, parts.heads
    found["attention"] = attention, normed
    found["attention_skip"] = lambda x: x + attention(x), normed
    found["mlp"] = parts.mlp, parts.norm2(parts.after_attention(one.entered))
    if heads is not None:
        weights, values = heads.matrices(normed), heads.values(normed)
        found["dominant"] = lambda x: heads.joined(weights, heads.values(x)), normed
        found["perturbation"] = lambda x: heads.joined(heads.matrices(x), values), normed
    return found


@contextmanager
def differentiable_attention() -> Generator[None]:
    """Meanwhile attention is computed step by step: the fused kernels have no forward mode."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def exact_jacobian(function: Function, x: Point) -> Float64[Tensor, "outputs inputs"]:
    """Derivatives of all outputs by all inputs, both flattened row by row.

    Memory (tokens * dim)^2 * 8 bytes; as many backward passes as outputs.
    """
    with differentiable_attention():
        rows = torch.func.jacrev(function, chunk_size=_ROWS_AT_ONCE)(x)
    return rows.reshape(-1, x.numel())


def rank_details(values: Float64[Tensor, " values"]) -> dict[str, Any]:
    """What an infinite condition number of a square matrix does not say.

    How many singular values are above rounding, and the condition number of these alone.
    """
    noise = len(values) * torch.finfo(torch.float64).eps * values[0]
    rank = int((values > noise).sum())
    kept = float(values[0] / values[rank - 1]) if rank else 0.0
    return {"rank": rank, "size": len(values), "condition_number_of_rank": kept}


def exact_spectra(one: BlockPass) -> dict[str, Float64[Tensor, " values"]]:
    """All singular values of every Jacobian of a block, through `torch.func`.

    Raises:
        ConfigurationError: Too many tokens.
    """
    tokens, dim = one.entered.shape
    if tokens * dim > _EXACT_LIMIT:
        raise ConfigurationError(
            f"probe.protocol=jacobian_exact needs tokens * dim <= {_EXACT_LIMIT}, got {tokens} * "
            f"{dim}; lower probe.image_size or estimate the values",
            hint=("probe.protocol=jacobian_lanczos",),
        )
    return {
        facet: singular_values(exact_jacobian(function, point)).detach().cpu()
        for facet, (function, point) in block_functions(one).items()
    }


@dataclass(frozen=True)
class LinearMap:
    """A square matrix known by its products, and those of its transpose, with a vector."""

    size: int
    apply: Callable[[Tensor], Tensor]
    apply_transposed: Callable[[Tensor], Tensor]


def jacobian_map(function: Function, x: Point) -> LinearMap:
    """The Jacobian at `x` by Jacobian-vector and vector-Jacobian products, on flat vectors."""

    def flat(vector: Tensor) -> Tensor:
        return function(vector.reshape(x.shape)).flatten()

    point = x.flatten()
    with differentiable_attention():
        pullback = torch.func.vjp(flat, point)[1]

    def apply(vector: Tensor) -> Tensor:
        with differentiable_attention():
            return torch.func.jvp(flat, (point,), (vector,))[1]

    return LinearMap(point.numel(), apply, lambda vector: pullback(vector)[0])


def bidiagonalise(
    linear: LinearMap, start: Float64[Tensor, " size"], steps: int
) -> tuple[Float64[Tensor, " steps"], Float64[Tensor, " steps"]]:
    """Golub-Kahan bidiagonalisation with full reorthogonalisation.

    Of a matrix A it leaves A V = U B, A^T U = V B^T + b v e_k^T. Cost: two products a step, and
    steps^2 * size * 8 operations; memory 2 * steps * size numbers.

    Returns:
        The diagonal of the upper bidiagonal B, whose last entry is 0 where A was found to be
        singular, and what stands above it, whose last entry is b, 0 where the space was exhausted.

    Source: Golub and Kahan, 1965; Golub and Van Loan, "Matrix Computations", section 10.4.
    """

    def orthogonal(vector: Tensor, basis: list[Tensor]) -> tuple[Tensor, float]:
        """The part that is orthogonal to a basis, of length 1, and its length before."""
        if basis:
            matrix = torch.stack(basis)
            # Twice is enough; once leaves what cancellation brought in.
            for _ in range(2):
                vector = vector - matrix.T @ (matrix @ vector)
        length = float(vector.norm())
        return (vector / length if length else vector), length

    right, left = [start / start.norm()], []
    diagonal, above = [], []
    noise = linear.size * torch.finfo(torch.float64).eps
    for _ in range(min(steps, linear.size)):
        u, length = orthogonal(linear.apply(right[-1]), left)
        scale = max([length, *diagonal, *above])
        # A V y = 0 for the y with B y = 0: the matrix is singular, and there is no next vector.
        if length <= noise * scale:
            diagonal, above = [*diagonal, 0.0], [*above, 0.0]
            break
        left.append(u)
        diagonal.append(length)
        v, length = orthogonal(linear.apply_transposed(u), right)
        if length <= noise * scale:
            above.append(0.0)
            break
        right.append(v)
        above.append(length)
    return start.new_tensor(diagonal), start.new_tensor(above)


@dataclass(frozen=True)
class SingularExtremes:
    """What Lanczos knows of the singular values of a matrix.

    Attributes:
        largest: Never above the largest singular value.
        smallest: Never below the smallest one.
        largest_residual: Some singular value lies within it of `largest`.
        smallest_residual: Some singular value lies within it of `smallest`; infinite where that is
            from a witness.
        largest_at_most: Bound from above that holds with probability .975 over the start.
        smallest_at_least: Bound from below that holds with the same probability.
        effective_rank: Estimate by quadrature from one start.
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

    def details(self) -> dict[str, Any]:
        """As records have it."""
        bounds = {
            n: value for n, value in vars(self).items() if n not in ("size", "effective_rank")
        }
        return {"at_most_with_95_percent": self.condition_number_at_most, **bounds}

    @property
    def condition_number_at_least(self) -> float:
        """A bound from below without any probability; infinite where rounding hides the rest."""
        ends = torch.tensor([self.largest, self.smallest], dtype=torch.float64)
        return float(condition_number(ends, self.size))

    @property
    def condition_number_at_most(self) -> float:
        """A bound from above that holds with probability .95 over the start."""
        ends = [self.largest_at_most, self.smallest_at_least]
        return float(condition_number(torch.tensor(ends, dtype=torch.float64), self.size))


def extremes(
    linear: LinearMap, *, steps: int, seed: int, witness: Float64[Tensor, " size"]
) -> SingularExtremes:
    """Bounds of the largest and smallest singular value, from a random start.

    The k singular values of B lie between those of the matrix, whatever the steps: their quotient
    never overstates the condition number. From above it is bounded only where the spectrum is
    narrow, about (k / 5)^2 at most; beyond, the bound is infinite. The start is uniform on the
    sphere. Of a witness w, which may be sent to zero, ||A w|| / ||w|| is a bound too.

    Source: the bounds are those of Kuczynski and Wozniakowski, "Estimating the largest eigenvalue
    by the power and Lanczos algorithms with a random start", 1992, theorem 4.2, for A^T A and for
    ||A||^2 I - A^T A; the quadrature is that of Golub and Meurant, "Matrices, Moments and
    Quadrature", 1994.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(linear.size, generator=generator, dtype=torch.float64).to(witness.device)
    diagonal, beside = bidiagonalise(linear, start, steps)
    bidiagonal = torch.diag(diagonal) + torch.diag(beside[:-1], 1)
    left, values, right = torch.linalg.svd(bidiagonal)
    residuals = (beside[-1] * left[-1]).abs()
    through_witness = float(linear.apply(witness).norm() / witness.norm())
    largest, smallest = float(values[0]), float(values[-1])
    if beside[-1] == 0:
        # Nothing that the start can reach is left, and a random start reaches everything.
        at_most, at_least = largest, smallest
    else:
        both = math.log(1.648 * math.sqrt(linear.size) / (_FAILURE / 2))
        error = (both / (2 * len(diagonal) - 1)) ** 2
        at_most, at_least = math.inf, 0.0
        if error < 1:
            square = largest**2 / (1 - error)
            below = max(0.0, (smallest**2 - error * square) / (1 - error))
            at_most, at_least = math.sqrt(square), math.sqrt(below)
    # exp(log S - T / S) with S and T the traces of s and s log s.
    weights, rank = right[:, 0].square(), 0.0
    total = linear.size * (weights * values).sum()
    if total > 0:
        with_logs = -linear.size * (weights * torch.special.entr(values)).sum()
        rank = float((total.log() - with_logs / total).exp())
    return SingularExtremes(
        size=linear.size,
        steps=len(values),
        largest=largest,
        smallest=min(smallest, through_witness),
        largest_residual=float(residuals[0]),
        smallest_residual=math.inf if through_witness < smallest else float(residuals[-1]),
        largest_at_most=at_most,
        smallest_at_least=min(at_least, through_witness),
        effective_rank=rank,
    )


def lanczos_extremes(one: BlockPass, *, steps: int, seed: int) -> dict[str, SingularExtremes]:
    """Bounds of the extreme singular values of every Jacobian of a block."""
    found = {}
    for facet, (function, point) in block_functions(one).items():
        # A norm forgets the mean of a token: a block that begins with one, without a skip, is
        # singular.
        shift = torch.zeros_like(point)
        shift[0] = 1
        linear = jacobian_map(function, point)
        found[facet] = extremes(linear, steps=steps, seed=seed, witness=shift.flatten())
    return found
