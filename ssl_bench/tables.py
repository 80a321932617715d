"""Tables and curves over depth, rendered from records alone."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.files import write_text_atomically
from ssl_bench.results import Record
from ssl_bench.sheets import STYLES, Sheet, Word, set_sheet

FORMATS = (*STYLES, "csv")
_PANELS_A_ROW = 3
MARKERS = ("<!-- ssl-bench table -->", "<!-- end of ssl-bench table -->")


@dataclass(frozen=True)
class Entry:
    """One cell: the mean over seeds and the half-width of its 95 % interval, in percent.

    Attributes:
        arbitrary: Percent of the images whose answer rounding chose; None where none can be.
    """

    value: float
    half_width: float | None
    arbitrary: float | None = None


@dataclass(frozen=True)
class DepthTable:
    """One metric over blocks (rows) and models (columns)."""

    title: str
    models: tuple[str, ...]
    layers: tuple[int, ...]
    entries: dict[tuple[int, str], Entry]
    provenance: str

    def best_layer(self, model: str) -> int | None:
        """The block with the highest value of a model; None when it has no finite value."""
        values = {
            layer: self.entries[layer, model].value
            for layer in self.layers
            if (layer, model) in self.entries and not math.isnan(self.entries[layer, model].value)
        }
        return max(values, key=values.__getitem__, default=None)


def depth_tables(records: Sequence[Record]) -> list[DepthTable]:
    """Group records into tables whose numbers are comparable.

    Numbers that differ in dataset, protocol, facet, settings or images never share a table.
    """
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[_comparable(record)].append(record)
    ordered = [group for _, group in sorted(groups.items())]
    return [_depth_table(group, _difference(group[0], ordered)) for group in ordered]


def _difference(record: Record, groups: Sequence[Sequence[Record]]) -> str:
    """What sets a group apart from the others whose title would be the same."""
    rivals = [group[0] for group in groups if _title(group[0]) == _title(record)]
    differing = [
        f"{name}={value}"
        for name, value in sorted(record.settings.items())
        if any(rival.settings.get(name) != value for rival in rivals)
    ]
    if any(rival.dataset_fingerprint != record.dataset_fingerprint for rival in rivals):
        differing.append(f"data {record.dataset_fingerprint[:6]}")
    return f" [{', '.join(differing)}]" if differing else ""


def _title(record: Record) -> str:
    return (
        f"{record.task}: {record.metric} (%) on {record.dataset} {record.split}, "
        f"{record.facet}, protocol {record.protocol}"
    )


def _comparable(record: Record) -> tuple[str, ...]:
    settings = ", ".join(f"{k}={v}" for k, v in sorted(record.settings.items()))
    names = (record.task, record.dataset, record.split, record.metric, record.protocol)
    return (*names, record.facet, record.dataset_fingerprint, settings)


def _depth_table(records: Sequence[Record], difference: str) -> DepthTable:
    columns = _column_names(records)
    cells: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        cells[record.layer, columns[record.checkpoint_sha256]].append(record)
    return DepthTable(
        title=_title(records[0]) + difference,
        models=tuple(sorted(set(columns.values()))),
        layers=tuple(sorted({record.layer for record in records})),
        entries={cell: _entry(seeds) for cell, seeds in cells.items()},
        provenance=_provenance(records),
    )


def _column_names(records: Sequence[Record]) -> dict[str, str]:
    """Name of each checkpoint; two checkpoints of the same name get their hash's first digits."""
    names = {record.checkpoint_sha256: record.model for record in records}
    shared = [name for name in names.values() if list(names.values()).count(name) > 1]
    return {sha: f"{name} {sha[:6]}" if name in shared else name for sha, name in names.items()}


def _entry(seeds: Sequence[Record]) -> Entry:
    value = sum(record.value for record in seeds) / len(seeds)
    shares = [r.details["degenerate_percent"] for r in seeds if "degenerate_percent" in r.details]
    arbitrary = sum(shares) / len(shares) if shares else None
    intervals = [record.ci95 for record in seeds if record.ci95 is not None]
    if not intervals:
        return Entry(value, None, arbitrary)
    # Averaging keeps the width of one seed: it never claims more certainty than was measured.
    half_width = sum(high - low for low, high in intervals) / len(intervals) / 2
    return Entry(value, half_width, arbitrary)


def _provenance(records: Sequence[Record]) -> str:
    def distinct(values: Sequence[object]) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    commits = [(record.git_commit or "wheel")[:10] for record in records]
    left_out = [r.settings["left_out"] for r in records if "left_out" in r.settings]
    unreadable = f", unreadable and left out: {distinct(left_out)}" if left_out else ""
    return (
        f"{distinct([r.num_images for r in records])} images{unreadable}; "
        f"seeds {distinct([r.seed for r in records])}; "
        f"ssl-bench {distinct([r.version for r in records])} ({distinct(commits)}); "
        f"torch {distinct([r.torch for r in records])}; "
        f"{distinct([r.device for r in records])}; "
        f"{max(record.created for record in records)[:10]}"
    )


def render(table: DepthTable, style: str) -> str:
    """One table as text, markdown, csv or latex; the best block of each model is in bold.

    Raises:
        ConfigurationError: another style.
    """
    if style not in FORMATS:
        raise ConfigurationError(f"expected --format {'|'.join(FORMATS)}, got {style!r}")
    return _as_csv(table) if style == "csv" else set_sheet(_sheet(table), style)


def _sheet(table: DepthTable) -> Sheet:
    best = {model: table.best_layer(model) for model in table.models}
    rows = [
        (Word(str(layer)), *(_word(table, layer, model, best[model]) for model in table.models))
        for layer in table.layers
    ]
    note = table.provenance
    if any(_arbitrary(entry) for entry in table.entries.values()):
        note += "; †: percent of the images that are degenerate, their box is arbitrary"
    return Sheet(table.title, ("block", *table.models), tuple(rows), note)


def _word(table: DepthTable, layer: int, model: str, best_layer: int | None) -> Word:
    entry = table.entries.get((layer, model))
    if entry is None:
        return Word("")
    width = "" if entry.half_width is None else f" ± {entry.half_width:.1f}"
    return Word(f"{entry.value:.1f}{width}{_arbitrary(entry)}", marked=layer == best_layer)


def _arbitrary(entry: Entry) -> str:
    if not entry.arbitrary:
        return ""
    return f" †{entry.arbitrary:.{0 if entry.arbitrary >= 1 else 1}f}"


def _as_csv(table: DepthTable) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["title", "block", "model", "value", "half_width_95"])
    for layer in table.layers:
        for model in table.models:
            entry = table.entries.get((layer, model))
            if entry is not None:
                width = "" if entry.half_width is None else entry.half_width
                writer.writerow([table.title, layer, model, entry.value, width])
    return buffer.getvalue()


def insert_between_markers(document: Path, text: str) -> None:
    """Replace what stands between the two `MARKERS` of a document.

    Raises:
        DataError: the document does not hold each marker once, in order.
    """
    begin, end = MARKERS
    try:
        text_before = document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {document} ({error}); name a text file") from error
    before, found, rest = text_before.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise DataError(f"{document} has no lines {begin!r} and {end!r} to put the table between")
    write_text_atomically(document, f"{before}{begin}\n{text}{end}{after}")


def draw_curves(tables: Sequence[DepthTable], path: Path) -> None:
    """Draw score over blocks, one panel a table, one line a model, with its 95 % band.

    A model has the same colour in all panels. The suffix of the path chooses the format, such as
    .png or .svg.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    models = sorted({model for table in tables for model in table.models})
    colours = {model: f"C{number}" for number, model in enumerate(models)}
    rows, columns = -(-len(tables) // _PANELS_A_ROW), min(len(tables), _PANELS_A_ROW)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows + 0.4), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, table in zip(axes.flat, tables, strict=False):
        for model in table.models:
            _draw_curve(axis, table, model, colours[model])
        axis.set_title(table.title.replace(", ", "\n", 1), fontsize=8)
        axis.set_xlabel("block")
        axis.set_ylabel("%")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(tables) :]:
        axis.set_axis_off()
    lines = [Line2D([], [], color=colours[model], marker="o") for model in models]
    figure.legend(lines, models, loc="outside lower center", ncols=min(len(models), 4), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_curve(axis: Any, table: DepthTable, model: str, colour: str) -> None:
    layers = [layer for layer in table.layers if (layer, model) in table.entries]
    entries = [table.entries[layer, model] for layer in layers]
    values = [entry.value for entry in entries]
    axis.plot(layers, values, marker="o", markersize=3, color=colour)
    low = [entry.value - (entry.half_width or 0) for entry in entries]
    high = [entry.value + (entry.half_width or 0) for entry in entries]
    axis.fill_between(layers, low, high, alpha=0.15, color=colour)
