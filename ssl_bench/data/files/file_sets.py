"""Image sets over files that share one naming scheme: what these hold, and the gate of boxes."""

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int16, Integer, UInt8, UInt64

from ssl_bench.data.files.fingerprints import Part, ReadOptions, extend_fingerprint, identify_parts
from ssl_bench.data.files.images import file_orientation, read_image, read_indices
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError

_UNKNOWN = -1
# Of pixels; what is larger is none, and would not stay what it is in computations.
_MOST = 2.0**31
_UPRIGHT = hashlib.sha256(b"1").hexdigest()


@dataclass(frozen=True)
class Files:
    """One file for each id: the folder, the id, the suffix.

    Attributes:
        excluded_suffix: Files that end so are of another kind, though they also end in `suffix`.
    """

    folder: Path
    suffix: str
    excluded_suffix: str | None = None

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
                listed[folder] = frozenset()
                with suppress(OSError), os.scandir(self.folder / folder) as entries:
                    listed[folder] = frozenset(entry.name for entry in entries if entry.is_file())
            # Asked for by name too, because some systems find names in other letters.
            if name not in listed[folder] and not self.path(image_id).is_file():
                lacking.append(name)
        return lacking

    def _is_one(self, name: str) -> bool:
        other = self.excluded_suffix is not None and name.endswith(self.excluded_suffix)
        return name.endswith(self.suffix) and not other and not name.startswith(".")


@dataclass(frozen=True)
class LabelMap:
    """What each stored number of a mask means; any other number is an error.

    Attributes:
        classes: Stored number, 0 to 255, to class or `IGNORED`.
        hint: What to do about a number that is not in `classes`.
    """

    classes: Mapping[int, int]
    hint: str

    def apply(
        self, stored: Integer[np.ndarray, "height width"], path: str | Path
    ) -> UInt8[np.ndarray, "height width"]:
        """Turn stored numbers into classes; `DataError` names the file and one that has none."""
        if stored.dtype != np.uint8 and not ((stored >= 0) & (stored < 256)).all():
            raise self._stranger(int(stored[(stored < 0) | (stored > 255)][0]), path)
        classes = self._table[stored]
        if classes.min() == _UNKNOWN:
            raise self._stranger(int(stored[classes == _UNKNOWN][0]), path)
        return classes.astype(np.uint8)

    @cached_property
    def _table(self) -> Int16[np.ndarray, "256"]:
        # Wider than uint8, in which "no class" could not be told from a class.
        table = np.full(256, _UNKNOWN, np.int16)
        table[list(self.classes)] = list(self.classes.values())
        return table

    def _stranger(self, value: int, path: str | Path) -> DataError:
        ordered = enumerate(sorted(self.classes))
        runs = [[n for _, n in run] for _, run in groupby(ordered, key=lambda one: one[1] - one[0])]
        known = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        return DataError(f"{path} holds label {value}, expected {known}; {self.hint}")


@dataclass(frozen=True)
class Masks:
    """Mask files and what their numbers mean.

    Attributes:
        has_voc_palette: Colours of their palettes are VOC's.
    """

    files: Files
    labels: LabelMap
    has_voc_palette: bool = False

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        """Classes of one mask; errors are those of `read_indices` and `LabelMap.apply`."""
        path = self.files.path(image_id)
        return self.labels.apply(read_indices(path, has_voc_palette=self.has_voc_palette), path)

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
        """Those of an image of this height and width, as `validate_boxes` lets them pass."""
        raise NotImplementedError

    def missing(self, ids: Sequence[str]) -> list[str]:
        """What is not there, by name."""
        return self.files.missing(ids) if self.files else []

    def meaning(self, image_id: str) -> str:
        """Changes when the boxes of an image do, though its file is the same."""
        raise NotImplementedError


def parse_numbers(value: object, count: int) -> list[float]:
    """So many numbers of JSON, all finite; a `ValueError` for texts, booleans, null and others."""
    if not (
        isinstance(value, (list, tuple))
        and len(value) == count
        and all(type(one) in (int, float) and abs(one) < _MOST for one in value)
    ):
        raise ValueError(f"expected {count} numbers of pixels, got {value!r}")
    return [float(one) for one in value]


def validate_boxes(
    corners: Sequence[object] | np.ndarray,
    file: str | Path,
    names: Sequence[object],
    size: tuple[int, int] | None = None,
    *,
    stated: tuple[float, float] | None = None,
    may_be_flat: bool = False,
) -> Float64[np.ndarray, "boxes 4"]:
    """Boxes, once they are known to be some: (x0, y0, x1, y1), far edges exclusive.

    A box has to have a part of the image in it, and no edge further outside than the image is
    large. What lies outside by less stays as it is, as in the field's own code.

    Args:
        corners: Four numbers a box.
        file: That they are from.
        names: Of the objects, for messages.
        size: Height and width of the image as it was decoded; before, nothing is asked about it.
        stated: Height and width that the file gives the image, if it does.
        may_be_flat: Boxes without height or width are kept. COCO has some, rounding makes more,
            and LOST, whose numbers these are compared with, counts them: nothing hits them.

    Raises:
        DataError: with the file and the first object that is none.
    """
    rows = corners.tolist() if isinstance(corners, np.ndarray) else corners
    if size is not None and stated not in (None, size):
        assert stated is not None
        raise DataError(
            f"{file} is about an image of {stated[1]:g} x {stated[0]:g}, which is {size[1]} x "
            f"{size[0]}; take both as published"
        )
    found = []
    for name, row in zip(names, rows, strict=True):
        try:
            box = parse_numbers(row, 4)
            for axis, low, high in (("x", box[0], box[2]), ("y", box[1], box[3])):
                if low > high or (low == high and not may_be_flat):
                    raise ValueError(
                        f"the box {box} begins at {axis} = {low:g} and ends at {high:g}"
                    )
            sides = () if size is None else zip("xy", box[:2], box[2:], size[::-1], strict=True)
            for axis, low, high, side in sides:
                # A flat box may lie on the edge of its image.
                meets = low <= side and high >= 0 if may_be_flat else low < side and high > 0
                if not meets or low < -side or high > 2 * side:
                    raise ValueError(f"the box {box} is not in its image, {axis} from 0 to {side}")
        except ValueError as error:
            raise DataError(f"{file}, object {name}: {error}; mend or fetch it again") from error
        found.append(box)
    return np.array(found, np.float64).reshape(-1, 4)


@dataclass(frozen=True)
class FileSet:
    """Images of one split that lie in files.

    Attributes:
        source: Where the ids come from, for messages.
        options: How the files are read.
    """

    name: str
    split: str
    source: Path
    ids: tuple[str, ...]
    images: Files
    class_names: tuple[str, ...] = ()
    options: ReadOptions = field(default_factory=ReadOptions)

    def __len__(self) -> int:
        return len(self.ids)

    def with_read_options(self, options: ReadOptions) -> "FileSet":
        """The same images, their files read in another way."""
        return replace(self, options=options)

    def select(self, name: str, kept: Sequence[int]) -> "FileSet":
        """The images of these indices, called so."""
        return replace(self, name=name, ids=tuple(self.ids[index] for index in kept))

    def identify_parts(
        self, parts: Iterable[Part], total: int
    ) -> closing[Generator[str, None, None]]:
        """What each of so many parts of its files is known by, as `identify_parts` says."""
        return closing(
            identify_parts(
                parts,
                self.options.fingerprint,
                title=f"{self.name} {self.split}",
                folder=self.images.folder,
                total=total,
            )
        )

    def require_ids(self, what: str) -> None:
        """Refuse no ids, and one that comes twice."""
        if not self.ids:
            raise DataError(f"{self.source} gives no {what} for the split {self.split}")
        if len(set(self.ids)) < len(self.ids):
            one = "an image" if what == "image" else f"a {what}"
            raise DataError(f"{self.source} names {one} twice; make its lines unique")

    def require_files(self, files: "Files | Boxes", ids: Sequence[str], what: str) -> None:
        """Refuse ids without a file; nothing is opened."""
        if missing := files.missing(ids):
            folder = files.folder if isinstance(files, Files) else self.source
            raise DataError(
                f"{len(missing)} of {len(ids)} {what} of the split {self.split} are missing in "
                f"{folder}: {join_names(missing)}; the ids come from {self.source}"
            )


def join_names(names: Sequence[str]) -> str:
    """The first five of some names, for messages."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


@dataclass(frozen=True)
class FileImageSet(FileSet):
    """An `ImageSet` that decodes a file when asked for it.

    Attributes:
        upright: Turn the images as EXIF says; not where masks or boxes are drawn on the files.
    """

    masks: Masks | None = None
    boxes: Boxes | None = None
    upright: bool = False

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
                f"{self.masks.files.path(image_id)} is {mask.shape[1]} x {mask.shape[0]} but its "
                f"image {path} is {image.shape[1]} x {image.shape[0]}; fetch both again"
            )
        boxes = self.boxes.read(image_id, image.shape[:2]) if self.boxes else None
        return Sample(image_id, image, mask, boxes)

    def fingerprint(self) -> str:
        """Sha256 over ids, what the files of images and labels hold, and what the labels mean.

        Of files that have not changed since they were read the sha256 is remembered.

        Raises:
            DataError: a file cannot be read.
        """
        return self._known[0]

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        """Of each image a number, another one where what its file holds is."""
        return self._known[1]

    def sample_hashes(self) -> list[str]:
        """What each image is known by, with its mask or boxes, whatever else is in the set."""
        return [f"{entry:016x}" for entry in self._known[2].tolist()]

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.images.path(self.ids[index])

    def files(self, index: int) -> tuple[Path, ...]:
        """All files of an image: its own, then those of its mask and its boxes."""
        truths = [truth.files for truth in (self.masks, self.boxes) if truth]
        return tuple(kind.path(self.ids[index]) for kind in (self.images, *truths) if kind)

    @cached_property
    def _known(self) -> tuple[str, UInt64[np.ndarray, " images"], UInt64[np.ndarray, " images"]]:
        # Files that are known by their times alone are not opened to look how they are turned.
        turned = self.upright and self.options.fingerprint == "content"
        in_a_row = len(self.files(0)) if self.ids else 1

        def parts() -> Iterator[Part]:
            for index in range(len(self)):
                yield from map(Part, self.files(index))
                if turned:
                    path = self.path(index)
                    yield Part(path, "orientation", partial(file_orientation, path))

        def rows(found: Iterator[str]) -> Iterator[tuple[str, ...]]:
            for image_id in self.ids:
                image, *others = islice(found, in_a_row)
                # The file of an image that is turned has another identity.
                turn = next(found) if turned else _UPRIGHT
                image = image if turn == _UPRIGHT else f"{image} {turn}"
                yield image_id, image, *others, self.boxes.meaning(image_id) if self.boxes else ""

        # What the numbers in masks stand for; nothing for pictures alone.
        meaning = [self.masks.meaning(), self.class_names] if self.masks else []
        with self.identify_parts(parts(), (in_a_row + turned) * len(self)) as found:
            fingerprint, marks, entries = self.options.hash_rows(meaning, rows(found))
        if self.upright and not turned:
            fingerprint = extend_fingerprint(fingerprint, ["upright"])
        return fingerprint, marks, entries

    def validate(self) -> "FileImageSet":
        """This set, once every file behind it is known to be there; nothing is decoded.

        Raises:
            DataError: the set is empty, names an image twice, or files are missing.
        """
        self.require_ids("image")
        self.require_files(self.images, self.ids, "images")
        if self.masks:
            self.require_files(self.masks.files, self.ids, "masks")
        if self.boxes:
            self.require_files(self.boxes, self.ids, "annotations")
        return self
