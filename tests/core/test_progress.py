"""Bars where somebody looks, silence where nobody does."""

import os
import pty
import re
import sys
import termios
import time
from collections.abc import Callable

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.system.progress import show_progress
from tests.support.faults import encoder_file, exit_code, photo_folder, probing


def on_a_terminal(work: Callable[[], object]) -> str:
    """What a process writes when its stderr is a terminal."""
    child, terminal = pty.fork()
    if not child:
        code = 70
        try:
            sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
            termios.tcsetwinsize(2, (24, 80))
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    written = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            # How Linux says that the other side is gone.
            break
        if not piece:
            break
        written += piece
    os.close(terminal)
    assert exit_code(child) == 0, written.decode()
    return written.decode()


def crawl() -> None:
    for _ in show_progress(range(40), "crawling"):
        time.sleep(0.01)


def test_a_terminal_shows_how_far_how_fast_and_how_long_still():
    shown = on_a_terminal(crawl)

    # Such as: crawling:  50%|#####     | 20/40 [00:00<00:00, 98.32it/s]
    bars = re.findall(
        r"crawling: +(\d+)%\|[^\r]*?\| \d+/40 \[\d+:\d+<\d+:\d+, +[\d.]+it/s\]", shown
    )
    assert bars
    assert all(0 < int(share) <= 100 for share in bars)
    assert "\r" in shown


def test_without_a_terminal_nothing_is_written(capfd):
    crawl()

    assert capfd.readouterr() == ("", "")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    return photo_folder(tmp_path / "photos", 3)


@pytest.mark.parametrize("command", ["probe", "data"])
def test_commands_write_a_bar_to_a_terminal_and_plain_lines_elsewhere(place, capfd, command):
    words = {
        "probe": probing("pca", "folder", place, "--overwrite"),
        "data": ["data", "verify", str(place), "--manifest", "list"],
    }[command]

    assert main(words) == 0
    out, err = capfd.readouterr()
    shown = on_a_terminal(lambda: main(words))

    assert all(character.isprintable() or character == "\n" for character in out + err)
    bars = {"probe": r"pca: +0%\|.*\| 0/3 \[", "data": r"reading photos: +0%\|.*\| 0/3 \["}
    assert re.search(bars[command], shown)
