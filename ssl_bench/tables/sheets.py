"""Tables as text, on a terminal, as Markdown, LaTeX, CSV, JSON and Parquet."""

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ssl_bench.errors import ConfigurationError
from ssl_bench.system.escaping import (
    dump_json,
    escape_csv,
    escape_latex,
    escape_markdown,
    escape_unprintable,
)

STYLES = ("text", "terminal", "markdown", "latex")
FORMATS = (*STYLES, "csv", "json", "parquet")
SPELT = ("text", "terminal")
"""Styles of which a note says what marks mean; papers say it in their captions."""
NO_VALUE = "\N{EN DASH}"
"""Stands where a value is no number."""
_LINE = 100
_BOLD, _UNDERLINED, _PLAIN = "\033[1m", "\033[4m", "\033[0m"


@dataclass(frozen=True)
class Cell:
    """One cell of a sheet; the marked ones are set in bold, the second ones are underlined."""

    text: str
    marked: bool = False
    second: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table that is ready to be set.

    Attributes:
        rows: Each starts with the name of the row, which is never marked.
        notes: Where the numbers are from, set below them line by line.
        marks: What signs in the cells mean. LaTeX prints them; the notes are comments there.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    marks: tuple[str, ...] = ()


@runtime_checkable
class Printable(Protocol):
    """A table in all its forms."""

    def sheet(self, style: str) -> Sheet:
        """For people; the style is one of `STYLES`."""
        ...

    def csv_rows(self) -> list[dict[str, Any]]:
        """One a cell, all with the same fields, in full precision."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Every number with what is needed to trust it."""
        ...


def default_format() -> str:
    """Bold and underlined on a terminal that can, plain text everywhere else."""
    # None where a service manager closed it.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    capable = is_terminal and os.environ.get("TERM", "dumb") != "dumb"
    return "terminal" if capable else "text"


def render_tables(tables: Sequence[Printable], style: str) -> str:
    """Tables one after another; as CSV under one head, as JSON in one array.

    Raises:
        ConfigurationError: another style, or one that is no text.
    """
    if style == "csv":
        return _as_csv([row for table in tables for row in table.csv_rows()])
    if style == "json":
        return dump_json([table.as_json() for table in tables]) + "\n"
    if style not in STYLES:
        raise ConfigurationError(
            f"expected one of {', '.join(FORMATS)}, got the format {style!r}",
            hint=("--format", "text"),
        )
    return "\n".join(format_sheet(table.sheet(style), style) for table in tables)


def format_sheet(sheet: Sheet, style: str) -> str:
    """The sheet in one of `STYLES`, ending in a newline."""
    if style == "markdown":
        return _as_markdown(sheet)
    if style == "latex":
        return _as_latex(sheet)
    if style == "terminal":
        return _ruled(sheet, _BOLD + "{}" + _PLAIN, _UNDERLINED + "{}" + _PLAIN)
    return _ruled(sheet, "*{}*", "_{}_")


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


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    heads = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: escape_csv(value) for name, value in row.items()} for row in rows)
    return buffer.getvalue()


def _as_markdown(sheet: Sheet) -> str:
    lines = [f"**{escape_markdown(sheet.title)}**", "", _piped(map(escape_markdown, sheet.head))]
    lines.append("|---|" + "---:|" * (len(sheet.head) - 1))
    for row in sheet.rows:
        lines.append(
            _piped(_emphasised(w, "**{}**", "<ins>{}</ins>", escape_markdown) for w in row)
        )
    note = "<br>".join(map(escape_markdown, (*sheet.notes, *sheet.marks)))
    return "\n".join([*lines, "", f"<sub>{note}</sub>"]) + "\n"


def _piped(words: Iterable[str]) -> str:
    return " | ".join(["", *words, ""]).strip()


def _ruled(sheet: Sheet, bold: str, underlined: str) -> str:
    words = [
        [_emphasised(w, bold, underlined, escape_unprintable) for w in row] for row in sheet.rows
    ]
    rows = [list(map(escape_unprintable, sheet.head)), *words]
    widths = [max(_width(row[i]) for row in rows) for i in range(len(sheet.head))]
    # Names read from the left, block numbers like all numbers from the right.
    named = not all(row[0].text.lstrip("-").isdigit() for row in sheet.rows)
    blocks = []
    for columns in _beside(widths):
        lines = []
        for row in rows:
            gaps = [" " * (width - _width(word)) for word, width in zip(row, widths, strict=True)]
            first = row[0] + gaps[0] if named else gaps[0] + row[0]
            lines.append("  ".join([first, *(gaps[i] + row[i] for i in columns)]).rstrip())
        blocks.append(lines)
    rule = "-" * max(_width(line) for lines in blocks for line in lines)
    parts = [escape_unprintable(sheet.title), rule]
    for head, *body in blocks:
        parts += [head, rule, *body, rule]
    return "\n".join([*parts, *map(escape_unprintable, (*sheet.notes, *sheet.marks))]) + "\n"


def _beside(widths: Sequence[int]) -> list[list[int]]:
    """Columns but the first, in blocks that go one below the other where a line would be long."""
    blocks: list[list[int]] = [[]]
    for column, width in enumerate(widths[1:], start=1):
        line = widths[0] + sum(2 + widths[one] for one in blocks[-1])
        if blocks[-1] and line + 2 + width > _LINE:
            blocks.append([])
        blocks[-1].append(column)
    return blocks


def _width(text: str) -> int:
    for code in (_BOLD, _UNDERLINED, _PLAIN):
        text = text.replace(code, "")
    return len(text)


def _as_latex(sheet: Sheet) -> str:
    body = [
        " & ".join(_emphasised(w, r"\textbf{{{}}}", r"\underline{{{}}}", escape_latex) for w in row)
        for row in sheet.rows
    ]
    lines = [
        *(f"% {escape_unprintable(line)}" for line in (sheet.title, *sheet.notes)),
        r"\begin{tabular}{l" + "r" * (len(sheet.head) - 1) + "}",
        r"\toprule",
        " & ".join(map(escape_latex, sheet.head)) + r" \\",
        r"\midrule",
        *(row + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par{{\footnotesize {escape_latex(mark)}.\par}}" for mark in sheet.marks),
    ]
    return "\n".join(lines) + "\n"


def _emphasised(word: Cell, bold: str, underlined: str, escape: Callable[[str], str]) -> str:
    # A dagger questions the value, so it is never emphasised with it.
    value, space, dagger = word.text.partition(" †")
    frame = bold if word.marked else underlined if word.second else "{}"
    return (frame.format(escape(value)) if value else "") + escape(space + dagger)
