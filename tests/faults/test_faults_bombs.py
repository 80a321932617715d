"""Fault 65: archives, arrays and images that are far larger than their headers say."""

import io
import os
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ssl_bench.cli import data as data_command
from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.images import read_image
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
    png_chunk,
)

PNG = encoded("PNG", picture(0))
MEBIBYTE = 2**20


def lying_zip(path: Path, name: str, packed: bytes, claimed: int) -> None:
    """Write a zip whose only member has another size than its header says."""
    about = struct.pack("<HHHHHLLLHH", 20, 0, 8, 0, 33, 0, len(packed), claimed, len(name), 0)
    content = b"PK\3\4" + about + name.encode() + packed
    index = b"PK\1\2" + struct.pack("<H", 20) + about + struct.pack("<HHHLL", 0, 0, 0, 0, 0)
    index += name.encode()
    end = b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(index), len(content), 0)
    path.write_bytes(content + index + end)


def peak_mib(work: Callable[[], object]) -> float:
    """Return the peak memory of a function in a process that may use at most a gigabyte."""

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


@pytest.fixture
def download_as_voc(server, monkeypatch):
    """Return a function that serves an archive as voc2012 and returns the download command."""

    def fetch(content: bytes, name: str) -> list[str]:
        one = Download(name, server.publish(content), len(content))
        source = replace(SOURCES["voc2012"], downloads=(one,))
        monkeypatch.setattr(data_command, "SOURCES", {"voc2012": source})
        return ["data", "download", "voc2012", "--data-root", "data"]

    return fetch


def test_fault_65_an_archive_larger_than_the_disk_is_not_unpacked(
    place, capsys, download_as_voc, monkeypatch
):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(16 * MEBIBYTE))
    monkeypatch.setattr(data_command.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**7))
    fails(capsys, download_as_voc(content.getvalue(), "voc.zip"), 5)
    assert not list(Path("data").rglob("*.png"))


def test_fault_65_permissions_and_owners_of_a_tar_are_ignored(place, download_as_voc):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("a\nb.png")
        member.size, member.mode, member.uid, member.gid = len(PNG), 0o6777, 12345, 12345
        archive.addfile(member, io.BytesIO(PNG))
    assert main(download_as_voc(content.getvalue(), "voc.tar")) == 0
    status = Path("data/a\nb.png").stat()
    assert status.st_mode & 0o7000 == 0
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
def test_fault_65_oversized_per_image_values_are_ignored(place, which):
    store = ResultStore(place / "results")
    store.save(RECORD, np.zeros(COUNT, np.uint8))
    packed, claimed = ARRAYS[which]
    lying_zip(store.per_image_path(RECORD), "arr_0.npy", packed, claimed)

    def read() -> None:
        assert store.per_image(RECORD) is None
        assert store.damaged == [store.per_image_path(RECORD)]

    assert peak_mib(read) < 60


def test_fault_65_oversized_metadata_of_an_image_takes_little_memory(place):
    bomb = zlib.compress(bytes(128 * MEBIBYTE), 9)
    heads = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0", b"eXIf": b""}
    after = 8 + 25
    path = place / "a.png"

    def read() -> None:
        with suppress(DataError):
            assert read_image(path).shape == (32, 40, 3)

    for kind, head in heads.items():
        path.write_bytes(PNG[:after] + png_chunk(kind, head + bomb) * 3 + PNG[after:])
        assert peak_mib(read) < 60, kind
