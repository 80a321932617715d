"""Image sets stored in files. The names of image, mask and box files contain the image id."""

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int16, Integer, UInt8

from ssl_bench.data.files.fingerprints import (
    FilePart,
    IdentifiedImages,
    ImageSetHashes,
    ReadOptions,
    cached_sha256,
    extend_fingerprint,
    identify_parts,
)
from ssl_bench.data.files.images import file_orientation, read_image, read_integer_image
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError

_UNKNOWN = -1
# Limit of coordinates in pixels. Computations with larger numbers would not be exact.
_MAX_COORDINATE = 2.0**31
_UPRIGHT = hashlib.sha256(b"1").hexdigest()


@dataclass(frozen=True)
class Files:
    """Files in one folder. The name of each file consists of an image id and a suffix.

    Attributes:
        folder: Folder of the files. An id such as "cat/07" belongs to a file in the subfolder
            "cat".
        suffix: End of each file name, such as ".jpg" or "_mask.png".
        excluded_suffix: Files whose names end in this text are left out, even if their names also
            end in `suffix`.
    """

    folder: Path
    suffix: str
    excluded_suffix: str | None = None

    def path(self, image_id: str) -> Path:
        return self.folder / f"{image_id}{self.suffix}"

    def ids(self) -> list[str]:
        """Return the sorted image ids of all files directly in the folder, except hidden files."""
        return sorted(
            path.name.removesuffix(self.suffix)
            for path in self.folder.iterdir()
            if self.matches(path.name)
        )

    def matches(self, name: str) -> bool:
        """Return whether a file name ends in `suffix` and not in `excluded_suffix`.

        Hidden files never match.
        """
        is_excluded = self.excluded_suffix is not None and name.endswith(self.excluded_suffix)
        return name.endswith(self.suffix) and not is_excluded and not name.startswith(".")

    def list_missing(self, ids: Sequence[str]) -> list[str]:
        """Return the names of the files that do not exist for the given image ids.

        The function lists each folder once, because checking 100,000 files one by one on a network
        drive takes minutes.
        """
        file_names: dict[str, frozenset[str]] = {}
        missing = []
        for image_id in ids:
            folder, _, name = f"{image_id}{self.suffix}".rpartition("/")
            if folder not in file_names:
                file_names[folder] = frozenset()
                with suppress(OSError), os.scandir(self.folder / folder) as entries:
                    file_names[folder] = frozenset(e.name for e in entries if e.is_file())
            # On file systems that ignore case, `is_file` also finds a file whose name has other
            # case.
            if name not in file_names[folder] and not self.path(image_id).is_file():
                missing.append(name)
        return missing


@dataclass(frozen=True)
class LabelMap:
    """Mapping from the numbers that a mask stores to class numbers.

    A number without a class raises an error.

    Attributes:
        classes: Class of each allowed number from 0 to 255. The class is 255 (`IGNORE_INDEX`) for
            pixels that are not scored.
        hint: Advice to the user if a mask stores a number without a class.
    """

    classes: Mapping[int, int]
    hint: str

    def apply(
        self, stored: Integer[np.ndarray, "height width"], path: str | Path
    ) -> UInt8[np.ndarray, "height width"]:
        """Return the class of each pixel of a mask.

        Args:
            stored: Number that the mask stores for each pixel.
            path: Path or description of the mask, for the error message.

        Raises:
            DataError: The mask stores a number without a class.
        """
        if stored.dtype != np.uint8 and not ((stored >= 0) & (stored < 256)).all():
            raise self._unknown_label(int(stored[(stored < 0) | (stored > 255)][0]), path)
        classes = self._table[stored]
        if classes.min() == _UNKNOWN:
            raise self._unknown_label(int(stored[classes == _UNKNOWN][0]), path)
        return classes.astype(np.uint8)

    @cached_property
    def _table(self) -> Int16[np.ndarray, "256"]:
        table = np.full(256, _UNKNOWN, np.int16)
        table[list(self.classes)] = list(self.classes.values())
        return table

    def _unknown_label(self, value: int, path: str | Path) -> DataError:
        # Write runs of consecutive numbers as "0-20". In such a run, the difference between a
        # number and its position in the sorted list is constant.
        positions = enumerate(sorted(self.classes))
        runs = [[n for _, n in run] for _, run in groupby(positions, key=lambda p: p[1] - p[0])]
        known = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        return DataError(f"{path} stores the number {value}, expected {known}. {self.hint}")


@dataclass(frozen=True)
class Masks:
    """Files with segmentation masks, and the class of each number in the masks.

    Attributes:
        files: The mask files.
        labels: Class of each stored number.
        has_voc_palette: Whether the colour palettes of masks must have the order of PASCAL VOC's
            palette.
    """

    files: Files
    labels: LabelMap
    has_voc_palette: bool = False

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        """Read the mask of an image, and return the class of each pixel.

        Raises:
            DataError: The file is not a valid mask, or stores a number without a class.
        """
        path = self.files.path(image_id)
        numbers = read_integer_image(path, has_voc_palette=self.has_voc_palette)
        return self.labels.apply(numbers, path)

    def fingerprint_key(self) -> str:
        """Return a text with the class of each number that masks store.

        The fingerprint (hash) of the image set depends on this text.
        """
        return repr(sorted(self.labels.classes.items()))


class Boxes:
    """Base class of objects that read the ground-truth boxes of images.

    Attributes:
        files: One annotation file for each image, or None if one file stores the boxes of all
            images.
    """

    files: Files | None

    def read(
        self, image_id: str, size: tuple[int, int] | None = None
    ) -> Float64[np.ndarray, "boxes 4"]:
        """Return the boxes of an image as (x0, y0, x1, y1) in pixels.

        The edges x1 and y1 are exclusive.

        Args:
            image_id: Id of the image.
            size: Height and width of the image in pixels, or None. If it is given, boxes that do
                not fit the image are errors.
        """
        raise NotImplementedError

    def list_missing(self, ids: Sequence[str]) -> list[str]:
        """Return the names of the annotation files that are missing for the given image ids."""
        return self.files.list_missing(ids) if self.files else []

    def fingerprint_key(self, image_id: str) -> str:
        """Return a text with the settings that determine the boxes of an image.

        For example, the text states whether difficult objects are left out. The fingerprint (hash)
        of the image set depends on this text and on the annotation files.
        """
        raise NotImplementedError


def parse_numbers(value: object, count: int) -> list[float]:
    """Check that a JSON value is a list of `count` numbers, and return them as floats.

    The numbers are coordinates in pixels.

    Raises:
        ValueError: The value is not a list of `count` numbers whose absolute values are below 2^31.
    """
    if not (
        isinstance(value, (list, tuple))
        and len(value) == count
        and all(type(number) in (int, float) and abs(number) < _MAX_COORDINATE for number in value)
    ):
        raise ValueError(f"expected {count} coordinates in pixels, got {value!r}")
    return [float(number) for number in value]


def validate_boxes(
    corners: Sequence[object] | np.ndarray,
    file: str | Path,
    names: Sequence[object],
    size: tuple[int, int] | None = None,
    *,
    stated_size: tuple[float, float] | None = None,
    allow_flat: bool = False,
) -> Float64[np.ndarray, "boxes 4"]:
    """Check the boxes of an image, and return them as an array of (x0, y0, x1, y1) in pixels.

    The edges x1 and y1 are exclusive. If `size` is given, each box must overlap the image. A box
    may extend beyond the image by at most one image width to the left and right, and by one image
    height above and below. As in the published code of the evaluated methods, boxes are not clipped
    to the image.

    Args:
        corners: Coordinates (x0, y0, x1, y1) of each box in pixels.
        file: File or image with the boxes, for error messages.
        names: Name of each object, for error messages.
        size: Height and width of the decoded image, or None to skip the comparison with the image.
        stated_size: Height and width of the image according to the annotation file, or None.
        allow_flat: Whether to accept boxes without height or width. COCO has a few, and rounding
            creates more. LOST counts them as objects that no predicted box hits.

    Raises:
        DataError: A box is invalid. The message names the file and the first invalid object.
    """
    rows = corners.tolist() if isinstance(corners, np.ndarray) else corners
    if size is not None and stated_size not in (None, size):
        assert stated_size is not None
        raise DataError(
            f"{file} states that its image has {stated_size[1]:g} x {stated_size[0]:g} pixels, "
            f"but the image has {size[1]} x {size[0]}. Use both files as published"
        )
    boxes = []
    for name, row in zip(names, rows, strict=True):
        try:
            box = parse_numbers(row, 4)
            for axis, low, high in (("x", box[0], box[2]), ("y", box[1], box[3])):
                if low > high or (low == high and not allow_flat):
                    raise ValueError(
                        f"the box {box} begins at {axis} = {low:g} and ends at {axis} = {high:g}, "
                        f"expected an end above {low:g}"
                    )
            sides = () if size is None else zip("xy", box[:2], box[2:], size[::-1], strict=True)
            for axis, low, high, side in sides:
                # A flat box may lie on the edge of its image.
                overlaps = low <= side and high >= 0 if allow_flat else low < side and high > 0
                if not overlaps or low < -side or high > 2 * side:
                    raise ValueError(
                        f"the box {box} does not overlap its image or extends too far beyond it. "
                        f"In the image, {axis} ranges from 0 to {side}"
                    )
        except ValueError as error:
            raise DataError(
                f"{file}, object {name}: {error}. Correct the file, or download it again"
            ) from error
        boxes.append(box)
    return np.array(boxes, np.float64).reshape(-1, 4)


@dataclass(frozen=True)
class FileSet:
    """Base class of sets of samples that are stored in files, such as one split of a dataset.

    A sample is an image, a pair of images, or a video, with its annotations.

    Attributes:
        name: Name of the dataset.
        split: Name of the split.
        source: File or folder from which the ids were read, for error messages.
        ids: Ids of the samples.
        images: The image files.
        class_names: Names of the classes, in the order of their numbers.
        options: Options for reading and identifying the files.
    """

    name: str
    split: str
    source: Path
    ids: tuple[str, ...]
    images: Files
    class_names: tuple[str, ...] = ()
    options: ReadOptions = field(default_factory=ReadOptions)

    @property
    def folder(self) -> Path:
        """Return the folder that contains all images."""
        return self.images.folder

    def __len__(self) -> int:
        return len(self.ids)

    def with_read_options(self, options: ReadOptions) -> "FileSet":
        return replace(self, options=options)

    def select(self, name: str, indices: Sequence[int]) -> "FileSet":
        """Return a subset of the samples, with a new name.

        Args:
            name: Name of the subset.
            indices: Indices of the subset's samples in this set.
        """
        return replace(self, name=name, ids=tuple(self.ids[index] for index in indices))

    def identify_parts(
        self, parts: Iterable[FilePart], total: int
    ) -> closing[Generator[str, None, None]]:
        """Identify each file by a text that changes if the file changes.

        The text is a SHA-256 if `options.fingerprint` is "content". If `options.fingerprint` is
        "stat", the text consists of the size and the modification time.

        Args:
            parts: The files, or parts of files that are hashed separately.
            total: Number of parts, for the progress bar.

        Returns:
            A generator of the texts. Use it in a `with` statement, which closes it at the end.
        """
        return closing(
            identify_parts(
                parts,
                self.options.fingerprint,
                title=f"{self.name} {self.split}",
                folder=self.images.folder,
                total=total,
            )
        )

    def require_ids(self, kind: str) -> None:
        """Raise DataError if this set has no ids or if an id occurs twice.

        Args:
            kind: Word for a sample in the error message, such as "image".
        """
        if not self.ids:
            raise DataError(f"{self.source} has no {kind} for the split {self.split}")
        if len(set(self.ids)) < len(self.ids):
            raise DataError(f"{self.source} lists the same {kind} twice. Remove repeated lines")

    def require_files(self, files: "Files | Boxes", ids: Sequence[str], kind: str) -> None:
        """Raise DataError if a file of one of the given ids is missing.

        No file is opened.

        Args:
            files: The files, such as masks.
            ids: The ids.
            kind: Word for the files in the error message, such as "masks".
        """
        if missing := files.list_missing(ids):
            folder = files.folder if isinstance(files, Files) else self.source
            raise DataError(
                f"{len(missing)} of {len(ids)} {kind} of the split {self.split} are missing in "
                f"{folder}: {join_names(missing)}. Add them, or remove their ids from {self.source}"
            )


def join_names(names: Sequence[str]) -> str:
    """Join the first five names with commas. If there are more names, "..." is appended."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


@dataclass(frozen=True)
class FileImageSet(FileSet, IdentifiedImages):
    """A set of images that are stored in files. A file is decoded when its image is accessed.

    Attributes:
        masks: The segmentation masks, or None.
        boxes: The ground-truth boxes, or None.
        apply_exif_orientation: Whether to rotate images according to their EXIF orientation. It
            must be False if masks or boxes refer to the pixels as they are stored.
    """

    masks: Masks | None = None
    boxes: Boxes | None = None
    apply_exif_orientation: bool = False

    def __getitem__(self, index: int) -> Sample:
        """Decode one image with its mask and boxes.

        Raises:
            DataError: A file is unreadable, the mask and the image differ in size, or a box is
                invalid.
        """
        image_id = self.ids[index]
        path = self.images.path(image_id)
        image = read_image(
            path, self.options.bits, apply_exif_orientation=self.apply_exif_orientation
        )
        mask = self.masks.read(image_id) if self.masks else None
        if self.masks and mask is not None and mask.shape != image.shape[:2]:
            raise DataError(
                f"{self.masks.files.path(image_id)} has {mask.shape[1]} x {mask.shape[0]} pixels, "
                f"but its image {path} has {image.shape[1]} x {image.shape[0]}. Use both as "
                "published"
            )
        boxes = self.boxes.read(image_id, image.shape[:2]) if self.boxes else None
        return Sample(image_id, image, mask, boxes)

    def path(self, index: int) -> Path:
        return self.images.path(self.ids[index])

    def content_sha256(self, index: int) -> str:
        return cached_sha256(self.path(index))

    def files(self, index: int) -> tuple[Path, ...]:
        labels = [labels.files for labels in (self.masks, self.boxes) if labels]
        return tuple(files.path(self.ids[index]) for files in (self.images, *labels) if files)

    @cached_property
    def _hashes(self) -> ImageSetHashes:
        # With data.fingerprint=stat, no file is opened, so EXIF orientations are not read.
        reads_orientation = self.apply_exif_orientation and self.options.fingerprint == "content"
        files_per_image = len(self.files(0)) if self.ids else 1

        def parts() -> Iterator[FilePart]:
            for index in range(len(self)):
                image, *labels = self.files(index)
                yield from map(FilePart, (image, *labels))
                if reads_orientation:
                    yield FilePart(image, "orientation", partial(file_orientation, image))

        def rows(identities: Iterator[str]) -> Iterator[tuple[str, ...]]:
            for image_id in self.ids:
                image, *labels = islice(identities, files_per_image)
                orientation = next(identities) if reads_orientation else _UPRIGHT
                # The text that identifies a rotated image also contains its orientation.
                image = image if orientation == _UPRIGHT else f"{image} {orientation}"
                boxes = self.boxes.fingerprint_key(image_id) if self.boxes else ""
                yield image_id, image, *labels, boxes

        key = [self.masks.fingerprint_key(), self.class_names] if self.masks else []
        num_parts = (files_per_image + reads_orientation) * len(self)
        with self.identify_parts(parts(), num_parts) as identities:
            hashes = self.options.hash_rows(key, rows(identities))
        if self.apply_exif_orientation and not reads_orientation:
            return hashes._replace(fingerprint=extend_fingerprint(hashes.fingerprint, ["upright"]))
        return hashes

    def validate(self) -> "FileImageSet":
        """Check that all files of this set exist, without decoding them, and return the set.

        Raises:
            DataError: The set is empty, an id occurs twice, or files are missing.
        """
        self.require_ids("image")
        self.require_files(self.images, self.ids, "images")
        if self.masks:
            self.require_files(self.masks.files, self.ids, "masks")
        if self.boxes:
            self.require_files(self.boxes, self.ids, "annotations")
        return self
