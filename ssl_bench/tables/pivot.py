"""Encoders (rows) against datasets, metrics, facets or protocols (columns)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.results import Record, ResultStore
from ssl_bench.system.naming import in_order
from ssl_bench.tables.layer_selection import (
    CHOICE_NOTES,
    NO_IMAGES_NOTE,
    UNRANKED_NOTE,
    LayerSelection,
    choose_block,
    columns_with_seeds_said,
)
from ssl_bench.tables.notes import baseline_note, dagger_note, provenance
from ssl_bench.tables.printing.sheets import Cell, Sheet
from ssl_bench.tables.series import comparable_groups, differing_settings, model_names, series_json


@dataclass(frozen=True)
class PivotTable:
    """One number of an encoder in each column.

    Attributes:
        choice: How the block was chosen; "block" where there is only one.
        columns: A record of each column by its name.
        cells: By model and column; None where no held-out choice was possible.
    """

    choice: str
    models: tuple[str, ...]
    columns: dict[str, Record]
    cells: dict[tuple[str, str], LayerSelection | None]

    def sheet(self, style: str) -> Sheet:
        """The highest value of a column is marked, the next one second; as printed, ties share."""
        del style
        ranks = {column: self._ranks(column) for column in self.columns}
        rows = [
            (Cell(model), *(self._word(model, column, ranks[column]) for column in self.columns))
            for model in self.models
        ]
        head = ("encoder", *self.columns)
        return Sheet(self._title(), head, tuple(rows), tuple(self._notes()))

    def _ranks(self, column: str) -> list[str]:
        if not self.columns[column].is_ranked:
            return []
        found = [self.cells.get((model, column)) for model in self.models]
        values = {chosen.entry.value for chosen in found if chosen is not None}
        printed = dict.fromkeys(f"{v:.1f}" for v in sorted(values, reverse=True) if v == v)
        return list(printed)[:2]

    def _word(self, model: str, column: str, ranks: Sequence[str]) -> Cell:
        chosen = self.cells.get((model, column))
        if chosen is None:
            return Cell("‡" if (model, column) in self.cells else "")
        printed = f"{chosen.entry.value:.1f}"
        blocks = "" if self.choice == "block" else f" @{','.join(map(str, chosen.layers))}"
        return Cell(
            chosen.entry.text() + blocks,
            marked=ranks[:1] == [printed],
            second=ranks[1:] == [printed],
        )

    def _title(self) -> str:
        records = list(self.columns.values())
        shared = [
            str(getattr(records[0], name))
            for name in ("task", "metric")
            if len({getattr(record, name) for record in records}) == 1
        ]
        percent = " (%)" if all(record.unit == "%" for record in records) else ""
        return f"encoders{percent}: {', '.join([*shared, self._block()])}"

    def _block(self) -> str:
        if self.choice != "block":
            return f"{self.choice} choice of the block"
        layers = {layer for chosen in self._chosen() for layer in chosen.layers}
        return f"block {', '.join(map(str, sorted(layers)))}"

    def _chosen(self) -> list[LayerSelection]:
        return [chosen for chosen in self.cells.values() if chosen is not None]

    def _notes(self) -> list[str]:
        notes = [] if self.choice == "block" else [CHOICE_NOTES[self.choice]]
        notes += self._no_choice_notes()
        if len({chosen.offered for chosen in self._chosen()}) > 1:
            notes.append("not every encoder was probed at the same blocks in every column")
        notes += [f"{name}: {_described(record)}" for name, record in self.columns.items()]
        notes += self._baseline_notes()
        records = [record for chosen in self._chosen() for record in chosen.entry.records]
        if records:
            notes.append(provenance(records) + dagger_note(c.entry for c in self._chosen()))
        notes.append("marked: the highest and the second of a column; no test of the difference")
        return notes

    def _baseline_notes(self) -> list[str]:
        """What a number of each column must be held against, where a record says it."""
        found = []
        for column in self.columns:
            chosen = [one for (_, c), one in self.cells.items() if c == column and one is not None]
            note = baseline_note([record for one in chosen for record in one.entry.records])
            found += [f"{column}: {note}"] if note else []
        return found

    def _no_choice_notes(self) -> list[str]:
        lacking = [self.columns[c] for (_, c), chosen in self.cells.items() if chosen is None]
        unranked = sorted({record.metric for record in lacking if not record.is_ranked})
        notes = [NO_IMAGES_NOTE] if any(record.is_ranked for record in lacking) else []
        return [*notes, UNRANKED_NOTE.format(", ".join(unranked))] if unranked else notes

    def csv_rows(self) -> list[dict[str, Any]]:
        """A cell a row."""
        return [
            {
                "encoder": model,
                "column": column,
                "layer_selection": self.choice,
                "blocks": " ".join(map(str, chosen.layers)),
                **chosen.entry.csv_fields(),
            }
            for (model, column), chosen in self.cells.items()
            if chosen is not None
        ]

    def as_json(self) -> dict[str, Any]:
        """Cells with what is needed to trust them; null where no choice was possible."""
        return {
            "kind": "encoders",
            "title": self._title(),
            "layer_selection": self.choice,
            "columns": [
                {"name": name, **series_json(record)} for name, record in self.columns.items()
            ],
            "cells": [
                {"encoder": model, "column": column, **_chosen_json(chosen)}
                for (model, column), chosen in self.cells.items()
            ],
            "notes": self._notes(),
        }


def _described(record: Record) -> str:
    return (
        f"{record.task}, {record.metric}, {record.split}, {record.facet}, "
        f"protocol {record.named_protocol}, {record.num_images:,} images"
    )


def _chosen_json(chosen: LayerSelection | None) -> dict[str, Any]:
    if chosen is None:
        return {"value": None}
    return {
        "blocks": list(chosen.layers),
        "blocks_offered": list(chosen.offered),
        **chosen.entry.as_json(),
    }


def pivot_table(records: Sequence[Record], store: ResultStore, choice: str) -> PivotTable:
    """Every encoder in every comparable group of records, with a block that `choice` chooses."""
    groups = comparable_groups(records)
    names = column_names([group[0] for group in groups])
    models = model_names(records)
    cells = {
        (model, name): choose_block(of_model, store, choice)
        for name, group in zip(names, groups, strict=True)
        for encoder, model in models.items()
        if (of_model := [record for record in group if record.encoder_id == encoder])
    }
    alone = all(chosen is not None and len(chosen.offered) == 1 for chosen in cells.values())
    return PivotTable(
        choice="block" if alone else choice,
        models=tuple(sorted(models.values(), key=in_order)),
        columns={name: group[0] for name, group in zip(names, groups, strict=True)},
        cells=columns_with_seeds_said(cells),
    )


def column_names(records: Sequence[Record]) -> list[str]:
    """What tells each of some series from the others, in as few words as will do."""
    metrics = len({record.metric for record in records}) > 1
    words = [[r.dataset, r.metric] if metrics else [r.dataset] for r in records]
    for field in ("split", "task", "facet"):
        words = _distinguished(words, [[getattr(record, field)] for record in records])
    words = _distinguished(words, [[record.named_protocol] for record in records])
    last = []
    for name, record in zip(words, records, strict=True):
        rivals = [r for w, r in zip(words, records, strict=True) if w == name]
        last.append(differing_settings(record, rivals))
    return [", ".join(name) for name in _distinguished(words, last)]


def _distinguished(names: Sequence[list[str]], more: Sequence[list[str]]) -> list[list[str]]:
    """Names with more words where equal ones get different words."""
    together: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for name, words in zip(names, more, strict=True):
        together[tuple(name)].add(tuple(words))
    return [
        [*name, *words] if len(together[tuple(name)]) > 1 else name
        for name, words in zip(names, more, strict=True)
    ]
