"""Clustering: how well do k-means clusters of the features of each block match the classes?

The clusters are computed without labels. With `probe.protocol=images`, the scored images are
clustered. With `probe.protocol=patches`, patches of the training images are clustered, and each
patch of the scored images is assigned to a cluster.
"""

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
    Table,
    class_ious,
    contingency_table,
    image_independent_baselines,
    image_intervals,
    interval_warnings,
    match_clusters,
    patch_intervals,
)
from probes.features.image import ImagePass, is_constant
from probes.features.stream import batched, fetch_and_check, read_ahead
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
from ssl_bench.scores import IGNORE_INDEX
from ssl_bench.system.device import to_device

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

LayerFacet = tuple[int, str]

METRICS = ("ami", "nmi", "ari", "purity", "miou_matched")
PATCH_METRICS = (*METRICS, "accuracy_matched")
MAJORITY = "miou_majority"
"""Metric that lets each cluster predict its most frequent class.

It is scored only if patches are clustered and there are more clusters than classes.
"""


@dataclass(frozen=True)
class Clustering(Probe):
    """A probe that clusters features with k-means and compares the clusters with the classes.

    All features are L2-normalised.

    Attributes:
        protocol: What is clustered: "images" (the scored images, which have a class label) or
            "patches" (patches of the training images). With "patches", the patches of the scored
            images are assigned to the nearest clusters, and their pixels are scored.
        facet: Kind of features, or a list of kinds. For images: cls or patch_mean. For patches:
            token, token_normed, key, query or value. For both: attn_out, attn_skip, mlp_hidden,
            mlp_out, or a submodule of a block.
        clusters_per_class: Number of clusters divided by the number of classes, or a list of such
            numbers.
        num_restarts: Number of initialisations of k-means. The clusters with the lowest inertia are
            used.
        fit_patches: Maximum number of training patches to cluster, drawn at random. Only for the
            protocol "patches".
        image_size: Side in pixels of the square images that the encoder receives. The default is
            512 for the protocol "patches", and the encoder's native size for "images".
        crop_share: Side of the central square crop, relative to the shorter side of the image. Only
            for the protocol "images".
        batch_size: Number of images in a forward pass of the encoder.
        memory_gib: Maximum size of the features in GiB. If the features of all layers exceed it,
            the encoder processes the images several times.
        num_workers: Number of threads that decode images.
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
    shares_features = True
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size", "memory_gib")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonempty("probe.clusters_per_class", self.clusters_per_class)

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        """Return the default settings for a dataset, given its roles (the tasks that it supports).

        Patches are clustered if the dataset has masks (the role "segmentation") but no class labels
        (the role "classification").
        """
        needs_patches = "segmentation" in roles and "classification" not in roles
        return {"protocol": "patches"} if needs_patches else {}

    @property
    def role(self) -> str:
        return "classification" if self.protocol == "images" else "segmentation"

    @property
    def known_facets(self) -> tuple[Facet, ...]:
        patch_facets = ("token", "token_normed", "key", "query", "value")
        named = ("cls", "patch_mean") if self.protocol == "images" else patch_facets
        return (*named, *INNER_FACETS)

    @property
    def cluster_factors(self) -> tuple[int, ...]:
        """Return the distinct values of the setting `clusters_per_class`."""
        return tuple(dict.fromkeys(self.clusters_per_class))

    def metrics(self, factor: int) -> tuple[str, ...]:
        """Return the names of the metrics that are scored with `factor` clusters per class."""
        if self.protocol == "images":
            return METRICS
        return PATCH_METRICS if factor == 1 else (*PATCH_METRICS, MAJORITY)

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric_name(metric, factor))
            for layer in sorted(layers)
            for facet in self.facets
            for factor in self.cluster_factors
            for metric in self.metrics(factor)
        ]

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """Return the images whose patches are clustered, or None if whole images are clustered."""
        return None if self.protocol == "images" else dataset.train()

    def settings(self) -> dict[str, Any]:
        unused = "fit_patches" if self.protocol == "images" else "crop_share"
        return {name: value for name, value in super().settings().items() if name != unused}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Cluster the features of all requested layers, and yield the agreement with the classes.

        Raises:
            ConfigurationError: There are fewer images or patches than clusters, or the encoder has
                no [CLS] token.
            DataError: No scored image has a labelled pixel.
        """
        if self.protocol == "patches":
            yield from self._score_patches(context, self.scored_images(context.dataset))
        else:
            yield from self._score_images(context, self.scored_images(context.dataset))

    def _require_at_most(self, most: int, classes: int, items: str, advice: str) -> None:
        """Raise a ConfigurationError if there would be more clusters than items to cluster.

        `most` is the number of items, which are images or patches. In the error message, `items`
        names the images or patches, and `advice` says how to get more.
        """
        if (clusters := max(self.cluster_factors) * classes) > most:
            raise ConfigurationError(
                f"probe.clusters_per_class gives {clusters} clusters, expected at most {most}, the "
                f"number of {items}. Use fewer clusters, {advice}"
            )

    # Images.

    def _score_images(self, context: ProbeContext, images: ImageSet) -> Iterator[Score]:
        classes = len(images.class_names)
        items = f"images of {images.name} {images.split}"
        self._require_at_most(len(images), classes, items, "or more images")
        image_pass = ImagePass(self, context, self.batch_size)
        layers_per_pass = image_pass.layers_per_pass(len(images), self.memory_gib)
        for layers in batched(sorted(context.layers), layers_per_pass):
            features = image_pass.run(images, range(len(images)), layers)
            cells = list(itertools.product(layers, self.facets))
            for cell in context.progress(cells, "clustering", len(cells)):
                labelled = features.select(*cell)
                unit = unit_vectors(labelled.features)
                vectors = unit.double().numpy()
                details = {
                    "constant_features": is_constant(unit),
                    "warnings": zero_vectors_warning(unit),
                }
                for factor in self.cluster_factors:
                    clusters = factor * classes
                    kmeans = fit_kmeans(vectors, clusters, self.num_restarts, context.seed)
                    assigned = np.asarray(kmeans.labels_, np.int64)
                    table = contingency_table(assigned, labelled.labels.numpy(), clusters, classes)
                    intervals = image_intervals(table)
                    yield from self._scores(cell, factor, table, intervals, len(images), details)

    # Patches.

    def _score_patches(self, context: ProbeContext, val: ImageSet) -> Iterator[Score]:
        train, classes = context.dataset.train(), len(val.class_names)
        side = self._image_size(context) // context.encoder.patch_size
        chosen = draw_patches(len(train) * side**2, self.fit_patches, context.seed)
        items = f"patches of {train.name} {train.split}"
        self._require_at_most(
            len(chosen), classes, items, "more images or a larger probe.fit_patches"
        )
        extractor = context.extractor(sorted(context.layers), *self.facets)
        width = sum(map(extractor.width, self.facets))
        layers_per_pass = max(1, int(self.memory_gib * 2**30 / (2 * width * len(chosen))))
        for layers in batched(extractor.layers, layers_per_pass):
            extractor = context.extractor(layers, *self.facets)
            vectors = self._extract_training_patches(context, extractor, train, chosen, side**2)
            centers: dict[LayerFacet, list[Float[Tensor, "_centers _dim"]]] = {}
            details: dict[LayerFacet, dict[str, Any]] = {}
            for cell in context.progress(list(vectors), "clustering", len(vectors)):
                unit = vectors.pop(cell).float()
                centers[cell] = [
                    torch.from_numpy(
                        fit_kmeans(
                            unit.numpy(), factor * classes, self.num_restarts, context.seed
                        ).cluster_centers_
                    )
                    .float()
                    .to(context.device)
                    for factor in self.cluster_factors
                ]
                details[cell] = {
                    "num_fit_patches": len(unit),
                    "constant_features": is_constant(unit),
                    "warnings": zero_vectors_warning(unit),
                }
            labels, clusters = self._assign_scored_patches(context, extractor, val, centers, side)
            if not len(labels.pixels):
                raise DataError(f"{val.name} {val.split} has no labelled pixel. Check its masks")
            for cell, by_factor in clusters.items():
                for factor, assigned in zip(self.cluster_factors, by_factor, strict=True):
                    table, by_image = patch_contingency(labels, assigned, factor * classes, classes)
                    ious = class_ious(table, match_clusters(table)).tolist()
                    iou_by_class = {
                        name: None if math.isnan(iou) else iou
                        for name, iou in zip(val.class_names, ious, strict=True)
                    }
                    intervals = patch_intervals(table, by_image)
                    more = details[cell] | {"iou_by_class": iou_by_class}
                    yield from self._scores(cell, factor, table, intervals, len(val), more)

    def _image_size(self, context: ProbeContext) -> int:
        return self.resize.square_side(context.encoder.native_size)

    def _extract_training_patches(
        self,
        context: ProbeContext,
        extractor: FeatureExtractor,
        images: ImageSet,
        chosen: Int64[Tensor, " chosen"],
        patches: int,
    ) -> dict[LayerFacet, Float16[Tensor, "chosen _dim"]]:
        """Return the L2-normalised features of the training patches to cluster.

        Args:
            context: Inputs of the probe, such as the device.
            extractor: Feature extractor of the requested layers and facets (kinds of features, such
                as keys).
            images: The training images. Images without a chosen patch are not encoded.
            chosen: Indices of the chosen patches in ascending order. All patches of all images are
                numbered consecutively.
            patches: Number of patches of each image.
        """
        vectors = {
            (layer, facet): torch.empty(len(chosen), extractor.width(facet), dtype=torch.float16)
            for layer, facet in itertools.product(extractor.layers, self.facets)
        }
        indices, counts = (chosen // patches).unique_consecutive(return_counts=True)
        within = (chosen % patches).split(counts.tolist())
        size = self._image_size(context)

        def prepare(sample: Sample) -> Float[Tensor, "3 side side"]:
            return resize_bilinear(image_and_mask(sample)[0], size, size)

        pixels = read_ahead(images, indices.tolist(), prepare, num_workers=self.num_workers)
        pixels = context.progress(pixels, "clustered images", len(indices))
        start = 0
        for batch in batched(enumerate(pixels), self.batch_size):
            inputs = to_device(torch.stack([image for _, image in batch]), context.device)
            features, sums = extractor.extract_unchecked(inputs)
            numbers = [number for number, _ in batch]
            places = [within[number] + patches * n for n, number in enumerate(numbers)]
            rows = to_device(torch.cat(places), context.device)
            ids = [images.ids[indices[number]] for number in numbers]
            parts = [unit_patches(features, cell)[rows].half() for cell in vectors]
            parts = fetch_and_check(extractor, sums, ids, parts)
            for values, part in zip(vectors.values(), parts, strict=True):
                values[start : start + len(part)] = part
            start += len(rows)
        return vectors

    def _assign_scored_patches(
        self,
        context: ProbeContext,
        extractor: FeatureExtractor,
        images: ImageSet,
        centers: Mapping[LayerFacet, Sequence[Float[Tensor, "_centers _dim"]]],
        side: int,
    ) -> tuple["PatchLabels", dict[LayerFacet, Integer[np.ndarray, "kmeans images patches"]]]:
        """Assign each patch of the scored images to its nearest cluster center.

        Args:
            context: Inputs of the probe, such as the device.
            extractor: Feature extractor of the requested layers and facets (kinds of features).
            images: The scored images.
            centers: Centers of the k-means models of each layer and facet.
            side: Number of patches along a side of an image.

        Returns:
            The number of pixels of each class in each patch. For each k-means model, also the index
            of the center that is nearest to each patch.
        """
        size, labels = self._image_size(context), list[PatchLabels]()

        def prepare(sample: Sample) -> tuple[Float[Tensor, "3 side side"], PatchLabels]:
            image, mask = image_and_mask(sample)
            patch_labels = PatchLabels.from_mask(mask.numpy(), side, side)
            return resize_bilinear(image, size, size), patch_labels

        assigned: dict[LayerFacet, list[Tensor]] = {cell: [] for cell in centers}
        items = read_ahead(images, range(len(images)), prepare, num_workers=self.num_workers)
        items = context.progress(items, "scored images", len(images))
        for batch in batched(items, self.batch_size):
            inputs = to_device(torch.stack([image for image, _ in batch]), context.device)
            features, sums = extractor.extract_unchecked(inputs)
            parts = [
                nearest_centers(unit_patches(features, cell), sets)
                for cell, sets in centers.items()
            ]
            ids = images.ids[len(labels) : len(labels) + len(batch)]
            parts = fetch_and_check(extractor, sums, ids, parts)
            labels += [patch_labels for _, patch_labels in batch]
            for earlier, part in zip(assigned.values(), parts, strict=True):
                earlier.append(part.unflatten(1, (len(batch), -1)))
        return PatchLabels.concatenate(labels, side**2), {
            cell: torch.cat(parts, 1).numpy() for cell, parts in assigned.items()
        }

    def _scores(
        self,
        cell: LayerFacet,
        factor: int,
        table: Table,
        intervals: Mapping[str, Interval | None],
        num_images: int,
        details: Mapping[str, Any],
    ) -> Iterator[Score]:
        """Yield the scores of all metrics for one block, facet and number of clusters per class.

        `cell` is a pair of a block and a facet (kind of feature), and `factor` is the number of
        clusters per class. `intervals` contains the interval of each metric.
        """
        baselines = image_independent_baselines(table, self.metrics(factor))
        more = {
            "num_clusters": len(table),
            "empty_clusters": int((table.sum(1) == 0).sum()),
            "warnings": [*interval_warnings(table, num_images), *details.get("warnings", ())],
        }
        for metric in self.metrics(factor):
            baseline = baselines[metric].as_details() if metric in baselines else {}
            yield Score(
                *cell,
                metric_name(metric, factor),
                float(SCORES[metric](table)),
                intervals.get(metric),
                num_images,
                {**details, **more, **baseline},
                unit="" if metric == "ari" else "%",
            )


def metric_name(metric: str, factor: int) -> str:
    """Append the number of clusters per class to the name of a metric, such as "_x3" for three.

    For one cluster per class, nothing is appended.
    """
    return metric if factor == 1 else f"{metric}_x{factor}"


def fit_kmeans(
    unit: Float[np.ndarray, "vectors dim"], count: int, restarts: int, seed: int
) -> "KMeans":
    """Fit k-means with several initialisations, and return the fit with the lowest inertia.

    If there are fewer distinct vectors than clusters, some clusters are empty. `unit` contains
    L2-normalised vectors, `count` is the number of clusters, and `restarts` is the number of
    initialisations.
    """
    # Imported here, so that planning a run does not import scikit-learn.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    kmeans = KMeans(count, n_init=restarts, random_state=seed)
    with warnings.catch_warnings():
        # scikit-learn warns if vectors are equal. This warning is not needed, because the details
        # of the scores contain the number of empty clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return kmeans.fit(unit)


def draw_patches(total: int, most: int, seed: int) -> Int64[Tensor, " chosen"]:
    """Draw at most `most` of `total` patches at random, and return their sorted indices."""
    return torch.tensor(sorted(random.Random(seed).sample(range(total), min(total, most))))


def unit_patches(features: Features, cell: LayerFacet) -> Float[Tensor, "patches dim"]:
    """Return the L2-normalised features of all patches of a batch, for one block and facet.

    `cell` is a pair of a block and a facet (kind of feature, such as keys). The patches of an image
    are in row-major order.
    """
    layer, facet = cell
    return unit_vectors(features[layer][facet].flatten(0, 2))


def nearest_centers(
    unit: Float[Tensor, "patches dim"], centers: Sequence[Float[Tensor, "_centers dim"]]
) -> Int32[Tensor, "kmeans patches"]:
    """For each k-means model, return the index of the center that is nearest to each patch.

    If several centers are equally near to a patch, the index of the first center is returned.
    """
    joined = torch.cat([*centers])
    # Instead of |x - c|^2, this computes x c - |c|^2 / 2, because |x|^2 is equal for all centers.
    nearness = unit @ joined.T - joined.square().sum(1) / 2
    parts = nearness.split([len(part) for part in centers], 1)
    return torch.stack([part.argmax(1) for part in parts]).int()


class PatchLabels(NamedTuple):
    """The number of pixels of each class in each patch, as a sparse list of (patch, class) pairs.

    A pair is left out if the patch has no pixel of the class.

    Attributes:
        patches: Index of the patch in each pair. The patches of all images are numbered
            consecutively, row by row.
        classes: Index of the class in each pair.
        pixels: Number of pixels of this class in this patch, for each pair.
    """

    patches: Int64[np.ndarray, " pairs"]
    classes: Int64[np.ndarray, " pairs"]
    pixels: Int64[np.ndarray, " pairs"]

    @classmethod
    def from_mask(
        cls, mask: UInt8[np.ndarray, "height width"], rows: int, cols: int
    ) -> "PatchLabels":
        """Count the pixels of each class in each patch of one image.

        The patch grid has `rows` x `cols` patches. If a pixel lies on the border of several
        patches, it belongs to the patch that contains its center. Pixels of class 255 are ignored.
        """
        down, across = (
            (2 * np.arange(length) + 1) * cells // (2 * length)
            for length, cells in zip(mask.shape, (rows, cols), strict=True)
        )
        cells = (down[:, None] * cols + across) * (IGNORE_INDEX + 1) + mask
        counts = np.bincount(cells.ravel(), minlength=rows * cols * (IGNORE_INDEX + 1))
        counts = counts.reshape(rows * cols, IGNORE_INDEX + 1)[:, :IGNORE_INDEX]
        patches, classes = counts.nonzero()
        return cls(patches, classes, counts[patches, classes].astype(np.int64))

    @classmethod
    def concatenate(cls, images: Sequence["PatchLabels"], patches: int) -> "PatchLabels":
        """Join the pixel counts of several images with `patches` patches each."""
        return cls(
            np.concatenate([one.patches + patches * n for n, one in enumerate(images)]),
            np.concatenate([one.classes for one in images]),
            np.concatenate([one.pixels for one in images]),
        )


def patch_contingency(
    labels: PatchLabels,
    clusters: Integer[np.ndarray, "images patches"],
    num_clusters: int,
    num_classes: int,
) -> tuple[Table, csr_array]:
    """Count the pixels in each pair of a cluster and a class.

    For each patch, `labels` contains the pixel counts, and `clusters` contains the cluster.

    Returns:
        The contingency table of all images, and a matrix with the flattened table of each image as
        a row.
    """
    cells = clusters.ravel()[labels.patches].astype(np.int64) * num_classes + labels.classes
    images = labels.patches // clusters.shape[1]
    shape = (len(clusters), num_clusters * num_classes)
    by_image = csr_array((labels.pixels, (images, cells)), shape=shape)
    return np.asarray(by_image.sum(0)).reshape(num_clusters, num_classes), by_image
