"""Where the files of a tar or zip archive lie in it, and their bytes. Nothing is unpacked."""

import io
import posixpath
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, cast

from ssl_bench.data.files.images import MAX_PIXELS
from ssl_bench.data.files.inflating import gunzip, inflate, is_possible
from ssl_bench.errors import DataError, MachineError
from ssl_bench.system.files import open_regular, read_regular

PACKED_TAR, ZIP = (".tar.gz", ".tgz"), ".zip"
SUFFIXES = (".tar", *PACKED_TAR, ZIP)
Stream = io.BufferedReader | io.BytesIO

_BLOCK = 512
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Bytes of a zip's list of members, or of one name in a tar: more than those of ten million pictures
# have, and read in one go.
_LONGEST_INDEX = 2**28
_COMMENT = 2**17
MAX_MEMBER = 4 * MAX_PIXELS
"""Bytes of the largest file that is read into memory: four for each pixel that would be decoded."""


class Member(NamedTuple):
    """A file in an archive.

    Attributes:
        offset: Of its first byte in the archive.
        packed: Bytes in the archive.
        size: Bytes of the file.
        is_deflated: Whether the bytes in the archive are compressed.
        is_link: To another file, which says nothing about where the bytes are.
        leads_out: Its name, or what it links to, is not below the folder it is unpacked in.
    """

    name: str
    offset: int
    packed: int
    size: int
    is_deflated: bool = False
    is_link: bool = False
    leads_out: bool = False


@dataclass(frozen=True)
class Archive:
    """An archive on disk or in memory. It holds no open file: workers may share it."""

    path: Path
    content: bytes | None = field(default=None, repr=False)

    @classmethod
    def in_memory(cls, path: Path) -> "Archive":
        """Read an archive with all its files as they are, only gzip around the whole taken off.

        Raises:
            DataError: it cannot be read, or is damaged.
        """
        with _errors_of(path):
            is_packed = path.name.lower().endswith(PACKED_TAR)
            return cls(path, gunzip(path) if is_packed else read_regular(path))

    def members(self) -> list[Member]:
        """All files and links; see `list_members`."""
        with _errors_of(self.path):
            file = self._opened()
        with file:
            return list_members(file, self.path)

    def read(self, member: Member) -> bytes:
        """The bytes of a file.

        Raises:
            DataError: they are not there, damaged, or too many.
        """
        if member.size > MAX_MEMBER:
            raise DataError(
                f"{self.path}/{member.name} claims {member.size} bytes, more than {MAX_MEMBER}; "
                "leave it out or unpack the archive"
            )
        with _errors_of(self.path), self._opened() as file:
            file.seek(0, io.SEEK_END)
            if member.offset + member.packed > file.tell():
                # Before reading, because a damaged index may claim any size.
                raise EOFError("it ends too early")
            file.seek(member.offset)
            content = file.read(member.packed)
            if len(content) < member.packed:
                raise EOFError("it ends too early")
            return inflate(content, member.size) if member.is_deflated else content

    def _opened(self) -> Stream:
        # Anew each time: forked workers would share the position in a file that stays open.
        return open_regular(self.path) if self.content is None else io.BytesIO(self.content)


def list_members(file: Stream, path: Path) -> list[Member]:
    """All files and links of an opened archive, in its order.

    Args:
        file: Opened for reading.
        path: What messages call it; its end says of which kind it is.

    Raises:
        DataError: the archive is damaged, cut short or encrypted, says what cannot be, or a member
            leads outwards: nothing is unpacked here, but other programs would write where it says.
    """
    find = _zip_members if path.name.lower().endswith(ZIP) else _tar_members
    with _errors_of(path):
        found = list(find(_Frugal(file)))
    outward = next((member.name for member in found if member.leads_out), None)
    if outward is not None:
        raise DataError(
            f"{path} holds {outward!r}, which leads out of the archive; it is refused as "
            "a whole: pack the folder again, with names relative to it"
        )
    return found


class _Frugal:
    """An opened file that hands out no more at once than an index may have.

    The readers of zip and tar ask for as many bytes as the archive claims.
    """

    def __init__(self, file: Stream) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if size > _LONGEST_INDEX:
            raise EOFError(f"an index of {size} bytes, at most {_LONGEST_INDEX} are read")
        # Without a number it is a zip's comment that is read, which has 64 KiB at most.
        return self._file.read(size if size >= 0 else _COMMENT)


def _tar_members(file: _Frugal) -> Iterator[Member]:
    with tarfile.open(fileobj=cast(IO[bytes], file), mode="r:") as archive:
        while (found := archive.next()) is not None:
            # It would keep a kilobyte for each file.
            archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
            if found.issparse():
                raise tarfile.ReadError(f"{found.name!r} is stored with holes; pack it without")
            if found.isreg() or found.islnk() or found.issym():
                is_link = not found.isreg()
                place = (found.offset_data, found.size, found.size)
                # The name a hard link gives begins at the top, a symbolic one's beside the link.
                start = PurePosixPath(found.name).parent if found.issym() else PurePosixPath()
                target = str(start / found.linkname) if is_link else "."
                leads_out = _leads_out(found.name) or _leads_out(target)
                yield Member(found.name, *place, is_link=is_link, leads_out=leads_out)
        # tarfile ends at a damaged header as if all were well.
        file.seek(archive.offset)
        if file.read(_BLOCK) != bytes(_BLOCK):
            raise EOFError(f"neither a file nor the end mark at byte {archive.offset}")


def _zip_members(file: _Frugal) -> Iterator[Member]:
    spans = []
    with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
        for found in archive.infolist():
            if found.is_dir():
                continue
            if found.flag_bits & 1 or found.compress_type not in _METHODS:
                raise zipfile.BadZipFile(f"{found.filename} is encrypted or packed unusually")
            file.seek(found.header_offset)
            mark, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            if mark != b"PK\x03\x04":
                raise zipfile.BadZipFile(f"no file at byte {found.header_offset}")
            offset = found.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            is_deflated = found.compress_type == zipfile.ZIP_DEFLATED
            place = (offset, found.compress_size, found.file_size, is_deflated)
            _require_possible(found)
            spans.append((found.header_offset, offset + found.compress_size))
            yield Member(found.filename, *place, leads_out=_leads_out(found.filename))
        spans.append((archive.start_dir, archive.start_dir))
    # Bombs let many names share the same bytes.
    if any(start < end for (_, end), (start, _) in pairwise(sorted(spans))):
        raise zipfile.BadZipFile("files in it overlap")


def _require_possible(found: zipfile.ZipInfo) -> None:
    packed, size = found.compress_size, found.file_size
    is_deflated = found.compress_type == zipfile.ZIP_DEFLATED
    if not (is_possible(packed, size) if is_deflated else packed == size):
        raise zipfile.BadZipFile(f"{packed} bytes cannot be the {size} of {found.filename!r}")


def _leads_out(name: str) -> bool:
    """Whether a path ends outside of the folder it is meant to be below."""
    return posixpath.normpath(name).split("/")[0] in ("", "..")


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; name an archive that does") from error
    except (
        *(OSError, EOFError, ValueError, struct.error, zlib.error, NotImplementedError),
        *(tarfile.TarError, zipfile.BadZipFile),
    ) as error:
        raise DataError(f"{path} is damaged or cut short ({error}); fetch it again") from error
    except MemoryError as error:
        raise MachineError(f"{path} needs more memory than there is; unpack it") from error
