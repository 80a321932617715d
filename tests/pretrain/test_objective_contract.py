"""Test that every training objective behaves as the trainer expects.

The example objective in docs/extending.md is also tested. New objectives are tested without any
change to this file. An objective must raise an error for every encoder that it cannot train.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.distributed import TrainingRanks
from pretrain.memory import out_of_memory_error
from pretrain.objectives.objective import GeneratingObjective, Learner
from pretrain.optimizers.recipes import AdamW, Soap
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from pretrain.train import Pretraining
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig
from ssl_bench.models.config import find_registered, registered_names
from ssl_bench.models.loading.checkpoint import load_checkpoint
from tests.pretrain.plans import CPU, album, state_of
from tests.support.objectives import OBJECTIVES, reduced_options
from tests.support.runs import assert_resumes_exactly, flat

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
PLUGIN = re.findall(r"^`[\w/]+/rotation\.py`:\n```python\n(.*?)^```", PAGE, re.DOTALL | re.M)[0]
# The decoder of MAE has these sizes, too. If it used the same seed, its weights would repeat.
MODEL = {
    "image_size": 16, "patch_size": 8, "dim": 24, "depth": 1, "num_heads": 2, "drop_path": 0.1,
    "position_embedding": "sinusoidal", "num_states": 16, "head_width": 8, "num_tokens": 32,
    "name": "vit_tiny_patch16_224", "widths": (24,), "depths": (1,), "heads": (2,),
}  # fmt: skip
NAMES = [*OBJECTIVES, "rotation"]
PAIRS = list(product(NAMES, registered_names("model")))
CLASSES = [f"class{number}" for number in range(40)]
TIMELINE = Timeline(20, 5)


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory) -> Iterator[None]:
    """Install the example objective of docs/extending.md as a separate package."""
    folder = tmp_path_factory.mktemp("plugin")
    information = folder / "rotation-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rotation\nVersion: 1.0\n")
    points = "[ssl_bench.objective]\nrotation = rotation:Rotation\n"
    (information / "entry_points.txt").write_text(points)
    (folder / "rotation.py").write_text(PLUGIN)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@cache
def small_model(kind: str) -> EncoderConfig:
    config_class = find_registered("model", kind)
    names = [item.name for item in fields(config_class)]
    return config_class(**{name: value for name, value in MODEL.items() if name in names})


@cache
def small_objective(name: str) -> Any:
    return build(compose_config("pretraining", reduced_options(f"objective={name}")), "objective")


def plan_of(name: str, kind: str, **options: Any) -> Pretraining:
    return Pretraining(model=small_model(kind), objective=small_objective(name), **options)


def learner_of(plan: Pretraining, *, seed: int = 0) -> Learner:
    return plan.objective.build(plan.encoder, TIMELINE, seed=seed, class_names=CLASSES)


@cache
def refusals(objective: str) -> dict[str, ConfigurationError | None]:
    errors = dict[str, ConfigurationError | None]()
    for kind in registered_names("model"):
        errors[kind] = None
        try:
            learner_of(plan_of(objective, kind))
        except ConfigurationError as error:
            errors[kind] = error
    return errors


def first_kind(name: str) -> str:
    return next(kind for kind, error in refusals(name).items() if error is None)


def views_of(plan: Pretraining, count: int = 4, *, cuts: tuple[int, ...] = ()) -> list[Tensor]:
    crops, objective = plan.objective.crops, plan.objective
    generators = [np.random.default_rng(number) for number in range(count)]
    if isinstance(objective, GeneratingObjective):
        images = objective.images()
        samples = [images[number] for number in range(count)]
    else:
        pixels = np.random.default_rng(0).integers(0, 256, (count, 20, 24, 3), dtype=np.uint8)
        samples = [Sample(str(n), image, label=n % 3) for n, image in enumerate(pixels)]
    sizes = crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)
    edges = (0, *cuts, count)
    chunks = [
        crops.cut(samples[start:end], generators[start:end], sizes)
        for start, end in pairwise(edges)
    ]
    return list(crops.augment_on_device(crops.collate(chunks, CPU) if cuts else chunks[0], CPU))


def step_of(learner: Learner, views: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    loss, report = learner.loss(learner.student, views, 0)
    loss.backward()
    return loss, report


@pytest.mark.parametrize("name", NAMES)
def test_objectives_train_some_encoders_and_refuse_others_with_hints(name):
    errors = [error for error in refusals(name).values() if error is not None]
    assert 0 < len(errors) < len(refusals(name))
    assert all(error.hint for error in errors)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_losses_are_finite_and_every_trained_weight_gets_gradients(name, kind):
    if refusals(name)[kind] is not None:
        return
    plan = plan_of(name, kind)
    learner = learner_of(plan)
    loss, report = step_of(learner, views_of(plan))

    assert loss.shape == ()
    assert loss.isfinite()
    gradients = {n: p.grad for n, p in learner.student.named_parameters() if p.requires_grad}
    # Several processes wait for the gradient of every parameter.
    assert not [n for n, gradient in gradients.items() if gradient is None]
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert not [n for n, gradient in gradients.items() if not gradient.any()]
    for value in report.values():
        assert (value.shape, value.requires_grad) == ((), False)
        assert value.isfinite()
    symptom = learner.diagnose({"loss": float(loss), **{n: float(v) for n, v in report.items()}})
    assert symptom is None or symptom.hint


@pytest.mark.parametrize("name", NAMES)
def test_a_learner_contains_its_encoders_and_has_finite_schedules(name):
    learner = learner_of(plan_of(name, first_kind(name)))
    modules = list(learner.modules())
    for part in (learner.student, learner.encoder, *learner.encoders, *learner.compilable()):
        assert any(part is module for module in modules)
    assert any(learner.encoder is encoder for encoder in learner.encoders)
    weights = [encoder.state_dict() for encoder in learner.encoders]
    for name, value in weights[0].items():
        assert all(torch.equal(value, other[name]) for other in weights)
    for step in range(TIMELINE.total_steps):
        assert all(map(math.isfinite, learner.scheduled_values(step).values()))


@pytest.mark.parametrize("name", NAMES)
def test_weights_depend_on_the_seed_alone(name):
    plan, state = plan_of(name, first_kind(name)), torch.get_rng_state()
    one, same, other = (learner_of(plan, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, same[key]) for key, value in one.items())
    assert any(not torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_no_two_weights_share_their_random_numbers(name, kind):
    if refusals(name)[kind] is not None:
        return
    parameters = learner_of(plan_of(name, kind)).student.named_parameters()
    # Smaller weights correlate by chance. Not all twelve blocks of a timm model are compared.
    weights = {key: value.detach() for key, value in parameters if len(value.unique()) > 500}
    weights = {key: weights[key] for key in [*weights][:6] + [*weights][-2:]}
    assert len(weights) >= 3
    # Independent weights reach 0.2. Normal numbers and the uniform ones behind them reach 0.33.
    for one, other in combinations(weights, 2):
        assert largest_rank_correlation(weights[one], weights[other]) < 0.25, (one, other)


def largest_rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return the highest rank correlation of a short tensor with any segment of a long tensor."""
    short, long = sorted((one.flatten(), other.flatten()), key=len)
    ranks = [values.argsort().argsort().float() for values in (short[:600], long)]
    short, long = ((values - values.mean()) / values.std() for values in ranks)
    return float(F.conv1d(long[None], short[None, None]).abs().max()) / len(short)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_gives_the_same_loss(name):
    plan = plan_of(name, first_kind(name))
    learner, fresh, views = learner_of(plan), learner_of(plan, seed=1), views_of(plan)
    step_of(learner, views)
    with torch.no_grad():
        for parameter in learner.student.parameters():
            parameter.sub_(0.1 * parameter.grad if parameter.grad is not None else 0.0)
    learner.freeze_gradients(0)
    learner.update_teacher(0, torch.tensor(False))
    fresh.load_state_dict(learner.state_dict())

    losses = [step_of(one, views)[0] for one in (learner, fresh)]
    assert torch.equal(*losses)
    states = [flat(one.state_dict()) for one in (learner, fresh)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("name", NAMES)
def test_views_do_not_depend_on_the_number_of_chunks(name):
    plan = plan_of(name, first_kind(name))
    whole, chunks = views_of(plan, 5), views_of(plan, 5, cuts=(2, 3))
    assert all(map(torch.equal, whole, chunks))


@pytest.mark.parametrize("name", NAMES)
def test_the_advice_after_out_of_memory_tries_smaller_micro_batches(name):
    plan = plan_of(name, first_kind(name), optimizer=Soap(), train=TrainOptions(batch_size=4))
    ranks = TrainingRanks(device=CPU)
    trainer = Trainer(learner_of(plan), plan.optimizer, plan.train, TIMELINE, ranks)
    error = out_of_memory_error("full", 0, plan, trainer, has_state=False)
    assert error.hint == ("train.accumulation=2", "--overwrite")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_stopped_runs_continue_bit_for_bit_and_save_their_encoder(name, tmp_path):
    options = {"batch_size": 4, "max_steps": 6, "accumulation": 2, "num_workers": 0, "seed": 3}
    plan = plan_of(name, first_kind(name), optimizer=AdamW(lr=0.05))
    if not isinstance(plan.objective, GeneratingObjective):
        data = replace(plan.data, root=str(album(tmp_path / "photos", 9)))
        plan = replace(plan, data=data)
    plan = replace(plan, train=TrainOptions(**options))
    path = assert_resumes_exactly(plan, tmp_path, parts=7, workers=2)
    learner, weights = learner_of(plan), state_of(tmp_path / "whole")["learner"]
    prefix = next(key for key, module in learner.named_modules() if module is learner.encoder)
    for key, value in load_checkpoint(path)[0].state_dict().items():
        assert torch.equal(value, weights[f"{prefix}.{key}"]), key
