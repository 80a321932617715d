"""Define types that state the allowed values of config fields, and check values against them.

For example, a field of type `Fraction` accepts numbers in [0, 1]. A dataclass calls
`check_fields(self, "probe")` in `__post_init__` to check all of its fields. In a field of type
float, a whole number is converted to a float. The reason is that settings identify results, so 1
and 1.0 must be the same setting.

We do not use pydantic, because its lax mode reads the text "3" as the number 3.
"""

import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ssl_bench.errors import ConfigurationError, escape_braces
from ssl_bench.system.files import is_valid_path

_MANY = 10**9
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = 12


@dataclass(frozen=True)
class Bounds:
    """An interval of allowed numbers.

    Attributes:
        low: Lower end of the interval.
        high: Upper end of the interval.
        allow_low: Whether the number `low` itself is allowed.
        allow_high: Whether the number `high` itself is allowed.
    """

    low: int | float
    high: int | float
    allow_low: bool = True
    allow_high: bool = True

    def contains(self, value: int | float) -> bool:
        # Every comparison with NaN is False.
        is_above = value >= self.low if self.allow_low else value > self.low
        return is_above and (value <= self.high if self.allow_high else value < self.high)

    def __str__(self) -> str:
        brackets = "[" if self.allow_low else "(", "]" if self.allow_high else ")"
        return f"{brackets[0]}{self.low:.15g}, {self.high:.15g}{brackets[1]}"


@dataclass(frozen=True)
class ListLength:
    """The minimum and the maximum number of items that a list may have."""

    shortest: int
    longest: int

    def contains(self, value: Sequence[Any]) -> bool:
        return self.shortest <= len(value) <= self.longest

    def __str__(self) -> str:
        return " to ".join(map(str, dict.fromkeys((self.shortest, self.longest))))


class PathRule:
    """A rule that accepts any text that is a valid file path."""

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
# NumPy's legacy random generators accept no larger seed.
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
# The minimum and the maximum of a range from which random values are drawn.
PositiveRange = Annotated[Sequence[Positive], ListLength(2, 2)]
FractionRange = Annotated[Sequence[PositiveFraction], ListLength(2, 2)]
FilePath = Annotated[str, PathRule()]
OptionalPath = FilePath | Path | None
Level = Annotated[int, Bounds(0, 255)]
Rgb = Annotated[Sequence[Level], ListLength(3, 3)]
# Library of the nearest-neighbour search. "auto" uses faiss for large sets on a CPU and torch in
# all other cases.
Engine = Literal["auto", "faiss", "torch"]
MaskValue = Annotated[int, Bounds(0, 65535)]


def check_fields(component: Any, key: str) -> None:
    """Check that each field of a dataclass has a value that its type allows, and convert numbers.

    Nested dataclasses are checked too. In fields of type float, whole numbers are converted to
    floats. In fields of type list, a single number is converted to a list.

    Args:
        component: An instance of a dataclass, which may be frozen. Its fields are set in place.
        key: Prefix of the field names in error messages, such as "probe".

    Raises:
        ConfigurationError: A value is not allowed.
    """
    for name, annotation in _field_types(component).items():
        value, full_name = getattr(component, name), f"{key}.{name}" if key else name
        converted = require_type(full_name, annotation, value)
        if is_dataclass(value) and not isinstance(value, type):
            check_fields(value, full_name)
        elif converted is not value:
            object.__setattr__(component, name, converted)


def _field_types(component: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass instance, by the name of the field.

    A field is left out if its annotation is a text that cannot be evaluated.
    """
    types = {item.name: item.type for item in fields(component)}
    if not any(isinstance(annotation, str) for annotation in types.values()):
        return types
    try:
        evaluated = get_type_hints(type(component), include_extras=True)
    # The evaluation fails if a name is only imported under TYPE_CHECKING.
    except (NameError, AttributeError, TypeError):
        return {
            name: annotation
            for name, annotation in types.items()
            if not isinstance(annotation, str)
        }
    return {name: evaluated[name] for name in types}


def require_type(key: str, annotation: Any, value: Any) -> Any:
    """Check that a type annotation allows a value, and return the value or a converted value.

    A whole number becomes a float if the type is float. A single number becomes a list if the type
    is a list.

    Args:
        key: Config key of the value, such as "probe.tau", for the error message.
        annotation: Type annotation, such as `Fraction` or `int | None`.
        value: The value to check.

    Raises:
        ConfigurationError: The value is not allowed. The message states the allowed values.
    """
    try:
        return _convert(annotation, value)
    except _IllegalValue:
        takes_text, text_key = _fits(annotation, "name"), escape_braces(key)
        is_number = isinstance(value, int | float)
        hint = (f"{text_key}='{value}'",) if takes_text and is_number else ()
        raise ConfigurationError(
            f"{key} expects {describe_type(annotation)}, got {format_value(value)}", hint=hint
        ) from None


def require_nonempty(key: str, values: Sequence[Any]) -> None:
    if not values:
        raise ConfigurationError(f"{key} expects at least one value, got []")


class _IllegalValue(Exception):
    pass


def _convert(annotation: Any, value: Any) -> Any:
    origin, parts = get_origin(annotation), get_args(annotation)
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
            # Prefer a result without a conversion: in a field of type `Count | FractionBelowOne`,
            # the whole number 1 must not become a float.
            return next((same for same in accepted if same is value), accepted[0])
    elif annotation is int or annotation is float:
        if _is_finite_number(annotation, value):
            return float(value) if annotation is float and type(value) is int else value
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            converted = {key: _convert(parts[1], item) for key, item in value.items()}
            return converted if any(converted[key] is not value[key] for key in value) else value
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        return _convert_list(parts[0], value)
    elif annotation is Any or not isinstance(annotation, type) or isinstance(value, annotation):
        return value
    raise _IllegalValue


def _convert_list(annotation: Any, value: Any) -> Any:
    if isinstance(value, int | float):
        return [_convert(annotation, value)]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _IllegalValue
    items = [_convert(annotation, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return tuple(items) if isinstance(value, tuple) else items


def _is_finite_number(annotation: type, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if annotation is int else (int, float)):
        return False
    return annotation is int or abs(value) <= sys.float_info.max


def _fits(annotation: Any, value: Any) -> bool:
    try:
        _convert(annotation, value)
    except _IllegalValue:
        return False
    return True


def format_value(value: Any) -> str:
    """Return a value as a user would write it on the command line, such as "true" or "[1,2]".

    Long values are shortened.
    """
    if isinstance(value, (list, tuple)):
        more = ["..."] if len(value) > _SHORT.maxlist else []
        return f"[{','.join([*map(format_value, value[: _SHORT.maxlist]), *more])}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or value is True or value is False else _SHORT.repr(value)


def describe_type(annotation: Any) -> str:
    """Describe the values that a type allows, such as "a whole number in [1, 8192]"."""
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated and parts[0] is str:
        return str(parts[1])
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
