"""Fingerprints: one sha256 that stands for all that a split of a dataset holds.

That of each file is read once and known from then on by the state of the file on disk. They are
kept in the user's cache, 64 bytes a file, never beside the data.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt64

from ssl_bench.data.samples import Dataset, DatasetView, ImageSet
from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.files import cache_folder, open_trusted, write_atomically
from ssl_bench.system.output import say, say_once, show_progress

Item = TypeVar("Item")
Result = TypeVar("Result")

FingerprintKind = Literal["content", "stat"]
"""Of the bytes of all files, or of their sizes and times alone."""

# No character that a name of a file cannot hold everywhere, because files are named so.
_STAT = "stat-"
_THREADS = 8
_AHEAD = 1024
_MOST_TOGETHER = 32
_SAVE_SECONDS = 60.0
_PATIENCE_SECONDS = 10.0
# Count up when keys or states mean something else.
_HEADER = b"ssl-bench sha256 of files 1\n"
# What it is the digest of, the state of the file it was in, the digest.
_KEY, _STATE, _DIGEST = 16, 16, 32
_ENTRY = _KEY + _STATE + _DIGEST
_START = len(_HEADER) + _DIGEST
# FAT counts in two seconds; a file that was written so recently may change and keep its times.
_RACY_NS = 2 * 10**9


def fingerprint_of(rows: Iterable[Sequence[object]], kind: FingerprintKind = "content") -> str:
    """Hexadecimal sha256 over rows of plain JSON types, marked where the bytes were not read."""
    digest = hashlib.sha256()
    for row in rows:
        # JSON, because a name may hold whatever else would stand between two names.
        digest.update(json.dumps(row).encode() + b"\n")
    return (_STAT if kind == "stat" else "") + digest.hexdigest()


def extend_fingerprint(fingerprint: str, *more: Sequence[object]) -> str:
    """The fingerprint of what adds something to the data of another; of the same kind."""
    return fingerprint_of([[fingerprint], *more], fingerprint_kind(fingerprint))


def fingerprint_kind(fingerprint: str) -> FingerprintKind:
    return "stat" if fingerprint.startswith(_STAT) else "content"


def abbreviate_fingerprint(fingerprint: str) -> str:
    """Its first six digits, and its mark."""
    mark = _STAT if fingerprint_kind(fingerprint) == "stat" else ""
    return fingerprint[: len(mark) + 6]


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
        return found if self.bits in (None, 16) else extend_fingerprint(found, ["bits", self.bits])

    def hash_rows(
        self, first: Sequence[object], rows: Iterable[tuple[str, ...]]
    ) -> tuple[str, UInt64[np.ndarray, " images"], UInt64[np.ndarray, " images"]]:
        """By what a set is known again, of a first row and one for each image: id, file, what else.

        Returns:
            Its fingerprint; of each file a number, and of each image with all that belongs to it.
        """
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
        return found, np.array(marks, np.uint64), np.array(entries, np.uint64)


def with_read_options(images: ImageSet, options: ReadOptions) -> ImageSet:
    """The same images, their files read so; what lies in no file stays as it is."""
    own = getattr(images, "with_read_options", None)
    return own(options) if own else images


def dataset_with_read_options(dataset: Dataset, options: ReadOptions) -> DatasetView:
    """A dataset whose files are read as it is asked for."""
    return DatasetView(dataset, lambda _, images: with_read_options(images, options))


def sample_hashes(images: ImageSet) -> list[str]:
    """What each image is known by; where a set cannot say, its fingerprint and the id."""
    fingerprint = images.fingerprint()
    # Of times and sizes nothing is sure but for a set as a whole.
    entries = getattr(images, "sample_hashes", None)
    if entries and fingerprint_kind(fingerprint) == "content":
        return entries()
    return [f"{fingerprint} {image_id}" for image_id in images.ids]


def file_hashes(images: ImageSet) -> UInt64[np.ndarray, " images"]:
    """Of each image its mark; where a set has none, that of the whole set."""
    marks = getattr(images, "file_hashes", None)
    return marks() if marks else np.full(len(images), _mark(images.fingerprint()), np.uint64)


def _mark(identity: str) -> int:
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8])


class Part(NamedTuple):
    """Bytes that a file holds.

    Attributes:
        place: Where in the file they are; empty for the whole of it.
        read: Gives them, where they are not the whole file.
    """

    file: Path
    place: str = ""
    read: Callable[[], bytes] | None = None


def identify_parts(
    parts: Iterable[Part], kind: FingerprintKind, *, title: str, folder: Path, total: int
) -> Generator[str, None, None]:
    """Of each part its sha256, or, where these are trusted, size and time of its file.

    Most of them lie in one folder; what is remembered of it is kept together. Closing the
    iterator, or an interrupt, keeps what has been read so far.

    Raises:
        DataError: a file cannot be read, or changes meanwhile.
    """
    # Few enough for a thread in one go that none is left with all the large ones.
    together = min(_MOST_TOGETHER, 1 + total // 256)
    if kind == "stat":
        states = map_in_threads(lambda part: file_state(part.file), parts, together=together)
        yield from (f"{size} {mtime_ns}" for _, (size, mtime_ns, *_) in states)
        return
    cache, start = DigestCache(folder), time.monotonic()
    saved, is_told = start, False

    def digest(part: Part) -> bytes:
        name = f"{part.file.absolute()}\0{part.place}"
        return cache.get_or_compute(name, [part.file], partial(_read, part))

    try:
        # Closed before the cache is saved, which then has what its threads were reading.
        with closing(map_in_threads(digest, parts, together=together)) as found:
            for _, one in show_progress(found, f"sha256 of {title}", total):
                now = time.monotonic()
                if not is_told and now - start > _PATIENCE_SECONDS:
                    say(
                        f"reading the {total:,} files of {title} for their sha256, which is then "
                        "remembered; data.fingerprint=stat trusts sizes and times instead"
                    )
                    is_told = True
                # For the case that somebody kills this.
                if now - saved > _SAVE_SECONDS:
                    cache.save()
                    saved = now
                yield one.hex()
    finally:
        cache.save()


def cached_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file; errors are those of `identify_parts`."""
    return next(identify_parts([Part(path)], "content", title=path.name, folder=path, total=1))


def _read(part: Part) -> bytes:
    if part.read is not None:
        return hashlib.sha256(part.read()).digest()
    try:
        with part.file.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise _unreadable(part.file, error) from error


def file_state(path: Path) -> tuple[int, int, int, int]:
    """All that changes when a file does, short of reading it.

    The device is left out: network folders get another number on every machine and at every start.

    Returns:
        Size, times of the last change of what it holds and of anything, in nanoseconds, of which no
        program can set the second back, and the number of the file.

    Raises:
        DataError: it is not there, a link to nothing, or no file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no file; move it out of the folder")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}); fetch it again")


class DigestCache:
    """Digests by what they are of and the state of the files; a damaged one is as good as none.

    Threads share it. Processes that write the same one lose entries at worst, which are computed
    again.

    Args:
        subject: Folder or file whose digests are kept together.
    """

    def __init__(self, subject: Path) -> None:
        self._path: Path | None = None
        try:
            name = _hashed(str(subject.absolute()), _KEY).hex()
            self._path = cache_folder(None) / "digests" / name
        except MachineError as error:
            _complain(str(error))
        self._known = {} if self._path is None else _kept_in(self._path)
        self._new: dict[bytes, bytes] = {}
        self._lock = Lock()

    def get_or_compute(self, name: str, files: Sequence[Path], find: Callable[[], bytes]) -> bytes:
        """The digest that `find` gives of files, or gave when they were as they are.

        Raises:
            DataError: a file is none, or changes meanwhile; or what `find` raises.
        """
        begun, before = time.time_ns(), [file_state(path) for path in files]
        key, state = _hashed(name, _KEY), _hashed(" ".join(map(str, before)), _STATE)
        entry = self._known.get(key, b"")
        if entry[:_STATE] == state:
            return entry[_STATE:]
        digest = find()
        after = [file_state(path) for path in files]
        for path, one, other in zip(files, before, after, strict=True):
            if one[:2] != other[:2]:
                raise DataError(f"{path} changes while it is read; wait until it is complete")
        # Only where a later change is sure to give another state.
        latest = max(changed_ns for _, *times, _ in before for changed_ns in times)
        if after == before and latest < begun - _RACY_NS:
            with self._lock:
                self._new[key] = state + digest
        return digest

    def save(self) -> None:
        """Add what is new to the file; where that fails, say so once."""
        with self._lock:
            new, self._new = self._new, {}
        if not new or self._path is None:
            return
        # Anew, because other processes may have written since.
        body = b"".join(k + v for k, v in (_kept_in(self._path) | new).items())
        content = _HEADER + hashlib.sha256(body).digest() + body
        try:
            write_atomically(self._path, lambda file: file.write(content))
        except MachineError as error:
            _complain(f"{self._path.parent} cannot be written ({error.__cause__})")


def _kept_in(path: Path) -> dict[bytes, bytes]:
    try:
        with open_trusted(path) as file:
            content = file.read()
    except OSError:
        return {}
    body = content[_START:]
    # What is whole is of whole entries.
    if content[:_START] != _HEADER + hashlib.sha256(body).digest():
        return {}
    starts = range(0, len(body), _ENTRY)
    return {body[i : i + _KEY]: body[i + _KEY : i + _ENTRY] for i in starts}


def _hashed(text: str, size: int) -> bytes:
    return hashlib.sha256(os.fsencode(text)).digest()[:size]


def _complain(reason: str) -> None:
    say_once(
        f"the sha256 of files is not kept for the next time: {reason}; XDG_CACHE_HOME=DIR moves it"
    )


def map_in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], *, together: int = 1
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with what `work` makes of it, in order; items are taken as they are needed.

    Closing it waits for what is in work and begins nothing more.

    A thread takes some `together` in one go, for work that is shorter than handing it over.
    """
    stopped = Event()

    def work_on_all(chunk: list[Item]) -> list[tuple[Item, Result]]:
        return [(item, work(item)) for item in chunk if not stopped.is_set()]

    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, together)), [])
    pool = ThreadPoolExecutor(_THREADS)
    try:
        # Piece by piece, because the pool would queue a million at once.
        while piece := list(islice(chunks, _AHEAD)):
            for pairs in pool.map(work_on_all, piece):
                yield from pairs
    finally:
        # Whoever is interrupted does not wait for what nobody wants any more.
        stopped.set()
        pool.shutdown(cancel_futures=True)
