"""Principal components of patch features, foreground, and colours that agree between maps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from probes.features.moments import Moments

NUM_COMPONENTS = 3
PERCENTILES = (1.0, 99.0)
# Features that are equal but for the rounding of float32 count as constant.
_CONSTANT = 1e-12

Map = Float64[Tensor, "_rows _cols 3"]
"""Three components of the patches of one image."""
Colours = UInt8[np.ndarray, "_rows _cols 3"]


@dataclass(frozen=True)
class Projection:
    """Where features are projected to.

    Attributes:
        mean: Subtracted first.
        components: Unit rows, by falling variance; the entry of largest magnitude is positive.
        deviations: Standard deviation along each component, by which projections are divided.
        explained: Percent of the variance along each component; 0 for constant features.
        spread: The variance in percent of the mean square of the features; small where all
            patches are nearly the same, which a map in full contrast hides.
    """

    mean: Float64[Tensor, " dim"]
    components: Float64[Tensor, "components dim"]
    deviations: Float64[Tensor, " components"]
    explained: Float64[Tensor, " components"]
    spread: float

    @property
    def is_constant(self) -> bool:
        return not bool(self.explained.any())

    def apply(self, features: Float[Tensor, "rows cols dim"]) -> Map:
        """Components of unit variance; 0 where there is no variance."""
        if self.is_constant:
            return torch.zeros(*features.shape[:2], NUM_COMPONENTS, dtype=torch.float64)
        projected = (features.double() - self.mean) @ self.components.T
        return torch.where(self.deviations > 0, projected / self.deviations.clamp(min=1e-300), 0.0)


def projection_of(moments: Moments) -> Projection:
    """The first three principal components, with signs that do not depend on the solver."""
    variances, vectors = torch.linalg.eigh(moments.covariance)
    variances = variances.clamp(min=0)
    components = vectors[:, -NUM_COMPONENTS:].flip(1).T
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    mean = moments.mean
    total = variances.sum()
    energy = mean.square().sum() + total
    varies = total > _CONSTANT * energy
    top = variances[-NUM_COMPONENTS:].flip(0)
    # Rounding would be stretched to full contrast where features have fewer dimensions.
    top = torch.where(top > _CONSTANT * total, top, 0.0)
    return Projection(
        mean=mean,
        components=_padded(components * largest.sign()),
        deviations=_padded(top.sqrt()),
        explained=_padded(100 * top / total if varies else torch.zeros_like(top)),
        spread=float(100 * total / energy) if varies else 0.0,
    )


def _padded(values: Float64[Tensor, " some *dim"]) -> Float64[Tensor, " components *dim"]:
    """With zeros for the components that features of fewer than three channels lack."""
    missing = torch.zeros(NUM_COMPONENTS - len(values), *values.shape[1:], dtype=torch.float64)
    return torch.cat([values, missing])


def fit_projection(tokens: Float[Tensor, "tokens dim"]) -> Projection:
    """Principal components of tokens in float64."""
    return projection_of(Moments().add(tokens))


def foreground(
    features: Sequence[Float[Tensor, "_rows _cols dim"]],
) -> list[Bool[Tensor, "_rows _cols"]]:
    """Split patches in two by their first principal component; one side is called foreground.

    The threshold is the one between the two most compact groups (2-means on a line, solved
    exactly). The foreground is the side that holds the smaller share of the patches on the borders
    of the images: a guess that photographers center what they show. Nothing knows of objects.

    Args:
        features: Of the images that are split together.

    Source: DINOv2, https://arxiv.org/abs/2304.07193, figure 1, which sets threshold and side by
    hand.
    """
    fit = fit_projection(torch.cat([f.flatten(0, 1) for f in features]))
    firsts = [fit.apply(f)[..., 0] for f in features]
    if fit.is_constant:
        return [torch.ones_like(first, dtype=torch.bool) for first in firsts]
    threshold = two_means(torch.cat([first.flatten() for first in firsts]))
    above = [first > threshold for first in firsts]
    on_border = torch.cat([_border(side) for side in above]).double().mean()
    anywhere = torch.cat([side.flatten() for side in above]).double().mean()
    # Of two sides that are as common on the border as elsewhere, the smaller one.
    is_above = on_border < anywhere or (on_border == anywhere and anywhere <= 0.5)
    return [side == bool(is_above) for side in above]


def two_means(values: Float64[Tensor, " values"]) -> float:
    """The threshold that leaves the least variance within the values below and above it."""
    ordered = values.sort().values
    below = torch.arange(1, len(ordered), dtype=torch.float64)
    above = len(ordered) - below
    sums = ordered.cumsum(0)
    gap = sums[:-1] / below - (sums[-1] - sums[:-1]) / above
    cut = int((below * above * gap.square()).argmax())
    return float((ordered[cut] + ordered[cut + 1]) / 2)


def _border(side: Bool[Tensor, "rows cols"]) -> Bool[Tensor, " border"]:
    is_border = torch.ones_like(side)
    is_border[1:-1, 1:-1] = False
    return side[is_border]


def oriented(maps: Sequence[Map], masks: Sequence[Bool[Tensor, "_rows _cols"]]) -> list[Map]:
    """Each component with the sign that gives it its longer tail upwards within the masks.

    Unlike a sign by the entries of a component, this one survives a rotation of the features.
    """
    shown = torch.cat([m[mask] for m, mask in zip(maps, masks, strict=True)])
    signs = torch.where(shown.pow(3).sum(0) < 0, -1.0, 1.0).double()
    return [m * signs for m in maps]


def aligned(maps: Sequence[Map], reference: Sequence[Map]) -> list[Map]:
    """The maps, turned and mirrored in the space of the three components to meet a reference.

    Orthogonal Procrustes: of all turns of components of unit variance, the one with the least
    squared distance to the reference. Signs, order and mixtures of components of nearly equal
    variance, which are arbitrary in each of two fits, become the same. A channel of the result is
    therefore not one component but a mixture of the three; the space that is shown is the same.

    Args:
        maps: Of some images.
        reference: Of the same images, at whatever resolution.

    Source: P. Schönemann, A generalized solution of the orthogonal Procrustes problem, 1966.
    """
    sizes = [tuple(m.shape[:2]) for m in maps]
    wanted = [_resized(r, size) for r, size in zip(reference, sizes, strict=True)]
    cross = torch.stack(
        [torch.einsum("rci,rcj->ij", m, r) for m, r in zip(maps, wanted, strict=True)]
    ).sum(0)
    left, _, right = torch.linalg.svd(cross)
    return [m @ (left @ right) for m in maps]


def _resized(reference: Map, size: tuple[int, ...]) -> Map:
    if tuple(reference.shape[:2]) == size:
        return reference
    channels_first = reference.permute(2, 0, 1)[None]
    return interpolate(channels_first, size=size, mode="bilinear")[0].permute(1, 2, 0)


def as_colours(maps: Sequence[Map], masks: Sequence[Bool[Tensor, "_rows _cols"]]) -> list[Colours]:
    """Stretch each channel over the maps of a block together; what is constant is grey.

    From the first to the 99th percentile, so that one patch of extreme value takes the contrast
    from no other.

    Args:
        maps: Of the images that share their components.
        masks: Where the maps are shown; black elsewhere.
    """
    shown = torch.cat([m[mask] for m, mask in zip(maps, masks, strict=True)])
    low, high = np.percentile(shown.numpy(), PERCENTILES, axis=0)
    return [
        _stretched(m.numpy(), low, high) * mask.numpy()[..., None]
        for m, mask in zip(maps, masks, strict=True)
    ]


def _stretched(
    values: Float64[np.ndarray, "rows cols 3"],
    low: Float64[np.ndarray, "3"],
    high: Float64[np.ndarray, "3"],
) -> UInt8[np.ndarray, "rows cols 3"]:
    span = high - low
    shares = np.where(span > 0, (values - low) / np.where(span > 0, span, 1.0), 0.5)
    return np.rint(255 * shares.clip(0, 1)).astype(np.uint8)
