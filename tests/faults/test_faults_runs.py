"""Rows 27 to 34, 42 and 46 of the catalogue of faults: runs that diverge, are killed, or go on."""

import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from pretrain.checkpoints import load_state, save_state
from pretrain.objectives.dino import DinoLearner
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import MachineError
from ssl_bench.models import build_vit, load_encoder, save_encoder
from ssl_bench.results import ResultStore
from ssl_bench.system.files import file_sha256
from tests.support.faults import (
    PRETRAIN,
    TINY,
    class_folders,
    exit_code,
    fails,
    fork,
    picture,
    pretraining,
    probing,
    records,
    small_files,
    spoil,
    supervised,
)
from tests.support.runs import assert_same_run, log_rows

CPU = torch.device("cpu")
NO_TIME = "train.max_minutes=0.0"  # one step, then everything is saved
ALWAYS = "train.checkpoint_minutes=0.0"


def test_fault_27_a_run_that_diverges_stops_and_keeps_finite_weights(place, capsys):
    blown_up = ["objective.student_temperature=1e-38", "train.max_steps=40"]
    patience = [ALWAYS, "train.non_finite_patience=3"]

    said = fails(capsys, pretraining(place / "photos", "run", *blown_up, *patience), 2)

    assert "not finite for 3 steps" in said
    assert len(log_rows("run")) < 40
    state = load_state(Path("run"), CPU)[0]
    assert all(weight.isfinite().all() for weight in state["learner"].values())


@pytest.mark.slow
def test_fault_28_forty_kills_while_saving_leave_forty_checkpoints_that_load(place):
    models = [build_vit(TINY, seed=seed) for seed in (0, 1)]
    weights = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    run = place / "run"
    path = run / "last.safetensors"

    def save_for_ever() -> None:
        for step in count():
            save_encoder(path, models[step % 2], {})
            save_state(run, {"step": step, "learner": weights[step % 2]})

    save_encoder(path, models[0], {})
    save_state(run, {"step": 0, "learner": weights[0]})
    for attempt in range(40):
        child = fork(save_for_ever)
        time.sleep(0.005 + 0.0007 * attempt)
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL

        loaded = load_encoder(str(path)).module.state_dict()
        assert any(all(torch.equal(loaded[k], w[k]) for k in w) for w in weights)
        state = load_state(run, CPU)[0]
        expected = weights[state["step"] % 2]
        assert all(torch.equal(state["learner"][k], expected[k]) for k in expected)

    assert main([*pretraining(place / "photos", "run", NO_TIME), "--overwrite"]) == 0
    assert not list(run.glob("*.tmp"))


@pytest.mark.parametrize(
    ("number", "workers", "code", "advised"),
    [
        (signal.SIGUSR1, 0, 75, "`--resume`"),
        (signal.SIGTERM, 2, 75, "`--resume`"),
        (signal.SIGINT, 0, 130, "--resume"),
    ],
)
def test_fault_29_a_run_that_is_told_to_stop_saves_its_step_and_says_so(
    place, number, workers, code, advised
):
    more = ["train.max_steps=2000", f"train.num_workers={workers}"]
    run = pretraining(place / "photos", "run", *more)
    child = fork(lambda: main(run), stderr=place / "said")
    while not ((log := place / "run/log.jsonl").exists() and log.stat().st_size):
        time.sleep(0.01)
    os.kill(child, number)

    assert exit_code(child) == code

    steps = load_state(place / "run", CPU)[0]["step"]
    assert steps == len(log_rows("run"))
    assert (place / "said").read_text().count("--resume") == 1
    assert advised in (place / "said").read_text().splitlines()[-1]
    assert main([*run, "--resume", NO_TIME]) == 0
    assert [row["step"] for row in log_rows("run")] == list(range(1, steps + 2))


def test_fault_30_a_full_disk_leaves_the_old_training_state(place, capsys, begun):
    before = {path.name: file_sha256(path) for path in Path("run").iterdir()}

    with small_files(20_000):
        said = fails(capsys, [*begun, "--resume"], 5)

    assert "cannot write" in said
    assert "choose another folder" in said
    for name in ("state.pt", "last.safetensors"):
        assert file_sha256(place / "run" / name) == before[name]
    assert not list(Path("run").glob("*.tmp"))
    load_encoder("run")
    assert main([*begun, "--resume"]) == 0
    assert [row["step"] for row in log_rows("run")] == [1, 2]


@pytest.mark.parametrize("limit", [40, 2_000, 9_000, 20_000])
def test_fault_30_a_full_disk_is_said_wherever_in_the_state_it_strikes(place, limit):
    state = {"weights": torch.zeros(10_000), "step": 3}

    with small_files(limit), pytest.raises(MachineError, match=r"cannot write state\.new\.pt"):
        save_state(Path(), state)

    assert list(Path().glob("*state*")) == []


def test_fault_30_a_full_disk_leaves_no_half_of_a_record(place, capsys):
    with small_files(500):
        said = fails(capsys, probing("pca", "folder", place / "photos"), 5)
    assert "cannot write results/" in said
    assert main(probing("pca", "folder", place / "photos")) == 0
    (whole,) = records()

    with small_files(300), pytest.raises(MachineError, match="cannot write results/records"):
        ResultStore(Path("results")).save(replace(whole, value=0.0))

    assert records() == [whole]
    assert not list(Path("results").rglob("*.tmp"))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("soap", marks=pytest.mark.slow)])
def test_fault_31_a_run_in_three_pieces_with_other_workers_is_the_uninterrupted_one(
    place, optimizer
):
    chosen = [f"optimizer={optimizer}", "train.max_steps=3"]
    assert main(pretraining(place / "photos", "whole", *chosen)) == 0

    pieces = pretraining(place / "photos", "pieces", *chosen)
    assert main([*pieces, NO_TIME]) == 0
    assert main([*pieces, "--resume", NO_TIME, "train.num_workers=2"]) == 0
    assert main([*pieces, "--resume", "train.num_workers=1"]) == 0

    assert_same_run(Path("whole"), Path("pieces"))


def test_fault_32_a_changed_configuration_is_refused_with_the_difference(capsys, begun):
    before = file_sha256(Path("run/state.pt"))
    changes = ["train.max_steps=7", "model.depth=3", "train.num_workers=1", "optimizer.lr=0.1"]

    said = fails(capsys, [*begun, *changes, "--resume"], 2)

    assert "model.depth: 2 -> 3" in said
    assert "train.max_steps: 6 -> 7" in said
    assert "optimizer.lr" in said
    assert "num_workers" not in said
    assert "--extend" not in said
    assert file_sha256(Path("run/state.pt")) == before

    # Of what was forgotten to type again only that is named which can be typed.
    forgetful = ["pretrain", "--out", "run", "--resume", *PRETRAIN[1:], "train.epochs=99"]
    said = fails(capsys, [*forgetful, "model.depth=3"], 2)
    assert "another configuration (model.depth: 2 -> 3; train.epochs: 300 -> 99). Type" in said
    assert "the settings of the first command again; run/config" in said
    assert main([*begun, "--resume"]) == 0


def test_fault_34_a_half_written_record_is_said_and_computed_again(place, capsys):
    words = probing("pca", "folder", place / "photos", "--layer", "0,1")
    assert main(words) == 0
    whole = {record.layer: record.value for record in records()}
    path = ResultStore(Path("results")).path(records()[0].key())
    text = path.read_text()
    for kept in (0, len(text) // 2, -3):
        path.write_text(text[:kept])
        capsys.readouterr()

        assert main(["table"]) == 0
        assert f"1 of 2 records cannot be shown: {path}: " in capsys.readouterr().err
        assert len(records()) == 1
        assert main(words) == 0
        assert "skipping 1 of 2 results" in capsys.readouterr().err

        assert {record.layer: record.value for record in records()} == whole


def test_fault_46_a_run_does_not_go_on_with_other_images(place, capsys, begun):
    before = file_sha256(Path("run/state.pt"))
    picture(77).save(place / "photos/0.jpg", quality=50)

    assert "image_files: " in fails(capsys, [*begun, "--resume"], 2)

    assert file_sha256(Path("run/state.pt")) == before


def test_fault_46_a_run_does_not_go_on_with_other_classes(place, capsys):
    root = class_folders(place / "classes")
    run = supervised(root, "run", NO_TIME)
    assert main(run) == 0
    (root / "train/dog/2.jpg").rename(root / "train/cat/9.jpg")

    assert "image_files: " in fails(capsys, [*run, "--resume"], 2)


BLOWN_UP = ("objective.student_temperature=1e-38", "train.non_finite_patience=2")


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_fault_90_what_is_advised_where_training_diverges_works(place, capsys, precision):
    run = pretraining(place / "photos", "run", f"train.precision={precision}")

    said = fails(capsys, [*run, *BLOWN_UP], 2)

    assert "--resume" not in said
    assert "is kept" not in said
    assert "--out FOLDER optimizer.lr=LOWER_RATE" in said
    advised = ["optimizer.lr=1e-5"]
    assert ("train.precision=float32" in said) == (precision == "bfloat16")
    if precision == "bfloat16":
        advised.append("train.precision=float32")
    assert main([*pretraining(place / "photos", "another", "train.max_steps=2"), *advised]) == 0


def test_fault_90_what_is_advised_for_another_scale_of_images_works(place, capsys):
    mean = "data.mean=[0.48145466,0.4578275,0.40821073]"
    assert main([*pretraining(place / "photos", "first", NO_TIME), mean]) == 0
    second = pretraining(place / "photos", "second", NO_TIME, "init_from=first")

    said = fails(capsys, second, 2)

    words = shlex.split(said.rpartition("use `")[2].rstrip("`"))
    assert main([*second, *words]) == 0


def test_fault_90_what_is_advised_for_another_architecture_works(place, capsys):
    root = place / "photos"
    other = ["model.num_heads=3", "model.qkv_bias=False", "model.graying_layers=[0]"]
    assert main([*pretraining(root, "first", NO_TIME, "model.graying=dct"), *other]) == 0
    second = pretraining(root, "second", NO_TIME, "init_from=first")

    said = fails(capsys, second, 2)

    advised = said.partition("got ")[2].partition(". ")[0].split()
    assert {*other} <= {*advised}
    assert main([*second, *advised]) == 0


def test_fault_90_a_stopped_extension_goes_on_by_the_same_words(capsys, begun):
    longer = [*begun, "train.max_steps=8", "--extend", "--resume"]
    assert main(longer) == main(longer) == 0
    assert "continuing after step 2 of 8" in capsys.readouterr().err
    assert Path("run/config.yaml").read_text().count("to_steps") == 1


@pytest.mark.parametrize("is_missing", [True, False])
def test_fault_92_a_missing_log_is_reported(capsys, begun, is_missing):
    if is_missing:
        Path("run/log.jsonl").unlink()

    assert main([*begun, "--resume"]) == 0

    said = capsys.readouterr().err
    assert ("run/log.jsonl is missing, so the log begins with step 2" in said) == is_missing
    assert [row["step"] for row in log_rows("run")] == ([2] if is_missing else [1, 2])


@pytest.mark.parametrize(("saved", "reports"), [(2, 1), (1, 0), (None, 0)])
def test_another_number_of_processes_is_reported(capsys, begun, saved, reports):
    state = load_state(Path("run"), CPU)[0]
    assert state.pop("processes") == 1
    # States of older versions do not contain the number.
    save_state(Path("run"), state if saved is None else {**state, "processes": saved})

    assert main([*begun, "--resume"]) == 0

    said = capsys.readouterr().err
    assert said.count("saved with 2 processes and continues with 1") == reports
    assert load_state(Path("run"), CPU)[0]["processes"] == 1


def test_fault_90_a_shorter_run_is_not_sent_to_extend(capsys, begun):
    assert "--extend" not in fails(capsys, [*begun, "train.max_steps=5", "--resume"], 2)
    assert "--extend" in fails(capsys, [*begun, "train.max_steps=8", "--resume"], 2)
    longer = [*begun, "train.max_steps=8", "--extend"]
    assert "--extend" not in fails(capsys, [*longer, "optimizer.lr=1e-5"], 2)
    assert main(longer) == 0


def test_fault_90_a_rate_that_would_rise_is_said_with_a_remedy(place, capsys):
    remedy = ["optimizer.lr=1e-5", "train.final_lr=0.0"]
    for rises, more in ((True, remedy[:1]), (False, ["optimizer.lr=1e-3"]), (False, remedy)):
        run = pretraining(place / "photos", "run", "train.max_steps=3", *more, "--overwrite")
        assert main(run) == 0
        said = capsys.readouterr().err
        rates = [row["lr"] for row in log_rows("run")]
        assert (rates[-1] > rates[1]) == rises
        assert ("the learning rate rises from 7.8e-08" in said) == rises


# Of four photographs the first step of two has 2 and 0, the second 1 and 3.
def damaged(place: Path, name: str = "1.jpg") -> Path:
    path = place / "photos" / name
    spoil(path, "half")
    return path


def test_fault_89_a_picture_that_was_mended_lets_the_run_go_on(place, capsys):
    run = pretraining(place / "photos", "run", "train.max_steps=3")
    path = damaged(place)

    said = fails(capsys, run, 3)

    assert "1.jpg is damaged or cut short" in said
    assert "--on-bad-image skip" in said
    assert len(log_rows("run")) == 1
    picture(1).save(path, quality=95)
    # Never read so far, like the one that was mended.
    picture(33).save(place / "photos/3.jpg", quality=95)
    assert main([*run, "--resume"]) == 0
    assert "some images have changed, but this run has not used them" in capsys.readouterr().err
    assert [row["step"] for row in log_rows("run")] == [1, 2, 3]
    assert main([*run, "--resume"]) == 0
    assert "some images have changed" not in capsys.readouterr().err


def test_fault_89_what_cannot_be_read_is_said_before_the_first_step(place, capsys):
    damaged(place)
    for more in (["--dry-run"], [NO_TIME, "--on-bad-image", "skip"]):
        main([*pretraining(place / "photos", "run"), *more])
        told = capsys.readouterr()
        assert "of 4 images 1 cannot be read: 1.jpg; " in told.out + told.err


def test_pretraining_names_the_extra_that_reads_heic(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (place / "photos/phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99))
    main([*pretraining(place / "photos", "run"), "--dry-run"])
    told = capsys.readouterr()
    assert "1 needs pip install 'ssl-bench[heic]': phone.heic" in told.out + told.err


@pytest.mark.parametrize("when", ["before", "after an epoch"])
def test_fault_89_pictures_it_has_learned_from_must_be_the_same(place, capsys, when):
    run = pretraining(place / "photos", "run")
    if when == "before":
        path = damaged(place)
        fails(capsys, run, 3)
        picture(1).save(path, quality=95)
        picture(33).save(place / "photos/0.jpg", quality=95)
    else:
        for more in ([], ["--resume"]):
            assert main([*run, NO_TIME, *more]) == 0
        path = damaged(place)
        # It began with the whole file, which is what it is compared with.
        assert "image_files: " in fails(capsys, [*run, "--resume"], 2)
        picture(33).save(path, quality=95)

    assert "image_files: " in fails(capsys, [*run, "--resume"], 2)


@pytest.mark.parametrize("more", [[], ["train.num_workers=2"], ["data.in_memory=true"]], ids=str)
def test_fault_89_a_run_without_the_pictures_it_cannot_read_says_so(place, capsys, more):
    path = damaged(place)
    more = [*more, "train.max_steps=3"]
    skipping = [*pretraining(place / "photos", "run", *more), "--on-bad-image", "skip"]
    assert main(skipping) == 0
    said = capsys.readouterr().err
    assert "left out as unreadable: 1.jpg; 1 of 4 images so far" in said
    assert "left_out:\n- 1.jpg" in Path("run/config.yaml").read_text()

    whole = pretraining(place / "photos", "pieces", *more)
    if more[:1] != ["data.in_memory=true"]:
        # What the refusal advises, typed after it.
        assert "--on-bad-image skip" in fails(capsys, whole, 3)
        assert len(log_rows("pieces")) == 1
    for until in ([NO_TIME], []):
        assert main([*whole, "--on-bad-image", "skip", "--resume", *until]) == 0
    assert log_rows("run") == log_rows("pieces")
    assert file_sha256(Path("run/last.safetensors")) == file_sha256(Path("pieces/last.safetensors"))

    picture(1).save(path, quality=95)
    assert main([*skipping, "--resume"]) == 0
    assert "left_out" not in Path("run/config.yaml").read_text()


def test_a_picture_that_was_left_out_may_be_mended_after_any_number_of_stops(place, capsys):
    path = damaged(place)
    run = [*pretraining(place / "photos", "run"), "--on-bad-image", "skip", NO_TIME]
    assert main(run) == 0
    # It is left out in the second step; the third begins without it.
    for _ in range(2):
        assert main([*run, "--resume"]) == 0
    assert load_state(Path("run"), CPU)[0]["left_out"] == [1]

    picture(1).save(path, quality=95)

    assert main([*run, "--resume"]) == 0
    assert "some images have changed, but this run has not used them" in capsys.readouterr().err


def test_fault_89_a_picture_damaged_after_it_was_learned_counts(place, capsys, monkeypatch):
    usual, calls = DinoLearner.update_teacher, []

    def spoiling(self, step, lost):
        calls.append(step)
        if len(calls) == 2:
            damaged(place)
        return usual(self, step, lost)

    words = pretraining(place / "photos", "run", "train.max_steps=4")
    run = [*words, "--on-bad-image", "skip"]
    with monkeypatch.context() as patch:
        patch.setattr(DinoLearner, "update_teacher", spoiling)
        assert main(run) == 0
    assert load_state(Path("run"), CPU)[0]["left_out"] == [1]
    picture(33).save(place / "photos/1.jpg", quality=95)

    assert "image_files: " in fails(capsys, [*run, "--resume"], 2)
    picture(1).save(place / "photos/1.jpg", quality=95)
    assert main([*run, "--resume"]) == 0


def test_fault_89_where_no_picture_can_be_read_nothing_is_learned(place, capsys):
    for number in range(4):
        damaged(place, f"{number}.jpg")
    run = [*pretraining(place / "photos", "run"), "--on-bad-image", "skip"]

    assert "none of the 4 images can be read" in fails(capsys, run, 3)


def test_fault_89_records_of_accuracy_count_what_was_left_out(place):
    class_folders(place / "classes")
    spoil(place / "classes/train/dog/1.jpg", "half")
    scored = ["monitor.accuracy_epochs=2", "monitor.results=results"]
    scored += [f"monitor.root={place / 'classes'}"]

    assert main([*supervised(place / "classes", "run", *scored), "--on-bad-image", "skip"]) == 0

    assert [r.details["left_out"] for r in records()] == [
        {"train": {"count": 1, "first": ["dog/1.jpg"]}}
    ]


def test_fault_42_a_folder_that_holds_a_run_is_refused_without_resume_or_overwrite(capsys, begun):
    before = {path.name: file_sha256(path) for path in Path("run").iterdir()}

    said = fails(capsys, begun, 2)

    assert "`--resume` continues it, `--overwrite` deletes it" in said
    assert {path.name: file_sha256(path) for path in Path("run").iterdir()} == before
    assert main([*begun, "--overwrite"]) == 0
    assert len(log_rows("run")) == 1
