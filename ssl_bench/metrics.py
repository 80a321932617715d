"""Scores as pure functions; whatever is counted is counted in int64, shares are percent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from torch import Tensor

from ssl_bench.neighbours import Engine, nearest_vectors

IGNORED = 255
ABSENT_CLASS_POLICY = "absent_from_both_is_nan"

# Queries whose votes are in memory at once.
_ASKED = 4096


def class_counts(
    predicted: UInt8[Tensor, " heads *pixels"],
    target: UInt8[Tensor, "*pixels"],
    num_classes: int,
) -> Int64[Tensor, "heads 3 classes"]:
    """Count by class the pixels that are right, predicted and true; target 255 does not count.

    All that IoU and pixel accuracy need of a confusion matrix, in 3 / classes of its size; int64,
    because float32 counts stop growing at 2^24 pixels.
    """
    counted = target != IGNORED
    heads, true = len(predicted), target[counted]
    # int32: a head has fewer than 2^31 / 256 pixels an image, and bincount reads half the bytes.
    first = torch.arange(heads, dtype=torch.int32, device=target.device)[:, None] * num_classes
    cells = predicted[:, counted].int() + first
    right = cells.masked_fill(predicted[:, counted] != true, heads * num_classes)
    size = heads * num_classes
    of_true = torch.bincount(true, minlength=num_classes).expand(heads, -1)
    by_head = [torch.bincount(c.flatten(), minlength=size)[:size] for c in (right, cells)]
    return torch.stack([*(c.reshape(heads, -1) for c in by_head), of_true], 1)


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
    engine: Engine = "auto",
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
        engine: What finds the neighbours; they are the same.

    Source: `knn_classifier` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/eval_knn.py
    where ties, and in the top 5 the order of classes without votes, are left to the sort.
    """
    memory, found = F.normalize(bank.features.float(), dim=1), []
    for start in range(0, len(queries.labels), _ASKED):
        some = F.normalize(queries.features[start : start + _ASKED].float(), dim=1)
        similarities, index = nearest_vectors(some, memory, max(neighbours), engine=engine)
        # Relative to the nearest, so that no temperature overflows.
        votes = torch.exp((similarities - similarities[:, :1]).double() / temperature)
        named, true = bank.labels[index], queries.labels[start : start + _ASKED]
        ranks = [vote_rank(votes[:, :k], named[:, :k], true, num_classes) for k in neighbours]
        found.append(torch.stack(ranks))
    return torch.cat(found, dim=1)


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
