"""Data too large to be read once: its files are known by their sizes and times."""

from typing import Protocol, runtime_checkable

from ssl_bench.data.samples import Dataset, ImageSet


@runtime_checkable
class OnDisk(Protocol):
    """An `ImageSet` with a choice of what its fingerprint is made of."""

    def by_stat(self) -> ImageSet: ...


def known_by_stat(images: ImageSet) -> ImageSet:
    """The same images, their files known by size and time; what lies in no file stays as it is."""
    return images.by_stat() if isinstance(images, OnDisk) else images


class DatasetByStat:
    """A dataset whose fingerprints trust sizes and times, and say so by their mark."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    @property
    def name(self) -> str:
        return self._dataset.name

    @property
    def supports(self) -> frozenset[str]:
        return self._dataset.supports

    def train(self) -> ImageSet:
        return known_by_stat(self._dataset.train())

    def val(self) -> ImageSet:
        return known_by_stat(self._dataset.val())

    def discovery(self) -> ImageSet:
        return known_by_stat(self._dataset.discovery())

    def images(self) -> ImageSet:
        return known_by_stat(self._dataset.images())
