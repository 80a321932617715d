"""Doing without images whose files cannot be read, and saying which."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt64

from ssl_bench.data.files.fingerprints import extended, marks_of
from ssl_bench.data.files.threads import in_threads
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet, Sample
from ssl_bench.errors import DataError, UnreadableImage

_SHOWN = 5
_Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class RemainingImages:
    """An `ImageSet` without some of its images.

    Attributes:
        kept: Indices into `images`, ascending.
        called: Their name, where it is not that of the whole.
    """

    images: ImageSet
    kept: tuple[int, ...]
    called: str | None = None

    @property
    def name(self) -> str:
        return self.called or self.images.name

    @property
    def split(self) -> str:
        return self.images.split

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.images.class_names

    @property
    def ids(self) -> tuple[str, ...]:
        return self._ids

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Sample:
        return self.images[self.kept[index]]

    def fingerprint(self) -> str:
        """Another one than that of all images."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return extended(self.images.fingerprint(), self.ids)

    def marks(self) -> UInt64[np.ndarray, " images"]:
        """Those of the images that are left."""
        return marks_of(self.images)[list(self.kept)]

    @cached_property
    def _ids(self) -> tuple[str, ...]:
        return tuple(self.images.ids[index] for index in self.kept)


@runtime_checkable
class Divisible(Protocol):
    """An `ImageSet` that knows how to be smaller, so that only the files of what stays are read."""

    def some(self, name: str, kept: Sequence[int]) -> ImageSet:
        """The images of these indices, under another name."""
        ...


def some_of(images: ImageSet, name: str, kept: Sequence[int]) -> ImageSet:
    """Some images of a set, under another name."""
    if isinstance(images, Divisible):
        return images.some(name, kept)
    return RemainingImages(images, tuple(kept), name)


class ReadableDataset(DatasetView):
    """A dataset that leaves out the images that were found to be unreadable.

    Nothing is looked at beforehand: where every image can be read, it costs nothing. Whoever meets
    an unreadable one calls `leave_out_unreadable` and begins again, so that everything that is
    computed is computed on the same images.
    """

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        # By role and ids, not by fingerprint, for which all files would be read.
        self._opened: dict[_Key, ImageSet] = {}
        self._kept: dict[_Key, tuple[int, ...]] = {}

    def leave_out_unreadable(
        self, shown: Callable[[Iterable[int], str, int], Iterable[int]]
    ) -> int:
        """Decode every image of the sets that were opened; from now on those that fail are gone.

        Args:
            shown: Gives back the indices it gets, perhaps showing how far they are.

        Returns:
            How many were found that were not known before.

        Raises:
            DataError: a set has no image left, or is faulty in another way.
        """
        found = 0
        for key, images in self._opened.items():
            if key in self._kept:
                continue
            unreadable = set(_unreadable(images, shown))
            if len(unreadable) == len(images):
                raise DataError(f"none of the {len(images)} images of {_title(images)} can be read")
            self._kept[key] = tuple(i for i in range(len(images)) if i not in unreadable)
            found += len(unreadable)
        return found

    def left_out(self) -> dict[str, list[str]]:
        """Split to the ids that are gone from it; splits without any are not named."""
        gone: dict[str, list[str]] = {}
        for key, kept in self._kept.items():
            images = self._opened[key]
            if len(kept) < len(images):
                present = set(kept)
                missing = [i for n, i in enumerate(images.ids) if n not in present]
                gone.setdefault(images.split, []).extend(missing)
        return gone

    def _given(self, role: str, images: ImageSet) -> ImageSet:
        key = (role, images.ids)
        self._opened.setdefault(key, images)
        kept = self._kept.get(key)
        return images if kept is None or len(kept) == len(images) else RemainingImages(images, kept)


def summary(left_out: dict[str, list[str]]) -> str:
    """One line that differs for other images: `2 of train, 1 of val (3f9a01)`."""
    lines = (f"{split}\t{i}\n" for split, ids in sorted(left_out.items()) for i in ids)
    digest = hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
    counts = ", ".join(f"{len(ids)} of {split}" for split, ids in sorted(left_out.items()))
    return f"{counts} ({digest[:6]})"


def with_a_way_out(error: UnreadableImage) -> UnreadableImage:
    """The same error, for a command that can do without the image."""
    found = UnreadableImage(f"{error}, or leave such images out with --on-bad-image skip")
    found.is_shared = error.is_shared
    return found


def counts_and_first(left_out: dict[str, list[str]]) -> dict[str, dict[str, int | list[str]]]:
    """What a record says of them: how many of each split, and the first names."""
    return {split: {"count": len(i), "first": i[:_SHOWN]} for split, i in left_out.items()}


def _unreadable(
    images: ImageSet, shown: Callable[[Iterable[int], str, int], Iterable[int]]
) -> Iterator[int]:
    def fails(index: int) -> bool:
        try:
            images[index]
        except UnreadableImage:
            return True
        return False

    indices = shown(range(len(images)), f"reading {_title(images)}", len(images))
    return (index for index, failed in in_threads(fails, indices) if failed)


def _title(images: ImageSet) -> str:
    return f"{images.name} {images.split}"
