"""How masks are scored: what the encoder is shown of an image, classes of its pixels, and counts.

In this order: `probe.inference` of linear segmentation, what is counted of every image under many
heads, and the score that follows from it.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from probes.features.views import image_and_mask, resize_bilinear, resize_mask
from probes.heads.pixels import predict_pixels
from ssl_bench.composition.fields import Pixels, check_fields
from ssl_bench.data.samples import Sample
from ssl_bench.evaluation import Score
from ssl_bench.intervals import mean_iou_estimate, pixel_accuracy_estimate
from ssl_bench.results import Baseline, PerImage
from ssl_bench.scores import (
    ABSENT_CLASS_POLICY,
    iou_per_class,
    mean_iou,
    pixel_accuracy,
    predict_constant_class,
)

# Of the longer side to the shorter one, beyond which an image is shrunk further.
_LONGEST = 4


@dataclass(frozen=True)
class ScoredImage:
    """One image as the encoder sees it, and what its pixels are compared with.

    Attributes:
        windows: RGB in [0, 1].
        corners: Upper left pixel of each window in the resized image.
        size: Height and width of the resized image.
        mask: Class of each pixel, 255 where it is ignored; predictions have its size.
    """

    image_id: str
    windows: Float[Tensor, "windows 3 side side"]
    corners: tuple[tuple[int, int], ...]
    size: tuple[int, int]
    mask: UInt8[Tensor, "height width"]


@dataclass(frozen=True)
class Squashed:
    """The whole image, squashed to a square; logits are upsampled to the size of the mask.

    Attributes:
        score_size: Masks are reduced to this height and width before scoring; the original size if
            None.
    """

    score_size: Pixels | None = None

    scoring: ClassVar[str] = "squash"

    def __post_init__(self) -> None:
        check_fields(self, "probe.inference")

    def settings(self) -> dict[str, Any]:
        return {"scoring": self.scoring, "score_size": self.score_size}

    def prepare(
        self, sample: Sample, size: int, mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ) -> ScoredImage:
        """Show an image in a square of this side; `mean` is the colour of what lies beyond it."""
        del mean
        image, mask = image_and_mask(sample)
        if self.score_size is not None:
            mask = resize_mask(mask, self.score_size, self.score_size)
        squashed = resize_bilinear(image, size, size)
        return ScoredImage(sample.image_id, squashed[None], ((0, 0),), (size, size), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        """Classes of the pixels of a mask from the logits of patches."""
        return predict_pixels(logits[0], *image.mask.shape)


@dataclass(frozen=True)
class ByPatch(Squashed):
    """Squashed images, each pixel of which takes the class of the patch over it."""

    scoring = "patch"

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        winners = logits[0].argmax(-1).to(torch.uint8)
        return F.interpolate(winners[None], size=image.mask.shape, mode="nearest-exact")[0]


@dataclass(frozen=True)
class SlidingWindows:
    """Square windows over the image, whose shorter side is resized to that of a window.

    Windows are two thirds of their side apart; where they overlap, their upsampled logits are
    averaged before they are resized to the size of the mask.

    Source: test mode "slide" of https://github.com/open-mmlab/mmsegmentation, as the linear heads
    of https://github.com/facebookresearch/dinov2 use it (512 pixels, 341 apart).
    """

    def settings(self) -> dict[str, Any]:
        return {"scoring": "slide", "score_size": None}

    def prepare(self, sample: Sample, size: int, mean: tuple[float, float, float]) -> ScoredImage:
        """In windows of this side; `mean` is the colour of what lies beyond a very long image."""
        image, mask = image_and_mask(sample)
        scale = min(size / min(mask.shape), _LONGEST * size / max(mask.shape))
        height, width = (max(1, round(scale * side)) for side in mask.shape)
        colour = torch.tensor(mean).view(3, 1, 1)
        beyond = (0, max(0, size - width), 0, max(0, size - height))
        padded = F.pad(resize_bilinear(image, height, width) - colour, beyond) + colour
        # The last window ends with the image.
        down, across = (
            [*range(0, max(0, length - size), max(1, 2 * size // 3)), max(0, length - size)]
            for length in (height, width)
        )
        corners = tuple((top, left) for top in down for left in across)
        windows = [padded[:, top : top + size, left : left + size] for top, left in corners]
        return ScoredImage(sample.image_id, torch.stack(windows), corners, (height, width), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        (height, width), size, predicted = image.size, image.windows.shape[-1], []
        # One rate at a time: its upsampled logits take 100 MB.
        for of_rate in logits.unbind(1):
            total = logits.new_zeros(logits.shape[-1], height, width)
            times = logits.new_zeros(height, width)
            for window, (top, left) in zip(of_rate, image.corners, strict=True):
                maps = window.movedim(-1, 0)[None]
                upsampled = F.interpolate(maps, size=(size, size), mode="bilinear")[0]
                rows, cols = slice(top, top + size), slice(left, left + size)
                part = total[:, rows, cols]
                part += upsampled[:, : part.shape[1], : part.shape[2]]
                times[rows, cols] += 1
            (whole,) = F.interpolate((total / times)[None], image.mask.shape, mode="bilinear")
            predicted.append(whole.argmax(0).to(torch.uint8))
        return torch.stack(predicted)


class ImageCounts:
    """Correct, predicted and true pixels of each class in each image, under many heads.

    A head predicts few classes in an image. Only those are stored, as columns of four numbers:
    image, head * classes + class, correct pixels, predicted pixels. True pixels do not depend on
    the head and are stored once. An image has less than 2^31 pixels, so int32 is enough for it.
    Sums over images are int64.

    Attributes:
        total: Correct, predicted and true pixels of all images.
    """

    def __init__(self, sources: int, values: int, classes: int) -> None:
        self.total: Int64[np.ndarray, "sources values 3 classes"]
        self.total = np.zeros((sources, values, 3, classes), dtype=np.int64)
        self._true = np.zeros((0, classes), dtype=np.int32)
        # These grow in place. New numpy arrays would fragment the memory.
        self._columns = [array("i") for _ in range(4)]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._true)

    def add(self, counts: Integer[Tensor, "images sources values 3 classes"]) -> None:
        """Append the `class_counts` of some images."""
        correct, predicted = (counts[:, :, :, row].flatten(1) for row in (0, 1))
        image, number = predicted.nonzero(as_tuple=True)
        columns = torch.stack([image, number, correct[image, number], predicted[image, number]])
        true = counts[:, 0, 0, 2]
        self.extend({"first": len(self), "true": true.int(), "columns": columns.int()})

    def per_image(self, source: int, value: int) -> PerImage:
        """Return correct, predicted and true pixels by class of each image, under one head."""
        _, values, _, classes = self.total.shape
        first = (source * values + value) * classes
        image, number, correct, predicted = (np.frombuffer(c, np.int32) for c in self._columns)
        chosen = np.flatnonzero((number >= first) & (number < first + classes))
        counts = np.zeros((len(self), 3, classes), dtype=np.int32)
        counts[image[chosen], 0, number[chosen] - first] = correct[chosen]
        counts[image[chosen], 1, number[chosen] - first] = predicted[chosen]
        counts[:, 2] = self._true
        return counts

    def entry(self, first: int) -> dict[str, Any]:
        """Return the counts of image `first` and all later ones, as an entry of a journal."""
        start = np.frombuffer(self._columns[0], np.int32).searchsorted(first)
        columns = np.stack([np.frombuffer(column, np.int32)[start:] for column in self._columns])
        columns[0] -= first
        true = torch.from_numpy(self._true[first:])
        return {"first": first, "true": true, "columns": torch.from_numpy(columns)}

    def extend(self, entry: Mapping[str, Any]) -> None:
        """Append the images of an entry if they are the next ones. Otherwise, change nothing.

        An entry does not fit if the one before it was damaged, or if two processes wrote the file.
        """
        if entry["first"] != len(self):
            return
        true, columns = entry["true"].numpy(), entry["columns"].numpy().copy()
        columns[0] += len(self)
        _, number, *pixels = columns
        size = self.total[:, :, 0].size
        for row, counts in enumerate(pixels):
            # Sums of float64 are exact below 2^53.
            sums = np.bincount(number, counts, size).astype(np.int64)
            self.total[:, :, row] += sums.reshape(self.total[:, :, row].shape)
        self.total[:, :, 2] += true.sum(0, dtype=np.int64)
        for column, values in zip(self._columns, columns, strict=True):
            column.frombytes(values.tobytes())
        self._true = np.concatenate([self._true, true])


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
    total, per_image = counts.total[source], counts.per_image(source, value)
    named, constant = predict_constant_class(total[0])
    baseline = Baseline(f"constant class {class_names[named]}", float(score(constant)))
    iou = nan_to_none(iou_per_class(total[value]))
    return Score(
        *cell,
        metric,
        float(score(total)[value]),
        estimate(per_image).ci95(),
        len(counts),
        {
            "iou_by_class": dict(zip(class_names, iou, strict=True)),
            "absent_classes": ABSENT_CLASS_POLICY,
            **details,
            **baseline.as_details(),
        },
        per_image,
        per_image_kind="pixel_accuracy" if is_accuracy else "mean_iou",
    )


def nan_to_none(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """As records have them: JSON has no NaN, so that of an absent class is null."""
    return [None if math.isnan(value) else float(value) for value in values]
