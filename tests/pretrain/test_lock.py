"""Test that only one process at a time writes to a run folder."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from pretrain import lock
from pretrain.lock import lock_folder
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.system import output
from tests.support.faults import exit_code, expect_error, fork, make_pretrain_args
from tests.support.runs import log_rows

FORK = multiprocessing.get_context("fork")


def start_run(*arguments: str) -> int:
    child = fork(lambda: main([*arguments, "train.max_steps=100000"]), stderr=Path("stderr"))
    log = Path("run", "log.jsonl")
    while not (log.exists() and log.stat().st_size):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), Path("stderr").read_text()
        time.sleep(0.01)
    return child


def test_a_folder_in_use_is_refused_and_not_changed(workdir, capsys):
    child = start_run(*make_pretrain_args(workdir / "photos", "run", "train.seed=1"))
    before = Path("run/config.yaml").read_bytes()
    for flags in ([], ["--overwrite"]):
        words = make_pretrain_args(workdir / "photos", "run", "train.seed=2", *flags)
        message = expect_error(capsys, words, 2)
        assert f"(process {child} on " in message
        assert "`--out FOLDER`" in message

    os.kill(child, signal.SIGTERM)
    # A stopped run releases its lock.
    assert exit_code(child) == 75
    assert not Path("run/.lock").exists()
    assert Path("run/config.yaml").read_bytes() == before
    assert [row["step"] for row in log_rows("run")] == list(range(1, len(log_rows("run")) + 1))


def run_processes(count: int, work, *arguments) -> None:
    barrier = FORK.Barrier(count)
    children = [FORK.Process(target=work, args=(barrier, *arguments)) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count


def compete_for_locks(barrier, rounds: int, wins) -> None:
    for number in range(rounds):
        barrier.wait()
        try:
            with lock_folder(Path(f"run{number}")):
                wins[number] += 1
                barrier.wait()
        except ConfigurationError:
            barrier.wait()


@pytest.mark.slow
@pytest.mark.parametrize("is_last_owner_dead", [False, True])
def test_exactly_one_of_many_processes_gets_the_lock(workdir, is_last_owner_dead):
    rounds = 5
    for number in range(rounds * is_last_owner_dead):
        folder = Path(f"run{number}")

        def die_with_lock(folder=folder) -> None:
            with lock_folder(folder):
                os.kill(os.getpid(), signal.SIGKILL)

        assert exit_code(fork(die_with_lock)) == -signal.SIGKILL
        assert (folder / ".lock").read_text()
    wins = FORK.Array("i", rounds)
    run_processes(4, compete_for_locks, rounds, wins)

    assert wins[:] == [1] * rounds
    assert list(Path().glob("run*")) == []


def lock_repeatedly(barrier, folder: Path, seconds: float, inside, overlaps) -> None:
    barrier.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with lock_folder(folder):
                with inside.get_lock():
                    inside.value += 1
                    overlaps.value += inside.value > 1
                with inside.get_lock():
                    inside.value -= 1
        except ConfigurationError:
            pass


@pytest.mark.slow
def test_processes_that_lock_and_unlock_never_overlap(workdir):
    inside, overlaps = FORK.Value("i", 0), FORK.Value("i", 0)
    # The process that releases the lock does not delete a folder with other files.
    Path("run").mkdir()
    Path("run/log.jsonl").touch()
    run_processes(4, lock_repeatedly, Path("run"), 0.7, inside, overlaps)
    assert overlaps.value == 0


def test_workers_that_outlive_a_killed_run_hold_no_lock(workdir):
    child = start_run(*make_pretrain_args(workdir / "photos", "run", "train.num_workers=2"))
    children = Path(f"/proc/{child}/task/{child}/children").read_text()
    workers = [int(number) for number in children.split()]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL

    try:
        assert len(workers) >= 2
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
        text = Path("run/.lock").read_text()
        assert f"process {child} " in text
        Path("run/.lock").write_text(3 * text)
        with lock_folder(Path("run")):
            text = Path("run/.lock").read_text()
            assert f"process {os.getpid()} " in text
            assert f"process {child} " not in text
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOLCK, None])
def test_a_file_system_without_locks_is_reported_once(tmp_path, capsys, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number or 0))

    output.print_message_once.cache_clear()
    if number is None:
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "lockf", refuse)
    for _ in range(2):
        with lock_folder(tmp_path / "run"):
            assert (tmp_path / "run/.lock").is_file()

    assert capsys.readouterr().err.count("run cannot be locked") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EAGAIN])
def test_a_lock_of_an_unknown_process_is_respected(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with (
        pytest.raises(ConfigurationError, match="another process") as caught,
        lock_folder(tmp_path / "run"),
    ):
        pass
    assert caught.value.hint == ("--out", "{folder}")


def test_a_run_that_cannot_begin_leaves_no_folder(workdir, capsys):
    words = ("train.batch_size=3", "train.accumulation=2")
    expect_error(capsys, make_pretrain_args(workdir / "photos", "run", *words), 2)
    assert not Path("run").exists()
