"""What scores are made of, counted where the features are: classes of pixels, places of classes."""

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
    """Count by class the pixels that are right, predicted and true; target 255 does not count.

    All that IoU and pixel accuracy need of a confusion matrix, in 3 / classes of its size; int64,
    because float32 counts stop growing at 2^24 pixels.
    """
    true, given = target.flatten(), predicted.flatten(1)
    # One head after the other stays in a processor's cache; a device would rather have all at once.
    at_once = 1 if target.device.type == "cpu" else max(1, len(given))
    found = torch.cat([_wrong_and_right(some, true, num_classes) for some in given.split(at_once)])
    of_true = value_counts(true, IGNORED + 1)[:num_classes].expand(len(given), -1)
    return torch.stack([found[:, 1], found.sum(1), of_true], 1)


def confusion_counts(
    predicted: UInt8[Tensor, " heads *pixels"],
    target: UInt8[Tensor, "*pixels"],
    num_classes: int,
) -> Int64[Tensor, "heads classes classes"]:
    """Count the pixels of each true class, by row, and predicted class; target 255 does not count.

    Unlike `class_counts` it tells which class was taken for which, at num_classes / 3 of its size.
    """
    true, heads = target.flatten(), []
    for given in predicted.flatten(1):
        cells = true.int() * num_classes + given
        cells.masked_fill_(true == IGNORED, num_classes**2)
        heads.append(value_counts(cells, num_classes**2 + 1)[:-1].view(num_classes, num_classes))
    return torch.stack(heads)


def _wrong_and_right(
    given: UInt8[Tensor, "heads pixels"], true: UInt8[Tensor, " pixels"], num_classes: int
) -> Int64[Tensor, "heads 2 classes"]:
    heads, size = len(given), 2 * num_classes
    # int32: heads have fewer than 2^31 / 512 pixels an image, and bincount reads half the bytes.
    first = torch.arange(heads, dtype=torch.int32, device=true.device)[:, None] * size
    cells = (given == true).int().mul_(num_classes).add_(given).add_(first)
    # What does not count goes behind all classes: a device would have to say how much is left.
    cells.masked_fill_(true == IGNORED, heads * size)
    return value_counts(cells.flatten(), heads * size + 1)[:-1].view(heads, 2, num_classes)


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
    wide = to_float64(weights)
    return wide.new_zeros(size).scatter_add_(0, values.long().to(wide.device), wide)


@dataclass(frozen=True, eq=False)
class LabelledFeatures:
    """Features of images, of any length, and the class of each image."""

    features: Float[Tensor, "images dim"]
    labels: Int64[Tensor, " images"]

    def to(self, device: torch.device) -> "LabelledFeatures":
        return LabelledFeatures(self.features.to(device), self.labels.to(device))


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
