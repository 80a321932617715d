"""A run goes on after options were added that its saved state knows nothing of."""

import shutil
from dataclasses import dataclass, field, replace

import pytest

from pretrain.checkpoints import save_state
from pretrain.description import describe, differences, in_full
from ssl_bench.errors import ConfigurationError
from tests.pretrain.plans import TINY, album, plan_of, state_of, stopped_after_a_step
from tests.support.runs import assert_same_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six pictures: three steps of two an epoch."""
    return album(tmp_path_factory.mktemp("pictures"), 6, folders=("",))


def change(out, forgotten=(), added=None):
    """Write the state of a run anew, its configuration without some keys and with others."""
    state = state_of(out)
    for key in forgotten:
        *path, name = key.split(".")
        part = state["configuration"]
        for word in path:
            part = part[word]
        del part[name]
    for key, value in (added or {}).items():
        whole = state["configuration"]
        whole[key] = whole[key] | value if isinstance(whole.get(key), dict) else value
    save_state(out, state)


NEWER = (
    *("_target_", "objective.crops.hue", "optimizer.betas", "model.graying", "train.max_grad_norm"),
    *("objective._target_", "data._target_", "monitor"),
)


@pytest.mark.parametrize(
    ("forgotten", "added"),
    [
        # What was added since.
        (NEWER, {}),
        # The former name of an option.
        (("model.mlp_mean",), {"model": {"init_options": {"mlp_mean": 0.5}}}),
    ],
)
def test_a_state_of_an_older_version_goes_on_to_the_very_bits(root, tmp_path, forgotten, added):
    mean = 0.5 if "model.mlp_mean" in forgotten else 0.0
    plan = plan_of(root, model=replace(TINY, mlp_mean=mean), max_steps=3)
    plan.run(tmp_path / "whole", device="cpu")
    stopped_after_a_step(plan, tmp_path / "older")
    change(tmp_path / "older", forgotten, added)

    plan.run(tmp_path / "older", resume=True, device="cpu")

    assert_same_run(tmp_path / "whole", tmp_path / "older")


@pytest.fixture(scope="module")
def stopped(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    stopped_after_a_step(plan_of(root, max_steps=3, max_grad_norm=3.0), out)
    return out


@pytest.mark.parametrize(
    ("forgotten", "added", "train", "said"),
    [
        ((), {"model": {"lottery": 7}}, {}, "model.lottery: 7 -> None"),
        ((), {"lottery": {"prize": 7}}, {}, "lottery.prize: 7 -> None"),
        # A newer key that is not at its default.
        (
            ("train.max_grad_norm", "model.norm"),
            {},
            {"max_grad_norm": 1.0},
            "train.max_grad_norm: 3.0 -> 1.0",
        ),
    ],
)
def test_what_differs_from_an_older_state_is_named(
    root, stopped, tmp_path, forgotten, added, train, said
):
    out = shutil.copytree(stopped, tmp_path / "run")
    change(out, forgotten, added)

    with pytest.raises(ConfigurationError, match=rf"\({said}\)"):
        plan_of(root, max_steps=3, **train).run(out, resume=True, device="cpu")


def test_a_state_that_does_not_say_its_warm_ups_is_refused(root, stopped, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    change(out, ("opening_steps",))

    plan, said = plan_of(root, max_steps=3, max_grad_norm=3.0), "older version, which did not say"
    for extend in (False, True):
        with pytest.raises(ConfigurationError, match=f"{said} how long"):
            plan.run(out, resume=True, extend=extend, device="cpu")


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
        # Nothing that was said is overwritten.
        (
            {"owner": "b", "tool": {"weight": 9}, "label": "red"},
            Box("a"),
            ["label: red -> None", "owner: b -> a", "tool.weight: 9 -> 3"],
        ),
    ],
)
def test_what_is_missing_counts_as_the_default_of_its_class(older, now, changed):
    assert differences(in_full(older, now), describe(now)) == changed
