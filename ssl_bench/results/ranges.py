"""What the fields of a record can be: a file may hold anything, and may come from anybody."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from ssl_bench.system.escaping import is_of_files

INFINITE = "inf"
"""Infinity in the JSON of records."""

# Ends included. Numbers of any other size are no measurement, and break drawings.
_RANGES = {
    "depth": (1, 10_000),
    "num_images": (1, 2**53),
    "seed": (-(2**63), 2**64 - 1),
    "seconds": (0, 1e12),
}
PLAIN = ("settings", "details", "architecture")
"""Fields that hold numbers and texts by name, as deep as readers of JSON go."""

_LONGEST_TEXT = 1000
_DEEPEST = 20
_LONGEST_REASON = 200
_SMALLEST, _LARGEST = 1e-300, 1e300
# Percent that were averaged may lie off by their rounding.
_ROUNDING = 1e-6
# Percent beyond chance, below 0 for less.
_BEYOND_CHANCE = re.compile(r"ami(_x\d+)?")


def parsed(content: bytes) -> dict[str, Any]:
    """The fields of a record's file, with its numbers as they were before they were JSON.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: it is something else.
    """
    try:
        text = content.decode(json.detect_encoding(content), "surrogatepass")
        fields = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("brackets within brackets") from error
    except ValueError as error:
        raise ValueError(f"no complete JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    fields["value"] = _number(fields["value"])
    if fields["ci95"] is not None:
        low, high = fields["ci95"]
        fields["ci95"] = (_number(low), _number(high))
    return fields


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise TypeError(f"{next(n for n in names if names.count(n) > 1)} stands there twice")
    return found


# One for all: building it takes as long as a short record.
_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once_each)


def _number(value: float | str | None) -> float:
    if value is None:
        return math.nan
    if value == INFINITE:
        return math.inf
    if isinstance(value, str) or type(value) not in (int, float) or math.isinf(value):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def colour_of(values: Any) -> tuple[float, float, float]:
    """Mean or deviation of a record.

    Raises:
        ValueError, TypeError: it is no colour.
    """
    red, green, blue = map(_number, values)
    if not all(map(math.isfinite, (red, green, blue))):
        raise ValueError(f"expected three numbers, got {values!r}")
    return red, green, blue


def require_possible(fields: Mapping[str, Any], mappings: Sequence[str] = PLAIN) -> None:
    """Check the fields of a record, which are of their kinds, for what they may be.

    Args:
        fields: By name.
        mappings: Those of `PLAIN` that are not known to be plain.

    Raises:
        ValueError: no run can have left one of them.
    """
    for name, value in fields.items():
        if type(value) is str and not _is_possible_text(value):
            raise ValueError(f"{name} is {value!r}")
    for name, (low, high) in _RANGES.items():
        if not low <= fields[name] <= high:
            raise ValueError(f"{name} is {fields[name]}, expected {low} to {high}")
    if not 0 <= fields["layer"] < fields["depth"]:
        raise ValueError(f"layer is {fields['layer']} of {fields['depth']} blocks")
    _require_identities(fields)
    _require_score(fields)
    for name in mappings:
        _require_plain(name, fields[name], _DEEPEST)
    _require_percent("details.degenerate_percent", fields["details"].get("degenerate_percent", 0.0))
    _require_baseline(fields["details"].get("baseline"))


def _require_baseline(told: Any) -> None:
    if told is None:
        return
    if not isinstance(told, dict) or not isinstance(told.get("answer"), str):
        raise ValueError(f"details.baseline is {told!r}, expected answer and value")
    if set(told) != {"answer", "value"}:
        raise ValueError(f"details.baseline has {', '.join(map(str, told))}")
    _require_percent("details.baseline.value", told["value"])


# Remembered, because all but a few texts of many records are the same.
@lru_cache(1000)
def _is_possible_text(text: str) -> bool:
    return is_of_files(text) and len(text) <= _LONGEST_TEXT


def _require_identities(fields: Mapping[str, Any]) -> None:
    for name in ("checkpoint_sha256", "dataset_fingerprint"):
        if not re.fullmatch("(stat-)?[0-9a-f]{8,128}", fields[name]):
            raise ValueError(f"{name} is {fields[name]!r}, expected hexadecimal digits")
    if not isinstance(fields["git_commit"], (str, type(None))):
        raise ValueError(f"git_commit is {fields['git_commit']!r}")
    if fields["unit"] not in ("%", ""):
        raise ValueError(f"unit is {fields['unit']!r}, expected '%' or nothing")


def _require_score(fields: Mapping[str, Any]) -> None:
    least = -100 if _BEYOND_CHANCE.fullmatch(fields["metric"]) else 0
    for number in (fields["value"], *(fields["ci95"] or ())):
        if fields["unit"] == "%":
            _require_percent("value or ci95", number, least)
        elif math.isfinite(number) and number and not _SMALLEST <= abs(number) <= _LARGEST:
            raise ValueError(f"value or ci95 is {number}")
    if not holds(fields["ci95"], fields["value"]):
        raise ValueError(f"value is {fields['value']}, outside of its ci95 {fields['ci95']}")


def holds(ci95: tuple[float, float] | None, value: float) -> bool:
    """Whether a value lies in its interval, but for rounding; an end that is NaN bounds nothing."""
    if ci95 is None:
        return True
    ascending = ((ci95[0], value), (value, ci95[1]), ci95)
    return not any(
        one > other and not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
        for one, other in ascending
    )


def _require_percent(name: str, value: Any, least: int = 0) -> None:
    if type(value) not in (int, float) or not (
        math.isnan(value) or least - _ROUNDING <= value <= 100 + _ROUNDING
    ):
        raise ValueError(f"{name} is {value!r}, expected {least} to 100")


def _require_plain(name: str, value: Any, levels: int) -> None:
    """Numbers that a float can hold, and no deeper than readers of JSON go."""
    if isinstance(value, (dict, list)):
        if not levels:
            raise ValueError(f"{name} has more than {_DEEPEST} levels")
        for item in value.values() if isinstance(value, dict) else value:
            # Most are: without a call, because records of many classes have hundreds.
            kind = type(item)
            if kind is float and -_LARGEST <= item <= _LARGEST:
                continue
            if kind is not str and item is not None:
                _require_plain(name, item, levels - 1)
    elif isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        raise ValueError(f"{name} holds a number that is too large")


def shortened(error: Exception) -> str:
    """Why, in a few words, whatever the field was."""
    reason = f"no {error}" if isinstance(error, KeyError) else str(error)
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
