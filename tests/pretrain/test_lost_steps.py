"""A step whose gradient is not finite: it leaves everything as it was, and the next goes on."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW, Soap
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.models import ViTConfig

SHAPES = ((4, 3), (4, 3), (5,), (2, 3, 2, 2))
# No refresh falls into a test that compares with a run that never had the lost step.
RECIPES = [AdamW(lr=0.1), Soap(lr=0.1, precondition_frequency=100)]
Optimizer = torch.optim.Optimizer


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def optimizer(recipe: Any, weights: list[nn.Parameter]) -> Optimizer:
    return recipe.build([{"params": weights, "weight_decay": 0.1}])


def step(optimizer: Optimizer, weights: list[nn.Parameter], seed: int, *, value: float = 1) -> None:
    """One step as the trainer takes it; a gradient holds `value`."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    assert weights[0].grad is not None
    weights[0].grad[0, 0] = value
    lost = torch.tensor(float(not math.isfinite(value)))
    vars(optimizer).update(found_inf=lost, grad_scale=None)
    optimizer.step()
    optimizer.zero_grad()


def everything(optimizer: Optimizer, weights: list[nn.Parameter]) -> list[Tensor]:
    """Weights and all tensors of the state that are no counters."""

    def tensors(values: Any) -> list[Tensor]:
        if isinstance(values, Tensor):
            return [values.detach().clone()]
        inner = values.items() if isinstance(values, dict) else ()
        return [t for key, v in inner if key not in ("step", "skipped") for t in tensors(v)]

    return [*(w.detach().clone() for w in weights), *tensors(dict(optimizer.state))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", [*RECIPES, Soap(lr=0.1, precondition_frequency=1)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_moments_statistics_and_bases_stay_as_they_were(recipe, value):
    weights = parameters()
    made = optimizer(recipe, weights)
    for seed in range(4):
        step(made, weights, seed)
    before = everything(made, weights)
    assert len(before) > 3 * len(SHAPES) - 2

    step(made, weights, 4, value=value)
    assert same(everything(made, weights), before)

    step(made, weights, 5)
    assert not same(everything(made, weights), before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("at", [2, 3, 6])
def test_what_follows_is_what_would_have_been_without_it(recipe, at):
    runs = []
    for has_lost_one in (False, True):
        weights = parameters()
        made = optimizer(recipe, weights)
        for seed in range(9):
            if has_lost_one and seed == at:
                step(made, weights, 77, value=math.nan)
            step(made, weights, seed)
        runs.append(everything(made, weights))
    assert same(*runs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_that_was_saved_knows_of_it(recipe):
    weights = parameters()
    made = optimizer(recipe, weights)
    for seed, value in enumerate((1.0, 1.0, math.nan, 1.0)):
        step(made, weights, seed, value=value)
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    loaded = optimizer(recipe, copies)
    loaded.load_state_dict(copy.deepcopy(made.state_dict()))

    step(made, weights, 9)
    step(loaded, copies, 9)
    assert same(everything(made, weights), everything(loaded, copies))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_first_step_that_is_lost_does_not_spoil_the_others(recipe):
    weights = parameters()
    made = optimizer(recipe, weights)
    before = [weight.detach().clone() for weight in weights]
    step(made, weights, 0, value=math.nan)
    assert same([w.detach() for w in weights], before)
    for seed in range(1, 6):
        step(made, weights, seed)
    assert all(t.isfinite().all() for t in everything(made, weights))
    assert not same([w.detach() for w in weights], before)


@pytest.fixture
def trainer() -> Callable[[Any], Trainer]:
    def make(recipe: Any) -> Trainer:
        model = ViTConfig(image_size=16, patch_size=8, dim=8, depth=1, num_heads=2)
        timeline = Timeline(total_steps=20, steps_per_epoch=10)
        learner = Dino(out_dim=8, hidden_dim=8, bottleneck_dim=4).build(model, timeline, seed=0)
        options = TrainOptions(batch_size=2, warmup_epochs=0.0)
        return Trainer(
            learner, recipe, options, timeline, TrainingRanks(device=torch.device("cpu"))
        )

    return make


def views(seed: int, value: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    crops = [torch.randn(4, 3, 16, 16, generator=generator), torch.randn(2, 3, 16, 16)]
    crops[0][0, 0, 0, 0] += value
    return crops


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_image_that_is_not_finite_leaves_student_and_center(trainer, recipe):
    one = trainer(recipe)
    for seed in range(3):
        one.take_step(seed, [views(seed)])
    before = {name: value.clone() for name, value in one.learner.state_dict().items()}

    report = one.take_step(3, [views(3, math.nan)])
    assert not report["gradient_norm"].isfinite()
    after = one.learner.state_dict()
    kept = [n for n in after if not n.startswith("teacher.")]
    assert "center" in kept
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert all(value.isfinite().all() for value in after.values())

    report = one.take_step(4, [views(4)])
    assert report["loss"].isfinite()
    assert not torch.equal(one.learner.state_dict()["center"], before["center"])
