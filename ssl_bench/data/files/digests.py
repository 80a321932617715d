"""Sha256 of many files, read once and known from then on by their state on disk."""

import hashlib
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ssl_bench.data.files.digest_cache import DigestCache, FileState
from ssl_bench.data.files.fingerprints import FingerprintKind
from ssl_bench.data.files.threads import in_threads
from ssl_bench.errors import DataError
from ssl_bench.system.progress import say, show_progress

_BLOCK = 2**20
_MOST_TOGETHER = 32
_SAVE_SECONDS = 60.0
_PATIENCE_SECONDS = 10.0


class Part(NamedTuple):
    """Bytes that a file holds.

    Attributes:
        place: Where in the file they are; empty for the whole of it.
        read: Gives them, where they are not the whole file.
    """

    file: Path
    place: str = ""
    read: Callable[[], bytes] | None = None

    @property
    def name(self) -> str:
        return f"{self.file.absolute()}\0{self.place}"


@dataclass(frozen=True)
class Reading:
    """What is read, for messages, and with what it is remembered.

    Attributes:
        subject: Folder or file that most of it lies in.
        total: Number of parts.
    """

    title: str
    subject: Path
    total: int

    @property
    def together(self) -> int:
        """Parts a thread takes in one go: few enough that none is left with all the large ones."""
        return min(_MOST_TOGETHER, 1 + self.total // 256)


def identities(
    parts: Iterable[Part], reading: Reading, kind: FingerprintKind
) -> Generator[str, None, None]:
    """Of each part its sha256, or, where these are trusted, size and time of its file.

    Closing the iterator, or an interrupt, keeps what has been read so far.

    Raises:
        DataError: a file cannot be read, or changes meanwhile.
    """
    return _stamps(parts, reading) if kind == "stat" else _digests(parts, reading)


def digest_of(path: Path) -> str:
    """Hexadecimal sha256 of a file.

    Raises:
        DataError: as `identities`.
    """
    reading = Reading(path.name, path, 1)
    return next(_digests([Part(path)], reading))


def file_state(path: Path) -> FileState:
    """Size, times and number of a file.

    Raises:
        DataError: it is not there, a link to nothing, or no file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no file; move it out of the folder")
    return FileState.of(status)


def _stamps(parts: Iterable[Part], reading: Reading) -> Generator[str, None, None]:
    def stamp(part: Part) -> str:
        state = file_state(part.file)
        return f"{state.size} {state.mtime_ns}"

    for _, found in in_threads(stamp, parts, together=reading.together):
        yield found


def _digests(parts: Iterable[Part], reading: Reading) -> Generator[str, None, None]:
    cache = DigestCache(reading.subject)

    def digest(part: Part) -> str:
        return _read_or_known(part, cache).hex()

    try:
        # Closed before the cache is saved, which then has what its threads were reading.
        with closing(in_threads(digest, parts, together=reading.together)) as pairs:
            found = (one for _, one in pairs)
            shown = show_progress(found, f"sha256 of {reading.title}", reading.total)
            yield from _kept(shown, cache, reading)
    finally:
        cache.save()


def _kept(found: Iterable[str], cache: DigestCache, reading: Reading) -> Iterator[str]:
    """Save now and then, for the case that somebody kills this."""
    start = saved = time.monotonic()
    is_reported = False
    for digest in found:
        now = time.monotonic()
        if not is_reported and now - start > _PATIENCE_SECONDS:
            say(
                f"reading the {reading.total:,} files of {reading.title} for their sha256, which "
                "is then remembered; data.fingerprint=stat trusts sizes and times instead"
            )
            is_reported = True
        if now - saved > _SAVE_SECONDS:
            cache.save()
            saved = now
        yield digest


def _read_or_known(part: Part, cache: DigestCache) -> bytes:
    begun = time.time_ns()
    before = file_state(part.file)
    known = cache.get(part.name, before)
    if known is not None:
        return known
    digest = _read(part)
    after = file_state(part.file)
    if (after.size, after.mtime_ns) != (before.size, before.mtime_ns):
        raise DataError(f"{part.file} changes while it is read; wait until it is complete")
    if after == before and before.is_settled(begun):
        cache.put(part.name, before, digest)
    return digest


def _read(part: Part) -> bytes:
    digest = hashlib.sha256()
    for block in _blocks(part):
        digest.update(block)
    return digest.digest()


def _blocks(part: Part) -> Iterator[bytes]:
    if part.read is not None:
        yield part.read()
        return
    try:
        with part.file.open("rb", buffering=0) as file:
            yield from iter(partial(file.read, _BLOCK), b"")
    except OSError as error:
        raise _unreadable(part.file, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}); fetch it again")
