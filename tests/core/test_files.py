"""Files are written whole, on systems without locks too; what is no file ends in one line."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssl_bench.cli.data import read_manifest, write_manifest
from ssl_bench.data.files.images import read_image, read_indices
from ssl_bench.data.layouts.coco20k import parse_boxes
from ssl_bench.data.splits import read_lines
from ssl_bench.errors import CheckpointError, DataError, MachineError
from ssl_bench.models import load_encoder
from ssl_bench.system import files as system_files
from ssl_bench.system.files import (
    atomic_file,
    file_sha256,
    open_regular,
    open_trusted,
    read_regular,
    remove_orphans,
    write_atomically,
    write_text_atomically,
)
from tests.support.faults import fails, photo_folder, probing
from tests.support.without_torch import REPOSITORY


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

    for read in (open_regular, read_regular, file_sha256):
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
    with pytest.raises(DataError, match=r"x\.jpg"):
        write_manifest(photos, place / "list")


def test_a_link_to_a_file_is_as_good_as_the_file_and_one_to_nothing_is_missing(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "nothing").symlink_to("y")

    assert read_regular(tmp_path / "link") == b"abc"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")


def _is_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def _is_a_link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"x")
    path.symlink_to(path.with_name("elsewhere"))


def _everybody_may_write(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o666)


def _belongs_to_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    path.write_bytes(b"x")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    "make", [_is_a_pipe, _is_a_link, _everybody_may_write, _belongs_to_another_user]
)
def test_a_cache_file_that_somebody_else_could_have_written_is_refused(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"link|user|everybody|not a regular file"):
        open_trusted(tmp_path / "file")
    (tmp_path / "own").write_bytes(b"own")
    with open_trusted(tmp_path / "own") as file:
        assert file.read() == b"own"


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_a_cache_file_is_read_again_where_the_umask_lets_everybody_write(tmp_path):
    previous = os.umask(0)
    try:
        write_text_atomically(tmp_path / "file", "own")
    finally:
        os.umask(previous)

    with open_trusted(tmp_path / "file") as file:
        assert file.read() == b"own"


def test_sha256_of_three_bytes_is_the_published_one(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")

    digest = file_sha256(tmp_path / "abc")

    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_files_follow_the_umask_so_that_a_group_can_share_them(tmp_path):
    previous = os.umask(0o027)
    try:
        write_text_atomically(tmp_path / "a.txt", "shared")
    finally:
        os.umask(previous)

    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    events, sync, rename = [], os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes")
        sync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        events.append("name")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)

    write_text_atomically(tmp_path / "a.txt", "whole")

    assert events == ["5 bytes", "name", "folder"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    write_text_atomically(tmp_path / "a.txt", "old")

    def fail(file):
        file.write(b"half of the n")
        raise OSError(28, "No space left on device")

    with pytest.raises(MachineError, match="No space left"):
        write_atomically(tmp_path / "a.txt", fail)

    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


# Modules, signals and flags of Unix alone; the libraries below know for themselves where they run.
HIDDEN = """
import importlib, os, pkgutil, signal, sys
import hydra, matplotlib.pyplot, sklearn.linear_model, timm, torch.distributed, torch.utils.data
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGCHLD", "SIGKILL"):
    delattr(signal, name)
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "sched_getaffinity", "sync"):
    delattr(os, name)
for package in ("ssl_bench", "pretrain", "probes"):
    found = importlib.import_module(package)
    names = [one.name for one in pkgutil.walk_packages(found.__path__, f"{package}.")]
    for name in names:
        importlib.import_module(name)
    print(package, len(names))
"""


@pytest.mark.slow
def test_every_module_can_be_imported_where_only_unix_has_what_is_hidden():
    run = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stderr
    counts = dict(line.split() for line in run.stdout.splitlines())
    assert int(counts["ssl_bench"]) > 100
    assert counts.keys() == {"ssl_bench", "pretrain", "probes"}


def test_without_locks_files_are_written_and_fresh_ones_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(system_files, "fcntl", None)
    with atomic_file(tmp_path / "written.txt") as file:
        file.write(b"whole")
        remove_orphans(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["written.txt"]
    assert (tmp_path / "written.txt").read_bytes() == b"whole"
