"""Row 65 of the catalogue of faults: files that claim little and inflate to much, and others."""

import io
import os
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ssl_bench.cli import data as data_command
from ssl_bench.cli.__main__ import main
from ssl_bench.data.files import archive_index, inflating, unpacking
from ssl_bench.data.files.images import read_image
from ssl_bench.data.layouts.archives import open_archives, open_labelled_archives
from ssl_bench.data.sources import SOURCES, Download
from ssl_bench.errors import DataError
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.faults import (
    encoded,
    exit_code,
    fails,
    fork,
    peak_memory_mib,
    picture,
    pretraining,
)

PNG = encoded("PNG", picture(0))
MEBIBYTE = 2**20


@cache
def deflated(mebibytes: int) -> bytes:
    """So many mebibytes of zeros, packed to about a thousandth."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    pieces = [packer.compress(bytes(MEBIBYTE)) for _ in range(mebibytes)]
    return b"".join([*pieces, packer.flush()])


def lying_zip(
    path: Path, members: Sequence[tuple[str, bytes, int]], *, shared: bool = False
) -> Path:
    """A zip of deflated members and what each claims for its size.

    Where it is `shared`, all names stand for the bytes of the first.
    """
    content, index = io.BytesIO(), io.BytesIO()
    for number, (name, packed, claimed) in enumerate(members):
        about = struct.pack("<HHHHHLLLHH", 20, 0, 8, 0, 33, 0, len(packed), claimed, len(name), 0)
        offset = content.tell()
        if number and shared:
            offset = 0
        else:
            content.write(b"PK\3\4" + about + name.encode() + packed)
        more = struct.pack("<HHHLL", 0, 0, 0, 0, offset)
        index.write(b"PK\1\2" + struct.pack("<H", 20) + about + more + name.encode())
    sizes = (len(members), len(members), index.tell(), content.tell(), 0)
    end = b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, *sizes)
    path.write_bytes(content.getvalue() + index.getvalue() + end)
    return path


def peak_mib(work: Callable[[], object]) -> float:
    """How much memory work takes at most, in a process that may not have more than a gigabyte."""

    def limited() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + 1024 * MEBIBYTE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with peak_memory_mib() as peak:
            work()
            Path("peak").write_text(str(peak()))
        return 0

    child = fork(limited, stderr=Path("said"))
    assert exit_code(child) == 0, Path("said").read_text()
    return float(Path("peak").read_text())


def refused(root: Path, *, labelled: bool = False, in_memory: bool = False) -> str:
    """Why the first picture in an archive is not read, known in little memory."""

    def read() -> None:
        open_them = open_labelled_archives if labelled else open_archives
        with pytest.raises(DataError) as error:
            open_them(str(root), in_memory=in_memory)[0]
        Path("why").write_text(str(error.value))

    assert peak_mib(read) < 60
    return Path("why").read_text()


def test_fault_65_a_bomb_ends_the_command_in_one_line(place, capsys):
    path = lying_zip(place / "a.zip", [("b.png", deflated(256), 0)])
    assert "bytes cannot be the 0 of 'b.png'" in fails(capsys, pretraining(path, "run"), 3)


@pytest.mark.parametrize(
    ("claimed", "said"),
    [
        (0, "bytes cannot be the 0 of 'b.png'"),
        (100, "bytes cannot be the 100 of 'b.png'"),
        (300_000, "it holds more than 300000 bytes"),
        (2**32 - 2, "bytes cannot be the 4294967294 of 'b.png'"),
    ],
)
def test_fault_65_a_zip_that_claims_another_size_is_refused_in_little_memory(place, claimed, said):
    members = [("b.png", deflated(256), claimed)]
    assert said in refused(lying_zip(place / "a.zip", members))


def test_fault_65_a_file_larger_than_any_picture_is_not_read(place):
    path = lying_zip(place / "a.zip", [("b.png", os.urandom(MEBIBYTE), 512 * MEBIBYTE)])
    assert f"a.zip/b.png claims {512 * MEBIBYTE} bytes, more than" in refused(path)


def test_fault_65_many_names_for_the_same_bytes_are_refused(place):
    members = [(f"{number}.png", deflated(64), 64 * MEBIBYTE) for number in range(50)]
    path = lying_zip(place / "a.zip", members, shared=True)
    assert "files in it overlap" in refused(path)


def test_fault_65_an_index_longer_than_any_archive_has_is_not_read(place, monkeypatch):
    path = lying_zip(place / "a.zip", [(f"{number}.txt", b"\3\0", 0) for number in range(100)])
    monkeypatch.setattr(archive_index, "_LONGEST_INDEX", 5000)
    assert "an index of 5190 bytes, at most 5000 are read" in refused(path)


def gzipped(path: Path, mebibytes: int) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (("a.png", PNG), ("b.bmp", bytes(mebibytes * MEBIBYTE))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_fault_65_a_tar_gz_that_inflates_to_more_than_pictures_could_is_refused(place, monkeypatch):
    monkeypatch.setattr(inflating, "_ALWAYS", 16 * MEBIBYTE)
    path = gzipped(place / "a.tar.gz", 128)
    assert "inflates to more than 20 times its size" in refused(path, in_memory=True)


def test_fault_65_a_tar_gz_that_ends_too_early_is_refused(place):
    path = gzipped(place / "a.tar.gz", 1)
    path.write_bytes(path.read_bytes()[:-9])
    assert "a.tar.gz is damaged or cut short" in refused(path, in_memory=True)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_fault_65_a_tar_that_claims_a_name_of_a_terabyte_is_refused(place, kind):
    member = tarfile.TarInfo("a.png")
    member.type, member.size = kind, 10**12
    (place / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    assert "an index of 1000000000" in refused(place / "a.tar")


def _sum_up(header: bytearray) -> None:
    """Write the checksum of a header of a tar, in which its own bytes count as spaces."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)


def test_fault_65_a_tar_with_holes_is_refused(place):
    member = tarfile.TarInfo("a.png")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 0
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    # No part, and a length of eight gigabytes.
    header[483:495] = b"%011o\0" % (8**11 - 1)
    _sum_up(header)
    (place / "a.tar").write_bytes(bytes(header) + bytes(1024))
    assert "'a.png' is stored with holes" in refused(place / "a.tar")


@pytest.mark.parametrize("size", [-512, -1024, -(2**40)])
def test_fault_65_a_tar_that_leads_back_ends(place, size):
    member = tarfile.TarInfo("a.png")
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" + (256**11 + size).to_bytes(11, "big")
    _sum_up(header)
    (place / "a.tar").write_bytes(bytes(header) * 3 + bytes(1024))
    assert "a.tar is damaged" in refused(place / "a.tar")


@pytest.mark.parametrize("digits", [5000, 300 * MEBIBYTE])
def test_fault_65_a_class_of_endless_digits_is_refused(place, digits):
    with zipfile.ZipFile(place / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(2):
            archive.writestr(f"{number}.png", PNG)
            archive.writestr(f"{number}.cls", b"7" * digits if number else b"1")
    said = refused(place / "a.zip", labelled=True)
    assert "expected the number of a class" in said


def test_fault_65_an_archive_in_an_archive_is_no_folder(place):
    (place / "deep.zip").write_bytes(b"")
    with zipfile.ZipFile(place / "deep.zip", "w") as deep:
        deep.writestr("a.png", PNG)
    with zipfile.ZipFile(place / "a.zip", "w") as archive:
        archive.write(place / "deep.zip", "deep.zip")
    assert "holds no picture" in refused(place / "a.zip")


@pytest.fixture
def fetched(server, monkeypatch):
    """Let voc2012 be one archive of a server; gives a function that fetches bytes as that."""

    def fetch(content: bytes, name: str, *, proven: bool = True) -> list[str]:
        published = server.publish(content)
        if not proven:
            published = replace(published, digest=None, size=None)
        one = Download(name, published, len(content))
        source = replace(SOURCES["voc2012"], downloads=(one,))
        monkeypatch.setattr(data_command, "SOURCES", {"voc2012": source})
        return ["data", "download", "voc2012", "--data-root", "data"]

    return fetch


def below(root: str) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in Path(root).rglob("*.png"))


@pytest.mark.parametrize(("proven", "code"), [(True, 3), (False, 5)])
@pytest.mark.parametrize("shared", [True, False])
def test_fault_65_bombs_are_not_unpacked(place, capsys, fetched, proven, code, shared):
    claimed = 256 * MEBIBYTE if shared else 0
    members = [(f"{number}.png", deflated(256), claimed) for number in range(2)]
    path = lying_zip(place / "bomb.zip", members, shared=shared)
    words = fetched(path.read_bytes(), "voc.zip", proven=proven)
    assert peak_mib(lambda: main(words)) < 60
    assert "voc.zip is damaged or cut short" in fails(capsys, words, code)
    assert below("data") == []


def test_fault_65_a_bomb_that_is_true_needs_the_space_it_claims(
    place, capsys, fetched, monkeypatch
):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(16 * MEBIBYTE))
    monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**7))
    assert "0.0 GB are free" in fails(capsys, fetched(content.getvalue(), "voc.zip"), 5)
    assert below("data") == []


@pytest.mark.parametrize(
    "names", [("a/b.png", "a/B.png"), ("a/b.png", "a/./b.png"), ("\u00e9.png", "e\u0301.png")]
)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_fault_65_names_that_are_one_file_on_some_disks_are_refused(
    place, capsys, fetched, names, kind
):
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w") as archive:
            for name in names:
                archive.writestr(name, PNG)
    else:
        with tarfile.open(fileobj=content, mode="w") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = len(PNG)
                archive.addfile(member, io.BytesIO(PNG))
    said = fails(capsys, fetched(content.getvalue(), f"voc.{kind}"), 3)
    assert "one file on some disks; it is refused as a whole" in said
    assert below("data") == []


def test_fault_65_neither_rights_nor_owners_of_a_tar_are_taken_over(place, fetched):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("a\nb.png")
        member.size, member.mode, member.uid, member.gid = len(PNG), 0o6777, 12345, 12345
        archive.addfile(member, io.BytesIO(PNG))
    assert main(fetched(content.getvalue(), "voc.tar")) == 0
    status = Path("data/a\nb.png").stat()
    assert status.st_mode & 0o7000 == 0
    assert status.st_mode & 0o111 == 0
    assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())


def npy(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    content = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    return content.getvalue()


def squeezed(*pieces: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return b"".join([*map(packer.compress, pieces), packer.flush()])


COUNT = RECORD.num_images
LARGE = len(npy((COUNT, 2 * MEBIBYTE))) + COUNT * 2 * MEBIBYTE
ARRAYS = {
    "claims nothing": (squeezed(npy((COUNT,)), *[bytes(MEBIBYTE)] * 128), 0),
    "claims little": (squeezed(npy((COUNT,)), *[bytes(MEBIBYTE)] * 128), 128 + COUNT),
    "is large": (squeezed(npy((COUNT, 2 * MEBIBYTE)), *[bytes(2 * MEBIBYTE)] * COUNT), LARGE),
    "claims a large shape": (squeezed(npy((COUNT, 10**12), "<i8"), bytes(1000)), 1128),
    "claims many images": (squeezed(npy((10**12,), "<i8"), bytes(1000)), 1128),
}


@pytest.mark.parametrize("which", ARRAYS)
def test_fault_65_values_of_images_that_inflate_to_gigabytes_are_left_out(place, which):
    store = ResultStore(place / "results")
    store.save(RECORD, np.zeros(COUNT, np.uint8))
    packed, claimed = ARRAYS[which]
    lying_zip(store.per_image_path(RECORD), [("arr_0.npy", packed, claimed)])

    def read() -> None:
        assert store.per_image(RECORD) is None
        assert store.damaged == [store.per_image_path(RECORD)]

    assert peak_mib(read) < 60


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP", b"eXIf"])
def test_fault_65_a_picture_with_a_bomb_beside_its_pixels_takes_little_memory(place, kind):
    head = {b"iTXt": b"a\0\1\0\0\0", b"eXIf": b""}.get(kind, b"a\0\0")
    bomb = head + zlib.compress(bytes(128 * MEBIBYTE), 9)
    after = 8 + 25
    path = place / "a.png"
    path.write_bytes(PNG[:after] + chunk(kind, bomb) * 3 + PNG[after:])

    def read() -> None:
        with suppress(DataError):
            assert read_image(path).shape == (32, 40, 3)

    assert peak_mib(read) < 60
