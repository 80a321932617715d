"""Tables that show how scores depend on the severity of image corruptions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results import CORRUPTION_KEY, Baseline, Record
from ssl_bench.tables.depth import ScoreTable
from ssl_bench.tables.entries import (
    comparable_groups,
    group_and_average,
    model_names,
    series_as_json,
    table_notes,
    table_titles,
)
from ssl_bench.tables.sheets import NO_VALUE, Cell, PrintedTable

CLEAN_SEVERITY = 0
"""Severity of images without corruption."""
_NOT_PROBED = "‡"


@dataclass(frozen=True, kw_only=True)
class SeverityTable(ScoreTable):
    """A table of one encoder, with blocks as rows and severities of an image corruption as columns.

    If clean images were probed, one of the columns is `CLEAN_SEVERITY`.
    """

    model: str

    @cached_property
    def common_severities(self) -> tuple[int, ...]:
        """The severities above `CLEAN_SEVERITY` over which `compute_drop` averages.

        All blocks were scored at each of the common severities, so that the drops of the blocks are
        comparable. Blocks without a score on clean images, or without any score on corrupted
        images, are ignored.
        """
        probed = [{at for row, at in self.entries if row == layer} for layer in self.rows]
        clean = {CLEAN_SEVERITY}
        corrupted = [some - clean for some in probed if clean < some]
        return tuple(sorted(set.intersection(*corrupted))) if corrupted else ()

    @property
    def incomplete_layers(self) -> tuple[int, ...]:
        """Indices of the blocks that lack a score in at least one column."""
        return tuple(
            layer
            for layer in self.rows
            if any((layer, severity) not in self.entries for severity in self.columns)
        )

    @property
    def incomplete_note(self) -> str:
        """A note on the blocks that lack a score at some severity, or "" if there are none."""
        if not self.incomplete_layers:
            return ""
        blocks = ", ".join(map(str, self.incomplete_layers))
        severities = ", ".join(map(str, self.common_severities))
        return (
            f"not probed at every severity: block {blocks}. The drop is a mean over the severities "
            f"that all blocks share: {severities or 'none'}"
        )

    def compute_drop(self, layer: int) -> float | None:
        """Return by how many percent the score of a block drops from clean to corrupted images.

        The drop is 100 (1 - mean / clean), where clean is the score on clean images, and mean is
        the mean score over `common_severities`. The drop is None in these cases:

        - A higher score of the metric is not better.
        - The clean score or all scores on corrupted images are missing, or a score is NaN.
        - The clean score does not exceed the image-independent baseline, or 0 without a baseline.
        """
        clean = self.entries.get((layer, CLEAN_SEVERITY))
        corrupted = [self.entries.get((layer, severity)) for severity in self.common_severities]
        values = [entry.value for entry in corrupted if entry is not None]
        if clean is None or not values or not clean.records[0].is_ranked:
            return None
        baseline = Baseline.from_details(clean.records[0].details)
        if not clean.value > (0.0 if baseline is None else baseline.value):
            return None
        drop = 100.0 * (1 - sum(values) / len(values) / clean.value)
        return None if math.isnan(drop) else drop

    @property
    def most_robust_layers(self) -> frozenset[int]:
        """The blocks whose score drops least on corrupted images.

        A block is left out if its score is degenerate (too many images have an arbitrary result) on
        clean images or at one of `common_severities`. The set is empty if the scores of several
        remaining blocks all drop equally.
        """
        compared = (CLEAN_SEVERITY, *self.common_severities)
        drops = {
            layer: drop
            for layer in self.rows
            if (drop := self.compute_drop(layer)) is not None
            and not any(
                entry.is_degenerate
                for row, severity, entry in self.scores()
                if row == layer and severity in compared
            )
        }
        smallest = {layer for layer, drop in drops.items() if drop == min(drops.values())}
        return frozenset() if 1 < len(drops) == len(smallest) else frozenset(smallest)

    def column_label(self, column: int) -> str:
        return "clean" if column == CLEAN_SEVERITY else str(column)

    def missing_text(self, row: Any, column: Any) -> str:
        del row, column
        return _NOT_PROBED

    def symbol_notes(self) -> tuple[str, ...]:
        note = (f"{_NOT_PROBED}: {self.incomplete_note}",) if self.incomplete_layers else ()
        return (*note, *super().symbol_notes())

    def to_printed_table(self) -> PrintedTable:
        """Return the table to print, whose last column is the relative drop on corrupted images."""
        table, most_robust = super().to_printed_table(), self.most_robust_layers
        drops = []
        for layer in self.rows:
            drop = self.compute_drop(layer)
            text = NO_VALUE if drop is None else f"{drop:.1f}"
            drops.append(Cell(text, is_best=layer in most_robust))
        rows = tuple((*row, drop) for row, drop in zip(table.rows, drops, strict=True))
        notes = ("marked: the smallest drop",) if most_robust else ()
        return replace(
            table, header=(*table.header, "drop (%)"), rows=rows, notes=(*table.notes, *notes)
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        severities = " ".join(map(str, self.common_severities))
        return [
            {"title": self.title, "block": layer, "severity": severity, "model": self.model}
            | {"drop": "" if (drop := self.compute_drop(layer)) is None else drop}
            | entry.csv_fields()
            | {"drop_severities": severities}
            for layer, severity, entry in self.scores()
        ]

    def as_json(self) -> dict[str, Any]:
        corrupted = next(e for _, severity, e in self.scores() if severity == max(self.columns))
        return {
            "kind": "severities",
            "title": self.title,
            **series_as_json(corrupted.records[0]),
            "drops": [{"layer": layer, "drop": self.compute_drop(layer)} for layer in self.rows],
            "drop_severities": list(self.common_severities),
            "cells": [
                {"layer": layer, "severity": severity, **entry.as_json()}
                for layer, severity, entry in self.scores()
            ],
        }

    def curves(self) -> ScoreTable:
        """Return the table to draw, with severities as rows and blocks as columns."""
        names = {layer: f"block {layer}" for layer in self.rows}
        return ScoreTable(
            title=self.title,
            row_name="severity",
            rows=self.columns,
            columns=tuple(names.values()),
            entries={(at, names[layer]): entry for (layer, at), entry in self.entries.items()},
            notes=self.notes,
        )


def severity_tables(records: Sequence[Record]) -> list[SeverityTable]:
    """Return tables of scores over the severities of image corruptions.

    There is one table per encoder, corruption and group of comparable records (stored scores). The
    column `CLEAN_SEVERITY` contains the scores on the same images without corruption.

    Raises:
        DataError: There are no records of corrupted images.
    """
    names = model_names(records)
    # Group records by their dataset before corruption, so that clean and corrupted images are
    # grouped together.
    uncorrupted = [_as_clean(record) for record in records]
    originals = {id(clean): record for clean, record in zip(uncorrupted, records, strict=True)}
    groups = comparable_groups(uncorrupted)
    tables = []
    for group, title in zip(groups, table_titles(groups), strict=True):
        members = [originals[id(clean)] for clean in group]
        pairs = {(one.encoder_id, one.corruption.name) for one in members if one.corruption}
        for encoder, corruption in sorted(pairs):
            chosen = [
                one
                for one in members
                if one.encoder_id == encoder
                and (one.corruption is None or one.corruption.name == corruption)
            ]
            entries = group_and_average(chosen, lambda record: (record.layer, _severity(record)))
            tables.append(
                SeverityTable(
                    title=f"{title}, {corruption}, {names[encoder]}",
                    rows=tuple(sorted({layer for layer, _ in entries})),
                    columns=tuple(sorted({severity for _, severity in entries})),
                    entries=entries,
                    notes=tuple(table_notes(chosen)),
                    model=names[encoder],
                )
            )
    if not tables:
        raise DataError(
            "there are no results on corrupted images",
            hint=("ssl-bench", "probe", "--task", "all", "corrupt=clean,gaussian_noise:1-5"),
        )
    return tables


def _severity(record: Record) -> int:
    return record.corruption.severity if record.corruption else CLEAN_SEVERITY


def _as_clean(record: Record) -> Record:
    """Return a copy of a record (a stored score) with the dataset and settings of clean images.

    With such copies, scores on clean and on corrupted images can be grouped together.
    """
    if record.corruption is None:
        return replace(record)
    settings = {name: value for name, value in record.settings.items() if name != CORRUPTION_KEY}
    return replace(
        record,
        dataset=record.corruption.dataset,
        dataset_fingerprint=record.corruption.fingerprint,
        settings=settings,
    )
