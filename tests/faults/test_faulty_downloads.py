"""Test downloads that fail or contain faulty files."""

import io
import os
import resource
import signal
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ssl_bench import network
from ssl_bench.cli import data as data_command
from ssl_bench.cli.__main__ import main
from ssl_bench.data.files.images import read_image
from ssl_bench.data.sources import DATASET_INFOS, Download
from ssl_bench.errors import DataError, MachineError
from ssl_bench.network import PublishedFile, download, partial_path
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.faults import (
    encoded,
    exit_code,
    expect_error,
    fork,
    limit_file_size,
    peak_memory_mib,
    picture,
    png_chunk,
)

pytestmark = pytest.mark.slow

DOWNLOAD = ["data", "download", "coco_stuff", "--data-root", "data"]
MEBIBYTE = 2**20


def zip_of(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


CONTENT = zip_of({f"masks/{n}.png": np.random.default_rng(n).bytes(100_000) for n in range(3)})
CUT = 120_000


@pytest.fixture
def serve(server, monkeypatch):
    def publish(content: bytes, name: str = "masks.zip"):
        server.publish(content)
        one = Download(name, PublishedFile(server.url, None), len(content))
        info = replace(DATASET_INFOS["coco_stuff"], downloads=(one,))
        monkeypatch.setattr(data_command, "DATASET_INFOS", {"coco_stuff": info})
        return server

    return publish


def expect_no_files(capsys, code: int = 5) -> str:
    message = expect_error(capsys, DOWNLOAD, code)
    assert not Path("data/masks.zip").exists()
    assert not list(Path("data").rglob("*.png"))
    return message


def assert_complete() -> None:
    assert Path("data/masks.zip").read_bytes() == CONTENT
    assert len(list(Path("data").rglob("*.png"))) == 3
    assert not list(Path("data").rglob("*.part*"))


def test_a_download_of_unknown_length_is_refused(workdir, capsys, serve):
    server = serve(CONTENT)
    for cut in (None, CUT):
        server.chunked, server.cut_after = True, cut
        assert "size" in expect_no_files(capsys)
    server.chunked, server.headers["Content-Length"] = False, None
    assert "size" in expect_no_files(capsys)


def test_an_incomplete_archive_never_gets_its_name(workdir, capsys, serve):
    server = serve(CONTENT)
    for content in (b"<html>log in</html>", CONTENT[:-30], CONTENT[:CUT], b""):
        server.content = content
        assert "masks.zip" in expect_no_files(capsys)
    server.content = CONTENT
    assert main(DOWNLOAD) == 0
    assert_complete()


def test_existing_files_are_checked_before_they_are_used(server, workdir, capsys, serve):
    published = server.publish(CONTENT)
    Path("file").write_bytes(CONTENT[::-1])
    with pytest.raises(DataError, match=published.digest):
        download(published, Path("file"))
    Path("file").write_bytes(CONTENT)
    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges == []

    serve(CONTENT)
    Path("data").mkdir()
    Path("data/masks.zip").write_bytes(b"<html>log in</html>")
    assert "masks.zip" in expect_error(capsys, DOWNLOAD, 3)
    assert not list(Path("data").rglob("*.png"))


def test_web_pages_in_place_of_files_keep_partial_downloads(workdir, server):
    published = server.publish(CONTENT)
    server.cut_after = CUT
    with pytest.raises(MachineError, match=f"{CUT} of"):
        download(published, Path("file"))
    server.content, server.knows_ranges = b"<html>log in</html>", False
    server.headers = {"Content-Type": "text/html; charset=utf-8"}

    with pytest.raises(MachineError, match="web page"):
        download(published, Path("file"))

    server.content, server.knows_ranges, server.headers = CONTENT, True, {}
    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges[-1] == f"bytes={CUT}-"


def test_a_full_disk_keeps_the_partial_download(workdir, server):
    published = replace(server.publish(CONTENT), size=None)
    with limit_file_size(CUT), pytest.raises(MachineError, match="File too large"):
        download(published, Path("file"))
    assert Path("file.part").read_bytes() == CONTENT[:CUT]
    # Without a published size, the size of all bytes follows from those that remain.
    server.cut_after = 7
    with pytest.raises(MachineError, match=f"after {CUT + 7} of {len(CONTENT)}"):
        download(published, Path("file"))

    assert download(published, Path("file")).read_bytes() == CONTENT
    assert server.ranges == ["", f"bytes={CUT}-", f"bytes={CUT + 7}-"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_download_keeps_its_partial_file(workdir, serve, number):
    server = serve(CONTENT)
    server.pause = 0.01
    child = fork(lambda: main(DOWNLOAD), stderr=Path("stderr"))
    part = Path("data/masks.zip.part")
    while not part.is_file() or not part.stat().st_size:
        time.sleep(0.01)
    os.kill(child, number)
    assert exit_code(child) == (130 if number == signal.SIGINT else -9)
    assert 0 < part.stat().st_size < len(CONTENT)
    server.pause = 0.0
    assert main(DOWNLOAD) == 0
    assert_complete()
    # Without a digest, the part may belong to another version, so the download starts again.
    assert server.ranges == ["", ""]


def test_commands_that_run_together_download_once(workdir, serve):
    server = serve(CONTENT)
    server.delay = 0.1
    children = [fork(lambda: main(DOWNLOAD), stderr=Path(f"stderr{n}")) for n in range(3)]
    assert [exit_code(child) for child in children] == [0, 0, 0]
    assert_complete()
    assert len(server.ranges) == 1


def test_an_archive_larger_than_the_disk_is_not_unpacked(workdir, capsys, serve, monkeypatch):
    serve(zip_of({"a.png": bytes(16 * MEBIBYTE)}))
    monkeypatch.setattr(data_command.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**7))

    expect_error(capsys, DOWNLOAD, 5)

    assert not list(Path("data").rglob("*.png"))


PNG = encoded("PNG", picture(0))


def test_permissions_and_owners_of_a_tar_are_ignored(workdir, serve):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("a\nb.png")
        member.size, member.mode, member.uid, member.gid = len(PNG), 0o6777, 12345, 12345
        archive.addfile(member, io.BytesIO(PNG))
    serve(content.getvalue(), "masks.tar")

    assert main(DOWNLOAD) == 0

    (path,) = Path("data").rglob("a\nb.png")
    assert path.stat().st_mode & 0o7000 == 0
    assert (path.stat().st_uid, path.stat().st_gid) == (os.getuid(), os.getgid())


def write_lying_zip(path: Path, name: str, packed: bytes, claimed: int) -> None:
    """Write a zip file whose headers state a wrong size."""
    about = struct.pack("<HHHHHLLLHH", 20, 0, 8, 0, 33, 0, len(packed), claimed, len(name), 0)
    content = b"PK\3\4" + about + name.encode() + packed
    index = b"PK\1\2" + struct.pack("<H", 20) + about + struct.pack("<HHHLL", 0, 0, 0, 0, 0)
    index += name.encode()
    end = b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(index), len(content), 0)
    path.write_bytes(content + index + end)


def peak_mib(work: Callable[[], object]) -> float:
    def limited() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + 1024 * MEBIBYTE
        # The process may allocate at most 1 GiB.
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with peak_memory_mib() as peak:
            work()
            Path("peak").write_text(str(peak()))
        return 0

    child = fork(limited, stderr=Path("stderr"))
    assert exit_code(child) == 0, Path("stderr").read_text()
    return float(Path("peak").read_text())


def npy(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    content = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    return content.getvalue()


def deflate(*pieces: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    return b"".join([*map(packer.compress, pieces), packer.flush()])


COUNT = RECORD.num_images
LARGE = len(npy((COUNT, 2 * MEBIBYTE))) + COUNT * 2 * MEBIBYTE
ARRAYS = {
    "claims nothing": (deflate(npy((COUNT,)), *[bytes(MEBIBYTE)] * 128), 0),
    "claims little": (deflate(npy((COUNT,)), *[bytes(MEBIBYTE)] * 128), 128 + COUNT),
    "is large": (deflate(npy((COUNT, 2 * MEBIBYTE)), *[bytes(2 * MEBIBYTE)] * COUNT), LARGE),
    "claims a large shape": (deflate(npy((COUNT, 10**12), "<i8"), bytes(1000)), 1128),
    "claims many images": (deflate(npy((10**12,), "<i8"), bytes(1000)), 1128),
}


@pytest.mark.parametrize("which", ARRAYS)
def test_oversized_per_image_values_are_ignored(workdir, which):
    store = ResultStore(workdir / "results")
    store.save(RECORD, np.zeros(COUNT, np.uint8))
    packed, claimed = ARRAYS[which]
    write_lying_zip(store.per_image_path(RECORD), "arr_0.npy", packed, claimed)

    def read() -> None:
        assert store.load_per_image(RECORD) is None
        assert store.damaged_files == [store.per_image_path(RECORD)]

    assert peak_mib(read) < 60


def test_oversized_metadata_of_an_image_takes_little_memory(workdir):
    bomb = zlib.compress(bytes(80 * MEBIBYTE), 9)
    heads = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0", b"eXIf": b""}
    after = 8 + 25
    path = workdir / "a.png"

    def read() -> None:
        with suppress(DataError):
            assert read_image(path).shape == (32, 40, 3)

    for kind, head in heads.items():
        path.write_bytes(PNG[:after] + png_chunk(kind, head + bomb) * 3 + PNG[after:])
        assert peak_mib(read) < 60, kind


# The function `download`, with a local web server.

BYTES = bytes(range(256)) * 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new/folder/list.txt"


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_a_published_file_is_downloaded_once(server, path, algorithm):
    published = server.publish(BYTES, algorithm)

    assert download(published, path) == download(published, path) == path

    assert path.read_bytes() == BYTES
    assert server.ranges == [""]
    assert [file.name for file in path.parent.iterdir()] == ["list.txt"]


@pytest.mark.parametrize(("knows_ranges", "chunked"), [(True, False), (False, False), (True, True)])
def test_an_interrupted_download_is_continued(server, path, knows_ranges, chunked):
    published = server.publish(BYTES)
    server.cut_after, server.knows_ranges, server.chunked = 300_000, knows_ranges, chunked

    with pytest.raises(MachineError, match="after 300000 of 1048576 bytes"):
        download(published, path)
    assert not path.exists()
    assert partial_path(path).read_bytes() == BYTES[:300_000]

    assert download(published, path).read_bytes() == BYTES
    assert server.ranges == ["", "bytes=300000-"]


def test_too_long_partial_downloads_are_deleted_and_complete_ones_renamed(server, path):
    published = server.publish(BYTES)
    unknown = replace(published, size=None)
    path.parent.mkdir(parents=True)
    partial_path(path).write_bytes(BYTES + b"more")
    with pytest.raises(MachineError, match="416"):
        download(unknown, path)
    assert download(unknown, path).read_bytes() == BYTES

    path.rename(partial_path(path))
    partial_path(path).write_bytes(BYTES + b"more")
    assert download(published, path).read_bytes() == BYTES
    path.rename(partial_path(path))
    requests = len(server.ranges)
    assert download(published, path).read_bytes() == BYTES
    assert len(server.ranges) == requests


@pytest.mark.parametrize("part", [b"", b"of another file"])
def test_a_file_with_a_wrong_checksum_is_deleted(server, path, part):
    published = server.publish(BYTES)
    path.parent.mkdir(parents=True)
    partial_path(path).write_bytes(part)
    server.content = BYTES if part else BYTES[::-1]

    with pytest.raises(MachineError, match=f"sha256 [0-9a-f]{{64}}, expected {published.digest}"):
        download(published, path)
    assert not path.exists()
    assert partial_path(path).read_bytes() == b""

    server.content = BYTES
    assert download(published, path).read_bytes() == BYTES


def test_silent_and_absent_servers_are_reported_within_seconds(server, path, monkeypatch):
    monkeypatch.setattr(network, "CONNECT_TIMEOUT", 0.2)
    silent = server.publish(BYTES)
    server.delay = 1.0
    start = time.monotonic()

    with pytest.raises(MachineError, match=r"no answer within 0\.2 s.*list\.txt"):
        download(silent, path)
    with pytest.raises(MachineError, match=r"127\.0\.0\.1:9 cannot be reached"):
        download(PublishedFile("http://127.0.0.1:9/list.txt", "0"), path)

    assert time.monotonic() - start < 0.9


def test_missing_addresses_and_unwritable_folders_are_reported(server, path):
    published = server.publish(BYTES)
    server.gone = True
    with pytest.raises(MachineError, match="404"):
        download(published, path)

    path.touch()
    with pytest.raises(MachineError, match="cannot write"):
        download(published, path / "list.txt")
