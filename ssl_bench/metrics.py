"""Compute the counts that scores are derived from, with torch on the device of the features.

`ssl_bench.scores` turns the counts into percentages.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64, Integer, UInt8
from torch import Tensor

from ssl_bench.scores import IGNORED
from ssl_bench.system.device import to_float64


def class_counts(
    predicted: UInt8[Tensor, " heads *pixels"],
    target: UInt8[Tensor, "*pixels"],
    num_classes: int,
) -> Int64[Tensor, "heads 3 classes"]:
    """Count the correct, predicted and ground-truth pixels of each class.

    Pixels with the target 255 are ignored. IoU and pixel accuracy need only these counts, which
    take 3 / num_classes of the memory of a confusion matrix.
    """
    true, by_head = target.flatten(), predicted.flatten(1)
    # On a CPU, one head at a time fits into the cache. On a GPU, all heads at once are faster.
    batch = 1 if target.device.type == "cpu" else max(1, len(by_head))
    counts = torch.cat(
        [_count_wrong_and_correct(some, true, num_classes) for some in by_head.split(batch)]
    )
    true_counts = value_counts(true, IGNORED + 1)[:num_classes].expand(len(by_head), -1)
    return torch.stack([counts[:, 1], counts.sum(1), true_counts], 1)


def confusion_counts(
    predicted: UInt8[Tensor, " heads *pixels"],
    target: UInt8[Tensor, "*pixels"],
    num_classes: int,
) -> Int64[Tensor, "heads classes classes"]:
    """Return a confusion matrix for each head. Rows are true classes, columns predicted classes.

    Pixels with the target 255 are ignored. Use the smaller `class_counts` if they suffice.
    """
    true, matrices = target.flatten(), []
    for labels in predicted.flatten(1):
        cells = true.int() * num_classes + labels
        cells.masked_fill_(true == IGNORED, num_classes**2)
        matrix = value_counts(cells, num_classes**2 + 1)[:-1]
        matrices.append(matrix.view(num_classes, num_classes))
    return torch.stack(matrices)


def _count_wrong_and_correct(
    predicted: UInt8[Tensor, "heads pixels"], true: UInt8[Tensor, " pixels"], num_classes: int
) -> Int64[Tensor, "heads 2 classes"]:
    """Count wrong pixels (row 0) and correct pixels (row 1) of each predicted class."""
    heads, size = len(predicted), 2 * num_classes
    # int32 halves the memory traffic. An image has fewer than 2^31 / 512 pixels, so int32 suffices.
    offsets = torch.arange(heads, dtype=torch.int32, device=true.device)[:, None] * size
    cells = (predicted == true).int().mul_(num_classes).add_(predicted).add_(offsets)
    # Ignored pixels get an extra cell, because removing them would make the host wait.
    cells.masked_fill_(true == IGNORED, heads * size)
    return value_counts(cells.flatten(), heads * size + 1)[:-1].view(heads, 2, num_classes)


def value_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """Count how often each number from 0 to `size` - 1 occurs, or sum the weights of each number.

    `torch.bincount` is only used on a CPU, because it makes the host wait for other devices.
    """
    if values.device.type == "cpu":
        return torch.bincount(values, weights, size)
    return scatter_value_counts(values, size, weights)


def scatter_value_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """Return the same as `value_counts`, but use `scatter_add_` so that the host need not wait."""
    if weights is None:
        ones = torch.ones(1, dtype=torch.int64, device=values.device)
        return ones.new_zeros(size).scatter_add_(0, values.long(), ones.expand(len(values)))
    exact = to_float64(weights)
    return exact.new_zeros(size).scatter_add_(0, values.long().to(exact.device), exact)


@dataclass(frozen=True, eq=False)
class LabelledFeatures:
    """One feature vector and one class label for each image."""

    features: Float[Tensor, "images dim"]
    labels: Int64[Tensor, " images"]

    def to(self, device: torch.device) -> "LabelledFeatures":
        return LabelledFeatures(self.features.to(device), self.labels.to(device))


def class_rank(
    scores: Float[Tensor, "*heads queries classes"], targets: Int64[Tensor, " queries"]
) -> Int64[Tensor, "*heads queries"]:
    """Return the rank of the true class by score. The class with the highest score has rank 0.

    If scores are equal, the class with the lower index ranks first. If any score of a query is not
    finite, its rank is the number of classes.
    """
    num_classes = scores.shape[-1]
    own = scores.gather(-1, targets.expand(scores.shape[:-1])[..., None])
    lower = torch.arange(num_classes, device=targets.device) < targets[:, None]
    before = (scores > own) | ((scores == own) & lower)
    return torch.where(scores.isfinite().all(-1), before.sum(-1), num_classes)
