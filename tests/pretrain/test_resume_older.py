"""Runs continue if their saved state lacks options that were added later."""

import shutil
from dataclasses import replace

import pytest

from pretrain.checkpoints import save_state
from pretrain.optimizers.recipes import Soap
from pretrain.plan import Pretraining
from ssl_bench.composition.compose import component_class
from ssl_bench.errors import ConfigurationError
from tests.pretrain.plans import TINY, album, plan_of, state_of, stopped_after_a_step
from tests.support.runs import assert_same_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder of six images: three steps per epoch."""
    return album(tmp_path_factory.mktemp("pictures"), 6, folders=("",))


def change(out, forgotten=(), added=None):
    """Rewrite the state of a run, with configuration keys removed or added."""
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
    "objective.crops.hue",
    "optimizer.betas",
    "model.graying",
    "train.max_grad_norm",
    "monitor",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "added"),
    [
        # Options that were added since.
        (NEWER, {}),
        # The former name of an option.
        (("model.mlp_mean",), {"model": {"init_options": {"mlp_mean": 0.5}}}),
        # The former module of a class, and of a part.
        ((), {"_target_": "pretrain.train.Pretraining"}),
        ((), {"objective": {"_target_": "pretrain.former.Dino"}}),
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
        # Another class, whose defaults say nothing of the former one.
        ((), {}, {"optimizer": Soap(lr=0.05)}, "optimizer._target_: .*AdamW -> .*Soap.*"),
    ],
)
def test_what_differs_from_an_older_state_is_named(
    root, stopped, tmp_path, forgotten, added, train, said
):
    out = shutil.copytree(stopped, tmp_path / "run")
    change(out, forgotten, added)

    with pytest.raises(ConfigurationError, match=rf"\({said}\)"):
        plan_of(root, max_steps=3, **train).run(out, resume=True, device="cpu")


def test_the_former_address_of_a_run_is_the_same_class():
    assert component_class("pretrain.train.Pretraining", "_target_") is Pretraining
