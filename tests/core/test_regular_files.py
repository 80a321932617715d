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


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    # Addresses of sockets are short.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_linked_pipe(path: Path) -> None:
    pipe = path.with_name(f".{path.name}")
    os.mkfifo(pipe)
    path.symlink_to(pipe.name)


every_kind = pytest.mark.parametrize(
    "make", [make_pipe, make_zeros, make_socket, make_folder, make_linked_pipe]
)


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Whoever waits for a pipe fails instead."""

    def late(*_: object) -> None:
        raise AssertionError("waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@every_kind
def test_only_regular_files_are_opened(tmp_path, make: Callable[[Path], None]):
    make(tmp_path / "x")

    for read in (open_regular, read_regular, sha256_of):
        with pytest.raises(OSError, match=r"regular file|No such device"):
            read(tmp_path / "x")


def test_a_link_to_a_file_is_as_good_as_the_file_and_one_to_nothing_is_missing(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "nothing").symlink_to("y")

    assert read_regular(tmp_path / "link") == b"abc"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")


@every_kind
def test_fault_62_an_image_that_is_no_regular_file_is_named_at_once(place, capsys, make):
    make(place / "photos/x.jpg")

    if make is not make_folder:
        assert "photos/x.jpg" in fails(capsys, probing("pca", "folder", place / "photos"), 3)
    for read in (read_image, read_indices):
        with pytest.raises(DataError, match=r"x\.jpg cannot be read"):
            read(place / "photos/x.jpg")


@every_kind
def test_fault_62_lists_and_annotations_must_be_regular_files(tmp_path, make):
    for name in ("x.txt", "x.json"):
        make(tmp_path / name)

    for read in (read_lines, read_manifest, parse_boxes):
        with pytest.raises(DataError, match=r"x\.(txt|json)"):
            read(tmp_path / ("x.json" if read is parse_boxes else "x.txt"))


@every_kind
def test_fault_62_a_folder_with_other_things_than_files_is_not_verified(tmp_path, make):
    photo_folder(tmp_path / "photos", 1)
    make(tmp_path / "photos/x.jpg")
    if make is make_folder:
        pytest.skip("folders are looked into")

    with pytest.raises(DataError, match="cannot be read"):
        write_manifest(tmp_path / "photos", tmp_path / "list")


@every_kind
def test_fault_62_a_checkpoint_that_is_no_regular_file_is_refused(tmp_path, make):
    for name in ("x.safetensors", "x.pth"):
        make(tmp_path / name)
        with pytest.raises(CheckpointError):
            load_encoder(str(tmp_path / name))
