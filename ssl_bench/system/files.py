"""Files that are either complete or not there, and folders that are marked as written."""

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from ssl_bench.errors import MachineError
from ssl_bench.system.progress import say_once

try:
    import fcntl
except ImportError:
    # Windows has no locks of this kind.
    fcntl = None

# Between them `*` marks what sha256sum read as binary.
_DIGEST_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
_LEAVE_TERMINAL = getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
# Only on systems that have links and pipes.
_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_untrusted(
    root: Path, path: Path, most_bytes: int, *, known: set[Path] | None = None
) -> BufferedReader:
    """Open a plain file below a folder that may be somebody else's; no link leads out of it.

    Args:
        root: That folder.
        path: Of the file.
        most_bytes: Larger ones are refused.
        known: Of many files, their folders that are no link nor below one: asked but once.

    Raises:
        OSError: it is a link or below one, a pipe or device, or larger; `strerror` says so.
    """
    top = path.parent
    if known is None or top not in known:
        for place in (top, *top.parents):
            if place == root:
                break
            if place.is_symlink():
                raise _is_link(place, path)
        if known is not None:
            known.add(top)
    # Elsewhere the system says it when the file is opened.
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
        raise _is_link(path, path)
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_LINK_NO_WAIT)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path, path) from error
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        larger = f"{status.st_size:,} bytes, more than {most_bytes:,}"
        raise OSError(errno.EFBIG, larger, str(path))
    raise OSError(errno.EINVAL, "a folder, pipe or device", str(path))


def _is_link(place: Path, path: Path) -> OSError:
    what = "a link" if place == path else f"below the link {place}"
    return OSError(errno.ELOOP, f"{what}, and links are not followed", str(path))


def read_untrusted(
    root: Path, path: Path, most_bytes: int, *, known: set[Path] | None = None
) -> bytes:
    """The bytes of a file that `open_untrusted` opens."""
    with open_untrusted(root, path, most_bytes, known=known) as file:
        return file.read()


def read_folder_within(
    root: Path, folder: Path, suffix: str, most_bytes: int
) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each file of a folder, for thousands of small files.

    The content is b"" for a file that `read_within` would refuse.
    """
    below_root = takewhile(lambda place: place != root, (folder, *folder.parents))
    is_linked = any(place.is_symlink() for place in below_root)
    try:
        with os.scandir(folder) as entries:
            paths = [entry.path for entry in entries if entry.name.endswith(suffix)]
    except OSError:
        return
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | _NO_LINK_NO_WAIT)
        except OSError:
            yield path, b""
            continue
        try:
            status = os.fstat(descriptor)
            is_allowed = not is_linked and stat.S_ISREG(status.st_mode)
            if is_allowed and status.st_size <= most_bytes:
                yield path, os.read(descriptor, status.st_size)
            else:
                yield path, b""
        finally:
            os.close(descriptor)


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
        with atomic_file(path) as file:
            write(file)
    except OSError as error:
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
        ) from error


@contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """A new file that gets the name `path` when the block ends without an error.

    Until then it is locked and has a name that no other process, host or container gives.

    Raises:
        OSError: it cannot be written; an older file stays intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the name of the file within it, which may be as long as names can be.
    temporary = path.with_name(f".ssl-bench-{uuid.uuid4().hex}.tmp")
    # Not tempfile.mkstemp, whose files only their owner may read, whatever the umask says.
    # Nor one that everybody may write, which `open_trusted` would refuse.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o664)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            # Whoever looks for orphans may hold it for a moment.
            with suppress(BlockingIOError):
                try_lock(descriptor)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        if os.name == "posix":
            # Else the rename itself may be lost when the machine loses power.
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
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
        descriptor = os.open(path, os.O_RDWR | _NO_LINK_NO_WAIT)
        try:
            status = os.fstat(descriptor)
            if not try_lock(descriptor):
                idle_seconds = max(idle_seconds, _UNLOCKED_ORPHAN_SECONDS)
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= idle_seconds:
                path.unlink()
        finally:
            os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock a file until it is closed; False on a system or file system without locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def wait_for_lock(descriptor: int) -> None:
    """Wait until no other process holds a file, and lock it until it is closed.

    On a system without locks nothing waits: there, of processes that fetch the same file at the
    same time, the digest tells what they spoilt.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


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


def open_trusted(path: Path) -> BufferedReader:
    """Open a file of a cache for reading: a regular one that nobody else could have written.

    Numbers are computed from such files, so that those of other users (but for root) and those that
    everybody may write are refused, as are links, pipes and devices.

    Raises:
        OSError: There is none, or it is refused; `strerror` says why.
    """
    descriptor = os.open(path, os.O_RDONLY | _NO_LINK_NO_WAIT | _LEAVE_TERMINAL)
    status = os.fstat(descriptor)
    refusal = ""
    if not stat.S_ISREG(status.st_mode):
        refusal = "not a regular file"
    elif hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        refusal = "it belongs to another user"
    elif os.name == "posix" and status.st_mode & stat.S_IWOTH:
        refusal = "everybody may write it"
    if not refusal:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EPERM, refusal, str(path))


def read_regular(path: Path) -> bytes:
    """What a user's file holds; errors are those of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def file_sha256(path: Path) -> str:
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


REPORT_MARK = ".ssl-bench-report"
_MARK = ".ssl-bench-written"
RECORDS, NAMES = "records/*/*/*.json", f"images/{'[0-9a-f]' * 16}.json"
"""Patterns of the files of a folder of results: records, and names of a split's images."""
_STORED = ("records.parquet", RECORDS, NAMES)


def mark_as_output(folder: Path) -> None:
    """Leave word in a folder, made if need be, that its pictures are no data.

    Raises:
        MachineError: it cannot be written.
    """
    if not (folder / _MARK).exists():
        write_text_atomically(folder / _MARK, "ssl-bench wrote this and reads no data from it\n")


def is_output(folder: Path) -> bool:
    """Whether this program wrote the pictures in a folder."""
    if any((folder / mark).is_file() for mark in (_MARK, REPORT_MARK)):
        return True
    # Of versions that left no mark.
    return folder.name == "pictures" and any(
        next(folder.parent.glob(pattern), None) is not None for pattern in _STORED
    )


def list_files(root: Path) -> Iterator[str]:
    """Paths of all files below a folder, those of each folder before those of the folders in it.

    Hidden ones are passed over, and what this program wrote there: pictures beside records,
    reports, generated scenes. A line says so. Links to other folders are followed. `root` itself
    is taken at its word.
    """
    seen: set[str] = set()
    written: list[Path] = []
    for name, children, names in os.walk(root, followlinks=True):
        folder, real = Path(name), os.path.realpath(name)
        # A link to a folder further up would never end.
        if real in seen:
            children.clear()
        elif folder != root and is_output(folder):
            written.append(folder)
            children.clear()
        else:
            below = folder.relative_to(root)
            children[:] = sorted(child for child in children if child[0] != ".")
            yield from ((below / name).as_posix() for name in names if name[0] != ".")
        seen.add(real)
    if written:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        say_once(f"left out, because ssl-bench wrote it: {written[0]}{more}")


def require_writable(folder: Path) -> None:
    """Check before a long computation that files can be written to a folder, without creating it.

    Raises:
        MachineError: They cannot.
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise MachineError(
            f"cannot write to {folder}: {error.strerror}",
            hint=("--out", "{folder}"),
        ) from error


_CHECKSUM = "crc32"


def format_checked_line(content: Mapping[str, Any]) -> str:
    """Return the line of an object, without its end."""
    return json.dumps({**content, _CHECKSUM: _checksum(content)})


def parse_checked_lines(content: bytes, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a log and the content of its lines; a message counts damaged lines.

    A last line without an end is passed over: somebody is writing it, or was killed meanwhile.
    """
    header, *lines = content.decode(errors="replace").split("\n")[:-1] or ["{}"]
    read = [_verified(line) for line in lines]
    found = [one for one in read if one is not None]
    if damaged := len(read) - len(found):
        say_once(f"{path}: {damaged} of {len(read)} lines are damaged and left out")
    return _parsed(header) or {}, found


def _verified(line: str) -> dict[str, Any] | None:
    content = _parsed(line)
    if content is None or content.pop(_CHECKSUM, None) != _checksum(content):
        return None
    return content


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())
