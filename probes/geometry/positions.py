"""Where a patch lies in its image, read from its token by ridge regression."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from probes.features.moments import Moments
from ssl_bench.system.device import float64_device, in_float64

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# A channel that varies less, relative to its mean, varies by the rounding of float32.
_CONSTANT = 1e-6

Patches = Float[Tensor, "images rows cols dim"]
Places = Float64[Tensor, "patches 2"]


class PositionSums:
    """All that ridge regression needs of the patches of some images."""

    def __init__(self) -> None:
        self.moments = Moments()
        self._crossed: Float64[Tensor, "dim 2"] = torch.empty(0, 2)

    def add(self, patches: Patches) -> None:
        """Of images with one grid."""
        tokens = in_float64(patches)
        images, rows, cols, dim = tokens.shape
        places = centred_places(rows, cols, tokens.device)
        if not self.moments.count:
            self._crossed = tokens.new_zeros(dim, 2)
        self._crossed += tokens.sum(0).flatten(0, 1).T @ places
        self.moments.add(tokens.reshape(images * rows * cols, dim))

    def summary(self) -> "Summary":
        moments = self.moments
        crossed = self._crossed / moments.count
        return Summary(moments.count, moments.mean, moments.covariance, crossed)


@dataclass(frozen=True)
class Summary:
    """Means over patches.

    Attributes:
        crossed: Of the products of tokens and places; as places are centred in each image, the
            mean of the tokens makes no difference.
    """

    count: int
    mean: Float64[Tensor, " dim"]
    covariance: Float64[Tensor, "dim dim"]
    crossed: Float64[Tensor, "dim 2"]

    def joined(self, other: "Summary") -> "Summary":
        """Of the patches of both."""
        total = self.count + other.count
        one, two = self.count / total, other.count / total
        distance = other.mean - self.mean
        between = one * two * torch.outer(distance, distance)
        return Summary(
            total,
            one * self.mean + two * other.mean,
            one * self.covariance + two * other.covariance + between,
            one * self.crossed + two * other.crossed,
        )


@dataclass(frozen=True)
class PositionFit:
    """Reads the place of a patch from its token.

    Attributes:
        penalty: Of the ridge, beside correlations.
    """

    mean: Float64[Tensor, " dim"]
    weight: Float64[Tensor, "dim 2"]
    penalty: float

    @classmethod
    def of(cls, fitted: PositionSums, choosing: PositionSums) -> "PositionFit":
        """With the penalty that errs least on other images, then fitted to both."""
        one, other = fitted.summary(), choosing.summary()
        errors = [_error(fit, other) for fit in _fits(one, PENALTIES)]
        penalty = PENALTIES[min(range(len(errors)), key=errors.__getitem__)]
        (fit,) = _fits(one.joined(other), (penalty,))
        return fit

    def r2(self, patches: Patches) -> Float64[Tensor, " images"]:
        """Of each image 1 - squared error / squared distance from the middle, mean of both axes.

        NaN where there is one patch alone.
        """
        rows, cols = patches.shape[1:3]
        tokens = in_float64(patches).flatten(1, 2)
        places = centred_places(rows, cols, tokens.device)
        error = ((tokens - self.mean) @ self.weight - places).square().sum(1)
        spread = places.square().sum(0)
        known = spread > 0
        if not known.any():
            return torch.full((len(patches),), math.nan, dtype=torch.float64)
        return 1 - (error[:, known] / spread[known]).mean(1)


def centred_places(rows: int, cols: int, device: torch.device) -> Places:
    """((row + .5) / rows, (col + .5) / cols) of each patch, minus their mean, which is a half."""
    place = float64_device(device)
    down = (torch.arange(rows, dtype=torch.float64, device=place) + 0.5) / rows - 0.5
    across = (torch.arange(cols, dtype=torch.float64, device=place) + 0.5) / cols - 0.5
    return torch.cartesian_prod(down, across)


def _fits(summary: Summary, penalties: tuple[float, ...]) -> list[PositionFit]:
    """Ridge regression from standardised tokens, one for each penalty."""
    deviation = summary.covariance.diagonal().clamp(min=0).sqrt()
    varies = deviation > _CONSTANT * summary.mean.abs()
    scale = torch.where(varies, 1 / deviation.clamp(min=1e-300), 0.0)
    correlation = scale[:, None] * summary.covariance * scale
    sizes, axes = torch.linalg.eigh(correlation)
    along = axes.T @ (scale[:, None] * summary.crossed)
    found = []
    for penalty in penalties:
        weight = axes @ (along / (sizes.clamp(min=0) + penalty)[:, None])
        found.append(PositionFit(summary.mean, scale[:, None] * weight, penalty))
    return found


def _error(fit: PositionFit, summary: Summary) -> float:
    """Mean squared error, but for the spread of the places, which is the same for all fits."""
    distance = summary.mean - fit.mean
    products = summary.covariance + torch.outer(distance, distance)
    weight = fit.weight
    return float((weight * (products @ weight)).sum() - 2 * (weight * summary.crossed).sum())
