"""Image sets over files that share one naming scheme."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, UInt8

from ssl_bench.data.images import read_image, read_indices
from ssl_bench.data.labels import LabelMap
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError


@dataclass(frozen=True)
class Files:
    """One file for each id: the folder, the id, the suffix.

    Attributes:
        other_suffix: Files that end so are of another kind, though they also end in `suffix`.
    """

    folder: Path
    suffix: str
    other_suffix: str | None = None

    def path(self, image_id: str) -> Path:
        return self.folder / f"{image_id}{self.suffix}"

    def size(self, image_id: str) -> int:
        """Bytes.

        Raises:
            DataError: the file is not there, or is a link to nothing.
        """
        path = self.path(image_id)
        try:
            return path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); fetch it again") from error

    def ids(self) -> list[str]:
        """What lies directly in the folder, sorted, without hidden files."""
        return sorted(
            path.name.removesuffix(self.suffix)
            for path in self.folder.iterdir()
            if self._is_one(path.name)
        )

    def missing(self, ids: Sequence[str]) -> list[str]:
        """Names of the files that are not there."""
        return [self.path(image_id).name for image_id in ids if not self.path(image_id).is_file()]

    def _is_one(self, name: str) -> bool:
        other = self.other_suffix is not None and name.endswith(self.other_suffix)
        return name.endswith(self.suffix) and not other and not name.startswith(".")


@dataclass(frozen=True)
class Masks:
    """Mask files and what their numbers mean."""

    files: Files
    labels: LabelMap

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        path = self.files.path(image_id)
        return self.labels.apply(read_indices(path), path)

    def meaning(self) -> str:
        """Changes when the same file would give other classes."""
        return repr(sorted(self.labels.classes.items()))


@runtime_checkable
class Boxes(Protocol):
    """Ground-truth boxes by image id."""

    def read(self, image_id: str) -> Float64[np.ndarray, "boxes 4"]: ...

    def missing(self, ids: Sequence[str]) -> list[str]:
        """What is not there, by name."""
        ...

    def stamp(self, image_id: str) -> str:
        """Changes when the boxes of an image do."""
        ...


@dataclass(frozen=True)
class FileImageSet:
    """An `ImageSet` that decodes a file when asked for it.

    Attributes:
        source: Where the ids come from, for messages.
    """

    name: str
    split: str
    source: Path
    ids: tuple[str, ...]
    images: Files
    class_names: tuple[str, ...] = ()
    masks: Masks | None = None
    boxes: Boxes | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        """Decode one image with its mask and boxes.

        Raises:
            DataError: a file is unreadable, or the mask has another size than the image.
        """
        image_id = self.ids[index]
        image = read_image(self.images.path(image_id))
        mask = self.masks.read(image_id) if self.masks else None
        if self.masks and mask is not None and mask.shape != image.shape[:2]:
            raise DataError(
                f"{self.masks.files.path(image_id)} is {_size(mask)} but its image "
                f"{self.images.path(image_id)} is {_size(image)}; fetch both again"
            )
        boxes = self.boxes.read(image_id) if self.boxes else None
        return Sample(image_id, image, mask, boxes)

    def fingerprint(self) -> str:
        """Sha256 over ids, byte sizes and the meaning of the labels; the pixels are not read."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        if self.masks:
            digest.update(self.masks.meaning().encode())
        for image_id in self.ids:
            parts = [image_id, str(self.images.size(image_id))]
            if self.masks:
                parts.append(f"mask {self.masks.files.size(image_id)}")
            if self.boxes:
                parts.append(f"boxes {self.boxes.stamp(image_id)}")
            digest.update(os.fsencode("\t".join(parts)) + b"\n")
        return digest.hexdigest()

    def checked(self) -> "FileImageSet":
        """This set, once every file behind it is known to be there; nothing is decoded.

        Raises:
            DataError: the set is empty, names an image twice, or files are missing.
        """
        if not self.ids:
            raise DataError(f"{self.source} gives no image for the split {self.split}")
        if len(set(self.ids)) < len(self.ids):
            raise DataError(f"{self.source} names an image twice; make its lines unique")
        self._require(self.images.missing(self.ids), "images", self.images.folder)
        if self.masks:
            self._require(self.masks.files.missing(self.ids), "masks", self.masks.files.folder)
        if self.boxes:
            self._require(self.boxes.missing(self.ids), "annotations", self.source)
        return self

    def _require(self, missing: Sequence[str], what: str, folder: Path) -> None:
        if missing:
            first = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise DataError(
                f"{len(missing)} of {len(self.ids)} {what} of the split {self.split} are missing "
                f"in {folder}: {first}; the ids come from {self.source}"
            )


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[0]}"
