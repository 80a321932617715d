"""Parts of a probe that are chosen by name: `probe.loss=histogram`."""

import json
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices, config_folder
from ssl_bench.composition.compose import changed_settings
from ssl_bench.errors import ConfigurationError
from ssl_bench.planning import plan_probes

DATA = {"segmentation": "toy", "classification": "class_folders"}
PARTS = [
    (task, field.name, file.stem)
    for task in DATA
    for field in (config_folder() / "probe" / task).iterdir()
    for file in field.glob("*.yaml")
    if field.name != "protocol"
]


def built(task: str, *overrides: str) -> Any:
    (planned,) = plan_probes([task], [DATA.get(task, "toy")], overrides)
    return planned.probe


def refused(task: str, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        built(task, *overrides)
    return str(caught.value)


def test_the_parts_of_heads_are_loss_training_inference_and_pool():
    assert {(task, field) for task, field, _ in PARTS} == {
        ("segmentation", "loss"),
        ("segmentation", "training"),
        ("segmentation", "inference"),
        ("classification", "training"),
        ("classification", "pool"),
    }


@pytest.mark.parametrize(("task", "field", "name"), PARTS)
def test_every_part_is_built_by_its_name_alone(task, field, name):
    probe = built(task, f"probe.{field}={name}", *(["probe.holdout=0.0"] * (name == "slide")))

    part, usual = getattr(probe, field), getattr(built(task), field)
    # One that has no settings says nothing.
    assert getattr(part, "settings", dict)().items() <= probe.settings().items()
    assert json.loads(json.dumps(probe.settings())) == probe.settings()
    assert (part == usual) == (name == _default(task, field))


def _default(task: str, field: str) -> str:
    usual = {"loss": "upsample4", "inference": "squash", "pool": "fixed"}
    return usual.get(field, "adamw" if task == "segmentation" else "lbfgs")


def test_values_of_a_part_are_keys_of_their_own_wherever_they_stand():
    first = built("segmentation", "probe.training.c_values=[1.0]", "probe.training=lbfgs")
    last = built("segmentation", "probe.training=lbfgs", "probe.training.c_values=[1.0]")

    assert first.settings()["c_values"] == [1.0]
    assert first == last
    assert changed_settings(first) == {"optimizer": "lbfgs", "c_values": [1.0]}


def test_values_that_the_choice_does_not_use_name_the_choice_that_does():
    lbfgs = refused("segmentation", "probe.training.c_values=[1]")
    assert lbfgs.endswith("; use `probe.training=lbfgs`")
    sgd = refused("classification", "probe.training.epochs=3")
    assert sgd.endswith("; use `probe.training=sgd`")
    adamw = refused("segmentation", "probe.protocol=capi", "probe.training.epochs=3")
    assert "`probe.training=adamw`" in adamw
    side = refused("tokencut", "probe.image_size=128")
    assert "`probe.longer_side=VALUE` or `probe.max_side=VALUE`" in side


def test_a_name_replaces_all_that_the_protocol_says_of_the_part():
    probe = built("segmentation", "probe.protocol=capi", "probe.training=sgd")

    assert probe.training == built("segmentation", "probe.training=sgd").training
    assert changed_settings(probe) == {"optimizer": "sgd"}
    assert probe.loss == built("segmentation", "probe.protocol=capi").loss


def test_a_wrong_name_gets_the_right_ones():
    assert refused("segmentation", "probe.loss=histogramm") == (
        "unknown loss 'histogramm'; use `probe.loss=histogram`"
    )
    assert "unknown training 'adam'" in refused("segmentation", "probe.training=adam")
    assert "unknown loss" in refused("segmentation", "probe.loss={_target_: os.system}")
    assert "_target_" in refused("segmentation", "probe.loss._target_=os.system")


def test_a_part_reaches_the_tasks_that_have_one_of_that_name():
    plan = plan_probes(list(DATA), list(DATA.values()), ["probe.training=adamw"])

    overrides = {planned.probe.task: planned.overrides for planned in plan}
    assert overrides == {"segmentation": ("probe.training=adamw",), "classification": ()}


@pytest.mark.parametrize(
    ("task", "field", "name"),
    {(task, field): (task, field, name) for task, field, name in PARTS}.values(),
)
def test_keys_tell_the_name_of_each_part_and_what_else_it_can_be(task, field, name, capsys):
    assert main(["keys", f"probe.{task}", f"probe.{field}={name}"]) == 0

    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    shown = [(said, legal[0]) for said, *legal in lines if said.startswith(f"probe.{field}=")]
    found = {said: legal.partition(":")[0].strip() for said, legal in shown}
    assert found == {f"probe.{field}={name}": " or ".join(choices(f"probe/{task}/{field}"))}
