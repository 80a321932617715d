"""Read, compare and interrupt pretraining runs."""

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.checkpoints import ENCODER, LOG, load_state
from pretrain.plan import Pretraining
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import Preempted
from tests.support.faults import (
    class_folders,
    make_pretrain_args,
    make_supervised_args,
    unchecked_types,
)

CPU = torch.device("cpu")
TIMED = ("images_per_second", "data_wait", "mfu")


def log_rows(run: str | Path, *, timed: bool = False) -> list[dict[str, Any]]:
    """Return the log of a training run. Measured times are removed unless `timed` is true."""
    rows = [json.loads(line) for line in Path(run, LOG).read_text().splitlines()]
    return [{k: v for k, v in row.items() if timed or k not in TIMED} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    """Check that two training runs have identical states, logs and encoders."""
    states = [flat(load_state(out, CPU)[0]) for out in (one, other)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        if isinstance(value, Tensor):
            assert torch.equal(value, states[1][key]), key
        elif not key.startswith("/configuration/train/num_workers"):
            assert value == states[1][key], key
    assert log_rows(one) == log_rows(other)
    assert (one / ENCODER).read_bytes() == (other / ENCODER).read_bytes()


def interrupt_at_micro_batch(
    monkeypatch: pytest.MonkeyPatch, crops: type, number: int, sent: int = signal.SIGTERM
) -> None:
    """Send a signal to the training process before the given micro-batch."""
    augment_on_device, calls = crops.augment_on_device, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), sent)
        return augment_on_device(self, *arguments)

    monkeypatch.setattr(crops, "augment_on_device", interrupted)


def assert_resumes_exactly(
    plan: Pretraining,
    folder: Path,
    *,
    parts: int = 4,  # number of the micro-batch at which the signal is sent
    steps: int = 4,  # number of steps that the stopped run must complete
    sent: int = signal.SIGTERM,
    error: type[BaseException] = Preempted,
    workers: int | None = None,
) -> Path:
    """Check that a stopped and resumed run equals an uninterrupted run."""
    path = plan.run(folder / "whole", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at_micro_batch(patch, type(plan.objective.crops), parts, sent)
        with pytest.raises(error):
            plan.run(folder / "stopped", device="cpu")
    assert [row["step"] for row in log_rows(folder / "stopped")] == list(range(1, steps + 1))
    if workers is not None:
        plan = replace(plan, train=replace(plan.train, num_workers=workers))
    plan.run(folder / "stopped", resume=True, device="cpu")
    assert_same_run(folder / "whole", folder / "stopped")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return path


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{prefix}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return flat(dict(enumerate(value)), prefix)
    return {prefix: value}


def pretrain_two(root: Path) -> Path:
    """Run DINO and supervised pretraining, and return the folder that contains both runs."""
    # An epoch of DINO has 3 steps, an epoch of supervised pretraining 2.
    images, runs = class_folders(root / "images"), root / "runs"
    neighbours = ["monitor.knn_epochs=1", "monitor.neighbours=2", f"monitor.root={images}"]
    with unchecked_types():
        assert main(make_pretrain_args(images / "train", str(runs / "dino"), *neighbours)) == 0
        accuracy = ["monitor.accuracy_epochs=1", "train.batch_size=3", "model=vit_tiny_skipless"]
        assert main(make_supervised_args(images, str(runs / "labels"), *accuracy)) == 0
    return runs


def write_log(folder: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    folder.mkdir(parents=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / LOG).write_text("".join(f"{line}\n" for line in lines))
    return folder
