"""Curves for TensorBoard beside the log, across a resume, and the package that may be missing."""

import sys

import pytest

from pretrain.logging import Board, Journal, require_tensorboard
from ssl_bench.errors import MachineError


def curves_of(folder):
    """Steps and values that TensorBoard shows, by name."""
    package = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(package).EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def write_rows(folder, losses, *, last_step):
    pytest.importorskip("tensorboard")
    board = Board(folder / "board", last_step=last_step)
    journal = Journal(folder / "log.jsonl", last_step=last_step, curves=[board])
    for step, loss in enumerate(losses, start=last_step + 1):
        journal.write({"step": step, "epoch": step // 4, "loss": loss})
    journal.close()


def test_every_number_of_a_row_is_a_point_of_a_curve(tmp_path):
    write_rows(tmp_path, [0.5, float("nan"), 0.25], last_step=0)

    curves = curves_of(tmp_path / "board")

    assert curves == {"epoch": [(1, 0), (2, 0), (3, 0)], "loss": [(1, 0.5), (3, 0.25)]}


def test_after_a_resume_only_the_repeated_steps_are_shown(tmp_path):
    write_rows(tmp_path, [0.5, 1.5, 2.5, 3.5], last_step=0)
    write_rows(tmp_path, [0.25, 0.125], last_step=2)

    curves = curves_of(tmp_path / "board")

    assert curves["loss"] == [(1, 0.5), (2, 1.5), (3, 0.25), (4, 0.125)]


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    # None makes the import fail, as it does where the package is not installed.
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with pytest.raises(MachineError, match=r"needs the package tensorboard.*ssl-bench\[track\]"):
        require_tensorboard()
