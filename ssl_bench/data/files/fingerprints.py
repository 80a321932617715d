"""Fingerprints: one sha256 that stands for all that a split of a dataset holds."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import UInt64

from ssl_bench.data.samples import Dataset, DatasetView, ImageSet

FingerprintKind = Literal["content", "stat"]
"""Of the bytes of all files, or of their sizes and times alone."""

# No character that a name of a file cannot hold everywhere, because files are named so.
_STAT = "stat-"


def fingerprint_of(rows: Iterable[Sequence[object]], kind: FingerprintKind = "content") -> str:
    """Hexadecimal sha256 over rows of plain JSON types, marked where the bytes were not read."""
    digest = hashlib.sha256()
    for row in rows:
        # JSON, because a name may hold whatever else would stand between two names.
        digest.update(json.dumps(row).encode() + b"\n")
    return (_STAT if kind == "stat" else "") + digest.hexdigest()


class Known(NamedTuple):
    """By what the images of a split are known again: all together, and each of them.

    Attributes:
        entries: Of each image and what belongs to it a number that no other image changes.
    """

    fingerprint: str
    marks: UInt64[np.ndarray, " images"]
    entries: UInt64[np.ndarray, " images"]


@dataclass(frozen=True)
class ReadOptions:
    """How files are read, as `data.fingerprint` and `data.bits` say.

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

    def known_by(self, first: Sequence[object], rows: Iterable[tuple[str, ...]]) -> Known:
        """What a set is known by: a first row, and one for each image: id, file, what else."""
        marks: list[int] = []
        entries: list[int] = []
        seen = None if self.bits == 16 else self.bits

        def noted() -> Iterator[Sequence[object]]:
            yield first
            for row in rows:
                marks.append(_mark(row[1]))
                entries.append(_mark(repr((first, row[1:], seen))))
                yield row

        found = self.fingerprint_of(noted())
        return Known(found, np.array(marks, np.uint64), np.array(entries, np.uint64))


def read_as(images: ImageSet, options: ReadOptions) -> ImageSet:
    """The same images, their files read so; what lies in no file stays as it is."""
    own = getattr(images, "read_as", None)
    return own(options) if own else images


def dataset_read_as(dataset: Dataset, options: ReadOptions) -> DatasetView:
    """A dataset whose files are read as it is asked for."""
    return DatasetView(dataset, lambda _, images: read_as(images, options))


def entries_of(images: ImageSet) -> list[str]:
    """What each image is known by; where a set cannot say, its fingerprint and the id."""
    fingerprint = images.fingerprint()
    # Of times and sizes nothing is sure but for a set as a whole.
    entries = getattr(images, "entries", None)
    if entries and kind_of(fingerprint) == "content":
        return entries()
    return [f"{fingerprint} {image_id}" for image_id in images.ids]


def marks_of(images: ImageSet) -> UInt64[np.ndarray, " images"]:
    """Of each image its mark; where a set has none, that of the whole set."""
    marks = getattr(images, "marks", None)
    return marks() if marks else np.full(len(images), _mark(images.fingerprint()), np.uint64)


def _mark(identity: str) -> int:
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8])


def extended(fingerprint: str, *more: Sequence[object]) -> str:
    """The fingerprint of what adds something to the data of another; of the same kind."""
    return fingerprint_of([[fingerprint], *more], kind_of(fingerprint))


def kind_of(fingerprint: str) -> FingerprintKind:
    return "stat" if fingerprint.startswith(_STAT) else "content"


def shortened(fingerprint: str) -> str:
    """Its first six digits, and its mark."""
    mark = _STAT if kind_of(fingerprint) == "stat" else ""
    return fingerprint[: len(mark) + 6]
