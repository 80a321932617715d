"""Warm-ups are as long as they were asked for; those that nobody asked for fit into a short run."""

from dataclasses import replace

import pytest

from pretrain.checkpoints import load_state
from pretrain.objectives.dino import Dino
from pretrain.options import TrainOptions
from pretrain.schedules import FREEZE, TEMPERATURE, WARMUP, WARMUPS, Timeline
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ViTConfig
from tests.pretrain.test_resume_older import CPU, change, pictures, stopped_after_a_step
from tests.pretrain.test_train import tiny
from tests.support.runs import assert_same_run

__all__ = ["pictures"]
LONG, SHORT = Timeline(3000, 10), Timeline(300, 10)


@pytest.mark.parametrize(
    ("opening", "timeline", "steps"),
    [
        (WARMUP, LONG, 100), (WARMUP, SHORT, 30), (WARMUP, Timeline(301, 10), 31),
        (FREEZE, SHORT, 10), (FREEZE, Timeline(20, 10), 2),
        (TEMPERATURE, LONG, 300), (TEMPERATURE, SHORT, 90),
    ],
)  # fmt: skip
def test_a_default_takes_no_more_than_its_share_of_the_run(opening, timeline, steps):
    assert opening.steps(None, timeline) == steps


@pytest.mark.parametrize(("epochs", "steps"), [(0.0, 0), (2.5, 25), (29.0, 290), (30.0, 300)])
def test_what_was_asked_for_is_taken_as_it_is(epochs, steps):
    assert WARMUP.steps(epochs, SHORT) == steps
    assert TrainOptions(warmup_epochs=epochs).warmup_steps(SHORT) == steps


@pytest.mark.parametrize("opening", [WARMUP, FREEZE, TEMPERATURE])
def test_what_outlasts_the_run_is_refused(opening):
    with pytest.raises(ConfigurationError, match=f"{opening.key}=31 are 310 steps .* has 300; "):
        opening.steps(31.0, SHORT)


def test_the_learner_of_dino_has_the_openings_that_were_asked_for():
    options = Dino(
        out_dim=8, hidden_dim=8, bottleneck_dim=4,
        freeze_last_layer_epochs=4.0, teacher_temperature_epochs=20.0,
    )  # fmt: skip
    model = ViTConfig(image_size=16, patch_size=8, dim=12, depth=1, num_heads=2)

    learner = options.build(model, SHORT, seed=0)

    assert (learner.frozen_steps, learner.teacher_temperature.num_steps) == (40, 200)


def test_the_keys_are_options_that_may_be_left_open():
    assert {warmup.key for warmup in WARMUPS} == {
        "train.warmup_epochs",
        "objective.freeze_last_layer_epochs",
        "objective.teacher_temperature_epochs",
    }
    assert TrainOptions().warmup_epochs is None
    assert (Dino().freeze_last_layer_epochs, Dino().teacher_temperature_epochs) == (None, None)


def test_a_state_whose_default_was_a_number_goes_on(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3)
    plan.run(tmp_path / "whole", device="cpu")
    stopped_after_a_step(plan, tmp_path / "older")
    older = {"warmup_epochs": 10.0}
    change(tmp_path / "older", "opening_steps", train=_part(tmp_path / "older", "train", older))
    older = {"freeze_last_layer_epochs": 1.0, "teacher_temperature_epochs": 30.0}
    change(tmp_path / "older", objective=_part(tmp_path / "older", "objective", older))

    plan.run(tmp_path / "older", resume=True, device="cpu")

    assert_same_run(tmp_path / "whole", tmp_path / "older")


def test_a_state_whose_warmup_was_shortened_is_not_gone_on_with_a_longer_one(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3, warmup_epochs=1.0)  # 3 steps; once a tenth of the run, 1
    stopped_after_a_step(plan, tmp_path)
    change(tmp_path, "opening_steps")

    with pytest.raises(ConfigurationError, match=r"\(opening_steps.warmup_epochs: 1 -> 3\)"):
        plan.run(tmp_path, resume=True, device="cpu")

    same = replace(plan, train=replace(plan.train, warmup_epochs=1 / 3))
    same.run(tmp_path, resume=True, device="cpu")


def _part(out, name, values):
    return load_state(out, CPU)[0]["configuration"][name] | values
