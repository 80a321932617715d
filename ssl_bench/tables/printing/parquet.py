"""Tables as Parquet: the rows of CSV, where what is missing is null."""

import io
from collections.abc import Sequence
from typing import Any

from ssl_bench.tables.printing.sheets import Printable


def as_parquet(tables: Sequence[Printable]) -> bytes:
    """The rows of all tables as one file; columns that a table lacks are null there."""
    # Here, because it is slow to import.
    import pyarrow
    import pyarrow.parquet

    rows = [row for table in tables for row in table.csv_rows()]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _column(values: Sequence[Any]) -> list[Any]:
    """Empty text is what CSV has for nothing; numbers beside text are text."""
    known = [None if value == "" else value for value in values]
    kinds = {type(value) for value in known if value is not None}
    if str in kinds and len(kinds) > 1:
        return [None if value is None else str(value) for value in known]
    return known
