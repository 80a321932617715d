"""Splits, shares of them, and a dataset in the form in which the keys of no component ask for it.

Its files read in another way, some of its images, corrupted, opened once.
"""

import codecs
import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from ssl_bench.composition.fields import Bits, Count, OptionalPath, Seed, require_type
from ssl_bench.data.corruptions import KEY as CORRUPT
from ssl_bench.data.corruptions import Corruption, corrupt_dataset
from ssl_bench.data.files.fingerprints import (
    FingerprintKind,
    ReadOptions,
    dataset_with_read_options,
)
from ssl_bench.data.files.readable import select_images
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet
from ssl_bench.errors import ConfigurationError, DataError, escape_braces
from ssl_bench.system.files import read_regular

DType = Literal["float32", "float16", "bfloat16"]
"""As torch names them."""
Limit = Count | None
SHARED: Mapping[str, Any] = {
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
"""What the keys take that belong to no component."""
_GRAMMAR = re.compile(r"([^:%]+)(?::(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)%)?")


@dataclass(frozen=True)
class Split:
    """A split, or a share of it: `train2017`, `train2017:0-75%`.

    Attributes:
        name: What the dataset calls it.
        start: Percent of the sorted ids at which the share begins.
        stop: Percent at which it ends, exclusive.
    """

    name: str
    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(100)

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Read `NAME` or `NAME:a-b%`.

        Raises:
            ConfigurationError: the text is neither.
        """
        match = _GRAMMAR.fullmatch(text)
        if match is not None:
            name, start, stop = match.groups()
            split = cls(name, Fraction(start or 0), Fraction(stop or 100))
            if split.start < split.stop <= 100:
                return split
        raise ConfigurationError(
            f"expected a split such as train or train:0-75% (0 <= a < b <= 100), got {text!r}"
        )

    def cut(self, ids: Collection[str]) -> tuple[str, ...]:
        """The sorted ids of this share. Shares that meet neither overlap nor leave a gap."""
        first, last = (int(len(ids) * share / 100) for share in (self.start, self.stop))
        return tuple(sorted(ids)[first:last])


def require_disjoint(train: str, val: str) -> None:
    """Refuse to score on what a head was fitted to.

    Raises:
        ConfigurationError: both are shares of one split and have images in common.
    """
    one, other = Split.parse(train), Split.parse(val)
    if one.name == other.name and max(one.start, other.start) < min(one.stop, other.stop):
        raise ConfigurationError(
            f"train_split={train} and val_split={val} share images",
            hint=(
                f"dataset.train_split={escape_braces(one.name)}:0-75%",
                f"dataset.val_split={escape_braces(one.name)}:75-100%",
            ),
        )


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file in UTF-8, or in UTF-16 with a byte order mark.

    Raises:
        DataError: The file cannot be read or has another encoding.
    """
    try:
        data = read_regular(path)
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16" if is_utf16 else "utf-8-sig")
        if "\0" in text:
            raise ValueError("it contains zero bytes")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a text file ({error}); fetch it again") from error
    return text.splitlines()


def absent_split(
    name: str, present: Sequence[str], where: Path, whole: Sequence[str] | None = None
) -> DataError:
    """The error for a split that is not there, with the overrides that do without it.

    Args:
        name: Of the split.
        present: Splits that are there.
        where: The folder or list that holds them.
        whole: Those that can be cut in two; all if None.
    """
    if not present:
        return DataError(f"{where} has no split {name}, nor any other; see docs/data.md")
    # VOC has 60 lists for single classes beside the few that are meant: those have short names.
    nearest = sorted(present, key=lambda other: (len(other), other))[:5]
    ordered = nearest if whole is None else sorted(whole)
    first = next((other for other in ordered if other.startswith("train")), ordered[0])
    return DataError(
        f"{where} has no split {name}, but {', '.join(nearest)}; see docs/data.md, or cut one in "
        "two",
        hint=(
            f"dataset.train_split={escape_braces(first)}:0-75%",
            f"dataset.val_split={escape_braces(first)}:75-100%",
        ),
    )


def shared_values(config: Any) -> dict[str, Any]:
    """What the keys of `SHARED` hold in a composed configuration; for data alone it has fewer."""
    values = {}
    for key, kind in SHARED.items():
        group, _, name = key.partition(".")
        if group in config:
            values[key] = require_type(key, kind, config[group][name] if name else config[group])
    return values


def as_asked(dataset: Dataset, values: Mapping[str, Any]) -> Dataset:
    """Return a dataset as its keys ask: read in one of several ways, in part, corrupted.

    Args:
        dataset: As the configuration builds it.
        values: As `shared_values` returns them.

    Raises:
        ConfigurationError: `data.first` and `data.limit` are both set.
    """
    first, limit = values["data.first"], values["data.limit"]
    if first and limit:
        raise ConfigurationError(
            f"data.first={first} takes the first images, data.limit={limit} spreads them over the "
            "split; set one of the two to null, such as data.limit=null",
            hint=("data.limit=null",),
        )
    found: Dataset = dataset_with_read_options(
        dataset, ReadOptions(values["data.fingerprint"], values["data.bits"])
    )
    if first or limit:
        found = limited_dataset(found, first or limit, first=bool(first))
    corrupt = values.get(CORRUPT)
    return corrupt_dataset(found, Corruption.parse(corrupt)) if corrupt else found


class OpenedOnce(DatasetView):
    """A dataset as it was when each of its sets was asked for first; of that time are all answers.

    Opening a set looks at all of its files.
    """

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, lambda _, images: images)
        self._opened: dict[str, ImageSet] = {}

    def _set(self, role: str) -> ImageSet:
        if role not in self._opened:
            self._opened[role] = super()._set(role)
        return self._opened[role]


class ListedOnce(OpenedOnce):
    """A dataset that is listed once: tasks and passes of a command get the same images.

    What its files hold is asked anew by each of them.
    """

    def _set(self, role: str) -> ImageSet:
        return _unread(super()._set(role))


def _unread(images: ImageSet) -> ImageSet:
    """The same images, nothing of their files remembered; those of other packages as they are."""
    if not is_dataclass(images) or isinstance(images, type):
        return images
    parts = {one.name: getattr(images, one.name) for one in fields(images)}
    return replace(images, **{k: _unread(v) for k, v in parts.items() if isinstance(v, ImageSet)})


def limited_dataset(dataset: Dataset, limit: int, *, first: bool = False) -> DatasetView:
    """Return a dataset with at most `limit` images in each split, under a name of its own."""
    name = _limited_name(dataset.name, limit, first)
    return DatasetView(dataset, lambda _, images: limited(images, limit, first=first), name)


def limited(images: ImageSet, limit: int, *, first: bool = False) -> ImageSet:
    """Return at most `limit` images, under a name such as "voc2012-limit64" or "voc2012-first64".

    So no table shows a score of some images beside one of all.

    Args:
        images: A split, which may be sorted by class.
        limit: How many.
        first: Take the first ones in the order of the split; otherwise spread them evenly over it.
    """
    count = min(limit, len(images))
    kept = [index if first else index * len(images) // count for index in range(count)]
    return select_images(images, _limited_name(images.name, limit, first), kept)


def _limited_name(name: str, limit: int, first: bool) -> str:
    return f"{name}-{'first' if first else 'limit'}{limit}"


def sampled(ids: Sequence[str], count: int) -> tuple[str, ...]:
    """So many ids from all over a set, in its order; few change when other images come or go."""
    by_digest = sorted(ids, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    chosen = set(by_digest[:count])
    return tuple(image_id for image_id in ids if image_id in chosen)


def sampled_numbers(ids: Sequence[str], count: int) -> list[int]:
    """Where in a set the ids of `sampled` stand."""
    chosen = set(sampled(ids, count))
    return [number for number, image_id in enumerate(ids) if image_id in chosen]
