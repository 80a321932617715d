"""Geometry: how do the features of a data set lie, whatever its images show?"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice, product
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from probes.features.image import image_vectors, parts_of
from probes.features.moments import Moments
from probes.features.stream import KeptState, at_once, batches, checked, read_ahead
from probes.features.views import ResizedCrops
from probes.geometry.estimates import (
    PositionFit,
    PositionSums,
    alignment,
    alpha_req,
    is_constant,
    lidar,
    outlier_share,
    patch_cosine,
    rankme,
    spread_rank,
    uniformity,
)
from ssl_bench.composition.fields import (
    Count,
    Items,
    Pixels,
    Positive,
    PositiveShare,
    ShareSpan,
    Threads,
    Within,
)
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, central_square
from ssl_bench.intervals import Interval, Jackknife, mean_estimate
from ssl_bench.layers import INNER_FACETS, REGISTERS, Facet
from ssl_bench.results import encoder_id
from ssl_bench.system.device import sent
from ssl_bench.system.paths import cache_folder
from ssl_bench.system.progress import in_words

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
# Seconds from which on it is said what takes less, and images after which they are known.
_LONG, _TIMED = 600.0, 2
# Of the images, for reading positions: to choose the penalty with, and to score on.
_SHARE = 0.2
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
    crop_share: PositiveShare = 0.875
    view_images: Count = 100
    views: Annotated[int, Within(2, 1000)] = 10
    view_area: ShareSpan = (0.5, 1.0)
    lidar_delta: Positive = 1e-4
    alpha_ranks: Annotated[Sequence[Count], Items(2, 2)] = (11, 100)
    pair_images: Count = 2000
    outlier_factor: Positive = 4.0
    batch_size: Count = 32
    num_workers: Threads = 4

    task = "geometry"
    role = "images"
    takes_long = True
    known_facets = ("cls", "patch_mean", *INNER_FACETS)
    not_settings = (*Probe.not_settings, "batch_size")

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
        paired: Whose pairs make uniformity.
        viewed: That are also looked at in random views.
        kept: The views of the images so far, until the scores are known; named after all that
            they depend on.
        moments: By block and facet, of what stands for the images.
        compared: By block and facet the vectors of the images whose pairs are compared.
        per_image: By block and metric a number for each image; NaN where nobody knows.
        positions: By block the share of the spread of positions that is read from the patches of
            each image that was held out; none where there are too few to hold any out.
        fits: By block what reads them.
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
        self.size = probe.image_size or min(context.encoder.native_size)
        self.at_once = at_once(probe.batch_size, self.size, context.device)
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
        features, sums = extractor.unchecked(sent(pixels, self.context.device).float() / 255)
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
        values = checked(extractor, sums, ids, [*pairs, *numbers.values()])
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
        start = 0.0
        try:
            for number, (index, some) in enumerate(zip(left, shown, strict=True)):
                # The first one waits for what is loaded once.
                start = start if number else time.monotonic()
                if number == _TIMED:
                    self._say_how_long((time.monotonic() - start) / _TIMED, len(left) - number)
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

    def _say_how_long(self, seconds: float, left: int) -> None:
        """What takes less time, where so many seconds for the views of an image make hours."""
        total = seconds * (left + len(self.images) / self.probe.views)
        if total > _LONG:
            self.context.say(
                f"geometry: about {in_words(total)} for {self.probe.views} views of "
                f"{len(self.viewed)} images and one of {len(self.images)}; probe.view_images=N, "
                "probe.views=N, a smaller probe.image_size or --limit N take less"
            )

    def _vectors(
        self, extractor: FeatureExtractor, crops: Float[Tensor, "views 3 size size"], image_id: str
    ) -> list[Float[Tensor, "layers views _dim"]]:
        parts = []
        for part in crops.split(self.at_once):
            features, sums = extractor.unchecked(sent(part, self.context.device))
            vectors = [image_vectors(features, facet) for facet in self.facets]
            parts.append(checked(extractor, sums, [image_id] * len(part), vectors))
        return [torch.cat(some, 1) for some in zip(*parts, strict=True)]

    def _extractor(self, more: Iterable[Facet]) -> FeatureExtractor:
        parts = [part for facet in self.facets for part in parts_of(facet)]
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
