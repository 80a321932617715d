"""What a run is, in plain values, and what of it must not change when it is resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pretrain.schedules import INITIAL_PHASES
from ssl_bench.composition.compose import get_default
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig

# They change how fast, where and until when a run computes, not what.
_FREE = (
    "init_from",  # what was there, its sha256 says
    "data.root",
    "data.bits",  # what is seen of the images, their fingerprint says
    "data.in_memory",
    "data.allow_overlap",
    "data.on_bad_image",  # nothing is learned from what cannot be read
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
    *(warmup.key for warmup in INITIAL_PHASES),  # what they come to, the state says in steps
)
# What a run may be given more of.
LENGTH = ("train.epochs", "train.max_steps")


def describe(component: Any) -> Any:
    """A component as plain types; a dataclass as the call that makes it."""
    if is_dataclass(component):
        values = {f.name: describe(getattr(component, f.name)) for f in fields(component)}
        return {"_target_": _target(component)} | values
    if isinstance(component, Mapping):
        return {str(key): describe(value) for key, value in component.items()}
    if isinstance(component, Sequence) and not isinstance(component, str):
        return [describe(value) for value in component]
    return component


def in_full(older: Mapping[str, Any], component: Any) -> dict[str, Any]:
    """An older description of a component, with what it could not say yet at its default.

    A dataclass's default is what a run did before there was a choice. Fields without one, and all
    those of another class than the component's, stay as they are. What an encoder's fields were
    once called has today's names, and a class that was moved to another module its new address.
    """
    whole, target = dict(older), _target(component)
    if str(whole.get("_target_")).rpartition(".")[2] != target.rpartition(".")[2]:
        return whole
    whole["_target_"] = target
    for item in fields(component):
        value, default = getattr(component, item.name), get_default(item)
        if item.name not in whole and default is not MISSING:
            whole[item.name] = describe(default)
        if is_dataclass(value) and isinstance(whole.get(item.name), Mapping):
            whole[item.name] = in_full(whole[item.name], value)
    if not isinstance(component, EncoderConfig):
        return whole
    values = {key: value for key, value in whole.items() if key != "_target_"}
    try:
        return describe(type(component).from_dict(values))
    except ConfigurationError:
        # A key that is gone stays, and is named as a difference.
        return whole


def _target(component: Any) -> str:
    return f"{type(component).__module__}.{type(component).__qualname__}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between two descriptions and matters, as "key: old -> new"."""
    old, new = _flatten(before), _flatten(now)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if key not in _FREE and not key.startswith("monitor.") and old.get(key) != new.get(key)
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
