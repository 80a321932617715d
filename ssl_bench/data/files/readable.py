"""Some images of a set: without those that cannot be read, and those that lie in two sets."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt64

from ssl_bench.data.files.file_sets import FileImageSet
from ssl_bench.data.files.fingerprints import (
    DigestCache,
    cached_sha256,
    extend_fingerprint,
    file_hashes,
    map_in_threads,
    sample_hashes,
)
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet, ImageView, Sample
from ssl_bench.errors import DataError, UnreadableImage, join_alternatives
from ssl_bench.system.output import say, show_progress

OnBadImage = Literal["fail", "skip"]
_SHOWN = 5
_READABLE = hashlib.sha256(b"readable").digest()
_Key = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True)
class ImageSubset(ImageView):
    """An `ImageSet` without some of its images.

    Attributes:
        kept: Indices into `images`, ascending.
        called: Their name, where it is not that of the whole.
    """

    kept: tuple[int, ...]
    called: str | None = None

    @property
    def name(self) -> str:
        return self.called or self.images.name

    @property
    def ids(self) -> tuple[str, ...]:
        return self._ids

    @cached_property
    def _ids(self) -> tuple[str, ...]:
        return tuple(self.images.ids[index] for index in self.kept)

    def __getitem__(self, index: int) -> Sample:
        return self.images[self.kept[index]]

    @cached_property
    def _fingerprint(self) -> str:
        return extend_fingerprint(self.images.fingerprint(), self.ids)

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        """Those of the images that are left."""
        return file_hashes(self.images)[list(self.kept)]

    def sample_hashes(self) -> list[str]:
        """Those of the images that are left."""
        entries = sample_hashes(self.images)
        return [entries[index] for index in self.kept]


def select_images(images: ImageSet, name: str, kept: Sequence[int]) -> ImageSet:
    """Some images of a set, under another name."""
    own = getattr(images, "select", None)
    return own(name, kept) if own else ImageSubset(images, tuple(kept), name)


@dataclass
class ReadabilityCache:
    """What a command has found while it looked through its images, for all of its tasks.

    Attributes:
        faults: By what they were found in; None where all was well.
        said: Lines that were printed.
    """

    faults: dict[object, UnreadableImage | None] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)


class ReadableDataset(DatasetView):
    """A dataset without the images that cannot be read, and a line that says which they are.

    A set is looked through when it is opened, before anything is computed: each file is decoded
    once, and not again by later commands as long as its size and times are the same.

    Args:
        fails: Refuse a set with such an image instead.
    """

    def __init__(self, dataset: Dataset, looked: ReadabilityCache, *, fails: bool = False) -> None:
        super().__init__(dataset, self._readable)
        self._looked, self._fails = looked, fails
        self._left_out: dict[_Key, list[str]] = {}

    def left_out(self) -> dict[str, list[str]]:
        """Split to the ids that are gone from it; splits without any are not named."""
        gone: dict[str, list[str]] = {}
        for (_, split, _), missing in self._left_out.items():
            if missing:
                gone.setdefault(split, []).extend(missing)
        return gone

    def _readable(self, role: str, images: ImageSet) -> ImageSet:
        faults = find_unreadable(images, self._looked.faults)
        if self._fails:
            require_readable(images, faults)
        kept = tuple(index for index, fault in enumerate(faults) if fault is None)
        line = _taken(images, faults)
        if line not in self._looked.said:
            self._looked.said.add(line)
            say(line)
        if not kept:
            raise DataError(f"none of the {len(images)} images of {_title(images)} can be read")
        gone = [i for i, fault in zip(images.ids, faults, strict=True) if fault is not None]
        self._left_out[role, images.split, images.ids] = gone
        return ImageSubset(images, kept) if gone else images


def leave_out_unreadable(
    view: Dataset, dataset: Dataset, on_bad_image: OnBadImage | None, looked: ReadabilityCache
) -> Dataset:
    """A view of a dataset without what cannot be read: of "skip", or where that is its own way.

    Where it is, the images are looked through beforehand with "fail" too.
    """
    if on_bad_image == "skip" or getattr(dataset, "leaves_out_unreadable", False):
        return ReadableDataset(view, looked, fails=on_bad_image == "fail")
    return view


def require_readable(images: ImageSet, faults: Sequence[UnreadableImage | None]) -> None:
    """Raise `UnreadableImage` if one cannot be read, with a count of the others like it."""
    broken = [fault for fault in faults if fault is not None]
    if broken:
        count = f"{len(broken)} of {len(images)} images of {_title(images)} cannot be read"
        first = "the first of them: " if len(broken) > 1 else ""
        raise UnreadableImage(f"{count}, {first}{broken[0]}")


def left_out_label(left_out: dict[str, list[str]]) -> str:
    """One line that differs for other images: `2 of train, 1 of val (3f9a01)`."""
    lines = (f"{split}\t{i}\n" for split, ids in sorted(left_out.items()) for i in ids)
    digest = hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
    counts = ", ".join(f"{len(ids)} of {split}" for split, ids in sorted(left_out.items()))
    return f"{counts} ({digest[:6]})"


def suggest_skipping(error: UnreadableImage) -> UnreadableImage:
    """The same error, for a command that can do without the image."""
    found = UnreadableImage(
        f"{error}, or leave such images out",
        hint=join_alternatives(error.hint, ("--on-bad-image", "skip")),
    )
    found.is_raised_on_all_ranks = error.is_raised_on_all_ranks
    return found


def summarize_left_out(left_out: dict[str, list[str]]) -> dict[str, dict[str, int | list[str]]]:
    """What a record says of them: how many of each split, and the first names."""
    return {split: {"count": len(i), "first": i[:_SHOWN]} for split, i in left_out.items()}


def find_unreadable(
    images: ImageSet, known: dict[object, UnreadableImage | None]
) -> list[UnreadableImage | None]:
    """What is wrong with each image; pixels of files are decoded as they lie there."""
    files, places = underlying_files(images) or (None, np.arange(len(images)))
    keys: list[object] = [(images.name, images.split, image_id) for image_id in images.ids]
    cache = None
    if files is not None:
        keys = [(files.files(place), files.options.bits) for place in places.tolist()]
        cache = DigestCache(files.images.folder)

    def decode(source: ImageSet, index: int) -> bytes:
        _ = source[index]
        return _READABLE

    def fault(index: int) -> UnreadableImage | None:
        place = int(places[index])
        try:
            if files is None or cache is None:
                decode(images, index)
            else:
                paths = files.files(place)
                name = f"{paths[0].absolute()}\0readable {files.options.bits}"
                cache.get_or_compute(name, paths, partial(decode, files, place))
        except UnreadableImage as error:
            return error
        return None

    missing = [index for index, key in enumerate(keys) if key not in known]
    shown = show_progress(missing, f"looking through {_title(images)}", len(missing))
    try:
        for index, found in map_in_threads(fault, shown):
            known[keys[index]] = found
    finally:
        if cache:
            cache.save()
    return [known[key] for key in keys]


def _taken(images: ImageSet, faults: Sequence[UnreadableImage | None]) -> str:
    """The line that says what is taken, what cannot be read, and what would read it."""
    where = images.name if images.split == "all" else _title(images)
    taken = faults.count(None)
    line = f"taken: {taken} photograph{'s' if taken != 1 else ''} of {where}"
    return "; ".join([line, *describe_unreadable(images, faults)])


def describe_unreadable(images: ImageSet, faults: Sequence[UnreadableImage | None]) -> list[str]:
    """How many images cannot be read, which, and what would read them, by the remedy."""
    gone: dict[str, list[str]] = {}
    for image_id, fault in zip(images.ids, faults, strict=True):
        if fault is not None:
            gone.setdefault(fault.remedy, []).append(image_id)
    parts = []
    for remedy, ids in sorted(gone.items()):
        names = ", ".join(ids[:_SHOWN])
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        needs = "needs" if len(ids) == 1 else "need"
        problem = f"{needs} {remedy}" if remedy else "cannot be read"
        parts.append(f"{len(ids)} {problem}: {names}{more}")
    return parts


def underlying_files(images: ImageSet) -> tuple[FileImageSet, Int64[np.ndarray, " images"]] | None:
    """The set of files that a set is made from, and which of them it has."""
    if isinstance(images, FileImageSet):
        return images, np.arange(len(images))
    inner = getattr(images, "images", None)
    found = underlying_files(inner) if isinstance(inner, ImageSet) else None
    if found is not None and isinstance(images, ImageSubset):
        return found[0], found[1][list(images.kept)]
    return found


def count_shared_files(fitted: ImageSet, scored: ImageSet, *, allowed: bool) -> int:
    """How many scored images are a file of a fitted one, by a link or a copy of whatever name.

    Of sets whose files are known by size and time alone, files of one size and time are read.
    Sets without files are compared by the digests of their images, if they know them.

    Cost: that of both fingerprints.

    Raises:
        DataError: there are such images, and they are not `allowed`.
    """
    one, other = underlying_files(fitted), underlying_files(scored)
    if one is None or other is None:
        return _shared_contents(fitted, scored, allowed=allowed)
    (fitted_set, fitted_places), (scored_set, scored_places) = one, other
    train, val = fitted_set.file_hashes()[fitted_places], scored_set.file_hashes()[scored_places]
    first = None
    count = 0
    for index in np.flatnonzero(np.isin(val, train)):
        path = scored_set.path(int(scored_places[index]))
        same = fitted_set.path(int(fitted_places[np.flatnonzero(train == val[index])[0]]))
        # Of names and times nothing is sure; of contents that were read it is.
        if fitted_set.options.fingerprint == "stat" and cached_sha256(path) != cached_sha256(same):
            continue
        first = first or (same, path)
        count += 1
    if first is not None and not allowed:
        raise DataError(
            f"{first[0]}, to which something is fitted, is the same file as {first[1]}, which is "
            f"scored: {count} of {len(scored)} scored images of {scored.name} {scored.split} in "
            "all; take them out of one of the splits, or score them all the same",
            hint=("data.allow_overlap=true",),
        )
    return count


def _shared_contents(fitted: ImageSet, scored: ImageSet, *, allowed: bool) -> int:
    """Return how many scored images are equal to a fitted image, for images without files."""
    fitted_digests, scored_digests = image_digests(fitted), image_digests(scored)
    if fitted_digests is None or scored_digests is None:
        return 0
    known = set(fitted_digests)
    shared = [i for i, one in zip(scored.ids, scored_digests, strict=True) if one in known]
    if shared and not allowed:
        raise DataError(
            f"{len(shared)} of {len(scored)} scored images of {_title(scored)} are also training "
            f"images, the first is {shared[0]}. Remove them from one of the splits, or score them "
            "anyway",
            hint=("data.allow_overlap=true",),
        )
    return len(shared)


def image_digests(images: ImageSet) -> list[str] | None:
    """Return a digest of each original image, None for sets that do not know it."""
    if own := getattr(images, "image_digests", None):
        return own()
    inner = getattr(images, "images", None)
    digests = image_digests(inner) if isinstance(inner, ImageSet) else None
    if digests is not None and isinstance(images, ImageSubset):
        return [digests[index] for index in images.kept]
    return digests


def _title(images: ImageSet) -> str:
    return f"{images.name} {images.split}"
