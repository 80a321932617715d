"""Write files atomically, open files safely, mark output folders, and choose names of files."""

import errno
import hashlib
import os
import re
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import chain, takewhile
from pathlib import Path
from typing import BinaryIO

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.system.output import print_message_once

try:
    import fcntl
except ImportError:
    # Windows does not support these locks.
    fcntl = None

# Flags to open a file in binary mode, without waiting for the writer of a pipe, and without letting
# a terminal control this process. Windows lacks the last two, and other systems lack the first.
_READ = os.O_RDONLY | sum(getattr(os, f"O_{name}", 0) for name in ("BINARY", "NONBLOCK", "NOCTTY"))
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


# Write files.

_TEMPORARY_NAME = re.compile(r"\.ssl-bench-[0-9a-f]{32}\.tmp")
_ORPHAN_SECONDS = 3600.0
_ORPHAN_SECONDS_WITHOUT_LOCKS = 86_400.0


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash or a full disk never leaves a partial file.

    Missing parent folders are created.

    Args:
        path: Path of the file.
        write: Function that writes the content to an open binary file.

    Raises:
        MachineError: The folder cannot be written or the disk is full. The old file is kept.
    """
    try:
        with atomic_file(path) as file:
            write(file)
    except OSError as error:
        raise MachineError(
            f"cannot write {path}: {error.strerror or error}. Free space on the disk or choose "
            "another folder"
        ) from error


def write_text_atomically(path: Path, text: str) -> None:
    """Write text as UTF-8 so that a crash or a full disk never leaves a partial file.

    If the text contains a file name that is not valid UTF-8, its bytes are written unchanged.
    """
    write_atomically(path, lambda file: file.write(text.encode(errors="surrogateescape")))


@contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """Open a temporary file in the same folder, and rename it to `path` if no error occurs.

    After this context has ended, the file survives a power failure, because its content and its
    name are flushed to the disk. The temporary file is locked while it is written, so that
    `remove_orphans` does not delete it.

    Raises:
        OSError: The file cannot be written. The old file is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # This name does not contain the name of `path`, which may already have the maximum length.
    temporary = path.with_name(f".ssl-bench-{uuid.uuid4().hex}.tmp")
    # Unlike tempfile.mkstemp, this lets other users read the file if the umask allows it. The file
    # is never world-writable, because `open_trusted` would refuse it.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o664)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            # Another process may hold the lock for a moment, while it runs `remove_orphans`.
            with suppress(BlockingIOError):
                try_lock(descriptor)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def require_writable(folder: Path) -> None:
    """Raise MachineError if files cannot be written to a folder. The folder is not created."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise MachineError(
            f"cannot write to {folder}: {error.strerror}", hint=("--out", "{folder}")
        ) from error


def remove_orphans_below(folder: Path) -> None:
    """Delete temporary files that killed processes left in a folder or its subfolders.

    Links are not followed. Files of running processes are kept.
    """
    if not folder.is_symlink():
        for place, _, _ in os.walk(folder):
            remove_orphans(Path(place))


def remove_orphans(folder: Path, *, idle_seconds: float = _ORPHAN_SECONDS) -> None:
    """Delete temporary files that killed processes left in a folder.

    A locked file is kept, because the lock shows that its process is still running. On some network
    file systems, other hosts cannot see the lock. A file without a visible lock is therefore only
    deleted if it has not changed for `idle_seconds`. If the file system does not support locks, a
    file is only deleted if it has not changed for a day.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            if _TEMPORARY_NAME.fullmatch(path.name):
                _remove_orphan(path, idle_seconds)


def _remove_orphan(path: Path, idle_seconds: float) -> None:
    # An error means that the file is locked, is a link, or is already deleted.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | _NO_LINK | getattr(os, "O_NONBLOCK", 0))
        try:
            status = os.fstat(descriptor)
            if not try_lock(descriptor):
                idle_seconds = max(idle_seconds, _ORPHAN_SECONDS_WITHOUT_LOCKS)
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= idle_seconds:
                path.unlink()
        finally:
            os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed, without waiting for another process.

    Return True if the file is now locked. Return False on Windows and on network file systems
    without locks.

    Args:
        descriptor: File descriptor of the open file.

    Raises:
        BlockingIOError: Another process has locked the file.
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
    """Wait until no other process has locked an open file, then lock it until it is closed.

    `descriptor` is the file descriptor. On Windows, this function has no effect. On some network
    file systems, locking raises OSError.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


# Read files. Three functions open them. `open_regular` opens a file that the user has named.
# `open_trusted` opens a cache file. `open_untrusted` opens a file in a folder that another user may
# have created, such as downloaded results. They check a file after they have opened it, because it
# could be replaced between an earlier check and the opening.


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Links are followed.

    Raises:
        OSError: The file is missing, or it is a folder, pipe or device. Reading a pipe or device
            could block or never end.
    """
    descriptor = os.open(path, _READ)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def describe_substitute(start: bytes) -> str | None:
    """Recognise a file that a failed download or clone left in place of the real file.

    Args:
        start: At least the first 64 bytes of the file.

    Returns:
        A description with a remedy, such as "is empty. Copy or download it again". None if the
        content does not look like such a file.
    """
    start = start.lstrip()
    if not start:
        return "is empty. Copy or download it again"
    if start.startswith(b"<"):
        return "is a web page. Download the file itself"
    if start.startswith(b"version https://git-lfs.github.com/"):
        return "is a Git LFS pointer. Run `git lfs pull` in its repository to get the file itself"
    return None


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_trusted(path: Path) -> BufferedReader:
    """Open a cache file for reading, and refuse a file that any user could have written.

    Results are computed from cache files. The owner of the file must therefore be the current user
    or root. The file may be writable for its group, but not for all users. Links, pipes and devices
    are refused too.

    Raises:
        OSError: The file is missing or refused. `strerror` gives the reason.
    """
    descriptor = os.open(path, _READ | _NO_LINK)
    status = os.fstat(descriptor)
    refusal = ""
    if not stat.S_ISREG(status.st_mode):
        refusal = "not a regular file"
    elif hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        refusal = "the file belongs to another user"
    elif os.name == "posix" and status.st_mode & stat.S_IWOTH:
        refusal = "the file is world-writable"
    if not refusal:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EPERM, refusal, str(path))


def open_untrusted(
    root: Path, path: Path, max_bytes: int, *, checked_folders: set[Path] | None = None
) -> BufferedReader:
    """Open a regular file below the folder `root` for reading, without following links.

    Args:
        root: The folder, which may itself be a link.
        path: File below `root`.
        max_bytes: Maximum size of the file.
        checked_folders: Set of folders in which no link was found. Pass the same set when you read
            many files, so that each folder is checked only once. This function adds folders to it.

    Raises:
        OSError: The file is missing, too large, a link, a pipe or a device, or one of its parent
            folders is a link. `strerror` gives the reason.
    """
    is_checked = checked_folders is not None and path.parent in checked_folders
    if link := _find_link(path.parent if is_checked else root, path):
        reason = "a link" if link == path else f"below the link {link}"
        raise OSError(errno.ELOOP, f"{reason}, and links are not followed", str(path))
    if checked_folders is not None:
        checked_folders.add(path.parent)
    # `_NO_LINK` also refuses a link that has just replaced the file.
    descriptor = os.open(path, _READ | _NO_LINK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file, but a folder, pipe or device", str(path))
    if status.st_size > max_bytes:
        os.close(descriptor)
        reason = f"{status.st_size:,} bytes, expected at most {max_bytes:,}"
        raise OSError(errno.EFBIG, reason, str(path))
    return os.fdopen(descriptor, "rb")


def read_untrusted(
    root: Path, path: Path, max_bytes: int, *, checked_folders: set[Path] | None = None
) -> bytes:
    """Return the content of a regular file below the folder `root`, without following links.

    The file may have at most `max_bytes`. Pass the same set `checked_folders` when you read many
    files, so that each folder is only checked once. OSError is raised if the file is missing or
    refused.
    """
    with open_untrusted(root, path, max_bytes, checked_folders=checked_folders) as file:
        return file.read()


def read_untrusted_folder(
    root: Path, folder: Path, suffix: str, max_bytes: int
) -> Iterator[tuple[str, bytes]]:
    """For each file with a given suffix in a folder, yield its path and content.

    This function is faster than calling `read_untrusted` for each file. If a file is a link or
    below a link, is too large, or cannot be read, its content is b"".

    Args:
        root: Folder that may itself be a link. Links below it are not followed.
        folder: The folder below `root` that contains the files.
        suffix: Last characters of the file names, such as ".json".
        max_bytes: Maximum size of a file.
    """
    is_below_link = _find_link(root, folder) is not None
    try:
        with os.scandir(folder) as entries:
            paths = [entry.path for entry in entries if entry.name.endswith(suffix)]
    except OSError:
        return
    for path in paths:
        content = b""
        with suppress(OSError):
            descriptor = os.open(path, _READ | _NO_LINK)
            try:
                status = os.fstat(descriptor)
                is_allowed = not is_below_link and stat.S_ISREG(status.st_mode)
                if is_allowed and status.st_size <= max_bytes:
                    content = os.read(descriptor, status.st_size)
            finally:
                os.close(descriptor)
        yield path, content


def _find_link(root: Path, path: Path) -> Path | None:
    places = takewhile(lambda place: place != root, chain((path,), path.parents))
    return next((place for place in places if place.is_symlink()), None)


# Files with digests.

# If sha256sum reads a file in binary mode, it writes "*" before the file name.
_DIGEST_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")


def read_digests(sidecar: Path) -> list[tuple[str, str]]:
    """Return the pairs of SHA-256 and file name in a file that `sha256sum` wrote.

    Each SHA-256 is in lower case. The file name is "" if a line contains only a SHA-256. The list
    is empty if the file cannot be read.
    """
    try:
        lines = read_regular(sidecar).decode(errors="replace").splitlines()
    except OSError:
        return []
    matches = (_DIGEST_LINE.fullmatch(line.strip()) for line in lines)
    return [(match[1].lower(), match[2] or "") for match in matches if match]


# Folders that ssl-bench wrote. Datasets ignore them.

REPORT_MARK = ".ssl-bench-report"
"""Name of the file that marks a folder as a report."""
_OUTPUT_MARK = ".ssl-bench-written"
RECORDS_GLOB, IMAGE_IDS_GLOB = "records/*/*/*.json", f"images/{'[0-9a-f]' * 16}.json"
"""Glob patterns, in a folder of results, for records and for files with image ids."""
_RESULT_FILES = ("records.parquet", RECORDS_GLOB, IMAGE_IDS_GLOB)


def mark_as_output(folder: Path) -> None:
    """Mark a folder as output of ssl-bench, so that no dataset reads the images in it.

    A missing folder is created.
    """
    if not (folder / _OUTPUT_MARK).exists():
        write_text_atomically(
            folder / _OUTPUT_MARK, "ssl-bench wrote this and reads no data from it\n"
        )


def is_output(folder: Path) -> bool:
    """Return whether a folder contains images that ssl-bench wrote, such as figures."""
    if any((folder / mark).is_file() for mark in (_OUTPUT_MARK, REPORT_MARK)):
        return True
    # Older versions wrote no file that marks the folder.
    return folder.name == "pictures" and any(
        next(folder.parent.glob(pattern), None) is not None for pattern in _RESULT_FILES
    )


def list_files(root: Path) -> Iterator[str]:
    """Yield the relative paths of all files below a folder.

    The files in a folder come before the files in its subfolders. Links to folders are followed.
    Hidden files and folders are left out. Folders with images that ssl-bench wrote, such as
    figures, are left out too, and a message names the first of them. The folder `root` itself is
    never left out.
    """
    visited: set[str] = set()
    outputs: list[Path] = []
    for name, subfolders, names in os.walk(root, followlinks=True):
        folder, real_path = Path(name), os.path.realpath(name)
        # Without this check, a link to a parent folder would lead to an infinite loop.
        if real_path in visited:
            subfolders.clear()
        elif folder != root and is_output(folder):
            outputs.append(folder)
            subfolders.clear()
        else:
            below_root = folder.relative_to(root)
            subfolders[:] = sorted(child for child in subfolders if child[0] != ".")
            yield from ((below_root / name).as_posix() for name in names if name[0] != ".")
        visited.add(real_path)
    if outputs:
        more = f" and {len(outputs) - 1} more" if len(outputs) > 1 else ""
        print_message_once(
            f"ignored {outputs[0]}{more}, because ssl-bench wrote the pictures there"
        )


# Paths that users enter, and valid names of files for models, datasets and images.

# Limits of common file systems, in bytes.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
_DIGEST_DIGITS = 16
_ENDS_IN_DIGEST = re.compile(rf".*~[0-9a-f]{{{_DIGEST_DIGITS}}}", re.DOTALL)
_SHORT_DIGITS = 8

PACKAGE_FOLDER = Path(__file__).parents[1]
"""Folder of the package `ssl_bench`. In a git checkout, its parent is the root of the checkout."""


def expand_path(text: str | Path) -> Path:
    """Return a path that a user entered, with `~` replaced by the home folder.

    Raises:
        ConfigurationError: The text is not a valid path, or the user in `~USER` does not exist.
    """
    if not is_valid_path(text):
        raise ConfigurationError(
            f"invalid path {str(text)[:100]!r}, expected file and folder names of 1 to "
            f"{_MAX_NAME_BYTES} bytes. The path may begin with ~ or ~USER"
        )
    return Path(text).expanduser()


def is_valid_path(text: str | Path) -> bool:
    """Return whether a text can be the path of a file.

    An empty text is not accepted, because scripts often pass an unset variable by mistake.
    """
    try:
        path = os.fsencode(Path(text).expanduser())
    # The home folder does not exist, or the text contains a surrogate that cannot be encoded.
    except (RuntimeError, ValueError):
        return False
    is_short = len(path) <= _MAX_PATH_BYTES
    has_short_names = all(len(name) <= _MAX_NAME_BYTES for name in path.split(b"/"))
    return bool(str(text)) and b"\0" not in path and is_short and has_short_names


def resolve_links(path: Path) -> Path:
    """Resolve a path as `Path.resolve` does, but also accept a link that points to itself."""
    return Path(os.path.realpath(path))


def cache_folder(configured: str | Path | None) -> Path:
    """Return the configured cache folder, or else `ssl-bench` in XDG_CACHE_HOME or `~/.cache`.

    Raises:
        MachineError: XDG_CACHE_HOME is not an absolute path, and the user has no home folder.
    """
    if configured is not None:
        return expand_path(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "ssl-bench"
    except RuntimeError as error:
        raise MachineError(
            f"cannot choose a cache folder, because the user has no home folder ({error}). Set the "
            "environment variable XDG_CACHE_HOME to the absolute path of a folder"
        ) from error


def file_name(text: str, *, added: int = 0, distinct: bool = False) -> str:
    """Convert a text to a valid file name.

    Each "/" becomes "_". In the following cases, "~" and 16 digits of the text's SHA-256 are
    appended, so that no other text gets the same name:

    - The name would be empty, too long, or hidden because it begins with ".".
    - The text contains a NUL character.
    - The text already ends with "~" and 16 hexadecimal digits.

    Args:
        text: Text of any length.
        added: Number of bytes that the caller adds before and after the name, such as 4 for ".png".
        distinct: Whether to append the digits also if the text contains "/". Any two different
            texts then have different names.
    """
    plain = os.fsencode(re.sub(r"[/\0]", "_", text))
    is_hidden = plain.startswith(b".") or not plain
    is_valid = len(plain) + added <= _MAX_NAME_BYTES and "\0" not in text and not is_hidden
    is_ambiguous = _ENDS_IN_DIGEST.fullmatch(text) or (distinct and "/" in text)
    if is_valid and not is_ambiguous:
        return os.fsdecode(plain)
    digest = hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGEST_DIGITS]
    if is_hidden:
        plain = b"_" + plain
    length = max(0, _MAX_NAME_BYTES - added - 1 - _DIGEST_DIGITS)
    # Do not cut in the middle of a UTF-8 character.
    while length < len(plain) and plain[length] & 0xC0 == 0x80:
        length -= 1
    return f"{os.fsdecode(plain[:length])}~{digest}"


def natural_sort_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that orders numbers in names by value: `run@10` comes before `run@100`."""
    # The parts alternate between text and number. A number may have more digits than `int` accepts,
    # so numbers are compared by their length and then by their digits.
    parts = re.split(r"([0-9]+)", name)
    keys = [(0, part) for part in parts]
    numbers = (part.lstrip("0") for part in parts[1::2])
    keys[1::2] = [(len(number), number) for number in numbers]
    return keys, name


def figure_file_name(image_id: str, *, prefix: str = "") -> str:
    """Return the name of the PNG file for the figure of an image.

    Different ids get different names.

    Args:
        image_id: Id of the image, such as its path in the dataset.
        prefix: Text before the id in the file name.
    """
    added = len(prefix) + len(".png")
    return f"{prefix}{file_name(image_id, added=added, distinct=True)}.png"


TILES = "ssl-bench tiles"
"""Keyword of the text in a figure's PNG file that states where the figure shows which image."""


def figure_title(name: str) -> str:
    """Return the title of a figure, given its file name without suffix.

    If the name ends with "~" and 16 digits of a SHA-256, this ending is removed. Different figures
    may therefore have the same title.
    """
    return name[: -1 - _DIGEST_DIGITS] if _ENDS_IN_DIGEST.fullmatch(name) else name


def figures_folder_name(prefix: str, fingerprint: str) -> str:
    """Return the name of the folder for the figures of one encoder and one set of images.

    If an image changes, the name changes too, so that old and new figures are never mixed.

    Args:
        prefix: Beginning of the name, which consists of the model name and digits of the
            encoder's id.
        fingerprint: Hash of the images and their annotations.
    """
    return f"{prefix}-{short_fingerprint(fingerprint)}"


def figures_folder_prefix(model: str, encoder_id: str) -> str:
    """Return the beginning of the names of all folders with figures of an encoder.

    This prefix consists of the model name and the first eight digits of the encoder's id.
    """
    return f"{model_file_name(model)}-{encoder_id[:_SHORT_DIGITS]}"


def model_file_name(model: str) -> str:
    """Convert the name of a model to a text that can be part of the name of a folder."""
    return file_name(model, added=2 * (1 + _SHORT_DIGITS))


def short_fingerprint(fingerprint: str) -> str:
    """Return the first eight digits of the fingerprint (hash) of a set of images.

    A prefix of the fingerprint, such as "stat-", is left out.
    """
    return fingerprint.rpartition("-")[2][:_SHORT_DIGITS]
