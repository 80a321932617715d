"""What a step needs, counted without doing it, and the batch that fits where none was typed."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from pretrain import logging, resources
from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import TrainOptions
from pretrain.resources import Needs, fitted_batch, product_rate, training_flops
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from pretrain.train import Pretraining
from ssl_bench.cli.__main__ import main
from ssl_bench.models import ConvMixerConfig, ViTConfig
from tests.pretrain.plans import CPU, SMALL_DINO, TINY, state_of
from tests.support.faults import (
    PRETRAIN,
    class_folders,
    fails,
    peak_memory_mib,
    photo_folder,
    unchecked_types,
)
from tests.support.runs import assert_same_run, log_rows

UNTYPED = [word for word in PRETRAIN if not word.startswith(("train.batch_size", "train.max"))]
GIB = 2**30
SMALL = Needs(flops=1e6, image_bytes=1000, fixed_bytes=1000)


def run(root: Path, out: str, *more: str) -> int:
    words = ["pretrain", "--data-root", str(root), "--out", out, "--device", "cpu"]
    return main([*words, *UNTYPED, *more])


@pytest.mark.parametrize(("count", "batch"), [(20, 4), (50, 8)])
def test_a_run_of_few_images_trains_and_says_its_batch(place, capsys, count, batch):
    assert run(photo_folder(place / "few", count), "run", "train.max_steps=2") == 0

    said = capsys.readouterr().err
    assert f"{count} images, 2 steps of {batch}, about 0.1 GiB of memory" in said
    assert f"train.batch_size={batch} fits: {2 * batch} would leave fewer than 4 steps" in said
    written = yaml.safe_load(Path("run/config.yaml").read_text())
    assert written["train"]["batch_size"] == batch
    assert log_rows("run")[0]["lr"] <= 5e-4 * batch / 256
    assert "next: ssl-bench probe" in said


def test_what_is_typed_is_the_batch_and_null_fits(place, capsys):
    root = photo_folder(place / "few", 20)
    assert run(root, "typed", "train.batch_size=10", "train.max_steps=1") == 0
    assert "20 images, 1 steps of 10, about" in (said := capsys.readouterr().err)
    assert "fits:" not in said

    words = ["pretrain", "--data-root", str(root), "--batch-size", "21"]
    assert "`train.batch_size=null`" in fails(capsys, [*words, "--dry-run", *UNTYPED], 2)

    assert (
        main([*words[:3], "--dry-run", "experiment=dino_photographs", "train.batch_size=null"]) == 0
    )
    assert "batch      4 fits: 8 would leave" in capsys.readouterr().out


def test_a_resumed_run_keeps_its_batch_on_another_machine(place, monkeypatch, capsys):
    root = photo_folder(place / "few", 20)
    assert run(root, "whole", "train.max_steps=4") == 0
    assert run(root, "part", "train.max_steps=4", "train.max_minutes=0.0") == 0
    assert state_of(Path("part"))["step"] < 4
    # There nothing but single images would fit.
    monkeypatch.setattr(resources, "free_host_memory", lambda: 1)
    assert run(root, "elsewhere", "train.max_steps=1") == 0
    assert "1 steps of 1, about" in capsys.readouterr().err

    assert run(root, "part", "train.max_steps=4", "--resume") == 0

    assert_same_run(Path("whole"), Path("part"))
    assert yaml.safe_load(Path("part/config.yaml").read_text())["train"]["batch_size"] == 4


@pytest.mark.parametrize(
    ("images", "needs", "more", "batch", "why"),
    [
        (10**6, {}, {}, 1024, "1,024 is the most that is taken unasked"),
        (1, {}, {}, 1, "2 would leave fewer than 4 steps an epoch"),
        (100, {}, {}, 16, "32 would leave fewer than 4 steps an epoch"),
        (100, {}, {"ranks": 3, "parts": 2}, 24, "48 would leave fewer than 4 steps an epoch"),
        (10**6, {"image_bytes": GIB // 2}, {}, 4, "8 would take 4.0 of 8.0 GiB that are free"),
        # A process computes one image of two at a time.
        (10**6, {"image_bytes": GIB // 2}, {"parts": 2}, 8, "16 would take 4.0 of 8.0 GiB"),
        (10**6, {"flops": 30e9}, {}, 8, "a step of 16 would take about 12 s on this CPU"),
    ],
)
def test_a_batch_fits_images_memory_and_patience(monkeypatch, images, needs, more, batch, why):
    monkeypatch.setattr(resources, "free_host_memory", lambda: 8 * GIB)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    found, reason = fitted_batch(images, replace(SMALL, **needs), CPU, **more)

    assert found == batch
    assert reason.startswith(why)


@pytest.mark.slow
@unchecked_types()
def test_memory_of_an_image_is_about_what_a_step_takes():
    plan = Pretraining(model=ViTConfig(dim=192, num_heads=3, depth=4), objective=Dino(out_dim=64))
    timeline = replace(plan.train, batch_size=1).timeline(9)
    learner = plan.objective.build(plan.encoder, timeline, seed=0)

    image_bytes = plan.needs(learner).image_bytes

    peaks = []
    for images in (1, 2, 10):
        views = [torch.rand(n * images, 3, s, s) for n, s in ((2, 224), (8, 96))]
        with peak_memory_mib() as peak:
            learner.loss(learner.student, views, 0)[0].backward()
            peaks.append(2**20 * peak())
    # The first one makes the gradients.
    assert (peaks[2] - peaks[1]) / 8 == pytest.approx(image_bytes, rel=0.5)


def test_a_supervised_run_takes_labels_unasked(place, capsys):
    root = class_folders(place / "classes", 4)
    words = [word for word in UNTYPED if not word.startswith("objective.")]
    words = ["pretrain", "--data-root", str(root), "--device", "cpu", *words]
    words += ["objective=supervised", "train.max_steps=1"]

    assert main([*words, "--out", "run"]) == 0

    assert "train_top1" in log_rows("run")[0]
    said = fails(capsys, [*words, "--out", "other", "data.labels=false"], 2)
    assert "data.labels=true" in said


def test_a_long_run_says_early_what_takes_less(place, monkeypatch, capsys):
    monkeypatch.setattr(logging, "_LONG", 0.0)
    monkeypatch.setattr(logging, "_SECONDS_BETWEEN_LINES", 0.0)

    assert run(photo_folder(place / "few", 20), "run", "train.max_steps=5") == 0

    said = capsys.readouterr().err.splitlines()
    (longer,) = [line for line in said if "takes about an hour" in line]
    assert "left on this machine. train.max_steps=" in longer
    assert [line.endswith(" left") for line in said if line.startswith("step ")] == [True] * 5


class Summed(nn.Module):
    """The sum of what a layer gives, times a random number as mixtures of images draw it."""

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
        # Filters of 3 x 3 and 6 / groups channels, at 2 x 20 positions, for 6 channels.
        (nn.Conv2d(6, 6, 3, padding=1), (2, 6, 5, 4), 9 * 6 * (2 * 20) * 6),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6), (2, 6, 5, 4), 9 * (2 * 20) * 6),
    ],
)
def test_a_product_counts_twice_its_multiplications_and_once_more_for_each_gradient(
    layer, shape, products
):
    values = torch.zeros(shape)
    assert training_flops(Summed(layer), [values], 0) == 2 * (2 * products)
    assert training_flops(Summed(layer), [values.requires_grad_()], 0) == 3 * (2 * products)


@pytest.mark.parametrize("kind", ["dino", "batch statistics"])
def test_counting_leaves_random_numbers_and_the_learner_alone(kind):
    if kind == "dino":
        learner = SMALL_DINO.build(TINY, Timeline(10, 10), seed=0)
        views = [torch.zeros(4, 3, 16, 16), torch.zeros(4, 3, 8, 8)]
    else:
        model = ConvMixerConfig(image_size=16, patch_size=4, dim=12, depth=3, kernel_size=3)
        learner = Supervised().build(model, Timeline(10, 5), seed=1, class_names=("a", "b"))
        views = [torch.randn(2, 3, 16, 16), torch.tensor([0, 1]), torch.tensor(1.0)]
    state, before = torch.get_rng_state(), copy.deepcopy(learner.state_dict())

    assert training_flops(learner, views, 0) > 0

    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in learner.parameters())
    assert all(torch.equal(v, before[name]) for name, v in learner.state_dict().items())


def test_utilisation_is_the_share_of_the_measured_rate_over_all_parts():
    options = TrainOptions(batch_size=4, accumulation=2)
    learner = SMALL_DINO.build(TINY, Timeline(10, 10), seed=0)
    trainer = Trainer(learner, AdamW(), options, Timeline(10, 10), TrainingRanks(device=CPU))
    views = [torch.randn(4, 3, 16, 16), torch.randn(4, 3, 8, 8)]
    flops = 2 * training_flops(learner, views, 0)

    trainer.take_step(0, iter([views, views]))

    rate = product_rate(CPU, torch.float32)
    assert trainer.utilisation(0.5) == pytest.approx(100 * flops / (0.5 * rate))
    # As where the machine was busy when the product was timed.
    assert trainer.utilisation(flops / (2 * rate)) == pytest.approx(100)
    assert 1e8 < rate < 1e14


@pytest.mark.slow
def test_an_image_of_the_official_recipe_costs_what_its_products_do():
    # 113.8 GFLOP: student 94.0, teacher 18.4, heads 1.4.
    learner = Dino().build(ViTConfig(), Timeline(100, 10), seed=0)

    flops = training_flops(learner, [torch.zeros(2, 3, 224, 224), torch.zeros(8, 3, 96, 96)], 0)

    assert flops / 1e9 == pytest.approx(113.8, rel=0.005)
