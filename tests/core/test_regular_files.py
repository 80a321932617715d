"""Pipes, devices, sockets and folders in the place of files end in one line, at once."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssl_bench.data.files.images import read_image, read_indices
from ssl_bench.data.files.manifests import read_manifest, write_manifest
from ssl_bench.data.layouts.coco20k import parse_boxes
from ssl_bench.data.splits import read_lines
from ssl_bench.errors import CheckpointError, DataError
from ssl_bench.models import load_encoder
from ssl_bench.system.files import open_regular, read_regular, sha256_of
from tests.support.faults import fails, photo_folder, probing


def make_socket(path: Path) -> None:
    # Addresses of sockets are short.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": make_socket,
    "folder": Path.mkdir,
}


@pytest.fixture(params=KINDS)
def make(request) -> Iterator[Callable[[Path], object]]:
    """Puts something there that is no file; whoever waits for it fails instead."""

    def late(*_: object) -> None:
        raise AssertionError("waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    try:
        yield KINDS[request.param]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_fault_62_every_reader_takes_regular_files_alone(tmp_path, make):
    for name in ("x.txt", "x.json", "x.jpg", "x.safetensors", "x.pth"):
        make(tmp_path / name)

    for read in (open_regular, read_regular, sha256_of):
        with pytest.raises(OSError, match=r"regular file|No such device"):
            read(tmp_path / "x.txt")
    for read, name in (
        (read_lines, "x.txt"),
        (read_manifest, "x.txt"),
        (parse_boxes, "x.json"),
        (read_image, "x.jpg"),
        (read_indices, "x.jpg"),
    ):
        with pytest.raises(DataError, match=rf"{name[:1]}\.{name[2:]}"):
            read(tmp_path / name)
    for name in ("x.safetensors", "x.pth"):
        with pytest.raises(CheckpointError):
            load_encoder(str(tmp_path / name))


def test_fault_62_commands_name_what_is_no_regular_file_at_once(place, capsys, make):
    photos = photo_folder(place / "more", 1)
    make(photos / "x.jpg")
    if make is Path.mkdir:
        pytest.skip("folders are looked into")

    assert "more/x.jpg" in fails(capsys, probing("pca", "folder", photos), 3)
    with pytest.raises(DataError, match="cannot be read"):
        write_manifest(photos, place / "list")


def test_a_link_to_a_file_is_as_good_as_the_file_and_one_to_nothing_is_missing(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "nothing").symlink_to("y")

    assert read_regular(tmp_path / "link") == b"abc"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")
