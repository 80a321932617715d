"""Records as a table of pandas, with the extra `frames`."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_bench.errors import MachineError
from ssl_bench.results.record import Record
from ssl_bench.results.store import ResultStore
from ssl_bench.system.progress import say

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingImports]


def to_pandas(records: Sequence[Record] | Path | str) -> "pandas.DataFrame":
    """One row a record, whose columns are its fields.

    `ci95` is `low_95` and `high_95`, in the unit of `value`; mean and deviation are three columns
    each; what has names of its own, such as `settings`, is JSON, so that every column has one type
    and can be written as Parquet.

    Args:
        records: Or the folder of results that holds them, such as "results".

    Raises:
        DataError: there is no record in that folder.
        MachineError: pandas is not installed.
    """
    try:
        # Not for everybody: the package is an extra, and slow to import.
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MachineError(
            "to_pandas needs the package pandas, which is not installed; "
            "pip install 'ssl-bench[frames]'"
        ) from error
    if isinstance(records, Path | str):
        store = ResultStore(Path(records))
        records = store.records()
        if store.unreadable:
            say(store.said_unreadable())
    return pandas.DataFrame([frame_row(record) for record in records])


def frame_row(record: Record) -> dict[str, Any]:
    """A record by column: numbers, text and null alone."""
    low, high = record.ci95 or (None, None)
    row: dict[str, Any] = {}
    for item in fields(Record):
        name, value = item.name, getattr(record, item.name)
        if name == "ci95":
            row |= {"low_95": low, "high_95": high}
        elif name in ("mean", "std"):
            row |= {f"{name}_{colour}": v for colour, v in zip("rgb", value, strict=True)}
        elif isinstance(value, dict):
            row[name] = json.dumps(value, sort_keys=True, default=list)
        else:
            row[name] = value
    return row | {"encoder_id": record.encoder_id}
