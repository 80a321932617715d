"""Files that are either complete or not there."""

import errno
import hashlib
import os
import re
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from ssl_bench.errors import MachineError

_ORPHAN_SECONDS = 3600
# Between them `*` marks what sha256sum read as binary.
_DIGEST_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
_LEAVE_TERMINAL = getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader, a kill or a full disk never sees half of it.

    Raises:
        MachineError: the folder cannot be written or the disk is full; an older file stays intact.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        # Not tempfile.mkstemp, whose files only their owner may read, whatever the umask says.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_atomically` does; undecodable names of files stay as they are."""
    write_atomically(path, lambda file: file.write(text.encode(errors="surrogateescape")))


def remove_orphans(folder: Path) -> None:
    """Delete the temporary files that writers left below a folder when they were killed.

    Only those that nobody has touched for an hour: other processes may be writing theirs.
    """
    latest = time.time() - _ORPHAN_SECONDS
    for path in folder.rglob(".*.tmp"):
        # Another process may be quicker.
        with suppress(OSError):
            if path.stat().st_mtime < latest:
                path.unlink()


def open_regular(path: Path) -> BufferedReader:
    """Open a user's file for reading: one with an end, at once, also behind links.

    Raises:
        OSError: there is none, or it is a folder, a pipe, a socket or a device, which could wait or
            go on for ever.
    """
    # Without waiting for who writes into a pipe, and without taking over a terminal.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _LEAVE_TERMINAL)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "It is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """What a user's file holds; errors are those of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes; errors are those of `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_digests(sidecar: Path) -> list[tuple[str, str]]:
    """The lines `DIGEST  NAME` of `sha256sum`, in lower case; none where nothing can be read.

    A line without a name has an empty one. What is no such line says nothing of any file.
    """
    try:
        lines = read_regular(sidecar).decode(errors="replace").splitlines()
    except OSError:
        return []
    found = (_DIGEST_LINE.fullmatch(line.strip()) for line in lines)
    return [(match[1].lower(), match[2] or "") for match in found if match]


def _sync_folder(folder: Path) -> None:
    # Without this the rename itself may be lost when the machine loses power.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
