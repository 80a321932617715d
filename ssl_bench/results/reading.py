"""Records as they are read: a file may hold anything, and may come from anybody.

What no run can have left is refused, and what many records have in common is held once.
"""

import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from ssl_bench.errors import DataError
from ssl_bench.results.contributions import MOST_NPZ, require_agreement
from ssl_bench.results.record import (
    CORRUPTED,
    ENCODER,
    INFINITE,
    TRAINED_ON,
    CellKey,
    Record,
    RecordedCorruption,
    TrainingImages,
    cell_digest,
    cell_filename,
    json_of,
)
from ssl_bench.system.escaping import is_file_name, is_of_files
from ssl_bench.system.files import FilesWithin, open_within
from ssl_bench.system.naming import file_name

OUTDATED = "of an earlier kind, which says too little of encoder and training images to count"

MOST_BYTES = 16 * 2**20
"""Of a record or a list of ids."""

# Ends included. Numbers of any other size are no measurement, and break drawings.
_RANGES = {
    "depth": (1, 10_000),
    "num_images": (1, 2**53),
    "seed": (-(2**63), 2**64 - 1),
    "seconds": (0, 1e12),
}
_SMALLEST, _LARGEST = 1e-300, 1e300
# Numbers and texts by name, as deep as readers of JSON go.
_PLAIN = ("settings", "details", "architecture")
_DEEPEST = 20
_LONGEST_TEXT, _LONGEST_REASON = 1000, 200
# Percent that were averaged may lie off by their rounding.
_ROUNDING = 1e-6
# Percent beyond chance, below 0 for less.
_BEYOND_CHANCE = re.compile(r"ami(_x\d+)?")
# Texts that are remembered.
_NAMES = 1000
_MAPPINGS = (*_PLAIN, "changed")
_KINDS: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float)}
# None where any will do, or the ranges say more.
_KINDS_OF_FIELDS = {
    item.name: (dict,) if item.name in _MAPPINGS else _KINDS.get(item.type)
    for item in fields(Record)
}
# Few among many records; no two are of equal details.
_ALIKE = ("settings", "architecture", "changed", "mean", "std")


class RecordReader:
    """Reads the records of one folder of results, each part that many have in common held once."""

    def __init__(self, root: Path) -> None:
        self._root, self._files = root, FilesWithin(root)
        # By field, because not all are checked alike, and text in Python, which tells 1 from 1.0
        # and true: the part, and its JSON.
        self._parts: dict[str, tuple[Any, str]] = {}

    def read(self, path: Path) -> Record:
        """The record in a file of a folder `records/TASK/DATASET`.

        Raises:
            OSError: it cannot be read.
            ValueError, TypeError, KeyError, OverflowError, RecursionError: it holds none, that of
                another cell, or one that contradicts itself or what is kept of its images.
        """
        record = self.record(parsed(self._files.read(path, MOST_BYTES)), path)
        with suppress(OSError), open_within(self._root, path.with_suffix(".npz"), MOST_NPZ) as file:
            require_agreement(record, file)
        return record

    def record(
        self, told: dict[str, Any], path: Path, per_image: io.BufferedIOBase | None = None
    ) -> Record:
        """As `read`, of fields and the .npz of images that are the content of `path`."""
        known = _known_fields(told)
        texts = {name: f"{name} {known[name]!r}" for name in _ALIKE if name in known}
        found = {name: self._parts[text] for name, text in texts.items() if text in self._parts}
        record = Record(**known | {name: part for name, (part, _) in found.items()})
        _require_kinds(record)
        _require_possible(vars(record), [name for name in _PLAIN if name not in found])
        for name in texts.keys() - found.keys():
            found[name] = self._parts[texts[name]] = (known[name], json_of(known[name]))
        digest = cell_digest(record, {name: text for name, (_, text) in found.items()})
        if path.parts[-3:] != place_of(record, digest):
            raise ValueError("a copy, or of another cell")
        # What the property would find, which for thousands of records takes seconds.
        vars(record)["digest"] = digest
        if per_image is not None:
            require_agreement(record, per_image)
        return record


def place_of(cell: CellKey | Record, digest: str) -> tuple[str, str, str]:
    """Folders and file, below `records`, of the record of a cell with this digest.

    Raises:
        DataError: a name in it would lead elsewhere.
    """
    for name in (cell.task, cell.facet, cell.metric):
        _require_file_name(name)
    return cell.task, _folder_of(cell.dataset), cell_filename(cell, digest)


@lru_cache(_NAMES)
def _require_file_name(name: str) -> None:
    if not is_file_name(name):
        raise DataError(f"expected a name that a file can have, got {name!r}")


_folder_of = lru_cache(_NAMES)(file_name)


def parsed(content: bytes) -> dict[str, Any]:
    """The fields of a record's file, with its numbers as they were before they were JSON.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: it is something else.
    """
    try:
        found = _DECODER.decode(content.decode(json.detect_encoding(content), "surrogatepass"))
    except RecursionError as error:
        raise ValueError("brackets within brackets") from error
    except ValueError as error:
        raise ValueError(f"no complete JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    found["value"] = _number(found["value"])
    if found["ci95"] is not None:
        low, high = found["ci95"]
        found["ci95"] = (_number(low), _number(high))
    return found


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


def _known_fields(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record's file; later versions may know more, earlier ones knew less."""
    if "checkpoint_sha256" in found and not found.keys() >= set(ENCODER):
        raise ValueError(OUTDATED)
    for name in ("mean", "std"):
        red, green, blue = map(_number, found[name])
        if not all(map(math.isfinite, (red, green, blue))):
            raise ValueError(f"expected three numbers, got {found[name]!r}")
        found[name] = (red, green, blue)
    known = {
        name: sys.intern(value) if type(value) is str else value
        for name, value in found.items()
        if name in _KINDS_OF_FIELDS
    }
    details = known.get("details")
    if type(details) is dict:
        # One object for the name of a class in thousands of records. No deeper: a file may hold
        # levels without end.
        known["details"] = {
            sys.intern(name): dict(zip(map(sys.intern, item), item.values(), strict=True))
            if type(item) is dict
            else item
            for name, item in details.items()
        }
    return known


def _require_kinds(record: Record) -> None:
    for name, value in vars(record).items():
        kinds = _KINDS_OF_FIELDS[name]
        # Not isinstance, for which true and false are whole numbers.
        if kinds is not None and type(value) not in kinds:
            raise TypeError(f"{name} is {value!r}")
    told = record.settings.get(TRAINED_ON)
    if told and [*map(type, vars(TrainingImages(**told)).values())] != [str, str, int]:
        raise TypeError(f"{TRAINED_ON} is {record.trained_on!r}")
    told = record.settings.get(CORRUPTED)
    if told and [*map(type, vars(RecordedCorruption(**told)).values())] != [str, int, str, str]:
        raise TypeError(f"{CORRUPTED} is {record.corrupted!r}")


def _require_possible(found: Mapping[str, Any], mappings: Sequence[str]) -> None:
    """Refuse fields, which are of their kinds, that no run can have left.

    Args:
        found: By name.
        mappings: Those of `_PLAIN` that are not known to be plain.
    """
    for name, value in found.items():
        if type(value) is str and not _is_possible_text(value):
            raise ValueError(f"{name} is {value!r}")
    for name, (low, high) in _RANGES.items():
        if not low <= found[name] <= high:
            raise ValueError(f"{name} is {found[name]}, expected {low} to {high}")
    if not 0 <= found["layer"] < found["depth"]:
        raise ValueError(f"layer is {found['layer']} of {found['depth']} blocks")
    for name in ("checkpoint_sha256", "dataset_fingerprint"):
        if not re.fullmatch("(stat-)?[0-9a-f]{8,128}", found[name]):
            raise ValueError(f"{name} is {found[name]!r}, expected hexadecimal digits")
    if not isinstance(found["git_commit"], (str, type(None))):
        raise ValueError(f"git_commit is {found['git_commit']!r}")
    if found["unit"] not in ("%", ""):
        raise ValueError(f"unit is {found['unit']!r}, expected '%' or nothing")
    _require_score(found)
    for name in mappings:
        _require_plain(name, found[name], _DEEPEST)
    details = found["details"]
    _require_percent("details.degenerate_percent", details.get("degenerate_percent", 0.0))
    told = details.get("baseline")
    if told is not None:
        if (
            not isinstance(told, dict)
            or set(told) != {"answer", "value"}
            or not isinstance(told["answer"], str)
        ):
            raise ValueError(f"details.baseline is {told!r}, expected answer and value")
        _require_percent("details.baseline.value", told["value"])


# Remembered, because all but a few texts of many records are the same.
@lru_cache(_NAMES)
def _is_possible_text(text: str) -> bool:
    return is_of_files(text) and len(text) <= _LONGEST_TEXT


def _require_score(found: Mapping[str, Any]) -> None:
    least = -100 if _BEYOND_CHANCE.fullmatch(found["metric"]) else 0
    for number in (found["value"], *(found["ci95"] or ())):
        if found["unit"] == "%":
            _require_percent("value or ci95", number, least)
        elif math.isfinite(number) and number and not _SMALLEST <= abs(number) <= _LARGEST:
            raise ValueError(f"value or ci95 is {number}")
    if not holds(found["ci95"], found["value"]):
        raise ValueError(f"value is {found['value']}, outside of its ci95 {found['ci95']}")


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
