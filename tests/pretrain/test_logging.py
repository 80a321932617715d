"""Test the logging of a training run, including TensorBoard and W&B."""

import itertools
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pretrain import logging
from pretrain.checkpoints import BOARD, WANDB
from pretrain.logging import LogFile, ProgressBar
from pretrain.trackers import TensorBoardLog, WandbLog
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import MachineError
from tests.support.faults import expect_error, make_pretrain_args
from tests.support.runs import log_rows


def test_a_run_continues_with_a_damaged_log(workdir):
    run = make_pretrain_args(workdir / "photos", "run")
    assert main([*run, "train.max_minutes=0.0"]) == 0
    row, damaged = Path("run/log.jsonl").read_bytes(), [b"[1]", b"null", b'{"epoch": 1}', b""]
    damaged += [b'{"step": "1"}', b'{"step": 1, "lo', b'{"step": 1, "\xff": 1}', bytes(40)]
    Path("run/log.jsonl").write_bytes(b"\n".join([*damaged, row, *damaged]))
    assert main([*run, "--resume"]) == 0
    assert [row["step"] for row in log_rows("run")] == [1, 2, 3, 4, 5, 6]


def test_the_remaining_time_is_never_negative(workdir, monkeypatch, capsys):
    class ClockAfterAnHour(logging.Clock):
        def __init__(self) -> None:
            super().__init__()
            self.run_start -= 3600

    monkeypatch.setattr(logging, "Clock", ClockAfterAnHour)
    monkeypatch.setattr(logging, "_SECONDS_BETWEEN_LINES", 0.0)
    words = ("train.max_minutes=0.5", "train.epochs=1000", "train.max_steps=2000")
    assert main(make_pretrain_args(workdir / "photos", "run", *words)) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert line.endswith("  00:00 left")


def test_the_progress_bar_of_a_resumed_run_counts_its_earlier_steps(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = ProgressBar(total=100, done=60, quiet=False, stop_time=math.inf)
    bar.close()
    assert "60/100" in capsys.readouterr().err


@pytest.mark.parametrize(("done", "left"), [(0, "01:37"), (60, "00:37")])
def test_the_remaining_time_counts_only_the_remaining_steps(monkeypatch, capsys, done, left):
    seconds = itertools.count()
    monkeypatch.setattr("pretrain.logging.time.monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(logging, "_LONG", 30.0)
    bar = ProgressBar(total=100, done=done, quiet=False, stop_time=math.inf)
    for step in range(done + 1, done + 4):
        row = {"step": step, "epoch": 0, "loss": 1.0, "images_per_second": 9.0, "mfu": 1.0}
        bar.show(row | {"data_wait": 0.0})
    bar.close()
    *advice, line = capsys.readouterr().err.splitlines()
    # The settings of a resumed run cannot change, so only a new run is advised to be shorter.
    assert ["train.max_steps=3600" in one for one in advice] == [True] * (done == 0)
    assert line.startswith(f"step {done + 3}/100 ")
    assert line.endswith(f"  {left} left")


def test_the_wait_for_data_is_measured_separately_for_each_step(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 5.0, 6.0, 6.5, 9.0])
    monkeypatch.setattr(logging.time, "monotonic", lambda: next(times))
    clock = logging.Clock()
    steps = []
    for _ in range(2):
        with clock.count_waiting():
            pass
        steps.append(clock.end_step())
    assert steps == [(5.0, 2.0), (4.0, 0.5)]


@pytest.mark.parametrize(("late", "total", "is_warned"), [(20, 900, 1), (5, 900, 0), (20, 99, 0)])
def test_long_waits_for_data_are_reported_once(monkeypatch, capsys, late, total, is_warned):
    seconds = itertools.count()
    monkeypatch.setattr("pretrain.logging.time.monotonic", lambda: float(next(seconds)))
    bar = ProgressBar(total=total, done=0, quiet=False, stop_time=math.inf)
    for step in range(1, 99):
        # Long waits in the first steps are ignored, because workers are starting.
        row = {"step": step, "epoch": 0, "loss": 1.0, "images_per_second": 9.0, "mfu": 1.0}
        bar.show(row | {"data_wait": 99.0 if step < 20 else late})
    bar.close()
    assert capsys.readouterr().err.count("train.num_workers") == is_warned


@pytest.fixture
def runs(monkeypatch) -> list[SimpleNamespace]:
    started: list[SimpleNamespace] = []

    def init(**options: Any) -> SimpleNamespace:
        run = SimpleNamespace(**options, rows=[], axes={}, finished=False)
        run.log = run.rows.append
        run.define_metric = lambda name, step_metric: run.axes.update({name: step_metric})
        run.finish = lambda: setattr(run, "finished", True)
        started.append(run)
        return run

    package = ModuleType("wandb")
    package.init = init  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "wandb", package)
    return started


def test_trackers_receive_all_finite_numbers_without_repeated_steps(tmp_path, runs):
    package = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(package).EventAccumulator(str(tmp_path / "board"))
    for last_step, losses in ((0, [0.5, float("nan"), 2.5, 3.5]), (2, [0.25, 0.125])):
        board = TensorBoardLog(tmp_path / "board", last_step=last_step)
        wandb = WandbLog("skips", tmp_path / "wandb", {}, last_step=last_step)
        journal = LogFile(tmp_path / "log.jsonl", last_step=last_step, trackers=[board, wandb])
        for step, loss in enumerate(losses, start=last_step + 1):
            journal.write({"step": step, "epoch": step // 4, "loss": loss})
        journal.close()

    accumulator.Reload()
    curves = {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
    assert curves == {
        "epoch": [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)],
        "loss": [(1, 0.5), (3, 0.25), (4, 0.125)],
    }
    assert runs[0].rows[:2] == [{"step": 1, "epoch": 0, "loss": 0.5}, {"step": 2, "epoch": 0}]


def test_a_run_continues_its_run_of_each_tracker(workdir, runs):
    pytest.importorskip("tensorboard")
    words = make_pretrain_args(workdir / "photos", "run", "train.max_steps=2", "train.wandb=skips")
    assert main([*words, "train.max_minutes=0.0"]) == 0
    assert main([*words, "--resume"]) == 0
    assert main([*words, "--overwrite", "train.tensorboard=true"]) == 0

    first, resumed, run = runs
    assert first.id == resumed.id != run.id
    assert {one.resume for one in runs} == {"allow"}
    assert [row["step"] for row in (*first.rows, *resumed.rows)] == [1, 2]
    assert run.dir == f"run/{WANDB}"
    assert [row["loss"] for row in run.rows] == [row["loss"] for row in log_rows(workdir / "run")]
    assert [row["step"] for row in run.rows] == [1, 2]
    assert run.config["train"]["wandb"] == "skips"
    assert (run.project, run.name, run.axes, run.finished) == ("skips", "run", {"*": "step"}, True)
    assert list(Path("run", BOARD).glob("events*"))


def test_an_error_of_wandb_gives_a_hint(tmp_path, runs):
    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    sys.modules["wandb"].init = refuse  # pyrefly: ignore[missing-attribute]
    with pytest.raises(MachineError, match="no API key") as caught:
        WandbLog("skips", tmp_path, {}, last_step=0)
    assert caught.value.hint == ("train.wandb=null",)


@pytest.mark.parametrize(
    ("package", "word", "remedy"),
    [
        ("wandb", "train.wandb=skips", "pip install wandb"),
        ("tensorboard", "train.tensorboard=true", "pip install 'ssl-bench[track]'"),
    ],
)
def test_a_missing_tracker_is_reported_before_anything_is_written(
    workdir, monkeypatch, capsys, package, word, remedy
):
    monkeypatch.delitem(sys.modules, f"torch.utils.{package}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert remedy in expect_error(capsys, make_pretrain_args(workdir / "photos", "run", word), 5)
    assert not (workdir / "run").exists()
