"""What each image contributed to a value, kept beside its record, and what comes of it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from ssl_bench.intervals import (
    Estimate,
    Share,
    bootstrap_estimate,
    mean_estimate,
    mean_iou_estimate,
    pixel_accuracy_estimate,
)
from ssl_bench.results.record import PerImage, Record, is_degenerate
from ssl_bench.results.store import ResultStore
from ssl_bench.scores import (
    OBJECT_SCORES,
    average_precision,
    average_recall,
    mean_iou,
    pixel_accuracy,
)

FOLDS = 5
"""Of the images, each scored with the block that the others choose."""


@dataclass(frozen=True)
class Kind:
    """What an image contributes to some metrics, and what they make of it.

    Attributes:
        shape: Of the contribution of an image; None is any length.
        value: In percent, or the metric's own unit.
        estimate: The same with what each image does to it.
    """

    shape: tuple[int | None, ...]
    value: Callable[[PerImage], float]
    estimate: Callable[[PerImage], Estimate]


def _of_total(
    score: Callable[[Any], Any], shape: tuple[int | None, ...], estimate: Callable[[Any], Estimate]
) -> Kind:
    """Of a score of counts that are summed over the images."""
    return Kind(shape, lambda per_image: float(score(per_image.sum(0, dtype=np.int64))), estimate)


def _of_each(score: Callable[[Any], Any], shape: tuple[int | None, ...]) -> Kind:
    """Of the mean of a score that each image has alone."""
    return Kind(
        shape,
        lambda per_image: float(score(per_image).mean()),
        lambda per_image: mean_estimate(score(per_image)),
    )


def _share(hits: PerImage) -> float:
    return 100.0 * float(hits.sum()) / hits.size


def _points(per_image: PerImage) -> Float64[np.ndarray, " images"]:
    right, points = per_image.astype(np.float64).T
    return 100.0 * right / points


def _detections(score: Callable[[Any], Any]) -> Kind:
    return _of_total(score, (None, None), partial(bootstrap_estimate, score=score))


_PIXELS = (3, None)
_HITS = Kind((), _share, lambda hits: Share(hits.astype(bool)))
_PERCENT = _of_each(lambda percent: percent.astype(np.float64), ())
_KINDS = {
    "miou.*": _of_total(mean_iou, _PIXELS, mean_iou_estimate),
    "pixel_accuracy": _of_total(pixel_accuracy, _PIXELS, pixel_accuracy_estimate),
    # Of each image the share of the draws of training images with which it was right.
    r".*_\d+shot": Kind((None,), _share, lambda hits: mean_estimate(100.0 * hits.mean(1))),
    "pck_.*": _of_each(_points, (2,)),
    "ap|ap50": _detections(average_precision),
    "ar100": _detections(average_recall),
    **{name: _of_each(score, (4,)) for name, score in OBJECT_SCORES.items()},
}
"""By the names of metrics, as regular expressions; all others are hits."""


def kind_of(metric: str, per_image: PerImage) -> Kind:
    """Floats are the percentage of each image, whatever the metric is called."""
    if per_image.dtype.kind == "f":
        return _PERCENT
    return next((kind for name, kind in _KINDS.items() if re.fullmatch(name, metric)), _HITS)


def adds_up(per_image: PerImage, record: Record) -> bool:
    """Whether the value of a record comes from these contributions."""
    kind, sides = kind_of(record.metric, per_image), per_image.shape[1:]
    if len(sides) != len(kind.shape) or any(
        wanted not in (None, side) for side, wanted in zip(sides, kind.shape, strict=True)
    ):
        return False
    if kind.shape == _PIXELS:
        right, predicted, true = per_image.swapaxes(0, 1)
        # Every pixel that counts is predicted as one class and is of one class.
        if (right > np.minimum(predicted, true)).any() or (predicted.sum(1) != true.sum(1)).any():
            return False
    value = kind.value(per_image)
    # A mean of floats may have been taken in float32.
    rel_tol = 1e-5 if per_image.dtype.kind == "f" else 0
    is_near = math.isclose(value, record.value, rel_tol=rel_tol, abs_tol=1e-6)
    return is_near or (math.isnan(value) and math.isnan(record.value))


@dataclass(frozen=True)
class ImageCurve:
    """One metric of one checkpoint over its blocks, image by image.

    Attributes:
        per_image: By block.
        is_ranked: Whether more is better, see `Record.is_ranked`.
        degenerate: Percent of degenerate images by block, where it is known.
    """

    metric: str
    per_image: Mapping[int, PerImage]
    is_ranked: bool = True
    degenerate: Mapping[int, float] = field(default_factory=dict)

    @property
    def candidates(self) -> tuple[int, ...]:
        """The blocks that may be best: none if more is not better, and no degenerate one."""
        if not self.is_ranked:
            return ()
        return tuple(n for n in self.per_image if not is_degenerate(self.degenerate.get(n)))

    def value(self, per_image: PerImage) -> float:
        """The metric, of some of the images."""
        return kind_of(self.metric, per_image).value(per_image)

    def estimate(self, per_image: PerImage) -> Estimate:
        """The metric with its interval."""
        return kind_of(self.metric, per_image).estimate(per_image)

    def best_layer(self, images: Int64[np.ndarray, " chosen"] | slice = slice(None)) -> int:
        """The candidate with the largest value on some of the images; there must be one."""
        values = {layer: self.value(self.per_image[layer][images]) for layer in self.candidates}
        return max(values, key=lambda layer: np.nan_to_num(values[layer], nan=-1.0))

    def held_out(self) -> tuple[PerImage, list[int]]:
        """Every image as the block sees it that the images of the other folds choose.

        There must be a candidate.

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
        degenerate: Percent of degenerate images by block, where it is known.
        has_best: Whether a block may be best, see `ImageCurve.candidates`.
        best: The candidate with the largest value; the last block if there is no candidate.
        held_out: Every image as the block sees it that other images choose.
        layers_held_out: The blocks that were chosen, fold by fold.
    """

    blocks: Mapping[int, Estimate]
    degenerate: Mapping[int, float]
    has_best: bool
    best: int
    held_out: Estimate
    layers_held_out: tuple[int, ...]

    @classmethod
    def of(cls, curve: ImageCurve) -> "Scored":
        """Of at least one block, all of the same images."""
        blocks = {layer: curve.estimate(some) for layer, some in curve.per_image.items()}
        if not curve.candidates:
            last = max(blocks)
            return cls(blocks, curve.degenerate, False, last, blocks[last], (last,))
        mixed, layers = curve.held_out()
        return cls(
            blocks=blocks,
            degenerate=curve.degenerate,
            has_best=True,
            best=curve.best_layer(),
            # A block that all folds choose is that block, and no different from itself.
            held_out=blocks[layers[0]] if len(set(layers)) == 1 else curve.estimate(mixed),
            layers_held_out=tuple(layers),
        )

    @property
    def degenerate_held_out(self) -> float | None:
        """Percent of degenerate images behind `held_out`."""
        # Folds are of equal size, so a block counts as often as it was chosen.
        chosen = [self.degenerate[n] for n in self.layers_held_out if n in self.degenerate]
        return sum(chosen) / len(chosen) if chosen else None


def stored_curve(store: ResultStore, records: Sequence[Record]) -> ImageCurve:
    """Of records of one checkpoint and seed; without blocks whose images were not kept.

    Contributions that do not add up to the value of their record join `store.damaged`.
    """
    kept = {}
    for record in records:
        per_image = store.per_image(record)
        if per_image is not None and adds_up(per_image, record):
            kept[record.layer] = per_image
        # Without a meaning, as top-5 of two classes, there is nothing that they add up to.
        elif per_image is not None and not math.isnan(record.value):
            store.damaged.append(store.per_image_path(record))
    if not records:
        return ImageCurve("", {})
    shares = {record.layer: record.degenerate_percent for record in records}
    known = {layer: share for layer, share in shares.items() if share is not None}
    return ImageCurve(records[0].metric, kept, records[0].is_ranked, known)
