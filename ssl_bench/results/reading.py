"""The file of a record, read: a cut one, one of another version or of a wrong type is refused."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.intervals import holds
from ssl_bench.results.record import (
    ENCODER,
    INFINITE,
    CellKey,
    Record,
    cell_digest,
    cell_filename,
    json_of,
)
from ssl_bench.system.escaping import is_file_name
from ssl_bench.system.files import read_within
from ssl_bench.system.paths import file_name

OUTDATED = "of an earlier kind, which says too little of encoder and training images to count"

MOST_BYTES = 16 * 2**20
"""Of a record or a list of ids."""

_LONGEST_REASON = 200
# Percents that fall below 0 where an answer is worse than chance.
_BEYOND_CHANCE = re.compile(r"ami(_x\d+)?")
_ROUNDING = 1e-6
# Names of folders of pictures end in the first digits.
_FINGERPRINT = re.compile(r"(stat-)?[0-9a-f]{8,128}")
_MAPPINGS = ("settings", "details", "architecture", "changed")
_KINDS: dict[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), float: (int, float), str | None: (str, NoneType)
}  # fmt: skip
# None for those that are pairs and triples of numbers.
_KINDS_OF_FIELDS = {
    item.name: (dict,) if item.name in _MAPPINGS else _KINDS.get(item.type)
    for item in fields(Record)
}
# Few among many records; no two are of equal details.
_ALIKE = ("settings", "architecture", "changed", "mean", "std")


class RecordReader:
    """Reads the records of one folder of results, each part that many have in common held once."""

    def __init__(self, root: Path) -> None:
        self._root, self._folders = root, set[Path]()
        # By field, because not all are checked alike, and text in Python, which tells 1 from 1.0
        # and true: the part, and its JSON.
        self._parts: dict[str, tuple[Any, str]] = {}

    def read(self, path: Path) -> Record:
        """The record in a file of a folder `records/TASK/DATASET`.

        Raises:
            OSError: it cannot be read.
            ValueError, TypeError, KeyError, OverflowError, RecursionError: as `record`.
        """
        return self.record(read_within(self._root, path, MOST_BYTES, known=self._folders), path)

    def record(self, content: bytes, path: Path) -> Record:
        """As `read`, of what lies at `path` or would, were it not packed.

        Raises:
            ValueError, TypeError, KeyError, OverflowError, RecursionError: it is no record of this
                version, or that of another cell.
        """
        known = _known_fields(content)
        texts = {name: f"{name} {known[name]!r}" for name in _ALIKE if name in known}
        for name, text in texts.items():
            if text not in self._parts:
                self._parts[text] = (known[name], json_of(known[name]))
            known[name] = self._parts[text][0]
        record = Record(**known)
        if not 0 <= record.layer < record.depth:
            raise ValueError(f"layer is {record.layer} of {record.depth} blocks")
        if not _FINGERPRINT.fullmatch(record.dataset_fingerprint):
            raise ValueError(f"dataset_fingerprint is {record.dataset_fingerprint!r}")
        _require_possible(record)
        if not holds(record.ci95, record.value):
            raise ValueError(f"value is {record.value}, outside of its ci95 {record.ci95}")
        digest = cell_digest(record, {name: self._parts[text][1] for name, text in texts.items()})
        if path.parts[-3:] != place_of(record, digest):
            raise ValueError("a copy, or of another cell")
        # What the property would find, which for thousands of records takes seconds.
        vars(record)["digest"] = digest
        return record


def _require_possible(record: Record) -> None:
    """Refuse what a table would take for the best block, or stumble over.

    Raises:
        TypeError, ValueError, KeyError: a number that cannot be, or a part of another kind.
    """
    _ = record.trained_on, record.corrupted
    told, degenerate = (record.details.get(n) for n in ("baseline", "degenerate_percent"))
    percents = {"details.degenerate_percent": degenerate}
    if record.unit == "%":
        percents["value"] = record.value
    if told is not None:
        is_known = isinstance(told, dict) and set(told) == {"answer", "value"}
        if not is_known or type(told["answer"]) is not str:
            raise TypeError(f"details.baseline is {told!r}")
        percents["details.baseline"] = told["value"]
    for name, value in percents.items():
        if value is None:
            continue
        if type(value) not in (int, float):
            raise TypeError(f"{name} is {value!r}, no number")
        least = -100 if _BEYOND_CHANCE.fullmatch(record.metric) else 0
        if not (math.isnan(value) or least - _ROUNDING <= value <= 100 + _ROUNDING):
            raise ValueError(f"{name} is {value}, expected {least} to 100")


def place_of(cell: CellKey | Record, digest: str) -> tuple[str, str, str]:
    """Folders and file, below `records`, of the record of a cell with this digest.

    Raises:
        DataError: a name in it would lead elsewhere.
    """
    for name in (cell.task, cell.facet, cell.metric):
        if not is_file_name(name):
            raise DataError(f"expected a name that a file can have, got {name!r}")
    return cell.task, file_name(cell.dataset), cell_filename(cell, digest)


def _known_fields(content: bytes) -> dict[str, Any]:
    """The fields of a record's file; later versions may know more, earlier ones knew less."""
    try:
        told = json.loads(content)
    except ValueError as error:
        raise ValueError(f"no complete JSON: {error}") from error
    if not isinstance(told, dict):
        raise ValueError("no JSON object")
    if "checkpoint_sha256" in told and not told.keys() >= set(ENCODER):
        raise ValueError(OUTDATED)
    told["value"] = _number(told["value"])
    for name, count in (("ci95", 2), ("mean", 3), ("std", 3)):
        if name != "ci95" or told[name] is not None:
            told[name] = tuple(map(_number, told[name]))
            if len(told[name]) != count:
                raise ValueError(f"expected {count} numbers, got {name}={told[name]}")
    known = {name: value for name, value in told.items() if name in _KINDS_OF_FIELDS}
    for name, value in known.items():
        kinds = _KINDS_OF_FIELDS[name]
        # Not isinstance, for which true and false are whole numbers.
        if kinds is not None and type(value) not in kinds:
            raise TypeError(f"{name} is {value!r}")
    return known


def _number(value: Any) -> float:
    """As it was before it was JSON."""
    if value is None:
        return math.nan
    if value == INFINITE:
        return math.inf
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def shortened(error: Exception) -> str:
    """Why, in a few words, whatever the field was."""
    reason = f"no {error}" if isinstance(error, KeyError) else str(error)
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
