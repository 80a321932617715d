"""Tables as Parquet, with the extra `frames`: the rows of CSV, where what is missing is null."""

import io
from collections.abc import Sequence
from typing import Any

from ssl_bench.errors import MachineError
from ssl_bench.tables.printing.sheets import Printable


def as_parquet(tables: Sequence[Printable]) -> bytes:
    """The rows of all tables as one file; columns that a table lacks are null there.

    Raises:
        MachineError: pyarrow is not installed.
    """
    try:
        # Not for everybody: the package is an extra.
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MachineError(
            "--format parquet needs the package pyarrow, which is not installed; "
            "pip install 'ssl-bench[frames]', or take csv"
        ) from error
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(parquet_columns(tables)), buffer)
    return buffer.getvalue()


def parquet_columns(tables: Sequence[Printable]) -> dict[str, list[Any]]:
    """What `as_parquet` writes, by column; the same type in all rows of one, or null."""
    rows = [row for table in tables for row in table.csv_rows()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: Sequence[Any]) -> list[Any]:
    """Empty text is what CSV has for nothing; numbers beside text are text."""
    known = [None if value == "" else value for value in values]
    kinds = {type(value) for value in known if value is not None}
    if str in kinds and len(kinds) > 1:
        return [None if value is None else str(value) for value in known]
    return known
