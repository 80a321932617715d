"""Sha256 of many files, read once and known from then on by their state on disk.

They are kept in the user's cache, 64 bytes a file, never beside the data.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ssl_bench.data.files.fingerprints import FingerprintKind
from ssl_bench.data.files.threads import in_threads
from ssl_bench.data.locations import cache_folder
from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.files import write_atomically
from ssl_bench.system.progress import say, say_once, show_progress

_BLOCK = 2**20
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


class FileState(NamedTuple):
    """All that changes when a file does, short of reading it.

    The device is left out: network folders get another number on every machine and at every start.

    Attributes:
        ctime_ns: Of the last change of anything; no program can set it back.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_settled(self, now_ns: int) -> bool:
        """Whether a change after `now_ns` is sure to give another state."""
        return max(self.mtime_ns, self.ctime_ns) < now_ns - _RACY_NS


class DigestCache:
    """Digests by what they are of and the state of the file; a damaged one is as good as none.

    Threads share it. Processes that write the same one lose entries at worst, which are computed
    again.

    Args:
        subject: Folder or file whose digests are kept together.
    """

    def __init__(self, subject: Path) -> None:
        self._path = _place(str(subject.absolute()))
        self._known = {} if self._path is None else _kept_in(self._path)
        self._new: dict[bytes, bytes] = {}
        self._lock = Lock()

    def get(self, name: str, state: FileState) -> bytes | None:
        entry = self._known.get(_hashed(name, _KEY))
        if entry is None or entry[:_STATE] != _hashed(repr(tuple(state)), _STATE):
            return None
        return entry[_STATE:]

    def put(self, name: str, state: FileState, digest: bytes) -> None:
        with self._lock:
            self._new[_hashed(name, _KEY)] = _hashed(repr(tuple(state)), _STATE) + digest

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


def _place(subject: str) -> Path | None:
    try:
        folder = cache_folder(None)
    except MachineError as error:
        _complain(str(error))
        return None
    return folder / "digests" / _hashed(subject, _KEY).hex()


def _kept_in(path: Path) -> dict[bytes, bytes]:
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    body = content[_START:]
    is_whole = content[:_START] == _HEADER + hashlib.sha256(body).digest()
    if not is_whole or len(body) % _ENTRY:
        return {}
    starts = range(0, len(body), _ENTRY)
    return {body[i : i + _KEY]: body[i + _KEY : i + _ENTRY] for i in starts}


def _hashed(text: str, size: int) -> bytes:
    return hashlib.sha256(os.fsencode(text)).digest()[:size]


def _complain(reason: str) -> None:
    say_once(
        f"the sha256 of files is not kept for the next time: {reason}; XDG_CACHE_HOME=DIR moves it"
    )


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
