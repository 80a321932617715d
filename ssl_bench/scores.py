"""Compute scores in percent from counts per image.

This file uses numpy instead of torch, so tables and reports need not import torch. Counts are exact
integers, and numpy sums the mean over classes in the same order on every machine.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, Integer, Real, UInt8

IGNORE_INDEX = 255
"""Label of pixels that do not count in scores, such as the borders of objects in VOC."""
ABSENT_CLASS_POLICY = "absent_from_both_is_nan"

Counts = Integer[np.ndarray, "*some 3 classes"]
"""Numbers of pixels of each class, in one image or summed over several images.

Row 0 contains the correct pixels, row 1 the predicted pixels, and row 2 the ground-truth pixels.
The function `probes.heads.scored_images.class_counts` computes these numbers.
"""

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""IoU thresholds of COCO AP. A predicted box is correct if its IoU is at least the threshold."""
MAX_DETECTIONS = 100
"""Maximum number of boxes that are scored in each image, starting with the most confident."""
_RECALLS = np.linspace(0, 1, 101)

_BETA_SQUARED = 0.3

ObjectCounts = Integer[np.ndarray, "*some 4"]
"""Four numbers of pixels, for a single image or for each of several images.

- [0]: pixels that belong to the object in both prediction and ground truth.
- [1]: pixels that belong to the object in the prediction.
- [2]: pixels that belong to the object in the ground truth.
- [3]: all pixels that are not ignored.
"""

DetectionCounts = Real[np.ndarray, "*some ranks_and_truth thresholds_and_all"]
"""Numbers of boxes in one image, or summed over several images.

- [0, 0]: ground-truth boxes.
- [1 + rank, 0]: predicted boxes of this rank. Rank 0 has the highest confidence.
- [1 + rank, 1 + n]: predicted boxes of this rank that are correct at `IOU_THRESHOLDS[n]`.
"""


def iou_per_class(counts: Counts) -> Float64[np.ndarray, "*some classes"]:
    """Return the intersection over union (IoU) of each class in percent.

    The IoU of a class that occurs neither in the prediction nor in the ground truth is NaN.

    Args:
        counts: Numbers of correct, predicted and ground-truth pixels of each class.
    """
    correct, predicted, true = (counts[..., row, :].astype(np.int64) for row in range(3))
    return iou_from_counts(correct, predicted + true - correct)


def iou_from_counts(
    intersection: Integer[np.ndarray, "*some classes"], union: Integer[np.ndarray, "*some classes"]
) -> Float64[np.ndarray, "*some classes"]:
    """Return the intersection over union of each class in percent, or NaN if the union is 0."""
    return np.where(union > 0, 100.0 * intersection / np.maximum(union, 1), np.nan)


def mean_iou(counts: Counts) -> Float64[np.ndarray, "*some"]:
    """Return the mean IoU over classes in percent.

    Classes that occur neither in the prediction nor in the ground truth are excluded.

    Args:
        counts: Numbers of correct, predicted and ground-truth pixels of each class.
    """
    return nanmean(iou_per_class(counts))


def matched_mean_iou(
    confusion: Integer[np.ndarray, "classes classes"],
) -> tuple[float, Integer[np.ndarray, " classes"]]:
    """Match predicted classes one-to-one to true classes, and compute the mean IoU in percent.

    The matching maximises the mean IoU. Classes without any pixels have an IoU of 0 and are
    included in the mean.

    Args:
        confusion: Numbers of pixels by true class (rows) and predicted class (columns).

    Returns:
        The mean IoU, and the true class to which each predicted class is matched.

    Source: Hungarian matching of PredsmIoU in https://github.com/vpariza/open-hummingbird-eval.
    """
    # scipy is imported here, because its import slows down the `table` command.
    from scipy.optimize import linear_sum_assignment

    union = confusion.sum(1, keepdims=True) + confusion.sum(0, keepdims=True) - confusion
    iou = confusion / np.maximum(union, 1)
    predicted, matched = linear_sum_assignment(iou.T, maximize=True)
    return 100.0 * float(iou[matched, predicted].mean()), matched


def predict_constant_class(
    counts: Integer[np.ndarray, "3 classes"],
) -> tuple[int, Integer[np.ndarray, "3 classes"]]:
    """Return the most frequent true class, and the pixel counts if it is predicted everywhere.

    Predicting this class for all pixels is an image-independent baseline. Predicting any other
    class for all pixels gives no higher mean IoU or accuracy.

    Args:
        counts: Numbers of correct, predicted and ground-truth pixels of each class. Only the
            ground-truth pixels are used.

    Returns:
        The index of the class, and counts in the same format as `counts`.
    """
    true = counts[2]
    most_frequent = int(true.argmax())
    constant = np.zeros_like(counts)
    constant[2] = true
    constant[0, most_frequent], constant[1, most_frequent] = true[most_frequent], true.sum()
    return most_frequent, constant


def nanmean(values: Float64[np.ndarray, "*some classes"]) -> Float64[np.ndarray, "*some"]:
    """Return the mean over the last axis, ignoring NaN values, or NaN if all values are NaN."""
    is_number = ~np.isnan(values)
    count = is_number.sum(-1)
    total = np.where(is_number, values, 0.0).sum(-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def pixel_accuracy(counts: Counts) -> Float64[np.ndarray, "*some"]:
    """Return the percentage of correctly classified pixels, or NaN if there are no pixels.

    Args:
        counts: Numbers of correct, predicted and ground-truth pixels of each class.
    """
    correct, true = (counts[..., row, :].sum(-1, dtype=np.int64) for row in (0, 2))
    return np.where(true > 0, 100.0 * correct / np.maximum(true, 1), np.nan)


def object_f_beta(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Return the F-beta score of each image in percent, with beta squared = 0.3.

    An empty prediction has precision 1, and an image without an object has recall 1. The score is
    0 if precision and recall are 0.

    Args:
        counts: Pixel counts of the object in one or several images, as described in `ObjectCounts`.

    Source: metric.py of unsupervised_saliency_detection in
    https://github.com/YangtaoWANG95/TokenCut/tree/0d86de5.
    """
    intersection, predicted, true, _ = (counts[..., n].astype(np.float64) for n in range(4))
    precision = np.where(predicted > 0, intersection / np.maximum(predicted, 1), 1.0)
    recall = np.where(true > 0, intersection / np.maximum(true, 1), 1.0)
    total = _BETA_SQUARED * precision + recall
    weighted = (1 + _BETA_SQUARED) * precision * recall
    return np.where(total > 0, 100.0 * weighted / np.where(total > 0, total, 1.0), 0.0)


def object_iou(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Return the intersection over union of each image in percent, or 100 if the union is empty.

    Args:
        counts: Pixel counts of the object in one or several images, as described in `ObjectCounts`.
    """
    intersection, predicted, true, _ = (counts[..., n].astype(np.int64) for n in range(4))
    union = predicted + true - intersection
    return np.where(union > 0, 100.0 * intersection / np.maximum(union, 1), 100.0)


def object_accuracy(counts: ObjectCounts) -> Float64[np.ndarray, "*some"]:
    """Return the percentage of correct pixels of each image, or 100 if all pixels are ignored.

    A pixel is correct if prediction and ground truth agree on whether it belongs to the object.

    Args:
        counts: Pixel counts of the object in one or several images, as described in `ObjectCounts`.
    """
    intersection, predicted, true, total = (counts[..., n].astype(np.int64) for n in range(4))
    correct = total - predicted - true + 2 * intersection
    return np.where(total > 0, 100.0 * correct / np.maximum(total, 1), 100.0)


def object_counts(
    mask: Bool[np.ndarray, "height width"], truth: UInt8[np.ndarray, "height width"]
) -> Int64[np.ndarray, " 4"]:
    """Count the pixels from which the scores of an object mask are computed.

    Args:
        mask: Predicted pixels of the object.
        truth: 1 for the object, 0 for the background, `IGNORE_INDEX` for pixels that are not
            scored.

    Returns:
        Four numbers of pixels: the object's correctly predicted, predicted and true pixels, and all
        scored pixels.
    """
    is_scored, is_true = truth != IGNORE_INDEX, truth == 1
    is_found = mask & is_scored
    parts = (is_found & is_true, is_found, is_true, is_scored)
    return np.array([part.sum() for part in parts], np.int64)


def centre_mask(size: tuple[int, ...]) -> Bool[np.ndarray, "height width"]:
    """Return a mask of the centred box that has half of the area of the image.

    A pixel belongs to the mask if its centre lies in the box. `size` is (height, width).
    """
    height, width = size
    x0, y0, x1, y1 = centre_box((height, width))
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    return ((y > y0) & (y < y1))[:, None] & ((x > x0) & (x < x1))


def centre_box(size: tuple[int, int]) -> Float64[np.ndarray, " 4"]:
    """Return the centred box (x0, y0, x1, y1) that has half of the area of the image.

    The box has the aspect ratio of the image. `size` is (height, width) in pixels.
    """
    height, width = size
    sides = np.array([width, height, width, height], np.float64)
    return sides * (0.5 + np.sqrt(0.125) * np.array([-1.0, -1.0, 1.0, 1.0]))


def count_constant_masks(
    centre_counts: Int64[np.ndarray, "images 4"],
) -> dict[str, Int64[np.ndarray, "images 4"]]:
    """Return the pixel counts of three masks that are predicted without looking at the images.

    The mask with the highest score is the baseline of a metric. For pixel accuracy, the best mask
    is the empty mask if objects are small, and the whole image if objects are large.

    Args:
        centre_counts: Pixel counts of each image if the centre box is predicted: the object's
            correctly predicted, predicted and true pixels, and all scored pixels.

    Returns:
        Counts in the same format, by the name of the mask: "centre box", "whole image" or
        "empty mask".
    """
    _, _, true, total = centre_counts.T
    zero = np.zeros_like(true)
    return {
        "centre box": centre_counts,
        "whole image": np.stack([true, total, true, total], 1),
        "empty mask": np.stack([zero, zero, true, total], 1),
    }


OBJECT_SCORES: Mapping[str, Callable[[ObjectCounts], Float64[np.ndarray, "*some"]]] = {
    "max_f_beta": object_f_beta,
    "iou": object_iou,
    "accuracy": object_accuracy,
}
"""Functions that score single images, by metric. The value of a metric is the mean over images.

`max_f_beta` is defined as the highest mean F-beta over all thresholds of the predicted values. The
predicted values are 0 or 1 here, so every threshold gives the same mean F-beta.
"""


def is_hit(box: Float[np.ndarray, " 4"], ground_truth: Float[np.ndarray, "boxes 4"]) -> bool:
    """Return whether a box (x0, y0, x1, y1) has an IoU of at least 0.5 with any ground-truth box.

    For integer coordinates, the comparison has no rounding error.
    """
    low = np.maximum(box[:2], ground_truth[:, :2])
    high = np.minimum(box[2:], ground_truth[:, 2:])
    intersection = np.clip(high - low, 0, None).prod(-1)
    areas = (box[2:] - box[:2]).prod() + (ground_truth[:, 2:] - ground_truth[:, :2]).prod(-1)
    return bool(((areas > 0) & (2 * intersection >= areas - intersection)).any())


def corloc(hits: Bool[np.ndarray, " images"]) -> float:
    """Return CorLoc (correct localisation): the percentage of images with a correct box."""
    return 100.0 * float(hits.mean())


def average_precision(counts: DetectionCounts) -> Float64[np.ndarray, "*some"]:
    """Return the average precision (AP) in percent, or NaN if there is no ground-truth box.

    AP is a mean over IoU thresholds and over 101 recalls from 0 to 1. For each recall, the highest
    precision at this recall or at a higher recall is used.

    Predicted boxes of equal confidence form a rank. The order of these boxes must not affect AP, so
    the correct boxes of a rank are treated as spread evenly over the rank.

    If all boxes have different confidences, the result equals `stats[0]` of COCOeval, or `stats[1]`
    for the single threshold 0.5. If some boxes have equal confidences, COCOeval's AP depends on the
    order of the images.

    Args:
        counts: Numbers of ground-truth boxes, predicted boxes and correct boxes by rank and IoU
            threshold. `DetectionCounts` describes the format.

    Source: COCOeval, https://github.com/cocodataset/cocoapi/tree/8c9bcc3.
    """
    true = counts[..., 0, 0][..., None]
    predicted = counts[..., 1:, :1].cumsum(-2, dtype=np.float64)
    correct = counts[..., 1:, 1:].cumsum(-2, dtype=np.float64)
    precision = correct / np.maximum(predicted, 1)
    recall = correct / np.maximum(true[..., None], 1)
    best = np.zeros((*correct.shape[:-2], correct.shape[-1], 1))
    at_recall = np.zeros((*best.shape[:-1], len(_RECALLS)))
    # The loop goes from the last rank to the first, so the first rank that reaches a recall sets
    # the final precision at this recall.
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
    """Compute average precision in percent with COCOeval of pycocotools (its `stats[0]`).

    The result is NaN if there is no ground-truth box. The first boxes of all images have the same
    confidence, the second boxes have a lower confidence, and so on. COCOeval orders boxes of equal
    confidence by image. Unlike `average_precision`, COCOeval thus depends on the order of the
    images.

    Args:
        predicted: Boxes (x0, y0, x1, y1) of each image, in descending order of confidence.
        true: Ground-truth boxes of the same images.
    """
    # pycocotools is imported here, because few commands need it.
    from pycocotools.cocoeval import COCOeval

    evaluator = COCOeval(_index_boxes(true), _index_boxes(predicted), "bbox")
    evaluator.params.maxDets = [MAX_DETECTIONS]
    # Only the area range for boxes of any size is used. This saves three quarters of the work.
    evaluator.params.areaRng = evaluator.params.areaRng[:1]
    with redirect_stdout(io.StringIO()):
        evaluator.evaluate()
        evaluator.accumulate()
    return 100.0 * float(evaluator.eval["precision"].mean()) if any(map(len, true)) else np.nan


def _index_boxes(boxes: Sequence[Float64[np.ndarray, "_boxes 4"]]) -> Any:
    """Return a pycocotools `COCO` object that contains the boxes (x0, y0, x1, y1) of all images.

    The boxes of an image are in descending order of confidence. The n-th box, counted from 0, gets
    the confidence score -n.
    """
    ranked = [(n, rank, box) for n, some in enumerate(boxes) for rank, box in enumerate(some)]
    annotations = [
        {
            # Ids start at 1, because pycocotools uses 0 for "not matched".
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
    """Return the recall of ground-truth boxes in percent, averaged over IoU thresholds.

    The result equals `stats[8]` of COCOeval, or is NaN if there is no ground-truth box.

    Args:
        counts: Numbers of ground-truth boxes, predicted boxes and correct boxes by rank and IoU
            threshold. `DetectionCounts` describes the format.
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
    """Return the precision at each recall that is reached inside one rank.

    A rank consists of all boxes with the same confidence. The correct boxes of a rank are treated
    as spread evenly over the rank, so a fraction of the rank is enough to reach a recall. The
    precision at a recall is computed from this fraction and all earlier ranks. The precision is 0
    if earlier ranks already reach the recall.

    Args:
        correct: Number of correct boxes in each rank and all ranks before it.
        predicted: Number of predicted boxes in each rank and all ranks before it.
        rank: Index of the rank. Rank 0 has the highest confidence.
        needed: Number of correct boxes that each recall requires.
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
    """Return a pycocotools `COCO` object for the parsed content of a COCO annotation file.

    If the content is not in the COCO format, pycocotools may raise any exception.
    """
    # pycocotools is imported here, because few commands need it.
    from pycocotools.coco import COCO

    index: Any = COCO()
    index.dataset = content
    with redirect_stdout(io.StringIO()):
        index.createIndex()
    return index
