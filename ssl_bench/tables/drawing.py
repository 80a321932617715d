"""Curves over depth, drawn by matplotlib from tables."""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_bench.errors import ConfigurationError
from ssl_bench.results import MAX_DEGENERATE_PERCENT
from ssl_bench.system.escaping import escape_matplotlib, escape_unprintable
from ssl_bench.system.files import write_atomically
from ssl_bench.tables.depth import DepthTable
from ssl_bench.tables.entries import baselines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS_A_ROW = 3
_PANEL_INCHES = (4.2, 3.4)
_LINE_INCHES = 0.18
# Of text as wide as a panel; a key of the legend with its gaps is as wide as nine of them.
_LETTERS, _KEY_LETTERS = 56, 9
_HOLLOW: Mapping[str, Any] = {"marker": "o", "markersize": 5, "markerfacecolor": "white"}
"""Marker of a degenerate value."""


def draw_curves(tables: Sequence[DepthTable], path: Path) -> None:
    """Write `curves_figure`; the suffix of the path chooses the format, such as .png or .svg.

    Raises:
        ConfigurationError: The suffix names no format.
        MachineError: The file cannot be written.
    """
    figure, kind = curves_figure(tables), path.suffix.removeprefix(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(
            f"expected a figure that ends with .png, .svg or .pdf, got {path}",
            hint=("--figure", "{file}.png"),
        )
    # In memory first: on a full disk matplotlib's own writers end with errors that hide that of it.
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=120)
    write_atomically(path, lambda file: file.write(drawn.getbuffer()))


def curves_figure(tables: Sequence[DepthTable]) -> "Figure":
    """Score over blocks or epochs, one panel a table, one line a model, with its 95 % band.

    A model has the same colour in all panels.
    """
    # Of undefined values there is nothing to see.
    tables = [table for table in tables if table.has_values] or tables
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    models = list(dict.fromkeys(model for table in tables for model in table.models))
    if tables[0].rows == "block":
        models.sort()
        colours: dict[str, Any] = {model: f"C{number}" for number, model in enumerate(models)}
    else:
        # Blocks have an order, which their colours show.
        shades = mpl.colormaps["viridis"]
        colours = {model: shades(n / max(len(models) - 1, 1)) for n, model in enumerate(models)}
    columns = min(len(tables), _PANELS_A_ROW)
    titles = [_wrapped(table.title) for table in tables]
    names = [_wrapped(model, _LETTERS - _KEY_LETTERS) for model in models]
    lines = [Line2D([], [], color=colours[model], marker="o") for model in models]
    if any(entry.is_degenerate for table in tables for entry in table.entries.values()):
        names.append(f"more than {MAX_DEGENERATE_PERCENT:.0f} % degenerate")
        lines.append(Line2D([], [], color="0.4", linestyle="", **_HOLLOW))
    names_a_row = _names_a_row(names, columns)
    figure = Figure(
        figsize=_inches(titles, columns, -(-len(names) // names_a_row)), layout="constrained"
    )
    axes = figure.subplots(-(-len(tables) // columns), columns, squeeze=False)
    for axis, table, title in zip(axes.flat, tables, titles, strict=False):
        _draw_panel(axis, table, colours)
        axis.set_title(title, fontsize=8)
    for axis in axes.flat[len(tables) :]:
        axis.set_axis_off()
    figure.legend(lines, names, loc="outside lower center", ncols=names_a_row, fontsize=8)
    return figure


def _wrapped(text: str, letters: int = _LETTERS) -> str:
    """In lines that there is room for; a title goes on below its first part."""
    parts = escape_unprintable(text).split(", ", 1)
    return "\n".join(
        escape_matplotlib(line) for part in parts for line in textwrap.wrap(part, letters)
    )


def _names_a_row(names: Sequence[str], columns: int) -> int:
    """How many keys of the legend stand side by side below so many panels."""
    longest = max(len(line) for name in names for line in name.splitlines())
    return max(1, min(len(names), columns * _LETTERS // (longest + _KEY_LETTERS)))


def _inches(titles: Sequence[str], columns: int, keys: int) -> tuple[float, float]:
    """Width and height that leave every panel its room below the longest title of its row."""
    lines = [max(t.count("\n") for t in titles[n : n + columns])
             for n in range(0, len(titles), columns)]  # fmt: skip
    width, height = _PANEL_INCHES
    return width * columns, height * len(lines) + _LINE_INCHES * (sum(lines) + keys)


def _draw_panel(axis: Any, table: DepthTable, colours: Mapping[str, Any]) -> None:
    ends = [end for e in table.entries.values() for end in (e.value, e.low, e.high)]
    records = [record for entry in table.entries.values() for record in entry.records]
    answers = {answer: values[0] for answer, values in baselines(records).items()}
    heights = [end for end in (*ends, *answers.values()) if end is not None and math.isfinite(end)]
    lowest, highest = min(heights, default=0.0), max(heights, default=0.5)
    # What is drawn at zero on a logarithmic axis lies at infinity, which ends no layout.
    if not table.record.unit and 0 < 5 * lowest < highest:
        axis.set_yscale("log")
    top = highest + (abs(highest) or 1.0)
    for model in table.models:
        _draw_curve(axis, table, model, colours[model], top)
    for answer, value in answers.items():
        axis.axhline(value, color="0.4", linestyle=":", linewidth=1)
        axis.annotate(escape_matplotlib(answer), (0, value), fontsize=6, va="bottom",
                      xycoords=("axes fraction", "data"))  # fmt: skip
    if math.inf in ends:
        axis.set_ylim(top=top)
    if table.rows == "block":
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel(table.rows)
    axis.set_ylabel(table.record.unit)
    axis.grid(alpha=0.3)


def _draw_curve(axis: Any, table: DepthTable, model: str, colour: Any, top: float) -> None:
    """Infinity is drawn at the top."""
    cells = {
        layer: table.entries[layer, model]
        for layer in table.layers
        if (layer, model) in table.entries
    }
    values = [min(entry.value, top) for entry in cells.values()]
    axis.plot(list(cells), values, marker="o", markersize=3, color=colour)
    hollow = {x: value for x, value in zip(cells, values, strict=True) if cells[x].is_degenerate}
    if hollow:
        axis.plot(list(hollow), list(hollow.values()), linestyle="", color=colour, **_HOLLOW)
    for layer in (layer for layer, entry in cells.items() if entry.value == math.inf):
        axis.annotate("∞", (layer, top), color=colour, ha="center", va="bottom")
    low = [entry.value if entry.low is None else min(entry.low, top) for entry in cells.values()]
    high = [entry.value if entry.high is None else min(entry.high, top) for entry in cells.values()]
    axis.fill_between(list(cells), low, high, alpha=0.15, color=colour)
