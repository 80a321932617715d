"""Test that a pretraining run can continue after a failure."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pretrain.checkpoints import load_state, save_state
from pretrain.objectives.dino import DinoLearner
from pretrain.step import Trainer
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import MachineError
from ssl_bench.models import build_vit, load_encoder, save_encoder
from ssl_bench.results import ResultStore
from ssl_bench.system.files import file_sha256
from tests.core.test_results import RECORD
from tests.support.faults import (
    PRETRAIN,
    TINY,
    class_folders,
    corrupt_file,
    exit_code,
    expect_error,
    fork,
    limit_file_size,
    make_pretrain_args,
    make_probe_args,
    make_supervised_args,
    picture,
    records,
    wait_until,
)
from tests.support.runs import assert_same_run, log_rows

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ONE_STEP = "train.max_minutes=0.0"
PHOTOS = Path("photos")
DIGEST = Path("run/state.pt.sha256")


def test_only_keys_that_can_be_typed_again_are_named(begun, capsys):
    settings = ["pretrain", "--out", "run", "--resume", *PRETRAIN[1:], "train.epochs=99"]

    message = expect_error(capsys, [*settings, "model.depth=3"], 2)

    assert "(model.depth: 2 -> 3; train.epochs: 300 -> 99)" in message
    assert "num_workers" not in expect_error(
        capsys, [*begun, "--resume", "train.num_workers=1", "model.depth=3"], 2
    )
    assert "--extend" not in expect_error(capsys, [*begun, "train.max_steps=5", "--resume"], 2)
    longer = [*begun, "train.max_steps=8", "--extend"]
    assert "--extend" not in expect_error(capsys, [*longer, "optimizer.lr=1e-5"], 2)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("soap", marks=pytest.mark.slow)])
def test_a_run_in_pieces_equals_the_uninterrupted_one(workdir, optimizer):
    def run(out: str) -> list[str]:
        return make_pretrain_args(PHOTOS, out, f"optimizer={optimizer}", "train.max_steps=3")

    assert main(run("whole")) == 0
    # There is no run to resume yet.
    assert main([*run("pieces"), ONE_STEP, "--resume"]) == 0
    assert main([*run("pieces"), "--resume", ONE_STEP, "train.num_workers=2"]) == 0
    subprocess.run(["cp", "-r", "pieces", "cut"], check=True)

    assert main([*run("pieces"), "--resume", "train.num_workers=1"]) == 0
    assert_same_run(Path("whole"), Path("pieces"))
    # If the last state is damaged, the run continues from the previous one.
    corrupt_file(Path("cut/state.pt"), "half")
    assert main([*run("cut"), "--resume"]) == 0
    assert file_sha256(Path("cut/last.safetensors")) == file_sha256(Path("whole/last.safetensors"))


def set_processes(number: int | None) -> None:
    # States that older versions have written lack the number of processes.
    state = load_state(Path("run"), CPU)[0]
    assert state.pop("processes") == 1
    save_state(Path("run"), state if number is None else {**state, "processes": number})


# For each change of the folder: the function that makes it, whether a message reports it, a part of
# this message, and the steps in the log after resuming.
REPORTS = {
    "no digest of the state": (DIGEST.unlink, True, "state.pt", [1, 2]),
    "no valid digest": (lambda: DIGEST.write_text("no digest\n"), True, "state.pt", [1, 2]),
    "no log": (Path("run/log.jsonl").unlink, True, "run/log.jsonl is missing", [2]),
    "two processes": (lambda: set_processes(2), True, "saved with 2 processes", [1, 2]),
    "an older version": (lambda: set_processes(None), False, "processes and continues", [1, 2]),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_run_reports_a_change_of_its_folder_and_continues(capsys, begun, name):
    change, is_reported, message, steps = REPORTS[name]
    change()
    capsys.readouterr()

    assert main([*begun, "--resume"]) == 0

    assert (message in capsys.readouterr().err) == is_reported
    assert [row["step"] for row in log_rows("run")] == steps
    assert DIGEST.read_text().startswith(file_sha256(Path("run/state.pt")))
    assert load_state(Path("run"), CPU)[0]["processes"] == 1


def flip_a_bit_of_state(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def add_to_state(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "seed of another run": 1}, path)


@pytest.mark.parametrize(
    ("damage", "has_digest"),
    [
        (flip_a_bit_of_state, False),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), False),
        # A valid state that its digests do not list.
        (add_to_state, True),
    ],
)
def test_the_state_before_a_damaged_or_foreign_state_is_used(capsys, begun, damage, has_digest):
    resumed = [*begun, "--resume"]
    assert main(resumed) == 0
    damage(Path("run/state.pt"))
    if not has_digest:
        DIGEST.unlink()
    capsys.readouterr()

    assert main(resumed) == 0

    assert "after step 1 of 6" in capsys.readouterr().err


def test_the_advice_for_lost_digests_and_states_works(workdir, capsys, begun):
    Path("run").rename("a run")
    Path("a run/last.safetensors.sha256").unlink()
    words = make_probe_args("pca", "folder", workdir / "photos", "--checkpoint", "a run")
    message = expect_error(capsys, words, 4)
    command = message.partition("run: ")[2]
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert main(words) == 0

    Path("a run/state.pt").write_bytes(b"")
    run = [*begun, "--out", "a run"]
    assert "`--overwrite`" in expect_error(capsys, [*run, "--resume"], 4)
    assert main([*run, "--overwrite"]) == 0
    assert len(log_rows("a run")) == 1


def test_a_stopped_extension_continues_with_the_same_command(capsys, begun):
    longer = [*begun, "train.max_steps=8", "--extend", "--resume"]
    assert main(longer) == main(longer) == 0
    assert "after step 2 of 8" in capsys.readouterr().err
    (extension,) = yaml.safe_load(Path("run/config.yaml").read_text())["extensions"]
    assert extension == {"step": 1, "from_steps": 6, "to_steps": 8}


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_diverging_run_keeps_finite_weights_and_its_advice_works(workdir, capsys, precision):
    blown_up = ["objective.student_temperature=1e-38", "train.max_steps=40"]
    patience = ["train.checkpoint_minutes=0.0", "train.non_finite_patience=3"]
    run = make_pretrain_args(PHOTOS, "run", f"train.precision={precision}")

    message = expect_error(capsys, [*run, *blown_up, *patience], 2)

    assert len(log_rows("run")) < 40
    state = load_state(Path("run"), CPU)[0]
    assert all(weight.isfinite().all() for weight in state["learner"].values())
    assert "--resume" not in message
    assert "--out FOLDER optimizer.lr=LOWER_RATE" in message
    advice = ["optimizer.lr=1e-5"]
    assert ("train.precision=float32" in message) == (precision == "bfloat16")
    if precision == "bfloat16":
        advice.append("train.precision=float32")
        assert main([*make_pretrain_args(PHOTOS, "another", "train.max_steps=2"), *advice]) == 0


def test_a_rising_learning_rate_is_reported_with_a_remedy(workdir, capsys):
    remedy = ["optimizer.lr=1e-5", "train.final_lr=0.0"]
    for rises, more in ((True, remedy[:1]), (False, ["optimizer.lr=1e-3"]), (False, remedy)):
        run = make_pretrain_args(PHOTOS, "run", "train.max_steps=3", *more, "--overwrite")
        assert main(run) == 0
        rates = [row["lr"] for row in log_rows("run")]
        assert (rates[-1] > rates[1]) == rises
        assert ("learning rate rises from 7.8e-08" in capsys.readouterr().err) == rises


# Stopped and killed runs.


def has_rows() -> bool:
    log = Path("run/log.jsonl")
    return log.exists() and log.stat().st_size > 0


@pytest.mark.parametrize(
    ("number", "workers", "code", "advice"),
    [
        (signal.SIGUSR1, 0, 75, "`--resume`"),
        (signal.SIGTERM, 2, 75, "`--resume`"),
        (signal.SIGINT, 0, 130, "--resume"),
    ],
)
def test_a_stopped_run_saves_its_step_and_continues(workdir, number, workers, code, advice):
    run = make_pretrain_args(PHOTOS, "run", "train.max_steps=2000", f"train.num_workers={workers}")
    child = fork(lambda: main(run), stderr=workdir / "stderr")
    wait_until(has_rows)
    os.kill(child, number)

    assert exit_code(child) == code

    steps = load_state(workdir / "run", CPU)[0]["step"]
    assert steps == len(log_rows("run"))
    assert (workdir / "stderr").read_text().count("--resume") == 1
    assert advice in (workdir / "stderr").read_text().splitlines()[-1]
    assert main([*run, "--resume", ONE_STEP]) == 0
    assert [row["step"] for row in log_rows("run")] == list(range(1, steps + 2))


def test_a_run_is_saved_when_its_terminal_is_closed(workdir):
    run = make_pretrain_args(PHOTOS, "run", "train.max_steps=2000")
    child, terminal = pty.fork()
    if not child:
        code = 70
        try:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            # Replace pytest's streams by the streams of the terminal.
            for number, name in ((1, "stdout"), (2, "stderr")):
                setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
            code = main(run)
        finally:
            os._exit(code)
    wait_until(has_rows)
    os.close(terminal)

    assert exit_code(child) == 75
    assert load_state(Path("run"), CPU)[0]["step"] == len(log_rows("run"))


def test_a_run_under_nohup_ignores_the_closed_terminal(workdir):
    run = make_pretrain_args(PHOTOS, "run", "train.max_steps=12")

    def under_nohup() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return main(run)

    child = fork(under_nohup, stderr=workdir / "stderr")
    wait_until(has_rows)
    os.kill(child, signal.SIGHUP)

    assert exit_code(child) == 0
    assert len(log_rows("run")) == 12


def pause_after(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # The file tells the test when to stop the command.
    method = getattr(ResultStore, name)

    def slow(*arguments, **named):
        result = method(*arguments, **named)
        Path("begun").touch()
        time.sleep(60)
        return result

    monkeypatch.setattr(ResultStore, name, slow)


@pytest.mark.parametrize(("command", "name"), [("probe", "SIGHUP"), ("sweep", "SIGTERM")])
def test_a_stopped_probe_keeps_its_results_and_continues(workdir, monkeypatch, command, name):
    words = [command, *make_probe_args("pca", "folder", PHOTOS, "--layer", "0,1")[1:]]
    with monkeypatch.context() as patch:
        pause_after(patch, "save")
        child = fork(lambda: main(words), stderr=workdir / "stderr")
        wait_until(Path("begun").exists)
        os.kill(child, getattr(signal, name))
        assert exit_code(child) == 75

    output = (workdir / "stderr").read_text()
    assert name in output.splitlines()[-1]
    assert "Traceback" not in output
    assert len(records()) == 1
    assert not list(workdir.rglob("*.tmp"))
    assert main(words) == 0
    assert len(records()) == 2


def test_other_commands_report_the_signal_that_stopped_them(workdir, monkeypatch):
    ResultStore(Path("results")).save(RECORD)
    pause_after(monkeypatch, "records")
    child = fork(lambda: main(["table"]), stderr=workdir / "stderr")
    wait_until(Path("begun").exists)
    os.kill(child, signal.SIGTERM)

    assert exit_code(child) == 75
    assert (workdir / "stderr").read_text().startswith("ssl-bench: stopped by SIGTERM")


def test_kills_while_saving_leave_checkpoints_that_load(workdir):
    models = [build_vit(TINY, seed=seed) for seed in (0, 1)]
    weights = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    run = workdir / "run"
    path = run / "last.safetensors"

    def save_forever() -> None:
        for step in count():
            save_encoder(path, models[step % 2], {})
            save_state(run, {"step": step, "learner": weights[step % 2]})

    save_encoder(path, models[0], {})
    save_state(run, {"step": 0, "learner": weights[0]})
    for attempt in range(20):
        child = fork(save_forever)
        time.sleep(0.005 + 0.0014 * attempt)
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL

        loaded = load_encoder(str(path)).module.state_dict()
        assert any(all(torch.equal(loaded[k], w[k]) for k in w) for w in weights)
        state = load_state(run, CPU)[0]
        expected = weights[state["step"] % 2]
        assert all(torch.equal(state["learner"][k], expected[k]) for k in expected)

    assert main([*make_pretrain_args(PHOTOS, "run", ONE_STEP), "--overwrite"]) == 0
    assert not list(run.glob("*.tmp"))


def kill_worker_before(function: Callable[..., Any]) -> Callable[..., Any]:
    def fatal(*arguments: Any, **named: Any) -> Any:
        for worker in active_children()[:1]:
            worker.kill()
        # Let torch's signal handler run. If the test waited for the worker, torch would not notice.
        time.sleep(0.2)
        return function(*arguments, **named)

    return fatal


# torch destroys only a part of the data loader and warns about the rest.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_data_worker_that_dies_early_ends_the_run(workdir, capsys, monkeypatch):
    reset = _MultiProcessingDataLoaderIter._reset
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_reset", kill_worker_before(reset))

    message = expect_error(capsys, make_pretrain_args(PHOTOS, "run", "train.num_workers=2"), 5)

    assert "`train.num_workers=0`" in message
    # A remaining worker would ignore SIGTERM, and the process would wait for it before it ends.
    assert not active_children()


def test_a_step_during_which_a_data_worker_dies_is_saved(workdir, capsys, monkeypatch):
    run = make_pretrain_args(PHOTOS, "run", "train.num_workers=2", "train.max_steps=3000")
    fatal = kill_worker_before(DinoLearner.update_teacher)
    monkeypatch.setattr(DinoLearner, "update_teacher", fatal)

    assert "`train.num_workers=0`" in expect_error(capsys, run, 5)

    assert load_state(workdir / "run", CPU)[0]["step"] == len(log_rows("run")) >= 1


def test_a_full_disk_leaves_the_old_training_state(workdir, capsys, begun):
    before = {path.name: file_sha256(path) for path in Path("run").iterdir()}

    with limit_file_size(20_000):
        message = expect_error(capsys, [*begun, "--resume"], 5)

    assert "cannot write" in message
    for name in ("state.pt", "last.safetensors"):
        assert file_sha256(workdir / "run" / name) == before[name]
    assert not list(Path("run").glob("*.tmp"))
    load_encoder("run")
    assert main([*begun, "--resume"]) == 0
    assert [row["step"] for row in log_rows("run")] == [1, 2]


def test_a_disk_that_fills_during_saving_keeps_no_partial_state(tmp_path):
    state = {"weights": torch.zeros(10_000), "step": 3}

    for limit in (40, 9_000, 20_000):
        with limit_file_size(limit), pytest.raises(MachineError, match=r"state\.new\.pt"):
            save_state(tmp_path, state)
        assert list(tmp_path.iterdir()) == []


def test_the_latest_two_states_of_a_run_are_kept_with_their_digests(tmp_path):
    for step in (1, 2, 3):
        save_state(tmp_path, {"step": step})

    names = ("state.pt", "state.previous.pt")
    lines = [f"{file_sha256(tmp_path / name)}  {name}" for name in names]
    assert (tmp_path / "state.pt.sha256").read_text().splitlines() == lines
    steps = [torch.load(tmp_path / name, weights_only=True)["step"] for name in names]
    assert steps == [3, 2]


# Images that cannot be read. The first step uses images 2 and 0. The second step uses 1 and 3.


def damage(workdir: Path, name: str = "1.jpg") -> Path:
    path = workdir / "photos" / name
    corrupt_file(path, "half")
    return path


def test_a_run_continues_after_an_image_is_repaired(workdir, capsys):
    run = make_pretrain_args(PHOTOS, "run", "train.max_steps=3")
    path = damage(workdir)

    message = expect_error(capsys, run, 3)

    assert "1.jpg" in message
    assert "--on-bad-image skip" in message
    assert len(log_rows("run")) == 1
    picture(1).save(path, quality=95)
    # Like the repaired image, this one has not been used yet.
    picture(33).save(workdir / "photos/3.jpg", quality=95)
    assert main([*run, "--resume"]) == 0
    assert "some images have changed" in capsys.readouterr().err
    assert [row["step"] for row in log_rows("run")] == [1, 2, 3]
    assert main([*run, "--resume"]) == 0
    assert "some images have changed" not in capsys.readouterr().err


def test_unreadable_images_are_named_before_the_first_step(workdir, capsys, monkeypatch):
    damage(workdir)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for more in (["--dry-run"], [ONE_STEP, "--on-bad-image", "skip"]):
        main([*make_pretrain_args(PHOTOS, "run"), *more])
        assert "of 4 images, 1 cannot be read: 1.jpg. " in "".join(capsys.readouterr())
    (workdir / "photos/phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99))
    main([*make_pretrain_args(PHOTOS, "other"), "--dry-run"])
    assert "pip install 'ssl-bench[heic]': phone.heic" in "".join(capsys.readouterr())


@pytest.mark.parametrize("when", ["before", "after an epoch"])
def test_images_that_a_run_has_used_must_stay_the_same(workdir, capsys, when):
    run = make_pretrain_args(PHOTOS, "run")
    if when == "before":
        path = damage(workdir)
        expect_error(capsys, run, 3)
        picture(1).save(path, quality=95)
        picture(33).save(workdir / "photos/0.jpg", quality=95)
    else:
        for more in ([], ["--resume"]):
            assert main([*run, ONE_STEP, *more]) == 0
        path = damage(workdir)
        # The file was complete when the run began.
        assert "image_files: " in expect_error(capsys, [*run, "--resume"], 2)
        picture(33).save(path, quality=95)

    assert "image_files: " in expect_error(capsys, [*run, "--resume"], 2)


def test_a_run_without_unreadable_images_is_the_same_in_pieces(workdir, capsys):
    path = damage(workdir)

    def skipping(out: str, *more: str) -> list[str]:
        return [
            *make_pretrain_args(PHOTOS, out, "train.max_steps=3", *more),
            "--on-bad-image",
            "skip",
        ]

    for number, more in enumerate([[], ["train.num_workers=2"], ["data.in_memory=true"]]):
        assert main(skipping(f"run{number}", *more)) == 0
        assert "left out as unreadable: 1.jpg. So far, 1 of 4 images" in capsys.readouterr().err
        assert "left_out:\n- 1.jpg" in Path(f"run{number}/config.yaml").read_text()

    whole = make_pretrain_args(PHOTOS, "pieces", "train.max_steps=3")
    assert "--on-bad-image skip" in expect_error(capsys, whole, 3)
    assert len(log_rows("pieces")) == 1
    for until in ([ONE_STEP], []):
        assert main([*skipping("pieces"), "--resume", *until]) == 0
    for out in ("run1", "run2", "pieces"):
        assert log_rows("run0") == log_rows(out)
        digests = [file_sha256(Path(name, "last.safetensors")) for name in ("run0", out)]
        assert digests[0] == digests[1]

    picture(1).save(path, quality=95)
    assert main([*skipping("run0"), "--resume"]) == 0
    assert "left_out" not in Path("run0/config.yaml").read_text()


def test_messages_count_all_images_left_out_so_far(workdir, capsys):
    for name in ("0.jpg", "1.jpg"):
        damage(workdir, name)
    # Each step saves its state, and reports the image that it has left out.
    words = ("train.max_steps=2", "train.checkpoint_minutes=0.0")

    assert main([*make_pretrain_args(PHOTOS, "run", *words), "--on-bad-image", "skip"]) == 0

    found = re.findall(r"unreadable: (\S+)\. So far, (\d) of 4", capsys.readouterr().err)
    assert found == [("0.jpg", "1"), ("1.jpg", "2")]


def test_left_out_images_may_be_repaired_after_several_stops(workdir, capsys):
    path = damage(workdir)
    run = [*make_pretrain_args(PHOTOS, "run"), "--on-bad-image", "skip", ONE_STEP]
    assert main(run) == 0
    # The image is left out in the second step. The third run begins without it.
    for _ in range(2):
        assert main([*run, "--resume"]) == 0
    assert load_state(Path("run"), CPU)[0]["left_out"] == [1]

    picture(1).save(path, quality=95)

    assert main([*run, "--resume"]) == 0
    assert "some images have changed" in capsys.readouterr().err


def test_images_that_were_used_must_not_change_later(workdir, capsys, monkeypatch):
    update_teacher, calls = DinoLearner.update_teacher, []

    def damage_after_two_steps(self, step, lost):
        calls.append(step)
        if len(calls) == 2:
            damage(workdir)
        return update_teacher(self, step, lost)

    run = [*make_pretrain_args(PHOTOS, "run", "train.max_steps=4"), "--on-bad-image", "skip"]
    with monkeypatch.context() as patch:
        patch.setattr(DinoLearner, "update_teacher", damage_after_two_steps)
        assert main(run) == 0
    assert load_state(Path("run"), CPU)[0]["left_out"] == [1]
    assert "left_out:\n- 1.jpg" in Path("run/config.yaml").read_text()
    picture(33).save(workdir / "photos/1.jpg", quality=95)

    assert "image_files: " in expect_error(capsys, [*run, "--resume"], 2)
    picture(1).save(workdir / "photos/1.jpg", quality=95)
    assert main([*run, "--resume"]) == 0


@pytest.mark.parametrize("damaged_at", [0, 3])
def test_records_of_a_monitor_count_the_left_out_images(workdir, monkeypatch, damaged_at):
    class_folders(workdir / "classes")
    take_step = Trainer.take_step

    def damage_and_take_step(self, step, views):
        if step == damaged_at:
            corrupt_file(workdir / "classes/train/dog/1.jpg", "half")
        return take_step(self, step, views)

    monkeypatch.setattr(Trainer, "take_step", damage_and_take_step)
    scored = ["monitor.accuracy_epochs=2", "monitor.results=results"]
    scored += [f"monitor.root={workdir / 'classes'}"]

    assert (
        main([*make_supervised_args(workdir / "classes", "run", *scored), "--on-bad-image", "skip"])
        == 0
    )

    assert [r.details["left_out"] for r in records()] == [
        {"train": {"count": 1, "first": ["dog/1.jpg"]}}
    ]
