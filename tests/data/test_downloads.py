"""Downloads over real HTTP: complete, cut (row 36 of the faults), changed, refused or hanging."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench import network
from ssl_bench.errors import MachineError
from ssl_bench.network import PublishedFile, download, part_of

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new/folder/list.txt"


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_a_published_file_is_downloaded_once(server, path, algorithm):
    published = server.publish(CONTENT, algorithm)

    assert download(published, path) == download(published, path) == path

    assert path.read_bytes() == CONTENT
    assert server.ranges == [""]
    assert [file.name for file in path.parent.iterdir()] == ["list.txt"]


@pytest.mark.parametrize(("knows_ranges", "chunked"), [(True, False), (False, False), (True, True)])
def test_a_cut_download_is_continued(server, path, knows_ranges, chunked):
    published = server.publish(CONTENT)
    server.cut_after, server.knows_ranges, server.chunked = 300_000, knows_ranges, chunked

    with pytest.raises(MachineError, match="after 300000 of 1048576 bytes"):
        download(published, path)
    assert not path.exists()
    assert part_of(path).read_bytes() == CONTENT[:300_000]

    assert download(published, path).read_bytes() == CONTENT
    assert server.ranges == ["", "bytes=300000-"]


def test_a_part_that_is_too_long_is_dropped_and_a_complete_one_renamed(server, path):
    published = server.publish(CONTENT)
    unknown = replace(published, size=None)
    path.parent.mkdir(parents=True)
    part_of(path).write_bytes(CONTENT + b"more")
    with pytest.raises(MachineError, match="416"):
        download(unknown, path)
    assert download(unknown, path).read_bytes() == CONTENT

    path.rename(part_of(path))
    part_of(path).write_bytes(CONTENT + b"more")
    assert download(published, path).read_bytes() == CONTENT
    path.rename(part_of(path))
    requests = len(server.ranges)
    assert download(published, path).read_bytes() == CONTENT
    assert len(server.ranges) == requests


@pytest.mark.parametrize("part", [b"", b"of another file"])
def test_a_file_with_a_wrong_checksum_is_deleted(server, path, part):
    published = server.publish(CONTENT)
    path.parent.mkdir(parents=True)
    part_of(path).write_bytes(part)
    server.content = CONTENT if part else CONTENT[::-1]

    with pytest.raises(MachineError, match=f"sha256 [0-9a-f]{{64}}, expected {published.digest}"):
        download(published, path)
    assert not path.exists()
    assert part_of(path).read_bytes() == b""

    server.content = CONTENT
    assert download(published, path).read_bytes() == CONTENT


def test_silent_and_absent_servers_are_reported_within_seconds(server, path, monkeypatch):
    monkeypatch.setattr(network, "REACH_SECONDS", 0.2)
    silent = server.publish(CONTENT)
    server.delay = 1.0
    start = time.monotonic()

    with pytest.raises(MachineError, match=r"no answer within 0\.2 s.*list\.txt"):
        download(silent, path)
    with pytest.raises(MachineError, match=r"127\.0\.0\.1:9 cannot be reached"):
        download(PublishedFile("http://127.0.0.1:9/list.txt", "0"), path)

    assert time.monotonic() - start < 0.9


def test_missing_addresses_and_unwritable_folders_are_reported(server, path):
    published = server.publish(CONTENT)
    server.gone = True
    with pytest.raises(MachineError, match="404"):
        download(published, path)

    path.touch()
    with pytest.raises(MachineError, match="cannot write"):
        download(published, path / "list.txt")
