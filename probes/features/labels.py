"""Labels of an image set: which classes images and patches show, and masks beyond memory."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError, MachineError
from ssl_bench.metrics import value_counts
from ssl_bench.scores import IGNORED


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


@dataclass(frozen=True)
class LabelFacts:
    """Which values occur in the labels of each entry, 255 among them."""

    present: Bool[Tensor, "entries 256"]

    @classmethod
    def unknown(cls, entries: int) -> "LabelFacts":
        return cls(torch.zeros(entries, 256, dtype=torch.bool))

    def put(self, entries: Sequence[int], labels: UInt8[Tensor, "some height width"]) -> None:
        for entry, values in zip(entries, labels, strict=True):
            self.present[entry, values.unique().long()] = True

    def classes(self, entries: Int64[Tensor, " chosen"]) -> list[int]:
        """Those of some entries, ascending."""
        found = self.present[entries].any(0).nonzero()[:, 0].tolist()
        return [value for value in found if value != IGNORED]

    def without_label(self) -> Bool[Tensor, " entries"]:
        """Entries all of whose pixels are ignored."""
        return ~self.present[:, :IGNORED].any(1)


class LabelFile:
    """Masks of all entries in a file without a name, which is gone when the process is.

    Raises:
        MachineError: the folder takes no file, or its disk is full.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int]) -> None:
        self.folder, self.shape = folder, shape
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # It is closed, and with that gone, when nobody has it any more.
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise self._refused(error) from error

    def put(self, entries: Sequence[int], labels: UInt8[Tensor, "some height width"]) -> None:
        try:
            for entry, mask in zip(entries, labels, strict=True):
                self._file.seek(entry * self._entry_bytes)
                self._file.write(mask.numpy().tobytes())
        except OSError as error:
            raise self._refused(error) from error

    def of(self, entries: Int64[Tensor, " some"]) -> UInt8[Tensor, "some height width"]:
        found = torch.empty(len(entries), *self.shape[1:], dtype=torch.uint8)
        self._file.flush()
        for number, entry in enumerate(entries.tolist()):
            place = entry * self._entry_bytes
            content = os.pread(self._file.fileno(), self._entry_bytes, place)
            found[number] = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(
                self.shape[1:]
            )
        return found

    @property
    def _entry_bytes(self) -> int:
        return prod(self.shape[1:])

    def _refused(self, error: OSError) -> MachineError:
        return MachineError(
            f"cannot keep labels in {self.folder} ({error.strerror or error}); choose another "
            "folder with probe.cache=DIR"
        )


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
