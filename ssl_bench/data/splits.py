"""Parse names of splits and lists of images, and apply config keys that all datasets share.

Examples of such keys are `data.limit`, `data.bits` and `corrupt`. `SHARED_KEY_TYPES` lists all keys
that datasets share.
"""

import codecs
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from unicodedata import normalize

from ssl_bench.composition.fields import Bits, Count, OptionalPath, Seed, require_type
from ssl_bench.data.corruptions import KEY as CORRUPT
from ssl_bench.data.corruptions import Corruption, corrupt_dataset
from ssl_bench.data.files.file_sets import Files
from ssl_bench.data.files.fingerprints import (
    FingerprintKind,
    ReadOptions,
    dataset_with_read_options,
)
from ssl_bench.data.files.images import IMAGE_SUFFIXES, read_data_file
from ssl_bench.data.files.readable import select_images
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet
from ssl_bench.errors import ConfigurationError, DataError, escape_braces

DType = Literal["float32", "float16", "bfloat16"]
"""Names of data types in torch."""
Limit = Count | None
SHARED_KEY_TYPES: Mapping[str, Any] = {
    "data.root": OptionalPath,
    "data.fingerprint": FingerprintKind,
    "data.bits": Bits,
    "data.limit": Limit,
    "data.first": Limit,
    "data.allow_overlap": bool,
    CORRUPT: str | None,
    "seed": Seed,
    "dtype": DType,
}
"""Type of each config key that is not a field of a probe or of a dataset."""
_SPLIT = re.compile(r"([^:%]+)(?::(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)%)?")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


@dataclass(frozen=True)
class Split:
    """A split such as `train2017`, or a part of it such as `train2017:0-75%`.

    Attributes:
        name: Name of the split, such as "train2017".
        start: Position at which the part begins in the sorted image ids, in percent.
        stop: Position at which the part ends in the sorted image ids, in percent and exclusive.
    """

    name: str
    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(100)

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Parse a split in the form `NAME`, or a part of a split in the form `NAME:a-b%`.

        Raises:
            ConfigurationError: The text does not have one of these forms with `0 <= a < b <= 100`.
        """
        match = _SPLIT.fullmatch(text)
        if match is not None:
            name, start, stop = match.groups()
            split = cls(name, Fraction(start or 0), Fraction(stop or 100))
            if split.start < split.stop <= 100:
                return split
        raise ConfigurationError(
            "expected a split such as train, or a part SPLIT:a-b% with 0 <= a < b <= 100 such as "
            f"train:0-75%, got {text!r}"
        )

    def cut(self, ids: Collection[str]) -> tuple[str, ...]:
        """Sort the ids of a whole split, and return the ids that belong to this part of it.

        Adjacent parts, such as 0-75% and 75-100%, neither overlap nor leave out an id.
        """
        first, last = (int(len(ids) * share / 100) for share in (self.start, self.stop))
        return tuple(sorted(ids)[first:last])


def require_disjoint(train: str, val: str) -> None:
    """Raise ConfigurationError if the training split and the scored split share images.

    For example, `train:0-75%` and `train:50-100%` share images.
    """
    a, b = Split.parse(train), Split.parse(val)
    if a.name == b.name and max(a.start, b.start) < min(a.stop, b.stop):
        raise ConfigurationError(
            f"train_split={train} and val_split={val} share images",
            hint=_division_hint(a.name),
        )


def _division_hint(split: str) -> tuple[str, str]:
    """Return the settings that use 75% of a split for training and the rest for scoring.

    Error messages show these settings as a hint.
    """
    name = escape_braces(split)
    return f"dataset.train_split={name}:0-75%", f"dataset.val_split={name}:75-100%"


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file in UTF-8, or in UTF-16 with a byte order mark.

    Raises:
        DataError: The file is missing, cannot be read, or has another encoding.
    """
    data = read_data_file(path)
    try:
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16" if is_utf16 else "utf-8-sig")
        if "\0" in text:
            raise ValueError("it contains zero bytes")
    except ValueError as error:
        raise DataError(
            f"{path} is not a text file in UTF-8 ({error}). Download or save it again"
        ) from error
    return text.splitlines()


def missing_split_error(
    name: str, present: Sequence[str], location: Path, divisible: Sequence[str] | None = None
) -> DataError:
    """Return the error for a missing split. The message suggests dividing an existing split.

    Args:
        name: Name of the missing split.
        present: Names of the existing splits.
        location: Path of the folder that contains the splits, or name of the dataset.
        divisible: Names of the splits that may be divided. By default, all existing splits.
    """
    if not present:
        return DataError(f"{location} contains no splits, expected {name}. See docs/data.md")
    # Name only the splits with the shortest names. VOC also has 60 lists of single classes, whose
    # names are longer than those of the splits.
    shortest = sorted(present, key=lambda other: (len(other), other))[:5]
    ordered = shortest if divisible is None else sorted(divisible)
    first = next((other for other in ordered if other.startswith("train")), ordered[0])
    return DataError(
        f"{location} has no split {name}. Existing splits: {', '.join(shortest)}. See "
        "docs/data.md, or divide an existing split",
        hint=_division_hint(first),
    )


def read_list(path: Path) -> list[str]:
    """Read a text file that lists images, and return its lines except blank lines.

    Raises:
        DataError: The file does not exist. The error names the other lists in its folder.
    """
    if not path.is_file():
        raise missing_split_error(
            path.stem, [file.stem for file in path.parent.glob("*.txt")], path.parent
        )
    return [line.strip() for line in read_lines(path) if line.strip()]


def find_image_ids(lines: Sequence[str], files: Files) -> list[str]:
    """Return the image id to which each line of a list refers.

    A line begins with an id such as "pet0", a file name or a path, and may have further columns.
    Columns after an id must be numbers or paths. For example, "pet0 (2)" does not refer to the id
    "pet0". Because names may contain blanks and dots, the longest name of an existing file is used.
    The list and the folder may use different Unicode forms of a name.

    Args:
        lines: The lines of a list.
        files: The image files. If no file matches a line, the line without the image suffix becomes
            the id. Such an image is later reported as missing.
    """
    # Endings to remove from a listed name: if the suffix is "_left.png", they are "_left.png", ""
    # and "_left".
    endings = (files.suffix, "", PurePosixPath(files.suffix).stem)

    @cache
    def list_names(folder: str) -> dict[str, str]:
        """Map each file name in a folder, and the NFC form of the name, to the file name."""
        names: list[str] = []
        with suppress(OSError), os.scandir(files.folder / folder) as entries:
            names = [entry.name for entry in entries]
        composed = {normalize("NFC", name): name for name in names}
        return composed | {name: name for name in names}

    @cache
    def find_folder(path: str) -> str | None:
        return find_file(*path.rpartition("/")[::2]) if path else ""

    def find_file(folder: str, name: str) -> str | None:
        parent = find_folder(folder)
        names = {} if parent is None else list_names(parent)
        actual = names.get(name) or names.get(normalize("NFC", name))
        return f"{parent}/{actual}" if parent and actual else actual

    def find_id(line: str) -> str:
        # Do not search for the file of a plain id, because most published lists contain only plain
        # ids.
        if _PLAIN_NAME.fullmatch(line) and not line.endswith(endings[2]):
            return line
        for folder, name in _possible_names(line, files.suffix):
            if find_folder(folder) is None:
                continue
            stems = [name.removesuffix(ending) for ending in endings]
            stems += [name.rpartition(".")[0]] if name.lower().endswith(IMAGE_SUFFIXES) else []
            for stem in stems:
                if path := find_file(folder, stem + files.suffix):
                    return path.removesuffix(files.suffix)
        return line.removesuffix(files.suffix)

    return [find_id(line) for line in lines]


def _possible_names(line: str, suffix: str) -> Iterator[tuple[str, str]]:
    """Yield the folder and file name of each path to which a line of a list may refer.

    For the line "a/7.png 3" and the suffix ".png", the results are ("a", "7.png 3"), ("", "7.png
    3"), ("a", "7.png") and ("", "7.png").
    """
    for path in _drop_columns(line, suffix):
        *folders, name = [part for part in path.split("/") if part not in ("", ".", "..")] or [""]
        for start in range(len(folders) + 1):
            # Do not remove a folder with a blank in its name, because the blank may separate two
            # columns of the line.
            if start and re.search(r"\s", folders[start - 1]):
                break
            yield "/".join(folders[start:]), name


def _drop_columns(line: str, suffix: str) -> Iterator[str]:
    """Yield the possible names at the start of a line of a list, the longest first.

    Possible names are the line, and the line without one or more of its last columns. For example,
    "pet0 1 2" yields "pet0 1 2", "pet0 1" and "pet0". Columns are only removed if they contain
    numbers or paths, or if the text before them ends in an image suffix or `suffix`.
    """
    yield line
    suffixes = (suffix.lower(), *IMAGE_SUFFIXES) if suffix else IMAGE_SUFFIXES
    for blank in reversed(list(re.finditer(r"\s+", line))):
        name, columns = line[: blank.start()], line[blank.end() :].split()
        is_file = name.lower().endswith(suffixes)
        if is_file or all("/" in column or _NUMBER.fullmatch(column) for column in columns):
            yield name


def read_shared_values(config: Any) -> dict[str, Any]:
    """Return the values of the config keys that all datasets share, such as `data.limit`.

    Keys that the configuration does not contain are left out. `SHARED_KEY_TYPES` lists all shared
    keys and their types.
    """
    values = {}
    for key, kind in SHARED_KEY_TYPES.items():
        group, _, name = key.partition(".")
        if group in config:
            values[key] = require_type(key, kind, config[group][name] if name else config[group])
    return values


def apply_shared_values(dataset: Dataset, values: Mapping[str, Any]) -> Dataset:
    """Apply the config keys that all datasets share, and return the resulting dataset.

    These keys set how files are read, limit the number of images, and corrupt images.

    Args:
        dataset: The original dataset.
        values: Value of each shared key, such as {"data.limit": 100, ...}.

    Raises:
        ConfigurationError: Both `data.first` and `data.limit` are set.
    """
    first, limit = values["data.first"], values["data.limit"]
    if first and limit:
        raise ConfigurationError(
            f"data.first={first} selects the first images, but data.limit={limit} selects images "
            "from the whole split. Set one of them to null",
            hint=("data.limit=null",),
        )
    view: Dataset = dataset_with_read_options(
        dataset, ReadOptions(values["data.fingerprint"], values["data.bits"])
    )
    if first or limit:
        view = limit_dataset(view, first or limit, first=bool(first))
    corruption = values.get(CORRUPT)
    return corrupt_dataset(view, Corruption.parse(corruption)) if corruption else view


class CachedDataset(DatasetView):
    """A dataset that opens each of its image sets only once, because opening it takes time.

    When an image set is opened, it checks that all of its files exist.
    """

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, lambda _, images: images)
        self._opened: dict[str, ImageSet] = {}

    def _open_images(self, method: str) -> ImageSet:
        if method not in self._opened:
            self._opened[method] = super()._open_images(method)
        return self._opened[method]


class ListedDataset(CachedDataset):
    """A dataset that lists its files only once, so that all tasks of a command use the same images.

    Fingerprints (hashes of the images) are still computed again for each task, because files may
    change between two tasks.
    """

    def _open_images(self, method: str) -> ImageSet:
        return _drop_cached_fingerprint(super()._open_images(method))


def _drop_cached_fingerprint(images: ImageSet) -> ImageSet:
    """Return a copy of an image set without its cached fingerprint (a hash of the images).

    An image set that is not a dataclass is returned unchanged.
    """
    if not is_dataclass(images) or isinstance(images, type):
        return images
    values = {field.name: getattr(images, field.name) for field in fields(images)}
    inner = {
        name: _drop_cached_fingerprint(value)
        for name, value in values.items()
        if isinstance(value, ImageSet)
    }
    return replace(images, **inner)


def limit_dataset(dataset: Dataset, limit: int, *, first: bool = False) -> DatasetView:
    """Return a dataset with at most `limit` images in each split.

    The limit is appended to the dataset's name, as in "voc2012-limit64".

    Args:
        dataset: The original dataset.
        limit: Maximum number of images.
        first: Whether to select the first images. Otherwise, the selected images are evenly spaced.
    """
    name = _limited_name(dataset.name, limit, first)
    return DatasetView(dataset, lambda _, images: limit_images(images, limit, first=first), name)


def limit_images(images: ImageSet, limit: int, *, first: bool = False) -> ImageSet:
    """Return a subset of at most `limit` images, with a name such as "voc2012-limit64".

    Because of the new name, results on the subset are not mixed with results on all images.

    Args:
        images: The whole image set.
        limit: Maximum number of images.
        first: Whether to select the first images. Otherwise, the selected images are evenly spaced,
            because images are often sorted by class.
    """
    count = min(limit, len(images))
    selected = [index if first else index * len(images) // count for index in range(count)]
    return select_images(images, _limited_name(images.name, limit, first), selected)


def _limited_name(name: str, limit: int, first: bool) -> str:
    return f"{name}-{'first' if first else 'limit'}{limit}"


def sample_ids(ids: Sequence[str], count: int) -> tuple[str, ...]:
    """Select `count` pseudo-random ids, and return them in their original order.

    The ids with the smallest SHA-256 are selected, so the selection hardly changes if ids are added
    or removed.
    """
    by_digest = sorted(ids, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    selected = set(by_digest[:count])
    return tuple(image_id for image_id in ids if image_id in selected)


def sample_indices(ids: Sequence[str], count: int) -> list[int]:
    """Return the indices of the `count` pseudo-random ids that `sample_ids` would return."""
    selected = set(sample_ids(ids, count))
    return [index for index, image_id in enumerate(ids) if image_id in selected]
