"""Scores in percent from what was counted of images, in numpy: tables and reports need no torch.

Counts are integers, so only the mean over classes is rounded, in an order that is numpy's own and
the same on every machine.
"""

import io
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Integer, Real

IGNORED = 255
"""Label of the pixels that do not count."""
ABSENT_CLASS_POLICY = "absent_from_both_is_nan"

Counts = Integer[np.ndarray, "*some 3 classes"]
"""By class the pixels that are right, predicted and true; see `ssl_bench.metrics.class_counts`."""

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""From which IoU on a box is right, in turn."""
MOST_DETECTIONS = 100
"""Boxes that count of an image, the surest."""
_RECALLS = np.linspace(0, 1, 101)

_BETA_SQUARED = 0.3

ObjectCounts = Integer[np.ndarray, "*some 4"]
"""Pixels of an image: of the object in the answer and in truth, in the answer, in truth, and all
that count."""

DetectionCounts = Real[np.ndarray, "*some ranks_and_truth thresholds_and_all"]
"""Of boxes of an image or of many: at [0, 0] those that are true; at [1 + rank, 0] those that were
found, the surest rank first, and at [1 + rank, 1 + number] those of them that are right at an
IoU."""


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


def matched_mean_iou(
    confusion: Integer[np.ndarray, "classes classes"],
) -> tuple[float, Integer[np.ndarray, " classes"]]:
    """Compute the largest mean IoU, in percent, that renaming predicted classes one to one gives.

    The mean is over all classes: one that is in neither truth nor prediction counts as 0.

    Args:
        confusion: Pixels by true and predicted class.

    Returns:
        The mean, and the new name of each predicted class.

    Source: Hungarian matching of PredsmIoU in https://github.com/vpariza/open-hummingbird-eval.
    """
    # Here, because a table need not wait for scipy.
    from scipy.optimize import linear_sum_assignment

    union = confusion.sum(1, keepdims=True) + confusion.sum(0, keepdims=True) - confusion
    iou = confusion / np.maximum(union, 1)
    predicted, names = linear_sum_assignment(iou.T, maximize=True)
    return 100.0 * float(iou[names, predicted].mean()), names


def of_constant_class(
    counts: Integer[np.ndarray, "3 classes"],
) -> tuple[int, Integer[np.ndarray, "3 classes"]]:
    """The class that most pixels are of, and the counts of naming it at all of them.

    No other constant class has a larger mean IoU or accuracy on these pixels.
    """
    true = counts[2]
    named = int(true.argmax())
    answered = np.zeros_like(counts)
    answered[2] = true
    answered[0, named], answered[1, named] = true[named], true.sum()
    return named, answered


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


def object_f_beta(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """F-beta with beta squared = .3 in percent, of each image alone.

    An answer without a pixel has precision 1, an image without an object recall 1, and where both
    precision and recall are 0 so is this.

    Source: metric.py of unsupervised_saliency_detection in
    https://github.com/YangtaoWANG95/TokenCut/tree/0d86de5.
    """
    both, found, true, _ = (counts[..., which].astype(np.float64) for which in range(4))
    precision = np.where(found > 0, both / np.maximum(found, 1), 1.0)
    recall = np.where(true > 0, both / np.maximum(true, 1), 1.0)
    total = _BETA_SQUARED * precision + recall
    weighted = (1 + _BETA_SQUARED) * precision * recall
    return np.where(total > 0, 100.0 * weighted / np.where(total > 0, total, 1.0), 0.0)


def object_iou(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Intersection over union in percent, of each image alone; 100 where neither has a pixel."""
    both, found, true, _ = (counts[..., which].astype(np.int64) for which in range(4))
    union = found + true - both
    return np.where(union > 0, 100.0 * both / np.maximum(union, 1), 100.0)


def object_accuracy(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Percent of the pixels on whose side answer and truth agree, of each image alone.

    100 where no pixel counts.
    """
    both, found, true, all_ = (counts[..., which].astype(np.int64) for which in range(4))
    return np.where(all_ > 0, 100.0 * (all_ - found - true + 2 * both) / np.maximum(all_, 1), 100.0)


OBJECT_SCORES: Mapping[str, Callable[[ObjectCounts], Float64[np.ndarray, "*some"]]] = {
    "max_f_beta": object_f_beta,
    "iou": object_iou,
    "accuracy": object_accuracy,
}
"""By metric what is said of each image; its value is the mean over images.

The largest mean F-beta over thresholds (`max_f_beta`) is that at any threshold below 1, because an
answer is 0 or 1 at every pixel."""


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


def average_precision(counts: DetectionCounts) -> Float64[np.ndarray, "*some"]:
    """Mean over IoUs and 101 recalls of the best precision at that recall or more, in percent.

    Boxes of one rank are as sure as each other, so no order of theirs is better than another: part
    of a rank has the share of right ones that the whole rank has. NaN where no box is true.

    Source: COCOeval, https://github.com/cocodataset/cocoapi/tree/8c9bcc3, whose `stats[0]` it is
    (of one threshold: `stats[1]`) where no two boxes share a rank. Of equal scores that takes the
    boxes in the order in which it was given the images, and its AP hangs on it.
    """
    true = counts[..., 0, 0][..., None]
    found = counts[..., 1:, :1].cumsum(-2, dtype=np.float64)
    right = counts[..., 1:, 1:].cumsum(-2, dtype=np.float64)
    precision = right / np.maximum(found, 1)
    recall = right / np.maximum(true[..., None], 1)
    best = np.zeros((*right.shape[:-2], right.shape[-1], 1))
    at_recall = np.zeros((*best.shape[:-1], len(_RECALLS)))
    # From the last rank to the first, so that the first one that reaches a recall has the word.
    for rank in reversed(range(right.shape[-2])):
        best = np.maximum(best, precision[..., rank, :, None])
        within = _within_rank(right, found, rank, _RECALLS * true[..., None])
        reached = recall[..., rank, :, None] >= _RECALLS
        at_recall = np.where(reached, np.maximum(best, within), at_recall)
    return np.where(true[..., 0] > 0, 100.0 * at_recall.mean((-2, -1)), np.nan)


def coco_average_precision(
    found: Sequence[Float64[np.ndarray, "_found 4"]], true: Sequence[Float64[np.ndarray, "_true 4"]]
) -> float:
    """Compute the average precision of boxes by COCOeval (its `stats[0]`), in percent.

    Boxes of one rank come in the order of the images, so that the value depends on that order,
    unlike `average_precision`.

    Args:
        found: Boxes (x0, y0, x1, y1) of each image, the surest first.
        true: The true boxes of the same images.

    Returns:
        NaN where no box is true.
    """
    # Here, because few need it.
    from pycocotools.cocoeval import COCOeval

    judged = COCOeval(_indexed(true), _indexed(found), "bbox")
    judged.params.maxDets = [MOST_DETECTIONS]
    # Of boxes of any size alone, which is a quarter of the work.
    judged.params.areaRng = judged.params.areaRng[:1]
    with silence_stdout():
        judged.evaluate()
        judged.accumulate()
    return 100.0 * float(judged.eval["precision"].mean()) if any(map(len, true)) else np.nan


def _indexed(boxes: Sequence[Float64[np.ndarray, "_boxes 4"]]) -> Any:
    """Boxes of images, the surest first, as pycocotools' index has them, of one category."""
    owned = [(n, rank, box) for n, some in enumerate(boxes) for rank, box in enumerate(some)]
    annotations = [
        {
            # 0 means that nothing was matched.
            "id": number,
            "image_id": n,
            "category_id": 1,
            "iscrowd": 0,
            "bbox": [*box[:2], *(box[2:] - box[:2])],
            "area": (box[2:] - box[:2]).prod(),
            "score": -rank,
        }
        for number, (n, rank, box) in enumerate(owned, start=1)
    ]
    images = [{"id": n} for n in range(len(boxes))]
    return index_coco({"images": images, "categories": [{"id": 1}], "annotations": annotations})


def average_recall(counts: DetectionCounts) -> Float64[np.ndarray, "*some"]:
    """Mean over IoUs of the true boxes that are found, in percent; NaN where no box is true.

    `stats[8]` of COCOeval.
    """
    true = counts[..., 0, 0]
    right = counts[..., 1:, 1:].sum(-2, dtype=np.float64).mean(-1)
    return np.where(true > 0, 100.0 * right / np.maximum(true, 1), np.nan)


def _within_rank(
    right: Float64[np.ndarray, "*some ranks thresholds"],
    found: Float64[np.ndarray, "*some ranks 1"],
    rank: int,
    wanted: Float64[np.ndarray, "*some 1 recalls"],
) -> Float64[np.ndarray, "*some thresholds recalls"]:
    """Precision where boxes of a rank were taken until as many are right as wanted; 0 for none."""
    start = (right[..., rank - 1, :], found[..., rank - 1, :]) if rank else (0.0, 0.0)
    more_right = (right[..., rank, :] - start[0])[..., None]
    more_found = (found[..., rank, :] - start[1])[..., None]
    before = np.broadcast_to(start[0], right[..., rank, :].shape)[..., None]
    share = np.maximum(wanted - before, 0) / np.where(more_right > 0, more_right, np.inf)
    taken = np.broadcast_to(start[1], found[..., rank, :].shape)[..., None] + share * more_found
    return np.where(share > 0, wanted / np.where(taken > 0, taken, np.inf), 0.0)


def index_coco(content: Mapping[str, Any]) -> Any:
    """Return pycocotools' index of the content of a COCO file of instances.

    Raises:
        Exception: Whatever pycocotools raises if the content is something else.
    """
    # Here, because few commands need it.
    from pycocotools.coco import COCO

    index: Any = COCO()
    index.dataset = content
    with silence_stdout():
        index.createIndex()
    return index


@contextmanager
def silence_stdout() -> Generator[None]:
    """Keep pycocotools from printing what it does."""
    with redirect_stdout(io.StringIO()):
        yield
