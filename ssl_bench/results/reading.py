"""Records read from their files: checked, and what many of them have in common held once."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results.contributions import MOST_NPZ, require_agreement
from ssl_bench.results.ranges import PLAIN, colour_of, parsed, require_possible
from ssl_bench.results.record import (
    CORRUPTED,
    ENCODER,
    TRAINED_ON,
    CellKey,
    Record,
    RecordedCorruption,
    TrainingImages,
    cell_digest,
    cell_filename,
    json_of,
)
from ssl_bench.system.escaping import is_file_name
from ssl_bench.system.files import FilesWithin, open_within
from ssl_bench.system.naming import file_name

OUTDATED = "of an earlier kind, which says too little of encoder and training images to count"

MOST_BYTES = 16 * 2**20
"""Of a record or a list of ids."""

# Of texts that are remembered.
_NAMES = 1000
_MAPPINGS = ("settings", "details", "architecture", "changed")
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
        known = _known_fields(parsed(self._files.read(path, MOST_BYTES)))
        texts = {name: f"{name} {known[name]!r}" for name in _ALIKE if name in known}
        found = {name: self._parts[text] for name, text in texts.items() if text in self._parts}
        record = Record(**known | {name: part for name, (part, _) in found.items()})
        _require_kinds(record, [name for name in PLAIN if name not in found])
        for name in texts.keys() - found.keys():
            found[name] = self._parts[texts[name]] = (known[name], json_of(known[name]))
        digest = cell_digest(record, {name: text for name, (_, text) in found.items()})
        if path.parts[-3:] != place_of(record, digest):
            raise ValueError("a copy, or of another cell")
        # What the property would find, which for thousands of records takes seconds.
        vars(record)["digest"] = digest
        with suppress(OSError), open_within(self._root, path.with_suffix(".npz"), MOST_NPZ) as file:
            require_agreement(record, file)
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


@lru_cache(_NAMES)
def _folder_of(dataset: str) -> str:
    return file_name(dataset)


def _known_fields(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record's file; later versions may know more, earlier ones knew less.

    Raises:
        ValueError, TypeError, KeyError: a mean or deviation is no colour, or the file is too old.
    """
    if "checkpoint_sha256" in found and not found.keys() >= set(ENCODER):
        raise ValueError(OUTDATED)
    for colour in ("mean", "std"):
        found[colour] = colour_of(found[colour])
    known = {
        name: sys.intern(value) if type(value) is str else value
        for name, value in found.items()
        if name in _KINDS_OF_FIELDS
    }
    details = known.get("details")
    if type(details) is dict:
        # No deeper: a file may hold levels without end.
        known["details"] = {
            sys.intern(name): _with_shared_names(item) if type(item) is dict else item
            for name, item in details.items()
        }
    return known


def _with_shared_names(values: dict[str, Any]) -> dict[str, Any]:
    """The same with one object for the name of a class in thousands of records."""
    return dict(zip(map(sys.intern, values), values.values(), strict=True))


def _require_kinds(record: Record, mappings: Sequence[str]) -> None:
    """Check that the fields are of their kinds and in their ranges: a file may hold anything.

    Args:
        record: To be checked.
        mappings: Those of its fields `PLAIN` that no record had before.
    """
    for name, value in vars(record).items():
        kinds = _KINDS_OF_FIELDS[name]
        # Not isinstance, for which true and false are whole numbers.
        if kinds is not None and type(value) not in kinds:
            raise TypeError(f"{name} is {value!r}")
    require_possible(vars(record), mappings)
    told = record.settings.get(TRAINED_ON)
    if told and [*map(type, vars(TrainingImages(**told)).values())] != [str, str, int]:
        raise TypeError(f"{TRAINED_ON} is {record.trained_on!r}")
    told = record.settings.get(CORRUPTED)
    if told and [*map(type, vars(RecordedCorruption(**told)).values())] != [str, int, str, str]:
        raise TypeError(f"{CORRUPTED} is {record.corrupted!r}")
