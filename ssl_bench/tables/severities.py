"""Scores of corrupted images block by block: which block survives noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results import CORRUPTED, Baseline, Record
from ssl_bench.tables.depth import DepthTable
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
from ssl_bench.tables.sheets import NO_VALUE, SPELT, Cell, Sheet

CLEAN = 0
"""The severity of images as they are."""
_LACKING = "‡"


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
    def record(self) -> Record:
        """One of those behind the values."""
        return next(iter(self.entries.values())).records[0]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _ in self.entries}))

    @property
    def severities(self) -> tuple[int, ...]:
        return tuple(sorted({severity for _, severity in self.entries}))

    @cached_property
    def common_severities(self) -> tuple[int, ...]:
        """The severities of every block that has a clean score and another one, without `CLEAN`.

        Drops over different severities could not be compared.
        """
        found = [
            {severity for at, severity in self.entries if at == layer} for layer in self.layers
        ]
        measured = [some - {CLEAN} for some in found if CLEAN in some and len(some) > 1]
        return tuple(sorted(set.intersection(*measured))) if measured else ()

    @property
    def lacking(self) -> dict[int, tuple[int, ...]]:
        """By block the severities that others have and it has not."""
        found = {
            layer: tuple(one for one in self.severities if (layer, one) not in self.entries)
            for layer in self.layers
        }
        return {layer: severities for layer, severities in found.items() if severities}

    @property
    def lacking_note(self) -> str:
        """Say over which severities drops are, where not every block has all; else empty."""
        if not self.lacking:
            return ""
        over = ", ".join(map(str, self.common_severities))
        blocks = ", ".join(map(str, self.lacking))
        return (
            f"not every block has all severities ({blocks} not); drops are over the severities "
            f"that all share: {over or 'none'}"
        )

    @property
    def dagger_meaning(self) -> str:
        """What a dagger beside its values means; empty if there is none."""
        return dagger_meaning(entry.arbitrary for entry in self.entries.values())

    def drop(self, layer: int) -> float | None:
        """Return the lost share of the clean score, in percent, as a mean over severities.

        The mean is over `common_severities`. None where more is not better, and where nothing can
        be lost: no clean score, or one that is no higher than that of an image-independent
        baseline.
        """
        clean = self.entries.get((layer, CLEAN))
        common = [self.entries.get((layer, severity)) for severity in self.common_severities]
        values = [entry.value for entry in common if entry is not None]
        if clean is None or not values or not clean.records[0].is_ranked:
            return None
        baseline = Baseline.from_details(clean.records[0].details)
        if not clean.value > (0.0 if baseline is None else baseline.value):
            return None
        lost = 100.0 * (1 - sum(values) / len(values) / clean.value)
        return lost if lost == lost else None

    @property
    def survivors(self) -> frozenset[int]:
        """The blocks with the smallest drop; none where several all have the same.

        A block that is degenerate at any of these severities, or clean, does not take part.
        """
        behind = (CLEAN, *self.common_severities)
        drops = {
            layer: lost
            for layer in self.layers
            if (lost := self.drop(layer)) is not None
            and not any(self.entries[layer, severity].is_degenerate for severity in behind)
        }
        found = {layer for layer, lost in drops.items() if lost == min(drops.values())}
        return frozenset() if 1 < len(drops) == len(found) else frozenset(found)

    def sheet(self, style: str) -> Sheet:
        """The highest score of each severity is marked, and the smallest drop; no second one."""
        heads = {one: "clean" if one == CLEAN else str(one) for one in self.severities}
        sheet = DepthTable(
            title=self.title,
            models=tuple(heads.values()),
            layers=self.layers,
            entries={(layer, heads[at]): entry for (layer, at), entry in self.entries.items()},
            footnote=self.footnote,
        ).sheet("markdown")
        drops = []
        for layer in self.layers:
            lost = self.drop(layer)
            text = NO_VALUE if lost is None else f"{lost:.1f}"
            drops.append(Cell(text, marked=layer in self.survivors))
        rows = tuple(
            (*(word if word.text else Cell(_LACKING) for word in row), drop)
            for row, drop in zip(sheet.rows, drops, strict=True)
        )
        is_marked = any(cell.marked for row in rows for cell in row)
        note = "; marked: the highest of a severity, the smallest drop"
        notes = (sheet.notes[0] + note,) if is_marked and style in SPELT else sheet.notes
        marks = (f"{_LACKING}: {self.lacking_note}",) if self.lacking else ()
        head = (*sheet.head, "drop (%)")
        return replace(sheet, head=head, rows=rows, notes=notes, marks=(*marks, *sheet.marks))

    def csv_rows(self) -> list[dict[str, Any]]:
        """Fields of every cell, by block and severity."""
        return [
            {"title": self.title, "block": layer, "severity": severity, "model": self.model}
            | {"drop": "" if (lost := self.drop(layer)) is None else lost}
            | entry.csv_fields()
            | {"drop_severities": " ".join(map(str, self.common_severities))}
            for (layer, severity), entry in sorted(self.entries.items(), key=lambda one: one[0])
        ]

    def as_json(self) -> dict[str, Any]:
        """Cells with what is needed to trust them, and the drop of each block."""
        cells = [
            {"layer": layer, "severity": severity, **entry.as_json()}
            for (layer, severity), entry in sorted(self.entries.items(), key=lambda one: one[0])
        ]
        drops = [{"layer": layer, "drop": self.drop(layer)} for layer in self.layers]
        hardest = self.entries[max(self.entries, key=lambda at: at[1])]
        series = series_json(hardest.records[0])
        return {
            "kind": "severities",
            "title": self.title,
            **series,
            "drops": drops,
            "drop_severities": list(self.common_severities),
            "cells": cells,
        }

    def curves(self) -> DepthTable:
        """Severities as rows and blocks as columns, as they are drawn."""
        return DepthTable(
            title=self.title,
            models=tuple(f"block {layer}" for layer in self.layers),
            layers=self.severities,
            entries={(at, f"block {layer}"): entry for (layer, at), entry in self.entries.items()},
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
    for group, differing in zip(groups, differences(groups), strict=True):
        heading = title(group[0]) + differing
        found = [originals[id(one)] for one in group]
        asked = {(one.encoder_id, one.corrupted.name) for one in found if one.corrupted}
        for encoder, corruption in sorted(asked):
            those = [
                one
                for one in found
                if one.encoder_id == encoder
                and (one.corrupted is None or one.corrupted.name == corruption)
            ]
            tables.append(
                SeverityTable(
                    title=f"{heading}, {corruption}, {names[encoder]}",
                    model=names[encoder],
                    entries=mean_entries(those, _place),
                    footnote=footnote(those),
                )
            )
    if not tables:
        raise DataError(
            "no record is of corrupted images; probe some, see docs/probes.md",
            hint=("ssl-bench", "probe", "--task", "all", "corrupt=clean,gaussian_noise:1-5"),
        )
    return tables


def _place(record: Record) -> tuple[int, int]:
    return record.layer, record.corrupted.severity if record.corrupted else CLEAN


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
