"""Test the batch size, memory and FLOP count of training runs."""

import copy
import errno
import shlex
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from pretrain import logging, resources
from pretrain.distributed import LostProcess, TrainingRanks
from pretrain.memory import find_accumulation
from pretrain.monitor import Evaluator
from pretrain.objectives.dino import Dino, DinoLearner
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import TrainOptions
from pretrain.resources import count_training_flops, measure_product_rate
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.cli.__main__ import main
from ssl_bench.models import ConvMixerConfig, ViTConfig
from tests.pretrain.plans import CPU, SMALL_DINO, TINY, state_of
from tests.support.faults import (
    PRETRAIN,
    class_folders,
    expect_error,
    make_pretrain_args,
    make_supervised_args,
    photo_folder,
)
from tests.support.runs import assert_same_run, log_rows

DEFAULTS = [word for word in PRETRAIN if not word.startswith(("train.batch_size", "train.max"))]


def run(root: Path, out: str, *more: str) -> int:
    return main(["pretrain", "--data-root", str(root), "--out", out, *DEFAULTS, *more])


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (7, 1), (8, 2), (255, 32), (256, 64)])
def test_the_default_batch_allows_four_steps_per_epoch(count, batch):
    assert TrainOptions().resolve_batch_size(count).resolved_batch_size == batch
    assert TrainOptions(batch_size=7).resolve_batch_size(count).resolved_batch_size == 7


def test_a_run_uses_and_prints_its_batch_size(workdir, capsys):
    root = photo_folder(workdir / "few", 20)
    for out, batch, *words in (("default", 4), ("given", 10, "train.batch_size=10")):
        assert run(root, out, "train.max_steps=1", *words) == 0
        output = capsys.readouterr().err
        assert f"20 images, 1 steps, batch {batch}\n" in output
        assert "next: ssl-bench probe" in output
        config = yaml.safe_load(Path(out, "config.yaml").read_text())
        assert config["train"]["batch_size"] == batch

    words = ["pretrain", "--data-root", str(root), "--batch-size", "21"]
    assert "`train.batch_size=null`" in expect_error(capsys, [*words, "--dry-run", *DEFAULTS], 2)
    recipe = ["experiment=dino_photographs", "train.batch_size=null"]
    assert main([*words[:3], "--dry-run", *recipe]) == 0
    assert " of 4 images, " in capsys.readouterr().out


def test_a_resumed_run_keeps_its_default_batch_size(workdir, monkeypatch):
    root = photo_folder(workdir / "few", 20)
    # The older version had another default.
    with monkeypatch.context() as patch:
        patch.setattr("pretrain.options._DEFAULT_BATCH", 2)
        assert run(root, "whole", "train.max_steps=2") == 0
        assert run(root, "part", "train.max_steps=2", "train.max_minutes=0.0") == 0
    assert state_of(Path("part"))["step"] == 1
    assert run(root, "part", "train.max_steps=2", "--resume") == 0
    assert_same_run(Path("whole"), Path("part"))
    assert yaml.safe_load(Path("part/config.yaml").read_text())["train"]["batch_size"] == 2


@pytest.mark.parametrize(
    ("images", "accumulation", "most", "expected", "tried"),
    [
        (64, 1, 8, 8, [32, 16, 8]),
        # Only divisors of the batch are tried.
        (48, 1, 2, 48, [24, 12, 6, 3, 1]),
        (4, 1, 0, None, [2, 1]),
        (4, 4, 0, None, []),
    ],
)
def test_accumulation_is_doubled_until_a_micro_batch_fits(
    images, accumulation, most, expected, tried
):
    counts = []

    def fits(count: int) -> bool:
        counts.append(count)
        return count <= most

    assert find_accumulation(images, accumulation, fits) == expected
    assert counts == tried


def limit_memory(monkeypatch, most_images: int, error: Exception, first_step: int = 0) -> None:
    usual = DinoLearner.loss

    def limited(self, network, views, step):
        if len(views[0]) > 2 * most_images and step >= first_step:
            raise error
        return usual(self, network, views, step)

    monkeypatch.setattr(DinoLearner, "loss", limited)
    # Counting FLOPs calls the loss, too, but needs no memory.
    monkeypatch.setattr("pretrain.step.count_training_flops", lambda *_: 1e6)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nGPU 0 has"),
        dist.DistBackendError("NCCL error: CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate"
                     f" memory: you tried to allocate 9 bytes. Error code {errno.ENOMEM}"),
    ],
)  # fmt: skip
def test_the_advice_after_memory_ran_out_works(workdir, capsys, monkeypatch, error):
    limit_memory(monkeypatch, 2, error)
    root = photo_folder(workdir / "few", 20)
    words = make_pretrain_args(root, "run", "train.max_steps=2", "train.batch_size=8")
    message = expect_error(capsys, words, 5)
    assert "step 1 with 8 images" in message
    assert "train.accumulation=4 --overwrite" in message
    assert not Path("run/state.pt").exists()
    assert main([*words, *shlex.split(message.rpartition("use `")[2].rstrip("`"))]) == 0


def test_out_of_memory_in_a_later_step_keeps_the_checkpoint(workdir, capsys, monkeypatch):
    limit_memory(monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory"), first_step=2)
    run = make_pretrain_args(workdir / "photos", "run", "train.checkpoint_minutes=0.0")
    message = expect_error(capsys, run, 5)
    # A saved run cannot be resumed with another accumulation.
    assert "train.accumulation=2 --out FOLDER" in message
    assert state_of(Path("run"))["step"] == 2


GLOO = RuntimeError("[gloo/gloo/transport/tcp/pair.cc:545] Read error: reset. See logs")


@pytest.mark.parametrize("error", [GLOO, dist.DistBackendError("NCCL error. See logs")])
@pytest.mark.parametrize("has_state", [True, False])
def test_a_connection_lost_within_a_step_keeps_the_last_checkpoint(
    workdir, capsys, monkeypatch, error, has_state
):
    usual = DinoLearner.update_teacher

    def lose(self, step, found_inf):
        if step == 2:
            raise error
        usual(self, step, found_inf)

    minutes = 0.0 if has_state else 9.0
    run = make_pretrain_args(workdir / "photos", "run", f"train.checkpoint_minutes={minutes}")
    with monkeypatch.context() as patch:
        patch.setattr(DinoLearner, "update_teacher", lose)
        message = expect_error(capsys, run, 5)

    assert "another process" in message
    assert "See logs" not in message
    assert message.endswith("use `--resume`")
    # The weights of the third step have changed, but its teacher has not.
    assert Path("run/state.pt").exists() == has_state
    if has_state:
        assert state_of(Path("run"))["step"] == 2
    assert main([*run, "--resume"]) == 0
    assert main(make_pretrain_args(workdir / "photos", "whole")) == 0
    weights = [Path(name, "last.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


def test_each_process_reports_a_connection_lost_while_metrics_are_averaged(monkeypatch):
    def lose(*_, **__):
        raise GLOO

    monkeypatch.setattr(dist, "all_reduce", lose)
    ranks = TrainingRanks(torch.device("cpu"), rank=1, world_size=2)
    with pytest.raises(LostProcess) as caught:
        ranks.average(torch.zeros(1))
    assert caught.value.hint == ("--resume",)
    # The error is not exchanged, and not only the process of rank 0 prints it.
    with pytest.raises(LostProcess) as again:
        ranks.raise_on_all(caught.value)
    assert again.value is caught.value
    assert not again.value.is_raised_on_all_ranks


def test_out_of_memory_in_the_monitor_recommends_no_step_settings(workdir, capsys, monkeypatch):
    def measure(self, step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Evaluator, "measure_if_due", measure)
    words = ["monitor.knn_epochs=1", "monitor.neighbours=2"]
    words.append(f"monitor.root={class_folders(workdir / 'classes', 2)}")
    assert "would fit" not in expect_error(
        capsys, make_pretrain_args(workdir / "photos", "run", *words), 5
    )


def test_smaller_models_are_advised_if_single_images_do_not_fit(workdir, capsys, monkeypatch):
    limit_memory(monkeypatch, 0, torch.OutOfMemoryError("CUDA out of memory"))
    message = expect_error(capsys, make_pretrain_args(workdir / "photos", "run"), 5)
    assert "`model=vit_tiny_skip`" in message
    assert "accumulation" not in message


def test_a_supervised_run_reads_labels_by_default(workdir, capsys):
    words = make_supervised_args(class_folders(workdir / "classes", 4), "run", "train.max_steps=1")
    words.remove("data.labels=true")
    assert main(words) == 0
    assert "train_top1" in log_rows("run")[0]
    words += ["--overwrite", "data.labels=false"]
    assert "data.labels=true" in expect_error(capsys, words, 2)


def test_a_long_run_suggests_a_shorter_one_early(workdir, monkeypatch, capsys):
    monkeypatch.setattr(logging, "_LONG", 0.0)
    monkeypatch.setattr(logging, "_SECONDS_BETWEEN_LINES", 0.0)
    assert run(photo_folder(workdir / "few", 20), "run", "train.max_steps=5") == 0
    lines = capsys.readouterr().err.splitlines()
    (advice,) = [line for line in lines if "take about an hour" in line]
    assert "train.max_steps=" in advice
    assert [line.endswith(" left") for line in lines if line.startswith("step ")] == [True] * 5


class SumLearner(nn.Module):
    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def loss(self, network, views, step):
        del step
        return network(views[0]).sum() * torch.rand(()).to(views[0].device), {}


@pytest.mark.parametrize(
    ("layer", "shape", "products"),
    [
        (nn.Linear(5, 7, bias=False), (3, 5), 3 * 5 * 7),
        # There are 6 filters of 3 x 3 x (6 / groups) values, at 20 positions of 2 images.
        (nn.Conv2d(6, 6, 3, padding=1), (2, 6, 5, 4), 9 * 6 * (2 * 20) * 6),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6), (2, 6, 5, 4), 9 * (2 * 20) * 6),
    ],
)
def test_flops_of_layers_and_their_gradients_equal_formulas(layer, shape, products):
    values = torch.zeros(shape)
    assert count_training_flops(SumLearner(layer), [values], 0) == 2 * (2 * products)
    assert count_training_flops(SumLearner(layer), [values.requires_grad_()], 0) == 3 * (
        2 * products
    )


@pytest.mark.parametrize("kind", ["dino", "batch statistics"])
def test_counting_flops_changes_neither_random_numbers_nor_the_learner(kind):
    if kind == "dino":
        learner = SMALL_DINO.build(TINY, Timeline(10, 10), seed=0)
        views = [torch.zeros(4, 3, 16, 16), torch.zeros(4, 3, 8, 8)]
    else:
        model = ConvMixerConfig(image_size=16, patch_size=4, dim=12, depth=3, kernel_size=3)
        learner = Supervised().build(model, Timeline(10, 5), seed=1, class_names=("a", "b"))
        views = [torch.randn(2, 3, 16, 16), torch.tensor([0, 1]), torch.tensor(1.0)]
    state, before = torch.get_rng_state(), copy.deepcopy(learner.state_dict())
    assert count_training_flops(learner, views, 0) > 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in learner.parameters())
    assert all(torch.equal(v, before[name]) for name, v in learner.state_dict().items())


def test_utilisation_is_relative_to_the_measured_rate(monkeypatch):
    monkeypatch.setattr("pretrain.step.count_training_flops", count_training_flops)
    options = TrainOptions(batch_size=4, accumulation=2)
    learner = SMALL_DINO.build(TINY, Timeline(10, 10), seed=0)
    trainer = Trainer(learner, AdamW(), options, Timeline(10, 10), TrainingRanks(device=CPU))
    views = [torch.randn(4, 3, 16, 16), torch.randn(4, 3, 8, 8)]
    flops = 2 * count_training_flops(learner, views, 0)
    trainer.take_step(0, iter([views, views]))
    rate = measure_product_rate(CPU, torch.float32)
    assert trainer.utilisation(0.5) == pytest.approx(100 * flops / (0.5 * rate))
    # It is at most 100 %, even if the machine was busy during the measurement.
    assert trainer.utilisation(flops / (2 * rate)) == pytest.approx(100)
    assert 1e8 < rate < 1e14


def test_the_rate_counts_two_operations_per_multiplication(monkeypatch):
    operations, multiply = [], torch.mm

    def count_and_multiply(left, right):
        operations.append(2 * left.shape[0] * left.shape[1] * right.shape[1])
        return multiply(left, right)

    # With this clock, each round takes one second.
    monkeypatch.setattr(resources, "time", SimpleNamespace(perf_counter=count().__next__))
    monkeypatch.setattr(torch, "mm", count_and_multiply)
    rate = measure_product_rate.__wrapped__(CPU, torch.float32)
    assert rate == sum(operations) / resources._ROUNDS


@pytest.mark.parametrize(
    ("failing_call", "error", "fits"),
    [
        (9, None, True),
        (3, torch.OutOfMemoryError("CUDA out of memory"), False),
        (3, ValueError("broken"), None),
    ],
)
def test_memory_is_tested_with_two_steps_of_two_micro_batches(
    monkeypatch, failing_call, error, fits
):
    learner, calls = SMALL_DINO.build(TINY, Timeline(10, 10), seed=0), []
    options = TrainOptions(batch_size=4)
    trainer = Trainer(learner, AdamW(), options, Timeline(10, 10), TrainingRanks(device=CPU))
    views = [torch.randn(4, 3, 16, 16), torch.randn(4, 3, 8, 8)]
    trainer.take_step(0, iter([views]))
    usual = DinoLearner.loss

    def loss(self, network, views, step):
        calls.append(step)
        if len(calls) == failing_call:
            raise error
        return usual(self, network, views, step)

    monkeypatch.setattr(DinoLearner, "loss", loss)
    if fits is None:
        with pytest.raises(ValueError, match="broken"):
            trainer.fits_in_memory(5, lambda: views)
    else:
        assert trainer.fits_in_memory(5, lambda: views) == fits
    assert calls == [5] * (4 if fits else 3)
    # The moments of the earlier step were forgotten.
    assert {int(one["step"]) for one in trainer.optimizer.state.values()} == {2 if fits else 1}


@pytest.mark.slow
def test_an_image_of_the_official_recipe_needs_114_gflop():
    # In GFLOP: 94.0 of the student, 18.4 of the teacher, and 1.4 of the heads.
    learner = Dino().build(ViTConfig(), Timeline(100, 10), seed=0)
    views = [torch.zeros(2, 3, 224, 224), torch.zeros(8, 3, 96, 96)]
    assert count_training_flops(learner, views, 0) / 1e9 == pytest.approx(113.8, rel=0.005)
