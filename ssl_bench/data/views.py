"""The forms in which a dataset can be asked for, one on top of the other, opened once."""

from dataclasses import fields, is_dataclass, replace

from ssl_bench.data.corruptions import Corruption, corrupted_dataset
from ssl_bench.data.files.fingerprints import FingerprintKind, ReadOptions, dataset_read_as
from ssl_bench.data.limited import limited_dataset
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet


def as_asked(
    dataset: Dataset,
    *,
    fingerprint: FingerprintKind,
    bits: int | None,
    limit: int | None,
    corrupt: str | None,
) -> Dataset:
    """A dataset, its files read in one of several ways, perhaps a part of it, perhaps corrupted.

    Args:
        dataset: As its adapter gives it.
        fingerprint: What its files are known by.
        bits: Those that its pictures of 16 bits use.
        limit: At most so many images of each split.
        corrupt: What `Corruption.of` takes.

    Raises:
        ConfigurationError: there is no such corruption.
    """
    found = dataset_read_as(dataset, ReadOptions(fingerprint, bits))
    found = limited_dataset(found, limit) if limit else found
    return corrupted_dataset(found, Corruption.of(corrupt)) if corrupt else found


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
