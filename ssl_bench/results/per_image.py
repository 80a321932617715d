"""Compute metrics, confidence intervals and the best block from per-image values of results."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from ssl_bench.intervals import (
    Estimate,
    Proportion,
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
"""Number of folds into which images are split to choose the best block on held-out images."""


@dataclass(frozen=True)
class MetricRule:
    """A rule that computes a metric in percent from per-image values.

    For example, the rule "hits" computes the percentage of images with the value 1. `PerImageKind`
    lists the names of all rules.

    Attributes:
        shape: Shape of the values of one image, with None for any length.
        value: Function that computes the metric from the values of several images.
        estimate: Function that also returns the data for the confidence interval of the metric.
    """

    shape: tuple[int | None, ...]
    value: Callable[[PerImage], float]
    estimate: Callable[[PerImage], Estimate]


def _score_of_sums(
    score: Callable[[Any], Any], shape: tuple[int | None, ...], estimate: Callable[[Any], Estimate]
) -> MetricRule:
    """Return the rule for a metric that is computed from counts summed over images, such as mIoU.

    Args:
        score: Function that computes the metric from the summed counts.
        shape: Shape of the counts of one image, with None for any length.
        estimate: Function that computes the metric and the data for its confidence interval.
    """
    return MetricRule(
        shape, lambda per_image: float(score(per_image.sum(0, dtype=np.int64))), estimate
    )


def _mean_of_scores(score: Callable[[Any], Any], shape: tuple[int | None, ...]) -> MetricRule:
    """Return the rule for a metric that is the mean score of single images.

    Args:
        score: Function that computes the score of each image in percent from its values.
        shape: Shape of the values of one image, with None for any length.
    """
    return MetricRule(
        shape,
        lambda per_image: float(score(per_image).mean()),
        lambda per_image: mean_estimate(score(per_image)),
    )


def _percent_of_hits(hits: PerImage) -> float:
    return 100.0 * float(hits.sum()) / hits.size


def _percent_of_points(per_image: PerImage) -> Float64[np.ndarray, " images"]:
    correct, points = per_image.astype(np.float64).T
    return 100.0 * correct / points


def _score_of_detections(score: Callable[[Any], Any]) -> MetricRule:
    return _score_of_sums(score, (None, None), partial(bootstrap_estimate, score=score))


_PIXEL_COUNTS = (3, None)
# The keys are the names in `PerImageKind`.
_RULES: Mapping[str, MetricRule] = {
    "hits": MetricRule((), _percent_of_hits, lambda hits: Proportion(hits.astype(bool))),
    "percent": _mean_of_scores(lambda percent: percent.astype(np.float64), ()),
    "hits_of_draws": MetricRule(
        (None,), _percent_of_hits, lambda hits: mean_estimate(100.0 * hits.mean(1))
    ),
    "points": _mean_of_scores(_percent_of_points, (2,)),
    "mean_iou": _score_of_sums(mean_iou, _PIXEL_COUNTS, mean_iou_estimate),
    "pixel_accuracy": _score_of_sums(pixel_accuracy, _PIXEL_COUNTS, pixel_accuracy_estimate),
    "average_precision": _score_of_detections(average_precision),
    "average_recall": _score_of_detections(average_recall),
    "object_f_beta": _mean_of_scores(object_f_beta, (4,)),
    "object_iou": _mean_of_scores(object_iou, (4,)),
    "object_accuracy": _mean_of_scores(object_accuracy, (4,)),
}

_KINDS_OF_OLD_METRICS = {
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


def guess_kind(metric: str, per_image: PerImage) -> str:
    """Guess the kind of per-image values, such as "hits", for an old record that lacks it.

    The kind is the rule that computes the metric from the per-image values. A record is the stored
    result of one evaluation. Early versions stored percentages as floats, and hits as one integer
    for each image. For all other per-image values, the name of the metric determines the kind.
    """
    if per_image.dtype.kind == "f":
        return "percent"
    if per_image.ndim == 1:
        return "hits"
    names = _KINDS_OF_OLD_METRICS.items()
    return next((kind for name, kind in names if re.fullmatch(name, metric)), "hits")


def matches_record(per_image: PerImage, record: Record) -> bool:
    """Return whether per-image values match their record, which is a stored result.

    The metric that the values yield must equal the value in the record, up to rounding. The values
    must also have the shape that `PerImageKind` describes. Pixel counts with more correct pixels
    than predicted pixels of a class, for example, are invalid.
    """
    rule = _RULES.get(record.per_image_kind or guess_kind(record.metric, per_image))
    shape = per_image.shape[1:]
    if (
        rule is None
        or len(shape) != len(rule.shape)
        or any(length not in (None, own) for own, length in zip(shape, rule.shape, strict=True))
    ):
        return False
    if rule.shape == _PIXEL_COUNTS:
        correct, predicted, true = per_image.swapaxes(0, 1)
        # Each counted pixel has one predicted and one true class, so the two sums must be equal.
        if (correct > np.minimum(predicted, true)).any():
            return False
        if (predicted.sum(1) != true.sum(1)).any():
            return False
    value = rule.value(per_image)
    # Allow for rounding, because the recorded mean of floats may have been computed in float32.
    rel_tol = 1e-5 if per_image.dtype.kind == "f" else 0
    is_near = math.isclose(value, record.value, rel_tol=rel_tol, abs_tol=1e-6)
    return is_near or (math.isnan(value) and math.isnan(record.value))


@dataclass(frozen=True)
class ImageCurve:
    """The per-image values of one metric for each block of one encoder.

    Attributes:
        metric: Name of the metric.
        per_image: Per-image values by block index.
        is_ranked: Whether a higher value of the metric is better.
        kind: Kind of the values, one of `PerImageKind`, or None if the stored results lack it.
        degenerate: Percentage of images with an arbitrary (degenerate) result, by block index.
            Blocks with an unknown percentage are left out.
    """

    metric: str
    per_image: Mapping[int, PerImage]
    is_ranked: bool = True
    kind: str | None = None
    degenerate: Mapping[int, float] = field(default_factory=dict)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Indices of the blocks that may be reported as best.

        A block is left out if the results of too many images are arbitrary (degenerate). If a
        higher value of the metric is not better, no block may be reported as best.
        """
        if not self.is_ranked:
            return ()
        return tuple(n for n in self.per_image if not is_degenerate(self.degenerate.get(n)))

    def value(self, per_image: PerImage) -> float:
        return self._rule(per_image).value(per_image)

    def estimate(self, per_image: PerImage) -> Estimate:
        return self._rule(per_image).estimate(per_image)

    def find_best_layer(self, images: Int64[np.ndarray, " chosen"] | slice = slice(None)) -> int:
        """Return the index of the block with the highest metric.

        Only blocks in `candidates`, which must not be empty, are compared.

        Args:
            images: Indices of the images from which the metric is computed (default: all).
        """
        values = {layer: self.value(self.per_image[layer][images]) for layer in self.candidates}
        return max(values, key=lambda layer: np.nan_to_num(values[layer], nan=-1.0))

    def choose_held_out(self) -> tuple[PerImage, list[int]]:
        """Choose a block for each fold of images: the block that is best on the other folds.

        The images are split into `NUM_FOLDS` random folds, always with seed 0. At least one block
        must be in `candidates`.

        Returns:
            The values of each image, taken from the block that was chosen for its fold, and the
            index of the chosen block for each fold.
        """
        first = next(iter(self.per_image.values()))
        order = np.random.default_rng(0).permutation(len(first))
        folds = [fold for fold in np.array_split(order, NUM_FOLDS) if len(fold)]
        per_image = np.empty_like(first)
        layers = []
        for fold in folds:
            others = np.setdiff1d(order, fold)
            layers.append(self.find_best_layer(others if len(others) else fold))
            per_image[fold] = self.per_image[layers[-1]][fold]
        return per_image, layers

    @property
    def has_best(self) -> bool:
        return bool(self.candidates)

    @cached_property
    def best_layer(self) -> int:
        """Index of the best block, or of the last block if none may be reported as best."""
        return self.find_best_layer() if self.candidates else max(self.per_image)

    @cached_property
    def layer_estimates(self) -> Mapping[int, Estimate]:
        """The metric by block index, with the data for its confidence interval."""
        return {layer: self.estimate(values) for layer, values in self.per_image.items()}

    @property
    def held_out_estimate(self) -> Estimate:
        """Metric at blocks that are chosen on held-out images, by cross-validation.

        The images are split into folds, and each fold is scored with the block that is best on the
        other folds. If no block may be reported as best, the metric of the last block is used.
        """
        return self._held_out[0]

    @property
    def held_out_layers(self) -> tuple[int, ...]:
        """For each fold of images, the index of the block that is best on the other folds.

        If no block may be reported as best, the result only contains the index of the last block.
        """
        return self._held_out[1]

    @property
    def held_out_degenerate_percent(self) -> float | None:
        """Percentage of degenerate images, averaged over the blocks that are chosen for the folds.

        The result of a degenerate image is arbitrary. The percentage is None if no record contains
        it.
        """
        # The sizes of the folds differ by at most one image, so each fold has the same weight.
        percents = [self.degenerate[n] for n in self.held_out_layers if n in self.degenerate]
        return sum(percents) / len(percents) if percents else None

    @cached_property
    def _held_out(self) -> tuple[Estimate, tuple[int, ...]]:
        if not self.candidates:
            return self.layer_estimates[self.best_layer], (self.best_layer,)
        per_image, layers = self.choose_held_out()
        # If all folds choose the same block, the difference to this block must be exactly 0.
        is_one_block = len(set(layers)) == 1
        estimate = self.layer_estimates[layers[0]] if is_one_block else self.estimate(per_image)
        return estimate, tuple(layers)

    def _rule(self, per_image: PerImage) -> MetricRule:
        return _RULES[self.kind or guess_kind(self.metric, per_image)]


def load_curve(store: ResultStore, records: Sequence[Record]) -> ImageCurve:
    """Read the per-image values of one metric for each block of an encoder.

    A block is left out if its per-image values are missing or do not match its record.

    Args:
        store: Folder of results.
        records: Records (stored results) of the same metric, encoder and seed, at most one for each
            block.
    """
    if not records:
        return ImageCurve("", {})
    loaded = {record.layer: load_matching_values(store, record) for record in records}
    per_image = {layer: values for layer, values in loaded.items() if values is not None}
    percents = {record.layer: record.degenerate_percent for record in records}
    degenerate = {layer: percent for layer, percent in percents.items() if percent is not None}
    first = records[0]
    return ImageCurve(first.metric, per_image, first.is_ranked, first.per_image_kind, degenerate)


def check_values(store: ResultStore, records: Iterable[Record]) -> None:
    """Find per-image files that do not match their records, and add them to `damaged_files`.

    Only older records are checked. Newer records contain a digest of their per-image file, which is
    checked whenever the file is read.

    Args:
        store: Folder of results, whose attribute `damaged_files` lists the damaged files.
        records: Records (stored results) in this folder.
    """
    for record in records:
        if record.record_sha256 is None:
            load_matching_values(store, record)


def load_matching_values(store: ResultStore, record: Record) -> PerImage | None:
    """Return the per-image values of a record, or None if they are missing or do not match it.

    A record is the stored result of one evaluation. If the values do not match the record, the path
    of their file is added to `store.damaged_files`, unless the metric in the record is undefined
    (NaN).
    """
    per_image = store.load_per_image(record)
    if per_image is None or matches_record(per_image, record):
        return per_image
    # An undefined metric, such as the top-5 accuracy of two classes, is recorded as NaN. It cannot
    # be compared with the per-image values.
    if not math.isnan(record.value):
        store.damaged_files.append(store.per_image_path(record))
    return None
