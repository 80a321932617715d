"""Archives onto the disk: as a whole, or nothing of them."""

import posixpath
import shutil
import tarfile
import unicodedata
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ssl_bench.data.files.archive_index import ZIP, Archive, Member
from ssl_bench.data.files.manifests import Shown
from ssl_bench.errors import DataError, MachineError

UNPACKED = (".tar", ZIP)
"""Ends of the names of files that are unpacked; any other is left as it is."""

_CHUNK = 2**20
Opener = Callable[[str], IO[bytes] | None]


def unpack(archive: Path, folder: Path, shown: Shown) -> int:
    """Write the files of a tar or zip archive below a folder.

    Nothing is written before all names are known to stay inside, and a file gets its name when it
    is complete. Files that are there are replaced.

    Returns:
        How many files the archive holds.

    Raises:
        DataError: it is damaged, holds links, a name that leads out of the folder, or two names
            of one file.
        MachineError: the disk is too small or cannot be written.
    """
    members = Archive(archive).members()
    _require_plain(members, archive)
    _require_apart(members, archive)
    require_space(sum(member.size for member in members), folder)
    with _errors_of(archive), _opened(archive) as open_member:
        names = dict.fromkeys(member.name for member in members)
        for name in shown(names, f"unpacking {archive.name}", len(names)):
            _write(open_member, name, folder / name)
    return len(members)


def require_space(size: int, folder: Path) -> None:
    """Find out before hours of work whether so many bytes fit below a folder.

    Raises:
        MachineError: they do not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise MachineError(
            f"{folder} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; free space or "
            "choose another --data-root"
        )


def _require_plain(members: Iterable[Member], archive: Path) -> None:
    link = next((member.name for member in members if member.is_link), None)
    if link is not None:
        raise DataError(
            f"{archive} holds the link {link!r}, which could lead anywhere; it is refused as a "
            "whole: fetch it from where it was published"
        )


def _require_apart(members: Iterable[Member], archive: Path) -> None:
    """Refuse names of which the disk decides whether they are one file."""
    names: dict[str, str] = {}
    for member in members:
        key = unicodedata.normalize("NFC", posixpath.normpath(member.name)).casefold()
        if key in names:
            raise DataError(
                f"{archive} holds {names[key]!r} and {member.name!r}, one file on some disks; it "
                "is refused as a whole: fetch it from where it was published"
            )
        names[key] = member.name


@contextmanager
def _opened(archive: Path) -> Iterator[Opener]:
    if archive.name.lower().endswith(ZIP):
        with zipfile.ZipFile(archive) as opened:
            yield opened.open
    else:
        with tarfile.open(archive, "r:") as opened:
            # By name tarfile would go through all members for each of them.
            by_name = {member.name: member for member in opened.getmembers()}
            yield lambda name: opened.extractfile(by_name[name])


def _write(open_member: Opener, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    source = open_member(name)
    assert source is not None
    try:
        with source, part.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _errors_of(archive: Path) -> Iterator[None]:
    try:
        yield
    # A damaged file first: zlib's errors are none of the system's.
    except (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive} is damaged ({error}); delete it and type the command again"
        ) from error
    except OSError as error:
        raise MachineError(
            f"cannot unpack {archive}: {error.strerror or error}; free space or choose another "
            "--data-root"
        ) from error
