from functools import partial
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
    """Return the probe that the command line builds."""
    preset = protocol_group(task) if choices(protocol_group(task)) else "probe.protocol"
    words = [f"probe={task}", f"{preset}={protocol}", *overrides]
    return build(compose_config("probing", words), "probe")


@pytest.mark.parametrize(("task", "protocol"), [p for p in PRESETS if p[1] != "checkpoints"])
def test_a_protocol_as_it_is_has_no_changed_setting(task, protocol):
    assert changed_settings(composed(task, protocol)) == {}


@pytest.mark.parametrize(
    ("probe", "changed"),
    [
        # 512 pixels are the default of the class, but not of the protocol.
        (partial(composed, "segmentation", "capi", "probe.image_size=512"), {"image_size": 512}),
        (partial(TokenCut, tau=0.3), {"tau": 0.3}),
        (partial(ObjectDiscovery, tau=0.2), {"tau": 0.2}),
        (partial(KNN, neighbours=[20]), {"neighbours": [20]}),
        # A list as it comes from a file is the same as a tuple.
        (partial(KNN, neighbours=[10, 20, 100, 200]), {}),
        # Settings that change no score.
        (partial(Segmentation, panels=0, num_workers=1, memory_gib=1.0), {}),
        (partial(PCA, facet="key", grid="svg"), {}),
        # A setting that only another choice uses counts if it differs.
        (partial(TokenCut, method="maskcut"), {"method": "maskcut"}),
        (
            partial(TokenCut, method="maskcut", max_objects=5),
            {"method": "maskcut", "max_objects": 5},
        ),
    ],
)
def test_settings_that_differ_from_the_protocol_are_changed(probe, changed):
    assert changed_settings(probe()) == changed


def test_a_protocol_without_its_file_differs_from_it():
    assert changed_settings(Segmentation(protocol="cutting_the_skip"))["train_images"] is None
