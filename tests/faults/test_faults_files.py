"""Row 59 of the catalogue of faults: what is not ours is never removed."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.system.files import atomic_file, remove_orphans, remove_orphans_below
from tests.support.faults import exit_code, fork, pretraining, probing

OURS = f".ssl-bench-{7:032x}.tmp"


def test_fault_59_files_that_are_not_ours_are_never_removed(place):
    home = place / "home"
    outside = place / "elsewhere"
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
    before = sorted(place.rglob("*"))

    assert main(probing("pca", "folder", place / "photos", "--out", "home")) == 0
    assert main(pretraining(place / "photos", "home", "train.max_minutes=0.0")) == 0

    assert set(before) <= set(place.rglob("*"))
    assert (outside / OURS).read_text() == "mine"


def test_fault_59_an_unfinished_file_goes_only_when_its_writer_is_gone(tmp_path):
    def write() -> None:
        with atomic_file(tmp_path / "records" / "a.json"):
            (tmp_path / "locked").touch()
            time.sleep(60)

    child = fork(write)
    while not (tmp_path / "locked").exists():
        time.sleep(0.001)
    found = list(tmp_path.rglob("*.tmp"))
    os.utime(found[0], (0, 0))
    # A job that a scheduler suspended touches nothing for days.
    os.kill(child, signal.SIGSTOP)
    remove_orphans_below(tmp_path)
    assert found[0].exists()

    os.kill(child, signal.SIGKILL)
    exit_code(child)
    remove_orphans_below(tmp_path)

    assert not found[0].exists()


@pytest.mark.parametrize(("hours", "locks", "stays"), [
    (0.5, True, True), (1.5, True, False), (1.5, False, True), (25, False, False),
])  # fmt: skip
def test_fault_59_where_locks_say_nothing_time_decides(tmp_path, monkeypatch, hours, locks, stays):
    def unlockable(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", unlockable)
    orphan = tmp_path / OURS
    orphan.touch()
    then = time.time() - 3600 * hours
    os.utime(orphan, (then, then))

    remove_orphans(tmp_path)

    assert orphan.exists() == stays
    with atomic_file(tmp_path / "written.txt") as file:
        file.write(b"without locks too")
    assert Path(tmp_path / "written.txt").read_bytes() == b"without locks too"
