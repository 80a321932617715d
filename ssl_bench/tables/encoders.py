"""Build tables with one row per encoder and one column per dataset, metric and kind of feature."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import natural_sort_key
from ssl_bench.tables.depth import ScoreTable
from ssl_bench.tables.entries import (
    ScoreEntry,
    baseline_note,
    comparable_groups,
    describe_provenance,
    differing_settings,
    metric_notes,
    model_names,
    series_as_json,
)
from ssl_bench.tables.layer_selection import (
    NO_CHOICE_MARK,
    blocks_text,
    choice_as_json,
    choice_notes,
    choose_block,
    show_seed_counts_by_column,
)


@dataclass(frozen=True, kw_only=True)
class EncoderTable(ScoreTable):
    """A table of scores, with encoders as rows and measurements as columns.

    Attributes:
        choice: How the block of each score was chosen: "holdout" (on other images than the scored
            ones) or "oracle" (on the scored images). If only one block of each encoder was scored,
            it is "block".
        series: One record (a stored score) for each column name, which states what is measured.
    """

    choice: str
    series: Mapping[str, Record]

    def curves(self) -> None:
        """Return None, because this table is not drawn as curves."""

    def entry_text(self, entry: ScoreEntry) -> str:
        return entry.text() if self.choice == "block" else f"{entry.text()} {blocks_text(entry)}"

    def symbol_notes(self) -> tuple[str, ...]:
        series = [self.series[column] for _, column in self.cells_without_layer]
        notes = [NO_CHOICE_MARK] if any(record.is_ranked for record in series) else []
        if unranked := sorted({record.metric for record in series if not record.is_ranked}):
            notes.append(
                f"‡ of {', '.join(unranked)}: no block was chosen, because higher is not better. "
                "`--layer N` shows one block"
            )
        return (*notes, *super().symbol_notes())

    def csv_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "encoder": model,
                "column": column,
                "layer_selection": self.choice,
                "blocks": " ".join(map(str, entry.layers)),
                **entry.csv_fields(),
            }
            for (model, column), entry in self.entries.items()
        ]

    def as_json(self) -> dict[str, Any]:
        values = {key: choice_as_json(e) | e.as_json() for key, e in self.entries.items()}
        values |= {key: {"value": None} for key in self.cells_without_layer}
        return {
            "kind": "encoders",
            "title": self.title,
            "layer_selection": self.choice,
            "columns": [
                {"name": name, **series_as_json(record)} for name, record in self.series.items()
            ],
            "cells": [
                {"encoder": model, "column": column, **values[model, column]}
                for column in self.columns
                for model in self.rows
                if (model, column) in values
            ],
            "notes": [*self.notes, *self.symbol_notes()],
        }


def encoder_table(records: Sequence[Record], store: ResultStore, choice: str) -> EncoderTable:
    """Build a table with one score for each encoder and each group of comparable records.

    A record is a stored score. `choice` states how the block of each score is chosen: "holdout" (on
    other images than the scored ones) or "oracle" (on the scored images).
    """
    groups = comparable_groups(records)
    columns = column_names([group[0] for group in groups])
    models = model_names(records)
    chosen = {
        (model, column): choose_block(own, store, choice)
        for column, group in zip(columns, groups, strict=True)
        for encoder, model in models.items()
        if (own := [record for record in group if record.encoder_id == encoder])
    }
    entries = show_seed_counts_by_column({at: e for at, e in chosen.items() if e is not None})
    cells_without_layer = frozenset(chosen.keys() - entries.keys())
    if not cells_without_layer and all(
        len(entry.candidate_layers) == 1 for entry in entries.values()
    ):
        choice = "block"
    series = {column: group[0] for column, group in zip(columns, groups, strict=True)}
    return EncoderTable(
        title=_title(list(series.values()), list(entries.values()), choice),
        row_name="encoder",
        rows=tuple(sorted(models.values(), key=natural_sort_key)),
        columns=tuple(columns),
        entries=entries,
        notes=tuple(_notes(entries, series, choice, len(models))),
        choice=choice,
        series=series,
        cells_without_layer=cells_without_layer,
    )


def _title(series: Sequence[Record], scores: Sequence[ScoreEntry], choice: str) -> str:
    common = [
        str(getattr(series[0], name))
        for name in ("task", "metric")
        if len({getattr(record, name) for record in series}) == 1
    ]
    layers = sorted({layer for entry in scores for layer in entry.layers})
    blocks = f"block {', '.join(map(str, layers))}"
    words = [*common, blocks if choice == "block" else f"{choice} choice of the block"]
    percent = " (%)" if all(record.unit == "%" for record in series) else ""
    return f"encoders{percent}: {', '.join(words)}"


def _notes(
    entries: Mapping[tuple[str, str], ScoreEntry],
    series: Mapping[str, Record],
    choice: str,
    num_models: int,
) -> list[str]:
    scores = list(entries.values())
    notes = choice_notes(scores, choice)
    if num_models > 1 and len({entry.candidate_layers for entry in scores}) > 1:
        notes.append("not every encoder was probed at the same blocks in every column")
    for column, record in series.items():
        notes.append(
            f"{column}: {record.task}, {record.metric}, {record.split}, {record.facet}, "
            f"protocol {record.protocol_label}, {record.num_images:,} images"
        )
    for column in series:
        own = [r for (_, at), e in entries.items() if at == column for r in e.records]
        if note := baseline_note(own):
            notes.append(f"{column}: {note}")
    if scores:
        notes += metric_notes(series.values())
        notes.append(describe_provenance([record for entry in scores for record in entry.records]))
    if num_models > 1:
        notes.append("differences between encoders are not tested here, but by `ssl-bench compare`")
    return notes


def column_names(records: Sequence[Record]) -> list[str]:
    """Return a short unique column name for each record (stored score), such as "voc2012, miou"."""
    metrics = len({record.metric for record in records}) > 1
    names = [[r.dataset, r.metric] if metrics else [r.dataset] for r in records]
    for field in ("split", "task", "facet", "protocol_label"):
        names = _extend_equal_names(names, [[getattr(record, field)] for record in records])
    settings = [
        differing_settings(
            record, [other for title, other in zip(names, records, strict=True) if title == name]
        )
        for name, record in zip(names, records, strict=True)
    ]
    return [", ".join(name) for name in _extend_equal_names(names, settings)]


def _extend_equal_names(names: Sequence[list[str]], words: Sequence[list[str]]) -> list[list[str]]:
    """Make column names unique by appending words, and return all names.

    A name is a list of words. For each column, `words` contains the words that may be appended.
    Words are appended only if they distinguish columns with the same name.
    """
    words_by_name: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for name, more in zip(names, words, strict=True):
        words_by_name[tuple(name)].add(tuple(more))
    return [
        [*name, *more] if len(words_by_name[tuple(name)]) > 1 else name
        for name, more in zip(names, words, strict=True)
    ]
