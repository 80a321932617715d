"""Tables over depth, and over the epochs of a run that kept encoders, from records alone."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results import Record
from ssl_bench.system.paths import natural_sort_key
from ssl_bench.tables.entries import (
    Entry,
    comparable_groups,
    dagger_meaning,
    differences,
    footnote,
    mean_entries,
    model_names,
    series_json,
    title,
)
from ssl_bench.tables.sheets import SPELT, Cell, Sheet

Row = int | float
"""A block, or an epoch."""


PROBE_EPOCHS = (
    *("ssl-bench", "pretrain", "train.keep_epochs=[100,200]", "or"),
    *("ssl-bench", "probe", "--task", "all", "--checkpoint", "{run}@100"),
)
"""What to type to have records of several epochs of a run."""


@dataclass(frozen=True)
class DepthTable:
    """One metric over blocks (rows) and models (columns).

    Attributes:
        rows: What they are: blocks, or something else that a score is followed over.
    """

    title: str
    models: tuple[str, ...]
    layers: tuple[Row, ...]
    entries: dict[tuple[Row, str], Entry]
    footnote: str
    rows: str = "block"

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        heading: str,
        place: Callable[[Record], tuple[Row, str]],
        rows: str = "block",
    ) -> "DepthTable":
        """Means over seeds of records, each at the row and column that `place` gives it."""
        entries = mean_entries(records, place)
        return cls(
            title=heading,
            models=tuple(sorted({model for _, model in entries}, key=natural_sort_key)),
            layers=tuple(sorted({row for row, _ in entries})),
            entries=entries,
            footnote=footnote(records),
            rows=rows,
        )

    @property
    def record(self) -> Record:
        """One of those behind the values, which share what was asked."""
        return next(iter(self.entries.values())).records[0]

    @property
    def has_values(self) -> bool:
        """Whether any of them has a meaning, unlike top-5 of two classes."""
        return any(not math.isnan(entry.value) for entry in self.entries.values())

    def best_layer(self, model: str) -> Row | None:
        """The block with the highest value of a model, if one may be best and they differ."""
        return next(iter(self._ranked(model)), None)

    def _ranked(self, model: str) -> list[Row]:
        """Those that may be best, the highest first; none where all are equal."""
        values = {
            layer: entry.value for layer, entry in self._of(model).items() if entry.is_rankable
        }
        if len(values) > 1 and len(set(values.values())) == 1:
            return []
        return sorted(values, key=lambda layer: -values[layer])

    def _of(self, model: str) -> dict[Row, Entry]:
        """Return the entries of a model by row."""
        return {
            layer: self.entries[layer, model]
            for layer in self.layers
            if (layer, model) in self.entries
        }

    def sheet(self, style: str) -> Sheet:
        """The best of several blocks are marked, unless all are equal; the second in LaTeX alone.

        Neighbouring blocks are close: which of them comes second says little.
        """
        ranked = {model: self._ranked(model) for model in self.models}
        strides = self._strides()
        rows = [
            (
                Cell(f"{layer:g}"),
                *([Cell(strides.get(layer, ""))] if strides else []),
                *(self._word(layer, model, ranked, style) for model in self.models),
            )
            for layer in self.layers
        ]
        note = self.footnote
        if style in SPELT and any(cell.marked for row in rows for cell in row):
            note += "; marked: the highest of a column"
        first = (self.rows, "stride") if strides else (self.rows,)
        dagger = dagger_meaning(entry.arbitrary for entry in self.entries.values())
        marks = (dagger,) if dagger else ()
        return Sheet(self.title, (*first, *self.models), tuple(rows), (note,), marks)

    def _strides(self) -> dict[Row, str]:
        """By block, those of all models; nothing where every model has one grid of patches."""
        found: dict[Row, set[int]] = defaultdict(set)
        for layer, _, entry in self._cells() if self.rows == "block" else ():
            found[layer] |= {one.stride for one in entry.records if one.stride is not None}
        return {layer: "/".join(map(str, sorted(those))) for layer, those in found.items() if those}

    def _word(
        self, layer: Row, model: str, ranked: Mapping[str, Sequence[Row]], style: str
    ) -> Cell:
        if (layer, model) not in self.entries:
            return Cell("")
        entry, best = self.entries[layer, model], ranked[model]
        heights = sorted({self.entries[one, model].value for one in best}, reverse=True)
        is_one_of_several = sum(not math.isnan(e.value) for e in self._of(model).values()) > 1
        marked = is_one_of_several and layer in best and entry.value == heights[0]
        second = style == "latex" and layer in best and heights[1:2] == [entry.value]
        return Cell(entry.text(), marked=marked, second=second)

    def csv_rows(self) -> list[dict[str, Any]]:
        """Fields of every cell, by block and model."""
        return [
            {"title": self.title, self.rows: layer, "model": model}
            | _stride_of(entry)
            | entry.csv_fields()
            for layer, model, entry in self._cells()
        ]

    def as_json(self) -> dict[str, Any]:
        """Cells with what is needed to trust them."""
        row = "layer" if self.rows == "block" else self.rows
        cells = [
            {row: layer, "column": model} | _stride_of(entry) | entry.as_json()
            for layer, model, entry in self._cells()
        ]
        series = series_json(self.record)
        return {"kind": f"{self.rows}s", "title": self.title, **series, "cells": cells}

    def _cells(self) -> list[tuple[Row, str, Entry]]:
        return [
            (layer, model, self.entries[layer, model])
            for layer in self.layers
            for model in self.models
            if (layer, model) in self.entries
        ]


def _stride_of(entry: Entry) -> dict[str, int]:
    stride = entry.records[0].stride
    return {} if stride is None else {"stride": stride}


def depth_tables(records: Sequence[Record]) -> list[DepthTable]:
    """Group records into tables whose numbers are comparable.

    Numbers that differ in dataset, protocol, facet, settings or images never share a table.
    """
    groups, names = comparable_groups(records), model_names(records)
    return [
        DepthTable.of(
            group,
            title(group[0]) + differing,
            lambda record: (record.layer, names[record.encoder_id]),
        )
        for group, differing in zip(groups, differences(groups), strict=True)
    ]


def epoch_tables(records: Sequence[Record]) -> list[DepthTable]:
    """One table a run and metric: epochs as rows, blocks as columns.

    `RUN@100`, `RUN@200` and `RUN`, its last encoder, are one run.

    Raises:
        DataError: no run has records of two epochs, or two runs have the same name.
    """
    groups = comparable_groups(records)
    for group in groups:
        for run, those in group_by_run(group).items():
            require_one_encoder_per_epoch(run, those)
    tables = [
        epoch_table(those, f"{title(those[0])}{differing}, {run}")
        for group, differing in zip(groups, differences(groups), strict=True)
        for run, those in runs_with_several_epochs(group).items()
    ]
    if not tables:
        raise DataError(
            "no run has records of two epochs or more; keep epochs of a run and probe each",
            hint=PROBE_EPOCHS,
        )
    return tables


def epoch_table(records: Sequence[Record], heading: str) -> DepthTable:
    """Of one run, whose records are among those of `runs_with_several_epochs`."""
    return DepthTable.of(
        records, heading, lambda record: (epoch_of(record), f"block {record.layer}"), "epoch"
    )


def runs_with_several_epochs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Those of `group_by_run` that have records of two epochs or more, ordered by name."""
    return {
        run: those
        for run, those in sorted(group_by_run(records).items())
        if len({epoch_of(record) for record in those}) > 1
    }


def group_by_run(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of encoders whose epoch is known, by the name of their run."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        epoch = record.details.get("epoch")
        if isinstance(epoch, int | float) and math.isfinite(epoch):
            runs[record.model.partition("@")[0]].append(record)
    return runs


def require_one_encoder_per_epoch(run: str, records: Sequence[Record]) -> None:
    """Two runs of the same name are no course of one.

    Raises:
        DataError: two encoders are of the same epoch.
    """
    encoders: dict[float, str] = {}
    for record in records:
        epoch = epoch_of(record)
        if encoders.setdefault(epoch, record.encoder_id) != record.encoder_id:
            raise DataError(
                f"two encoders of runs called {run} are of epoch {epoch:g}; rename a run folder "
                "and probe it again, or choose the results of one",
                hint=("--out", "{folder}"),
            )


def epoch_of(record: Record) -> float:
    """How long the encoder was trained; of a record of `group_by_run`."""
    return float(record.details["epoch"])
