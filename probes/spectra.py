"""How well conditioned matrices are, from their singular values, in float64."""

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.special import bdtr
from torch import Tensor

from ssl_bench.intervals import Interval
from ssl_bench.neighbours import unit_vectors

Values = Float64[Tensor, "*some values"]
"""Singular values, the largest first."""


def singular_values(matrices: Float[Tensor, "*some rows cols"]) -> Values:
    """All of them, in float64."""
    return torch.linalg.svdvals(matrices.double())


def condition_number(values: Values, size: int) -> Float64[Tensor, "*some"]:
    """Largest over smallest singular value; infinite for a singular matrix, zero among them.

    Args:
        values: Of a matrix.
        size: The larger side of that matrix; a matrix is singular where its smallest value is at
            most size * 2.2e-16 of the largest, which is what rounding makes of a zero.
    """
    largest, smallest = values[..., 0], values[..., -1]
    singular = smallest <= size * torch.finfo(torch.float64).eps * largest
    return torch.where(singular, torch.inf, largest / smallest.where(~singular, 1.0))


def effective_rank(values: Values) -> Float64[Tensor, "*some"]:
    """Exponential of the entropy of the normalised singular values; 0 for a zero matrix.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    total = values.sum(-1, keepdim=True)
    shares = values / total.where(total > 0, 1.0)
    rank = torch.special.entr(shares).sum(-1).exp()
    return rank.where(total[..., 0] > 0, 0.0)


def mean_cosine(tokens: Float[Tensor, "tokens dim"]) -> float:
    """Mean cosine over all pairs of different tokens, in [-1, 1]; 0 with a zero token.

    NaN for a single token, which has no pair.
    """
    unit = unit_vectors(tokens.double())
    count = len(tokens)
    if count < 2:
        return float("nan")
    pairs = unit.sum(0).square().sum() - unit.square().sum()
    return float(pairs) / (count * (count - 1))


def median_with_ci95(
    per_image: Float64[np.ndarray, "images values"],
) -> tuple[float, Interval | None]:
    """Median over images and values, and a 95 % interval whose ends are medians of single images.

    Infinite values count as larger than all others. The ends hold the median of all images
    whatever its distribution, but those of two to five images, the smallest and the largest, in
    only 1 - 2^(1 - images) of all cases.

    Returns:
        None for the interval of a single image; NaN for the median where any value is NaN.
    """
    count, value = len(per_image), float(np.median(per_image))
    if count < 2 or np.isnan(value):
        return value, None
    medians = np.sort(np.median(per_image, axis=1))
    # So many images may lie beyond an end: the test of signs.
    beyond = max(1, int((bdtr(np.arange(count), count, 0.5) <= 0.025).sum()))
    return value, (
        min(value, float(medians[beyond - 1])),
        max(value, float(medians[count - beyond])),
    )
