"""Tables of scores over the blocks of encoders, and over the epochs of a run."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results import Record
from ssl_bench.system.paths import natural_sort_key
from ssl_bench.tables.entries import (
    Entry,
    comparable_groups,
    dagger_meaning,
    mean_entries,
    model_names,
    series_as_json,
    table_notes,
    table_titles,
)
from ssl_bench.tables.sheets import Cell, Sheet, Table

PROBE_EPOCHS = (
    *("ssl-bench", "pretrain", "train.keep_epochs=[100,200]", "or"),
    *("ssl-bench", "probe", "--task", "all", "--checkpoint", "{run}@100"),
)
"""Hint for records of several epochs of a run."""


@dataclass(frozen=True, kw_only=True)
class Pivot(Table):
    """Scores by row and column.

    Attributes:
        row_name: What a row is: "block", "epoch", "severity" or "encoder".
        rows: Block indices, epochs, severities or names, in printed order.
        columns: Names or severities, in printed order.
        entries: Scores by row and column.
        undecided: Rows and columns for which no block could be chosen.
        notes: Lines below the table.
    """

    title: str
    row_name: str = "block"
    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    entries: Mapping[tuple[Any, Any], Entry]
    undecided: frozenset[tuple[Any, Any]] = frozenset()
    notes: tuple[str, ...]

    @property
    def record(self) -> Record:
        """One of the records behind the scores."""
        return next(entry.records[0] for _, _, entry in self.scores())

    @property
    def has_values(self) -> bool:
        """Whether any score is a number. Top-5 accuracy of two classes, for example, has none."""
        return any(not math.isnan(entry.value) for _, _, entry in self.scores())

    @property
    def footnote(self) -> str:
        """The notes in one line."""
        return "; ".join(self.notes)

    @property
    def dagger_meaning(self) -> str:
        """Explanation of the dagger, empty if there is none in the table."""
        return dagger_meaning(entry.degenerate_percent for _, _, entry in self.scores())

    def scores(self) -> Iterator[tuple[Any, Any, Entry]]:
        """Yield row, column and entry of every score, row by row."""
        for row in self.rows:
            for column in self.columns:
                if (row, column) in self.entries:
                    yield row, column, self.entries[row, column]

    def curves(self) -> "Pivot | None":
        """Return the table whose columns a figure draws as curves over the rows."""
        return self

    def best_row(self, column: Any) -> Any:
        """Return the row of the highest score of a column, or None if no score is best."""
        if not self._ranking(column):
            return None
        entries = {row: entry for row, at, entry in self.scores() if at == column}
        return max(
            (row for row, entry in entries.items() if entry.is_rankable),
            key=lambda row: entries[row].value,
        )

    def _ranking(self, column: Any) -> list[str]:
        """Return the distinct printed scores of a column, highest first.

        The list is empty, so that no score is marked, if the column has fewer than two scores, or
        if all that may be best are equal.
        """
        known = [e for _, at, e in self.scores() if at == column and not math.isnan(e.value)]
        values = sorted((entry.value for entry in known if entry.is_rankable), reverse=True)
        printed = list(dict.fromkeys(f"{value:.1f}" for value in values))
        is_tie = len(values) > 1 and len(printed) == 1
        return [] if len(known) < 2 or is_tie else printed

    def sheet(self) -> Sheet:
        rankings = {column: self._ranking(column) for column in self.columns}
        strides = self._strides()
        rows = []
        for row in self.rows:
            first = row if isinstance(row, str) else f"{row:g}"
            stride = [Cell(strides.get(row, ""))] if strides else []
            scores = [self._cell(row, column, rankings[column]) for column in self.columns]
            rows.append((Cell(first), *stride, *scores))
        marked = ("marked: the highest score of each column",) if any(rankings.values()) else ()
        return Sheet(
            title=self.title,
            head=(
                self.row_name,
                *(["stride"] if strides else []),
                *map(self.column_label, self.columns),
            ),
            rows=tuple(rows),
            notes=(*self.notes, *marked),
            marks=self.marks(),
        )

    def column_label(self, column: Any) -> str:
        """Return the head of a column."""
        return str(column)

    def marks(self) -> tuple[str, ...]:
        """Return explanations of the signs in the table."""
        return (self.dagger_meaning,) if self.dagger_meaning else ()

    def entry_text(self, entry: Entry) -> str:
        """Return the text of a score."""
        return entry.text()

    def missing_text(self, row: Any, column: Any) -> str:
        """Return the text of a cell without a score."""
        return "‡" if (row, column) in self.undecided else ""

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
        """Return the strides of each block in pixels, or {} if every encoder has a single grid."""
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


def _stride_field(entry: Entry) -> dict[str, int]:
    stride = entry.records[0].stride
    return {} if stride is None else {"stride": stride}


def depth_tables(records: Sequence[Record]) -> list[Pivot]:
    """Return one table of blocks against models for each group of comparable records."""
    groups, names = comparable_groups(records), model_names(records)
    return [
        _pivot(group, title, "block", lambda record: (record.layer, names[record.encoder_id]))
        for group, title in zip(groups, table_titles(groups), strict=True)
    ]


def epoch_tables(records: Sequence[Record]) -> list[Pivot]:
    """Return one table of epochs against blocks for each run and group of comparable records.

    The encoders `RUN@100`, `RUN@200` and `RUN` (the last one) belong to one run.

    Raises:
        DataError: No run has records of two epochs, or two runs have the same name.
    """
    groups = comparable_groups(records)
    for group in groups:
        for run, run_records in group_by_run(group).items():
            require_one_encoder_per_epoch(run, run_records)
    tables = [
        epoch_table(run_records, f"{title}, {run}")
        for group, title in zip(groups, table_titles(groups), strict=True)
        for run, run_records in runs_with_several_epochs(group).items()
    ]
    if not tables:
        raise DataError(
            "no run has records of two or more epochs: keep epochs of a run, and probe each",
            hint=PROBE_EPOCHS,
        )
    return tables


def epoch_table(records: Sequence[Record], title: str) -> Pivot:
    """Return a table of epochs against blocks from the comparable records of one run."""
    return _pivot(
        records, title, "epoch", lambda record: (epoch_number(record), f"block {record.layer}")
    )


def _pivot(
    records: Sequence[Record],
    title: str,
    row_name: str,
    key: Callable[[Record], tuple[float, str]],
) -> Pivot:
    """Average records over seeds and place them at the row and column that `key` returns."""
    entries = mean_entries(records, key)
    return Pivot(
        title=title,
        row_name=row_name,
        rows=tuple(sorted({row for row, _ in entries})),
        columns=tuple(sorted({column for _, column in entries}, key=natural_sort_key)),
        entries=entries,
        notes=tuple(table_notes(records)),
    )


def runs_with_several_epochs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records by run and keep the runs with at least two epochs, sorted by name."""
    return {
        run: run_records
        for run, run_records in sorted(group_by_run(records).items())
        if len({epoch_number(record) for record in run_records}) > 1
    }


def group_by_run(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group the records that state the epoch of their encoder by the name of the run."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        epoch = record.details.get("epoch")
        if isinstance(epoch, int | float) and math.isfinite(epoch):
            runs[record.model.partition("@")[0]].append(record)
    return runs


def require_one_encoder_per_epoch(run: str, records: Sequence[Record]) -> None:
    """Raise an error if the records come from two runs of the same name.

    Raises:
        DataError: Two encoders have the same epoch.
    """
    encoders: dict[float, str] = {}
    for record in records:
        epoch = epoch_number(record)
        if encoders.setdefault(epoch, record.encoder_id) != record.encoder_id:
            raise DataError(
                f"epoch {epoch:g} of run {run} has two encoders, so two runs have this name. "
                "Rename a run folder and probe it again, or read a folder with results of one run",
                hint=("--out", "{folder}"),
            )


def epoch_number(record: Record) -> float:
    """Return the epoch of the encoder of a record from `group_by_run`."""
    return float(record.details["epoch"])
