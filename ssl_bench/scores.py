"""Compute scores in percent from counts per image.

This module uses numpy only, so that tables and reports need not import torch. Counts are integers,
so the only rounding is in the mean over classes. Its order is numpy's own and the same on every
machine.
"""

import io
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Integer, Real

IGNORED = 255
"""Label of the pixels that are ignored."""
ABSENT_CLASS_POLICY = "absent_from_both_is_nan"

Counts = Integer[np.ndarray, "*some 3 classes"]
"""Numbers of correct, predicted and true pixels of each class. See
`ssl_bench.metrics.class_counts`."""

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""IoU thresholds of COCO AP. A box is correct at a threshold if its IoU is at least as large."""
MOST_DETECTIONS = 100
"""Number of boxes that are scored in each image, those with the highest confidence."""
_RECALLS = np.linspace(0, 1, 101)

_BETA_SQUARED = 0.3

ObjectCounts = Integer[np.ndarray, "*some 4"]
"""Numbers of pixels of an image: object in both prediction and ground truth, object in the
prediction, object in the ground truth, and all pixels that are not ignored."""

DetectionCounts = Real[np.ndarray, "*some ranks_and_truth thresholds_and_all"]
"""Numbers of boxes of one image or of several.

- [0, 0]: ground-truth boxes.
- [1 + rank, 0]: predicted boxes of this rank. Rank 0 has the highest confidence.
- [1 + rank, 1 + n]: those of them that are correct at `IOU_THRESHOLDS[n]`.
"""


def iou_per_class(counts: Counts) -> Float64[np.ndarray, "*some classes"]:
    """Return the intersection over union of each class in percent, NaN for absent classes.

    A class is absent if it occurs neither in the prediction nor in the ground truth.
    """
    correct, predicted, true = (counts[..., row, :].astype(np.int64) for row in range(3))
    return iou_from_counts(correct, predicted + true - correct)


def iou_from_counts(
    intersection: Integer[np.ndarray, "*some classes"], union: Integer[np.ndarray, "*some classes"]
) -> Float64[np.ndarray, "*some classes"]:
    """Return the intersection over union of each class in percent, NaN where the union is 0."""
    return np.where(union > 0, 100.0 * intersection / np.maximum(union, 1), np.nan)


def mean_iou(counts: Counts) -> Float64[np.ndarray, "*some"]:
    """Return the mean IoU of a whole dataset in percent, over the classes that occur."""
    return mean_without_nan(iou_per_class(counts))


def matched_mean_iou(
    confusion: Integer[np.ndarray, "classes classes"],
) -> tuple[float, Integer[np.ndarray, " classes"]]:
    """Compute the mean IoU in percent after the best one-to-one matching of predicted classes.

    The mean is over all classes. An absent class counts as 0.

    Args:
        confusion: Numbers of pixels by true class (rows) and predicted class (columns).

    Returns:
        The mean IoU, and the true class that each predicted class is matched to.

    Source: Hungarian matching of PredsmIoU in https://github.com/vpariza/open-hummingbird-eval.
    """
    # Imported here, because importing scipy slows down `table`.
    from scipy.optimize import linear_sum_assignment

    union = confusion.sum(1, keepdims=True) + confusion.sum(0, keepdims=True) - confusion
    iou = confusion / np.maximum(union, 1)
    predicted, matched = linear_sum_assignment(iou.T, maximize=True)
    return 100.0 * float(iou[matched, predicted].mean()), matched


def predict_constant_class(
    counts: Integer[np.ndarray, "3 classes"],
) -> tuple[int, Integer[np.ndarray, "3 classes"]]:
    """Return the most frequent true class, and the counts of predicting it for every pixel.

    No other constant class has a larger mean IoU or accuracy on these pixels.
    """
    true = counts[2]
    most_frequent = int(true.argmax())
    constant = np.zeros_like(counts)
    constant[2] = true
    constant[0, most_frequent], constant[1, most_frequent] = true[most_frequent], true.sum()
    return most_frequent, constant


def mean_without_nan(values: Float64[np.ndarray, "*some classes"]) -> Float64[np.ndarray, "*some"]:
    """Return the mean over the last axis without NaN values, NaN where all values are NaN."""
    is_number = ~np.isnan(values)
    count = is_number.sum(-1)
    total = np.where(is_number, values, 0.0).sum(-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def pixel_accuracy(counts: Counts) -> Float64[np.ndarray, "*some"]:
    """Return the percentage of pixels whose class is correct, NaN if there are no pixels."""
    correct, true = (counts[..., row, :].sum(-1, dtype=np.int64) for row in (0, 2))
    return np.where(true > 0, 100.0 * correct / np.maximum(true, 1), np.nan)


def object_f_beta(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Return the F-beta score of each image in percent, with beta squared = 0.3.

    An empty prediction has precision 1, and an image without an object has recall 1. The score is
    0 if precision and recall are both 0.

    Source: metric.py of unsupervised_saliency_detection in
    https://github.com/YangtaoWANG95/TokenCut/tree/0d86de5.
    """
    both, predicted, true, _ = (counts[..., n].astype(np.float64) for n in range(4))
    precision = np.where(predicted > 0, both / np.maximum(predicted, 1), 1.0)
    recall = np.where(true > 0, both / np.maximum(true, 1), 1.0)
    total = _BETA_SQUARED * precision + recall
    weighted = (1 + _BETA_SQUARED) * precision * recall
    return np.where(total > 0, 100.0 * weighted / np.where(total > 0, total, 1.0), 0.0)


def object_iou(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Return the intersection over union of each image in percent, 100 where the union is empty."""
    both, predicted, true, _ = (counts[..., n].astype(np.int64) for n in range(4))
    union = predicted + true - both
    return np.where(union > 0, 100.0 * both / np.maximum(union, 1), 100.0)


def object_accuracy(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Return the percentage of correct pixels of each image, 100 if all pixels are ignored.

    A pixel is correct if prediction and ground truth agree on whether it belongs to the object.
    """
    both, predicted, true, total = (counts[..., n].astype(np.int64) for n in range(4))
    correct = total - predicted - true + 2 * both
    return np.where(total > 0, 100.0 * correct / np.maximum(total, 1), 100.0)


OBJECT_SCORES: Mapping[str, Callable[[ObjectCounts], Float64[np.ndarray, "*some"]]] = {
    "max_f_beta": object_f_beta,
    "iou": object_iou,
    "accuracy": object_accuracy,
}
"""Score of single images by metric. The value of the metric is the mean over images.

`max_f_beta` is the maximum over thresholds of the mean F-beta. All thresholds below 1 give the same
mean, because a prediction is 0 or 1 at every pixel, so `object_f_beta` needs no threshold."""


def is_hit(box: Float[np.ndarray, " 4"], ground_truth: Float[np.ndarray, "boxes 4"]) -> bool:
    """Return whether a box overlaps any ground-truth box with an IoU of at least 0.5.

    The test is 2 * intersection >= union, which is exact for integer coordinates.

    Args:
        box: (x0, y0, x1, y1) in pixels.
        ground_truth: Boxes in the same format.
    """
    low = np.maximum(box[:2], ground_truth[:, :2])
    high = np.minimum(box[2:], ground_truth[:, 2:])
    intersection = np.clip(high - low, 0, None).prod(-1)
    areas = (box[2:] - box[:2]).prod() + (ground_truth[:, 2:] - ground_truth[:, :2]).prod(-1)
    return bool(((areas > 0) & (2 * intersection >= areas - intersection)).any())


def corloc(hits: Bool[np.ndarray, " images"]) -> float:
    """Return the correct localisation score: the percentage of images whose box is a hit."""
    return 100.0 * float(hits.mean())


def average_precision(counts: DetectionCounts) -> Float64[np.ndarray, "*some"]:
    """Return the average precision (AP) in percent, NaN if there is no ground-truth box.

    AP is the mean over IoU thresholds and 101 recalls of the highest precision at that recall or
    above. Boxes of one rank have equal confidence, so their order must not matter: every part of
    a rank has the same fraction of correct boxes as the whole rank.

    If no two boxes share a rank, the result equals `stats[0]` of COCOeval (`stats[1]` for a single
    threshold). If boxes have equal scores, COCOeval's AP depends on the order of the images.

    Source: COCOeval, https://github.com/cocodataset/cocoapi/tree/8c9bcc3.
    """
    true = counts[..., 0, 0][..., None]
    predicted = counts[..., 1:, :1].cumsum(-2, dtype=np.float64)
    correct = counts[..., 1:, 1:].cumsum(-2, dtype=np.float64)
    precision = correct / np.maximum(predicted, 1)
    recall = correct / np.maximum(true[..., None], 1)
    best = np.zeros((*correct.shape[:-2], correct.shape[-1], 1))
    at_recall = np.zeros((*best.shape[:-1], len(_RECALLS)))
    # From the last rank to the first: the first rank that reaches a recall decides its precision.
    for rank in reversed(range(correct.shape[-2])):
        best = np.maximum(best, precision[..., rank, :, None])
        within = _precision_within_rank(correct, predicted, rank, _RECALLS * true[..., None])
        reached = recall[..., rank, :, None] >= _RECALLS
        at_recall = np.where(reached, np.maximum(best, within), at_recall)
    return np.where(true[..., 0] > 0, 100.0 * at_recall.mean((-2, -1)), np.nan)


def coco_average_precision(
    predicted: Sequence[Float64[np.ndarray, "_predicted 4"]],
    true: Sequence[Float64[np.ndarray, "_true 4"]],
) -> float:
    """Return the average precision of boxes by COCOeval (its `stats[0]`) in percent.

    Boxes of equal rank are sorted by image, so the value depends on the order of the images, unlike
    `average_precision`.

    Args:
        predicted: Boxes (x0, y0, x1, y1) of each image, in descending order of confidence.
        true: Ground-truth boxes of the same images.

    Returns:
        The average precision, NaN if there is no ground-truth box.
    """
    # Imported here, because few commands need it.
    from pycocotools.cocoeval import COCOeval

    evaluator = COCOeval(_index_boxes(true), _index_boxes(predicted), "bbox")
    evaluator.params.maxDets = [MOST_DETECTIONS]
    # Only the range "boxes of any size", which saves three quarters of the work.
    evaluator.params.areaRng = evaluator.params.areaRng[:1]
    with silence_stdout():
        evaluator.evaluate()
        evaluator.accumulate()
    return 100.0 * float(evaluator.eval["precision"].mean()) if any(map(len, true)) else np.nan


def _index_boxes(boxes: Sequence[Float64[np.ndarray, "_boxes 4"]]) -> Any:
    """Return pycocotools' index of boxes of one category, those with the highest score first."""
    ranked = [(n, rank, box) for n, some in enumerate(boxes) for rank, box in enumerate(some)]
    annotations = [
        {
            # Starts at 1, because pycocotools uses 0 for "not matched".
            "id": number,
            "image_id": n,
            "category_id": 1,
            "iscrowd": 0,
            "bbox": [*box[:2], *(box[2:] - box[:2])],
            "area": (box[2:] - box[:2]).prod(),
            "score": -rank,
        }
        for number, (n, rank, box) in enumerate(ranked, start=1)
    ]
    images = [{"id": n} for n in range(len(boxes))]
    return index_coco({"images": images, "categories": [{"id": 1}], "annotations": annotations})


def average_recall(counts: DetectionCounts) -> Float64[np.ndarray, "*some"]:
    """Return the recall in percent, averaged over IoU thresholds; NaN without ground-truth boxes.

    It equals `stats[8]` of COCOeval.
    """
    true = counts[..., 0, 0]
    correct = counts[..., 1:, 1:].sum(-2, dtype=np.float64).mean(-1)
    return np.where(true > 0, 100.0 * correct / np.maximum(true, 1), np.nan)


def _precision_within_rank(
    correct: Float64[np.ndarray, "*some ranks thresholds"],
    predicted: Float64[np.ndarray, "*some ranks 1"],
    rank: int,
    needed: Float64[np.ndarray, "*some 1 recalls"],
) -> Float64[np.ndarray, "*some thresholds recalls"]:
    """Return the precision if boxes of a rank are added until enough of them are correct.

    Args:
        correct: Cumulative number of correct boxes up to each rank.
        predicted: Cumulative number of boxes up to each rank.
        rank: Index of the rank.
        needed: Number of correct boxes that each recall needs.

    Returns:
        The precision, 0 for a recall that needs no box of this rank.
    """
    start = (correct[..., rank - 1, :], predicted[..., rank - 1, :]) if rank else (0.0, 0.0)
    rank_correct = (correct[..., rank, :] - start[0])[..., None]
    rank_predicted = (predicted[..., rank, :] - start[1])[..., None]
    before = np.broadcast_to(start[0], correct[..., rank, :].shape)[..., None]
    fraction = np.maximum(needed - before, 0) / np.where(rank_correct > 0, rank_correct, np.inf)
    earlier = np.broadcast_to(start[1], predicted[..., rank, :].shape)[..., None]
    total = earlier + fraction * rank_predicted
    return np.where(fraction > 0, needed / np.where(total > 0, total, np.inf), 0.0)


def index_coco(content: Mapping[str, Any]) -> Any:
    """Return pycocotools' index of the content of a COCO file of instances.

    Raises:
        Exception: Any error of pycocotools if the content has another format.
    """
    # Imported here, because few commands need it.
    from pycocotools.coco import COCO

    index: Any = COCO()
    index.dataset = content
    with silence_stdout():
        index.createIndex()
    return index


@contextmanager
def silence_stdout() -> Generator[None]:
    """Suppress the progress messages of pycocotools."""
    with redirect_stdout(io.StringIO()):
        yield
