"""A run goes on after options were added that its saved state knows nothing of."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.checkpoints import load_state, save_state
from pretrain.description import describe, differences, in_full
from ssl_bench.errors import ConfigurationError
from tests.pretrain.test_train import tiny
from tests.support.runs import assert_same_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Six pictures: three steps of two an epoch."""
    root = tmp_path_factory.mktemp("pictures")
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (6, 20, 24, 3))):
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
    return root


def stopped_after_a_step(plan, out):
    replace(plan, train=replace(plan.train, max_minutes=0.0)).run(out, device="cpu")
    assert load_state(out, CPU)[0]["step"] == 1


def change(out, *forgotten, **added):
    """Write the state of a run anew, its configuration without some keys and with others."""
    state = load_state(out, CPU)[0]
    for key in forgotten:
        *path, name = key.split(".")
        part = state["configuration"]
        for word in path:
            part = part[word]
        del part[name]
    state["configuration"] |= added
    save_state(out, state)


def test_a_state_that_lacks_newer_keys_goes_on_to_the_very_bits(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3)
    plan.run(tmp_path / "whole", device="cpu")
    stopped_after_a_step(plan, tmp_path / "older")
    newer = (
        "model.graying",
        "train.max_grad_norm",
        "objective._target_",
        "data._target_",
        "monitor",
    )
    change(tmp_path / "older", "_target_", "objective.crops.hue", "optimizer.betas", *newer)

    plan.run(tmp_path / "older", resume=True, device="cpu")

    assert_same_run(tmp_path / "whole", tmp_path / "older")


def test_a_state_of_a_former_name_of_an_option_goes_on_to_the_very_bits(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3)
    plan = replace(plan, model=replace(plan.model, mlp_mean=0.5))
    plan.run(tmp_path / "whole", device="cpu")
    stopped_after_a_step(plan, tmp_path / "older")
    former = describe(replace(plan.model, mlp_mean=0.0)) | {"init_options": {"mlp_mean": 0.5}}
    del former["mlp_mean"]
    change(tmp_path / "older", model=former)

    plan.run(tmp_path / "older", resume=True, device="cpu")

    assert_same_run(tmp_path / "whole", tmp_path / "older")


def test_a_key_of_a_model_that_is_gone_is_named(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3)
    stopped_after_a_step(plan, tmp_path)
    change(tmp_path, model=describe(plan.model) | {"lottery": 7})

    with pytest.raises(ConfigurationError, match=r"\(model.lottery: 7 -> None\)"):
        plan.run(tmp_path, resume=True, device="cpu")


def test_a_newer_key_that_is_not_at_its_default_is_refused(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3)
    stopped_after_a_step(plan, tmp_path)
    change(tmp_path, "train.max_grad_norm", "model.norm")

    clipped = replace(plan, train=replace(plan.train, max_grad_norm=1.0))
    with pytest.raises(ConfigurationError, match=r"\(train.max_grad_norm: 3.0 -> 1.0\)"):
        clipped.run(tmp_path, resume=True, device="cpu")


def test_a_key_that_is_gone_is_named(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3)
    stopped_after_a_step(plan, tmp_path)
    change(tmp_path, lottery={"prize": 7})

    with pytest.raises(ConfigurationError, match=r"\(lottery.prize: 7 -> None\)"):
        plan.run(tmp_path, resume=True, device="cpu")


def test_a_state_whose_default_was_a_number_goes_on(pictures, tmp_path):
    plan = tiny(pictures, max_steps=3)
    plan.run(tmp_path / "whole", device="cpu")
    stopped_after_a_step(plan, tmp_path / "older")
    older = {"warmup_epochs": 10.0}
    change(tmp_path / "older", "opening_steps", train=part_of(tmp_path / "older", "train", older))
    older = {"freeze_last_layer_epochs": 1.0, "teacher_temperature_epochs": 30.0}
    change(tmp_path / "older", objective=part_of(tmp_path / "older", "objective", older))

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


def part_of(out, name, values):
    return load_state(out, CPU)[0]["configuration"][name] | values


@dataclass(frozen=True)
class Hammer:
    weight: int = 3


@dataclass(frozen=True)
class Saw:
    weight: int = 3
    teeth: int = 40


@dataclass(frozen=True)
class Box:
    owner: str
    tool: Hammer | Saw = field(default_factory=Hammer)
    spares: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("older", "now", "changed"),
    [
        ({"owner": "a"}, Box("a"), []),
        ({"owner": "a"}, Box("a", spares=[1]), ["spares: [] -> [1]"]),
        ({"owner": "a", "tool": {}}, Box("a", Hammer(4)), ["tool.weight: 3 -> 4"]),
        ({}, Box("a"), ["owner: None -> a"]),
        # Without a kind it was of the kind that there was; another one's defaults are not its own.
        (
            {"owner": "a", "tool": {"weight": 3}},
            Box("a", Saw()),
            [f"tool._target_: {__name__}.Hammer -> {__name__}.Saw", "tool.teeth: None -> 40"],
        ),
        ({"owner": "a", "tool": describe(Saw(5))}, Box("a", Saw(5)), []),
    ],
)
def test_what_is_missing_counts_as_the_default_of_its_class(older, now, changed):
    assert differences(in_full(older, now), describe(now)) == changed


def test_nothing_that_was_said_is_overwritten():
    said = {"owner": "b", "tool": {"weight": 9}, "label": "red"}

    whole = in_full(said, Box("a"))

    assert (whole["owner"], whole["tool"]["weight"], whole["label"]) == ("b", 9, "red")
    assert said == {"owner": "b", "tool": {"weight": 9}, "label": "red"}
