"""How files are read: what they are known by, and how many bits those of 16 bits use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ssl_bench.data.files.fingerprints import (
    FingerprintKind,
    Known,
    extended,
    fingerprint_of,
    known_by,
)
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
        return self._in_range(fingerprint_of(rows, self.fingerprint))

    def known_by(self, first: Sequence[object], rows: Iterable[tuple[str, ...]]) -> Known:
        """The same, with a mark of each image; see `ssl_bench.data.files.fingerprints`."""
        found = known_by(first, rows, self.fingerprint, None if self.bits == 16 else self.bits)
        return found._replace(fingerprint=self._in_range(found.fingerprint))

    def _in_range(self, fingerprint: str) -> str:
        # With 16 all that can be read without it is read as without it.
        return (
            fingerprint if self.bits in (None, 16) else extended(fingerprint, ["bits", self.bits])
        )


def read_as(images: ImageSet, options: ReadOptions) -> ImageSet:
    """The same images, their files read so; what lies in no file stays as it is."""
    own = getattr(images, "read_as", None)
    return own(options) if own else images


def dataset_read_as(dataset: Dataset, options: ReadOptions) -> DatasetView:
    """A dataset whose files are read as it is asked for."""
    return DatasetView(dataset, lambda _, images: read_as(images, options))
