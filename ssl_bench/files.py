"""Files that are either complete or not there."""

import fcntl
import hashlib
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ssl_bench.errors import MachineError

_UNFINISHED = re.compile(r"\.ssl-bench-[0-9a-f]{32}\.tmp")
_ORPHAN_SECONDS = 3600.0
# Where files cannot be locked, nobody knows whether their writer is alive.
_UNLOCKED_ORPHAN_SECONDS = 86_400.0


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader, a kill or a full disk never sees half of it.

    Raises:
        MachineError: the folder cannot be written or the disk is full; an older file stays intact.
    """
    try:
        with unfinished(path) as file:
            write(file)
    except OSError as error:
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
        ) from error


@contextmanager
def unfinished(path: Path) -> Iterator[BinaryIO]:
    """A new file that gets the name `path` when the block ends without an error.

    Until then it is locked and has a name that no other process, host or container gives.

    Raises:
        OSError: it cannot be written; an older file stays intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the name of the file within it, which may be as long as names can be.
    temporary = path.with_name(f".ssl-bench-{uuid.uuid4().hex}.tmp")
    # Not tempfile.mkstemp, whose files only their owner may read, whatever the umask says.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            # Whoever looks for orphans may hold it for a moment.
            with suppress(BlockingIOError):
                _lock(descriptor)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_atomically` does; undecodable names of files stay as they are."""
    write_atomically(path, lambda file: file.write(text.encode(errors="surrogateescape")))


def remove_orphans_below(folder: Path) -> None:
    """`remove_orphans` of a folder and those within it; links are not followed."""
    if not folder.is_symlink():
        for place, _, _ in os.walk(folder):
            remove_orphans(Path(place))


def remove_orphans(folder: Path, *, idle_seconds: float = _ORPHAN_SECONDS) -> None:
    """Delete the unfinished files that killed writers left in a folder, and nothing else.

    A writer holds its file locked, and the lock ends with it, in whatever container it ran. Some
    network file systems keep locks from other hosts: where others may write, a file counts as left
    behind only once nobody has touched it for a while; without any locks, for a day.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                _remove_orphan(path, idle_seconds)


def _remove_orphan(path: Path, idle_seconds: float) -> None:
    # Errors: another process was quicker, it is a link, or its writer lives.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not _lock(descriptor):
                idle_seconds = max(idle_seconds, _UNLOCKED_ORPHAN_SECONDS)
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= idle_seconds:
                path.unlink()
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; False on a file system without locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    # Without this the rename itself may be lost when the machine loses power.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
