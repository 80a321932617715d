"""Scores in percent from what was counted of images, in numpy: tables and reports need no torch.

Counts are integers, so only the mean over classes is rounded, in an order that is numpy's own and
the same on every machine.
"""

import numpy as np
from jaxtyping import Bool, Float, Float64, Integer

IGNORED = 255
"""Label of the pixels that do not count."""
ABSENT_CLASS_POLICY = "absent_from_both_is_nan"

Counts = Integer[np.ndarray, "*some 3 classes"]
"""By class the pixels that are right, predicted and true; see `ssl_bench.metrics.class_counts`."""


def iou_per_class(counts: Counts) -> Float64[np.ndarray, "*some classes"]:
    """Intersection over union in percent; NaN for a class in neither."""
    right, predicted, true = (counts[..., which, :].astype(np.int64) for which in range(3))
    return iou_of(right, predicted + true - right)


def iou_of(
    right: Integer[np.ndarray, "*some classes"], union: Integer[np.ndarray, "*some classes"]
) -> Float64[np.ndarray, "*some classes"]:
    """Intersection over union in percent; NaN for a class in neither."""
    return np.where(union > 0, 100.0 * right / np.maximum(union, 1), np.nan)


def mean_iou(counts: Counts) -> Float64[np.ndarray, "*some"]:
    """Mean of the class IoUs of a whole dataset, in percent, over the classes that occur."""
    return mean_of_known(iou_per_class(counts))


def mean_of_known(values: Float64[np.ndarray, "*some classes"]) -> Float64[np.ndarray, "*some"]:
    """Mean over the last axis without NaN; NaN where nothing is known."""
    known = ~np.isnan(values)
    count = known.sum(-1)
    total = np.where(known, values, 0.0).sum(-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def pixel_accuracy(counts: Counts) -> Float64[np.ndarray, "*some"]:
    """Percent of counted pixels whose class is right; NaN where none was counted."""
    right, true = (counts[..., which, :].sum(-1, dtype=np.int64) for which in (0, 2))
    return np.where(true > 0, 100.0 * right / np.maximum(true, 1), np.nan)


def is_hit(box: Float[np.ndarray, " 4"], ground_truth: Float[np.ndarray, "boxes 4"]) -> bool:
    """Whether a box overlaps any ground-truth box with IoU >= 1/2.

    Compared as 2 * intersection >= union, which is exact for whole pixels.
    """
    low = np.maximum(box[:2], ground_truth[:, :2])
    high = np.minimum(box[2:], ground_truth[:, 2:])
    intersection = np.clip(high - low, 0, None).prod(-1)
    areas = (box[2:] - box[:2]).prod() + (ground_truth[:, 2:] - ground_truth[:, :2]).prod(-1)
    return bool(((areas > 0) & (2 * intersection >= areas - intersection)).any())


def corloc(hits: Bool[np.ndarray, " images"]) -> float:
    """Correct localisation: percent of images whose box is a hit."""
    return 100.0 * float(hits.mean())
