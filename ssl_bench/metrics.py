"""Scores as pure functions; whatever is counted is counted in int64, shares are percent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64, Integer, UInt8
from torch import Tensor

IGNORED = 255
ABSENT_CLASS_POLICY = "absent_from_both_is_nan"

# Similarities that are in memory at once: a quarter of a gibibyte.
_SIMILARITIES = 2**26


def class_counts(
    predicted: UInt8[Tensor, " heads *pixels"],
    target: UInt8[Tensor, "*pixels"],
    num_classes: int,
) -> Int64[Tensor, "heads 3 classes"]:
    """Count by class the pixels that are right, predicted and true; target 255 does not count.

    All that IoU and pixel accuracy need of a confusion matrix, in 3 / classes of its size; int64,
    because float32 counts stop growing at 2^24 pixels.
    """
    heads, true = len(predicted), target.flatten()
    size, given = heads * num_classes, predicted.flatten(1)
    # int32: a head has fewer than 2^31 / 256 pixels an image, and bincount reads half the bytes.
    first = torch.arange(heads, dtype=torch.int32, device=target.device)[:, None] * num_classes
    # What does not count goes behind all classes: a device would have to say how much is left.
    cells = (given.int() + first).masked_fill_(true == IGNORED, size)
    right = cells.masked_fill(given != true, size)
    of_true = value_counts(true, IGNORED + 1)[:num_classes].expand(heads, -1)
    by_head = [value_counts(c.flatten(), size + 1)[:size] for c in (right, cells)]
    return torch.stack([*(c.reshape(heads, -1) for c in by_head), of_true], 1)


def value_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """How often each number from 0 to `size` - 1 occurs, or the sum of its weights.

    As `torch.bincount`, which makes the host wait for the extremes of what lies on a device.
    """
    if values.device.type == "cpu":
        return torch.bincount(values, weights, size)
    return scattered_counts(values, size, weights)


def scattered_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """`value_counts` by additions on the spot, which a device does without being asked."""
    if weights is None:
        ones = torch.ones(1, dtype=torch.int64, device=values.device)
        return ones.new_zeros(size).scatter_add_(0, values.long(), ones.expand(len(values)))
    wide = weights.double()
    return wide.new_zeros(size).scatter_add_(0, values.long(), wide)


def iou_per_class(
    counts: Float64[Tensor, "*some 3 classes"] | Int64[Tensor, "*some 3 classes"],
) -> Float64[Tensor, "*some classes"]:
    """Intersection over union in percent from `class_counts`; NaN for a class in neither."""
    right, predicted, true = counts.double().unbind(-2)
    return iou_of(right, predicted + true - right)


def iou_of(
    right: Float64[Tensor, "*some classes"], union: Float64[Tensor, "*some classes"]
) -> Float64[Tensor, "*some classes"]:
    """Intersection over union in percent; NaN for a class in neither."""
    return torch.where(union > 0, 100.0 * right / union.clamp(min=1), torch.nan)


def mean_iou(
    counts: Float64[Tensor, "*some 3 classes"] | Int64[Tensor, "*some 3 classes"],
) -> Float64[Tensor, "*some"]:
    """Mean of the class IoUs of a whole dataset, in percent, over the classes that occur."""
    return iou_per_class(counts).nanmean(-1)


def pixel_accuracy(
    counts: Float64[Tensor, "*some 3 classes"] | Int64[Tensor, "*some 3 classes"],
) -> Float64[Tensor, "*some"]:
    """Percent of counted pixels whose class is right, from `class_counts`."""
    right, _, true = counts.double().sum(-1).unbind(-1)
    return 100.0 * right / true


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


@dataclass(frozen=True, eq=False)
class LabelledFeatures:
    """Features of images, of any length, and the class of each image."""

    features: Float[Tensor, "images dim"]
    labels: Int64[Tensor, " images"]

    def to(self, device: torch.device) -> "LabelledFeatures":
        return LabelledFeatures(self.features.to(device), self.labels.to(device))


def knn_ranks(
    queries: LabelledFeatures,
    bank: LabelledFeatures,
    *,
    num_classes: int,
    neighbours: Sequence[int],
    temperature: float,
) -> Int64[Tensor, "numbers queries"]:
    """Place of each query's class in the vote of the nearest neighbours, 0 if it wins.

    Cosine similarities s of the k nearest images of the bank vote with exp(s / temperature). Of
    equally near images the earlier counts as nearer, of classes with equally many votes the lower
    one wins, and a class without votes has the place `num_classes`.

    Args:
        queries: Images that are asked about; their labels are the truth.
        bank: Images that answer.
        num_classes: Labels are below it.
        neighbours: Numbers of neighbours k, each at most the size of the bank.
        temperature: More than 0; small ones listen to the nearest alone.

    Source: `knn_classifier` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/eval_knn.py
    where ties, and in the top 5 the order of classes without votes, are left to the sort.
    """
    memory = F.normalize(bank.features.float(), dim=1).T
    rows = max(1, _SIMILARITIES // memory.shape[1])
    found = []
    for start in range(0, len(queries.labels), rows):
        some = F.normalize(queries.features[start : start + rows].float(), dim=1)
        similarities, index = nearest(some @ memory, max(neighbours))
        # Relative to the nearest, so that no temperature overflows.
        votes = torch.exp((similarities - similarities[:, :1]).double() / temperature)
        named, true = bank.labels[index], queries.labels[start : start + rows]
        ranks = [vote_rank(votes[:, :k], named[:, :k], true, num_classes) for k in neighbours]
        found.append(torch.stack(ranks))
    return torch.cat(found, dim=1)


def nearest(
    similarities: Float[Tensor, "rows columns"], count: int
) -> tuple[Float[Tensor, "rows {count}"], Int64[Tensor, "rows {count}"]]:
    """The largest values of each row and their columns, in order; of equal ones the first."""
    values, index = similarities.topk(count)
    # topk takes any of several equal values; where some were left out, only a full sort is fair.
    unfair = (similarities >= values[:, -1:]).sum(1) > count
    if unfair.any():
        ordered = similarities[unfair].sort(dim=1, descending=True, stable=True)
        values[unfair], index[unfair] = ordered.values[:, :count], ordered.indices[:, :count]
    index, order = index.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, index.gather(1, order)


def vote_rank(
    votes: Float64[Tensor, "queries voters"],
    named: Int64[Tensor, "queries voters"],
    targets: Int64[Tensor, " queries"],
    num_classes: int,
) -> Int64[Tensor, " queries"]:
    """How many classes come before the true one when every voter votes for the class it names."""
    totals = votes.new_zeros(len(votes), num_classes).scatter_add_(1, named, votes)
    own = totals.gather(1, targets[:, None])
    return torch.where(own[:, 0] > 0, class_rank(totals, targets), num_classes)


def class_rank(
    scores: Float[Tensor, "*heads queries classes"], targets: Int64[Tensor, " queries"]
) -> Int64[Tensor, "*heads queries"]:
    """How many classes come before the true one; of equal scores the lower class is the first.

    Where a score is not finite, nothing is known and all classes come before it.
    """
    num_classes = scores.shape[-1]
    own = scores.gather(-1, targets.expand(scores.shape[:-1])[..., None])
    lower = torch.arange(num_classes, device=targets.device) < targets[:, None]
    before = (scores > own) | ((scores == own) & lower)
    return torch.where(scores.isfinite().all(-1), before.sum(-1), num_classes)
