"""Build tables that show the published values of a paper next to our scores.

The notes below a table list all known differences between the published experiment and ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssl_bench.results import SUPERVISED, Record, ResultStore
from ssl_bench.system.files import natural_sort_key
from ssl_bench.tables.depth import ScoreTable
from ssl_bench.tables.entries import (
    ScoreEntry,
    baseline_note,
    comparable_groups,
    describe_provenance,
)
from ssl_bench.tables.layer_selection import (
    NO_CHOICE_MARK,
    blocks_text,
    choice_as_json,
    choice_notes,
    choose_block,
    show_seed_counts_by_column,
)
from ssl_bench.tables.published import (
    DIFFERENCE,
    LAST_BLOCK,
    RUN_TASK,
    PublishedColumn,
    PublishedTable,
    describe_settings,
)
from ssl_bench.tables.run_logs import RUN_MEASURES, read_run_measure
from ssl_bench.tables.sheets import Cell, PrintedTable


@dataclass(frozen=True, kw_only=True)
class PaperTable(ScoreTable):
    """A published table in which each cell also shows our score, if there is one.

    Attributes:
        published: The published table.
        derived_values: Our values that are not stored as records (scores of probes), by (row,
            column). They are numbers computed from training logs, and differences between rows.
        choice: How the block of each score is chosen: "holdout" (on other images than the scored
            ones) or "oracle" (on the scored images). If None, each column uses its own
            `PublishedColumn.choice`. Columns whose own choice is "last" always show the last block.
    """

    published: PublishedTable
    derived_values: Mapping[tuple[str, str], float]
    choice: str | None

    def curves(self) -> None:
        """Return None, because this table is not drawn as curves."""

    def to_printed_table(self) -> PrintedTable:
        """Return the table to print, with cells "published | ours". No cell is marked as best."""
        rows = [
            (Cell(row), *(Cell(self._text(row, column)) for column in self.published.columns))
            for row in self.rows
        ]
        return PrintedTable(
            self.title, (self.row_name, *self.columns), tuple(rows), self.notes, self.symbol_notes()
        )

    def _text(self, row: str, column: PublishedColumn) -> str:
        key, ours = (row, column.name), "-"
        if key in self.derived_values:
            digits = RUN_MEASURES[column.metric].digits if column.task == RUN_TASK else ".1f"
            ours = f"{self.derived_values[key]:{digits}}"
        elif key in self.cells_without_layer:
            ours = "‡"
        elif key in self.entries:
            entry = self.entries[key]
            ours = f"{entry.text()} {blocks_text(entry)} ({entry.records[0].num_images:,})"
        return f"{self.published.cell(row, column.name)} | {ours}"

    def symbol_notes(self) -> tuple[str, ...]:
        no_choice = (NO_CHOICE_MARK,) if self.cells_without_layer else ()
        return (*no_choice, *super().symbol_notes())

    def csv_rows(self) -> list[dict[str, Any]]:
        rows = []
        for cell, ours in self._cells():
            row = {**cell, "source": self.published.source}
            if isinstance(ours, ScoreEntry):
                row |= {"blocks": " ".join(map(str, ours.layers)), **ours.csv_fields()}
            elif ours is not None:
                row["value"] = ours
            rows.append(row)
        return rows

    def as_json(self) -> dict[str, Any]:
        cells = []
        for cell, ours in self._cells():
            value: dict[str, Any] | None = None
            if isinstance(ours, ScoreEntry):
                settings = {"settings": describe_settings(ours.records[0])}
                value = {**settings, **choice_as_json(ours), **ours.as_json()}
            elif ours is not None:
                value = {"value": ours}
            cells.append({**cell, "ours": value})
        return {
            "kind": "published",
            "paper": self.published.paper,
            "table": self.published.name,
            "source": self.published.source,
            "layer_selection": ", ".join(_columns_by_choice(self.published, self.choice)),
            "cells": cells,
            "notes": [*self.notes, *self.symbol_notes()],
        }

    def _cells(self) -> Iterator[tuple[dict[str, Any], ScoreEntry | float | None]]:
        """Yield each cell of the published table with our score, or None if we have no score.

        A cell is a dictionary with the row, the column and the published value. Our score is a
        number instead of a `ScoreEntry` if it is not stored as a record.
        """
        for row in self.rows:
            for column in self.columns:
                key = (row, column)
                cell = {
                    "row": row,
                    "column": column,
                    "published": self.published.values.get(key),
                    "published_spread": self.published.spreads.get(key),
                }
                yield cell, self.derived_values.get(key, self.entries.get(key))


def paper_table(
    published: PublishedTable,
    records: Sequence[Record],
    store: ResultStore,
    *,
    encoders: Mapping[str, str],
    choice: str | None = None,
    runs: Mapping[str, Path] | None = None,
) -> PaperTable:
    """Build a table that shows our scores next to published values.

    Args:
        published: The published table.
        records: Our records (stored scores).
        store: Results folder with the per-image scores.
        encoders: The id of our encoder (`Record.encoder_id`), by the name of its row.
        choice: Images on which the block of each score is chosen: other images ("holdout") or the
            scored images ("oracle"). If None, each column has its own choice.
        runs: The folder of our pretraining run for each row name.
    """
    encoders = {row: encoders[row] for row in published.rows if row in encoders}
    candidates = [record for record in records if record.encoder_id in encoders.values()]
    entries: dict[tuple[str, str], ScoreEntry] = {}
    cells_without_layer: set[tuple[str, str]] = set()
    unused = {}
    for column in published.columns:
        series = _find_series(column, candidates, published.paper)
        unused[column.name] = [
            f"{first.metric}, {first.facet}, protocol {first.protocol_label}"
            for first, *_ in series[1:]
        ]
        for row, encoder in encoders.items():
            own = [
                record
                for record in (series[0] if series else ())
                if record.encoder_id == encoder and _has_block(column, record)
            ]
            if own:
                entry = choose_block(own, store, _choice_of_column(column, choice))
                if entry is None:
                    cells_without_layer.add((row, column.name))
                else:
                    entries[row, column.name] = entry
    entries = show_seed_counts_by_column(entries)
    table = PaperTable(
        title=(
            f"published | ours with 95 % interval (images): {published.title}, {published.source}"
        ),
        row_name="encoder",
        rows=published.rows,
        columns=tuple(column.name for column in published.columns),
        entries=entries,
        cells_without_layer=frozenset(cells_without_layer),
        notes=(),
        published=published,
        derived_values=_derive_numbers(published, entries, runs or {}),
        choice=choice,
    )
    by_id = {record.encoder_id: record for record in records}
    known = {row: by_id[encoder] for row, encoder in encoders.items() if encoder in by_id}
    notes = [
        *_experiment_notes(table, unused),
        *_encoder_notes(known),
        *_block_notes(table),
        *_missing_notes(table, known, records),
    ]
    return replace(table, notes=tuple(notes))


def _find_series(
    column: PublishedColumn, records: Sequence[Record], paper: str
) -> list[list[Record]]:
    """Return the groups of comparable records that measure the quantity of a published column.

    A record is a stored score. Groups with the protocol (preset of settings) of the paper come
    first. Among groups with the paper's protocol, and among all other groups, those with the metric
    of the column come first, then those with unchanged settings. `paper` is the name of the paper
    and of its protocol.
    """

    def distance(group: Sequence[Record]) -> tuple[bool, bool, bool, int, int, int]:
        first = group[0]
        return (
            first.protocol != paper,
            first.metric != column.metric,
            bool(first.changed),
            -len({record.encoder_id for record in group}),
            column.facets.index(first.facet) if first.facet in column.facets else 0,
            -first.num_images,
        )

    fitting = [record for record in records if column.is_measured_by(record)]
    return sorted(comparable_groups(fitting), key=distance)


def _has_block(column: PublishedColumn, record: Record) -> bool:
    block = record.depth - 1 if column.choice == LAST_BLOCK else column.block(record.depth)
    return block in (None, record.layer)


def _choice_of_column(column: PublishedColumn, choice: str | None) -> str:
    return column.choice if choice is None or column.choice == LAST_BLOCK else choice


def _columns_by_choice(published: PublishedTable, choice: str | None) -> dict[str, list[str]]:
    """Return the names of the columns, grouped by how the block of their scores is chosen.

    The keys are the ways to choose a block: "holdout" (on other images than the scored ones),
    "oracle" (on the scored images) and "last" (the last block). If `choice` is not None, `choice`
    replaces "holdout" and "oracle".
    """
    columns: dict[str, list[str]] = {}
    for column in published.columns:
        columns.setdefault(_choice_of_column(column, choice), []).append(column.name)
    return columns


def _derive_numbers(
    published: PublishedTable,
    entries: Mapping[tuple[str, str], ScoreEntry],
    runs: Mapping[str, Path],
) -> dict[tuple[str, str], float]:
    """Return our values that are not stored as records (scores of probes), by (row, column).

    Such values are computed from training logs, or are differences between rows. Values that cannot
    be computed are left out. `entries` contains our scores from records. For each row name, `runs`
    contains the folder of our pretraining run.
    """
    derived_values: dict[tuple[str, str], float] = {}
    for column in published.columns:
        known = {row: e.value for (row, name), e in entries.items() if name == column.of}
        for row in published.rows:
            value = None
            if column.task == RUN_TASK and row in runs:
                value = read_run_measure(column.metric, runs[row])
            elif column.task == DIFFERENCE and {row, column.reference} <= known.keys():
                value = known[row] - known[column.reference]
                value = 0.0 - value if column.is_loss else value
            if value is not None:
                derived_values[row, column.name] = value
    return derived_values


def _experiment_notes(table: PaperTable, unused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return notes that describe the published experiment and ours.

    For each column name, `unused` describes our further scores that the column could also show.
    """
    published = table.published
    records = [record for entry in table.entries.values() for record in entry.records]
    comes_from_runs = records and all(record.task == SUPERVISED for record in records)
    pretraining = "" if comes_from_runs else " Records do not state how an encoder was pretrained."
    notes = [
        f"our experiment differs from the published one in every cell.{pretraining} The known "
        "differences are listed below",
        f"published: {published.setup}. Not stated: {published.unknown}",
    ]
    if published.doubts:
        notes.append(f"doubtful: {published.doubts}")
    for column in published.columns:
        if any(name == column.name for _, name in table.derived_values):
            notes.append(f"{column.name}: ours: {_describe_derived(column)}")
            continue
        own = [r for (_, at), e in table.entries.items() if at == column.name for r in e.records]
        if not own:
            continue
        parts = [f"ours: {describe_settings(own[0])}"]
        if column.num_images is not None:
            parts.insert(0, f"published on {column.num_images:,} images if all were used")
        if baseline := baseline_note(own):
            parts.append(baseline)
        if others := unused[column.name]:
            parts.append(f"also recorded: {' | '.join(others)}")
        notes.append(f"{column.name}: {'. '.join(parts)}")
    return notes


def _encoder_notes(encoders: Mapping[str, Record]) -> list[str]:
    return [
        f"{row!r}: {record.model}, {record.depth} blocks, sha256 {record.checkpoint_sha256[:8]}"
        for row, record in encoders.items()
    ]


def _block_notes(table: PaperTable) -> list[str]:
    """Return notes that state how the block of each encoder was chosen, and on which images.

    If the choice differs between columns, each note begins with the names of its columns.
    """
    notes = []
    by_choice = _columns_by_choice(table.published, table.choice)
    for way, columns in by_choice.items():
        own = [entry for (_, column), entry in table.entries.items() if column in columns]
        if way != LAST_BLOCK:
            own_notes = choice_notes(own, way)
        else:
            note = "block: the last one (@), whose value averages over all blocks"
            own_notes = [note] if own else []
        prefix = f"{', '.join(columns)}: " if len(by_choice) > 1 else ""
        notes += [prefix + note for note in own_notes]
    return notes


def _missing_notes(
    table: PaperTable, encoders: Mapping[str, Record], records: Sequence[Record]
) -> list[str]:
    """Return notes on how our scores were computed, and on how to fill empty rows and columns.

    `encoders` contains a record (stored score) of our encoder for each row name.
    """
    notes, columns = [], table.published.columns
    if scores := table.entries.values():
        notes.append(describe_provenance([record for entry in scores for record in entry.records]))
    filled_rows = {*encoders, *(row for row, _ in table.derived_values)}
    empty_rows = [row for row in table.rows if row not in filled_rows]
    if empty_rows and any(column.task not in ("", RUN_TASK) for column in columns):
        models = sorted({record.model for record in records}, key=natural_sort_key)
        notes.append(
            f"no encoder for {', '.join(map(repr, empty_rows))}. Add one with "
            f"`--as 'ROW'=CHECKPOINT`. Recorded encoders: {', '.join(models) or 'none'}"
        )
    filled_columns = {name for _, name in (*table.entries, *table.derived_values)}
    empty = [column for column in columns if column.name not in filled_columns]
    if unknown := [column.name for column in empty if not column.task]:
        notes.append(f"this suite has no probe for: {', '.join(unknown)}")
    commands = [
        _describe_measurement(column)
        for column in empty
        if column.task and (encoders or column.task == RUN_TASK)
    ]
    if commands:
        notes.append(f"no record of these encoders for: {', '.join(commands)}")
    return notes


def _describe_derived(column: PublishedColumn) -> str:
    if column.task == RUN_TASK:
        return RUN_MEASURES[column.metric].description
    sign = "below" if column.is_loss else "above"
    return f"{column.of}, percentage points {sign} {column.reference!r}"


def _describe_measurement(column: PublishedColumn) -> str:
    """Return the name of a column and, in parentheses, the command that measures it."""
    if column.task in (RUN_TASK, DIFFERENCE):
        how = f"{_describe_derived(column)}, filled by `ssl-bench reproduce`"
    elif column.task == SUPERVISED:
        how = (
            "the head of a supervised run itself: `ssl-bench pretrain ... monitor.results=DIR`, "
            f"images in a folder named {column.dataset}"
        )
    else:
        dataset = column.layout or column.dataset
        words = ["--task", column.task, "--dataset", dataset, *column.probe]
        words += [] if column.layer is None else ["--layer", str(column.layer)]
        how = f"`{' '.join(words)}`, facet {' or '.join(column.facets)}"
    return f"{column.name} ({how})"
