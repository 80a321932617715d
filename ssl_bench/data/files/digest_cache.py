"""The sha256 of files that were read before, kept in the user's cache, never beside the data."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ssl_bench.data.locations import cache_folder
from ssl_bench.errors import MachineError
from ssl_bench.system.files import remove_orphans, write_atomically
from ssl_bench.system.progress import say_once

# Count up when keys or states mean something else.
_HEADER = b"ssl-bench sha256 of files 1\n"
# What it is the digest of, the state of the file it was in, the digest.
_KEY, _STATE, _DIGEST = 16, 16, 32
_ENTRY = _KEY + _STATE + _DIGEST
_START = len(_HEADER) + _DIGEST
# 64 bytes a file: all of ImageNet takes 82 MB.
_MOST_BYTES = 2**30
_MOST_FILES = 1000
# FAT counts in two seconds; a file that was written so recently may change and keep its times.
_RACY_NS = 2 * 10**9

_unsaved: dict[Path, dict[bytes, bytes]] = {}


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
        self._known = {} if self._path is None else _read(self._path) | _unsaved.get(self._path, {})
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
        """Add what is new to the file; where that fails, say so once and remember it."""
        with self._lock:
            new, self._new = self._new, {}
        if not new or self._path is None:
            return
        # Anew, because other processes may have written since.
        body = b"".join(k + v for k, v in (_read(self._path) | new).items())
        content = _HEADER + hashlib.sha256(body).digest() + body
        try:
            write_atomically(self._path, lambda file: file.write(content))
            _prune(self._path.parent)
        except MachineError as error:
            _complain(f"{self._path.parent} cannot be written ({error.__cause__})")
            _unsaved.setdefault(self._path, {}).update(new)


def _place(subject: str) -> Path | None:
    try:
        folder = cache_folder(None)
    except MachineError as error:
        _complain(str(error))
        return None
    return folder / "digests" / _hashed(subject, _KEY).hex()


def _read(path: Path) -> dict[bytes, bytes]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        content = path.read_bytes()
        # Those used last are kept longest.
        os.utime(path)
    except OSError:
        return {}
    body = content[_START:]
    is_whole = content[:_START] == _HEADER + hashlib.sha256(body).digest()
    if not is_whole or len(body) % _ENTRY:
        return {}
    starts = range(0, len(body), _ENTRY)
    return {body[i : i + _KEY]: body[i + _KEY : i + _ENTRY] for i in starts}


def _prune(folder: Path) -> None:
    """Delete what was used longest ago where there is too much, and what killed writers left."""
    found = []
    for path in folder.iterdir():
        # Another process may be quicker.
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(found, reverse=True)):
        total += size
        if number and (total > _MOST_BYTES or number >= _MOST_FILES):
            with suppress(OSError):
                path.unlink()
    remove_orphans(folder)


def _hashed(text: str, size: int) -> bytes:
    return hashlib.sha256(os.fsencode(text)).digest()[:size]


def _complain(reason: str) -> None:
    say_once(
        f"the sha256 of files is not kept for the next time: {reason}; XDG_CACHE_HOME=DIR moves it"
    )
