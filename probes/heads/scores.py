"""Scores of many heads: what was counted of every scored image, and what follows from it."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from ssl_bench.evaluation import Score
from ssl_bench.intervals import mean_iou_estimate, pixel_accuracy_estimate
from ssl_bench.results import Baseline, PerImage
from ssl_bench.scores import (
    ABSENT_CLASS_POLICY,
    iou_per_class,
    mean_iou,
    of_constant_class,
    pixel_accuracy,
)


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


def mask_score(
    cell: tuple[int, str],
    metric: str,
    counts: ImageCounts,
    head: tuple[int, int],
    class_names: Sequence[str],
    details: Mapping[str, Any],
) -> Score:
    """Pixel accuracy, or mean IoU over the classes that occur, of one head over a whole dataset.

    Args:
        cell: Layer and facet.
        metric: "pixel_accuracy"; any other name is one of mean IoU.
        counts: Of all images.
        head: Its source and value.
        class_names: In the order of their numbers.
        details: What else the record says.
    """
    is_accuracy = metric == "pixel_accuracy"
    score = pixel_accuracy if is_accuracy else mean_iou
    estimate = pixel_accuracy_estimate if is_accuracy else mean_iou_estimate
    source, value = head
    total, per_image = counts.total[source], counts.of(source, value)
    named, constant = of_constant_class(total[0])
    baseline = Baseline(f"constant class {class_names[named]}", float(score(constant)))
    return Score(
        *cell,
        metric,
        float(score(total)[value]),
        estimate(per_image).ci95(),
        len(counts),
        {
            "iou_by_class": dict(zip(class_names, plain(iou_per_class(total[value])), strict=True)),
            "absent_classes": ABSENT_CLASS_POLICY,
            **details,
            **baseline.as_details(),
        },
        per_image,
    )


def plain(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """As records have them: JSON has no NaN, so that of an absent class is null."""
    return [None if math.isnan(value) else float(value) for value in values]


def best_value(counts: Int64[np.ndarray, "values 3 classes"]) -> int:
    """Index of the head with the largest mean IoU."""
    return int(np.nan_to_num(mean_iou(counts), nan=-1.0).argmax())
