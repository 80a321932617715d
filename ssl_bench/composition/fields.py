"""Types that say which values a configured field accepts, and the one function that checks them.

A field of type `Count` accepts whole numbers from 1 on, one of type `Fraction` numbers in [0, 1].
A dataclass calls `check_fields(self, "probe")` in `__post_init__` to check all of its fields.
Whole numbers in fields of type float become floats, because settings identify results: 1 and 1.0
must be the same setting.

We do not use pydantic, because in its lax mode it reads the text "3" as the number 3.
"""

import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ssl_bench.errors import ConfigurationError, escape_braces
from ssl_bench.system.paths import is_valid_path

_MANY = 10**9
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = 12


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest legal number.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        allow_low: Whether `low` itself is legal.
        allow_high: Whether `high` itself is legal.
    """

    low: int | float
    high: int | float
    allow_low: bool = True
    allow_high: bool = True

    def contains(self, value: int | float) -> bool:
        """Return whether a number is within the bounds. NaN never is."""
        is_above = value >= self.low if self.allow_low else value > self.low
        return is_above and (value <= self.high if self.allow_high else value < self.high)

    def __str__(self) -> str:
        brackets = "[" if self.allow_low else "(", "]" if self.allow_high else ")"
        return f"{brackets[0]}{self.low:.15g}, {self.high:.15g}{brackets[1]}"


@dataclass(frozen=True)
class ListLength:
    """Smallest and largest number of items in a list."""

    shortest: int
    longest: int

    def contains(self, value: Sequence[Any]) -> bool:
        return self.shortest <= len(value) <= self.longest

    def __str__(self) -> str:
        if self.shortest == self.longest:
            return f"{self.shortest}"
        return f"{self.shortest} to {self.longest}"


class PathRule:
    """Text that the operating system accepts as a path."""

    def contains(self, value: str) -> bool:
        return is_valid_path(value)

    def __str__(self) -> str:
        return "a path"


Count = Annotated[int, Bounds(1, _MANY)]
CountOrZero = Annotated[int, Bounds(0, _MANY)]
Threads = Annotated[int, Bounds(1, 1024)]
Pixels = Annotated[int, Bounds(1, 8192)]
Bits = Annotated[int, Bounds(8, 16)] | None
Width = Annotated[int, Bounds(1, 2**20)]
Depth = Annotated[int, Bounds(1, 1000)]
Workers = Annotated[int, Bounds(0, 1024)]
# The legacy random generators of NumPy accept no larger seed.
Seed = Annotated[int, Bounds(0, 2**32 - 1)]
Fraction = Annotated[float, Bounds(0, 1)]
PositiveFraction = Annotated[float, Bounds(0, 1, allow_low=False)]
FractionBelowOne = Annotated[float, Bounds(0, 1, allow_high=False)]
OpenFraction = Annotated[float, Bounds(0, 1, allow_low=False, allow_high=False)]
Positive = Annotated[float, Bounds(0, _MANY, allow_low=False)]
PositiveOrZero = Annotated[float, Bounds(0, _MANY)]
Rate = Annotated[float, Bounds(0, 1000, allow_low=False)]
RateOrZero = Annotated[float, Bounds(0, 1000)]
Temperature = Annotated[float, Bounds(0, 1000, allow_low=False)]
# The smallest and the largest value of a range to draw from.
PositiveRange = Annotated[Sequence[Positive], ListLength(2, 2)]
FractionRange = Annotated[Sequence[PositiveFraction], ListLength(2, 2)]
FilePath = Annotated[str, PathRule()]
OptionalPath = FilePath | Path | None
Level = Annotated[int, Bounds(0, 255)]
Rgb = Annotated[Sequence[Level], ListLength(3, 3)]
# Library of the nearest-neighbour search: "auto" uses faiss for large sets on a CPU, else torch.
Engine = Literal["auto", "faiss", "torch"]
MaskValue = Annotated[int, Bounds(0, 65535)]


def check_fields(component: Any, key: str) -> None:
    """Check each field of a dataclass against its type and convert whole numbers to floats.

    Nested dataclasses are checked too. A single number in a field of type list becomes a list.

    Args:
        component: The dataclass. It may be frozen.
        key: Prefix of the field names in error messages, such as "probe".

    Raises:
        ConfigurationError: A value does not fit the type of its field.
    """
    for name, kind in _field_types(component).items():
        value, full_name = getattr(component, name), f"{key}.{name}" if key else name
        converted = require_type(full_name, kind, value)
        if is_dataclass(value) and not isinstance(value, type):
            check_fields(value, full_name)
        elif converted is not value:
            object.__setattr__(component, name, converted)


def _field_types(component: Any) -> dict[str, Any]:
    """Return the type of each field by name.

    Annotations that are strings (`from __future__ import annotations`) are evaluated. Fields whose
    annotations cannot be evaluated are left out.
    """
    types = {item.name: item.type for item in fields(component)}
    if not any(isinstance(kind, str) for kind in types.values()):
        return types
    try:
        evaluated = get_type_hints(type(component), include_extras=True)
    # A name may be imported under TYPE_CHECKING only.
    except (NameError, AttributeError, TypeError):
        return {name: kind for name, kind in types.items() if not isinstance(kind, str)}
    return {name: evaluated[name] for name in types}


def require_type(key: str, kind: Any, value: Any) -> Any:
    """Return a value as its type stores it: a whole number becomes a float in a field of floats.

    Args:
        key: Name of the field in error messages, such as "probe.tau".
        kind: Annotation of the field.
        value: The value to check.

    Raises:
        ConfigurationError: The value does not fit. The message says what the field expects.
    """
    try:
        return _convert(kind, value)
    except _IllegalValue:
        takes_text, text_key = _fits(kind, "name"), escape_braces(key)
        is_number = isinstance(value, int | float)
        hint = (f"{text_key}='{value}'",) if takes_text and is_number else ()
        raise ConfigurationError(
            f"{key} expects {describe_type(kind)}, got {format_value(value)}", hint=hint
        ) from None


def require_nonempty(key: str, values: Sequence[Any]) -> None:
    """Raise a ConfigurationError that names the key if a list is empty."""
    if not values:
        raise ConfigurationError(f"{key} expects at least one value, got []")


class _IllegalValue(Exception):
    """A value does not fit a type."""


def _convert(kind: Any, value: Any) -> Any:
    """Return a value as a field of this type stores it, or raise `_IllegalValue`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        converted = _convert(parts[0], value)
        if parts[1].contains(converted):
            return converted
    elif origin is Literal:
        if any(type(value) is type(part) and value == part for part in parts):
            return value
    elif origin in (Union, UnionType):
        accepted = [_convert(part, value) for part in parts if _fits(part, value)]
        if accepted:
            # Count | FractionBelowOne keeps the whole number 1.
            return next((same for same in accepted if same is value), accepted[0])
    elif kind is int or kind is float:
        if _is_finite_number(kind, value):
            return float(value) if kind is float and type(value) is int else value
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            converted = {key: _convert(parts[1], item) for key, item in value.items()}
            return converted if any(converted[key] is not value[key] for key in value) else value
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        return _convert_list(parts[0], value)
    elif kind is Any or not isinstance(kind, type) or isinstance(value, kind):
        return value
    raise _IllegalValue


def _convert_list(kind: Any, value: Any) -> Any:
    if isinstance(value, int | float):
        return [_convert(kind, value)]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _IllegalValue
    items = [_convert(kind, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return tuple(items) if isinstance(value, tuple) else items


def _is_finite_number(kind: type, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    return kind is int or abs(value) <= sys.float_info.max


def _fits(kind: Any, value: Any) -> bool:
    try:
        _convert(kind, value)
    except _IllegalValue:
        return False
    return True


def format_value(value: Any) -> str:
    """Return a value as the user would type it, shortened if it is long."""
    if isinstance(value, (list, tuple)):
        more = ["..."] if len(value) > _SHORT.maxlist else []
        return f"[{','.join([*map(format_value, value[: _SHORT.maxlist]), *more])}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or value is True or value is False else _SHORT.repr(value)


def describe_type(kind: Any) -> str:
    """Return what a field of this type expects, such as "a whole number in [1, 8192]"."""
    if kind in _WORDS:
        return _WORDS[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated and isinstance(parts[1], PathRule):
        return "a path"
    if origin is Annotated and isinstance(parts[1], ListLength):
        return f"a list of {parts[1]} items, each {describe_type(get_args(parts[0])[0])}"
    if origin is Annotated:
        return f"{_WORDS[parts[0]]} in {parts[1]}"
    if origin is Literal:
        return " or ".join(str(part) for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe_type(part) for part in parts))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        example = "[a,b]" if parts[0] is str else "[1,2]"
        return f"a list such as {example}, each {describe_type(parts[0])}"
    return "a group of keys"


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
}
