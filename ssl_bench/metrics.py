"""Scores as pure functions; whatever is counted is counted in int64, shares are percent."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from torch import Tensor

IGNORED = 255
ABSENT_CLASS_POLICY = "absent_from_both_is_nan"


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
    union = predicted + true - right
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


def bootstrap_sums(
    per_image: Int64[Tensor, " images *values"], *, seed: int = 0, num_resamples: int = 1000
) -> Float64[Tensor, " resamples *values"]:
    """Sums over images drawn with replacement, as one matrix product.

    The draws are those of `bootstrap_ci95`; float64 is exact for counts below 2^53.
    """
    num_images = len(per_image)
    generator = np.random.default_rng(seed)
    draws = torch.from_numpy(generator.integers(num_images, size=(num_resamples, num_images)))
    rows = torch.arange(num_resamples)[:, None] * num_images
    times = torch.bincount((draws + rows).flatten(), minlength=num_resamples * num_images)
    weights = times.reshape(num_resamples, num_images).double().to(per_image.device)
    sums = weights @ per_image.flatten(1).double()
    return sums.reshape(num_resamples, *per_image.shape[1:])


def interval95(values: Float64[Tensor, " resamples"]) -> tuple[float, float]:
    """The middle 95 % of a statistic over resamples; NaN is left out."""
    low, high = np.nanpercentile(values.cpu().numpy(), [2.5, 97.5])
    return float(low), float(high)


def box_iou(
    boxes: Float[np.ndarray, "boxes 4"], others: Float[np.ndarray, "others 4"]
) -> Float[np.ndarray, "boxes others"]:
    """Intersection over union of boxes (x0, y0, x1, y1), far edges exclusive, in pixels."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    intersection = np.clip(high - low, 0, None).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)[:, None]
    other_area = (others[:, 2:] - others[:, :2]).prod(-1)[None]
    union = area + other_area - intersection
    return intersection / np.where(union > 0, union, 1)


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


def bootstrap_ci95(
    num_images: int,
    statistic: Callable[[Int64[np.ndarray, " images"]], float],
    *,
    seed: int = 0,
    num_resamples: int = 1000,
) -> tuple[float, float]:
    """95 % percentile interval of a statistic over images drawn with replacement.

    Args:
        num_images: How many images were scored.
        statistic: Maps the indices of a resample to a number in percent; NaN is left out.
        seed: Resamples are the same for the same seed.
        num_resamples: Cost is this many calls of `statistic`.
    """
    generator = np.random.default_rng(seed)
    values = [
        statistic(generator.integers(num_images, size=num_images)) for _ in range(num_resamples)
    ]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def effective_rank(tokens: Float[Tensor, "tokens dim"]) -> float:
    """Exponential of the entropy of the centred tokens' normalised singular values.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    values = torch.linalg.svdvals((tokens - tokens.mean(0)).double())
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    return float(torch.exp(-(shares * shares.clamp(min=1e-300).log()).sum()))
