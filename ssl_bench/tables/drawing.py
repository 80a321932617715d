"""Draw tables as curves over blocks, epochs, severities or training steps with matplotlib."""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_bench.errors import ConfigurationError
from ssl_bench.results import MAX_DEGENERATE_PERCENT
from ssl_bench.system.files import natural_sort_key, write_atomically
from ssl_bench.system.output import escape_matplotlib, escape_unprintable
from ssl_bench.tables.depth import ScoreTable
from ssl_bench.tables.entries import list_baselines
from ssl_bench.tables.styles import choose_styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Largest number of points for which a curve has a dot at each point.
_MAX_MARKERS = 60
_PANELS_PER_ROW = 3
_PANEL_INCHES = (4.2, 3.4)
_LINE_INCHES = 0.18
# Width of a panel and of the coloured line in a legend entry, both in characters.
_PANEL_LETTERS, _KEY_LETTERS = 56, 11
# Largest number of ticks on the horizontal axis.
_MAX_TICKS = 13
# A degenerate score is drawn as a hollow dot.
_HOLLOW: Mapping[str, Any] = {"marker": "o", "markersize": 5, "markerfacecolor": "white"}


def draw_curves(tables: Sequence[ScoreTable], path: Path) -> None:
    """Draw tables as curves, and save the figure to the file `path`.

    The suffix of `path`, such as ".png", determines the format.

    Raises:
        ConfigurationError: The suffix is not a known format.
        MachineError: The file cannot be written.
    """
    figure, suffix = curves_figure(tables), path.suffix.removeprefix(".").lower()
    if suffix not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(
            f"expected a figure file that ends with .png, .svg or .pdf, got {path}",
            hint=("--figure", "{file}.png"),
        )
    # Draw in memory first, because matplotlib does not report a full disk.
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=120)
    write_atomically(path, lambda file: file.write(buffer.getbuffer()))


def curves_figure(tables: Sequence[ScoreTable]) -> "Figure":
    """Draw one panel (chart) per table, with one curve per column of the table.

    A band around each curve shows the 95 % intervals of the scores. For training logs, the band
    shows the mean plus or minus one standard deviation. An encoder, run or block has one colour in
    all panels.
    """
    # Leave out tables in which every score is NaN, unless this is true for all tables.
    tables = [table for table in tables if table.has_values] or tables
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(column for table in tables for column in table.columns))
    if tables[0].row_name in ("block", "step"):
        skipless = frozenset().union(*(table.skipless for table in tables))
        styles = choose_styles({name: name in skipless for name in names})
        names.sort(key=natural_sort_key)
        line_styles: dict[str, Mapping[str, Any]] = {name: styles[name].line for name in names}
    else:
        # The columns are blocks. Colours from a sequential colour map show their order.
        shades = mpl.colormaps["viridis"]
        last = max(len(names) - 1, 1)
        line_styles = {name: {"color": shades(number / last)} for number, name in enumerate(names)}
    num_columns = min(len(tables), _PANELS_PER_ROW)
    titles = [_wrap(table.title) for table in tables]
    labels = [_wrap(name, _PANEL_LETTERS - _KEY_LETTERS) for name in names]
    marker = _choose_marker(len(tables[0].rows))
    lines = [Line2D([], [], marker=marker, **line_styles[name]) for name in names]
    if any(entry.is_degenerate for table in tables for _, _, entry in table.scores()):
        labels.append(f"more than {MAX_DEGENERATE_PERCENT:.0f} % degenerate")
        lines.append(Line2D([], [], color="0.4", linestyle="", **_HOLLOW))
    legend_columns = _count_legend_columns(labels, num_columns)
    legend_lines = -(-len(labels) // legend_columns)
    figure = Figure(figsize=_figure_inches(titles, num_columns, legend_lines), layout="constrained")
    axes = figure.subplots(-(-len(tables) // num_columns), num_columns, squeeze=False)
    for ax, table, title in zip(axes.flat, tables, titles, strict=False):
        _draw_panel(ax, table, line_styles)
        ax.set_title(title, fontsize=8)
        if table.row_name == "step":
            ax.set_xlim(0, 1.02 * max(row for other in tables for row in other.rows))
            ax.xaxis.get_major_locator().set_params(nbins=4, integer=True)
        else:
            ax.set_xticks(_choose_ticks(table.rows))
    for ax in axes.flat[len(tables) :]:
        ax.set_axis_off()
    figure.legend(
        lines, labels, loc="outside lower center", ncols=legend_columns, fontsize=8, handlelength=3
    )
    return figure


def _wrap(text: str, letters: int = _PANEL_LETTERS) -> str:
    """Break the title of a chart or a legend label into lines of at most `letters` characters.

    There is always a line break after the first comma.
    """
    parts = escape_unprintable(text).split(", ", 1)
    return "\n".join(
        escape_matplotlib(line) for part in parts for line in textwrap.wrap(part, letters)
    )


def _count_legend_columns(labels: Sequence[str], num_columns: int) -> int:
    """Return how many of the legend's labels fit side by side below the panels (charts).

    `num_columns` is the number of panels in a row.
    """
    longest = max(len(line) for label in labels for line in label.splitlines())
    return max(1, min(len(labels), num_columns * _PANEL_LETTERS // (longest + _KEY_LETTERS)))


def _figure_inches(
    titles: Sequence[str], num_columns: int, legend_lines: int
) -> tuple[float, float]:
    """Return the width and height of a figure in inches, with room for titles and legend.

    `titles` contains the titles of all panels (charts), with line breaks. `num_columns` is the
    number of panels in a row.
    """
    starts = range(0, len(titles), num_columns)
    title_lines = [max(t.count("\n") for t in titles[n : n + num_columns]) for n in starts]
    width, height = _PANEL_INCHES
    text_lines = sum(title_lines) + legend_lines
    return width * num_columns, height * len(title_lines) + _LINE_INCHES * text_lines


def _choose_ticks(rows: Sequence[float]) -> list[float]:
    """Return the blocks, epochs or severities that get a tick on the horizontal axis.

    Only whole numbers get a tick. Long lists are thinned to at most `_MAX_TICKS` numbers.
    """
    whole = [row for row in rows if row == int(row)]
    return whole[:: -(-len(whole) // _MAX_TICKS) or 1]


def _draw_panel(ax: Any, table: ScoreTable, line_styles: Mapping[str, Mapping[str, Any]]) -> None:
    entries = [entry for _, _, entry in table.scores()]
    ends = [end for e in entries for end in (e.value, e.low, e.high)]
    records = [record for entry in entries for record in entry.records]
    baselines = list_baselines(records)
    shown = [*ends, *(value for _, value in baselines)]
    heights = [end for end in shown if end is not None and math.isfinite(end)]
    lowest, highest = min(heights, default=0.0), max(heights, default=0.5)
    # Use a logarithmic axis only if all values are positive. A zero would be at minus infinity, and
    # matplotlib's layout algorithm would never finish.
    ratio = 100 if table.row_name == "step" else 5
    if not table.unit and 0 < ratio * lowest < highest:
        ax.set_yscale("log")
    top = highest + (abs(highest) or 1.0)
    for column in table.columns:
        _draw_curve(ax, table, column, line_styles[column], top)
    for label, value in baselines:
        ax.axhline(value, color="0.4", linestyle=":", linewidth=1)
        ax.annotate(
            escape_matplotlib(label),
            (0.01, value),
            fontsize=7,
            # Put the label below the line if a label above the line would touch the title.
            va="top" if value == highest else "bottom",
            xycoords=("axes fraction", "data"),
        )
    if math.inf in ends:
        ax.set_ylim(top=top)
    ax.set_xlabel(table.row_name)
    ax.set_ylabel(table.unit)
    ax.grid(alpha=0.3)


def _choose_marker(num_points: int) -> str:
    """Return the marker for the points of a curve, or "" if markers would hide the line."""
    return "o" if num_points <= _MAX_MARKERS else ""


def _draw_curve(
    ax: Any, table: ScoreTable, column: str, line_style: Mapping[str, Any], top: float
) -> None:
    """Draw one column of a table as a curve.

    `line_style` contains keyword arguments of the matplotlib line. Infinite values are drawn at the
    height `top`.
    """
    entries = {row: entry for row, at, entry in table.scores() if at == column}
    values = [min(entry.value, top) for entry in entries.values()]
    marker, colour = _choose_marker(len(table.rows)), line_style["color"]
    ax.plot(list(entries), values, marker=marker, markersize=3, **line_style)
    hollow = {
        row: value for row, value in zip(entries, values, strict=True) if entries[row].is_degenerate
    }
    if hollow:
        ax.plot(list(hollow), list(hollow.values()), linestyle="", color=colour, **_HOLLOW)
    for row in (row for row, entry in entries.items() if entry.value == math.inf):
        ax.annotate("∞", (row, top), color=colour, ha="center", va="bottom")
    low = [e.value if e.low is None else min(e.low, top) for e in entries.values()]
    high = [e.value if e.high is None else min(e.high, top) for e in entries.values()]
    ax.fill_between(list(entries), low, high, alpha=0.15, color=colour)
