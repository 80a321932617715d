"""What each image contributed to a value, kept beside its record, and whether the two agree."""

import io
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64

from ssl_bench.intervals import (
    Estimate,
    Share,
    bootstrap_estimate,
    mean_estimate,
    mean_iou_estimate,
    pixel_accuracy_estimate,
)
from ssl_bench.results.record import PerImage, Record
from ssl_bench.scores import (
    OBJECT_SCORES,
    average_precision,
    average_recall,
    mean_iou,
    pixel_accuracy,
)
from ssl_bench.system.memory import pass_on_memory

WHOLE = "biu"
"""Kinds of numbers, as numpy names them, that an image can contribute."""

MOST_NPZ = 2**30
"""Bytes of what all images contributed."""
# Of what an image contributes: three counts of eight bytes for each of 2,700 classes.
_IMAGE_BYTES = 2**16
# Of what is summed for every record that is read: hits of any dataset, counts of a small one.
_SUMMED_BYTES = 2**20


@dataclass(frozen=True)
class Kind:
    """What an image contributes to some metrics, and what they make of it.

    Attributes:
        shape: Of the contribution of an image; None is any length.
        value: In percent, or the metric's own unit.
        estimate: The same with what each image does to it.
    """

    shape: tuple[int | None, ...]
    value: Callable[[PerImage], float]
    estimate: Callable[[PerImage], Estimate]

    def fits(self, per_image: PerImage) -> bool:
        """Whether contributions have the shape."""
        own = per_image.shape[1:]
        return len(own) == len(self.shape) and all(
            wanted in (None, side) for side, wanted in zip(own, self.shape, strict=True)
        )


def _of_total(
    score: Callable[[Any], Any], shape: tuple[int | None, ...], estimate: Callable[[Any], Estimate]
) -> Kind:
    """Of a score of counts that are summed over the images."""
    return Kind(shape, lambda per_image: float(score(per_image.sum(0, dtype=np.int64))), estimate)


def _of_each(score: Callable[[Any], Any], shape: tuple[int | None, ...]) -> Kind:
    """Of the mean of a score that each image has alone."""
    return Kind(
        shape,
        lambda per_image: float(score(per_image).mean()),
        lambda per_image: mean_estimate(score(per_image)),
    )


def _share(hits: PerImage) -> float:
    return 100.0 * float(hits.sum()) / hits.size


def _points(per_image: PerImage) -> Float64[np.ndarray, " images"]:
    right, points = per_image.astype(np.float64).T
    return 100.0 * right / points


def _detections(score: Callable[[Any], Any]) -> Kind:
    return _of_total(score, (None, None), partial(bootstrap_estimate, score=score))


_HITS = Kind((), _share, lambda hits: Share(hits.astype(bool)))
_KINDS = {
    "miou.*": _of_total(mean_iou, (3, None), mean_iou_estimate),
    "pixel_accuracy": _of_total(pixel_accuracy, (3, None), pixel_accuracy_estimate),
    # Of each image the share of the draws of training images with which it was right.
    r".*_\d+shot": Kind((None,), _share, lambda hits: mean_estimate(100.0 * hits.mean(1))),
    "pck_.*": _of_each(_points, (2,)),
    "ap|ap50": _detections(average_precision),
    "ar100": _detections(average_recall),
    **{name: _of_each(score, (4,)) for name, score in OBJECT_SCORES.items()},
}
"""By the names of metrics, as regular expressions; all others are hits."""


def kind_of(metric: str) -> Kind:
    return next((kind for name, kind in _KINDS.items() if re.fullmatch(name, metric)), _HITS)


def most_bytes(record: Record) -> int:
    """Of what the images of a record can have contributed."""
    return min(_IMAGE_BYTES * record.num_images, MOST_NPZ)


def read_array(content: io.BufferedIOBase, most_bytes: int) -> PerImage:
    """The array of an .npz file, which may claim and inflate to anything.

    Raises:
        Exception: any at all, where it is damaged.
    """
    with zipfile.ZipFile(content) as archive, archive.open("arr_0.npy") as file:
        size = archive.getinfo("arr_0.npy").file_size
        if size > most_bytes:
            raise ValueError(f"it claims {size} bytes")
        # With a number, because without one it inflates all and cuts that.
        return np.load(io.BytesIO(file.read(size)), allow_pickle=False)


def require_agreement(record: Record, content: io.BufferedIOBase) -> None:
    """Check a record against the .npz file beside it: its number of images, and its value.

    The value of those whose contributions are few bytes, and of metrics that are known here:
    probes of others may keep what they like under names of their own. What is no such file at all
    says nothing of the record.

    Raises:
        ValueError: the two contradict each other.
    """
    try:
        with zipfile.ZipFile(content) as archive, archive.open("arr_0.npy") as file:
            np.lib.format.read_magic(file)
            shape, _, kind = np.lib.format.read_array_header_1_0(file)
        is_small = math.prod(shape) * kind.itemsize <= min(_SUMMED_BYTES, most_bytes(record))
        per_image = read_array(content, most_bytes(record)) if is_small else None
    # A damaged file makes the readers of zip and npy fail in any way.
    except Exception as error:
        pass_on_memory(error)
        return
    if kind.kind not in WHOLE or not shape:
        return
    if shape[0] != record.num_images:
        raise ValueError(f"num_images is {record.num_images}, beside it are values of {shape[0]}")
    known = kind_of(record.metric)
    if per_image is None or math.isnan(record.value) or not known.fits(per_image):
        return
    if (known is not _HITS or per_image.dtype == bool) and not adds_up(per_image, record):
        value = known.value(per_image)
        raise ValueError(f"value is {record.value}, the values of its images make {value:.10g}")


def adds_up(per_image: PerImage, record: Record) -> bool:
    """Whether the value of a record comes from these contributions."""
    kind = kind_of(record.metric)
    if not kind.fits(per_image):
        return False
    value = kind.value(per_image)
    is_near = math.isclose(value, record.value, rel_tol=0, abs_tol=1e-6)
    return is_near or (math.isnan(value) and math.isnan(record.value))
