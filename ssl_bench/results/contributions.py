"""What each image contributed to a value, kept beside its record, and what comes of it."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    average_precision,
    average_recall,
    mean_iou,
    object_accuracy,
    object_f_beta,
    object_iou,
    pixel_accuracy,
)

NUM_FOLDS = 5
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
_KINDS: Mapping[str, Kind] = {
    "hits": Kind((), _share, lambda hits: Share(hits.astype(bool))),
    "percent": _of_each(lambda percent: percent.astype(np.float64), ()),
    # The share of the draws of training images with which an image was right.
    "hits_of_draws": Kind((None,), _share, lambda hits: mean_estimate(100.0 * hits.mean(1))),
    "points": _of_each(_points, (2,)),
    "mean_iou": _of_total(mean_iou, _PIXELS, mean_iou_estimate),
    "pixel_accuracy": _of_total(pixel_accuracy, _PIXELS, pixel_accuracy_estimate),
    "average_precision": _detections(average_precision),
    "average_recall": _detections(average_recall),
    "object_f_beta": _of_each(object_f_beta, (4,)),
    "object_iou": _of_each(object_iou, (4,)),
    "object_accuracy": _of_each(object_accuracy, (4,)),
}
"""By the names in `PerImageKind`."""

_OLDER_NAMES = {
    "miou.*": "mean_iou",
    "pixel_accuracy": "pixel_accuracy",
    r".*_\d+shot": "hits_of_draws",
    "pck_.*": "points",
    "ap|ap50": "average_precision",
    "ar100": "average_recall",
    "max_f_beta": "object_f_beta",
    "iou": "object_iou",
    "accuracy": "object_accuracy",
}


def guessed_kind(metric: str, per_image: PerImage) -> str:
    """Guess the kind of the values in a record that was written before records stated it.

    Floats were percentages and single numbers hits, whatever the metric was called. Only counts
    were known by the name of their metric.
    """
    if per_image.dtype.kind == "f":
        return "percent"
    if per_image.ndim == 1:
        return "hits"
    return next((kind for name, kind in _OLDER_NAMES.items() if re.fullmatch(name, metric)), "hits")


def adds_up(per_image: PerImage, record: Record) -> bool:
    """Return whether the value of a record comes from these contributions.

    They do not where a later version wrote them in a kind that this one does not know.
    """
    kind = _KINDS.get(record.per_image_kind or guessed_kind(record.metric, per_image))
    sides = per_image.shape[1:]
    if (
        kind is None
        or len(sides) != len(kind.shape)
        or any(wanted not in (None, side) for side, wanted in zip(sides, kind.shape, strict=True))
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
        kind: Name of what an image contributes; None in records that do not state it.
        degenerate: Percent of degenerate images by block, where it is known.
    """

    metric: str
    per_image: Mapping[int, PerImage]
    is_ranked: bool = True
    kind: str | None = None
    degenerate: Mapping[int, float] = field(default_factory=dict)

    @property
    def candidates(self) -> tuple[int, ...]:
        """The blocks that may be best: none if more is not better, and no degenerate one."""
        if not self.is_ranked:
            return ()
        return tuple(n for n in self.per_image if not is_degenerate(self.degenerate.get(n)))

    def value(self, per_image: PerImage) -> float:
        """Return the metric of some of the images."""
        return self._kind(per_image).value(per_image)

    def estimate(self, per_image: PerImage) -> Estimate:
        """Return the metric of some of the images with its interval."""
        return self._kind(per_image).estimate(per_image)

    def _kind(self, per_image: PerImage) -> Kind:
        return _KINDS[self.kind or guessed_kind(self.metric, per_image)]

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
        folds = [fold for fold in np.array_split(order, NUM_FOLDS) if len(fold)]
        mixed = np.empty_like(next(iter(self.per_image.values())))
        layers = []
        for fold in folds:
            others = np.setdiff1d(order, fold)
            layers.append(self.best_layer(others if len(others) else fold))
            mixed[fold] = self.per_image[layers[-1]][fold]
        return mixed, layers


@dataclass(frozen=True)
class CurveEstimates:
    """The estimates of a curve, each made once however often it is compared.

    Attributes:
        blocks: By layer.
        degenerate: Percent of degenerate images by block, where it is known.
        has_best: Whether a block may be best, see `ImageCurve.candidates`.
        best: The candidate with the largest value; the last block if there is no candidate.
        held_out: Every image as the block sees it that other images choose.
        held_out_layers: The blocks that were chosen, fold by fold.
    """

    blocks: Mapping[int, Estimate]
    degenerate: Mapping[int, float]
    has_best: bool
    best: int
    held_out: Estimate
    held_out_layers: tuple[int, ...]

    @classmethod
    def of(cls, curve: ImageCurve) -> "CurveEstimates":
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
            held_out_layers=tuple(layers),
        )

    @property
    def held_out_degenerate_percent(self) -> float | None:
        """Percent of degenerate images behind `held_out`."""
        # Folds are of equal size, so a block counts as often as it was chosen.
        chosen = [self.degenerate[n] for n in self.held_out_layers if n in self.degenerate]
        return sum(chosen) / len(chosen) if chosen else None


def load_curve(store: ResultStore, records: Sequence[Record]) -> ImageCurve:
    """Read the contributions to records of one checkpoint and seed.

    Blocks whose contributions were not kept, or do not fit, are left out.
    """
    if not records:
        return ImageCurve("", {})
    read = {record.layer: fitting_contributions(store, record) for record in records}
    kept = {layer: per_image for layer, per_image in read.items() if per_image is not None}
    shares = {record.layer: record.degenerate_percent for record in records}
    known = {layer: share for layer, share in shares.items() if share is not None}
    first = records[0]
    return ImageCurve(first.metric, kept, first.is_ranked, first.per_image_kind, known)


def check_values(store: ResultStore, records: Iterable[Record]) -> None:
    """Compare the values of older records with what their images contributed.

    Contributions that do not fit join `store.damaged`. A record with a digest of itself was checked
    when it was read.
    """
    for record in records:
        if record.record_sha256 is None:
            fitting_contributions(store, record)


def fitting_contributions(store: ResultStore, record: Record) -> PerImage | None:
    """Read what each image contributed to a record; None where nothing was kept.

    None as well where the contributions do not add up to the value of the record: then their file
    joins `store.damaged`.
    """
    per_image = store.per_image(record)
    if per_image is None or adds_up(per_image, record):
        return per_image
    # Without a meaning, as top-5 of two classes, there is nothing that they add up to.
    if not math.isnan(record.value):
        store.damaged.append(store.per_image_path(record))
    return None
