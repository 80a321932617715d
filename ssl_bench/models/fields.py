"""What the configurations of all encoders check of their fields."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from ssl_bench.composition.fields import require
from ssl_bench.errors import ConfigurationError

T = TypeVar("T")
GrayingKind = Literal["none", "svd", "dct"]
GrayingScope = Literal["map", "window"]


def from_dict(kind: type[T], values: Mapping[str, Any]) -> T:
    """A configuration of that class with the fields that `values` names.

    Raises:
        ConfigurationError: A key that no version of the class knows, or a wrong value.
    """
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            near = ", ".join(get_close_matches(key, known)) or ", ".join(known)
            raise ConfigurationError(f"model has no key {key!r}; did you mean: {near}?")
    return kind(**values)


def as_floats(config: Any) -> None:
    """Make floats of whole numbers in fields of fractions: equal configurations are equal texts."""
    for item in fields(config):
        if isinstance(item.default, float):
            object.__setattr__(config, item.name, float(getattr(config, item.name)))


def take_older_names(config: Any, inner: str, names: Sequence[str]) -> None:
    """Move what the mapping `inner` of a configuration says of fields of these names into them.

    Raises:
        ConfigurationError: a value that the field does not take, or another one than it has.
    """
    said = dict(getattr(config, inner))
    for item in fields(config):
        if item.name not in names or item.name not in said:
            continue
        value, here = said.pop(item.name), getattr(config, item.name)
        require(f"model.{inner}.{item.name}", item.type, value)
        if here not in (item.default, value):
            raise ConfigurationError(
                f"model.{inner}.{item.name} is an older name of model.{item.name}, got {value} and "
                f"{here}; give the latter alone"
            )
        object.__setattr__(config, item.name, value)
    object.__setattr__(config, inner, said)


def check_divisible(config: Any, name: str, divisor_name: str) -> None:
    """Refuse a field that another one does not divide; the message names the nearest that fit."""
    value, divisor = getattr(config, name), getattr(config, divisor_name)
    if value % divisor:
        lower = value - value % divisor
        near = " or ".join(str(size) for size in (lower, lower + divisor) if size)
        raise ConfigurationError(
            f"model.{name} must be a multiple of model.{divisor_name} = {divisor}, got {value}; "
            f"take {near}"
        )


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None, which stands for the default."""
    return {key: value for key, value in options.items() if value is not None}


def check_layers(layers: Sequence[int] | None, depth: int) -> None:
    """Refuse blocks to be grayed that an encoder does not have; None stands for all.

    Raises:
        ConfigurationError: none, or one outside of 0 to depth - 1.
    """
    if layers is None:
        return
    outside = [layer for layer in layers if layer not in range(depth)]
    if outside or not layers:
        raise ConfigurationError(
            f"model.graying_layers must lie in 0..{depth - 1}, "
            f"got {', '.join(map(str, outside)) or 'none'}; "
            "model.graying=none grays no block, null every one"
        )
