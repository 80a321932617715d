"""Build tables of scores over the blocks of encoders, or over the epochs of training runs."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import natural_sort_key
from ssl_bench.system.output import print_message
from ssl_bench.tables.entries import (
    ScoreEntry,
    choose_main_metric,
    comparable_groups,
    explain_dagger,
    group_and_average,
    model_names,
    series_as_json,
    table_notes,
    table_titles,
)
from ssl_bench.tables.sheets import Cell, PrintedTable, Table, default_format, render_tables
from ssl_bench.tables.styles import lacks_skips

MAX_TABLES = 4
"""All tables of a single task are printed if there are at most this many."""

PROBE_EPOCHS = (
    *("ssl-bench", "pretrain", "train.keep_epochs=[100,200]", "or"),
    *("ssl-bench", "probe", "--task", "all", "--checkpoint", "{run}@100"),
)
"""What errors suggest if a run was not probed at several epochs."""


@dataclass(frozen=True, kw_only=True)
class ScoreTable(Table):
    """A table of scores, for example with blocks as rows and encoders as columns.

    Attributes:
        row_name: What a row stands for: "block", "epoch", "severity", "encoder" or "step".
        rows: Block indices, epochs, severities, encoder names or steps, in printed order.
        columns: Names of the columns, or severities of image corruptions, in printed order.
        entries: Scores, by (row, column).
        cells_without_layer: The pairs (row, column) without a score, because no block could be
            chosen.
        notes: Lines of text that are printed below the table.
        skipless: Names of the columns whose encoder or run has no skip connections.
    """

    title: str
    row_name: str = "block"
    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    entries: Mapping[tuple[Any, Any], ScoreEntry]
    cells_without_layer: frozenset[tuple[Any, Any]] = frozenset()
    notes: tuple[str, ...]
    skipless: frozenset[str] = frozenset()

    @property
    def record(self) -> Record:
        """One of the records (stored scores) from which the table was computed."""
        return next(entry.records[0] for _, _, entry in self.scores())

    @property
    def unit(self) -> str:
        """Unit of the scores: "%", or "" for plain numbers."""
        return next(entry.unit for _, _, entry in self.scores())

    @property
    def has_values(self) -> bool:
        """Whether at least one score is a number, not NaN.

        For example, top-5 accuracy is always NaN if there are only two classes.
        """
        return any(not math.isnan(entry.value) for _, _, entry in self.scores())

    @property
    def footnote(self) -> str:
        return "; ".join(self.notes)

    @property
    def dagger_meaning(self) -> str:
        """Explanation of the sign †, or an empty text if the table contains no †."""
        return explain_dagger(entry.degenerate_percent for _, _, entry in self.scores())

    def scores(self) -> Iterator[tuple[Any, Any, ScoreEntry]]:
        """Yield each score of the table, row by row, as a tuple (row, column, score)."""
        for row in self.rows:
            for column in self.columns:
                if (row, column) in self.entries:
                    yield row, column, self.entries[row, column]

    def curves(self) -> "ScoreTable | None":
        """Return a table whose columns can be drawn as curves, or None if there are no curves."""
        return self

    def best_row(self, column: Any) -> Any:
        """Return the row with the best score in a column, or None if no score is marked as best."""
        if not self._ranking(column):
            return None
        entries = {row: entry for row, other, entry in self.scores() if other == column}
        return max(
            (row for row, entry in entries.items() if entry.is_rankable),
            key=lambda row: entries[row].value,
        )

    def _ranking(self, column: Any) -> list[str]:
        """Return the distinct printed scores of a column that can be marked as best.

        The scores are in descending order. The list is empty if no score should be marked: if the
        column has fewer than two scores, or if several scores can be best and all are printed
        equally.
        """
        known = [e for _, other, e in self.scores() if other == column and not math.isnan(e.value)]
        values = sorted((entry.value for entry in known if entry.is_rankable), reverse=True)
        printed = list(dict.fromkeys(f"{value:.1f}" for value in values))
        is_tie = len(values) > 1 and len(printed) == 1
        return [] if len(known) < 2 or is_tie else printed

    def to_printed_table(self) -> PrintedTable:
        rankings = {column: self._ranking(column) for column in self.columns}
        strides = self._strides()
        rows = []
        for row in self.rows:
            first = f"{row:g}" if isinstance(row, float) else str(row)
            stride = [Cell(strides.get(row, ""))] if strides else []
            scores = [self._cell(row, column, rankings[column]) for column in self.columns]
            rows.append((Cell(first), *stride, *scores))
        marked = ("marked: the highest score of each column",) if any(rankings.values()) else ()
        return PrintedTable(
            title=self.title,
            header=(
                self.row_name,
                *(["stride"] if strides else []),
                *map(self.column_label, self.columns),
            ),
            rows=tuple(rows),
            notes=(*self.notes, *marked),
            symbol_notes=self.symbol_notes(),
        )

    def column_label(self, column: Any) -> str:
        return str(column)

    def symbol_notes(self) -> tuple[str, ...]:
        """Return explanations of the signs in the table, such as †, to be printed below it."""
        return (self.dagger_meaning,) if self.dagger_meaning else ()

    def entry_text(self, entry: ScoreEntry) -> str:
        return entry.text()

    def missing_text(self, row: Any, column: Any) -> str:
        """Return the text for a cell without a score: "‡" if no block could be chosen, or ""."""
        return "‡" if (row, column) in self.cells_without_layer else ""

    def _cell(self, row: Any, column: Any, ranking: Sequence[str]) -> Cell:
        entry = self.entries.get((row, column))
        if entry is None:
            return Cell(self.missing_text(row, column))
        printed = f"{entry.value:.1f}" if entry.is_rankable else None
        return Cell(
            self.entry_text(entry),
            is_best=ranking[:1] == [printed],
            is_second=ranking[1:2] == [printed],
        )

    def _strides(self) -> dict[Any, str]:
        """Return the stride (distance between neighbouring tokens in pixels) at each block.

        The stride is a text such as "16", or "8/16" if the encoders differ. Encoders with the same
        stride at all blocks, such as ViTs, are ignored.
        """
        if self.row_name != "block":
            return {}
        strides: dict[Any, set[int]] = defaultdict(set)
        for row, _, entry in self.scores():
            strides[row] |= {r.stride for r in entry.records if r.stride is not None}
        return {row: "/".join(map(str, sorted(known))) for row, known in strides.items() if known}

    def csv_rows(self) -> list[dict[str, Any]]:
        return [
            {"title": self.title, self.row_name: row, "model": column}
            | _stride_field(entry)
            | entry.csv_fields()
            for row, column, entry in self.scores()
        ]

    def as_json(self) -> dict[str, Any]:
        key = "layer" if self.row_name == "block" else self.row_name
        cells = [
            {key: row, "column": column} | _stride_field(entry) | entry.as_json()
            for row, column, entry in self.scores()
        ]
        series = series_as_json(self.record)
        return {"kind": f"{self.row_name}s", "title": self.title, **series, "cells": cells}


def _stride_field(entry: ScoreEntry) -> dict[str, int]:
    stride = entry.records[0].stride
    return {} if stride is None else {"stride": stride}


def depth_tables(records: Sequence[Record]) -> list[ScoreTable]:
    """Return tables of scores with blocks as rows and encoders as columns.

    There is one table per group of comparable records (stored scores), which have the same metric,
    images and settings.
    """
    groups, names = comparable_groups(records), model_names(records)
    return [
        _score_table(group, title, "block", lambda record: (record.layer, names[record.encoder_id]))
        for group, title in zip(groups, table_titles(groups), strict=True)
    ]


def epoch_tables(records: Sequence[Record]) -> list[ScoreTable]:
    """Return tables of scores with pretraining epochs as rows and blocks as columns.

    There is one table for each run and group of comparable records (stored scores). The encoder
    `RUN@100` belongs to epoch 100 of the run `RUN`, and the encoder `RUN` to its last epoch.

    Raises:
        DataError: No run has records of at least two epochs, or two runs share a name.
    """
    groups, tables = comparable_groups(records), []
    for group, title in zip(groups, table_titles(groups), strict=True):
        for run, run_records in group_by_run(group).items():
            require_one_encoder_per_epoch(run, run_records)
        for run, run_records in runs_with_several_epochs(group).items():
            tables.append(epoch_table(run_records, f"{title}, {run}"))
    if not tables:
        raise DataError(
            "no run has results of at least two epochs. Save several epochs of a run while "
            "pretraining, then probe each saved epoch",
            hint=PROBE_EPOCHS,
        )
    return tables


def epoch_table(records: Sequence[Record], title: str) -> ScoreTable:
    """Return a table of the scores of one run, with epochs as rows and blocks as columns.

    `records` contains stored scores with the same metric, images and settings.
    """
    return _score_table(
        records, title, "epoch", lambda record: (epoch_number(record), f"block {record.layer}")
    )


def _score_table(
    records: Sequence[Record],
    title: str,
    row_name: str,
    key: Callable[[Record], tuple[float, str]],
) -> ScoreTable:
    """Build a table of comparable records (stored scores), averaged over random seeds.

    `row_name` states what a row stands for, such as "block". The function `key` returns the row and
    the column of a record.
    """
    entries = group_and_average(records, key)
    return ScoreTable(
        title=title,
        row_name=row_name,
        rows=tuple(sorted({row for row, _ in entries})),
        columns=tuple(sorted({column for _, column in entries}, key=natural_sort_key)),
        entries=entries,
        notes=tuple(table_notes(records)),
        skipless=frozenset(
            name for record in records if lacks_skips(name := key(record)[1], record.architecture)
        ),
    )


def runs_with_several_epochs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records (stored scores) of each run that was probed at two or more epochs."""
    return {
        run: run_records
        for run, run_records in sorted(group_by_run(records).items())
        if len({epoch_number(record) for record in run_records}) > 1
    }


def group_by_run(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records (stored scores) by the name of the pretraining run of their encoder.

    Records that do not state a pretraining epoch are left out.
    """
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        epoch = record.details.get("epoch")
        if isinstance(epoch, int | float) and math.isfinite(epoch):
            runs[record.model.partition("@")[0]].append(record)
    return runs


def require_one_encoder_per_epoch(run: str, records: Sequence[Record]) -> None:
    """Raise DataError if the records (stored scores) have two encoders for the same epoch of a run.

    Two runs with the same name cause this error. The records must have the same metric, images and
    settings.
    """
    encoders: dict[float, str] = {}
    for record in records:
        epoch = epoch_number(record)
        if encoders.setdefault(epoch, record.encoder_id) != record.encoder_id:
            raise DataError(
                f"there are results of two encoders for epoch {epoch:g} of run {run}, probably "
                "because two runs have this name. "
                "Rename one run folder and probe that run again, or pass a results folder that "
                "contains only one of the runs",
                hint=("--out", "{folder}"),
            )


def epoch_number(record: Record) -> float:
    """Return the pretraining epoch of the encoder of a record (a stored score).

    The record must state its epoch. All records that `group_by_run` returns state their epoch.
    """
    return float(record.details["epoch"])


def print_main_tables(tables: Sequence[ScoreTable], store: ResultStore) -> None:
    """Print the tables of each task's main metric to stdout.

    All tables are printed if there is only one task with at most `MAX_TABLES` tables. If tables are
    left out, a message states the command that prints them.
    """
    by_task: dict[str, list[ScoreTable]] = defaultdict(list)
    for table in tables:
        by_task[table.record.task].append(table)
    main = main_metrics([table.record for table in tables])
    most = MAX_TABLES if len(by_task) == 1 else 1
    for task, all_tables in by_task.items():
        has_few = len(all_tables) <= most
        selected = [
            table
            for table in all_tables
            if has_few or main[task, table.record.dataset] == table.record.metric
        ]
        printed = [table for table in selected if table.has_values] or selected[:1]
        print(render_tables(printed, default_format()))
        if number := len(all_tables) - len(printed):
            command = f"ssl-bench table --task {task} --out {store.root}"
            print_message(f"{number} more table{'s' * (number > 1)} of {task}: {command}")


def main_metrics(
    records: Iterable[Record], names: Sequence[str] = ("task", "dataset")
) -> dict[tuple[Any, ...], str]:
    """Return the main metric of each group of records (stored scores).

    The main metric represents a task in overviews. Records with equal values of the fields `names`
    form a group, and these values are the key of the group in the result. The first of `names` must
    be "task".
    """
    metrics: dict[tuple[Any, ...], dict[tuple[str, bool], None]] = defaultdict(dict)
    for record in records:
        group = tuple(getattr(record, name) for name in names)
        metrics[group][record.metric, record.is_ranked] = None
    return {group: choose_main_metric(group[0], list(known)) for group, known in metrics.items()}
