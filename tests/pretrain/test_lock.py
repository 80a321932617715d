"""A run's folder belongs to one process; a dead one leaves it to the next."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from pretrain import lock
from pretrain.lock import held
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.files import file_sha256
from tests.support.faults import exit_code, fails, fork, pretraining
from tests.support.runs import log_rows

LONG = "train.max_steps=100000"
FORK = multiprocessing.get_context("fork")


def holders(run: str = "run") -> list[str]:
    return [path.name for path in Path(run).glob(".holder*")]


def started(*arguments: str, run: str = "run") -> int:
    """Begin a run in another process; its id, once it has taken a step."""
    child = fork(lambda: main(list(arguments)), stderr=Path("said"))
    log = Path(run, "log.jsonl")
    while not (log.exists() and log.stat().st_size):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), Path("said").read_text()
        time.sleep(0.01)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL


def dead_holder(folder: Path) -> None:
    def hold() -> None:
        with held(folder):
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(fork(hold)) == -signal.SIGKILL
    assert holders(str(folder)) == [".holder.1"]


def foreign_holder(folder: Path) -> Path:
    """The file of a process on another machine."""
    dead_holder(folder)
    path = folder / ".holder.1"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"place": "there", "host": "far"}))
    return path


@pytest.mark.parametrize("how", ["", "--overwrite"])
def test_fault_58_a_folder_in_use_is_refused_with_its_holder_and_left_alone(place, capsys, how):
    run = pretraining(place / "photos", "run", LONG, "train.seed=1")
    child = started(*run)
    before = file_sha256(Path("run/config.yaml"))

    second = [*pretraining(place / "photos", "run", "train.seed=2"), *([how] if how else [])]
    said = fails(capsys, second, 2)

    number, code = (signal.SIGINT, 130) if how else (signal.SIGTERM, 75)
    os.kill(child, number)
    # A run that is told to stop lets go.
    assert exit_code(child) == code
    assert holders() == []
    assert "run is held by `ssl-bench" in said
    assert f"(process {child} on " in said
    assert file_sha256(Path("run/config.yaml")) == before
    assert [row["step"] for row in log_rows("run")] == list(range(1, len(log_rows("run")) + 1))


def contend(together, rounds: int, wins) -> None:
    for number in range(rounds):
        together.wait()
        try:
            with held(Path(f"run{number}")):
                wins[number] += 1
                together.wait()
        except ConfigurationError:
            together.wait()


@pytest.mark.slow
@pytest.mark.parametrize("last", ["nobody", "dead"])
def test_fault_58_of_many_processes_that_start_at_once_exactly_one_holds(place, last):
    rounds, count = 25, 6
    if last == "dead":
        dead_holder(Path("dead"))
        for number in range(rounds):
            shutil.copytree("dead", f"run{number}")
    wins, together = FORK.Array("i", rounds), FORK.Barrier(count)

    children = [FORK.Process(target=contend, args=(together, rounds, wins)) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()

    assert wins[:] == [1] * rounds
    assert list(Path().glob("run*/.holder*")) == []


def children_of(parent: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_fault_58_workers_that_outlive_a_killed_run_do_not_hold_its_folder(place):
    run = pretraining(place / "photos", "run", "train.num_workers=2")
    child = started(*run, LONG)
    workers = children_of(child)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)

    kill(child)

    assert len(workers) >= 2
    assert all(Path(f"/proc/{worker}").exists() for worker in workers)
    assert holders() == [".holder.1"]
    start = time.monotonic()
    with held(Path("run")):
        assert holders() == [".holder.2"]
    assert time.monotonic() - start < 1
    for worker in workers:
        os.kill(worker, signal.SIGKILL)


def test_a_number_that_another_process_has_got_since_is_not_the_holder(tmp_path):
    dead_holder(tmp_path / "run")
    path = tmp_path / "run/.holder.1"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": os.getpid()}))

    with held(tmp_path / "run"):
        assert holders(str(tmp_path / "run")) == [".holder.2"]


@pytest.mark.parametrize("content", ["as written", "", '{"pid": 1}'])
def test_fault_58_a_holder_elsewhere_without_a_sign_of_life_is_dead(
    tmp_path, monkeypatch, capsys, content
):
    path = foreign_holder(tmp_path / "run")
    if content != "as written":
        path.write_text(content)
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.4)

    with held(tmp_path / "run"):
        assert holders(str(tmp_path / "run")) == [".holder.2"]

    assert "looking for a sign of life of " in capsys.readouterr().err


def test_fault_58_a_holder_elsewhere_that_touches_its_file_is_alive(tmp_path):
    path = foreign_holder(tmp_path / "run")
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        alive = pytest.raises(ConfigurationError, match=r"process \d+ on far since")
        with alive, held(tmp_path / "run"):
            pass
    finally:
        over.set()
        thread.join()
    assert path.exists()


def test_a_holder_touches_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    with held(tmp_path / "run"):
        path = tmp_path / "run/.holder.1"
        os.utime(path, (0, 0))
        while path.stat().st_mtime == 0:
            time.sleep(0.01)


def test_fault_58_a_run_that_was_taken_for_dead_writes_nothing_more(place, capsys, monkeypatch):
    save = lock.Hold.require

    def after_somebody_took_it(hold):
        Path("run/.holder.1").unlink()
        save(hold)

    monkeypatch.setattr(lock.Hold, "require", after_somebody_took_it)

    said = fails(capsys, pretraining(place / "photos", "run"), 5)

    assert "was taken over by another run" in said
    assert not Path("run/state.pt").exists()


def test_a_run_that_cannot_begin_leaves_no_folder(place, capsys):
    fails(
        capsys,
        pretraining(place / "photos", "run", "train.batch_size=3", "train.accumulation=2"),
        2,
    )

    assert not Path("run").exists()
