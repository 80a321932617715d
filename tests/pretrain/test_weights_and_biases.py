"""Rows of the log for Weights & Biases, walked with a stand-in of its package."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pretrain.checkpoints import WANDB
from pretrain.logging import Journal, WandbRun
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import MachineError
from tests.support.faults import fails, pretraining
from tests.support.runs import log_rows


@pytest.fixture
def runs(monkeypatch) -> list[SimpleNamespace]:
    """What the stand-in was asked to begin, each with the rows that it got."""
    begun: list[SimpleNamespace] = []

    def init(**asked: Any) -> SimpleNamespace:
        run = SimpleNamespace(**asked, rows=[], axes={}, finished=False)
        run.log = run.rows.append
        run.define_metric = lambda name, step_metric: run.axes.update({name: step_metric})
        run.finish = lambda: setattr(run, "finished", True)
        begun.append(run)
        return run

    package = ModuleType("wandb")
    package.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    return begun


def write_rows(folder, losses, *, last_step):
    curves = WandbRun("skips", folder / "wandb", {"seed": 0}, last_step=last_step)
    journal = Journal(folder / "log.jsonl", last_step=last_step, curves=[curves])
    for step, loss in enumerate(losses, start=last_step + 1):
        journal.write({"step": step, "loss": loss})
    journal.close()


def test_rows_are_sent_over_their_own_step(tmp_path, runs):
    write_rows(tmp_path, [0.5, float("nan")], last_step=0)

    (run,) = runs
    assert run.rows == [{"step": 1, "loss": 0.5}, {"step": 2}]
    assert (run.project, run.name, run.config) == ("skips", tmp_path.name, {"seed": 0})
    assert run.axes == {"*": "step"}
    assert run.finished


def test_a_resumed_run_is_the_same_and_one_begun_anew_is_another(tmp_path, runs):
    write_rows(tmp_path, [0.5], last_step=0)
    write_rows(tmp_path, [0.25], last_step=1)
    write_rows(tmp_path, [0.5], last_step=0)

    first, resumed, anew = (run.id for run in runs)
    assert first == resumed != anew
    assert {run.resume for run in runs} == {"allow"}


def test_a_pretraining_sends_what_its_log_says(place, runs):
    assert main(pretraining(place / "photos", "run", "train.max_steps=2", "train.wandb=skips")) == 0

    (run,) = runs
    assert run.dir == f"run/{WANDB}"
    assert [row["loss"] for row in run.rows] == [row["loss"] for row in log_rows(place / "run")]
    assert run.config["train"]["wandb"] == "skips"


def test_a_service_that_refuses_ends_the_run_in_one_line(tmp_path, runs):
    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    sys.modules["wandb"].init = refuse  # type: ignore[attr-defined]

    with pytest.raises(MachineError, match=r"no API key.*WANDB_MODE=offline"):
        WandbRun("skips", tmp_path, {}, last_step=0)


def test_a_missing_package_is_noticed_before_anything_is_written(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)

    words = pretraining(place / "photos", "run", "train.wandb=skips")

    assert "pip install wandb, or leave it out" in fails(capsys, words, 5)
    assert not (place / "run").exists()
