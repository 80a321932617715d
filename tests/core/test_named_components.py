"""Parts of a probe that are chosen by name, such as `probe.loss=histogram`."""

import json
import re
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


@pytest.mark.parametrize(("task", "field", "name"), PARTS)
def test_every_part_is_built_by_its_name_alone(task, field, name):
    probe = built(task, f"probe.{field}={name}", *(["probe.holdout=0.0"] * (name == "slide")))

    part, usual = getattr(probe, field), getattr(built(task), field)
    # A component without settings has no text.
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
    assert changed_settings(first) == {"optimizer": "preconditioned_lbfgs", "c_values": [1.0]}


@pytest.mark.parametrize(
    ("task", "overrides", "hint"),
    [
        ("segmentation", ["probe.training.c_values=[1]"], "probe.training=lbfgs"),
        ("classification", ["probe.training.epochs=3"], "probe.training=sgd"),
        ("segmentation", ["probe.protocol=capi", "probe.training.epochs=3"], "training=adamw"),
        ("tokencut", ["probe.image_size=128"], "`probe.longer_side=VALUE`"),
        ("segmentation", ["probe.loss=histogramm"], "`probe.loss=histogram`"),
        ("segmentation", ["probe.training=adam"], "unknown training 'adam'"),
        ("segmentation", ["probe.loss={_target_: os.system}"], "unknown loss"),
        ("segmentation", ["probe.loss._target_=os.system"], "_target_"),
    ],
)
def test_a_wrong_choice_or_value_names_the_right_one(task, overrides, hint):
    with pytest.raises(ConfigurationError, match=re.escape(hint)):
        built(task, *overrides)


def test_a_name_replaces_all_that_the_protocol_says_of_the_part():
    probe = built("segmentation", "probe.protocol=capi", "probe.training=sgd")

    assert probe.training == built("segmentation", "probe.training=sgd").training
    assert changed_settings(probe) == {"optimizer": "sgd"}
    assert probe.loss == built("segmentation", "probe.protocol=capi").loss


def test_a_part_reaches_the_tasks_that_have_one_of_that_name():
    plan = plan_probes(list(DATA), list(DATA.values()), ["probe.training=adamw"])

    overrides = {planned.probe.task: planned.overrides for planned in plan}
    assert overrides == {"segmentation": ("probe.training=adamw",), "classification": ()}


def test_keys_print_the_names_that_a_part_can_have(capsys):
    task, field, name = PARTS[0]
    assert main(["keys", f"probe.{task}", f"probe.{field}={name}"]) == 0

    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    shown = {typed: legal[0] for typed, *legal in lines if typed.startswith(f"probe.{field}=")}
    found = {typed: legal.partition(":")[0].strip() for typed, legal in shown.items()}
    assert found == {f"probe.{field}={name}": " or ".join(choices(f"probe/{task}/{field}"))}
