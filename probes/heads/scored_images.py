"""Prepare scored images, predict the classes of their pixels, and compute segmentation scores.

The classes `Squashed`, `ByPatch` and `SlidingWindows` prepare images and predict pixels. The
setting `probe.inference` selects one of these classes. `ImageCounts` stores the pixel counts of
each image for many heads. `mask_score` computes a score from these counts.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from probes.features.training_images import image_and_mask, resize_bilinear, resize_mask
from probes.heads.pixels import predict_pixels
from ssl_bench.composition.fields import Pixels, check_fields
from ssl_bench.data.samples import Sample
from ssl_bench.evaluation import Score
from ssl_bench.intervals import mean_iou_estimate, pixel_accuracy_estimate
from ssl_bench.results import Baseline, PerImage
from ssl_bench.scores import (
    ABSENT_CLASS_POLICY,
    IGNORE_INDEX,
    iou_per_class,
    mean_iou,
    pixel_accuracy,
    predict_constant_class,
)
from ssl_bench.system.device import value_counts

# If the ratio of the longer to the shorter side is larger, the image is reduced further.
_MAX_ASPECT_RATIO = 4


@dataclass(frozen=True)
class ScoredImage:
    """An image that is prepared for the encoder, with its mask.

    Attributes:
        windows: Input of the encoder, RGB in [0, 1]: one or several square parts of the image.
        corners: Row and column of the upper left pixel of each window in the resized image.
        size: Height and width of the resized image.
        mask: Class of each pixel, or 255 for ignored pixels. Predictions have the size of the mask.
    """

    image_id: str
    windows: Float[Tensor, "windows 3 side side"]
    corners: tuple[tuple[int, int], ...]
    size: tuple[int, int]
    mask: UInt8[Tensor, "height width"]


@dataclass(frozen=True)
class Squashed:
    """Inference on whole images, resized to squares. Logits are upsampled to the size of the mask.

    Attributes:
        score_size: Masks are resized to this height and width before scoring. None for their
            original size.
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
        """Resize an image to a square with a side of `size` pixels. `mean` is ignored."""
        del mean
        image, mask = image_and_mask(sample)
        if self.score_size is not None:
            mask = resize_mask(mask, self.score_size, self.score_size)
        windows = resize_bilinear(image, size, size)[None]
        return ScoredImage(sample.image_id, windows, ((0, 0),), (size, size), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        """Predict the class of each pixel at the size of the image's mask, for each head.

        The logits of the patches are upsampled.
        """
        return predict_pixels(logits[0], *image.mask.shape)


@dataclass(frozen=True)
class ByPatch(Squashed):
    """Inference on whole images, resized to squares. Each pixel gets the class of its patch."""

    scoring = "patch"

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        patches = logits[0].argmax(-1).to(torch.uint8)
        return F.interpolate(patches[None], size=image.mask.shape, mode="nearest-exact")[0]


@dataclass(frozen=True)
class SlidingWindows:
    """Inference on overlapping square windows of an image.

    The image is resized so that its shorter side equals the side of a window. The stride is two
    thirds of the side of a window. The logits of each window are upsampled, and averaged where
    windows overlap. The averaged logits are then resized to the size of the mask.

    Source: test mode "slide" of https://github.com/open-mmlab/mmsegmentation, with the settings for
    linear heads of https://github.com/facebookresearch/dinov2 (512 pixels, stride 341).
    """

    def settings(self) -> dict[str, Any]:
        return {"scoring": "slide", "score_size": None}

    def prepare(self, sample: Sample, size: int, mean: tuple[float, float, float]) -> ScoredImage:
        """Resize an image, and cut it into square windows with a side of `size` pixels.

        `mean` is the RGB colour of the padding for images that are smaller than a window.
        """
        image, mask = image_and_mask(sample)
        scale = min(size / min(mask.shape), _MAX_ASPECT_RATIO * size / max(mask.shape))
        height, width = (max(1, round(scale * side)) for side in mask.shape)
        colour = torch.tensor(mean).view(3, 1, 1)
        padding = (0, max(0, size - width), 0, max(0, size - height))
        padded = F.pad(resize_bilinear(image, height, width) - colour, padding) + colour
        # The last window ends at the edge of the image.
        tops, lefts = (
            [*range(0, max(0, length - size), max(1, 2 * size // 3)), max(0, length - size)]
            for length in (height, width)
        )
        corners = tuple(product(tops, lefts))
        windows = [padded[:, top : top + size, left : left + size] for top, left in corners]
        return ScoredImage(sample.image_id, torch.stack(windows), corners, (height, width), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        (height, width), size, predicted = image.size, image.windows.shape[-1], []
        # The upsampled logits of one head take 100 MB.
        for by_window in logits.unbind(1):
            total = logits.new_zeros(logits.shape[-1], height, width)
            count = logits.new_zeros(height, width)
            for window, (top, left) in zip(by_window, image.corners, strict=True):
                maps = window.movedim(-1, 0)[None]
                upsampled = F.interpolate(maps, size=(size, size), mode="bilinear")[0]
                rows, cols = slice(top, top + size), slice(left, left + size)
                part = total[:, rows, cols]
                part += upsampled[:, : part.shape[1], : part.shape[2]]
                count[rows, cols] += 1
            (mean,) = F.interpolate((total / count)[None], image.mask.shape, mode="bilinear")
            predicted.append(mean.argmax(0).to(torch.uint8))
        return torch.stack(predicted)


class ImageCounts:
    """Numbers of correct, predicted and true pixels of each class and image, for many heads.

    A head predicts few classes in an image, so only predicted classes are stored. Each predicted
    class takes four numbers: the index of the image, the index (head * classes + class) of the head
    and class, the number of correct pixels, and the number of predicted pixels. The counts of true
    pixels do not depend on the head and are stored once. An image has fewer than 2^31 pixels, so
    int32 is sufficient for its counts. Sums over images are int64.

    Attributes:
        total: Numbers of correct, predicted and true pixels of each class, summed over all images.
            There is one head for each source (group of layers) and each learning rate or C.
    """

    def __init__(self, sources: int, values: int, classes: int) -> None:
        self.total: Int64[np.ndarray, "sources values 3 classes"]
        self.total = np.zeros((sources, values, 3, classes), dtype=np.int64)
        self._true = np.zeros((0, classes), dtype=np.int32)
        # These arrays grow in place, because creating new numpy arrays would fragment the memory.
        self._columns = [array("i") for _ in range(4)]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._true)

    def add(self, counts: Integer[Tensor, "images sources values 3 classes"]) -> None:
        """Append the pixel counts of some images, for all heads and classes.

        The axis of length 3 contains the numbers of correct, predicted and true pixels. There is
        one head for each source (group of layers) and each learning rate or C.
        """
        correct, predicted = (counts[:, :, :, row].flatten(1) for row in (0, 1))
        image, number = predicted.nonzero(as_tuple=True)
        columns = torch.stack([image, number, correct[image, number], predicted[image, number]])
        true = counts[:, 0, 0, 2]
        self.extend({"first": len(self), "true": true.int(), "columns": columns.int()})

    def per_image(self, source: int, value: int) -> PerImage:
        """Return the numbers of correct, predicted and true pixels of each image, for one head.

        The result has the shape images x 3 x classes. `source` is the index of the head's source
        (group of layers), and `value` is the index of its learning rate or C.
        """
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
        """Return the counts of all images from index `first` on, as an entry of a journal.

        A journal is a file that lets an interrupted run continue.
        """
        start = np.frombuffer(self._columns[0], np.int32).searchsorted(first)
        columns = np.stack([np.frombuffer(column, np.int32)[start:] for column in self._columns])
        columns[0] -= first
        true = torch.from_numpy(self._true[first:])
        return {"first": first, "true": true, "columns": torch.from_numpy(columns)}

    def extend(self, entry: Mapping[str, Any]) -> None:
        """Append the pixel counts that an interrupted run has saved in a journal file.

        An entry is ignored unless it begins with the first image that has no counts yet. Entries
        are ignored for this reason if an earlier entry was damaged, or if two processes wrote the
        journal.
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
    """Return the pixel accuracy or mean IoU of one head over a dataset.

    Mean IoU is the mean of the IoU over the classes that occur in the masks or the predictions.

    Args:
        cell: Layer and facet (kind of feature) of the score.
        metric: Name of the metric. "pixel_accuracy" gives pixel accuracy, and every other name,
            such as "miou_holdout", gives mean IoU.
        counts: Pixel counts of all images and heads.
        head: The head, as the index of its source (group of layers) and the index of its value
            (learning rate or C).
        class_names: Names of the classes, in the order of their numbers.
        details: Further details to store with the score.
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
    """Replace NaN, such as the IoU of an absent class, with None, because JSON has no NaN."""
    return [None if math.isnan(value) else float(value) for value in values]


def class_counts(
    predicted: UInt8[Tensor, " heads *pixels"],
    target: UInt8[Tensor, "*pixels"],
    num_classes: int,
) -> Int64[Tensor, "heads 3 classes"]:
    """Count the correct, predicted and true pixels of each class, for each head.

    Pixels with the target 255 are ignored. These counts are sufficient for IoU and pixel accuracy,
    and take 3 / num_classes of the memory of a confusion matrix.
    """
    true, by_head = target.flatten(), predicted.flatten(1)
    # On a CPU, one head at a time fits into the cache. On a GPU, all heads at once are faster.
    batch = 1 if target.device.type == "cpu" else max(1, len(by_head))
    counts = torch.cat(
        [_count_wrong_and_correct(some, true, num_classes) for some in by_head.split(batch)]
    )
    true_counts = value_counts(true, IGNORE_INDEX + 1)[:num_classes].expand(len(by_head), -1)
    return torch.stack([counts[:, 1], counts.sum(1), true_counts], 1)


def confusion_counts(
    predicted: UInt8[Tensor, " heads *pixels"],
    target: UInt8[Tensor, "*pixels"],
    num_classes: int,
) -> Int64[Tensor, "heads classes classes"]:
    """Return a confusion matrix for each head, with true classes as rows.

    Pixels with the target 255 are ignored. If a confusion matrix is not needed, use `class_counts`,
    which takes less memory.
    """
    true, matrices = target.flatten(), []
    for labels in predicted.flatten(1):
        cells = true.int() * num_classes + labels
        cells.masked_fill_(true == IGNORE_INDEX, num_classes**2)
        matrix = value_counts(cells, num_classes**2 + 1)[:-1]
        matrices.append(matrix.view(num_classes, num_classes))
    return torch.stack(matrices)


def _count_wrong_and_correct(
    predicted: UInt8[Tensor, "heads pixels"], true: UInt8[Tensor, " pixels"], num_classes: int
) -> Int64[Tensor, "heads 2 classes"]:
    """Count the wrong pixels (row 0) and the correct pixels (row 1) of each predicted class."""
    heads, size = len(predicted), 2 * num_classes
    # int32 halves the memory traffic. It is sufficient, because an image has fewer than 2^31 / 512
    # pixels.
    offsets = torch.arange(heads, dtype=torch.int32, device=true.device)[:, None] * size
    cells = (predicted == true).int().mul_(num_classes).add_(predicted).add_(offsets)
    # Ignored pixels are counted separately, because removing them would make the CPU wait.
    cells.masked_fill_(true == IGNORE_INDEX, heads * size)
    return value_counts(cells.flatten(), heads * size + 1)[:-1].view(heads, 2, num_classes)
