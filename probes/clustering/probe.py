"""Clustering: do classes come out when nobody says what they are?"""

import itertools
import math
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float16, Int32, Int64, Integer, UInt8
from scipy.sparse import csr_array
from torch import Tensor

from probes.clustering.agreement import (
    SCORES,
    Met,
    few_images_warning,
    image_independent,
    image_intervals,
    ious,
    matched,
    meetings,
    patch_intervals,
)
from probes.features.image import ImagePass, is_constant
from probes.features.stream import batches, fetch_finite, read_ahead
from probes.features.training_images import image_and_mask, resize_bilinear
from ssl_bench.composition.fields import (
    Count,
    Pixels,
    PositiveFraction,
    PositiveOrZero,
    Threads,
    require_nonempty,
)
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, Features
from ssl_bench.intervals import Interval
from ssl_bench.layers import INNER_FACETS, Facet
from ssl_bench.neighbours import unit_vectors, zero_vectors_warning
from ssl_bench.scores import IGNORED
from ssl_bench.system.device import to_device

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

Cell = tuple[int, str]

METRICS = ("ami", "nmi", "ari", "purity", "miou_matched")
PATCH_METRICS = (*METRICS, "accuracy_matched")
MAJORITY = "miou_majority"
"""Of patches in more clusters than classes."""


@dataclass(frozen=True)
class Clustering(Probe):
    """K-means without labels, and how well its clusters agree with the classes.

    Attributes:
        protocol: "images": of images that have a class as a whole. "patches": of the patches of
            training images; each pixel of the scored ones is in the cluster of the patch over it.
        facet: What stands for an image, as for k-NN, or for a patch, as in correspondence; one or
            several, brought to length 1.
        clusters_per_class: One or several numbers; 1 is as many clusters as classes.
        num_restarts: K-means begins so often, and the tightest clusters are taken.
        fit_patches: For patches: so many training patches at most are clustered, drawn with the
            seed.
        image_size: Side in pixels; of images the encoder's own without it, of patches 512.
        crop_share: For images: side of the central square that is looked at, relative to the
            shorter side.
        memory_gib: For the features; layers that do not fit wait for another pass.
    """

    protocol: Literal["images", "patches"] = "images"
    facet: str | Sequence[str] = "cls"
    clusters_per_class: Sequence[Count] = (1,)
    num_restarts: Count = 3
    fit_patches: Count = 20_000
    image_size: Pixels | None = None
    crop_share: PositiveFraction = 0.875
    batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4

    task = "clustering"
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size", "memory_gib")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonempty("probe.clusters_per_class", self.clusters_per_class)

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        """Cluster patches if the dataset has masks and no class labels."""
        needs_patches = "segmentation" in roles and "classification" not in roles
        return {"protocol": "patches"} if needs_patches else {}

    @property
    def role(self) -> str:
        return "classification" if self.protocol == "images" else "segmentation"

    @property
    def known_facets(self) -> tuple[Facet, ...]:
        of_patches = ("token", "token_normed", "key", "query", "value")
        named = ("cls", "patch_mean") if self.protocol == "images" else of_patches
        return (*named, *INNER_FACETS)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of clusters a class, each once."""
        return tuple(dict.fromkeys(self.clusters_per_class))

    def metrics(self, times: int) -> tuple[str, ...]:
        """What is scored with so many clusters a class."""
        if self.protocol == "images":
            return METRICS
        return PATCH_METRICS if times == 1 else (*PATCH_METRICS, MAJORITY)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric_name(metric, times))
            for layer in sorted(layers)
            for facet in self.facets
            for times in self.numbers
            for metric in self.metrics(times)
        ]

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """Whole images are clustered where they are scored."""
        return None if self.protocol == "images" else dataset.train()

    def settings(self) -> dict[str, Any]:
        unused = "fit_patches" if self.protocol == "images" else "crop_share"
        return {name: value for name, value in super().settings().items() if name != unused}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers; a pass over the images serves as many as fit into `memory_gib`.

        Raises:
            ConfigurationError: more clusters are asked for than there are images or patches, or
                the encoder has no [CLS] token.
            DataError: no scored image has a labelled pixel.
        """
        of = self._scores_of_patches if self.protocol == "patches" else self._scores_of_images
        yield from of(context, self.split(context.dataset))

    def _scores_of_images(self, context: ProbeContext, images: ImageSet) -> Iterator[Score]:
        classes = len(images.class_names)
        what = f"images of {images.name} {images.split}"
        self._require_at_most(len(images), classes, what, "images")
        image_pass = ImagePass(self, context, self.batch_size)
        at_once = image_pass.layers_per_pass(len(images), self.memory_gib)
        for layers in batches(sorted(context.layers), at_once):
            found = image_pass.run(images, range(len(images)), layers)
            cells = list(itertools.product(layers, self.facets))
            for cell in context.progress(cells, "clustering", len(cells)):
                labelled = found.select(*cell)
                directions = unit_vectors(labelled.features)
                unit = directions.double().numpy()
                details = {
                    "constant_features": is_constant(directions),
                    "warnings": zero_vectors_warning(directions),
                }
                for times in self.numbers:
                    kmeans = clustered(unit, times * classes, self.num_restarts, context.seed)
                    clusters = np.asarray(kmeans.labels_, np.int64)
                    met = meetings(clusters, labelled.labels.numpy(), times * classes, classes)
                    intervals = image_intervals(met)
                    yield from self._scores(cell, times, met, intervals, len(unit), details)

    def _scores_of_patches(self, context: ProbeContext, val: ImageSet) -> Iterator[Score]:
        train, classes = context.dataset.train(), len(val.class_names)
        side = self._size(context) // context.encoder.patch_size
        chosen = drawn_patches(len(train) * side**2, self.fit_patches, context.seed)
        what = f"patches of {train.name} {train.split}"
        self._require_at_most(len(chosen), classes, what, "images or a larger probe.fit_patches")
        every = context.extractor(sorted(context.layers), *self.facets)
        width = sum(map(every.width, self.facets))
        at_once = max(1, int(self.memory_gib * 2**30 / (2 * width * len(chosen))))
        for layers in batches(every.layers, at_once):
            extractor = context.extractor(layers, *self.facets)
            vectors = self._training_vectors(context, extractor, train, chosen, side**2)
            centres: dict[Cell, list[Float[Tensor, "_centres _dim"]]] = {}
            details: dict[Cell, dict[str, Any]] = {}
            for cell in context.progress(list(vectors), "clustering", len(vectors)):
                unit = vectors.pop(cell).float()
                fitted = [
                    clustered(unit.numpy(), times * classes, self.num_restarts, context.seed)
                    for times in self.numbers
                ]
                centres[cell] = [
                    torch.from_numpy(one.cluster_centers_).float().to(context.device)
                    for one in fitted
                ]
                details[cell] = {
                    "num_fit_patches": len(unit),
                    "constant_features": is_constant(unit),
                    "warnings": zero_vectors_warning(unit),
                }
            labels, clusters = self._clusters_of_scored(context, extractor, val, centres, side)
            if not len(labels.pixels):
                raise DataError(f"{val.name} {val.split} has no labelled pixel")
            for cell, by_number in clusters.items():
                for times, found in zip(self.numbers, by_number, strict=True):
                    met, by_image = patch_meetings(labels, found, times * classes, classes)
                    by_class = zip(val.class_names, ious(met, matched(met)).tolist(), strict=True)
                    more = {"iou_by_class": {n: None if math.isnan(x) else x for n, x in by_class}}
                    intervals = patch_intervals(met, by_image)
                    told = details[cell] | more
                    yield from self._scores(cell, times, met, intervals, len(val), told)

    def _require_at_most(self, most: int, classes: int, what: str, more: str) -> None:
        asked = max(self.numbers) * classes
        if asked > most:
            raise ConfigurationError(
                f"probe.clusters_per_class must give at most the {most} clusters that {what} can "
                f"make, got {asked}; ask for fewer, or for more {more}"
            )

    def _size(self, context: ProbeContext) -> int:
        """Side in pixels of the squares that images are squashed to."""
        return self.resize.square_side(context.encoder.native_size)

    def _training_vectors(
        self,
        context: ProbeContext,
        extractor: FeatureExtractor,
        images: ImageSet,
        chosen: Int64[Tensor, " chosen"],
        patches: int,
    ) -> dict[Cell, Float16[Tensor, "chosen _dim"]]:
        """Chosen patches at unit length, in host memory; only images that have one are encoded."""
        found = {
            (layer, facet): torch.empty(len(chosen), extractor.width(facet), dtype=torch.float16)
            for layer, facet in itertools.product(extractor.layers, self.facets)
        }
        indices, counts = (chosen // patches).unique_consecutive(return_counts=True)
        within = (chosen % patches).split(counts.tolist())
        size = self._size(context)

        def prepared(sample: Sample) -> Float[Tensor, "3 side side"]:
            return resize_bilinear(image_and_mask(sample)[0], size, size)

        pixels = read_ahead(images, indices.tolist(), prepared, workers=self.num_workers)
        shown = context.progress(pixels, "clustered images", len(indices))
        first = 0
        for batch in batches(enumerate(shown), self.batch_size):
            together = to_device(torch.stack([pixels for _, pixels in batch]), context.device)
            features, sums = extractor.extract_unchecked(together)
            numbers = [number for number, _ in batch]
            places = [within[number] + patches * n for n, number in enumerate(numbers)]
            where = to_device(torch.cat(places), context.device)
            ids = [images.ids[indices[number]] for number in numbers]
            parts = [patch_directions(features, cell)[where].half() for cell in found]
            parts = fetch_finite(extractor, sums, ids, parts)
            for values, part in zip(found.values(), parts, strict=True):
                values[first : first + len(part)] = part
            first += len(where)
        return found

    def _clusters_of_scored(
        self,
        context: ProbeContext,
        extractor: FeatureExtractor,
        images: ImageSet,
        centres: Mapping[Cell, Sequence[Float[Tensor, "_centres _dim"]]],
        side: int,
    ) -> tuple["PatchLabels", dict[Cell, Integer[np.ndarray, "kmeans images patches"]]]:
        """Labels of all images, and the nearest of the centres for each of their patches."""
        size, labels = self._size(context), list[PatchLabels]()

        def prepared(sample: Sample) -> tuple[Float[Tensor, "3 side side"], PatchLabels]:
            image, mask = image_and_mask(sample)
            return resize_bilinear(image, size, size), PatchLabels.of_mask(mask.numpy(), side, side)

        found: dict[Cell, list[Tensor]] = {cell: [] for cell in centres}
        items = read_ahead(images, range(len(images)), prepared, workers=self.num_workers)
        shown = context.progress(items, "scored images", len(images))
        for batch in batches(shown, self.batch_size):
            together = to_device(torch.stack([pixels for pixels, _ in batch]), context.device)
            features, sums = extractor.extract_unchecked(together)
            parts = [
                nearest(patch_directions(features, cell), some) for cell, some in centres.items()
            ]
            ids = images.ids[len(labels) : len(labels) + len(batch)]
            parts = fetch_finite(extractor, sums, ids, parts)
            labels += [of_patches for _, of_patches in batch]
            for known, part in zip(found.values(), parts, strict=True):
                known.append(part.unflatten(1, (len(batch), -1)))
        return PatchLabels.joined(labels, side**2), {
            cell: torch.cat(known, 1).numpy() for cell, known in found.items()
        }

    def _scores(
        self,
        cell: Cell,
        times: int,
        met: Met,
        intervals: Mapping[str, Interval | None],
        num_images: int,
        details: Mapping[str, Any],
    ) -> Iterator[Score]:
        """All metrics of one block and facet in so many clusters a class; some have an interval."""
        baselines = image_independent(met, self.metrics(times))
        counted = {
            "num_clusters": len(met),
            "empty_clusters": int((met.sum(1) == 0).sum()),
            "warnings": [*few_images_warning(met, num_images), *details.get("warnings", ())],
        }
        for metric in self.metrics(times):
            baseline = baselines[metric].as_details() if metric in baselines else {}
            name, value = metric_name(metric, times), float(SCORES[metric](met))
            ci95, unit = intervals.get(metric), "" if metric == "ari" else "%"
            more = {**details, **counted, **baseline}
            yield Score(*cell, name, value, ci95, num_images, more, unit=unit)


def metric_name(metric: str, times: int) -> str:
    """With the number of clusters a class where that is not one."""
    return metric if times == 1 else f"{metric}_x{times}"


def clustered(
    unit: Float[np.ndarray, "vectors dim"], count: int, restarts: int, seed: int
) -> "KMeans":
    """The tightest of several k-means; as many clusters may be empty as vectors are equal.

    Costs vectors * dim * count for each step.
    """
    # Here, because a plan need not wait for scikit-learn.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    kmeans = KMeans(count, n_init=restarts, random_state=seed)
    with warnings.catch_warnings():
        # Fewer clusters than asked for, of features that are the same: the details say so.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return kmeans.fit(unit)


def drawn_patches(total: int, most: int, seed: int) -> Int64[Tensor, " chosen"]:
    """Patches that are clustered, counted over all images, ascending."""
    return torch.tensor(sorted(random.Random(seed).sample(range(total), min(total, most))))


def patch_directions(features: Features, cell: Cell) -> Float[Tensor, "patches dim"]:
    """Return the patches of a batch, row by row, at length 1, as one block and facet has them."""
    layer, facet = cell
    return unit_vectors(features[layer][facet].flatten(0, 2))


def nearest(
    unit: Float[Tensor, "patches dim"], centres: Sequence[Float[Tensor, "_centres dim"]]
) -> Int32[Tensor, "kmeans patches"]:
    """The cluster of each vector in each k-means; of equally near ones the first."""
    together = torch.cat([*centres])
    # |x - c|^2 without what is the same for all centres.
    nearness = unit @ together.T - together.square().sum(1) / 2
    parts = nearness.split([len(some) for some in centres], 1)
    return torch.stack([some.argmax(1) for some in parts]).int()


class PatchLabels(NamedTuple):
    """How many pixels of a class lie under a patch, for all pairs that meet.

    Attributes:
        patches: Row by row; of several images one image after the other.
    """

    patches: Int64[np.ndarray, " pairs"]
    classes: Int64[np.ndarray, " pairs"]
    pixels: Int64[np.ndarray, " pairs"]

    @classmethod
    def of_mask(
        cls, mask: UInt8[np.ndarray, "height width"], rows: int, cols: int
    ) -> "PatchLabels":
        """Of one image, at the size of its mask: each pixel lies under the patch over its middle.

        Pixels of class 255 lie under none.
        """
        down, across = (
            (2 * np.arange(length) + 1) * cells // (2 * length)
            for length, cells in zip(mask.shape, (rows, cols), strict=True)
        )
        cells = (down[:, None] * cols + across) * (IGNORED + 1) + mask
        counts = np.bincount(cells.ravel(), minlength=rows * cols * (IGNORED + 1))
        counts = counts.reshape(rows * cols, IGNORED + 1)[:, :IGNORED]
        patches, classes = counts.nonzero()
        return cls(patches, classes, counts[patches, classes].astype(np.int64))

    @classmethod
    def joined(cls, images: Sequence["PatchLabels"], patches: int) -> "PatchLabels":
        """Of all images, each of so many patches."""
        return cls(
            np.concatenate([one.patches + patches * n for n, one in enumerate(images)]),
            np.concatenate([one.classes for one in images]),
            np.concatenate([one.pixels for one in images]),
        )


def patch_meetings(
    labels: PatchLabels,
    clusters: Integer[np.ndarray, "images patches"],
    num_clusters: int,
    num_classes: int,
) -> tuple[Met, csr_array]:
    """Pixels by cluster and class: of all images, and a row for each, classes along clusters."""
    cells = clusters.ravel()[labels.patches].astype(np.int64) * num_classes + labels.classes
    images = labels.patches // clusters.shape[1]
    shape = (len(clusters), num_clusters * num_classes)
    by_image = csr_array((labels.pixels, (images, cells)), shape=shape)
    return np.asarray(by_image.sum(0)).reshape(num_clusters, num_classes), by_image
