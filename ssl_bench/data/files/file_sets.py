"""Image sets over files that share one naming scheme."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from jaxtyping import Float64, UInt8, UInt64

from ssl_bench.data.files.digests import Part, Reading, identities
from ssl_bench.data.files.fingerprints import Known, extended
from ssl_bench.data.files.images import file_orientation, read_image, read_indices
from ssl_bench.data.files.read_options import ReadOptions
from ssl_bench.data.labels import LabelMap
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError

_UPRIGHT = hashlib.sha256(b"1").hexdigest()


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

    def ids(self) -> list[str]:
        """What lies directly in the folder, sorted, without hidden files."""
        return sorted(
            path.name.removesuffix(self.suffix)
            for path in self.folder.iterdir()
            if self._is_one(path.name)
        )

    def missing(self, ids: Sequence[str]) -> list[str]:
        """Names of the files that are not there.

        Folders are listed: on a network a question for each of 100,000 files takes minutes.
        """
        listed: dict[str, frozenset[str]] = {}
        lacking = []
        for image_id in ids:
            folder, _, name = f"{image_id}{self.suffix}".rpartition("/")
            if folder not in listed:
                listed[folder] = _files_in(self.folder / folder)
            # Asked for by name too, because some systems find names in other letters.
            if name not in listed[folder] and not self.path(image_id).is_file():
                lacking.append(name)
        return lacking

    def _is_one(self, name: str) -> bool:
        other = self.other_suffix is not None and name.endswith(self.other_suffix)
        return name.endswith(self.suffix) and not other and not name.startswith(".")


def _files_in(folder: Path) -> frozenset[str]:
    """Names of the files that lie directly in a folder; none where it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if entry.is_file())
    except OSError:
        return frozenset()


@dataclass(frozen=True)
class Masks:
    """Mask files and what their numbers mean.

    Attributes:
        of_voc: Colours of their palettes are VOC's.
    """

    files: Files
    labels: LabelMap
    of_voc: bool = False

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        path = self.files.path(image_id)
        return self.labels.apply(read_indices(path, of_voc=self.of_voc), path)

    def meaning(self) -> str:
        """Changes when the same file would give other classes."""
        return repr(sorted(self.labels.classes.items()))


class Boxes:
    """Ground-truth boxes by image id.

    Attributes:
        files: One for each image, where there are such.
    """

    files: Files | None

    def read(
        self, image_id: str, size: tuple[int, int] | None = None
    ) -> Float64[np.ndarray, "boxes 4"]:
        """Those of an image of this height and width, as `checked_boxes` lets them pass."""
        raise NotImplementedError

    def missing(self, ids: Sequence[str]) -> list[str]:
        """What is not there, by name."""
        return self.files.missing(ids) if self.files else []

    def meaning(self, image_id: str) -> str:
        """Changes when the boxes of an image do, though its file is the same."""
        raise NotImplementedError


@dataclass(frozen=True)
class FileImageSet:
    """An `ImageSet` that decodes a file when asked for it.

    Attributes:
        source: Where the ids come from, for messages.
        options: How the files are read.
        upright: Turn the images as EXIF says; not where masks or boxes are drawn on the files.
    """

    name: str
    split: str
    source: Path
    ids: tuple[str, ...]
    images: Files
    class_names: tuple[str, ...] = ()
    masks: Masks | None = None
    boxes: Boxes | None = None
    options: ReadOptions = field(default_factory=ReadOptions)
    upright: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        """Decode one image with its mask and boxes.

        Raises:
            DataError: a file is unreadable, the mask has another size than the image, or a box is
                none in it.
        """
        image_id = self.ids[index]
        path = self.images.path(image_id)
        image = read_image(path, self.options.bits, upright=self.upright)
        mask = self.masks.read(image_id) if self.masks else None
        if self.masks and mask is not None and mask.shape != image.shape[:2]:
            raise DataError(
                f"{self.masks.files.path(image_id)} is {_size(mask)} but its image "
                f"{self.images.path(image_id)} is {_size(image)}; fetch both again"
            )
        boxes = self.boxes.read(image_id, image.shape[:2]) if self.boxes else None
        return Sample(image_id, image, mask, boxes)

    def fingerprint(self) -> str:
        """Sha256 over ids, what the files of images and labels hold, and what the labels mean.

        Of files that have not changed since they were read the sha256 is remembered.

        Raises:
            DataError: a file cannot be read.
        """
        return self._known.fingerprint

    def marks(self) -> UInt64[np.ndarray, " images"]:
        """Of each image a number, another one where what its file holds is."""
        return self._known.marks

    def entries(self) -> list[str]:
        """What each image is known by, with its mask or boxes, whatever else is in the set."""
        return [f"{entry:016x}" for entry in self._known.entries.tolist()]

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.images.path(self.ids[index])

    def files(self, index: int) -> tuple[Path, ...]:
        """All files of an image: its own, then those of its mask and its boxes."""
        return tuple(kind.path(self.ids[index]) for kind in self._kinds)

    @property
    def _kinds(self) -> list[Files]:
        masks, boxes = self.masks, self.boxes
        more = [masks.files if masks else None, boxes.files if boxes else None]
        return [self.images, *(kind for kind in more if kind)]

    @cached_property
    def _known(self) -> Known:
        # Files that are known by their times alone are not opened to look how they are turned.
        turned = self.upright and self.options.fingerprint == "content"
        in_a_row = len(self._kinds) + turned
        parts = (part for index in range(len(self)) for part in self._parts(index, turned=turned))
        reading = Reading(f"{self.name} {self.split}", self.images.folder, in_a_row * len(self))
        with closing(identities(parts, reading, self.options.fingerprint)) as found:
            rows = zip(self.ids, *[found] * in_a_row, self._meanings(), strict=True)
            known = self.options.known_by(
                self._meaning(), map(_with_turn, rows) if turned else rows
            )
        if self.upright and not turned:
            return known._replace(fingerprint=extended(known.fingerprint, ["upright"]))
        return known

    def _parts(self, index: int, *, turned: bool) -> Iterator[Part]:
        yield from map(Part, self.files(index))
        if turned:
            path = self.path(index)
            yield Part(path, "orientation", partial(_orientation, path))

    def _meaning(self) -> list[object]:
        """What the numbers in masks stand for; nothing for pictures alone."""
        return [self.masks.meaning(), self.class_names] if self.masks else []

    def _meanings(self) -> Iterator[str]:
        return (self.boxes.meaning(image_id) if self.boxes else "" for image_id in self.ids)

    def read_as(self, options: ReadOptions) -> "FileImageSet":
        """The same images, their files read in another way."""
        return replace(self, options=options)

    def some(self, name: str, kept: Sequence[int]) -> "FileImageSet":
        """The images of these indices, under another name."""
        return replace(self, name=name, ids=tuple(self.ids[index] for index in kept))

    def checked(self) -> "FileImageSet":
        """This set, once every file behind it is known to be there; nothing is decoded.

        Raises:
            DataError: the set is empty, names an image twice, or files are missing.
        """
        require_ids(self.ids, "image", self.split, self.source)
        require_files(self.images, self.ids, "images", self.split, self.source)
        if self.masks:
            require_files(self.masks.files, self.ids, "masks", self.split, self.source)
        if self.boxes:
            require_files(self.boxes, self.ids, "annotations", self.split, self.source)
        return self


def require_ids(ids: Sequence[str], what: str, split: str, source: Path) -> None:
    """Ids that come from `source` for a split: there are some, each of them once.

    Raises:
        DataError: it is not so.
    """
    if not ids:
        raise DataError(f"{source} gives no {what} for the split {split}")
    if len(set(ids)) < len(ids):
        one = "an image" if what == "image" else f"a {what}"
        raise DataError(f"{source} names {one} twice; make its lines unique")


def require_files(
    files: "Files | Boxes", ids: Sequence[str], what: str, split: str, source: Path
) -> None:
    """The file of every id is there; nothing is opened.

    Raises:
        DataError: some are missing.
    """
    if missing := files.missing(ids):
        first = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        folder = files.folder if isinstance(files, Files) else source
        raise DataError(
            f"{len(missing)} of {len(ids)} {what} of the split {split} are missing in {folder}: "
            f"{first}; the ids come from {source}"
        )


def _orientation(path: Path) -> bytes:
    return b"%d" % file_orientation(path)


def _with_turn(row: tuple[str, ...]) -> tuple[str, ...]:
    """A row in which the file of an image that is turned has another identity."""
    image_id, file, *others, turn, meaning = row
    return (image_id, file if turn == _UPRIGHT else f"{file} {turn}", *others, meaning)


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[0]}"
