"""Where the files of a tar or zip archive lie in it, and their bytes. Nothing is unpacked."""

import gzip
import io
import posixpath
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ssl_bench.errors import DataError
from ssl_bench.files import open_regular, read_regular

PACKED_TAR, ZIP = (".tar.gz", ".tgz"), ".zip"
SUFFIXES = (".tar", *PACKED_TAR, ZIP)
Stream = io.BufferedReader | io.BytesIO

_BLOCK = 512
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


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
            content = read_regular(path)
            if path.name.lower().endswith(PACKED_TAR):
                content = gzip.decompress(content)
        return cls(path, content)

    def members(self) -> list[Member]:
        """All files and links, in the order of the archive.

        Raises:
            DataError: the archive is damaged, cut short or encrypted, or a member leads outwards:
                nothing is unpacked here, but other programs would write where it says.
        """
        find = _zip_members if self.path.name.lower().endswith(ZIP) else _tar_members
        with _errors_of(self.path), self._opened() as file:
            found = list(find(file))
        outward = next((member.name for member in found if member.leads_out), None)
        if outward is not None:
            raise DataError(
                f"{self.path} holds {outward!r}, which leads out of the archive; it is refused as "
                "a whole: pack the folder again, with names relative to it"
            )
        return found

    def read(self, member: Member) -> bytes:
        """The bytes of a file.

        Raises:
            DataError: they are not there, or damaged.
        """
        with _errors_of(self.path), self._opened() as file:
            file.seek(0, io.SEEK_END)
            if member.offset + member.packed > file.tell():
                # Before reading, because a damaged index may claim any size.
                raise EOFError("it ends too early")
            file.seek(member.offset)
            content = file.read(member.packed)
            if len(content) < member.packed:
                raise EOFError("it ends too early")
            if not member.is_deflated:
                return content
            # The limit is for archives that pretend to be small.
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, member.size)

    def _opened(self) -> Stream:
        # Anew each time: forked workers would share the position in a file that stays open.
        return open_regular(self.path) if self.content is None else io.BytesIO(self.content)


def _tar_members(file: Stream) -> Iterator[Member]:
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (found := archive.next()) is not None:
            # It would keep a kilobyte for each file.
            archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
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


def _zip_members(file: Stream) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
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
            yield Member(found.filename, *place, leads_out=_leads_out(found.filename))


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
