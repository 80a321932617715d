"""Build linear probes for segmentation and classification."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from probes.classification import LinearClassification
from probes.segmentation import Segmentation
from ssl_bench.composition.choices import config_folder
from ssl_bench.composition.compose import TARGET, import_component, instantiate, read_file
from tests.support.components import build_component


def segmentation(
    defaults: Mapping[str, Any] | None = None,
    *,
    loss: str = "upsample4",
    training: str = "adamw",
    inference: str = "squash",
    **changes: Any,
) -> Segmentation:
    """Return a segmentation probe. Unknown names in `defaults` are ignored."""
    names = {"loss": loss, "training": training, "inference": inference}
    return _build(Segmentation, names, defaults or {}, changes)


def classification(
    defaults: Mapping[str, Any] | None = None, *, training: str = "lbfgs", **changes: Any
) -> LinearClassification:
    """Return a classification probe. Unknown names in `defaults` are ignored."""
    return _build(LinearClassification, {"training": training}, defaults or {}, changes)


def _build(
    kind: Any, names: Mapping[str, str], defaults: Mapping[str, Any], changes: dict[str, Any]
) -> Any:
    own = {item.name for item in fields(kind)}
    given = {name: value for name, value in defaults.items() if name in own and name not in changes}
    for field, name in names.items():
        call = read_file(config_folder() / "probe" / kind.task / field / f"{name}.yaml")
        accepted = {item.name for item in fields(import_component(call[TARGET], field))}
        call |= {name: value for name, value in defaults.items() if name in accepted}
        call |= {name: changes.pop(name) for name in accepted & changes.keys()}
        given[field] = instantiate(call, f"probe.{field}")
    return build_component(kind, **given, **changes)
