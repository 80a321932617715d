"""Real runs of a tiny encoder: what they leave behind, and how they stop and go on."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from pretrain import logging, train
from pretrain.checkpoints import LOG
from pretrain.crops.multi import MultiCrop
from pretrain.crops.single import SingleCrop
from pretrain.monitor import Monitor
from pretrain.objectives.dino import Dino, DinoLearner
from pretrain.objectives.mae import Mae
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, Soap
from pretrain.options import DataOptions, TrainOptions
from pretrain.plan import Pretraining
from pretrain.schedules import Cosine
from pretrain.step import Trainer
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import ConfigurationError, Preempted
from ssl_bench.models import load_encoder
from tests.pretrain.plans import SMALL_DINO, TINY, album, plan_of, state_of
from tests.support.faults import fails, photo_folder, pretraining, unchecked_types
from tests.support.runs import assert_goes_on_to_the_bit, assert_same_run, log_rows


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Thirteen pictures in two folders: six steps of two an epoch, one picture left."""
    return album(tmp_path_factory.mktemp("album"))


@pytest.fixture(scope="module")
def of_four(root, tmp_path_factory) -> tuple[Pretraining, Path]:
    """A run of four images a step, and its folder."""
    plan, out = plan_of(root, batch_size=4), tmp_path_factory.mktemp("four")
    with unchecked_types():
        plan.run(out, device="cpu")
    return plan, out


def do_at(monkeypatch, call, action):
    """Run an action when the crops of the given step are finished, before the step is taken."""
    finish, calls = MultiCrop.finish, []

    def counted(self, *arguments):
        calls.append(1)
        if len(calls) == call:
            action()
        return finish(self, *arguments)

    monkeypatch.setattr(MultiCrop, "finish", counted)


def test_a_run_leaves_an_encoder_that_is_its_teacher_and_a_row_a_step(
    root, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(logging, "_SECONDS_BETWEEN_LINES", 0.0)

    path = plan_of(root).run(tmp_path, device="cpu")

    # Without a terminal a line now and then tells how far the run is.
    where, first, *lines = capsys.readouterr().err.splitlines()
    assert where == f"run folder {tmp_path}"
    assert first == "13 images, 8 steps, batch 2"
    assert len(lines) == 8
    assert re.fullmatch(
        r"step 7/8  epoch 1  loss \d\.\d{3}  [\d.]+ images/s  data wait \d+ %  "
        r"mfu \d+\.\d %  00:0\d left",
        lines[6],
    )
    state, encoder = state_of(tmp_path), load_encoder(str(path))
    assert encoder.native_size == (16, 16)
    for name, value in encoder.module.state_dict().items():
        assert torch.equal(value, state["learner"][f"teacher.backbone.{name}"])
    rows = log_rows(tmp_path, timed=True)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["epoch"] for row in rows] == [0] * 6 + [1] * 2
    assert list(rows[0])[:3] == ["step", "epoch", "loss"]
    assert {"momentum", "teacher_entropy", "images_per_second"} <= set(rows[0])
    lr = Cosine(0.05 * 2 / 256, 1e-6, num_steps=8, warmup_steps=1)
    assert [row["lr"] for row in rows] == pytest.approx([lr(step) for step in range(8)])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["train"]["seed"] == 3
    # Rates reach the optimizer, and biases are never decayed.
    decayed, exempt = state["optimizer"]["param_groups"]
    assert decayed["lr"] == exempt["lr"] == rows[-1]["lr"] > 0
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (rows[-1]["weight_decay"], 0)
    assert rows[-1]["weight_decay"] == pytest.approx(0.4 - 0.18 * (1 - math.cos(math.pi / 8)))


@pytest.mark.parametrize(
    ("number", "error", "optimizer", "seed"),
    [
        (signal.SIGUSR1, Preempted, Soap(lr=0.05, precondition_frequency=3), 3),
        (signal.SIGINT, KeyboardInterrupt, AdamW(lr=0.05), 7),
    ],
)
def test_a_stopped_run_goes_on_to_the_very_bits_of_an_uninterrupted_one(
    root, tmp_path, number, error, optimizer, seed
):
    plan = plan_of(root, model=replace(TINY, drop_path=0.2), optimizer=optimizer, seed=seed)

    assert_goes_on_to_the_bit(plan, tmp_path, sent=number, error=error)


def test_a_killed_run_repeats_what_it_had_not_saved_with_other_workers(root, tmp_path, monkeypatch):
    plan = plan_of(root, model=replace(TINY, drop_path=0.2), checkpoint_epochs=1)
    plan.run(tmp_path / "whole", device="cpu")

    do_at(monkeypatch, 8, lambda: os.abort_for_test())  # pyrefly: ignore[missing-attribute]
    with pytest.raises(AttributeError):
        plan.run(tmp_path / "killed", device="cpu")
    monkeypatch.undo()
    log = tmp_path / "killed" / LOG
    assert len(log_rows(tmp_path / "killed")) == 7
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:6]) + '{"step": 7, "l')
    helped = replace(plan, train=replace(plan.train, num_workers=2))
    helped.run(tmp_path / "killed", resume=True, device="cpu")

    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)]
)
def test_who_asks_to_stop_before_the_first_step_waits_for_nothing(
    root, tmp_path, monkeypatch, number, error
):
    def reads_the_images(images):
        os.kill(os.getpid(), number)
        pytest.fail("went on reading")

    monkeypatch.setattr(train, "describe_training_images", reads_the_images)

    with pytest.raises(error):
        plan_of(root).run(tmp_path, device="cpu")

    assert not (tmp_path / LOG).exists()


def test_a_second_interrupt_does_not_wait_for_the_end_of_the_step(root, tmp_path, monkeypatch):
    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on with the step")

    do_at(monkeypatch, 3, interrupt_twice)

    with pytest.raises(KeyboardInterrupt):
        plan_of(root).run(tmp_path, device="cpu")

    assert len(log_rows(tmp_path)) == 2


def test_a_run_asked_to_stop_in_its_last_step_is_simply_done(root, tmp_path, monkeypatch):
    do_at(monkeypatch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))

    plan_of(root).run(tmp_path, device="cpu")

    assert len(log_rows(tmp_path)) == 8


def test_time_that_is_up_saves_and_says_so(root, tmp_path, capsys):
    plan = plan_of(root, max_minutes=0.0)

    plan.run(tmp_path, device="cpu")

    assert len(log_rows(tmp_path)) == 1
    assert "time limit reached: 1 of 8 steps are saved" in capsys.readouterr().err
    forever = replace(plan, train=replace(plan.train, max_minutes=None))
    forever.run(tmp_path, resume=True, device="cpu")
    assert len(log_rows(tmp_path)) == 8


@pytest.mark.slow
@unchecked_types()
def test_accumulated_parts_learn_what_the_whole_batch_does(of_four, tmp_path):
    plan, one = of_four
    parts = replace(plan, train=replace(plan.train, accumulation=2))

    parts.run(tmp_path, device="cpu")

    whole, parts = (state_of(out)["learner"] for out in (one, tmp_path))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=1e-4, rtol=1e-3, msg=name)


def poison(monkeypatch, steps):
    loss = DinoLearner.loss

    def poisoned(self, network, views, step):
        value, report = loss(self, network, views, step)
        return (value * torch.nan if step in steps else value), report

    monkeypatch.setattr(DinoLearner, "loss", poisoned)


def test_a_run_that_stays_non_finite_stops_and_keeps_the_last_good_state(
    root, tmp_path, monkeypatch
):
    poison(monkeypatch, [1, 3, 4])

    with pytest.raises(ConfigurationError, match="not finite for 2 steps up to step 5"):
        plan_of(root, non_finite_patience=2, checkpoint_minutes=0.0).run(tmp_path, device="cpu")

    state = state_of(tmp_path)
    assert state["step"] == 4
    assert all(weight.isfinite().all() for weight in state["learner"].values())
    losses = [row["loss"] is None for row in log_rows(tmp_path)]
    assert losses == [False, True, False, True, True]


def test_a_collapsed_run_stops_with_a_hint(root, tmp_path, monkeypatch):
    loss = DinoLearner.loss

    def collapsed(self, network, views, step):
        value, report = loss(self, network, views, step)
        ceiling = torch.tensor(math.log(32))
        return value * 0 + ceiling, report | {"teacher_entropy": ceiling}

    monkeypatch.setattr(DinoLearner, "loss", collapsed)
    with pytest.raises(
        ConfigurationError, match=r"stopped at step 4.*ln\(out_dim\).*optimizer\.lr="
    ):
        plan_of(root, collapse_patience=3).run(tmp_path, device="cpu")


def test_a_batch_that_the_images_do_not_fill_is_refused(root, tmp_path):
    with pytest.raises(ConfigurationError, match="13") as caught:
        plan_of(root, batch_size=14).run(tmp_path, device="cpu")
    assert caught.value.hint[0] == "train.batch_size=null"
    with pytest.raises(ConfigurationError, match=r"multiple of 3"):
        plan_of(root, batch_size=4, accumulation=3).run(tmp_path, device="cpu")


def test_the_encoder_has_the_size_of_the_large_crops(root, tmp_path):
    plan = plan_of(root, max_steps=1, data={"image_size": 32, "in_memory": True})

    assert load_encoder(str(plan.run(tmp_path, device="cpu"))).native_size == (32, 32)


def test_a_skipless_encoder_trains_in_bfloat16_too(root, tmp_path):
    model = replace(TINY, skip_attention=False, skip_mlp=False)
    for precision in ("float32", "bfloat16"):
        plan = plan_of(root, model=model, max_steps=2, precision=precision)
        plan.run(tmp_path / precision, device="cpu")

    high, low = (log_rows(tmp_path / name)[0]["loss"] for name in ("float32", "bfloat16"))
    assert low == pytest.approx(high, rel=0.05)
    assert low != high


@pytest.mark.parametrize("objective", [Dino(), Mae(), Supervised()])
def test_the_yaml_files_say_what_the_dataclasses_default_to(objective):
    name = type(objective).__name__.lower()
    built = build(compose_config("pretraining", [f"objective={name}"]))

    assert built.objective == replace(objective, crops=built.objective.crops)
    for name, value in vars(objective.crops).items():
        ours = getattr(built.objective.crops, name)
        assert ours == (list(value) if isinstance(value, tuple) else value), name
    labels = isinstance(objective, Supervised)
    assert (built.train, built.data) == (TrainOptions(), DataOptions(labels=labels))
    assert built.monitor == Monitor()


@pytest.mark.slow
def test_two_processes_learn_what_one_does(of_four, tmp_path):
    alone, together = of_four[1], tmp_path / "two"
    script = (
        "import sys, pathlib, hydra.utils, omegaconf, torch; torch.set_num_threads(1);"
        "plan = omegaconf.OmegaConf.load(sys.argv[1]);"
        "plan = hydra.utils.instantiate(plan, _convert_='all');"
        "plan.run(pathlib.Path(sys.argv[2]), device='cpu')"
    )
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    arguments = [str(tmp_path / "script.py"), str(alone / "config.yaml"), str(together)]
    subprocess.run([*command, *arguments], check=True, cwd=Path(__file__).parents[2])

    one, two = (state_of(out)["learner"] for out in (alone, together))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-4, rtol=1e-3, msg=name)
    losses = [[row["loss"] for row in log_rows(out)] for out in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# Checks would be compiled too, into ten times as many graphs; one block, as each takes a while.
@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [SMALL_DINO, Mae(decoder_dim=12, decoder_depth=1, decoder_heads=3)]
)
@unchecked_types()
def test_a_compiled_run_learns_what_an_eager_one_does(root, tmp_path, objective):
    plan = plan_of(root, max_steps=3, model=replace(TINY, depth=1), objective=objective)
    plan.run(tmp_path / "eager", device="cpu")
    compiled = replace(plan, train=replace(plan.train, compile=True))

    compiled.run(tmp_path / "compiled", device="cpu")

    losses = [[row["loss"] for row in log_rows(tmp_path / n)] for n in ("eager", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (MultiCrop, {"global_scale": (0.5, 0.4)}, "minimum <= maximum"),
        (MultiCrop, {"blur_probability": (1.0, 0.5)}, "a list of 3 items"),
        (MultiCrop, {"num_locals": -1}, "num_locals expects a whole number"),
        (SingleCrop, {"scale": (0.5, 0.4)}, r"crops\.scale"),
        (SingleCrop, {"num_ops": -1}, r"crops\.num_ops"),
        (SingleCrop, {"magnitude": 11}, r"crops\.magnitude"),
        (SingleCrop, {"color_jitter": -0.1}, r"crops\.color_jitter"),
        (SingleCrop, {"erasing_probability": 1.1}, r"crops\.erasing_probability"),
        (Dino, {"momentum": 1.5}, r"objective\.momentum expects a number in \[0, 1\]"),
        (Dino, {"out_dim": 0}, r"objective\.out_dim"),
        (Mae, {"mask_ratio": 1.0}, r"mask_ratio expects a number in \(0, 1\), got 1\.0"),
        (Mae, {"decoder_depth": 0}, r"decoder_depth expects a whole number .*, got 0"),
        (Mae, {"decoder_dim": 18}, r"a multiple of 4 and of .*heads = 8, got 18"),
        (Monitor, {"knn_epochs": 0}, r"monitor\.knn_epochs expects a whole number"),
        (Monitor, {"temperature": 0.0}, r"monitor\.temperature"),
        (Monitor, {"crop_share": 0.0}, r"monitor\.crop_share"),
        (Monitor, {"results": "results"}, r"monitor\.accuracy_epochs=NUMBER"),
        (TrainOptions, {"layer_decay": 0.0}, "layer_decay expects a number in"),
        (TrainOptions, {"layer_decay": 1.1}, "layer_decay expects a number in"),
        (TrainOptions, {"epochs": 3, "keep_epochs": [2, 5]}, r"train\.epochs=5"),
        (DataOptions, {"std": [1.0, 1.0, 0.0]}, r"data\.std expects a list of 3 items"),
        (DataOptions, {"std": [1.0, 1.0]}, r"data\.std expects a list of 3 items"),
        (DataOptions, {"mean": [0.0, 0.0, 128.0]}, r"data\.mean expects a list of 3 items"),
    ],
)
def test_options_without_meaning_are_refused_by_name(kind, options, said):
    with pytest.raises(ConfigurationError, match=said):
        kind(**options)


def test_labels_need_a_folder_of_classes():
    with pytest.raises(ConfigurationError) as caught:
        DataOptions(labels=True).open()
    assert caught.value.hint == ("data.root={folder}",)


@pytest.mark.parametrize("labels", ["true", "false"])
def test_an_archive_in_place_of_a_folder_is_refused_with_what_unpacks_it(place, capsys, labels):
    shutil.make_archive("train", "zip", place / "photos")

    said = fails(capsys, pretraining(Path("train.zip"), "run", f"data.labels={labels}"), 3)

    assert "expected a folder, got the archive train.zip" in said
    assert "unzip train.zip" in said


NO_FORM = (
    "upsample_bicubic2d_backward_out_cuda does not have a deterministic implementation, but you "
    "set 'torch.use_deterministic_algorithms(True)'. You can turn off determinism"
)


def test_a_run_is_deterministic_from_its_first_step_and_refuses_what_cannot_be(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen, usual = [], Trainer.take_step

    def step(self, number, parts):
        is_on = torch.are_deterministic_algorithms_enabled()
        seen.append((is_on, os.environ["CUBLAS_WORKSPACE_CONFIG"]))
        if number == 1:
            raise RuntimeError(NO_FORM)
        return usual(self, number, parts)

    monkeypatch.setattr(Trainer, "take_step", step)
    run = pretraining(photo_folder(tmp_path / "photos"), str(tmp_path / "run"), "train.max_steps=2")

    said = fails(capsys, [*run, "train.deterministic=true"], 2)

    assert seen == [(True, ":4096:8")] * 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert said.startswith("ssl-bench: upsample_bicubic2d")
    assert said.rstrip().endswith("`train.deterministic=false`")

    def misfit(*_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Trainer, "take_step", misfit)
    with pytest.raises(RuntimeError, match="shapes"):
        plan_of(tmp_path / "photos", deterministic=True).run(tmp_path / "other", device="cpu")
