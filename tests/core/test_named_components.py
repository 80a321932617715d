"""Test that parts of a probe can be chosen by name, such as `probe.loss=histogram`."""

import json
import re
from functools import partial
from typing import Any

import pytest

from probes.discovery import ObjectDiscovery
from probes.knn import KNN
from probes.pca import PCA
from probes.segmentation import Segmentation
from probes.tokencut.probe import TokenCut
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices, config_folder
from ssl_bench.composition.compose import (
    TARGET,
    build,
    changed_settings,
    compose_config,
    import_component,
    list_protocols,
    protocol_group,
)
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


def build_probe(task: str, *overrides: str) -> Any:
    (planned,) = plan_probes([task], [DATA.get(task, "toy")], overrides)
    return planned.probe


@pytest.mark.parametrize(("task", "field", "name"), PARTS)
def test_every_part_is_built_by_its_name_alone(task, field, name):
    probe = build_probe(task, f"probe.{field}={name}", *(["probe.holdout=0.0"] * (name == "slide")))

    part, usual = getattr(probe, field), getattr(build_probe(task), field)
    # A component without settings does not have this method.
    assert getattr(part, "settings", dict)().items() <= probe.settings().items()
    assert json.loads(json.dumps(probe.settings())) == probe.settings()
    assert (part == usual) == (name == _default(task, field))


def _default(task: str, field: str) -> str:
    usual = {"loss": "upsample4", "inference": "squash", "pool": "fixed"}
    return usual.get(field, "adamw" if task == "segmentation" else "lbfgs")


def test_the_order_of_component_overrides_does_not_matter():
    first = build_probe("segmentation", "probe.training.c_values=[1.0]", "probe.training=lbfgs")
    last = build_probe("segmentation", "probe.training=lbfgs", "probe.training.c_values=[1.0]")

    assert first.settings()["c_values"] == [1.0]
    assert first == last
    assert changed_settings(first) == {"optimizer": "preconditioned_lbfgs", "c_values": [1.0]}


@pytest.mark.parametrize(
    ("task", "overrides", "hint"),
    [
        ("segmentation", ["probe.training.c_values=[1]"], "use `probe.training=lbfgs`"),
        ("classification", ["probe.training.epochs=3"], "use `probe.training=sgd`"),
        ("segmentation", ["probe.protocol=capi", "probe.training.epochs=3"], "training=adamw"),
        ("tokencut", ["probe.image_size=128"], "`probe.longer_side=VALUE`"),
        ("segmentation", ["probe.loss=histogramm"], "`probe.loss=histogram`"),
        ("segmentation", ["probe.training=adam"], "unknown training 'adam'"),
        ("segmentation", ["probe.loss={_target_: os.system}"], "unknown loss"),
        ("segmentation", ["probe.loss._target_=os.system"], "_target_"),
    ],
)
def test_errors_for_wrong_parts_or_keys_name_the_right_one(task, overrides, hint):
    with pytest.raises(ConfigurationError, match=re.escape(hint)):
        build_probe(task, *overrides)


def test_a_named_part_replaces_that_of_the_protocol():
    probe = build_probe("segmentation", "probe.protocol=capi", "probe.training=sgd")

    assert probe.training == build_probe("segmentation", "probe.training=sgd").training
    assert changed_settings(probe) == {"optimizer": "sgd"}
    assert probe.loss == build_probe("segmentation", "probe.protocol=capi").loss


def test_an_override_reaches_the_tasks_that_have_such_a_part():
    plan = plan_probes(list(DATA), list(DATA.values()), ["probe.training=adamw"])

    overrides = {planned.probe.task: planned.overrides for planned in plan}
    assert overrides == {"segmentation": ("probe.training=adamw",), "classification": ()}


def test_the_keys_command_prints_the_names_of_parts(capsys):
    task, field, name = PARTS[0]
    assert main(["keys", f"probe.{task}", f"probe.{field}={name}"]) == 0

    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    shown = {typed: legal[0] for typed, *legal in lines if typed.startswith(f"probe.{field}=")}
    found = {typed: legal.partition(":")[0].strip() for typed, legal in shown.items()}
    assert found == {f"probe.{field}={name}": " or ".join(choices(f"probe/{task}/{field}"))}


def probe_class(task: str) -> type:
    return import_component(compose_config("probing", [f"probe={task}"])["probe"][TARGET], "probe")


PRESETS = [
    (task, name) for task in choices("probe") for name in list_protocols(task, probe_class(task))
]


def preset(task: str, protocol: str, *overrides: str) -> Any:
    key = protocol_group(task) if choices(protocol_group(task)) else "probe.protocol"
    words = [f"probe={task}", f"{key}={protocol}", *overrides]
    return build(compose_config("probing", words), "probe")


@pytest.mark.parametrize(("task", "protocol"), [p for p in PRESETS if p[1] != "checkpoints"])
def test_an_unchanged_protocol_has_no_changed_setting(task, protocol):
    assert changed_settings(preset(task, protocol)) == {}


@pytest.mark.parametrize(
    ("probe", "changed"),
    [
        # 512 pixels are the default of the class, but not of the protocol.
        (partial(preset, "segmentation", "capi", "probe.image_size=512"), {"image_size": 512}),
        (partial(TokenCut, tau=0.3), {"tau": 0.3}),
        (partial(ObjectDiscovery, tau=0.2), {"tau": 0.2}),
        (partial(KNN, neighbours=[20]), {"neighbours": [20]}),
        # A list from a file equals a tuple.
        (partial(KNN, neighbours=[10, 20, 100, 200]), {}),
        # These settings change no score.
        (partial(Segmentation, panels=0, num_workers=1, memory_gib=1.0), {}),
        (partial(PCA, facet="key", grid="svg"), {}),
        # A setting that only another method uses counts if it differs.
        (partial(TokenCut, method="maskcut"), {"method": "maskcut"}),
        (
            partial(TokenCut, method="maskcut", max_objects=5),
            {"method": "maskcut", "max_objects": 5},
        ),
    ],
)
def test_settings_that_differ_from_the_protocol_are_changed(probe, changed):
    assert changed_settings(probe()) == changed


def test_a_protocol_name_without_its_values_has_changed_settings():
    assert changed_settings(Segmentation(protocol="cutting_the_skip"))["train_images"] is None
