"""Leave out images that cannot be read, and find images that occur in two image sets."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt64

from ssl_bench.data.files.fingerprints import (
    DigestCache,
    IdentifiedImages,
    extend_fingerprint,
    file_hashes,
    map_in_threads,
    sample_hashes,
)
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet, ImageView, Sample
from ssl_bench.errors import DataError, UnreadableImageError, join_alternatives
from ssl_bench.system.output import print_message, show_progress

OnBadImage = Literal["fail", "skip"]
_MAX_NAMES = 5
# The cache stores this digest for an image that could be decoded.
_IS_READABLE = hashlib.sha256(b"readable").digest()


@dataclass(frozen=True)
class ImageSubset(ImageView):
    """A subset of the images of another image set.

    Attributes:
        indices: Indices of the subset's images in the other image set, in ascending order.
        own_name: Name of the subset. If it is None, the subset has the name of the other image set.
    """

    indices: tuple[int, ...]
    own_name: str | None = None

    @property
    def name(self) -> str:
        return self.own_name or self.images.name

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.images.ids[index] for index in self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.images[self.indices[index]]

    @cached_property
    def _fingerprint(self) -> str:
        return extend_fingerprint(self.images.fingerprint(), self.ids)

    def file_hashes(self) -> UInt64[np.ndarray, " images"]:
        return file_hashes(self.images)[list(self.indices)]

    def sample_hashes(self) -> list[str]:
        hashes = sample_hashes(self.images)
        return [hashes[index] for index in self.indices]


def select_images(images: ImageSet, name: str, indices: Sequence[int]) -> ImageSet:
    """Return a subset of an image set, with a new name.

    Args:
        images: The image set.
        name: Name of the subset.
        indices: Indices of the subset's images in the image set.
    """
    method = getattr(images, "select", None)
    return method(name, indices) if method else ImageSubset(images, tuple(indices), name)


@dataclass
class ReadabilityCache:
    """Results of trying to decode images, shared by all tasks of a command.

    Attributes:
        errors: Error of each image, or None if the image is readable. The key of an image consists
            of its files and the options with which they were read.
        messages: Messages that have already been printed, so that they are not repeated.
    """

    errors: dict[object, UnreadableImageError | None] = field(default_factory=dict)
    messages: set[str] = field(default_factory=set)


class ReadableDataset(DatasetView):
    """A dataset that leaves out images that cannot be read.

    When an image set is opened, all of its images are decoded to find the unreadable ones. Later
    commands only decode files whose size or times have changed. A message states how many images
    are used and which ones are left out.

    Args:
        dataset: The complete dataset.
        cache: Results of earlier attempts to decode images.
        must_be_complete: Whether to raise UnreadableImageError instead of leaving images out.
    """

    def __init__(
        self, dataset: Dataset, cache: ReadabilityCache, *, must_be_complete: bool = False
    ) -> None:
        super().__init__(dataset, self._select_readable)
        self._cache, self._must_be_complete = cache, must_be_complete
        self._left_out: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}

    def unreadable_ids(self) -> dict[str, list[str]]:
        """Return the ids of the images that were left out, by the name of the split."""
        by_split: dict[str, list[str]] = {}
        for (_, split, _), ids in self._left_out.items():
            if ids:
                by_split.setdefault(split, []).extend(ids)
        return by_split

    def _select_readable(self, usage: str, images: ImageSet) -> ImageSet:
        errors = find_read_errors(images, self._cache.errors)
        if self._must_be_complete:
            require_readable(images, errors)
        readable = tuple(index for index, error in enumerate(errors) if error is None)
        count = f"{len(readable)} image{'s' if len(readable) != 1 else ''}"
        name = images.name if images.split == "all" else _title(images)
        message = "; ".join([f"using {count} of {name}", *describe_unreadable(images, errors)])
        if message not in self._cache.messages:
            self._cache.messages.add(message)
            print_message(message)
        if not readable:
            raise DataError(
                f"none of the {len(images)} images of {_title(images)} can be read. Replace them"
            )
        left_out = [i for i, error in zip(images.ids, errors, strict=True) if error is not None]
        self._left_out[usage, images.split, images.ids] = left_out
        return ImageSubset(images, readable) if left_out else images


def leave_out_unreadable(
    view: Dataset, dataset: Dataset, on_bad_image: OnBadImage | None, cache: ReadabilityCache
) -> Dataset:
    """Leave unreadable images out of a dataset, if the user or the dataset requests it.

    Args:
        view: The dataset to use. Settings such as `data.limit` have already been applied to it.
        dataset: The original dataset. If its attribute `leaves_out_unreadable` is true, unreadable
            images are left out by default.
        on_bad_image: Choice of the user: "skip" leaves unreadable images out, and "fail" raises an
            error. None stands for the default of the dataset.
        cache: Results of earlier attempts to decode images.
    """
    if on_bad_image == "skip" or getattr(dataset, "leaves_out_unreadable", False):
        return ReadableDataset(view, cache, must_be_complete=on_bad_image == "fail")
    return view


def require_readable(images: ImageSet, errors: Sequence[UnreadableImageError | None]) -> None:
    """Raise UnreadableImageError if any image could not be decoded.

    The message contains the number of unreadable images and the first error.

    Args:
        images: The images.
        errors: Error of each image, or None if the image is readable.
    """
    unreadable = [error for error in errors if error is not None]
    if unreadable:
        count = f"{len(unreadable)} of {len(images)} images of {_title(images)} cannot be read"
        first = "the first of them: " if len(unreadable) > 1 else ""
        raise UnreadableImageError(f"{count}, {first}{unreadable[0]}")


def left_out_label(left_out: dict[str, list[str]]) -> str:
    """Return a text that identifies the omitted images, such as "2 of train, 1 of val (3f9a01)".

    The digits in parentheses are the beginning of a hash of the image ids.

    Args:
        left_out: Ids of the omitted images, by the name of the split.
    """
    lines = (f"{split}\t{i}\n" for split, ids in sorted(left_out.items()) for i in ids)
    digest = hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
    counts = ", ".join(f"{len(ids)} of {split}" for split, ids in sorted(left_out.items()))
    return f"{counts} ({digest[:6]})"


def summarize_left_out(left_out: dict[str, list[str]]) -> dict[str, dict[str, int | list[str]]]:
    """Summarise the omitted images for the stored result of an evaluation.

    Args:
        left_out: Ids of the omitted images, by the name of the split.

    Returns:
        For each split, a dictionary with the number of omitted images ("count") and their first
        five ids ("first").
    """
    return {s: {"count": len(ids), "first": ids[:_MAX_NAMES]} for s, ids in left_out.items()}


def suggest_skipping(error: UnreadableImageError) -> UnreadableImageError:
    """Return a copy of an error that also suggests the option `--on-bad-image skip`."""
    hint = join_alternatives(error.hint, ("--on-bad-image", "skip"))
    extended = UnreadableImageError(f"{error}, or leave such images out", hint=hint)
    extended.is_raised_on_all_ranks = error.is_raised_on_all_ranks
    return extended


def find_read_errors(
    images: ImageSet, known: dict[object, UnreadableImageError | None]
) -> list[UnreadableImageError | None]:
    """Decode all images. Return the decoding error of each image, or None for readable images.

    Args:
        images: The images. If an image set is derived from files, only the files are decoded. For
            example, corruptions such as added noise are not applied.
        known: Results of earlier calls. The key of an image consists of its files and the options
            with which they were read. New results are added to this dictionary.
    """
    files, indices = underlying_files(images) or (None, np.arange(len(images)))
    source = images if files is None else files
    keys: list[object] = [(images.name, images.split, image_id) for image_id in images.ids]
    digests = None
    if files is not None:
        bits = files.options.bits
        keys = [(files.path(index), files.files(index), bits) for index in indices.tolist()]
        digests = DigestCache(files.folder)

    def decode(index: int) -> bytes:
        _ = source[index]
        return _IS_READABLE

    def find_error(position: int) -> UnreadableImageError | None:
        index = int(indices[position])
        try:
            if files is None or digests is None:
                decode(index)
            else:
                name = f"{files.path(index).absolute()}\0readable {files.options.bits}"
                digests.get_or_compute(name, files.files(index), partial(decode, index))
        except UnreadableImageError as error:
            return error
        return None

    new = [position for position, key in enumerate(keys) if key not in known]
    progress = show_progress(new, f"checking images of {_title(images)}", len(new))
    try:
        for position, error in map_in_threads(find_error, progress):
            known[keys[position]] = error
    finally:
        if digests:
            digests.save()
    return [known[key] for key in keys]


def describe_unreadable(
    images: ImageSet, errors: Sequence[UnreadableImageError | None]
) -> list[str]:
    """Return texts that describe the unreadable images, with one text for each remedy.

    Examples of such texts are "2 cannot be read: a, b" and "1 needs pip install 'ssl-bench[heic]':
    c".

    Args:
        images: The images.
        errors: Error of each image, or None if the image is readable.
    """
    by_remedy: dict[str, list[str]] = {}
    for image_id, error in zip(images.ids, errors, strict=True):
        if error is not None:
            by_remedy.setdefault(error.remedy, []).append(image_id)
    phrases = []
    for remedy, ids in sorted(by_remedy.items()):
        needs = "needs" if len(ids) == 1 else "need"
        problem = f"{needs} {remedy}" if remedy else "cannot be read"
        more = f" and {len(ids) - _MAX_NAMES} more" if len(ids) > _MAX_NAMES else ""
        phrases.append(f"{len(ids)} {problem}: {', '.join(ids[:_MAX_NAMES])}{more}")
    return phrases


def underlying_files(
    images: ImageSet,
) -> tuple[IdentifiedImages, Int64[np.ndarray, " images"]] | None:
    """Find the image set that reads the files of the given images.

    For example, a subset or a set of corrupted images wraps the image set that reads the files.

    Returns:
        The image set that reads the files, and the index of each given image in it. None if the
        images do not come from files.
    """
    if isinstance(images, IdentifiedImages):
        return images, np.arange(len(images))
    inner = getattr(images, "images", None)
    files = underlying_files(inner) if isinstance(inner, ImageSet) else None
    if files is not None and isinstance(images, ImageSubset):
        return files[0], files[1][list(images.indices)]
    return files


def count_shared_files(training: ImageSet, scored: ImageSet, *, allowed: bool) -> int:
    """Count the scored images that are also training images. The files may be copies.

    With data.fingerprint=stat, copies with different modification times are not found. Two image
    sets without files, such as Python datasets, are compared by hashes of their images. The count
    is 0 if only one of the image sets has files, or if an image set has no such hashes.

    Args:
        training: The training images.
        scored: The images on which scores are computed.
        allowed: Whether the image sets may share images.

    Raises:
        DataError: The count is not 0, and `allowed` is False.
    """
    pairs = _find_shared_images(training, scored)
    if pairs and not allowed:
        raise DataError(
            f"the training image {pairs[0][0]} is identical to the scored image {pairs[0][1]}. "
            f"{len(pairs)} of {len(scored)} scored images of {_title(scored)} are training images. "
            "Remove them from one of the splits, or allow shared images",
            hint=("data.allow_overlap=true",),
        )
    return len(pairs)


def _find_shared_images(
    training: ImageSet, scored: ImageSet
) -> Sequence[tuple[Path | str, Path | str]]:
    """Find scored images that are identical to a training image.

    Return pairs of a training image and an identical scored image, as paths or ids.
    """
    training_files, scored_files = underlying_files(training), underlying_files(scored)
    if training_files is None or scored_files is None:
        training_digests, scored_digests = image_digests(training), image_digests(scored)
        if training_digests is None or scored_digests is None:
            return []
        first_ids = dict(zip(reversed(training_digests), reversed(training.ids), strict=True))
        scored_ids = zip(scored_digests, scored.ids, strict=True)
        return [(first_ids[digest], name) for digest, name in scored_ids if digest in first_ids]
    (training_set, training_indices), (scored_set, scored_indices) = training_files, scored_files
    training_hashes = training_set.file_hashes()[training_indices]
    scored_hashes = scored_set.file_hashes()[scored_indices]
    is_certain = training_set.options.fingerprint == "content"

    @cache
    def copies_by_content(file_hash: int) -> dict[str, int]:
        indices = training_indices[training_hashes == file_hash].tolist()
        return {training_set.content_sha256(index): index for index in reversed(indices)}

    pairs = []
    for position in np.flatnonzero(np.isin(scored_hashes, training_hashes)):
        index, file_hash = int(scored_indices[position]), int(scored_hashes[position])
        if is_certain:
            copy = int(training_indices[np.argmax(training_hashes == file_hash)])
        else:
            copy = copies_by_content(file_hash).get(scored_set.content_sha256(index))
        if copy is not None:
            pairs.append((training_set.path(copy), scored_set.path(index)))
    return pairs


def image_digests(images: ImageSet) -> list[str] | None:
    """Return a hash of each image without its annotations, or None if no hashes are available.

    For images with a corruption such as added noise, the clean images are hashed.
    """
    if own := getattr(images, "image_digests", None):
        return own()
    inner = getattr(images, "images", None)
    digests = image_digests(inner) if isinstance(inner, ImageSet) else None
    if digests is not None and isinstance(images, ImageSubset):
        return [digests[index] for index in images.indices]
    return digests


def _title(images: ImageSet) -> str:
    return f"{images.name} {images.split}"
