"""An initialiser by its name, with those of its options that differ from their defaults."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from ssl_bench.composition.fields import Within, require
from ssl_bench.errors import ConfigurationError

T = TypeVar("T")
_Gain = Annotated[float, Within(-1000, 1000)]


def make_initialiser(kinds: Mapping[str, type[T]], name: str, options: Mapping[str, Any]) -> T:
    """The initialiser that `kinds` has under that name.

    Raises:
        ConfigurationError: An unknown name or option, or a value of the wrong type.
    """
    if name not in kinds:
        raise ConfigurationError(f"model.init must be one of {', '.join(kinds)}, got {name!r}")
    kind = kinds[name]
    defaults = {item.name: item.default for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: _option(name, defaults, key, value) for key, value in options.items()})


def _option(name: str, defaults: Mapping[str, Any], key: str, value: Any) -> Any:
    if key not in defaults:
        near = ", ".join(get_close_matches(key, defaults) or defaults)
        hint = f"did you mean: {near}?" if near else "it has none; set model.init_options={}"
        raise ConfigurationError(f"model.init={name} has no option {key!r}; {hint}")
    wanted = type(defaults[key])
    if wanted is float:
        require(f"model.init_options.{key}", _Gain, value)
        return float(value)
    if not isinstance(value, wanted):
        raise ConfigurationError(
            f"model.init_options.{key} must be of the kind of {defaults[key]!r}, got {value!r}"
        )
    return value
