"""Scores of many heads: what was counted of every scored image, and what follows from it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from ssl_bench.intervals import Interval, mean_iou_estimate, pixel_accuracy_estimate
from ssl_bench.results import Baseline, PerImage
from ssl_bench.scores import iou_per_class, mean_iou, of_constant_class, pixel_accuracy


class ImageCounts:
    """`class_counts` of images under the heads of some sources, each with some values.

    A head predicts few classes in an image. A cell is one of them: image, head times classes plus
    class, right pixels, predicted ones. What is true is kept once for all heads. int32, because no
    image has 2^31 pixels; what is summed is summed in int64.
    """

    def __init__(self, sources: int, values: int, classes: int) -> None:
        self.total: Int64[np.ndarray, "sources values 3 classes"]
        self.total = np.zeros((sources, values, 3, classes), dtype=np.int64)
        self._true = np.zeros((0, classes), dtype=np.int32)
        # These grow in place, where arrays of numpy would leave holes in memory.
        self._cells = [array("i") for _ in range(4)]

    def __len__(self) -> int:
        """Number of images."""
        return len(self._true)

    @property
    def has_labels(self) -> bool:
        return bool(self.total[:, :, 2].any())

    def add(self, counts: Integer[Tensor, "images sources values 3 classes"]) -> None:
        """Append some images."""
        right, predicted = (counts[:, :, :, which].flatten(1) for which in (0, 1))
        image, number = predicted.nonzero(as_tuple=True)
        cells = torch.stack([image, number, right[image, number], predicted[image, number]])
        total, true = counts.sum(0, dtype=torch.int64), counts[:, 0, 0, 2]
        self.extend({"total": total, "true": true.int(), "cells": cells.int()})

    def of(self, source: int, value: int) -> PerImage:
        """Pixels that are right, predicted and true by class, for each image, under one head."""
        _, values, _, classes = self.total.shape
        first = (source * values + value) * classes
        image, number, right, predicted = (np.frombuffer(one, np.int32) for one in self._cells)
        some = np.flatnonzero((number >= first) & (number < first + classes))
        counts = np.zeros((len(self), 3, classes), dtype=np.int32)
        counts[image[some], 0, number[some] - first] = right[some]
        counts[image[some], 1, number[some] - first] = predicted[some]
        counts[:, 2] = self._true
        return counts

    def state(self) -> dict[str, Tensor]:
        """All that was counted."""
        cells = np.stack([np.frombuffer(one, np.int32) for one in self._cells])
        parts = {"total": self.total, "true": self._true, "cells": cells}
        return {name: torch.from_numpy(part) for name, part in parts.items()}

    def extend(self, state: Mapping[str, Tensor]) -> None:
        """Append the images of counts under the same heads that gave this state."""
        cells = state["cells"].numpy().copy()
        cells[0] += len(self)
        for kept, some in zip(self._cells, cells, strict=True):
            kept.frombytes(some.tobytes())
        self.total += state["total"].numpy()
        self._true = np.concatenate([self._true, state["true"].numpy()])


@dataclass(frozen=True)
class HeadScores:
    """Scores of the heads of one source by learning rate, over a whole dataset."""

    per_image: ImageCounts
    source: int

    @property
    def num_images(self) -> int:
        return len(self.per_image)

    def total(self) -> Int64[np.ndarray, "values 3 classes"]:
        return self.per_image.total[self.source]

    def miou(self) -> list[float]:
        """Mean IoU of each rate over the classes that occur, in percent."""
        return mean_iou(self.total()).tolist()

    def best(self) -> int:
        return best_rate(self.total())

    def miou_ci95(self, rate: int) -> Interval | None:
        return mean_iou_estimate(self.counts(rate)).ci95()

    def accuracy(self, rate: int) -> float:
        return float(pixel_accuracy(self.total()[rate]))

    def accuracy_ci95(self, rate: int) -> Interval | None:
        return pixel_accuracy_estimate(self.counts(rate)).ci95()

    def counts(self, rate: int) -> PerImage:
        """Pixels that are right, predicted and true by class, for each image."""
        return self.per_image.of(self.source, rate)

    def baseline(self, metric: str, class_names: Sequence[str]) -> Baseline:
        """Naming one class at all pixels, whatever the image."""
        named, counts = of_constant_class(self.total()[0])
        score = pixel_accuracy if metric == "pixel_accuracy" else mean_iou
        return Baseline(f"constant class {class_names[named]}", float(score(counts)))

    def iou(self, rate: int) -> list[float]:
        """IoU of each class in percent, NaN where it is neither true nor predicted."""
        return iou_per_class(self.total()[rate]).tolist()


def best_rate(counts: Int64[np.ndarray, "values 3 classes"]) -> int:
    """Index of the rate with the largest mean IoU."""
    return int(np.nan_to_num(mean_iou(counts), nan=-1.0).argmax())
