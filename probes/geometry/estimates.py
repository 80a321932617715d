"""What many vectors or the patches of one image say: ranks and spectra, likeness, long tokens.

At the end where a patch lies in its image, read from its token by ridge regression.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from probes.features.moments import Moments
from probes.spectra import effective_rank
from ssl_bench.intervals import Jackknife
from ssl_bench.system.device import float64_device, in_float64

RANKME_EPS = 1e-7
# Features that are equal but for the rounding of float32 count as constant.
_CONSTANT = 1e-12
# Vectors whose distances to all others are in memory at once.
_AT_ONCE = 1024
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# A channel that varies less, relative to its mean, varies by the rounding of float32.
_CONSTANT_CHANNEL = 1e-6

Patches = Float[Tensor, "images rows cols dim"]
Places = Float64[Tensor, "patches 2"]


def is_constant(moments: Moments) -> bool:
    """Whether all vectors are the same, so that nothing but their mean is left."""
    variance = float(moments.covariance.diagonal().sum())
    return variance <= _CONSTANT * float(moments.energy.diagonal().sum())


def eigenvalues(
    matrix: Float64[Tensor, "dim dim"], most: int | None = None
) -> Float64[Tensor, " values"]:
    """Of a symmetric matrix without negative ones, the largest first, only those that may not be 0.

    What rounding leaves of a zero is 0.
    """
    values = torch.linalg.eigvalsh(matrix).flip(0)[:most]
    lost = len(matrix) * torch.finfo(torch.float64).eps * values[0]
    return torch.where(values > lost, values, 0.0)


def rankme(moments: Moments) -> float:
    """Exponential of the entropy of the singular values of the vectors as they are, not centred.

    In [1, min(vectors, dim)], but for the constant that each share is raised by; 1 where all
    vectors are the same, NaN where all are zero.

    Source: Garrido et al., "RankMe", 2023, https://arxiv.org/abs/2210.02885; the constant and
    shares that are not normalised again are those of its formula. Singular values are the roots of
    the eigenvalues of the sum of products, so that those below 1e-7 of the largest are lost.
    """
    energy = moments.energy
    values = eigenvalues(energy, min(moments.count, len(energy))).sqrt()
    if not values.any():
        return math.nan
    shares = values / values.sum() + RANKME_EPS
    return float(torch.special.entr(shares).sum().exp())


def spread_rank(moments: Moments) -> float:
    """Effective rank of the vectors around their mean, in [1, min(vectors - 1, dim)].

    NaN where they do not vary.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    if is_constant(moments):
        return math.nan
    return float(effective_rank(_variances(moments).sqrt()))


def alpha_req(moments: Moments, ranks: tuple[int, int]) -> tuple[float, tuple[int, int]]:
    """Exponent of the power law of the variances, and the ranks from first to last it is fitted to.

    The slope of ln(variance) over -ln(rank) by least squares with weights 1 / rank; NaN where
    fewer than two variances of those ranks are above zero.

    Source: Agrawal et al., "alpha-ReQ", 2022, with the weights of
    https://github.com/kumarkrishna/fastssl/blob/96dfa37b/fastssl/utils/powerlaw.py.
    """
    first, last = ranks
    known = 0 if is_constant(moments) else int((_variances(moments) > 0).sum())
    last = min(last, known)
    if last <= first:
        return math.nan, (first, last)
    rank = torch.arange(first, last + 1, dtype=torch.float64)
    heights = _variances(moments)[first - 1 : last].log().cpu()
    shares = (1 / rank) / (1 / rank).sum()
    across = -rank.log()
    across, heights = across - (shares * across).sum(), heights - (shares * heights).sum()
    slope = (shares * across * heights).sum() / (shares * across.square()).sum()
    return float(slope), (first, last)


def lidar(views: Float64[Tensor, "images views dim"], *, delta: float) -> float:
    """Effective rank of what differs between images, measured by what differs between their views.

    The eigenvalues of W^-1/2 B W^-1/2, B the covariance of the images' means and W that of views
    around them plus delta on its diagonal; in [1, min(images - 1, dim)], NaN for a single image and
    where the means do not vary.

    Source: Thilak et al., "LiDAR", 2023, https://arxiv.org/abs/2312.04000.
    """
    count, times, dim = views.shape
    means = views.mean(1)
    away = means - means.mean(0)
    if count < 2 or away.square().sum() <= _CONSTANT * means.square().sum():
        return math.nan
    around = (views - means[:, None]).flatten(0, 1)
    within = around.T @ around / (count * (times - 1))
    within.diagonal().add_(delta)
    sizes, axes = torch.linalg.eigh(within)
    # The same eigenvalues but for zeros, and a smaller matrix where images are few.
    white = (away @ axes) / sizes.clamp(min=delta).sqrt()
    product = white @ white.T if count < dim else white.T @ white
    return float(effective_rank(eigenvalues(product, min(count - 1, dim))))


def _variances(moments: Moments) -> Float64[Tensor, " values"]:
    covariance = moments.covariance
    return eigenvalues(covariance, max(1, min(moments.count - 1, len(covariance))))


def alignment(views: Float64[Tensor, "images views dim"]) -> Float64[np.ndarray, " images"]:
    """Of each image the mean squared distance of two views, at unit length, in [0, 4].

    NaN where a view is a zero vector, which has no direction.

    Source: Wang and Isola, "Understanding Contrastive Representation Learning", 2020.
    """
    unit, times = _unit(views), views.shape[1]
    # Distances of all pairs add up to views^2 minus the squared length of the sum.
    total = times**2 - unit.sum(1).square().sum(1)
    return (total / (times * (times - 1) / 2)).clamp(min=0.0).cpu().numpy()


def uniformity(vectors: Float64[Tensor, "images dim"]) -> Jackknife:
    """The logarithm of the mean of exp(-2 distance^2) over pairs of unit vectors, in [-8, 0].

    0 where all have one direction, and lower the more evenly they are spread. NaN for fewer than
    two images, and where one is a zero vector. Costs images^2 * dim.

    Source: Wang and Isola, 2020, https://github.com/ssnl/align_uniform/tree/78ccdb19.
    """
    unit, count = _unit(vectors), len(vectors)
    sums = [
        torch.exp(4 * (some @ unit.T) - 4).sum(1) - torch.exp(4 * some.square().sum(1) - 4)
        for some in unit.split(_AT_ONCE)
    ]
    by_image = torch.cat(sums).cpu().numpy()
    total, pairs, fewer = by_image.sum(), count * (count - 1), (count - 1) * (count - 2)
    value = float(np.log(total / pairs)) if pairs else math.nan
    left = np.log((total - 2 * by_image) / fewer) if fewer else np.full(count, value)
    return Jackknife(value, left)


def _unit(vectors: Float64[Tensor, "*some dim"]) -> Float64[Tensor, "*some dim"]:
    """Of length 1, or NaN."""
    length = vectors.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, F.normalize(vectors, dim=-1, eps=1e-300), math.nan)


def outlier_share(
    patches: Float[Tensor, "images rows cols dim"], factor: float
) -> Float[Tensor, " images"]:
    """Of each image the percent of patches longer than `factor` times its median length.

    Of an even number of patches the median is the mean of the two in the middle.
    """
    lengths = patches.norm(dim=-1).flatten(1).sort(1).values
    count = lengths.shape[1]
    median = (lengths[:, (count - 1) // 2] + lengths[:, count // 2]) / 2
    return 100 * (lengths > factor * median[:, None]).float().mean(1)


def patch_cosine(
    tokens: Float[Tensor, "images tokens dim"], patches: Float[Tensor, "images rows cols dim"]
) -> Float[Tensor, " images"]:
    """Of each image the mean cosine of these tokens with all patches; 0 with a zero token."""
    # A mean of products of unit vectors is the product of their means.
    ours = F.normalize(tokens, dim=-1).mean(1)
    theirs = F.normalize(patches.flatten(1, 2), dim=-1).mean(1)
    return (ours * theirs).sum(-1)


class PositionSums:
    """All that ridge regression needs of the patches of some images.

    As places are centred in each image, the mean of the tokens makes no difference to `crossed`.
    """

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

    @property
    def crossed(self) -> Float64[Tensor, "dim 2"]:
        """Mean of the products of tokens and places."""
        return self._crossed / self.moments.count


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
        mean, other_mean = fitted.moments.mean, choosing.moments.mean
        covariance, other_covariance = fitted.moments.covariance, choosing.moments.covariance
        distance = other_mean - mean
        between, errors = torch.outer(distance, distance), []
        products = other_covariance + between
        for fit in _fits(mean, covariance, fitted.crossed, PENALTIES):
            # Squared, but for the spread of the places, which is the same for all fits.
            quadratic = (fit.weight * (products @ fit.weight)).sum()
            errors.append(float(quadratic - 2 * (fit.weight * choosing.crossed).sum()))
        penalty = PENALTIES[min(range(len(errors)), key=errors.__getitem__)]
        counts = fitted.moments.count, choosing.moments.count
        one, two = (count / sum(counts) for count in counts)
        (fit,) = _fits(
            one * mean + two * other_mean,
            one * covariance + two * other_covariance + one * two * between,
            one * fitted.crossed + two * choosing.crossed,
            (penalty,),
        )
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


def _fits(
    mean: Float64[Tensor, " dim"],
    covariance: Float64[Tensor, "dim dim"],
    crossed: Float64[Tensor, "dim 2"],
    penalties: tuple[float, ...],
) -> list[PositionFit]:
    """Ridge regression from standardised tokens, one for each penalty."""
    deviation = covariance.diagonal().clamp(min=0).sqrt()
    varies = deviation > _CONSTANT_CHANNEL * mean.abs()
    scale = torch.where(varies, 1 / deviation.clamp(min=1e-300), 0.0)
    sizes, axes = torch.linalg.eigh(scale[:, None] * covariance * scale)
    along = axes.T @ (scale[:, None] * crossed)
    found = []
    for penalty in penalties:
        weight = axes @ (along / (sizes.clamp(min=0) + penalty)[:, None])
        found.append(PositionFit(mean, scale[:, None] * weight, penalty))
    return found
