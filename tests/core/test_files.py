"""Test that files are read and written safely."""

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.data import read_manifest, write_manifest
from ssl_bench.data.files.images import read_image, read_integer_image
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
    read_untrusted_folder,
    remove_orphans,
    remove_orphans_below,
    write_atomically,
    write_text_atomically,
)
from tests.support.faults import (
    exit_code,
    expect_error,
    fork,
    make_pretrain_args,
    make_probe_args,
    photo_folder,
)
from tests.support.without_torch import REPOSITORY


def make_socket(path: Path) -> None:
    # The path of a socket must be short.
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
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Kill a test that blocks while it reads the path.
    signal.alarm(120)
    try:
        yield KINDS[request.param]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_every_reader_refuses_anything_but_a_regular_file(tmp_path, make):
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
        (read_integer_image, "x.jpg"),
    ):
        with pytest.raises(DataError):
            read(tmp_path / name)
    for name in ("x.safetensors", "x.pth"):
        with pytest.raises(CheckpointError):
            load_encoder(str(tmp_path / name))


def test_commands_name_a_pipe_or_device_without_waiting(workdir, capsys, make):
    photos = photo_folder(workdir / "more", 1)
    make(photos / "x.jpg")
    if make is Path.mkdir:
        pytest.skip("folders are searched for images")

    assert "more/x.jpg" in expect_error(capsys, make_probe_args("pca", "folder", photos), 3)
    with pytest.raises(DataError, match=r"x\.jpg"):
        write_manifest(photos, workdir / "list")


@pytest.mark.parametrize("kind", ["pipe", "link", "writable", "of another user"])
def test_a_cache_file_that_others_could_have_written_is_refused(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"x")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(b"x")
    if kind == "writable":
        path.chmod(0o666)
    elif kind == "of another user":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(path, 65534, 65534)

    with pytest.raises(OSError, match="file"):
        open_trusted(path)


def test_unreadable_files_in_an_untrusted_folder_count_as_empty(tmp_path, monkeypatch):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    for name, size in (("a.json", 2), ("b.json", 100), ("large.json", 101), ("other.txt", 2)):
        (folder / name).write_bytes(bytes(size))
    (folder / "link.json").symlink_to(folder / "a.json")
    os.mkfifo(folder / "pipe.json")

    def read(root: Path, place: Path) -> dict[str, int]:
        found = read_untrusted_folder(root, place, ".json", 100)
        return {path.removeprefix(f"{place}/"): len(content) for path, content in found}

    sizes = {"a.json": 2, "b.json": 100, "large.json": 0, "link.json": 0, "pipe.json": 0}
    # Only links below the given root are refused.
    assert read(tmp_path, folder) == read(link, link) == sizes
    assert read(tmp_path, link) == dict.fromkeys(sizes, 0)
    assert read(tmp_path, tmp_path / "absent") == {}

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "read", fail)
    assert read(tmp_path, folder) == dict.fromkeys(sizes, 0)


@pytest.mark.parametrize(("umask", "mode"), [(0o027, 0o640), (0, 0o664)])
def test_written_files_follow_the_umask_and_are_trusted(tmp_path, umask, mode):
    previous = os.umask(umask)
    try:
        write_text_atomically(tmp_path / "abc", "abc")
    finally:
        os.umask(previous)
    (tmp_path / "link").symlink_to("abc")

    assert (tmp_path / "abc").stat().st_mode & 0o777 == mode
    with open_trusted(tmp_path / "abc") as file:
        assert file.read() == b"abc"
    assert read_regular(tmp_path / "link") == b"abc"
    # The published value of SHA-256.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(tmp_path / "abc") == digest


def test_the_content_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    events, sync, rename = [], os.fsync, Path.replace

    def record_sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes")
        sync(descriptor)

    def record_rename(self: Path, target: Path) -> Path:
        events.append("name")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_rename)

    write_text_atomically(tmp_path / "a.txt", "whole")

    assert events == ["5 bytes", "name", "folder"]


def test_failed_writes_keep_only_the_old_file(tmp_path):
    write_text_atomically(tmp_path / "a.txt", "old")

    def fail(file):
        file.write(b"half of the n")
        raise OSError(28, "No space left on device")

    with pytest.raises(MachineError, match=r"a\.txt"):
        write_atomically(tmp_path / "a.txt", fail)

    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


# Import the libraries that need Unix. Hide the modules, signals and flags that only Unix has. Then
# import every module of the suite.
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
    assert names, package
"""


@pytest.mark.slow
def test_every_module_can_be_imported_without_features_of_unix():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([sys.executable, "-c", HIDDEN], env=environment, capture_output=True)

    assert run.returncode == 0, run.stderr.decode()


OURS = f".ssl-bench-{7:032x}.tmp"
"""Name of a temporary file of the suite."""


def test_files_of_the_user_are_never_removed(workdir):
    home = workdir / "home"
    outside = workdir / "elsewhere"
    names = [
        "project/sub/.notes.tmp", f"project/{OURS}", ".notes.tmp", "records/.notes.tmp",
        "records/.ssl-bench-notes.tmp", f"records/{OURS}.kept", f"pictures/a{OURS}",
        f"pictures/{OURS.upper()}",
    ]  # fmt: skip
    for path in [*(home / name for name in names), outside / OURS, outside / "deep" / OURS]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    (home / "records/link").symlink_to(outside)
    (home / "records" / OURS).symlink_to(outside / OURS)
    (home / "images").symlink_to(outside)
    (home / "pictures" / OURS).mkdir()
    before = sorted(workdir.rglob("*"))

    assert main(make_probe_args("pca", "folder", workdir / "photos", "--out", "home")) == 0
    assert main(make_pretrain_args(workdir / "photos", "home", "train.max_minutes=0.0")) == 0

    assert set(before) <= set(workdir.rglob("*"))
    assert (outside / OURS).read_text() == "mine"


def test_a_temporary_file_is_kept_while_its_writer_lives(tmp_path):
    def write() -> None:
        with atomic_file(tmp_path / "records" / "a.json"):
            (tmp_path / "locked").touch()
            time.sleep(60)

    child = fork(write)
    while not (tmp_path / "locked").exists():
        time.sleep(0.001)
    found = list(tmp_path.rglob("*.tmp"))
    os.utime(found[0], (0, 0))
    # A suspended job does not change its file for days.
    os.kill(child, signal.SIGSTOP)
    remove_orphans_below(tmp_path)
    assert found[0].exists()

    os.kill(child, signal.SIGKILL)
    exit_code(child)
    remove_orphans_below(tmp_path)

    assert not found[0].exists()


@pytest.mark.parametrize(
    ("locks", "hours", "is_kept"),
    [
        ("work", 0.5, True), ("work", 1.5, False), ("fail", 1.5, True), ("fail", 25, False),
        ("missing", 1.5, True), ("missing", 25, False),
    ],
)  # fmt: skip
def test_an_orphan_is_removed_after_an_hour_or_a_day(tmp_path, monkeypatch, locks, hours, is_kept):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if locks == "fail":
        monkeypatch.setattr(fcntl, "flock", fail)
    elif locks == "missing":
        monkeypatch.setattr(system_files, "fcntl", None)
    orphan = tmp_path / OURS
    orphan.touch()
    then = time.time() - 3600 * hours
    os.utime(orphan, (then, then))

    with atomic_file(tmp_path / "written.txt") as file:
        file.write(b"whole")
        remove_orphans(tmp_path)

    assert orphan.exists() == is_kept
    assert (tmp_path / "written.txt").read_bytes() == b"whole"
