"""Which of the found boxes of an image are right, as COCO decides it."""

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ssl_bench.scores import IOU_THRESHOLDS, MOST_DETECTIONS

# COCO's own, so that boxes that are the same overlap enough at any threshold.
_ENOUGH = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)


def box_ious(
    found: Float64[np.ndarray, "found 4"], true: Float64[np.ndarray, "true 4"]
) -> Float64[np.ndarray, "found true"]:
    """Intersection over union; boxes are (x0, y0, x1, y1), far edges exclusive."""
    low = np.maximum(found[:, None, :2], true[None, :, :2])
    high = np.minimum(found[:, None, 2:], true[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (found, true)]
    either = areas[0][:, None] + areas[1] - both
    return both / np.where(either > 0, either, 1)


def right_boxes(
    ious: Float64[np.ndarray, "found true"],
) -> Bool[np.ndarray, "found thresholds"]:
    """Whether a found box is right at each of `IOU_THRESHOLDS`.

    Each takes, in turn, the true box that it overlaps most of those that none has taken before it,
    the last one of several, if that is enough.

    Args:
        ious: Of found boxes, the surest first.

    Source: evaluateImg of pycocotools' COCOeval, without crowds.
    """
    found, true = ious.shape
    right = np.zeros((found, len(_ENOUGH)), bool)
    if not true:
        return right
    free = np.ones((len(_ENOUGH), true), bool)
    for number, overlaps in enumerate(ious):
        fitting = np.where(free & (overlaps >= _ENOUGH[:, None]), overlaps, -1.0)
        taken = true - 1 - fitting[:, ::-1].argmax(1)
        right[number] = fitting.max(1) >= 0
        free[right[number], taken[right[number]]] = False
    return right


def detection_counts(
    found: Float64[np.ndarray, "found 4"],
    ranks: Int64[np.ndarray, " found"],
    true: Float64[np.ndarray, "true 4"],
    *,
    num_ranks: int,
) -> Int64[np.ndarray, "ranks_and_truth thresholds_and_all"]:
    """What an image contributes to `ssl_bench.scores.average_precision`.

    Args:
        found: Of which the surest `MOST_DETECTIONS` count.
        ranks: How sure each is, 0 the most; of one rank the first box matches first.
        true: All true boxes.
        num_ranks: How many ranks there are.
    """
    order = np.argsort(ranks, kind="stable")[:MOST_DETECTIONS]
    counts = np.zeros((1 + num_ranks, 1 + len(IOU_THRESHOLDS)), np.int64)
    counts[0, 0] = len(true)
    right = right_boxes(box_ious(found[order], true))
    np.add.at(counts[1:, 0], ranks[order], 1)
    np.add.at(counts[1:, 1:], ranks[order], right)
    return counts
