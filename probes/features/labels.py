"""Labels of an image set: which classes images and patches show."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError
from ssl_bench.metrics import value_counts


def class_labels(images: ImageSet) -> Sequence[int]:
    """The class of each image, of which none is read.

    Raises:
        DataError: the images say it one by one.
    """
    labels: Sequence[int] | None = getattr(images, "labels", None)
    if labels is None:
        raise DataError(
            f"{images.name} {images.split} tells classes only image by image, expected a list of "
            "labels beside them; leave probe.shots and probe.pool out"
        )
    return labels


def label_histograms(
    labels: UInt8[Tensor, "batch height width"], pixels_per_patch: int, classes: int
) -> Float[Tensor, "classes batch rows cols"]:
    """Count the labels under each patch; 255 is left out."""
    _, height, width = labels.shape
    rows, cols = height // pixels_per_patch, width // pixels_per_patch
    # int32, because bincount is bound by what it reads.
    down = torch.arange(height, dtype=torch.int32, device=labels.device) // pixels_per_patch
    across = torch.arange(width, dtype=torch.int32, device=labels.device) // pixels_per_patch
    patch = down[:, None] * cols + across
    index = labels.clamp(max=classes).int() * (rows * cols) + patch
    size = (classes + 1) * rows * cols
    counts = torch.stack([value_counts(one.flatten(), size) for one in index])
    return counts.view(-1, classes + 1, rows, cols).transpose(0, 1)[:classes].float()
