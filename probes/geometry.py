"""Geometry: how do the features of a data set lie, whatever its images show?

In the order of a run: what is asked (`Geometry`), what passes the encoder (`Passes`), then what
many vectors say (ranks, spectra, likeness), what the patches of one image say, and at the end where
a patch lies in its image, read from its token by ridge regression.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice, product
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, UInt8
from torch import Tensor

from probes.features.image import facet_parts, image_vectors
from probes.features.moments import Moments
from probes.features.stream import KeptState, batches, fetch_finite, images_per_pass, read_ahead
from probes.features.views import ResizedCrops
from probes.spectra import effective_rank
from ssl_bench.composition.fields import (
    Bounds,
    Count,
    FractionRange,
    ListLength,
    Pixels,
    Positive,
    PositiveFraction,
    Threads,
)
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, central_square
from ssl_bench.intervals import Interval, Jackknife, mean_estimate
from ssl_bench.layers import INNER_FACETS, REGISTERS, Facet
from ssl_bench.neighbours import unit_vectors
from ssl_bench.results import encoder_id
from ssl_bench.system.device import float64_device, power_of_two, to_device, to_float64
from ssl_bench.system.paths import cache_folder

IMAGE_METRICS = ("rankme", "alpha_req", "effective_rank", "lidar", "alignment", "uniformity")
TOKEN_METRICS = ("outlier_share", "cls_patch_cosine", "register_patch_cosine", "position_r2")
# What a mean over images can be.
_ENDS: Mapping[str, Interval] = {
    "alignment": (0.0, 4.0),
    "uniformity": (-8.0, 0.0),
    "outlier_share": (0.0, 100.0),
    "cls_patch_cosine": (-1.0, 1.0),
    "register_patch_cosine": (-1.0, 1.0),
    "position_r2": (-math.inf, 1.0),
}
_FEW = "fewer than three images"
_ZERO = "a vector of zeros has no direction"
_RANKS = ("rankme", "alpha_req", "effective_rank", "lidar")
_NO_INTERVAL = "it depends on the number of images; compare on as many"
# Why a score is no number, where its details do not say it.
_WHY = {
    "rankme": "all vectors are zero",
    "alpha_req": "fewer than two eigenvalues above zero within probe.alpha_ranks",
    "effective_rank": "all vectors are the same",
    "lidar": "the means of the views are those of one image, or do not vary",
    "alignment": _ZERO,
    "uniformity": f"fewer than two images, or {_ZERO}",
    "cls_patch_cosine": "the encoder has no [CLS] token",
    "register_patch_cosine": "the encoder has no registers",
    "position_r2": "images of a single patch",
}
# Of the images, for reading positions: to choose the penalty with, and to score on.
_SHARE = 0.2
# Added to each share of a spectrum in RankMe and LiDAR.
SHARE_EPS = 1e-7
# Features that are equal but for the rounding of float32 count as constant.
_CONSTANT = 1e-12
# Vectors whose distances to all others are in memory at once.
_AT_ONCE = 1024
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# A channel that varies less, relative to its mean, varies by the rounding of float32.
_CONSTANT_CHANNEL = 1e-6

Patches = Float[Tensor, "images rows cols dim"]
Places = Float64[Tensor, "patches 2"]

Cell = tuple[int, str]


@dataclass(frozen=True)
class Geometry(Probe):
    """Ranks, spectra and likeness of the vectors of images, and habits of their patch tokens.

    Attributes:
        facet: What stands for an image, as for k-NN: "cls", "patch_mean", or of what is inside of
            a block the mean patch. Patch tokens are those that the block gives.
        image_size: Side in pixels; without it the encoder's own.
        crop_share: Side of the central square that is looked at, relative to the shorter side.
        view_images: So many images, drawn with the seed, are also looked at in random views, for
            LiDAR and alignment.
        views: Of each of them: random crops, half of them mirrored.
        view_area: Least and largest area of a crop, relative to the image.
        lidar_delta: Added to the diagonal of the covariance of views.
        alpha_ranks: First and last eigenvalue that alpha-ReQ is fitted to.
        pair_images: All pairs of so many images, drawn with the seed, make uniformity.
        outlier_factor: A patch is an outlier if it is longer than so many times the median of its
            image.
    """

    protocol: Literal["ssl_bench"] = "ssl_bench"
    facet: str | Sequence[str] = ("cls", "patch_mean")
    image_size: Pixels | None = None
    crop_share: PositiveFraction = 0.875
    view_images: Count = 100
    views: Annotated[int, Bounds(2, 1000)] = 10
    view_area: FractionRange = (0.5, 1.0)
    lidar_delta: Positive = 1e-4
    alpha_ranks: Annotated[Sequence[Count], ListLength(2, 2)] = (11, 100)
    pair_images: Count = 2000
    outlier_factor: Positive = 4.0
    batch_size: Count = 32
    num_workers: Threads = 4

    task = "geometry"
    # 2: LiDAR has the constant of its paper.
    metric_version = 2
    role = "images"
    takes_long = True
    known_facets = ("cls", "patch_mean", *INNER_FACETS)
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("view_area", "alpha_ranks"):
            low, high = getattr(self, name)
            if low > high:
                raise ConfigurationError(
                    f"probe.{name} expects the smaller number first, got [{low},{high}]"
                )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        by_facet = [*product(self.facets, IMAGE_METRICS), *product(["token"], TOKEN_METRICS)]
        return [(layer, facet, metric) for layer in sorted(layers) for facet, metric in by_facet]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers from one pass over the images and one over views of some of them.

        What an encoder or a data set cannot tell is NaN, and the details say why.

        Raises:
            UnfitEncoder: the encoder has no [CLS] token, and "cls" is asked for.
        """
        images = self.split(context.dataset)
        passes = Passes(self, context, images)
        # First what takes longest, ten times as long on few images; its time left is nearly all.
        views = passes.views()
        passes.gather()
        if len(images) < 3:
            context.say(f"geometry: {_FEW}: spectra and positions say little, or are undefined")
        layers = sorted(context.layers)
        for layer in context.progress(layers, "geometry, spectra", len(layers)):
            for facet in self.facets:
                yield from self._of_images((layer, facet), passes, views[layer, facet])
            yield from self._of_tokens((layer, "token"), passes)
        passes.kept.path.unlink(missing_ok=True)

    def _of_images(
        self, cell: Cell, found: "Passes", views: Float[Tensor, "images views dim"]
    ) -> Iterator[Score]:
        """Spectra have no intervals: a spectrum depends on the number of images itself.

        Leaving images out, or drawing some of them twice, lowers every rank, so that resampling
        would show what few images do and not how sure a rank of so many is.
        """
        moments = found.moments[cell]
        count, dim = moments.count, len(moments.mean)
        first, last = self.alpha_ranks
        alpha, ranks = alpha_req(moments, (first, last))
        details: dict[str, Any] = {"dim": dim, "constant_features": is_constant(moments)}
        for metric, value, more in (
            ("rankme", rankme(moments), _limit(count, dim)),
            ("alpha_req", alpha, {"ranks": list(ranks)}),
            ("effective_rank", spread_rank(moments), _limit(count - 1, dim)),
        ):
            yield _score(cell, metric, value, count, details | more)
        exact = views.double()
        count, dim = len(exact), exact.shape[-1]
        of_views: dict[str, Any] = {"views": self.views}
        rank = lidar(exact, delta=self.lidar_delta)
        yield _score(cell, "lidar", rank, count, of_views | _limit(count - 1, dim))
        yield _score(cell, "alignment", mean_estimate(alignment(exact)), count, of_views)
        vectors = torch.cat(found.compared[cell]).double()
        yield _score(cell, "uniformity", uniformity(vectors), len(vectors), {})

    def _of_tokens(self, cell: Cell, found: "Passes") -> Iterator[Score]:
        """The interval of positions is over images held out; what is fitted stays as it is."""
        layer, count, encoder = cell[0], len(found.images), found.context.encoder
        outliers = found.per_image[layer, "outlier_share"].double().numpy()
        any_of_them = {"percent_of_images_with_any": 100.0 * float((outliers > 0).mean())}
        yield _score(cell, "outlier_share", mean_estimate(outliers), count, any_of_them)
        num_cls = encoder.num_prefix_tokens - encoder.num_registers
        for kind, tokens in (("cls", num_cls), ("register", encoder.num_registers)):
            metric, nobody = f"{kind}_patch_cosine", torch.full((count,), math.nan)
            cosines = found.per_image.get((layer, metric), nobody).double().numpy()
            more = {f"num_{kind}_tokens": tokens}
            yield _score(cell, metric, mean_estimate(cosines), count, more)
        if not found.positions[layer]:
            yield _score(cell, "position_r2", math.nan, count, {"undefined": _FEW})
            return
        shares = torch.cat(found.positions[layer]).cpu().numpy()
        # All images count: it hangs on those that it is fitted to as much.
        details = {"penalty": found.fits[layer].penalty, "num_held_out": len(shares)}
        yield _score(cell, "position_r2", mean_estimate(shares), count, details)


class Passes:
    """What passes the encoder, every image once and random views of some, and what that leaves.

    Which images serve what is drawn with the seed; all are indices into the set.

    Attributes:
        roles: Images that positions are fitted to, that choose the penalty, and that are scored.
        kept: The views of the images so far, until the scores are known; named after all that
            they depend on.
        compared: By block and facet the vectors of the images whose pairs are compared.
        per_image: By block and metric a number for each image; NaN where nobody knows.
        positions: By block the share of the spread of positions that is read from the patches of
            each image that was held out; none where there are too few to hold any out.
    """

    def __init__(self, probe: Geometry, context: ProbeContext, images: ImageSet) -> None:
        self.probe, self.context, self.images = probe, context, images
        count, generator = len(images), torch.Generator().manual_seed(context.seed)
        order = torch.randperm(count, generator=generator).tolist()
        # Fewer than three images cannot be divided, and no position is read.
        part = max(1, round(_SHARE * count)) if count > 2 else 0
        self.roles = {
            "fitted": sorted(order[2 * part :]),
            "choosing": sorted(order[part : 2 * part]),
            "held_out": sorted(order[:part]),
        }
        self.paired = frozenset(order[: probe.pair_images])
        self.viewed = tuple(sorted(order[: probe.view_images]))
        self.facets = probe.facets
        self.size = probe.resize.square_side(context.encoder.native_size)
        self.at_once = images_per_pass(probe.batch_size, self.size, context.device)
        facts = (
            encoder_id(context.encoder.identity()),
            (images.fingerprint(), self.viewed, context.layers, context.seed),
            (str(context.dtype), context.device.type, self.size),
            (self.facets, probe.views, probe.view_area),
        )
        name = f"{sha256(repr(facts).encode()).hexdigest()[:16]}.views"
        self.kept = KeptState(cache_folder(None) / "features" / name, 1.0, context.say)

        layers = context.layers
        cells = [(layer, facet) for facet in self.facets for layer in layers]
        self.moments = {cell: Moments() for cell in cells}
        self.compared: dict[Cell, list[Tensor]] = {cell: [] for cell in cells}
        self.per_image: dict[Cell, Float[Tensor, " images"]] = {}
        self.fits: dict[int, PositionFit] = {}
        self.positions: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._sums = {
            role: {layer: PositionSums() for layer in layers} for role in ("fitted", "choosing")
        }

    def gather(self) -> None:
        """Every image once, those that positions are fitted to before those that are scored."""
        # Patches are compared with what blocks give, as far as the encoder has it.
        encoder = self.context.encoder
        has = {"token": True, "cls": encoder.has_cls, REGISTERS: encoder.num_registers > 0}
        extractor = self._extractor([facet for facet, is_there in has.items() if is_there])
        order = [index for indices in self.roles.values() for index in indices]
        size, share = self.size, self.probe.crop_share

        def square(sample: Sample) -> UInt8[Tensor, "3 size size"]:
            return central_square(sample.image, size, share=share)

        squares = read_ahead(self.images, order, square, workers=self.probe.num_workers)
        shown = iter(self.context.progress(squares, "geometry", len(order)))
        for role, indices in self.roles.items():
            pairs = zip(indices, islice(shown, len(indices)), strict=True)
            for batch in batches(pairs, self.at_once):
                pixels = torch.stack([square for _, square in batch])
                self._add(extractor, pixels, [index for index, _ in batch], role)

    def _add(
        self,
        extractor: FeatureExtractor,
        pixels: UInt8[Tensor, "images 3 size size"],
        rows: Sequence[int],
        role: str,
    ) -> None:
        """Take in the features of some images."""
        features, sums = extractor.extract_unchecked(
            to_device(pixels, self.context.device).float() / 255
        )
        kept = [place for place, row in enumerate(rows) if row in self.paired]
        pairs: list[Tensor] = []
        for facet in self.facets:
            for layer, vectors in zip(features, image_vectors(features, facet), strict=True):
                self.moments[layer, facet].add(vectors)
                pairs.append(vectors[kept] if len(kept) < len(rows) else vectors)
        numbers: dict[Cell, Float[Tensor, " images"]] = {}
        for layer, of in features.items():
            patches = of["token"]
            numbers[layer, "outlier_share"] = outlier_share(patches, self.probe.outlier_factor)
            if "cls" in of:
                numbers[layer, "cls_patch_cosine"] = patch_cosine(of["cls"][:, None], patches)
            if REGISTERS in of:
                numbers[layer, "register_patch_cosine"] = patch_cosine(of[REGISTERS], patches)
            if role in self._sums:
                self._sums[role][layer].add(patches)
                continue
            if layer not in self.fits:
                # The sums are not needed any more, and large.
                fitted, choosing = (self._sums[one].pop(layer) for one in ("fitted", "choosing"))
                self.fits[layer] = PositionFit.of(fitted, choosing)
            self.positions[layer].append(self.fits[layer].r2(patches))
        ids = [self.images.ids[row] for row in rows]
        values = fetch_finite(extractor, sums, ids, [*pairs, *numbers.values()])
        for cell, found in zip(self.compared, values[: len(pairs)], strict=True):
            self.compared[cell].append(found)
        for cell, found in zip(numbers, values[len(pairs) :], strict=True):
            whole = self.per_image.setdefault(cell, torch.full((len(self.images),), torch.nan))
            whole[list(rows)] = found

    def views(self) -> Mapping[Cell, Float[Tensor, "images views _dim"]]:
        """Vectors of random views of some images, in host memory; goes on where a run ended."""
        # Of each image and facet "layers views dim".
        done: list[list[Tensor]] = list(self.kept.found.get("views", ()))
        before = len(done)
        left = self.viewed[before:]
        extractor = self._extractor(())
        size, (least, most) = self.size, self.probe.view_area
        crops = ResizedCrops(self.probe.views, self.context.seed, area=(least, most))

        def crops_of(sample: Sample) -> Float[Tensor, "views 3 size size"]:
            # Crops come with a mask, of which nothing is asked here.
            empty = replace(sample, mask=np.zeros(sample.image.shape[:2], np.uint8))
            return torch.stack([crops.view(empty, n, size)[0] for n in range(crops.count)])

        made = read_ahead(self.images, left, crops_of, workers=self.probe.num_workers)
        shown = self.context.progress(
            made, f"geometry, {self.probe.views} views of each image", len(left)
        )
        try:
            for index, some in zip(left, shown, strict=True):
                done.append(self._vectors(extractor, some, self.images.ids[index]))
                if self.kept.is_due():
                    self.kept.write({"views": done})
        except BaseException:
            if len(done) > before:
                self.kept.write({"views": done})
            raise
        by_facet = zip(self.facets, map(torch.stack, zip(*done, strict=True)), strict=True)
        return {
            (layer, facet): vectors[:, place]
            for facet, vectors in by_facet
            for place, layer in enumerate(self.context.layers)
        }

    def _vectors(
        self, extractor: FeatureExtractor, crops: Float[Tensor, "views 3 size size"], image_id: str
    ) -> list[Float[Tensor, "layers views _dim"]]:
        parts = []
        for part in crops.split(self.at_once):
            features, sums = extractor.extract_unchecked(to_device(part, self.context.device))
            vectors = [image_vectors(features, facet) for facet in self.facets]
            parts.append(fetch_finite(extractor, sums, [image_id] * len(part), vectors))
        return [torch.cat(some, 1) for some in zip(*parts, strict=True)]

    def _extractor(self, more: Iterable[Facet]) -> FeatureExtractor:
        parts = [part for facet in self.facets for part in facet_parts(facet)]
        return self.context.extractor(self.context.layers, *dict.fromkeys([*parts, *more]))


def _score(
    cell: Cell, metric: str, found: float | Jackknife, num_images: int, details: dict[str, Any]
) -> Score:
    """With Student's interval, within what the score can be, where there is an estimate."""
    is_estimate = isinstance(found, Jackknife)
    value, margin = (found.value, found.margin) if is_estimate else (found, math.nan)
    ci95 = None
    if not math.isnan(value) and not math.isnan(margin):
        low, high = _ENDS[metric]
        ci95 = max(low, value - margin), min(high, value + margin)
    if math.isnan(value):
        details = {"undefined": _WHY[metric], **details}
    elif metric in _RANKS:
        details = {"no_interval": _NO_INTERVAL, **details}
    unit = "%" if metric == "outlier_share" else ""
    return Score(*cell, metric, value, ci95, num_images, details, unit=unit)


def _limit(images: int, dim: int) -> dict[str, Any]:
    """What a rank is at most, and whether more images would let it be more."""
    return {"rank_limit": min(images, dim), "limited_by_images": images < dim}


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
    return _raised_rank(values)


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
    """Compute the effective rank of what differs between images, relative to their views.

    It is exp(-sum p ln p) with p = l / sum(l) + 1e-7, not normalised again. l are all `dim`
    eigenvalues of W^-1/2 B W^-1/2, where B is the covariance of the images' means and W that of
    views around them plus delta on its diagonal. Zeros among them count, so that the largest value
    is a little above min(images - 1, dim).

    Returns:
        NaN for a single image and where the means do not vary.

    Source: Thilak et al., "LiDAR", ICLR 2024, https://arxiv.org/abs/2312.04000. Its shares have a
    small constant added, as those of RankMe, but no value for it; 1e-7 is RankMe's, which
    https://github.com/arnab39/reptrix takes too.
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
    found = eigenvalues(product, min(count - 1, dim))
    return _raised_rank(F.pad(found, (0, dim - len(found))))


def _raised_rank(values: Float64[Tensor, " values"]) -> float:
    """Exponential of the entropy of shares that are each raised by `SHARE_EPS`."""
    return float(torch.special.entr(values / values.sum() + SHARE_EPS).sum().exp())


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
    has_length = vectors.any(-1, keepdim=True)
    return torch.where(has_length, unit_vectors(vectors), math.nan)


def outlier_share(
    patches: Float[Tensor, "images rows cols dim"], factor: float
) -> Float[Tensor, " images"]:
    """Of each image the percent of patches longer than `factor` times its median length.

    Of an even number of patches the median is the mean of the two in the middle.
    """
    # Exactly, so that no square leaves the range of float32.
    scaled = patches / power_of_two(patches.abs().amax((1, 2, 3), keepdim=True))
    lengths = scaled.norm(dim=-1).flatten(1).sort(1).values
    count = lengths.shape[1]
    median = (lengths[:, (count - 1) // 2] + lengths[:, count // 2]) / 2
    return 100 * (lengths > factor * median[:, None]).float().mean(1)


def patch_cosine(
    tokens: Float[Tensor, "images tokens dim"], patches: Float[Tensor, "images rows cols dim"]
) -> Float[Tensor, " images"]:
    """Of each image the mean cosine of these tokens with all patches; 0 with a zero token."""
    # A mean of products of unit vectors is the product of their means.
    ours = unit_vectors(tokens).mean(1)
    theirs = unit_vectors(patches.flatten(1, 2)).mean(1)
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
        tokens = to_float64(patches)
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
        tokens = to_float64(patches).flatten(1, 2)
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
