"""Data too large to be read once: its files are known by their sizes and times."""

from typing import Protocol, runtime_checkable

from ssl_bench.data.samples import DatasetView, ImageSet


@runtime_checkable
class OnDisk(Protocol):
    """An `ImageSet` with a choice of what its fingerprint is made of."""

    def by_stat(self) -> ImageSet: ...


def known_by_stat(images: ImageSet) -> ImageSet:
    """The same images, their files known by size and time; what lies in no file stays as it is."""
    return images.by_stat() if isinstance(images, OnDisk) else images


class DatasetByStat(DatasetView):
    """A dataset whose fingerprints trust sizes and times, and say so by their mark."""

    def _given(self, role: str, images: ImageSet) -> ImageSet:
        del role
        return known_by_stat(images)
