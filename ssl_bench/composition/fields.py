"""The legal values of configured fields: declared as their types, checked in one place.

Not pydantic: in its lax mode "3" is a 3, and its messages would have to be put into these words all
the same.

A field of type `Count` is a whole number from 1 on, `Share` a number in [0, 1]; its dataclass says
`check_fields(self, "probe")` in `__post_init__`, and every field is held to its type. A number in a
field of type float becomes a float there: settings identify results, and 1 is no other value than
1.0.
"""

import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ssl_bench.errors import ConfigurationError
from ssl_bench.system.paths import LEGAL, is_path

_MANY = 10**9
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = 12


@dataclass(frozen=True)
class Bounds:
    """Numbers between two ends.

    Attributes:
        low: Legal itself, unless `above`.
        high: Legal itself, unless `below`.
    """

    low: int | float
    high: int | float
    above: bool = False
    below: bool = False

    def holds(self, value: int | float) -> bool:
        """Whether a number is legal; one that is not finite never is."""
        low = value > self.low if self.above else value >= self.low
        return low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        brackets = "(" if self.above else "[", ")" if self.below else "]"
        return f"{brackets[0]}{self.low:.15g}, {self.high:.15g}{brackets[1]}"


@dataclass(frozen=True)
class ListLength:
    """How many entries a list has."""

    least: int
    most: int

    def holds(self, value: Sequence[Any]) -> bool:
        return self.least <= len(value) <= self.most

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


class PathText:
    """Text that can be a path."""

    def holds(self, value: str) -> bool:
        return is_path(value)

    def __str__(self) -> str:
        return LEGAL


Count = Annotated[int, Bounds(1, _MANY)]
CountOrZero = Annotated[int, Bounds(0, _MANY)]
Threads = Annotated[int, Bounds(1, 1024)]
Pixels = Annotated[int, Bounds(1, 8192)]
Bits = Annotated[int, Bounds(8, 16)] | None
Width = Annotated[int, Bounds(1, 2**20)]
Depth = Annotated[int, Bounds(1, 1000)]
Workers = Annotated[int, Bounds(0, 1024)]
# NumPy's older generators take no larger one.
Seed = Annotated[int, Bounds(0, 2**32 - 1)]
Share = Annotated[float, Bounds(0, 1)]
PositiveFraction = Annotated[float, Bounds(0, 1, above=True)]
FractionBelowOne = Annotated[float, Bounds(0, 1, below=True)]
OpenFraction = Annotated[float, Bounds(0, 1, above=True, below=True)]
Positive = Annotated[float, Bounds(0, _MANY, above=True)]
PositiveOrZero = Annotated[float, Bounds(0, _MANY)]
Rate = Annotated[float, Bounds(0, 1000, above=True)]
RateOrZero = Annotated[float, Bounds(0, 1000)]
Temperature = Annotated[float, Bounds(0, 1000, above=True)]
# Least and largest.
PositiveRange = Annotated[Sequence[Positive], ListLength(2, 2)]
FractionRange = Annotated[Sequence[PositiveFraction], ListLength(2, 2)]
FilePath = Annotated[str, PathText()]
OptionalPath = FilePath | Path | None
Level = Annotated[int, Bounds(0, 255)]
Rgb = Annotated[Sequence[Level], ListLength(3, 3)]
# What compares vectors: "auto" is faiss for many on a CPU, else a matrix product of torch.
Engine = Literal["auto", "faiss", "torch"]
MaskValue = Annotated[int, Bounds(0, 65535)]


def check_fields(component: Any, key: str) -> None:
    """Hold every field of a dataclass to its type, whose numbers have legal ranges.

    Whole numbers in fields of type float become floats, also in lists and in nested dataclasses.

    Args:
        component: The dataclass; it may be frozen.
        key: What stands before the names of its fields in an override, such as "probe".

    Raises:
        ConfigurationError: a value that its field does not take.
    """
    for name, kind in _types_of(component).items():
        require_type(f"{key}.{name}" if key else name, kind, getattr(component, name))
    _normalise_fields(component)


def _types_of(component: Any) -> dict[str, Any]:
    """Return the type of each field, also where a module postpones the evaluation of annotations.

    Fields of a class whose types cannot be evaluated are left out.
    """
    types = {item.name: item.type for item in fields(component)}
    if not any(isinstance(kind, str) for kind in types.values()):
        return types
    try:
        evaluated = get_type_hints(type(component), include_extras=True)
    # A name that is imported for type checkers alone.
    except (NameError, AttributeError, TypeError):
        return {name: kind for name, kind in types.items() if not isinstance(kind, str)}
    return {name: evaluated[name] for name in types}


def _normalise_fields(component: Any) -> None:
    for name, kind in _types_of(component).items():
        value = getattr(component, name)
        if is_dataclass(value) and not isinstance(value, type):
            _normalise_fields(value)
        elif (same := _normalised(kind, value)) is not value:
            object.__setattr__(component, name, same)


def _normalised(kind: Any, value: Any) -> Any:
    """Return a legal value with floats wherever its type has floats; itself where nothing changes.

    A union that takes a whole number as it is leaves it so.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _normalised(parts[0], value)
    if origin in (Union, UnionType):
        found = [_normalised(part, value) for part in parts if _is_a(part, value)]
        return next((same for same in found if same is value), next(iter(found), value))
    if kind is float:
        return float(value) if type(value) is int else value
    if not isinstance(origin, type) or isinstance(value, str | bytes):
        return value
    if issubclass(origin, Mapping) and isinstance(value, Mapping):
        same = {key: _normalised(parts[1], item) for key, item in value.items()}
        return same if any(same[key] is not item for key, item in value.items()) else value
    if issubclass(origin, Sequence) and isinstance(value, Sequence):
        items = [_normalised(parts[0], item) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return (tuple(items) if isinstance(value, tuple) else items) if changed else value
    return value


def require_type(key: str, kind: Any, value: Any) -> None:
    """Refuse a value that is not of a kind.

    Raises:
        ConfigurationError: names the key, what it takes and what came.
    """
    if not _is_a(kind, value):
        hint = ""
        if _is_a(kind, "name") and isinstance(value, int | float):
            hint = f"; for a text that looks like a number write \"{key}='{value}'\""
        raise ConfigurationError(f"{key} expects {describe_type(kind)}, got {shown(value)}{hint}")


def require_nonempty(key: str, values: Sequence[Any]) -> None:
    """Refuse an empty list.

    Raises:
        ConfigurationError: names the key.
    """
    if not values:
        raise ConfigurationError(f"{key} expects one value or more, got []")


def shown(value: Any) -> str:
    """A value in an error message as it would be typed, shortened where it is long."""
    if isinstance(value, (list, tuple)):
        more = ["..."] if len(value) > _SHORT.maxlist else []
        return f"[{','.join([*map(shown, value[: _SHORT.maxlist]), *more])}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or value is True or value is False else _SHORT.repr(value)


def accepts_single_value(kind: Any, value: Any) -> bool:
    """Whether a value is a legal entry of a list of numbers of any length, and no list itself."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return not _is_a(kind, value) and any(accepts_single_value(part, value) for part in parts)
    is_list = isinstance(origin, type) and issubclass(origin, Sequence)
    return is_list and isinstance(value, int | float) and _is_a(parts[0], value)


def describe_type(kind: Any) -> str:
    """A kind in the words of an error message."""
    if kind in _WORDS:
        return _WORDS[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated and isinstance(parts[1], PathText):
        return LEGAL
    if origin is Annotated and isinstance(parts[1], ListLength):
        return f"{describe_type(parts[0])}, {parts[1]} of them"
    if origin is Annotated:
        return f"{_WORDS[parts[0]]} in {parts[1]}"
    if origin is Literal:
        return " or ".join(str(part) for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe_type(part) for part in parts))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        example = "[a,b]" if parts[0] is str else "[1,2]"
        return f"a list such as {example}, each {describe_type(parts[0])}"
    return "keys of its own"


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
}


def _is_a(kind: Any, value: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_a(parts[0], value) and parts[1].holds(value)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, UnionType):
        return any(_is_a(part, value) for part in parts)
    if kind is Any:
        return True
    if kind is int or kind is float:
        numbers = int if kind is int else (int, float)
        return (
            isinstance(value, numbers)
            and not isinstance(value, bool)
            and (kind is int or abs(value) <= sys.float_info.max)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_is_a(parts[0], item) for item in value)
    # A component of its own holds its fields to their types itself.
    return isinstance(value, kind) if isinstance(kind, type) else True
