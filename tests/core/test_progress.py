"""Test the progress messages of a command."""

import io
import os
import pty
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable

from ssl_bench.cli.__main__ import main
from ssl_bench.system import output
from ssl_bench.system.output import format_duration, print_message, show_progress
from tests.support.faults import encoder_file, exit_code, fork, make_probe_args, photo_folder
from tests.support.torchrun import set_torchrun_env


def run_on_a_terminal(work: Callable[[], object]) -> str:
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
            # Linux reports a closed terminal in this way.
            break
        if not piece:
            break
        written += piece
    os.close(terminal)
    assert exit_code(child) == 0, written.decode()
    return written.decode()


def test_a_log_gets_lines_with_the_time_left(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])

    def crawl(count, seconds, total):
        for number in show_progress(range(count), "crawling", total):
            clock[0] += seconds(number)
        return [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]

    assert crawl(100, lambda _: 5.0, 100) == [
        "4 of 100, about 8 min left",
        "8 of 100, about 8 min left",
        "16 of 100, about 7 min left",
        "32 of 100, about 6 min left",
        "64 of 100, about 3 min left",
    ]
    # At least every ten minutes, also if the number of items is unknown.
    lines = crawl(40, lambda _: 100.0, None)
    assert [line.split()[0] for line in lines][-4:] == ["20", "26", "32", "38"]
    # The images of a batch arrive together.
    lines = crawl(48, lambda number: 80.0 if number % 16 == 15 else 0.01, 48)
    assert lines[:2] == ["16 of 48, about 3 min left", "32 of 48, about 1 min left"]
    durations = (0.4, 59.0, 61.0, 3599.0, 11100.0)
    # The results may go to a terminal while the log goes to a file.
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert len(crawl(8, lambda _: 5.0, 8)) == 2
    words = ["< 1 s", "59 s", "1 min", "1 h 00 min", "3 h 05 min"]
    assert list(map(format_duration, durations)) == words
    sizes = {0: "0.1 MB", 12_340_000: "12.3 MB", 999_000_000: "999.0 MB", 10**9: "1.0 GB"}
    assert list(map(output.format_size, sizes)) == [*sizes.values()]


def test_time_left_on_a_terminal_ignores_the_slow_first_item():
    def load_then_crawl() -> None:
        for number in show_progress(range(60), "loading"):
            time.sleep(0.005 if number else 0.5)

    shown = run_on_a_terminal(load_then_crawl)

    left = re.findall(r" (\d+)/60 \[\d+:\d+<(\d+):(\d+),", shown)
    late = [60 * int(minutes) + int(seconds) for done, minutes, seconds in left if int(done) > 3]
    assert late
    assert max(late) <= 3


def test_the_rate_of_a_bar_ignores_the_first_item(monkeypatch):
    bar, rates = output.bar_class()(total=20, initial=10, file=io.StringIO()), list[float]()
    monkeypatch.setattr(bar, "start_t", 0.0)
    for now in (50.0, 52.0, 54.0, 58.0):
        monkeypatch.setattr(bar, "_time", lambda now=now: now)
        bar.update()
        rates.append(bar.format_dict["rate"])
    assert rates[1:] == [1 / 2, 2 / 4, 3 / 8]


def test_commands_show_a_bar_on_a_terminal_only(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    words = make_probe_args("pca", "folder", photo_folder(tmp_path / "photos", 3), "--overwrite")

    assert main(words) == 0
    out, err = capfd.readouterr()
    shown = run_on_a_terminal(lambda: main(words))

    assert all(character.isprintable() or character == "\n" for character in out + err)
    assert re.search(r"pca: +0%\|.*\| 0/3 \[", shown)


def exit_code_of_say(seconds: int) -> int:
    def work() -> None:
        signal.alarm(seconds)
        output.print_message("still here")

    return exit_code(fork(work))


def test_a_process_killed_while_it_prints_blocks_no_other():
    output.print_message("before")
    ready, is_locked = os.pipe()

    def hold_the_lock() -> None:
        with output.bar_class().external_write_mode(file=sys.stderr):
            os.write(is_locked, b"1")
            time.sleep(60)

    child = fork(hold_the_lock)
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    assert exit_code_of_say(5) == 0


def test_a_process_forked_while_a_thread_prints_can_print():
    inside, done = threading.Event(), threading.Event()

    def write() -> None:
        with output.bar_class().external_write_mode(file=sys.stderr):
            inside.set()
            done.wait()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert inside.wait(5)
    try:
        assert exit_code_of_say(5) == 0
    finally:
        done.set()
        thread.join()


def test_only_the_first_process_prints(capsys, monkeypatch):
    set_torchrun_env(monkeypatch, 2, RANK="1")
    items = [1, 2]

    print_message("a line")

    assert show_progress(items, "images") is items
    assert capsys.readouterr() == ("", "")
    set_torchrun_env(monkeypatch, 2, RANK="0")
    for _ in range(2):
        output.print_message_once("a line with \x1b[1m")
    assert capsys.readouterr() == ("", "a line with \\x1b[1m\n")
