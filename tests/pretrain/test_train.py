"""Test the training loop."""

import json
import math
import os
import re
import shutil
import signal
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
from pretrain.optimizers.recipes import Soap
from pretrain.options import DataOptions, TrainOptions
from pretrain.schedules import CosineSchedule
from pretrain.step import Trainer, use_deterministic_operations
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import ConfigurationError, MachineError, Preempted
from ssl_bench.models import load_encoder
from tests.pretrain.plans import SMALL_DINO, TINY, album, plan_of, state_of
from tests.support.faults import expect_error, make_pretrain_args, photo_folder, unchecked_types
from tests.support.runs import assert_resumes_exactly, log_rows


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    # With batch size two, an epoch has six steps and leaves out one of the 13 images.
    return album(tmp_path_factory.mktemp("album"))


def call_before_step(monkeypatch, number, action):
    augment_on_device, calls = MultiCrop.augment_on_device, []

    def augment_and_count(self, *arguments):
        calls.append(1)
        if len(calls) == number:
            action()
        return augment_on_device(self, *arguments)

    monkeypatch.setattr(MultiCrop, "augment_on_device", augment_and_count)


def test_a_run_saves_its_teacher_and_logs_each_step(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging, "_SECONDS_BETWEEN_LINES", 0.0)

    path = plan_of(root).run(tmp_path, device="cpu")

    # Without a terminal, the progress is printed as lines.
    folder, images, *lines = capsys.readouterr().err.splitlines()
    assert (folder, images) == (f"run folder {tmp_path}", "13 images, 8 steps, batch 2")
    assert len(lines) == 8
    assert re.fullmatch(
        r"step 7/8  epoch 1  loss \d\.\d{3}  [\d.]+ images/s  data wait \d+ %  "
        r"mfu \d+\.\d %  00:0\d left",
        lines[6],
    )
    state, encoder = state_of(tmp_path), load_encoder(str(path))
    assert encoder.native_size == (16, 16)
    # The run has eight steps, and an epoch has six.
    assert encoder.weights_info.epoch == 1.33
    for name, value in encoder.module.state_dict().items():
        assert torch.equal(value, state["learner"][f"teacher.backbone.{name}"])
    rows = log_rows(tmp_path, timed=True)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["epoch"] for row in rows] == [0] * 6 + [1] * 2
    assert list(rows[0])[:3] == ["step", "epoch", "loss"]
    assert {"momentum", "teacher_entropy", "images_per_second"} <= set(rows[0])
    lr = CosineSchedule(0.05 * 2 / 256, 1e-6, num_steps=8, warmup_steps=1)
    assert [row["lr"] for row in rows] == pytest.approx([lr(step) for step in range(8)])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["train"]["seed"] == 3
    # The log contains the rates that the optimizer uses. Biases are not decayed.
    decayed, exempt = state["optimizer"]["param_groups"]
    assert decayed["lr"] == exempt["lr"] == rows[-1]["lr"] > 0
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (rows[-1]["weight_decay"], 0)
    assert rows[-1]["weight_decay"] == pytest.approx(0.4 - 0.18 * (1 - math.cos(math.pi / 8)))


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_bf16", "avx512_f"])
def test_a_new_run_recommends_bfloat16_on_cpus_with_instructions(
    workdir, capsys, monkeypatch, feature
):
    run = make_pretrain_args(workdir / "photos", "run", "train.max_minutes=0.0")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True}, raising=False)
    for words, recommends in ((run, True), ([*run, "--resume"], False)):
        assert main(words) == 0
        has_hint = "`train.precision=bfloat16`" in capsys.readouterr().err
        assert has_hint == (recommends and feature != "avx512_f")


def test_the_log_has_the_speed_and_the_share_of_waiting(root, tmp_path, monkeypatch):
    # A step of two images takes 4 s, of which it waits 1 s for data.
    monkeypatch.setattr(logging.Clock, "end_step", lambda _: (4.0, 1.0))
    plan_of(root).run(tmp_path, device="cpu")
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert {(row["images_per_second"], row["data_wait"]) for row in rows} == {(0.5, 25)}


def test_a_stopped_run_continues_bit_for_bit(root, tmp_path):
    soap = Soap(lr=0.05, precondition_frequency=3)
    plan = plan_of(root, model=replace(TINY, drop_path=0.2), optimizer=soap, seed=7)
    assert_resumes_exactly(plan, tmp_path, sent=signal.SIGUSR1)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGTERM, Preempted),
        (signal.SIGUSR1, Preempted),
        (signal.SIGINT, KeyboardInterrupt),
    ],
)
def test_a_signal_before_the_first_step_ends_the_run(
    root, tmp_path, monkeypatch, number, error, is_early
):
    def send_signal(*_):
        os.kill(os.getpid(), number)
        return torch.device("cpu")

    def read_images(images):
        if not is_early:
            send_signal()
        pytest.fail("the run continues")

    if is_early:
        monkeypatch.setattr("pretrain.plan.choose_device", send_signal)
    monkeypatch.setattr(train, "describe_training_images", read_images)
    with pytest.raises(error):
        plan_of(root).run(tmp_path, device="cpu")
    assert not (tmp_path / LOG).exists()


@pytest.mark.parametrize(
    ("numbers", "error", "steps"),
    [
        ((signal.SIGINT, signal.SIGINT), KeyboardInterrupt, 2),
        ((signal.SIGTERM, signal.SIGINT), KeyboardInterrupt, 3),
        ((signal.SIGINT, signal.SIGTERM), Preempted, 3),
    ],
)
def test_only_a_second_interrupt_ends_the_step(root, tmp_path, monkeypatch, numbers, error, steps):
    def send_signals():
        for number in numbers:
            os.kill(os.getpid(), number)

    call_before_step(monkeypatch, 3, send_signals)
    with pytest.raises(error):
        plan_of(root).run(tmp_path, device="cpu")
    assert len(log_rows(tmp_path)) == steps


def test_a_signal_in_the_last_step_is_ignored(root, tmp_path, monkeypatch):
    call_before_step(monkeypatch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
    plan_of(root).run(tmp_path, device="cpu")
    assert len(log_rows(tmp_path)) == 8


def test_a_signal_at_the_time_limit_is_reported_as_a_signal(root, tmp_path, monkeypatch):
    call_before_step(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    plan = plan_of(root)
    with pytest.raises(Preempted):
        replace(plan, train=replace(plan.train, max_minutes=0.0)).run(tmp_path, device="cpu")


def test_an_error_after_the_last_step_ends_the_run(root, tmp_path, monkeypatch):
    evaluate = train.Run._run_monitor

    def fail_at_the_end(self):
        if self.progress.step == 8:
            raise MachineError("the monitor failed")
        return evaluate(self)

    monkeypatch.setattr(train.Run, "_run_monitor", fail_at_the_end)

    with pytest.raises(MachineError, match="the monitor failed"):
        plan_of(root).run(tmp_path, device="cpu")
    assert state_of(tmp_path)["step"] == 8


def change_loss(monkeypatch, change):
    usual = DinoLearner.loss

    def compute_changed(self, network, views, step):
        return change(*usual(self, network, views, step), step)

    monkeypatch.setattr(DinoLearner, "loss", compute_changed)


def test_a_run_that_stays_non_finite_stops(root, tmp_path, monkeypatch):
    def diverge(value, report, step):
        return value * (math.nan if step in (1, 3, 4) else 1), report

    change_loss(monkeypatch, diverge)
    with pytest.raises(ConfigurationError) as caught:
        plan_of(root, non_finite_patience=2, checkpoint_minutes=0.0).run(tmp_path, device="cpu")
    assert "optimizer.lr={lower_rate}" in caught.value.hint
    state = state_of(tmp_path)
    assert state["step"] == 4
    assert all(weight.isfinite().all() for weight in state["learner"].values())
    losses = [row["loss"] is None for row in log_rows(tmp_path)]
    assert losses == [False, True, False, True, True]


def test_a_collapsed_run_stops_with_a_hint(root, tmp_path, monkeypatch):
    ceiling = torch.tensor(math.log(32))
    change_loss(
        monkeypatch,
        lambda value, report, _: (value * 0 + ceiling, report | {"teacher_entropy": ceiling}),
    )
    with pytest.raises(ConfigurationError, match="step 4") as caught:
        plan_of(root, collapse_patience=3).run(tmp_path, device="cpu")
    assert "optimizer.lr={lower_rate}" in caught.value.hint


def test_an_impossible_batch_size_is_refused(root, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        plan_of(root, batch_size=14).run(tmp_path, device="cpu")
    assert caught.value.hint[0] == "train.batch_size=null"
    with pytest.raises(ConfigurationError) as caught:
        plan_of(root, batch_size=4, accumulation=3).run(tmp_path, device="cpu")
    assert caught.value.hint == ("train.batch_size=6",)


def test_the_encoder_has_the_image_size_of_the_run(root, tmp_path):
    plan = plan_of(root, max_steps=1, data={"image_size": 32, "in_memory": True})
    assert load_encoder(str(plan.run(tmp_path, device="cpu"))).native_size == (32, 32)


def test_a_skipless_encoder_trains_in_bfloat16(root, tmp_path):
    model = replace(TINY, skip_attention=False, skip_mlp=False)
    for precision in ("float32", "bfloat16"):
        plan = plan_of(root, model=model, max_steps=1, precision=precision)
        plan.run(tmp_path / precision, device="cpu")
    high, low = (log_rows(tmp_path / name)[0]["loss"] for name in ("float32", "bfloat16"))
    assert low == pytest.approx(high, rel=0.05)
    assert low != high


@pytest.mark.parametrize("objective", [Dino(), Mae(), Supervised()])
def test_defaults_of_presets_and_dataclasses_agree(objective):
    name = type(objective).__name__.lower()
    built = build(compose_config("pretraining", [f"objective={name}"]))
    assert built.objective == replace(objective, crops=built.objective.crops)
    for name, value in vars(objective.crops).items():
        expected = list(value) if isinstance(value, tuple) else value
        assert getattr(built.objective.crops, name) == expected, name
    labels = isinstance(objective, Supervised)
    assert (built.train, built.data) == (TrainOptions(), DataOptions(labels=labels))
    assert built.monitor == Monitor()


@pytest.mark.slow
@unchecked_types()
def test_accumulation_equals_the_whole_batch(root, tmp_path):
    for name, accumulation in (("whole", 1), ("parts", 2)):
        plan = plan_of(root, batch_size=4, max_steps=3, accumulation=accumulation)
        plan.run(tmp_path / name, device="cpu")
    whole, parts = (state_of(tmp_path / name)["learner"] for name in ("whole", "parts"))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=1e-4, rtol=1e-3, msg=name)


# Type checks are disabled, because they would be compiled into ten times as many graphs.
@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        replace(SMALL_DINO, crops=MultiCrop(num_locals=0)),
        Mae(decoder_dim=12, decoder_depth=1, decoder_heads=3),
    ],
)
@unchecked_types()
def test_a_compiled_run_equals_an_eager_one(root, tmp_path, monkeypatch, objective):
    # This backend makes the same graphs as the default one, but generates no code.
    compile_usually = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **more: compile_usually(module, backend="aot_eager", **more),
    )
    for name, compiled in (("eager", False), ("compiled", True)):
        plan = plan_of(root, max_steps=2, model=replace(TINY, depth=1), objective=objective)
        plan = replace(plan, train=replace(plan.train, compile=compiled))
        plan.run(tmp_path / name, device="cpu")
    losses = [[row["loss"] for row in log_rows(tmp_path / n)] for n in ("eager", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_gpu_uses_bfloat16_compiled_code_and_workers():
    gpu, cpu, options = torch.device("cuda"), torch.device("cpu"), TrainOptions()
    for device, expected in ((gpu, True), (cpu, False)):
        assert options.uses_compile(device) == options.uses_bfloat16(device) == expected
    assert options.count_workers(gpu) > options.count_workers(cpu) == 0
    for value, precision in ((True, "bfloat16"), (False, "float32")):
        chosen = TrainOptions(compile=value, precision=precision)
        assert chosen.uses_compile(gpu) == chosen.uses_compile(cpu) == value
        assert chosen.uses_bfloat16(gpu) == chosen.uses_bfloat16(cpu) == value


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (MultiCrop, {"global_scale": (0.5, 0.4)}, "global_scale"),
        (MultiCrop, {"blur_probability": (1.0, 0.5)}, "blur_probability"),
        (SingleCrop, {"scale": (0.5, 0.4)}, r"crops\.scale"),
        (SingleCrop, {"magnitude": 11}, r"crops\.magnitude"),
        (Mae, {"mask_ratio": 1.0}, "mask_ratio"),
        (Mae, {"decoder_dim": 18}, "decoder_dim"),
        (Monitor, {"knn_epochs": 0}, r"monitor\.knn_epochs"),
        (Monitor, {"results": "results"}, r"monitor\.accuracy_epochs"),
        (TrainOptions, {"layer_decay": 1.1}, "layer_decay"),
        (TrainOptions, {"epochs": 3, "keep_epochs": [2, 5]}, r"train\.keep_epochs"),
        (DataOptions, {"std": [1.0, 1.0, 0.0]}, r"data\.std"),
        (DataOptions, {"mean": [0.0, 0.0, 128.0]}, r"data\.mean"),
    ],
)
def test_invalid_options_are_refused_by_key(kind, options, key):
    with pytest.raises(ConfigurationError, match=key):
        kind(**options)


def test_labels_need_a_root_folder():
    with pytest.raises(ConfigurationError) as caught:
        DataOptions(labels=True).find_images()
    assert caught.value.hint == ("data.root={folder}",)


@pytest.mark.parametrize("labels", ["true", "false"])
def test_an_archive_is_refused_with_the_command_that_unpacks_it(workdir, capsys, labels):
    shutil.make_archive("train", "zip", workdir / "photos")
    words = make_pretrain_args(Path("train.zip"), "run", f"data.labels={labels}")
    assert "unzip train.zip" in expect_error(capsys, words, 3)


def test_a_deterministic_run_refuses_other_operations(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    states, usual = [], Trainer.take_step

    def step(self, number, parts):
        is_on = torch.are_deterministic_algorithms_enabled()
        states.append((is_on, os.environ["CUBLAS_WORKSPACE_CONFIG"]))
        if number == 1:
            raise RuntimeError("upsample_bicubic2d does not have a deterministic implementation")
        return usual(self, number, parts)

    monkeypatch.setattr(Trainer, "take_step", step)
    run = make_pretrain_args(
        photo_folder(tmp_path / "photos"), str(tmp_path / "run"), "train.max_steps=2"
    )
    message = expect_error(capsys, [*run, "train.deterministic=true"], 2)

    assert states == [(True, ":4096:8")] * 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert "upsample_bicubic2d" in message
    assert "`train.deterministic=false`" in message

    def fail(*_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Trainer, "take_step", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        plan_of(tmp_path / "photos", deterministic=True).run(tmp_path / "other", device="cpu")


@pytest.mark.parametrize("was_on", [False, True])
def test_deterministic_operations_of_the_caller_are_restored_after_any_error(monkeypatch, was_on):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(was_on)

    def fail() -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError("broken")

    try:
        with pytest.raises(RuntimeError, match="broken"), use_deterministic_operations(True):
            fail()
        assert torch.are_deterministic_algorithms_enabled() == was_on
        with use_deterministic_operations(False):
            assert torch.are_deterministic_algorithms_enabled() == was_on
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_the_log_counts_images_of_all_micro_batches_per_second(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.Clock, "end_step", lambda _: (2.0, 0.5))
    root = photo_folder(tmp_path / "photos")
    plan_of(root, batch_size=4, accumulation=2, max_steps=2).run(tmp_path / "run", device="cpu")
    for row in log_rows(tmp_path / "run", timed=True):
        assert (row["images_per_second"], row["data_wait"]) == (2.0, 25.0)
        assert 0 < row["mfu"] <= 100
