"""How files are read: what they are known by, and how many bits those of 16 bits use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ssl_bench.data.files.fingerprints import FingerprintKind, extended, fingerprint_of
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet


@dataclass(frozen=True)
class ReadOptions:
    """What `data.fingerprint` and `data.bits` say.

    Attributes:
        fingerprint: Whether it is of what the files hold, which has to be read once, or trusts
            their sizes and times.
        bits: Those that pictures of 16 bits use, where a file does not say it.
    """

    fingerprint: FingerprintKind = "content"
    bits: int | None = None

    def fingerprint_of(self, rows: Iterable[Sequence[object]]) -> str:
        """The fingerprint of a set; another one where the same files are seen in another range."""
        found = fingerprint_of(rows, self.fingerprint)
        # With 16 all that can be read without it is read as without it.
        return found if self.bits in (None, 16) else extended(found, ["bits", self.bits])


@runtime_checkable
class OnDisk(Protocol):
    """An `ImageSet` whose files can be read in several ways."""

    def read_as(self, options: ReadOptions) -> ImageSet: ...


def read_as(images: ImageSet, options: ReadOptions) -> ImageSet:
    """The same images, their files read so; what lies in no file stays as it is."""
    return images.read_as(options) if isinstance(images, OnDisk) else images


class DatasetReadAs(DatasetView):
    """A dataset whose files are read as it is asked for."""

    def __init__(self, dataset: Dataset, options: ReadOptions) -> None:
        super().__init__(dataset)
        self._options = options

    def _given(self, role: str, images: ImageSet) -> ImageSet:
        del role
        return read_as(images, self._options)
