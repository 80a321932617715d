from dataclasses import replace
from typing import Any

import pytest

from probes.discovery import ObjectDiscovery
from probes.knn import KNN
from probes.pca import PCA
from probes.segmentation import Segmentation
from probes.tokencut.probe import TokenCut
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import (
    TARGET,
    build,
    changed_settings,
    component_class,
    compose_config,
    list_protocols,
    protocol_group,
)


def kind_of(task: str) -> type:
    return component_class(compose_config("probing", [f"probe={task}"])["probe"][TARGET], "probe")


PRESETS = [
    (task, name) for task in choices("probe") for name in list_protocols(task, kind_of(task))
]


def composed(task: str, protocol: str, *overrides: str) -> Any:
    """The probe that the command line builds."""
    preset = protocol_group(task) if choices(protocol_group(task)) else "probe.protocol"
    words = [f"probe={task}", f"{preset}={protocol}", *overrides]
    return build(compose_config("probing", words), "probe")


def test_every_protocol_of_the_suite_is_seen():
    assert {task for task, _ in PRESETS} == set(choices("probe"))


@pytest.mark.parametrize(("task", "protocol"), [p for p in PRESETS if p[1] != "checkpoints"])
def test_a_protocol_as_it_is_has_no_changed_setting(task, protocol):
    assert changed_settings(composed(task, protocol)) == {}


def test_what_differs_from_the_file_of_the_protocol_is_changed():
    changed = changed_settings(composed("segmentation", "capi", "probe.image_size=512"))

    # 512 pixels are the default of the class, and yet not what CAPI does.
    assert changed == {"image_size": 512}
    assert changed_settings(Segmentation(protocol="cutting_the_skip"))["train_images"] is None


def test_what_differs_from_the_defaults_is_changed_where_a_protocol_has_no_file():
    assert changed_settings(TokenCut(tau=0.3)) == {"tau": 0.3}
    assert changed_settings(ObjectDiscovery(tau=0.2)) == {"tau": 0.2}
    assert changed_settings(KNN(neighbours=[20])) == {"neighbours": [20]}
    # A list as it comes from a file is the same as a tuple.
    assert changed_settings(KNN(neighbours=[10, 20, 100, 200])) == {}


def test_what_changes_no_score_is_not_changed():
    assert changed_settings(Segmentation(panels=0, num_workers=1, memory_gib=1.0)) == {}
    assert changed_settings(PCA(facet="key", grid="svg")) == {}


def test_what_only_another_choice_uses_is_changed_only_if_it_differs():
    masks = TokenCut(method="maskcut")

    assert changed_settings(masks) == {"method": "maskcut"}
    assert changed_settings(replace(masks, max_objects=5)) == {
        "method": "maskcut",
        "max_objects": 5,
    }
