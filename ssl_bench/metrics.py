"""Count what scores are computed from, with torch on the device of the features.

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
    """Count the correct, predicted and true pixels of each class. Target 255 is ignored.

    IoU and pixel accuracy need no more of a confusion matrix, and this is 3 / num_classes of its
    size. The counts are int64, because float32 counts stop growing at 2^24 pixels.
    """
    true, by_head = target.flatten(), predicted.flatten(1)
    # One head at a time stays in a CPU's cache. A GPU is faster with all heads at once.
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
    """Return confusion matrices: true classes in rows, predicted classes in columns.

    Target 255 is ignored. Prefer `class_counts` if it suffices, since it is smaller.
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
    """Count the pixels by predicted class: wrong ones in row 0, correct ones in row 1."""
    heads, size = len(predicted), 2 * num_classes
    # int32 suffices (an image has fewer than 2^31 / 512 pixels) and halves the memory traffic.
    offsets = torch.arange(heads, dtype=torch.int32, device=true.device)[:, None] * size
    cells = (predicted == true).int().mul_(num_classes).add_(predicted).add_(offsets)
    # Ignored pixels go to one extra cell at the end. Removing them would synchronise the device.
    cells.masked_fill_(true == IGNORED, heads * size)
    return value_counts(cells.flatten(), heads * size + 1)[:-1].view(heads, 2, num_classes)


def value_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """Return how often each number from 0 to `size` - 1 occurs, or the sum of its weights.

    On a CPU this is `torch.bincount`. On other devices `torch.bincount` would make the host wait,
    so `scatter_value_counts` is used.
    """
    if values.device.type == "cpu":
        return torch.bincount(values, weights, size)
    return scatter_value_counts(values, size, weights)


def scatter_value_counts(
    values: Integer[Tensor, " places"],
    size: int,
    weights: Float[Tensor, " places"] | None = None,
) -> Int64[Tensor, " {size}"] | Float64[Tensor, " {size}"]:
    """Return the same as `value_counts`, by `scatter_add_`, which needs no synchronisation."""
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
    """Return the rank of the true class, 0 if it has the highest score.

    Of classes with equal scores, the one with the lower index ranks first. The rank is the number
    of classes if any score of the image is not finite.
    """
    num_classes = scores.shape[-1]
    own = scores.gather(-1, targets.expand(scores.shape[:-1])[..., None])
    lower = torch.arange(num_classes, device=targets.device) < targets[:, None]
    before = (scores > own) | ((scores == own) & lower)
    return torch.where(scores.isfinite().all(-1), before.sum(-1), num_classes)
