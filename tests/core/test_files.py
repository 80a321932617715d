import os
import stat
from pathlib import Path

import pytest

from ssl_bench.errors import MachineError
from ssl_bench.system.files import sha256_of, write_atomically, write_text_atomically


def test_sha256_of_three_bytes_is_the_published_one(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")

    digest = sha256_of(tmp_path / "abc")

    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_files_follow_the_umask_so_that_a_group_can_share_them(tmp_path):
    previous = os.umask(0o027)
    try:
        write_text_atomically(tmp_path / "a.txt", "shared")
    finally:
        os.umask(previous)

    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    write_text_atomically(tmp_path / "a.txt", "old")

    def fail(file):
        file.write(b"half of the n")
        raise OSError(28, "No space left on device")

    with pytest.raises(MachineError, match="No space left"):
        write_atomically(tmp_path / "a.txt", fail)

    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


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
