"""Row 54 of the catalogue of faults: what is remembered of files is right, or they are read."""

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


def test_fault_54_a_repainted_picture_is_noticed_in_coarse_time(tmp_path, monkeypatch, files_read):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exact = fingerprints.file_state

    def coarse(path: Path) -> tuple[int, int, int, int]:
        size, mtime_ns, ctime_ns, inode = exact(path)
        second = 10**9
        return size, mtime_ns // second * second, ctime_ns // second * second, inode

    monkeypatch.setattr(fingerprints, "file_state", coarse)
    root = photo_folder(tmp_path / "photos")
    # Both within one second of the clock.
    time.sleep(1 - time.time() % 1 + 0.02)
    repaint(root / "1.jpg")
    before = ImageFolder(root).images().fingerprint()
    repaint(root / "1.jpg")

    assert ImageFolder(root).images().fingerprint() != before


def damaged(content: bytes) -> dict[str, bytes]:
    flipped = {
        f"bit {place}": content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for place in (0, 30, 70, 100, len(content) - 1)
    }
    return flipped | {
        "empty": b"",
        "cut": content[:-40],
        "cut at an entry": content[:-64],
        "longer": content + bytes(64),
        "older": content.replace(b"files 1", b"files 0"),
    }


def test_fault_54_a_damaged_cache_is_made_anew_and_never_believed(tmp_path, cache, files_read):
    root = photo_folder(tmp_path / "photos")
    settle()
    first = ImageFolder(root).images().fingerprint()
    (kept,) = cache.iterdir()
    content = kept.read_bytes()

    for how, spoilt in damaged(content).items():
        kept.write_bytes(spoilt)
        del files_read[:]
        assert ImageFolder(root).images().fingerprint() == first, how
        assert len(set(files_read)) == 4, how
        assert kept.read_bytes()[:28] == content[:28], how
    del files_read[:]
    assert ImageFolder(root).images().fingerprint() == first
    assert not files_read


@pytest.mark.parametrize("homeless", [False, True])
def test_fault_54_a_cache_that_cannot_be_written_is_said_once(
    tmp_path, monkeypatch, capsys, files_read, homeless
):
    if homeless:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError(tmp_path)))
    else:
        (tmp_path / "cache").write_text("in the way")
    roots = [photo_folder(tmp_path / name) for name in ("one", "other")]
    settle()
    found = [ImageFolder(root).images().fingerprint() for root in roots * 2]

    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot store the SHA-256" in line
    assert "XDG_CACHE_HOME" in line
    assert len(set(found)) == 1
    # For what they hold and for how they are turned.
    assert len(files_read) == 32


def test_fault_54_two_processes_at_once_find_the_same_and_leave_a_whole_cache(tmp_path, files_read):
    root = photo_folder(tmp_path / "photos", 40)
    settle()

    def work(name: str) -> Callable[[], None]:
        return lambda: (
            (tmp_path / name).write_text(ImageFolder(root).images().fingerprint()) and None
        )

    assert [exit_code(child) for child in [fork(work(name)) for name in "ab"]] == [0, 0]
    found = {(tmp_path / name).read_text() for name in "ab"}
    assert found == {ImageFolder(root).images().fingerprint()}
    assert not files_read


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("probe", signal.SIGINT, 130),
        ("pretrain", signal.SIGINT, 130),
        ("pretrain", signal.SIGTERM, 75),
    ],
)
def test_fault_54_an_interrupt_keeps_what_was_read(
    place, cache, monkeypatch, files_read, command, number, code
):
    root = photo_folder(place / "many", 100)
    settle()
    whole = fingerprints._read

    def soon_slow(part: fingerprints.FilePart) -> bytes:
        if len(files_read) > 60:
            (place / "slow").touch()
            time.sleep(0.2)
        return whole(part)

    monkeypatch.setattr(fingerprints, "_read", soon_slow)
    words = probing("pca", "folder", root) if command == "probe" else pretraining(root, "run")
    child = fork(lambda: main(words), stderr=place / "said")
    deadline = time.monotonic() + 30
    while not (place / "slow").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, number)

    assert exit_code(child) == code, (place / "said").read_text()
    assert "Traceback" not in (place / "said").read_text()
    kept = sum(len(fingerprints._load_entries(path)) for path in cache.iterdir())
    assert 60 <= kept < 180


def test_fault_54_a_file_that_is_being_written_is_refused(tmp_path, monkeypatch):
    root = photo_folder(tmp_path / "photos")
    settle()
    whole = fingerprints._read

    def meanwhile(part: fingerprints.FilePart) -> bytes:
        digest = whole(part)
        if part.file.name == "2.jpg":
            part.file.write_bytes(b"more")
        return digest

    monkeypatch.setattr(fingerprints, "_read", meanwhile)

    with pytest.raises(DataError, match=r"2\.jpg changes while it is read"):
        ImageFolder(root).images().fingerprint()


def test_fault_54_files_that_cannot_be_read_are_named(tmp_path):
    root = photo_folder(tmp_path / "photos")
    images = ImageFolder(root).images()
    (root / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"1\.jpg cannot be read \(No such file or directory\)"):
        images.fingerprint()
    os.mkfifo(root / "1.jpg")
    with pytest.raises(DataError, match=r"1\.jpg is not a regular file"):
        ImageFolder(root).images().fingerprint()
