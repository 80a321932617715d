"""The matrices of a block on an image, and what their singular values say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from probes.conditioning.passes import BlockPass
from probes.conditioning.probe import FACETS, MATRIX, OUTPUTS
from probes.spectra import (
    Values,
    condition_number,
    effective_rank,
    mean_cosine,
    singular_values,
)
from ssl_bench.models.initialisers.statistics import effective_rank as centered_effective_rank


@dataclass(frozen=True)
class Spectrum:
    """One kind of matrix of a block, over images (and heads).

    Attributes:
        values: Singular values.
        size: Of the larger side of the matrices.
        cosines: Mean token cosine of each image; None for attention matrices.
        centered_ranks: Effective rank of each image's tokens less their mean; None for attention
            matrices.
    """

    values: Float64[Tensor, "images heads values"]
    size: int
    cosines: Float64[np.ndarray, "images 1"] | None
    centered_ranks: Float64[np.ndarray, "images 1"] | None

    def condition_numbers(self) -> Float64[np.ndarray, "images heads"]:
        return condition_number(self.values, self.size).numpy()

    def effective_ranks(self) -> Float64[np.ndarray, "images heads"]:
        return effective_rank(self.values).numpy()

    def relative(self) -> Float64[np.ndarray, " values"]:
        """Median over images and heads of the values divided by the largest; 0 if that is 0."""
        largest = self.values[..., :1]
        shares = self.values / largest.where(largest > 0, 1.0)
        return np.median(shares.flatten(0, 1).numpy(), axis=0)


@torch.no_grad()
def block_spectra(passes: Sequence[BlockPass]) -> dict[str, Spectrum]:
    """The spectra of one block by facet; what cannot be had is not there.

    "attention" and "mlp" are what the sub-block computes; with "_skip" its input is added, as the
    encoder itself does where it has that skip.
    """
    by_image = [_matrices(one) for one in passes]
    present = [facet for facet in FACETS if all(facet in matrices for matrices in by_image)]
    return {facet: _spectrum(facet, [m[facet] for m in by_image]) for facet in present}


@torch.no_grad()
def log_condition_numbers(one: BlockPass) -> tuple[float, float] | None:
    """Natural logarithms of the tokens' condition numbers before and after attention and its skip.

    The tokens before are those that attention is given, grayed where the block grays them. None
    where the block cannot be taken apart.
    """
    if one.parts is None:
        return None
    before = one.parts.graying(one.entered)
    after = before + one.parts.attention(one.parts.norm1(before))
    first, second = (
        float(condition_number(singular_values(tokens), max(tokens.shape)).log())
        for tokens in (before, after)
    )
    return first, second


def _matrices(one: BlockPass) -> Mapping[str, Float[Tensor, "heads rows cols"]]:
    parts = one.parts
    if parts is None:
        return {}
    middle = parts.after_attention(one.entered)
    entered = parts.graying(one.entered)
    attention = parts.attention(parts.norm1(entered))
    mlp = parts.mlp(parts.norm2(middle))
    updates = (attention, entered + attention, mlp, middle + mlp)
    matrices = {facet: update[None] for facet, update in zip(OUTPUTS, updates, strict=True)}
    if parts.heads is not None:
        matrices[MATRIX] = parts.heads.matrices(parts.norm1(entered))
    return matrices


def _spectrum(facet: str, matrices: Sequence[Float[Tensor, "heads rows cols"]]) -> Spectrum:
    values: Values = torch.stack([singular_values(matrix) for matrix in matrices]).cpu()
    size = max(matrices[0].shape[1:])
    if facet == MATRIX:
        return Spectrum(values, size, None, None)
    tokens = [matrix[0] for matrix in matrices]
    return Spectrum(
        values,
        size,
        cosines=np.array([[mean_cosine(one)] for one in tokens]),
        centered_ranks=np.array([[centered_effective_rank(one)] for one in tokens]),
    )
