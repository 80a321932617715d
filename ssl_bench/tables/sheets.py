"""Write tables as text, Markdown, LaTeX, CSV, JSON and Parquet."""

import csv
import io
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.errors import ConfigurationError
from ssl_bench.system.output import (
    dump_json,
    escape_csv,
    escape_latex,
    escape_markdown,
    escape_unprintable,
)

STYLES = ("text", "terminal", "markdown", "latex")
PROGRAM_FORMATS = ("csv", "json", "parquet")
"""Formats for programs. They contain unrounded values."""
FORMATS = (*STYLES, *PROGRAM_FORMATS)
NO_VALUE = "\N{EN DASH}"
"""Text of a cell whose value is NaN."""
_MAX_LINE_WIDTH = 100
_BOLD, _PLAIN = "\033[1m", "\033[0m"


@dataclass(frozen=True)
class Cell:
    """A cell of a printed table.

    Attributes:
        text: The printed text. Only the text before a " †" is emphasised.
        is_best: Whether the text is printed in bold.
        is_second: Whether the text is underlined in LaTeX, as papers do for the second-best score.
    """

    text: str
    is_best: bool = False
    is_second: bool = False


@dataclass(frozen=True)
class PrintedTable:
    """Contents of a printed table.

    Attributes:
        header: Headings of the columns.
        rows: Cells of each row. The first cell is the name of the row.
        notes: Lines of text below the table about settings, baselines and how scores were computed.
            In LaTeX, they are comments above the table.
        symbol_notes: Lines of text that explain signs such as †. They are printed in every style.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    symbol_notes: tuple[str, ...] = ()


class Table(ABC):
    """A table that can be written in all `FORMATS`."""

    @abstractmethod
    def to_printed_table(self) -> PrintedTable:
        """Return the table to print, with rounded values."""

    @abstractmethod
    def csv_rows(self) -> list[dict[str, Any]]:
        """Return the rows of a CSV file, one per value, with unrounded values.

        Each row is a dictionary from column names to values.
        """

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return all values, and how they were computed, as a dictionary of JSON types."""


def default_format() -> str:
    """Return the default format: "terminal" if stdout can print bold text, otherwise "text"."""
    # stdout is None if a service manager has closed it.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return "terminal" if is_terminal and os.environ.get("TERM", "dumb") != "dumb" else "text"


def render_tables(tables: Sequence[Table], style: str) -> str:
    """Format all tables as one text, in any of `FORMATS` except "parquet".

    CSV text has a single header row. JSON text is an array with an object for each table.

    Raises:
        ConfigurationError: The style is unknown or "parquet".
    """
    if style == "csv":
        return _format_csv([row for table in tables for row in table.csv_rows()])
    if style == "json":
        return dump_json([table.as_json() for table in tables]) + "\n"
    if style not in STYLES:
        raise ConfigurationError(
            f"expected one of {', '.join(FORMATS)}, got the format {style!r}",
            hint=("--format", "text"),
        )
    return "\n".join(format_table(table.to_printed_table(), style) for table in tables)


def as_parquet(tables: Sequence[Table]) -> bytes:
    """Return the bytes of a Parquet file with the CSV rows of all tables.

    Missing values are null.
    """
    # Import pyarrow here, because the import is slow.
    import pyarrow
    import pyarrow.parquet

    rows = [row for table in tables for row in table.csv_rows()]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _parquet_column([row.get(name) for row in rows]) for name in names}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _parquet_column(values: Sequence[Any]) -> list[Any]:
    """Convert the values of a CSV column to types that Parquet accepts.

    Empty texts become None. If the column contains both texts and numbers, numbers become texts.
    """
    known = [None if value == "" else value for value in values]
    types = {type(value) for value in known if value is not None}
    if str in types and len(types) > 1:
        return [None if value is None else str(value) for value in known]
    return known


def _format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    header = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: escape_csv(value) for name, value in row.items()} for row in rows)
    return buffer.getvalue()


def format_table(table: PrintedTable, style: str) -> str:
    """Format a printed table as text in one of `STYLES`, such as "markdown"."""
    if style == "markdown":
        return _format_markdown(table)
    if style == "latex":
        return _format_latex(table)
    return _format_text(table, f"{_BOLD}{{}}{_PLAIN}" if style == "terminal" else "*{}*")


def _format_markdown(table: PrintedTable) -> str:
    lines = [
        f"**{escape_markdown(table.title)}**",
        "",
        _markdown_row(map(escape_markdown, table.header)),
        "|---|" + "---:|" * (len(table.header) - 1),
        *(_markdown_row(_emphasise(c, "**{}**", escape_markdown) for c in r) for r in table.rows),
    ]
    notes = "<br>".join(map(escape_markdown, (*table.notes, *table.symbol_notes)))
    return "\n".join([*lines, "", f"<sub>{notes}</sub>"]) + "\n"


def _markdown_row(texts: Iterable[str]) -> str:
    return " | ".join(["", *texts, ""]).strip()


def _format_text(table: PrintedTable, bold: str) -> str:
    cells = [[_emphasise(cell, bold, escape_unprintable) for cell in row] for row in table.rows]
    rows = [list(map(escape_unprintable, table.header)), *cells]
    widths = [max(_printed_width(row[i]) for row in rows) for i in range(len(table.header))]
    # The first column is aligned left if it contains names, and right if it contains numbers.
    has_names = not all(row[0].text.lstrip("-").isdigit() for row in table.rows)
    blocks = []
    for columns in _split_columns(widths):
        lines = []
        for row in rows:
            gaps = [" " * (width - _printed_width(t)) for t, width in zip(row, widths, strict=True)]
            first = row[0] + gaps[0] if has_names else gaps[0] + row[0]
            lines.append("  ".join([first, *(gaps[i] + row[i] for i in columns)]).rstrip())
        blocks.append(lines)
    rule = "-" * max(_printed_width(line) for lines in blocks for line in lines)
    parts = [escape_unprintable(table.title), rule]
    for head, *body in blocks:
        parts += [head, rule, *body, rule]
    return "\n".join([*parts, *map(escape_unprintable, (*table.notes, *table.symbol_notes))]) + "\n"


def _split_columns(widths: Sequence[int]) -> list[list[int]]:
    """Split the columns of a wide table into groups that each fit on a line.

    Column 0 contains the row names and is printed before every group. The groups therefore only
    contain columns 1 and higher.
    """
    blocks: list[list[int]] = [[]]
    for column, width in enumerate(widths[1:], start=1):
        used = widths[0] + sum(2 + widths[other] for other in blocks[-1])
        if blocks[-1] and used + 2 + width > _MAX_LINE_WIDTH:
            blocks.append([])
        blocks[-1].append(column)
    return blocks


def _printed_width(text: str) -> int:
    return len(text.replace(_BOLD, "").replace(_PLAIN, ""))


def _format_latex(table: PrintedTable) -> str:
    body = [
        " & ".join(
            _emphasise(cell, r"\textbf{{{}}}", escape_latex, r"\underline{{{}}}") for cell in row
        )
        for row in table.rows
    ]
    lines = [
        *(f"% {escape_unprintable(line)}" for line in (table.title, *table.notes)),
        r"\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}",
        r"\toprule",
        " & ".join(map(escape_latex, table.header)) + r" \\",
        r"\midrule",
        *(row + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par{{\footnotesize {escape_latex(note)}.\par}}" for note in table.symbol_notes),
    ]
    return "\n".join(lines) + "\n"


def _emphasise(cell: Cell, bold: str, escape: Callable[[str], str], underline: str = "{}") -> str:
    """Return the escaped text of a cell: the best score in bold, the second-best underlined.

    `bold` and `underline` are format strings, such as "**{}**". By default, text is not underlined.
    """
    value, space, dagger = cell.text.partition(" †")
    emphasis = bold if cell.is_best else underline if cell.is_second else "{}"
    return (emphasis.format(escape(value)) if value else "") + escape(space + dagger)
