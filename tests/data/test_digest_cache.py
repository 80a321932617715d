"""Row 54 of the catalogue of faults: cached digests of files are right, or files are read."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.data.files import fingerprints
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.errors import DataError
from tests.support.faults import exit_code, fork, photo_folder, pretraining, probing
from tests.support.repainting import repaint, settle

pytestmark = pytest.mark.usefixtures("cache")


def fingerprint(root: Path) -> str:
    return ImageFolder(root).images().fingerprint()


def test_fault_54_a_repainted_picture_is_noticed_in_coarse_time(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exact, second = fingerprints.file_state, 10**9

    def coarse(path: Path) -> tuple[int, int, int, int]:
        size, mtime_ns, ctime_ns, inode = exact(path)
        return size, mtime_ns // second * second, ctime_ns // second * second, inode

    monkeypatch.setattr(fingerprints, "file_state", coarse)
    root = photo_folder(tmp_path / "photos", 1)
    # Both within one second of the clock.
    if time.time() % 1 > 0.7:
        time.sleep(1 - time.time() % 1 + 0.02)
    repaint(root / "0.jpg")
    before = fingerprint(root)
    repaint(root / "0.jpg")

    assert fingerprint(root) != before


def test_fault_54_a_damaged_cache_is_ignored_and_replaced(tmp_path, cache, files_read):
    root = photo_folder(tmp_path / "photos")
    settle()
    first = fingerprint(root)
    (kept,) = cache.iterdir()
    content = kept.read_bytes()
    flipped = [
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for place in (0, 30, 70, len(content) - 1)
    ]
    older = content.replace(b"files 1", b"files 0")

    for damaged in (*flipped, b"", content[:-40], content[:-64], content + bytes(64), older):
        kept.write_bytes(damaged)
        del files_read[:]
        assert fingerprint(root) == first
        assert len(set(files_read)) == 4
        assert kept.read_bytes()[:28] == content[:28]
    del files_read[:]
    assert fingerprint(root) == first
    assert not files_read


@pytest.mark.parametrize("has_home", [False, True])
def test_fault_54_a_cache_that_cannot_be_written_is_reported_once(
    tmp_path, monkeypatch, capsys, files_read, has_home
):
    if has_home:
        (tmp_path / "cache").write_text("in the way")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError(tmp_path)))
    roots = [photo_folder(tmp_path / name) for name in ("one", "other")]
    settle()

    assert len({fingerprint(root) for root in roots * 2}) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "XDG_CACHE_HOME" in line
    # Each file once for its bytes and once for its orientation, both times.
    assert len(files_read) == 32


def test_fault_54_two_processes_at_once_leave_a_complete_cache(tmp_path, files_read):
    root = photo_folder(tmp_path / "photos", 20)
    settle()

    def work(name: str) -> Callable[[], None]:
        return lambda: (tmp_path / name).write_text(fingerprint(root)) and None

    assert [exit_code(child) for child in [fork(work(name)) for name in "ab"]] == [0, 0]
    found = {(tmp_path / name).read_text() for name in "ab"}
    assert found == {fingerprint(root)}
    assert not files_read


@pytest.mark.parametrize(
    ("command", "number", "code", "least"),
    # A probe has also stored that all 40 photographs can be decoded.
    [("probe", signal.SIGINT, 130, 70), ("pretrain", signal.SIGTERM, 75, 30)],
)
def test_fault_54_an_interrupt_keeps_the_computed_digests(
    place, cache, monkeypatch, files_read, command, number, code, least
):
    root = photo_folder(place / "many", 40)
    settle()
    read = fingerprints._read

    def read_slowly(part: fingerprints.FilePart) -> bytes:
        if len(files_read) > 30:
            (place / "slow").touch()
            time.sleep(0.5)
        return read(part)

    monkeypatch.setattr(fingerprints, "_read", read_slowly)
    words = probing("pca", "folder", root) if command == "probe" else pretraining(root, "run")
    child = fork(lambda: main(words), stderr=place / "said")
    deadline = time.monotonic() + 30
    while not (place / "slow").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, number)

    assert exit_code(child) == code, (place / "said").read_text()
    kept = sum(len(fingerprints._load_entries(path)) for path in cache.iterdir())
    assert least <= kept < least + 45


def test_fault_54_changing_missing_and_special_files_are_refused(tmp_path, monkeypatch):
    root = photo_folder(tmp_path / "photos")
    settle()
    read = fingerprints._read

    def change_meanwhile(part: fingerprints.FilePart) -> bytes:
        digest = read(part)
        if part.file.name == "2.jpg":
            part.file.write_bytes(b"more")
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(fingerprints, "_read", change_meanwhile)
        with pytest.raises(DataError, match=r"2\.jpg"):
            fingerprint(root)
    images = ImageFolder(root).images()
    (root / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"1\.jpg .*No such file"):
        images.fingerprint()
    os.mkfifo(root / "1.jpg")
    with pytest.raises(DataError, match=r"1\.jpg is not a regular file"):
        fingerprint(root)
