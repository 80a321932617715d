"""Sha256 of many files, read once and known from then on by their state on disk.

They are kept in the user's cache, 64 bytes a file, never beside the data.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple, TypeVar

from ssl_bench.data.files.fingerprints import FingerprintKind
from ssl_bench.data.locations import cache_folder
from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.files import write_atomically
from ssl_bench.system.progress import say, say_once, show_progress

Item = TypeVar("Item")
Result = TypeVar("Result")

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
        self._path = None
        try:
            name = _hashed(str(subject.absolute()), _KEY).hex()
            self._path = cache_folder(None) / "digests" / name
        except MachineError as error:
            _complain(str(error))
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


def identities(
    parts: Iterable[Part], kind: FingerprintKind, *, title: str, folder: Path, total: int
) -> Generator[str, None, None]:
    """Of each part its sha256, or, where these are trusted, size and time of its file.

    Closing the iterator, or an interrupt, keeps what has been read so far.

    Args:
        parts: What is read.
        kind: Whether it is read at all.
        title: What messages call all of it.
        folder: Most of it lies there; what is remembered of it is kept together.
        total: Number of parts.

    Raises:
        DataError: a file cannot be read, or changes meanwhile.
    """
    # Few enough for a thread in one go that none is left with all the large ones.
    together = min(_MOST_TOGETHER, 1 + total // 256)
    if kind == "stat":
        states = in_threads(lambda part: file_state(part.file), parts, together=together)
        yield from (f"{state.size} {state.mtime_ns}" for _, state in states)
        return
    cache = DigestCache(folder)
    start = saved = time.monotonic()
    is_reported = False
    try:
        # Closed before the cache is saved, which then has what its threads were reading.
        with closing(in_threads(partial(_read_or_known, cache), parts, together=together)) as found:
            for _, digest in show_progress(found, f"sha256 of {title}", total):
                now = time.monotonic()
                if not is_reported and now - start > _PATIENCE_SECONDS:
                    say(
                        f"reading the {total:,} files of {title} for their sha256, which is then "
                        "remembered; data.fingerprint=stat trusts sizes and times instead"
                    )
                    is_reported = True
                # For the case that somebody kills this.
                if now - saved > _SAVE_SECONDS:
                    cache.save()
                    saved = now
                yield digest.hex()
    finally:
        cache.save()


def digest_of(path: Path) -> str:
    """Hexadecimal sha256 of a file.

    Raises:
        DataError: as `identities`.
    """
    return next(identities([Part(path)], "content", title=path.name, folder=path, total=1))


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
    return FileState(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _read_or_known(cache: DigestCache, part: Part) -> bytes:
    begun, name = time.time_ns(), f"{part.file.absolute()}\0{part.place}"
    before = file_state(part.file)
    known = cache.get(name, before)
    if known is not None:
        return known
    digest = _read(part)
    after = file_state(part.file)
    if (after.size, after.mtime_ns) != (before.size, before.mtime_ns):
        raise DataError(f"{part.file} changes while it is read; wait until it is complete")
    if after == before and before.is_settled(begun):
        cache.put(name, before, digest)
    return digest


def _read(part: Part) -> bytes:
    if part.read is not None:
        return hashlib.sha256(part.read()).digest()
    try:
        with part.file.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise _unreadable(part.file, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}); fetch it again")


def in_threads(
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
