"""Describe the settings of a run, and find settings that have changed when a run is resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pretrain.schedules import INITIAL_PHASES
from ssl_bench.composition.compose import get_default
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig

# Keys that may change when a run is resumed, because they do not affect the weights.
_MAY_CHANGE = (
    "init_from",  # the sha256 of the checkpoint is compared instead
    "data.root",
    "data.bits",  # the fingerprint of the images is compared instead
    "data.in_memory",
    "data.allow_overlap",
    "data.on_bad_image",  # no step uses an image that cannot be read
    "train.max_minutes",
    "train.num_workers",
    "train.shared_memory_gib",
    "train.compile",
    "train.tensorboard",
    "train.wandb",
    "train.checkpoint_minutes",
    "train.checkpoint_epochs",
    "train.keep_epochs",
    "train.keep_every",
    "train.timeout_minutes",
    "train.non_finite_patience",
    "train.collapse_patience",
    *(warmup.key for warmup in INITIAL_PHASES),  # the state stores the warm-ups in steps
)
LENGTH_KEYS = ("train.epochs", "train.max_steps")
"""Keys whose values `--extend` may increase."""


def describe(component: Any) -> Any:
    """Convert a run, or a component such as its optimizer, to nested dictionaries and lists.

    A dataclass becomes a dictionary whose key `_target_` contains the module and the name of the
    class, such as "pretrain.optimizers.recipes.AdamW".
    """
    if is_dataclass(component):
        values = {f.name: describe(getattr(component, f.name)) for f in fields(component)}
        return {"_target_": _get_target(component)} | values
    if isinstance(component, Mapping):
        return {str(key): describe(value) for key, value in component.items()}
    if isinstance(component, Sequence) and not isinstance(component, str):
        return [describe(value) for value in component]
    return component


def update_description(older: Mapping[str, Any], component: Any) -> dict[str, Any]:
    """Update the description of an optimizer or other component from an older version of ssl-bench.

    A field that is missing in the description gets its default value, which reproduces the
    behaviour of the older version. Old names of classes and fields are replaced by their current
    names. If the description and `component` have different classes, the description is returned
    unchanged.

    Args:
        older: Description of the component, which `describe` of the older version returned.
        component: The corresponding component of the current run, with the current fields.
    """
    updated, target = dict(older), _get_target(component)
    if str(updated.get("_target_")).rpartition(".")[2] != target.rpartition(".")[2]:
        return updated
    updated["_target_"] = target
    for item in fields(component):
        value, default = getattr(component, item.name), get_default(item)
        if item.name not in updated and default is not MISSING:
            updated[item.name] = describe(default)
        if is_dataclass(value) and isinstance(updated.get(item.name), Mapping):
            updated[item.name] = update_description(updated[item.name], value)
    if not isinstance(component, EncoderConfig):
        return updated
    values = {key: value for key, value in updated.items() if key != "_target_"}
    try:
        return describe(type(component).from_dict(values))
    except ConfigurationError:
        # An unknown key stays in the description, so that `find_differences` reports it.
        return updated


def _get_target(component: Any) -> str:
    return f"{type(component).__module__}.{type(component).__qualname__}"


def find_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ between a saved and a current description of a run.

    Settings that do not affect the trained weights are ignored. Each difference is returned as a
    string, such as "train.seed: 3 -> 4".
    """
    old, new = _flatten(before), _flatten(now)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if key not in _MAY_CHANGE
        and not key.startswith("monitor.")
        and old.get(key) != new.get(key)
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, and join the nested keys with dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
