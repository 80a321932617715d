"""Ours beside a published table, with every known difference between the experiments."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.results import SUPERVISED, Record, ResultStore
from ssl_bench.system.naming import in_order
from ssl_bench.tables.layer_selection import (
    NO_IMAGES_NOTE,
    LayerSelection,
    choice_notes,
    choose_block,
    columns_with_seeds_said,
    selection_csv,
    selection_json,
)
from ssl_bench.tables.notes import baseline_note, dagger_note, provenance
from ssl_bench.tables.printing.sheets import Cell, Sheet
from ssl_bench.tables.published import PublishedColumn, PublishedTable, settings_of
from ssl_bench.tables.series import comparable_groups


@dataclass(frozen=True)
class PaperTable:
    """A published table and, in the cells where there is one, a number of this suite.

    Attributes:
        encoders: A record of the encoder that stands for a published row, by row.
        ours: By row and column; None where no held-out choice was possible.
        unused: Names of other series that fit a column, by column.
        recorded: Names of the encoders that could be given for a row.
    """

    published: PublishedTable
    choice: str
    encoders: dict[str, Record]
    ours: dict[tuple[str, str], LayerSelection | None]
    unused: dict[str, tuple[str, ...]]
    recorded: tuple[str, ...]

    def sheet(self, style: str) -> Sheet:
        """Published values with ours behind them; nothing is ranked."""
        del style
        rows = [
            (Cell(row), *(self._word(row, column.name) for column in self.published.columns))
            for row in self.published.rows
        ]
        return Sheet(
            title=(
                f"published | ours with 95 % interval (images): {self.published.title}, "
                f"{self.published.source}"
            ),
            head=("encoder", *(column.name for column in self.published.columns)),
            rows=tuple(rows),
            notes=tuple(self.notes()),
        )

    def _word(self, row: str, column: str) -> Cell:
        value = self.published.cell(row, column)
        if (row, column) not in self.ours:
            return Cell(f"{value} | -")
        chosen = self.ours[row, column]
        if chosen is None:
            return Cell(f"{value} | ‡")
        blocks = ",".join(map(str, chosen.layers))
        images = chosen.entry.records[0].num_images
        return Cell(f"{value} | {chosen.entry.text()} @{blocks} ({images:,})")

    def notes(self) -> list[str]:
        """How the experiments differ, and what is missing, a sentence each."""
        published = self.published
        notes = [
            f"ours is not the same experiment in any cell{self._unknown_training()}; "
            "what differs besides:",
            f"published: {published.setup}; not stated: {published.unknown}",
            *([f"doubtful: {published.doubts}"] if published.doubts else []),
            *(self._column_note(column) for column in published.columns if self._used(column)),
            *(
                f"{row!r} here: {record.model}, {record.depth} blocks, "
                f"sha256 {record.checkpoint_sha256[:8]}"
                for row, record in self.encoders.items()
            ),
        ]
        chosen = self._chosen()
        notes += choice_notes(self.ours, self.choice)
        if None in self.ours.values():
            notes.append(NO_IMAGES_NOTE)
        if chosen:
            records = [record for one in chosen for record in one.entry.records]
            notes.append(provenance(records) + dagger_note(one.entry for one in chosen))
        return [*notes, *self._missing()]

    def _cells(self) -> Iterator[tuple[str, PublishedColumn, LayerSelection | None]]:
        for row, column in itertools.product(self.published.rows, self.published.columns):
            yield row, column, self.ours.get((row, column.name))

    def _unknown_training(self) -> str:
        records = [record for one in self._chosen() for record in one.entry.records]
        if records and all(record.task == SUPERVISED for record in records):
            return ""
        return ", and no record of a probe knows how an encoder was pretrained"

    def _chosen(self) -> list[LayerSelection]:
        return [chosen for chosen in self.ours.values() if chosen is not None]

    def _used(self, column: PublishedColumn) -> list[LayerSelection]:
        found = [self.ours.get((row, column.name)) for row in self.published.rows]
        return [chosen for chosen in found if chosen is not None]

    def _column_note(self, column: PublishedColumn) -> str:
        used = self._used(column)
        record, images = used[0].entry.records[0], ""
        if column.num_images is not None:
            images = f"published on {column.num_images:,} images if all were used; "
        others = self.unused[column.name]
        also = f"; also recorded: {'; '.join(others)}" if others else ""
        note = baseline_note([record for one in used for record in one.entry.records])
        blind = f"; {note}" if note else ""
        return f"{column.name}: {images}here: {settings_of(record)}{blind}{also}"

    def _missing(self) -> list[str]:
        notes = []
        rows = [row for row in self.published.rows if row not in self.encoders]
        if rows:
            notes.append(
                f"no encoder for {', '.join(map(repr, rows))}; give one with --as 'ROW'=CHECKPOINT,"
                f" recorded here: {', '.join(self.recorded) or 'none'}"
            )
        without = [column for column in self.published.columns if not self._used(column)]
        strange = [column.name for column in without if not column.task]
        if strange:
            notes.append(f"this suite has no probe for: {', '.join(strange)}")
        wanted = [_how_to_measure(column) for column in without if column.task]
        if wanted and self.encoders:
            notes.append(f"no record of these encoders for: {', '.join(wanted)}")
        return notes

    def csv_rows(self) -> list[dict[str, Any]]:
        """A published cell a row, ours empty where there is none."""
        return [
            {
                "row": row,
                "column": column.name,
                "published": self.published.values.get((row, column.name)),
                "published_spread": self.published.spreads.get((row, column.name)),
                "source": self.published.source,
                **({} if chosen is None else selection_csv(chosen)),
            }
            for row, column, chosen in self._cells()
        ]

    def as_json(self) -> dict[str, Any]:
        """Published cells, ours with what is needed to trust them, and what differs."""
        cells = [
            {
                "row": row,
                "column": column.name,
                "published": self.published.values.get((row, column.name)),
                "published_spread": self.published.spreads.get((row, column.name)),
                "ours": None
                if chosen is None
                else {
                    "settings": settings_of(chosen.entry.records[0]),
                    **selection_json(chosen),
                },
            }
            for row, column, chosen in self._cells()
        ]
        return {
            "kind": "published",
            "paper": self.published.paper,
            "table": self.published.name,
            "source": self.published.source,
            "layer_selection": self.choice,
            "cells": cells,
            "notes": self.notes(),
        }


def _how_to_measure(column: PublishedColumn) -> str:
    if column.task == SUPERVISED:
        return (
            f"{column.name} (the head of a supervised run itself: `ssl-bench pretrain ... "
            f"monitor.results=DIR`, images in a folder named {column.dataset})"
        )
    command = ["--task", column.task, "--dataset", column.dataset, *column.probe]
    return f"{column.name} ({' '.join(command)}, facet {' or '.join(column.facets)})"


def paper_table(
    published: PublishedTable,
    records: Sequence[Record],
    store: ResultStore,
    *,
    encoders: Mapping[str, str],
    choice: str,
) -> PaperTable:
    """Lay records beside a published table.

    Args:
        published: Its rows and columns are kept.
        records: Those that may stand there.
        store: Holds the images' contributions.
        encoders: `Record.encoder_id` of what stands for a row, by row.
        choice: How a block is chosen where several were probed; see `choose_block`.
    """
    asked = {row: encoders[row] for row in published.rows if row in encoders}
    candidates = [record for record in records if record.encoder_id in asked.values()]
    ours: dict[tuple[str, str], LayerSelection | None] = {}
    unused = {}
    for column in published.columns:
        series = _series(column, candidates, published.paper)
        unused[column.name] = tuple(_named(group[0]) for group in series[1:])
        for row, encoder in asked.items():
            fitting = [r for group in series[:1] for r in group if r.encoder_id == encoder]
            if fitting:
                ours[row, column.name] = choose_block(fitting, store, choice)
    by_id = {record.encoder_id: record for record in records}
    return PaperTable(
        published=published,
        choice=choice,
        encoders={row: by_id[encoder] for row, encoder in asked.items() if encoder in by_id},
        ours=columns_with_seeds_said(ours),
        unused=unused,
        recorded=tuple(sorted({record.model for record in records}, key=in_order)),
    )


def _series(column: PublishedColumn, records: Sequence[Record], paper: str) -> list[list[Record]]:
    """Comparable records that fit a column, those nearest to the paper first."""

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


def _named(record: Record) -> str:
    return f"{record.metric}, {record.facet}, protocol {record.named_protocol}"
