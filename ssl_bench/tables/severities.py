"""Scores of corrupted images block by block: which block survives noise."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results import CORRUPTED, Baseline, Record
from ssl_bench.tables.depth import DepthTable, Row
from ssl_bench.tables.entry import Entry, mean_entry, with_seeds_said
from ssl_bench.tables.notes import dagger_note, footnote
from ssl_bench.tables.printing.sheets import NO_VALUE, Cell, Sheet
from ssl_bench.tables.series import comparable_groups, difference, model_names, series_json, title

CLEAN = 0
"""The severity of images as they are."""
_DROP = "drop (%)"


@dataclass(frozen=True)
class SeverityTable:
    """One metric of one encoder: blocks (rows) against severities of one corruption (columns).

    Attributes:
        entries: By block and severity; `CLEAN` is among the severities where it was recorded.
        footnote: Of the corrupted images.
    """

    title: str
    model: str
    entries: Mapping[tuple[int, int], Entry]
    footnote: str

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _ in self.entries}))

    @property
    def severities(self) -> tuple[int, ...]:
        return tuple(sorted({severity for _, severity in self.entries}))

    def drop(self, layer: int) -> float | None:
        """How much of the clean score is lost, in percent of it, in the mean over severities.

        None where more is not better, and where nothing is there to be lost: no clean score, or one
        that is no higher than that of an answer that looks at no image.
        """
        clean = self.entries.get((layer, CLEAN))
        values = [self.entries[at].value for at in self.entries if at[0] == layer and at[1]]
        if clean is None or not values or not clean.records[0].is_ranked:
            return None
        baseline = Baseline.of(clean.records[0].details)
        if not clean.value > (0.0 if baseline is None else baseline.value):
            return None
        lost = 100.0 * (1 - sum(values) / len(values) / clean.value)
        return None if math.isnan(lost) else lost

    @property
    def survivors(self) -> frozenset[int]:
        """The blocks with the smallest drop; none where several all have the same."""
        return _alone({layer: self.drop(layer) for layer in self.layers}, -1)

    def sheet(self, style: str) -> Sheet:
        """The highest score of each severity is marked, and the smallest drop."""
        del style
        survivors = self.survivors
        best = {severity: _alone(self._ranked(severity), 1) for severity in self.severities}
        rows = tuple(
            (
                Cell(str(layer)),
                *(self._word(layer, s, marked=layer in best[s]) for s in self.severities),
                Cell(_percent(self.drop(layer)), marked=layer in survivors),
            )
            for layer in self.layers
        )
        heads = ["clean" if severity == CLEAN else str(severity) for severity in self.severities]
        note = self.footnote + dagger_note(self.entries.values())
        return Sheet(self.title, ("block", *heads, _DROP), rows, (note,))

    def _ranked(self, severity: int) -> dict[int, float | None]:
        """The values that more is better of, by block."""
        return {
            layer: entry.value if entry.records[0].is_ranked else None
            for (layer, at), entry in self.entries.items()
            if at == severity
        }

    def _word(self, layer: int, severity: int, *, marked: bool) -> Cell:
        entry = self.entries.get((layer, severity))
        return Cell("") if entry is None else Cell(entry.text(), marked=marked)

    def csv_rows(self) -> list[dict[str, Any]]:
        """Fields of every cell, by block and severity."""
        return [
            {"title": self.title, "block": layer, "severity": severity, "model": self.model}
            | {"drop": "" if (lost := self.drop(layer)) is None else lost}
            | entry.csv_fields()
            for (layer, severity), entry in sorted(self.entries.items(), key=lambda one: one[0])
        ]

    def as_json(self) -> dict[str, Any]:
        """Cells with what is needed to trust them, and the drop of each block."""
        cells = [
            {"layer": layer, "severity": severity, **entry.as_json()}
            for (layer, severity), entry in sorted(self.entries.items(), key=lambda one: one[0])
        ]
        drops = [{"layer": layer, "drop": self.drop(layer)} for layer in self.layers]
        series = series_json(self._hardest.records[0])
        return {"kind": "severities", "title": self.title, **series, "drops": drops, "cells": cells}

    @property
    def _hardest(self) -> Entry:
        return self.entries[max(self.entries, key=lambda at: at[1])]

    def curves(self) -> DepthTable:
        """Severities as rows and blocks as columns, as they are drawn."""
        cells: dict[tuple[Row, str], Entry] = {
            (severity, f"block {layer}"): entry for (layer, severity), entry in self.entries.items()
        }
        return DepthTable(
            title=self.title,
            models=tuple(f"block {layer}" for layer in self.layers),
            layers=self.severities,
            entries=cells,
            footnote=self.footnote,
            rows="severity",
        )


def severity_tables(records: Sequence[Record]) -> list[SeverityTable]:
    """One table an encoder, metric and corruption; clean scores of the same images beside it.

    Raises:
        DataError: no record is of corrupted images.
    """
    names = model_names(records)
    plain = [_as_clean(record) for record in records]
    originals = {id(one): record for one, record in zip(plain, records, strict=True)}
    groups = comparable_groups(plain)
    tables = []
    for group in groups:
        for encoder, corruption in _asked(group, originals):
            those = [
                originals[id(one)]
                for one in group
                if one.encoder_id == encoder
                and _corruption(originals[id(one)]) in (None, corruption)
            ]
            heading = title(group[0]) + difference(group[0], groups)
            tables.append(_table(those, f"{heading}, {corruption}, {names[encoder]}", names))
    if not tables:
        raise DataError(
            "no record is of corrupted images; probe with corrupt=clean,gaussian_noise:1-5 for "
            "example, see docs/corruptions.md"
        )
    return tables


def severity_of(record: Record) -> int:
    """That of its corruption; `CLEAN` of images as they are."""
    return CLEAN if record.corrupted is None else record.corrupted.severity


def _corruption(record: Record) -> str | None:
    return None if record.corrupted is None else record.corrupted.name


def _as_clean(record: Record) -> Record:
    """The record as its like of clean images has all that numbers are compared by."""
    if record.corrupted is None:
        return replace(record)
    settings = {name: value for name, value in record.settings.items() if name != CORRUPTED}
    return replace(
        record,
        dataset=record.corrupted.dataset,
        dataset_fingerprint=record.corrupted.fingerprint,
        settings=settings,
    )


def _asked(group: Sequence[Record], originals: Mapping[int, Record]) -> list[tuple[str, str]]:
    """Encoders and corruptions of a group."""
    found = {(one.encoder_id, _corruption(originals[id(one)])) for one in group}
    return sorted((encoder, name) for encoder, name in found if name is not None)


def _table(records: Sequence[Record], heading: str, names: Mapping[str, str]) -> SeverityTable:
    cells: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        cells[record.layer, severity_of(record)].append(record)
    return SeverityTable(
        title=heading,
        model=names[records[0].encoder_id],
        entries=with_seeds_said({at: mean_entry(seeds) for at, seeds in cells.items()}),
        footnote=footnote(records),
    )


def _alone(values: Mapping[int, float | None], sign: int) -> frozenset[int]:
    """Blocks with the largest value, or with -1 the smallest; none where all of several have it."""
    known = {layer: v for layer, v in values.items() if v is not None and not math.isnan(v)}
    best = max((sign * value for value in known.values()), default=0.0)
    found = frozenset(layer for layer, value in known.items() if sign * value == best)
    return frozenset() if len(known) > 1 and len(found) == len(known) else found


def _percent(lost: float | None) -> str:
    return NO_VALUE if lost is None else f"{lost:.1f}"
