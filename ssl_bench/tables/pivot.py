"""Encoders (rows) against datasets, metrics, facets or protocols (columns)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.results import Record, ResultStore
from ssl_bench.system.paths import natural_sort_key
from ssl_bench.tables.entries import (
    baseline_note,
    comparable_groups,
    dagger_meaning,
    differing_settings,
    metric_notes,
    model_names,
    provenance,
    series_json,
)
from ssl_bench.tables.layer_selection import (
    NO_CHOICE_MARK,
    LayerSelection,
    choice_notes,
    choose_block,
    columns_with_seeds_said,
)
from ssl_bench.tables.sheets import Cell, Sheet


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
        """Of several encoders the highest value of a column is marked, the next one second.

        As printed: ties share their rank.
        """
        del style
        ranks = {column: self._ranks(column) for column in self.columns}
        rows = [
            (Cell(model), *(self._word(model, column, ranks[column]) for column in self.columns))
            for model in self.models
        ]
        head = ("encoder", *self.columns)
        return Sheet(self._title(), head, tuple(rows), tuple(self._notes()), self._marks())

    def _ranks(self, column: str) -> list[str]:
        if not self.columns[column].is_ranked or len(self.models) == 1:
            return []
        values = {one.entry.value for one in self._chosen(column) if one.entry.is_rankable}
        printed = dict.fromkeys(f"{v:.1f}" for v in sorted(values, reverse=True))
        return list(printed)[:2]

    def _word(self, model: str, column: str, ranks: Sequence[str]) -> Cell:
        chosen = self.cells.get((model, column))
        if chosen is None:
            return Cell("‡" if (model, column) in self.cells else "")
        printed = f"{chosen.entry.value:.1f}" if chosen.entry.is_rankable else None
        blocks = "" if self.choice == "block" else f" @{','.join(map(str, chosen.layers))}"
        return Cell(
            chosen.entry.text() + blocks,
            marked=ranks[:1] == [printed],
            second=ranks[1:] == [printed],
        )

    def _title(self) -> str:
        records = list(self.columns.values())
        words = [
            str(getattr(records[0], name))
            for name in ("task", "metric")
            if len({getattr(record, name) for record in records}) == 1
        ]
        layers = sorted({layer for chosen in self._chosen() for layer in chosen.layers})
        words.append(
            f"block {', '.join(map(str, layers))}"
            if self.choice == "block"
            else f"{self.choice} choice of the block"
        )
        percent = " (%)" if all(record.unit == "%" for record in records) else ""
        return f"encoders{percent}: {', '.join(words)}"

    def _chosen(self, column: str | None = None) -> list[LayerSelection]:
        return [
            one for (_, at), one in self.cells.items() if one is not None and column in (None, at)
        ]

    def _notes(self) -> list[str]:
        chosen, several = self._chosen(), len(self.models) > 1
        notes = choice_notes(self.cells, self.choice)
        if several and len({one.offered for one in chosen}) > 1:
            notes.append("not every encoder was probed at the same blocks in every column")
        for name, one in self.columns.items():
            notes.append(
                f"{name}: {one.task}, {one.metric}, {one.split}, {one.facet}, "
                f"protocol {one.protocol_label}, {one.num_images:,} images"
            )
        for column in self.columns:
            behind = [record for one in self._chosen(column) for record in one.entry.records]
            if note := baseline_note(behind):
                notes.append(f"{column}: {note}")
        records = [record for one in chosen for record in one.entry.records]
        if records:
            notes += metric_notes(self.columns.values())
            notes.append(provenance(records))
        marked = "marked: the highest and the second of a column; no test of the difference"
        return [*notes, marked] if several else notes

    def _marks(self) -> tuple[str, ...]:
        marks = []
        lacking = [self.columns[column] for (_, column), one in self.cells.items() if one is None]
        if any(record.is_ranked for record in lacking):
            marks.append(NO_CHOICE_MARK)
        if unranked := sorted({record.metric for record in lacking if not record.is_ranked}):
            marks.append(
                f"‡ of {', '.join(unranked)}: no block was chosen: more of it is not better; "
                "--layer N shows one block"
            )
        marks.append(dagger_meaning(one.entry.arbitrary for one in self._chosen()))
        return tuple(filter(None, marks))

    def csv_rows(self) -> list[dict[str, Any]]:
        """A cell a row."""
        return [
            {
                "encoder": model,
                "column": column,
                "layer_selection": self.choice,
                **chosen.csv_fields(),
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
                {
                    "encoder": model,
                    "column": column,
                    **({"value": None} if chosen is None else chosen.as_json()),
                }
                for (model, column), chosen in self.cells.items()
            ],
            "notes": [*self._notes(), *self._marks()],
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
        models=tuple(sorted(models.values(), key=natural_sort_key)),
        columns={name: group[0] for name, group in zip(names, groups, strict=True)},
        cells=columns_with_seeds_said(cells),
    )


def column_names(records: Sequence[Record]) -> list[str]:
    """What tells each of some series from the others, in as few words as will do."""
    metrics = len({record.metric for record in records}) > 1
    names = [[r.dataset, r.metric] if metrics else [r.dataset] for r in records]
    for field in ("split", "task", "facet", "protocol_label"):
        names = _distinguished(names, [[getattr(record, field)] for record in records])
    settings = [
        differing_settings(
            record, [rival for other, rival in zip(names, records, strict=True) if other == name]
        )
        for name, record in zip(names, records, strict=True)
    ]
    return [", ".join(name) for name in _distinguished(names, settings)]


def _distinguished(names: Sequence[list[str]], more: Sequence[list[str]]) -> list[list[str]]:
    """Names with more words where equal ones get different words."""
    together: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for name, words in zip(names, more, strict=True):
        together[tuple(name)].add(tuple(words))
    return [
        [*name, *words] if len(together[tuple(name)]) > 1 else name
        for name, words in zip(names, more, strict=True)
    ]
