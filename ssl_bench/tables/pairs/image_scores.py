"""A metric over the blocks of one checkpoint, from what each image contributes to it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from ssl_bench.intervals import (
    Estimate,
    Share,
    bootstrap_estimate,
    mean_iou_estimate,
    pixel_accuracy_estimate,
)
from ssl_bench.results import PerImage, Record, ResultStore
from ssl_bench.scores import average_precision, average_recall, mean_iou, pixel_accuracy

FOLDS = 5
_OF_DETECTIONS = {"ap": average_precision, "ap50": average_precision, "ar100": average_recall}


@dataclass(frozen=True)
class ImageCurve:
    """One metric of one checkpoint over its blocks, image by image.

    Attributes:
        per_image: By block.
    """

    metric: str
    per_image: Mapping[int, PerImage]

    @property
    def counts_pixels(self) -> bool:
        """Whether an image contributes pixels by class."""
        return self.metric.startswith("miou") or self.metric == "pixel_accuracy"

    @property
    def counts_boxes(self) -> bool:
        """Whether an image contributes boxes: see `ssl_bench.scores.DetectionCounts`."""
        return self.metric in _OF_DETECTIONS

    def value(self, per_image: PerImage) -> float:
        """The metric in percent."""
        total = per_image.sum(0, dtype=np.int64)
        if self.metric.startswith("miou"):
            return float(mean_iou(total))
        if self.metric == "pixel_accuracy":
            return float(pixel_accuracy(total))
        if self.counts_boxes:
            return float(_OF_DETECTIONS[self.metric](total))
        return 100.0 * float(total) / len(per_image)

    def estimate(self, per_image: PerImage) -> Estimate:
        """The metric with its interval."""
        if self.metric.startswith("miou"):
            return mean_iou_estimate(per_image)
        if self.metric == "pixel_accuracy":
            return pixel_accuracy_estimate(per_image)
        if self.counts_boxes:
            return bootstrap_estimate(per_image, _OF_DETECTIONS[self.metric])
        return Share(per_image.astype(bool))

    def best_layer(self, images: Int64[np.ndarray, " chosen"] | slice = slice(None)) -> int:
        """The block with the largest value on some of the images."""
        values = {layer: self.value(counts[images]) for layer, counts in self.per_image.items()}
        return max(values, key=lambda layer: np.nan_to_num(values[layer], nan=-1.0))

    def held_out(self) -> tuple[PerImage, list[int]]:
        """Every image as the block sees it that the images of the other folds choose.

        Returns:
            The contributions, and the block that each fold was given.
        """
        num_images = len(next(iter(self.per_image.values())))
        order = np.random.default_rng(0).permutation(num_images)
        folds = [fold for fold in np.array_split(order, FOLDS) if len(fold)]
        mixed = np.empty_like(next(iter(self.per_image.values())))
        layers = []
        for fold in folds:
            others = np.setdiff1d(order, fold)
            layers.append(self.best_layer(others if len(others) else fold))
            mixed[fold] = self.per_image[layers[-1]][fold]
        return mixed, layers


@dataclass(frozen=True)
class Scored:
    """The estimates of a curve, each made once however often it is compared.

    Attributes:
        blocks: By layer.
        best: The layer with the largest value.
        held_out: Of every image as the block sees it that other images choose.
        layers_held_out: The blocks that were chosen.
    """

    blocks: Mapping[int, Estimate]
    best: int
    held_out: Estimate
    layers_held_out: tuple[int, ...]

    @classmethod
    def of(cls, curve: ImageCurve) -> "Scored":
        """Of at least one block, all of the same images."""
        mixed, layers = curve.held_out()
        return cls(
            blocks={layer: curve.estimate(some) for layer, some in curve.per_image.items()},
            best=curve.best_layer(),
            held_out=curve.estimate(mixed),
            layers_held_out=tuple(sorted(set(layers))),
        )


def stored_curve(store: ResultStore, records: Sequence[Record]) -> ImageCurve:
    """Of records of one checkpoint and seed; without blocks whose images were not kept.

    Contributions that do not add up to the value of their record join `store.damaged`.
    """
    kept = {}
    for record in records:
        per_image = store.per_image(record)
        if per_image is not None and _adds_up(per_image, record):
            kept[record.layer] = per_image
        elif per_image is not None:
            store.damaged.append(store.per_image_path(record))
    return ImageCurve(records[0].metric if records else "", kept)


def _adds_up(per_image: PerImage, record: Record) -> bool:
    """Whether the value of a record comes from these contributions."""
    curve = ImageCurve(record.metric, {})
    counts = curve.counts_pixels or curve.counts_boxes
    if per_image.ndim != (3 if counts else 1):
        return False
    if curve.counts_pixels and per_image.shape[1] != 3:
        return False
    if curve.counts_boxes and min(per_image.shape) < 1:
        return False
    value = curve.value(per_image)
    is_near = math.isclose(value, record.value, rel_tol=0, abs_tol=1e-6)
    return is_near or (math.isnan(value) and math.isnan(record.value))
