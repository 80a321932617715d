"""Test that checkpoints are written correctly while training continues.

If writing fails, the previous checkpoint must remain usable.
"""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pretrain import checkpoints, logging, train
from pretrain.crops.multi import MultiCrop
from ssl_bench.cli.__main__ import main
from ssl_bench.models import build_vit, load_encoder
from ssl_bench.system.files import file_sha256
from tests.pretrain.plans import TINY, state_of
from tests.support.faults import (
    class_folders,
    exit_code,
    expect_error,
    fork,
    make_pretrain_args,
    unchecked_types,
    wait_until,
)
from tests.support.runs import flat, log_rows

# A step takes two of four images, so the state is saved after steps 2, 4 and 6.
EVERY_EPOCH = "train.checkpoint_epochs=1"


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    augment_on_device, steps = MultiCrop.augment_on_device, []

    def augment_and_count(self, *arguments):
        steps.append(1)
        return augment_on_device(self, *arguments)

    monkeypatch.setattr(MultiCrop, "augment_on_device", augment_and_count)
    return steps


@pytest.mark.slow
def test_steps_do_not_change_a_state_that_is_being_written(workdir, monkeypatch, steps):
    words = ["optimizer=soap", "optimizer.precondition_frequency=2", EVERY_EPOCH]
    usual, written = checkpoints.save_state, {}

    def save_slowly(out, state):
        wait_until(lambda: state["step"] != 2 or len(steps) >= 4)
        written[state["step"]] = len(steps)
        usual(out, state)
        if state["step"] == 2:
            (workdir / "second").mkdir()
            usual(workdir / "second", state)

    monkeypatch.setattr(checkpoints, "save_state", save_slowly)
    assert main(make_pretrain_args(workdir / "photos", "run", *words)) == 0
    monkeypatch.setattr(checkpoints, "save_state", usual)

    assert written[2] >= 4
    assert written[6] == 6
    # This run is stopped and resumed once, so it takes two steps.
    stopped = make_pretrain_args(workdir / "photos", "two", *words, "train.max_minutes=0.0")
    assert main(stopped) == 0
    assert main([*stopped, "--resume"]) == 0
    one, other = (flat(state_of(workdir / name)) for name in ("second", "two"))
    for key, value in one.items():
        if key.startswith(("/step", "/learner", "/optimizer")):
            is_tensor = isinstance(value, torch.Tensor)
            assert torch.equal(value, other[key]) if is_tensor else value == other[key], key


@pytest.mark.slow
@unchecked_types()
def test_runs_killed_while_writing_continue_from_the_previous_state(workdir):
    run = make_pretrain_args(workdir / "photos", "run", EVERY_EPOCH)
    usual = checkpoints._write

    def write_half_of_the_second(values, file) -> None:
        usual(values, file)
        if values["step"] == 4:
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def pretrain_and_die() -> int:
        checkpoints._write = write_half_of_the_second
        return main(run)

    assert exit_code(fork(pretrain_and_die, stderr=workdir / "stderr")) == -signal.SIGKILL

    assert list((workdir / "run").glob(".ssl-bench-*.tmp"))
    assert state_of(workdir / "run")["step"] == 2
    load_encoder("run")
    assert main([*run, "--resume"]) == 0
    assert not list((workdir / "run").glob(".ssl-bench-*.tmp"))
    assert main(make_pretrain_args(workdir / "photos", "whole", EVERY_EPOCH)) == 0
    assert log_rows("run") == log_rows("whole")
    assert file_sha256(Path("run/last.safetensors")) == file_sha256(Path("whole/last.safetensors"))


def test_a_run_killed_between_two_renames_continues(workdir):
    run = make_pretrain_args(workdir / "photos", "run", EVERY_EPOCH, "train.max_minutes=0.0")
    assert main(run) == 0
    for step, name in enumerate(("state.new.pt", "state.previous.pt"), start=2):
        Path("run/state.pt").rename(f"run/{name}")
        assert main([*run, "--resume"]) == 0
        assert state_of(workdir / "run")["step"] == step


def test_full_disks_end_the_run_and_keep_the_previous_state(workdir, capsys, monkeypatch, steps):
    write, log, full = checkpoints._write, train.logging.StepReporter.add, []

    def fail_from_step_4(values, file) -> None:
        if values["step"] == 4 or full:
            full.append(1)
            raise OSError(28, "No space left on device")
        write(values, file)

    def wait_and_add(self, row, *arguments, **flags):
        # The fifth step ends after the error.
        wait_until(lambda: row["step"] != 5 or full)
        time.sleep(0.3 * (row["step"] == 5))
        log(self, row, *arguments, **flags)

    monkeypatch.setattr(checkpoints, "_write", fail_from_step_4)
    monkeypatch.setattr(train.logging.StepReporter, "add", wait_and_add)
    message = expect_error(capsys, make_pretrain_args(workdir / "photos", "run", EVERY_EPOCH), 5)

    assert "No space left on device" in message
    assert len(log_rows("run")) == 5
    assert state_of(workdir / "run")["step"] == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weights_are_not_saved(tmp_path, value):
    saver, encoder, messages = checkpoints.Saver(tmp_path), build_vit(TINY, seed=0), []
    state = {"step": 1, "learner": {"whole": torch.ones(2), "part": torch.ones(3)}}
    saver.save(state, encoder, {}, messages.append)
    saver.wait()
    state = {"step": 2, "learner": {"whole": torch.ones(2), "part": torch.tensor([1, value, 1])}}
    saver.save(state, encoder, {}, messages.append)
    saver.keep(1, encoder, {}, messages.append)
    saver.wait()
    with torch.no_grad():
        encoder.norm.weight[0] = value
    saver.keep(2, encoder, {}, messages.append)
    saver.wait()
    saver.close()
    assert state_of(tmp_path)["step"] == saver.saved_step == 1
    assert [line.split(":")[0] for line in messages] == ["step 2", "epoch 1", "epoch 2"]
    assert [path.name for path in tmp_path.glob("epoch*.safetensors")] == ["epoch0001.safetensors"]


def test_steps_with_non_finite_weights_do_not_count_as_saved(workdir, capsys, monkeypatch):
    run = make_pretrain_args(workdir / "photos", "run", "train.max_minutes=0.0")
    assert main(run) == 0
    monkeypatch.setattr(checkpoints, "_are_finite", lambda _: False)
    capsys.readouterr()
    assert main([*run, "--resume"]) == 0
    assert "time limit reached: 1 of 6 steps are saved in run" in capsys.readouterr().err
    assert state_of(workdir / "run")["step"] == 1


@pytest.mark.parametrize(("seconds", "saved"), [(121, [1, 3]), (100, [3])])
def test_a_state_is_saved_minutes_after_the_last_one(workdir, monkeypatch, seconds, saved):
    class LateClock(logging.Clock):
        def __init__(self) -> None:
            super().__init__()
            self.last_save -= seconds

    def save_and_count(self, state, *arguments):
        found.append(state["step"])
        save(self, state, *arguments)

    save, found = checkpoints.Saver.save, []
    monkeypatch.setattr(logging, "Clock", LateClock)
    monkeypatch.setattr(checkpoints.Saver, "save", save_and_count)
    words = ("train.checkpoint_minutes=2.0", "train.max_steps=3")
    assert main(make_pretrain_args(workdir / "photos", "run", *words)) == 0
    assert found == saved


@pytest.mark.slow
def test_a_process_finishes_writing_before_it_exits(workdir):
    code = (
        "import time; from pathlib import Path; from pretrain.checkpoints import Saver\n"
        "saver = Saver(Path())\n"
        "saver.submit('file', lambda: (time.sleep(0.5), Path('written').touch()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert ended.returncode == 0
    assert Path("written").is_file()


def test_a_slow_disk_does_not_change_the_kept_encoders(workdir, capsys, monkeypatch):
    usual, keep, kept = checkpoints.save_encoder, checkpoints.Saver.keep, []

    def save_slowly(*arguments):
        # Nothing is written before the run has requested all files.
        wait_until(lambda: len(kept) >= 3)
        usual(*arguments)

    def keep_and_count(self, *arguments):
        keep(self, *arguments)
        kept.append(1)

    assert main(make_pretrain_args(workdir / "photos", "quick", "train.keep_every=1")) == 0
    capsys.readouterr()
    monkeypatch.setattr(checkpoints, "save_encoder", save_slowly)
    monkeypatch.setattr(checkpoints.Saver, "keep", keep_and_count)
    assert main(make_pretrain_args(workdir / "photos", "run", "train.keep_every=1")) == 0

    output = capsys.readouterr().err
    for epoch in (1, 2, 3):
        name = f"epoch{epoch:04d}.safetensors"
        assert f"epoch {epoch}: kept {name}" in output
        assert Path("run", name).read_bytes() == Path("quick", name).read_bytes()


@pytest.mark.parametrize(("seconds", "mentions"), [(0.0, 1), (1.0, 0)])
def test_a_slow_monitor_is_reported(workdir, capsys, monkeypatch, seconds, mentions):
    monkeypatch.setattr(train, "_MONITOR_SECONDS", seconds)
    monkeypatch.setattr(train, "_MONITOR_SHARE", seconds)
    root = class_folders(workdir / "classes", 2)
    words = ("monitor.knn_epochs=9", f"monitor.root={root}", "monitor.neighbours=2")
    assert main(make_pretrain_args(workdir / "photos", "run", *words, "train.max_steps=2")) == 0
    assert capsys.readouterr().err.count("depends on monitor.train_images") == mentions
