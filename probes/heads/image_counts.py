"""What was counted of every scored image under many heads, kept in little memory."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int32, Int64, Integer
from torch import Tensor

from ssl_bench.results import PerImage


class ImageCounts:
    """`class_counts` of images under the heads of some sources, each with some values.

    Kept are the classes that a head predicts, 16 bytes for each of an image, and what is true once
    for all heads: int32, because no image has 2^31 pixels. What is summed is summed in int64.
    """

    def __init__(self, sources: int, values: int, classes: int) -> None:
        self.total: Int64[np.ndarray, "sources values 3 classes"]
        self.total = np.zeros((sources, values, 3, classes), dtype=np.int64)
        self._batches: list[_Batch] = []

    def __len__(self) -> int:
        """Number of images."""
        return sum(len(batch.true) for batch in self._batches)

    @property
    def has_labels(self) -> bool:
        return bool(self.total[:, :, 2].any())

    def add(self, counts: Integer[Tensor, "images sources values 3 classes"]) -> None:
        """Append some images."""
        self.total += counts.sum(0, dtype=torch.int64).numpy()
        self._batches.append(_Batch.of(counts.flatten(1, 2)))

    def of(self, source: int, value: int) -> PerImage:
        """Pixels that are right, predicted and true by class, for each image, under one head."""
        head = source * self.total.shape[1] + value
        return np.concatenate([batch.of_head(head) for batch in self._batches])


@dataclass(frozen=True, eq=False)
class _Batch:
    """Counts of some images.

    Attributes:
        cells: Image, head times classes plus class, right pixels, predicted ones, where there are
            any.
    """

    true: Int32[np.ndarray, "images classes"]
    cells: Int32[np.ndarray, "4 cells"]

    @classmethod
    def of(cls, counts: Integer[Tensor, "images heads 3 classes"]) -> "_Batch":
        right, predicted, true = counts.unbind(2)
        image, number = predicted.flatten(1).nonzero(as_tuple=True)
        found = [by_head.flatten(1)[image, number] for by_head in (right, predicted)]
        cells = torch.stack([image, number, *found]).int()
        return cls(true[:, 0].int().numpy(), cells.numpy())

    def of_head(self, head: int) -> Int32[np.ndarray, "images 3 classes"]:
        images, classes = self.true.shape
        number = self.cells[1] - head * classes
        image, number, right, predicted = self.cells[:, (number >= 0) & (number < classes)]
        counts = np.zeros((images, 3, classes), dtype=np.int32)
        counts[image, 0, number - head * classes] = right
        counts[image, 1, number - head * classes] = predicted
        counts[:, 2] = self.true
        return counts
