"""Probes of linear heads from plain values, each given to the component that has such a field."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from probes.classification import LinearClassification
from probes.segmentation import Segmentation
from ssl_bench.composition.choices import config_folder
from ssl_bench.composition.compose import TARGET, component_class, instantiate, read_file
from tests.support.configured import configured


def segmentation(
    usual: Mapping[str, Any] | None = None,
    *,
    loss: str = "upsample4",
    training: str = "adamw",
    inference: str = "squash",
    **changes: Any,
) -> Segmentation:
    """Linear segmentation; `usual` are values of which those are taken that something has."""
    names = {"loss": loss, "training": training, "inference": inference}
    return _put_together(Segmentation, names, usual or {}, changes)


def classification(
    usual: Mapping[str, Any] | None = None, *, training: str = "lbfgs", **changes: Any
) -> LinearClassification:
    """As `segmentation`."""
    return _put_together(LinearClassification, {"training": training}, usual or {}, changes)


def _put_together(
    kind: Any, names: Mapping[str, str], usual: Mapping[str, Any], changes: dict[str, Any]
) -> Any:
    own = {item.name for item in fields(kind)}
    given = {name: value for name, value in usual.items() if name in own and name not in changes}
    for field, name in names.items():
        call = read_file(config_folder() / "probe" / kind.task / field / f"{name}.yaml")
        taken = {item.name for item in fields(component_class(call[TARGET], field))}
        call |= {name: value for name, value in usual.items() if name in taken}
        call |= {name: changes.pop(name) for name in taken & changes.keys()}
        given[field] = instantiate(call, f"probe.{field}")
    return configured(kind, **given, **changes)
