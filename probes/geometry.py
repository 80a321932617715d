"""Geometry probe: how are the features of a dataset distributed in each block?

The probe `Geometry` encodes the central square of every image, and random crops (views) of some
images. `ImageStatistics` collects statistics of the central squares. `PositionRegression` is a
ridge regression that predicts the position of a patch from its token. The functions in
`probes/spectra.py` compute ranks and spectra.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, UInt8
from torch import Tensor

from probes.features.image import facet_parts, image_vectors
from probes.features.journal import Journal
from probes.features.moments import Moments
from probes.features.stream import batched, fetch_and_check, images_per_pass, read_ahead
from probes.features.training_images import ResizedCrops
from probes.spectra import alpha_req, centred_effective_rank, is_constant, lidar, rankme
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
from ssl_bench.features import FeatureExtractor, Features, central_square
from ssl_bench.intervals import Interval, Jackknife, mean_estimate
from ssl_bench.layers import INNER_FACETS, REGISTERS, Facet
from ssl_bench.neighbours import unit_vectors
from ssl_bench.results import encoder_id
from ssl_bench.system.device import float64_device, floor_to_power_of_two, to_device, to_float64
from ssl_bench.system.files import cache_folder

IMAGE_METRICS = ("rankme", "alpha_req", "effective_rank", "lidar", "alignment", "uniformity")
TOKEN_METRICS = ("outlier_share", "cls_patch_cosine", "register_patch_cosine", "position_r2")
# Smallest and largest possible value of each metric that has a confidence interval. Ranks and
# exponents of spectra have no interval. A bootstrap sample has fewer distinct images, which lowers
# every rank, so a bootstrap interval would be too low.
_RANGES: Mapping[str, Interval] = {
    "alignment": (0.0, 4.0),
    "uniformity": (-8.0, 0.0),
    "outlier_share": (0.0, 100.0),
    "cls_patch_cosine": (-1.0, 1.0),
    "register_patch_cosine": (-1.0, 1.0),
    "position_r2": (-math.inf, 1.0),
}
_NO_INTERVAL = "the score depends on the number of images. Compare scores of equally many images"
_FEW = "fewer than three images"
_ZERO = "a vector of zeros has no direction"
# Reasons for a score of NaN.
_UNDEFINED = {
    "rankme": "all vectors are zero",
    "alpha_req": "fewer than two eigenvalues above zero within probe.alpha_ranks",
    "effective_rank": "all vectors are the same",
    "lidar": "there is only one image, or the mean of the views is the same for all images",
    "alignment": _ZERO,
    "uniformity": f"fewer than two images, or {_ZERO}",
    "cls_patch_cosine": "the encoder has no [CLS] token",
    "register_patch_cosine": "the encoder has no registers",
    "position_r2": "each image has a single patch",
}
# The images are split into these three sets to fit and score the position regression.
_PARTS = ("train", "selection", "test")
# Fraction of all images that are in "selection". The fraction in "test" is the same.
_HOLDOUT = 0.2
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# If the standard deviation of a channel is smaller than this, relative to its mean, the channel
# varies only by rounding.
_CONSTANT_CHANNEL = 1e-6
# Number of images whose distances to all other images are in memory at the same time.
_PAIR_ROWS = 1024

Patches = Float[Tensor, "images rows cols dim"]
Positions = Float64[Tensor, "patches 2"]
LayerFacet = tuple[int, Facet]
LayerMetric = tuple[int, str]


@dataclass(frozen=True)
class Geometry(Probe):
    """A probe that measures how features are distributed, for example the rank of image vectors.

    The probe measures ranks, spectra and similarities of image vectors, and properties of patch
    tokens. No labels are needed. The central square of every image is encoded. Random crops (views)
    of some images are also encoded.

    Attributes:
        facet: Feature vectors that represent an image, one name or a list: "cls" for the [CLS]
            token, "patch_mean" for the mean of the patches, or an output from inside the block,
            averaged over the patches. Metrics of patch tokens always use the output of the block.
        image_size: Side in pixels of the square images that the encoder receives. None for the
            encoder's native size.
        crop_share: Side of the central square, relative to the shorter side of the image.
        view_images: Number of images that are also encoded as random crops, for the metrics LiDAR
            and alignment.
        views: Number of random crops of each of the `view_images` images. Half of the crops are
            flipped horizontally.
        view_area: Smallest and largest area of a random crop, relative to the image.
        lidar_delta: Constant that the metric LiDAR adds to the diagonal of the covariance matrix of
            the views.
        alpha_ranks: First and last rank of the eigenvalues in the power-law fit of the metric
            alpha-ReQ. The largest eigenvalue has rank 1.
        pair_images: Number of images for the metric uniformity, which compares all pairs of these
            images.
        outlier_factor: A patch token is an outlier if its norm exceeds this factor times the median
            norm of its image.
        batch_size: Maximum number of images in a forward pass.
        num_workers: Number of threads that read images.
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
    # Version 2 adds the constant of the paper to LiDAR.
    metric_version = 2
    role = "images"
    is_slow = True
    known_facets = ("cls", "patch_mean", *INNER_FACETS)
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("view_area", "alpha_ranks"):
            low, high = getattr(self, name)
            if low > high:
                raise ConfigurationError(
                    f"probe.{name} must contain the smaller number first, got [{low},{high}]"
                )

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = [*product(self.facets, IMAGE_METRICS), *product(["token"], TOKEN_METRICS)]
        return [(layer, facet, metric) for layer in sorted(layers) for facet, metric in metrics]

    def scored_images(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Encode random views (crops) and the central squares of images, then score each layer.

        If a score is undefined for the encoder or the dataset, it is NaN and its details state the
        reason. If the run is killed, the next run reuses all finished views, but encodes the
        central squares again.

        Raises:
            UnsupportedEncoderError: `facet` includes "cls", and the encoder has no [CLS] token.
        """
        images = self.scored_images(context.dataset)
        subsets = draw_subsets(self, len(images), context.seed)
        journal = self._views_journal(context, images, subsets["views"])
        # Views come first, because they take most of the time.
        views = self._encode_views(context, images, subsets["views"], journal)
        statistics = self._encode_images(context, images, subsets)
        if len(images) < 3:
            context.say(
                f"geometry: {_FEW}, so scores of spectra and positions are unreliable or undefined"
            )
        layers = sorted(context.layers)
        for layer in context.progress(layers, "geometry, spectra", len(layers)):
            for facet in self.facets:
                yield from self._image_scores((layer, facet), statistics, views[layer, facet])
            yield from self._token_scores(layer, statistics, context)
        journal.remove()

    def _views_journal(
        self, context: ProbeContext, images: ImageSet, indices: Sequence[int]
    ) -> Journal:
        """Return the file that stores the feature vectors of random views (crops).

        The file already contains the vectors of images that a killed run has finished. `indices`
        selects the images whose views are encoded.
        """
        header = {
            "encoder": encoder_id(context.encoder.identity()),
            "images": [images.fingerprint(), *indices],
            "layers": context.layers,
            "facets": self.facets,
            "views": [self.views, *self.view_area, self._side(context), context.seed],
            "computation": [str(context.dtype), context.device.type],
        }
        folder = cache_folder(None) / "features"
        return Journal(
            folder, "geometry_views", header, say=context.say, minutes=1.0, is_cache=True
        )

    def _encode_views(
        self, context: ProbeContext, images: ImageSet, indices: Sequence[int], journal: Journal
    ) -> dict[LayerFacet, Float[Tensor, "images views _dim"]]:
        """Encode random views (crops) of images, and return the feature vectors by layer and facet.

        A facet is a kind of feature, such as the [CLS] token. The vectors are in CPU memory.
        `indices` selects the images. `journal` contains the vectors of images that a killed run has
        already encoded.
        """
        # For each image: one tensor of layers x views x dim for each facet.
        vectors: dict[int, list[Tensor]] = {
            entry["image"]: entry["vectors"] for entry in journal.entries
        }
        remaining = [index for index in indices if index not in vectors]
        extractor = self._extractor(context)
        area, side = (self.view_area[0], self.view_area[1]), self._side(context)
        crops = ResizedCrops(self.views, context.seed, area=area)

        def crop(sample: Sample) -> Float[Tensor, "views 3 side side"]:
            # `ResizedCrops` also crops a mask, which this probe does not need.
            empty = replace(sample, mask=np.zeros(sample.image.shape[:2], np.uint8))
            return torch.stack([crops.make_view(empty, n, side)[0] for n in range(crops.count)])

        samples = read_ahead(images, remaining, crop, num_workers=self.num_workers)
        label = f"geometry, {self.views} views of each image"
        progress = context.progress(samples, label, len(remaining))
        try:
            for index, views in zip(remaining, progress, strict=True):
                parts = []
                for batch in views.split(self._batch_size(context)):
                    features, sums = extractor.extract_unchecked(to_device(batch, context.device))
                    by_facet = [image_vectors(features, facet) for facet in self.facets]
                    ids = [images.ids[index]] * len(batch)
                    parts.append(fetch_and_check(extractor, sums, ids, by_facet))
                vectors[index] = [torch.cat(part, 1) for part in zip(*parts, strict=True)]
                journal.append({"image": index, "vectors": vectors[index]})
        except BaseException:
            journal.flush()
            raise
        stacked = map(torch.stack, zip(*(vectors[index] for index in indices), strict=True))
        return {
            (layer, facet): facet_vectors[:, position]
            for facet, facet_vectors in zip(self.facets, stacked, strict=True)
            for position, layer in enumerate(context.layers)
        }

    def _encode_images(
        self, context: ProbeContext, images: ImageSet, subsets: Mapping[str, Sequence[int]]
    ) -> "ImageStatistics":
        """Encode the central square of every image, and collect statistics of the features.

        `subsets` contains the indices of images from `draw_subsets`, such as "test" for the images
        on which the position regression is scored.
        """
        encoder = context.encoder
        available = {"token": True, "cls": encoder.has_cls, REGISTERS: encoder.num_registers > 0}
        extractor = self._extractor(context, [facet for facet in available if available[facet]])
        statistics = ImageStatistics(self, context.layers, images, subsets["pairs"])
        side, order = self._side(context), [index for part in _PARTS for index in subsets[part]]

        def crop(sample: Sample) -> UInt8[Tensor, "3 side side"]:
            return central_square(sample.image, side, crop_share=self.crop_share)

        samples = read_ahead(images, order, crop, num_workers=self.num_workers)
        progress = iter(context.progress(samples, "geometry", len(order)))
        # Each batch contains images of one part. The regression is trained before it is scored.
        for part in _PARTS:
            squares = zip(subsets[part], islice(progress, len(subsets[part])), strict=True)
            for batch in batched(squares, self._batch_size(context)):
                pixels = to_device(torch.stack([square for _, square in batch]), context.device)
                statistics.add(extractor, pixels.float() / 255, [i for i, _ in batch], part)
        return statistics

    def _image_scores(
        self,
        cell: LayerFacet,
        statistics: "ImageStatistics",
        views: Float[Tensor, "images views dim"],
    ) -> Iterator[Score]:
        """Yield the scores of the image vectors of one layer and facet (kind of feature).

        `statistics` describes the features of the central squares. `views` contains the vectors of
        random crops.
        """
        moments = statistics.moments[cell]
        count, dim = moments.count, len(moments.mean)
        first, last = self.alpha_ranks
        exponent, ranks = alpha_req(moments, (first, last))
        details: dict[str, Any] = {"dim": dim, "constant_features": is_constant(moments)}
        for metric, value, more in (
            ("rankme", rankme(moments), _rank_limit(count, dim)),
            ("alpha_req", exponent, {"ranks": list(ranks)}),
            ("effective_rank", centred_effective_rank(moments), _rank_limit(count - 1, dim)),
        ):
            yield _score(cell, metric, value, count, details | more)
        views = views.double()
        count, _, dim = views.shape
        details = {"views": self.views}
        rank = lidar(views, delta=self.lidar_delta)
        yield _score(cell, "lidar", rank, count, details | _rank_limit(count - 1, dim))
        yield _score(cell, "alignment", mean_estimate(alignment(views)), count, details)
        vectors = torch.cat(statistics.uniformity_vectors[cell]).double()
        yield _score(cell, "uniformity", uniformity(vectors), len(vectors), {})

    def _token_scores(
        self, layer: int, statistics: "ImageStatistics", context: ProbeContext
    ) -> Iterator[Score]:
        cell, encoder = (layer, "token"), context.encoder
        outliers = statistics.per_image[layer, "outlier_share"].double().numpy()
        count = len(outliers)
        details = {"percent_of_images_with_any": 100.0 * float((outliers > 0).mean())}
        yield _score(cell, "outlier_share", mean_estimate(outliers), count, details)
        num_cls = encoder.num_prefix_tokens - encoder.num_registers
        for kind, num_tokens in (("cls", num_cls), ("register", encoder.num_registers)):
            metric, unavailable = f"{kind}_patch_cosine", torch.full((count,), math.nan)
            cosines = statistics.per_image.get((layer, metric), unavailable).double().numpy()
            more = {f"num_{kind}_tokens": num_tokens}
            yield _score(cell, metric, mean_estimate(cosines), count, more)
        regression = statistics.regressions[layer]
        if regression.model is None:
            yield _score(cell, "position_r2", math.nan, count, {"undefined": _FEW})
            return
        r2 = torch.cat(regression.r2).cpu().numpy()
        details = {"penalty": regression.model.penalty, "num_held_out": len(r2)}
        # The interval covers the random choice of the scored images, but not that of the training
        # images.
        yield _score(cell, "position_r2", mean_estimate(r2), count, details)

    def _extractor(self, context: ProbeContext, more: Iterable[Facet] = ()) -> FeatureExtractor:
        parts = [part for facet in self.facets for part in facet_parts(facet)]
        return context.extractor(context.layers, *dict.fromkeys([*parts, *more]))

    def _side(self, context: ProbeContext) -> int:
        return self.resize.square_side(context.encoder.native_size)

    def _batch_size(self, context: ProbeContext) -> int:
        return images_per_pass(self.batch_size, self._side(context), context.device)


def _rank_limit(images: int, dim: int) -> dict[str, Any]:
    """Return the largest possible rank of image vectors, as details to store with a score.

    "rank_limit" is the number of images or the dimension `dim` of the vectors, whichever is
    smaller. "limited_by_images" states whether there are fewer images than dimensions.
    """
    return {"rank_limit": min(images, dim), "limited_by_images": images < dim}


def _score(
    cell: LayerFacet,
    metric: str,
    estimate: float | Jackknife,
    num_images: int,
    details: dict[str, Any],
) -> Score:
    """Convert the estimate of a metric to a `Score`.

    If the estimate is a `Jackknife`, the score has a 95 % confidence interval, which is clipped to
    the possible values of the metric. If the estimate is NaN, the details state the reason. `cell`
    is the layer and the facet (kind of feature).
    """
    if isinstance(estimate, Jackknife):
        value, margin = estimate.value, estimate.margin
    else:
        value, margin = estimate, math.nan
    ci95 = None
    if not math.isnan(value) and not math.isnan(margin):
        low, high = _RANGES[metric]
        ci95 = max(low, value - margin), min(high, value + margin)
    if math.isnan(value):
        details = {"undefined": _UNDEFINED[metric], **details}
    elif metric not in _RANGES:
        details = {"no_interval": _NO_INTERVAL, **details}
    unit = "%" if metric == "outlier_share" else ""
    return Score(*cell, metric, value, ci95, num_images, details, unit=unit)


def draw_subsets(probe: Geometry, num_images: int, seed: int) -> dict[str, list[int]]:
    """Choose random images for each purpose, such as random crops, and return their indices.

    Returns:
        Indices in ascending order under five keys. The images in "views" are encoded as random
        crops. All pairs of images in "pairs" are compared for the metric uniformity. "train",
        "selection" and "test" divide all images into three parts for the position regression. Its
        penalty is selected on "selection". It is then trained on "train" and "selection", and
        scored on "test". If there are fewer than three images, all of them are in "train".
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_images, generator=generator).tolist()
    held_out = max(1, round(_HOLDOUT * num_images)) if num_images > 2 else 0
    return {
        "views": sorted(order[: probe.view_images]),
        "pairs": sorted(order[: probe.pair_images]),
        "train": sorted(order[2 * held_out :]),
        "selection": sorted(order[held_out : 2 * held_out]),
        "test": sorted(order[:held_out]),
    }


class ImageStatistics:
    """Statistics of the features of all images, each encoded as its central square.

    Attributes:
        moments: Mean and covariance of the image vectors, by layer and facet (kind of feature).
        uniformity_vectors: For each layer and facet, the vectors of the images that the metric
            uniformity compares. They are in CPU memory.
        per_image: One value for each image, in CPU memory. The keys are a layer and a metric of
            patch tokens, such as "outlier_share".
        regressions: For each layer, the regression from patch tokens to the positions of patches.
    """

    def __init__(
        self,
        probe: Geometry,
        layers: Sequence[int],
        images: ImageSet,
        uniformity_indices: Sequence[int],
    ) -> None:
        self._probe, self._images, self._uniformity_indices = (
            probe,
            images,
            frozenset(uniformity_indices),
        )
        cells = [(layer, facet) for facet in probe.facets for layer in layers]
        self.moments = {cell: Moments() for cell in cells}
        self.uniformity_vectors: dict[LayerFacet, list[Tensor]] = {cell: [] for cell in cells}
        self.per_image: dict[LayerMetric, Float[Tensor, " images"]] = {}
        self.regressions = {layer: PositionRegression() for layer in layers}

    def add(
        self,
        extractor: FeatureExtractor,
        pixels: Float[Tensor, "batch 3 height width"],
        indices: Sequence[int],
        part: str,
    ) -> None:
        """Encode a batch of images, and update all statistics.

        `indices` are the indices of these images in the dataset. `part` states how the position
        regression uses these images: "train", "selection" or "test".
        """
        features, sums = extractor.extract_unchecked(pixels)
        rows = [row for row, index in enumerate(indices) if index in self._uniformity_indices]
        own_vectors: list[Tensor] = []
        for facet in self._probe.facets:
            for layer, vectors in zip(features, image_vectors(features, facet), strict=True):
                self.moments[layer, facet].add(vectors)
                own_vectors.append(vectors[rows] if len(rows) < len(indices) else vectors)
        for layer, facets in features.items():
            self.regressions[layer].add(facets["token"], part)
        values = self._patch_values(features)
        ids = [self._images.ids[index] for index in indices]
        on_host = fetch_and_check(extractor, sums, ids, [*own_vectors, *values.values()])
        for cell, vectors in zip(self.uniformity_vectors, on_host[: len(own_vectors)], strict=True):
            self.uniformity_vectors[cell].append(vectors)
        for cell, batch in zip(values, on_host[len(own_vectors) :], strict=True):
            nan = torch.full((len(self._images),), torch.nan)
            self.per_image.setdefault(cell, nan)[list(indices)] = batch

    def _patch_values(self, features: Features) -> dict[LayerMetric, Float[Tensor, " batch"]]:
        """Compute the metrics of patch tokens for each image, such as the share of outliers.

        Each key of the result is a pair of a layer and a metric.
        """
        values: dict[LayerMetric, Float[Tensor, " batch"]] = {}
        for layer, facets in features.items():
            patches = facets["token"]
            values[layer, "outlier_share"] = outlier_share(patches, self._probe.outlier_factor)
            if "cls" in facets:
                values[layer, "cls_patch_cosine"] = patch_cosine(facets["cls"][:, None], patches)
            if REGISTERS in facets:
                values[layer, "register_patch_cosine"] = patch_cosine(facets[REGISTERS], patches)
        return values


def alignment(views: Float64[Tensor, "images views dim"]) -> Float64[np.ndarray, " images"]:
    """Return the mean squared distance between the views of each image, in [0, 4].

    The mean is over all pairs of views of the image. The vectors of the views are L2-normalised
    first. The result for an image is NaN if one of its vectors is zero.

    Source: Wang and Isola, "Understanding Contrastive Representation Learning", 2020.
    """
    unit, times = _normalise_or_nan(views), views.shape[1]
    # The squared distances of all pairs of views add up to views^2 minus the squared norm of the
    # sum.
    total = times**2 - unit.sum(1).square().sum(1)
    return (total / (times * (times - 1) / 2)).clamp(min=0.0).cpu().numpy()


def uniformity(vectors: Float64[Tensor, "images dim"]) -> Jackknife:
    """Return the uniformity of image vectors, as a jackknife estimate with a 95 % interval.

    The vectors are L2-normalised first. Uniformity is the logarithm of the mean of exp(-2
    distance^2) over all pairs of vectors. Uniformity is in [-8, 0]: 0 if all vectors have the same
    direction, and lower if the directions are spread more evenly. The result is NaN for a single
    image, and if a vector is zero. The computing time is proportional to images^2 * dim.

    Source: Wang and Isola, 2020, https://github.com/ssnl/align_uniform/tree/78ccdb19.
    """
    unit, count = _normalise_or_nan(vectors), len(vectors)
    sums = [
        torch.exp(4 * (rows @ unit.T) - 4).sum(1) - torch.exp(4 * rows.square().sum(1) - 4)
        for rows in unit.split(_PAIR_ROWS)
    ]
    by_image = torch.cat(sums).cpu().numpy()
    total, pairs, fewer = by_image.sum(), count * (count - 1), (count - 1) * (count - 2)
    value = float(np.log(total / pairs)) if pairs else math.nan
    leave_one_out = np.log((total - 2 * by_image) / fewer) if fewer else np.full(count, value)
    return Jackknife(value, leave_one_out)


def _normalise_or_nan(vectors: Float64[Tensor, "*batch dim"]) -> Float64[Tensor, "*batch dim"]:
    """L2-normalise vectors. Vectors of zeros have no direction and become NaN."""
    nonzero = vectors.any(-1, keepdim=True)
    return torch.where(nonzero, unit_vectors(vectors), math.nan)


def outlier_share(patches: Patches, factor: float) -> Float[Tensor, " images"]:
    """For each image, return the percentage of its patches that have an unusually large norm.

    A norm is unusually large if it exceeds `factor` times the median norm of the image's patches.
    """
    # Scaling by a power of two is exact. It keeps the squares within the range of float32.
    scaled = patches / floor_to_power_of_two(patches.abs().amax((1, 2, 3), keepdim=True))
    norms = scaled.norm(dim=-1).flatten(1).sort(1).values
    count = norms.shape[1]
    # torch.median would return the lower of the two middle norms.
    median = (norms[:, (count - 1) // 2] + norms[:, count // 2]) / 2
    return 100 * (norms > factor * median[:, None]).float().mean(1)


def patch_cosine(
    tokens: Float[Tensor, "images tokens dim"], patches: Patches
) -> Float[Tensor, " images"]:
    """For each image, return the mean cosine similarity between `tokens` and its patch tokens.

    `tokens` are the [CLS] token or the register tokens of each image. The cosine similarity with a
    vector of zeros is 0.
    """
    # The mean of the dot products of unit vectors is the dot product of their means.
    token_mean = unit_vectors(tokens).mean(1)
    patch_mean = unit_vectors(patches.flatten(1, 2)).mean(1)
    return (token_mean * patch_mean).sum(-1)


class PositionRegression:
    """Ridge regression that predicts the position of a patch in the image from its token.

    Attributes:
        model: The fitted regression. None until the first test images are added.
        r2: R^2 of each test image, one tensor for each batch.
    """

    def __init__(self) -> None:
        self.model: PositionFit | None = None
        self.r2: list[Float64[Tensor, " images"]] = []
        self._sums = {"train": PositionSums(), "selection": PositionSums()}

    def add(self, patches: Patches, part: str) -> None:
        """Add images to fit or to score the regression.

        Images with the `part` "train" or "selection" are used to fit the regression. Images with
        the `part` "test" are used to score the regression. The regression is fitted when the first
        images with the `part` "test" are added.
        """
        if part in self._sums:
            self._sums[part].add(patches)
            return
        if self.model is None:
            self.model = fit_positions(self._sums["train"], self._sums["selection"])
            # Free the sums, because they take much memory.
            self._sums = {}
        self.r2.append(self.model.r2(patches))


class PositionSums:
    """Sums over patch tokens and their positions that are needed to fit a ridge regression."""

    def __init__(self) -> None:
        self.moments = Moments()
        self._crossed: Float64[Tensor, "dim 2"] = torch.empty(0, 2)

    def add(self, patches: Patches) -> None:
        tokens = to_float64(patches)
        images, rows, cols, dim = tokens.shape
        positions = centred_positions(rows, cols, tokens.device)
        if not self.moments.count:
            self._crossed = tokens.new_zeros(dim, 2)
        self._crossed += tokens.sum(0).flatten(0, 1).T @ positions
        self.moments.add(tokens.reshape(images * rows * cols, dim))

    @property
    def cross_covariance(self) -> Float64[Tensor, "dim 2"]:
        """Return the covariance between tokens and positions.

        Subtracting the mean token is not necessary, because the mean position in each image is 0.
        """
        return self._crossed / self.moments.count


@dataclass(frozen=True)
class PositionFit:
    """A fitted linear map from the token of a patch to the position of the patch.

    Attributes:
        mean: Mean token of the training images.
        weight: Weights that map a token minus `mean` to a position (y, x).
        penalty: Ridge penalty of the fit, for channels that were scaled to a variance of 1.
    """

    mean: Float64[Tensor, " dim"]
    weight: Float64[Tensor, "dim 2"]
    penalty: float

    def r2(self, patches: Patches) -> Float64[Tensor, " images"]:
        """Return the R^2 of the predicted patch positions in each image, averaged over x and y.

        R^2 is 1 - squared error / variance. For an image with a single row of patches, only x is
        scored, because y has no variance. For a single column, only y is scored. For a single
        patch, the result is NaN.
        """
        rows, cols = patches.shape[1:3]
        tokens = to_float64(patches).flatten(1, 2)
        positions = centred_positions(rows, cols, tokens.device)
        error = ((tokens - self.mean) @ self.weight - positions).square().sum(1)
        variance = positions.square().sum(0)
        varies = variance > 0
        if not varies.any():
            return torch.full((len(patches),), math.nan, dtype=torch.float64)
        return 1 - (error[:, varies] / variance[varies]).mean(1)


def fit_positions(train: PositionSums, selection: PositionSums) -> PositionFit:
    """Select the ridge penalty, and fit the regression from patch tokens to patch positions.

    For each ridge penalty, one regression is fitted to `train`. The penalty with the lowest error
    on `selection` is selected. The returned regression is fitted to `train` and `selection`
    together.
    """
    mean, covariance = train.moments.mean, train.moments.covariance
    other_mean, other_covariance = selection.moments.mean, selection.moments.covariance
    shift = other_mean - mean
    between, errors = torch.outer(shift, shift), []
    second_moments = other_covariance + between
    for fit in _fit_ridge(mean, covariance, train.cross_covariance, PENALTIES):
        # Mean squared error without the variance of the positions, which is the same for all fits.
        quadratic = (fit.weight * (second_moments @ fit.weight)).sum()
        errors.append(float(quadratic - 2 * (fit.weight * selection.cross_covariance).sum()))
    penalty = PENALTIES[min(range(len(errors)), key=errors.__getitem__)]
    counts = train.moments.count, selection.moments.count
    first, second = (count / sum(counts) for count in counts)
    (fit,) = _fit_ridge(
        first * mean + second * other_mean,
        first * covariance + second * other_covariance + first * second * between,
        first * train.cross_covariance + second * selection.cross_covariance,
        (penalty,),
    )
    return fit


def _fit_ridge(
    mean: Float64[Tensor, " dim"],
    covariance: Float64[Tensor, "dim dim"],
    cross_covariance: Float64[Tensor, "dim 2"],
    penalties: Sequence[float],
) -> list[PositionFit]:
    """Fit one ridge regression for each penalty, on channels that are scaled to a variance of 1.

    Args:
        mean: Mean token.
        covariance: Covariance of the tokens.
        cross_covariance: Covariance between tokens and positions.
        penalties: Ridge penalties.
    """
    deviation = covariance.diagonal().clamp(min=0).sqrt()
    varies = deviation > _CONSTANT_CHANNEL * mean.abs()
    scale = torch.where(varies, 1 / deviation.clamp(min=1e-300), 0.0)
    values, axes = torch.linalg.eigh(scale[:, None] * covariance * scale)
    projected = axes.T @ (scale[:, None] * cross_covariance)
    fits = []
    for penalty in penalties:
        weight = axes @ (projected / (values.clamp(min=0) + penalty)[:, None])
        fits.append(PositionFit(mean, scale[:, None] * weight, penalty))
    return fits


def centred_positions(rows: int, cols: int, device: torch.device) -> Positions:
    """Return the centre (y, x) of each patch relative to the image's centre, in (-0.5, 0.5)."""
    place = float64_device(device)
    y = (torch.arange(rows, dtype=torch.float64, device=place) + 0.5) / rows - 0.5
    x = (torch.arange(cols, dtype=torch.float64, device=place) + 0.5) / cols - 0.5
    return torch.cartesian_prod(y, x)
