"""The Jacobians of one block: the sub-blocks', the block's own, and the terms B and E."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from probes.conditioning.jacobians import (
    Function,
    SingularExtremes,
    exact_jacobian,
    extremes,
    jacobian_map,
)
from probes.conditioning.passes import BlockPass
from probes.spectra import condition_number, effective_rank, singular_values
from ssl_bench.errors import ConfigurationError

FACETS = ("attention", "attention_skip", "mlp", "block", "dominant", "perturbation")
_EXACT_LIMIT = 8192


@dataclass(frozen=True)
class JacobianAt:
    """A function and the tokens at which it is differentiated."""

    function: Function
    point: Float64[Tensor, "tokens dim"]


def block_functions(one: BlockPass) -> Mapping[str, JacobianAt]:
    """What is differentiated, by facet; what cannot be had is not there.

    "attention" and "mlp": the sub-block as a function of its normed input, K and K^ of equation 7
    of the paper. "attention_skip": K + I of its equation 8. "block": the block as it is, norms and
    skips included. "dominant" and "perturbation": K = B + E of proposition 2. B holds the attention
    matrices still and lets the values move, E the other way round; summed over the heads, with the
    layer's own 1 / sqrt(head width), which the paper leaves out.

    Source: "Cutting the Skip", equations 7, 8, 10 and proposition 2; the terms are derived in its
    appendix A.1.
    """
    found: dict[str, JacobianAt] = {}
    if torch.allclose(one.whole(one.entered), one.left, rtol=1e-9, atol=1e-12):
        found["block"] = JacobianAt(one.whole, one.entered)
    parts = one.parts
    if parts is None:
        return found
    normed = parts.norm1(parts.graying(one.entered))
    attention, heads = parts.attention, parts.heads
    found["attention"] = JacobianAt(attention, normed)
    found["attention_skip"] = JacobianAt(lambda x: x + attention(x), normed)
    found["mlp"] = JacobianAt(parts.mlp, parts.norm2(parts.after_attention(one.entered)))
    if heads is not None:
        weights, values = heads.matrices(normed), heads.values(normed)
        found["dominant"] = JacobianAt(lambda x: heads.joined(weights, heads.values(x)), normed)
        found["perturbation"] = JacobianAt(
            lambda x: heads.joined(heads.matrices(x), values), normed
        )
    return found


@dataclass(frozen=True)
class ExactSpectrum:
    """All singular values of a Jacobian."""

    values: Float64[Tensor, " values"]

    @property
    def condition_number(self) -> float:
        return float(condition_number(self.values, len(self.values)))

    @property
    def effective_rank(self) -> float:
        return float(effective_rank(self.values))

    @property
    def norm(self) -> float:
        return float(self.values[0])

    @property
    def rank(self) -> int:
        """How many values are above rounding."""
        noise = len(self.values) * torch.finfo(torch.float64).eps * self.values[0]
        return int((self.values > noise).sum())

    def details(self) -> dict[str, Any]:
        """What an infinite condition number does not say."""
        rank = self.rank
        kept = float(self.values[0] / self.values[rank - 1]) if rank else 0.0
        return {"rank": rank, "size": len(self.values), "condition_number_of_rank": kept}


def exact_spectra(one: BlockPass) -> dict[str, ExactSpectrum]:
    """All singular values of every Jacobian of a block, through `torch.func`.

    Raises:
        ConfigurationError: Too many tokens.
    """
    tokens, dim = one.entered.shape
    if tokens * dim > _EXACT_LIMIT:
        raise ConfigurationError(
            f"probe.protocol=jacobian_exact needs tokens * dim <= {_EXACT_LIMIT}, got {tokens} * "
            f"{dim}; lower probe.image_size or take probe.protocol=jacobian_lanczos"
        )
    return {
        facet: ExactSpectrum(singular_values(exact_jacobian(at.function, at.point)).detach().cpu())
        for facet, at in block_functions(one).items()
    }


def lanczos_extremes(one: BlockPass, *, steps: int, seed: int) -> dict[str, SingularExtremes]:
    """Bounds of the extreme singular values of every Jacobian of a block."""
    return {
        facet: extremes(
            jacobian_map(at.function, at.point), steps=steps, seed=seed, witness=_shift(at.point)
        )
        for facet, at in block_functions(one).items()
    }


def _shift(point: Float64[Tensor, "tokens dim"]) -> Float64[Tensor, " size"]:
    # A norm forgets the mean of a token: a block that begins with one and has no skip is singular.
    shift = torch.zeros_like(point)
    shift[0] = 1
    return shift.flatten()
