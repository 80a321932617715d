"""Scores of many heads: what was counted of every scored image, and what follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int32, Int64, Integer
from torch import Tensor

from ssl_bench.intervals import Interval, mean_iou_estimate, pixel_accuracy_estimate
from ssl_bench.results import Baseline, PerImage
from ssl_bench.scores import iou_per_class, mean_iou, of_constant_class, pixel_accuracy

# Cells of a chunk, which takes 12 MiB: more than what is freed between them, so that the system
# gives it memory of its own and no hole between two chunks is lost.
_CHUNK = 1 << 20


class ImageCounts:
    """`class_counts` of images under the heads of some sources, each with some values.

    A head predicts few classes in an image. A cell is one of them: head times classes plus class,
    right pixels, predicted ones; images follow each other. What is true is kept once for all heads.
    int32, because no image has 2^31 pixels; what is summed is summed in int64.
    """

    def __init__(self, sources: int, values: int, classes: int) -> None:
        self.total: Int64[np.ndarray, "sources values 3 classes"]
        self.total = np.zeros((sources, values, 3, classes), dtype=np.int64)
        self._true: list[Int32[np.ndarray, " classes"]] = []
        self._chunks: list[Int32[np.ndarray, "3 chunk"]] = []
        self._ends: list[int] = []
        self._num_cells = 0

    def __len__(self) -> int:
        """Number of images."""
        return len(self._true)

    @property
    def has_labels(self) -> bool:
        return bool(self.total[:, :, 2].any())

    def add(self, counts: Integer[Tensor, "images sources values 3 classes"]) -> None:
        """Append some images."""
        self.total += counts.sum(0, dtype=torch.int64).numpy()
        right, predicted = (counts[:, :, :, which].flatten(1) for which in (0, 1))
        image, number = predicted.nonzero(as_tuple=True)
        ends = torch.bincount(image, minlength=len(counts)).cumsum(0) + self._num_cells
        self._ends += ends.tolist()
        found = [right[image, number], predicted[image, number]]
        self._append(torch.stack([number, *found]).int().numpy())
        self._true += list(counts[:, 0, 0, 2].int().numpy())

    def of(self, source: int, value: int) -> PerImage:
        """Pixels that are right, predicted and true by class, for each image, under one head."""
        _, values, _, classes = self.total.shape
        first = (source * values + value) * classes
        counts = np.zeros((len(self), 3, classes), dtype=np.int32)
        for start, chunk in zip(range(0, self._num_cells, _CHUNK), self._filled(), strict=True):
            some = np.flatnonzero((chunk[0] >= first) & (chunk[0] < first + classes))
            image = np.searchsorted(self._ends, start + some, side="right")
            number, *found = chunk[:, some]
            for which, pixels in enumerate(found):
                counts[image, which, number - first] = pixels
        counts[:, 2] = self._true
        return counts

    def state(self) -> dict[str, Tensor]:
        """All that was counted."""
        cells = np.concatenate(self._filled(), 1) if self._chunks else np.empty((3, 0), np.int32)
        true = np.array(self._true, np.int32).reshape(len(self), self.total.shape[-1])
        parts = {"total": self.total, "true": true, "ends": np.array(self._ends, np.int64)}
        return {name: torch.from_numpy(part) for name, part in {**parts, "cells": cells}.items()}

    def extend(self, state: Mapping[str, Tensor]) -> None:
        """Append the images of counts under the same heads that gave this state."""
        self.total += state["total"].numpy()
        self._true += list(state["true"].numpy())
        self._ends += (state["ends"] + self._num_cells).tolist()
        self._append(state["cells"].numpy())

    def _append(self, cells: Int32[np.ndarray, "3 cells"]) -> None:
        while cells.size:
            start = self._num_cells % _CHUNK
            if start == 0:
                self._chunks.append(np.empty((3, _CHUNK), dtype=np.int32))
            some = cells[:, : _CHUNK - start]
            self._chunks[-1][:, start : start + some.shape[1]] = some
            self._num_cells += some.shape[1]
            cells = cells[:, some.shape[1] :]

    def _filled(self) -> list[Int32[np.ndarray, "3 cells"]]:
        left = self._num_cells - (len(self._chunks) - 1) * _CHUNK
        return [*self._chunks[:-1], *(chunk[:, :left] for chunk in self._chunks[-1:])]


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
