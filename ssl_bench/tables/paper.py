"""Ours beside a published table, with every known difference between the experiments."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.results import SUPERVISED, Record, ResultStore
from ssl_bench.system.paths import in_order
from ssl_bench.tables.entries import baseline_note, comparable_groups, dagger_meaning, provenance
from ssl_bench.tables.layer_selection import (
    NO_CHOICE_MARK,
    LayerSelection,
    choice_notes,
    choose_block,
    columns_with_seeds_said,
)
from ssl_bench.tables.published import PublishedColumn, PublishedTable, settings_of
from ssl_bench.tables.sheets import Cell, Sheet


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
            marks=self._marks(),
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
        chosen = [one for one in self.ours.values() if one is not None]
        records = [record for one in chosen for record in one.entry.records]
        is_of_runs = records and all(record.task == SUPERVISED for record in records)
        unknown = ", and no record of a probe knows how an encoder was pretrained"
        notes = [
            f"ours is not the same experiment in any cell{'' if is_of_runs else unknown}; "
            "what differs besides:",
            f"published: {published.setup}; not stated: {published.unknown}",
        ]
        if published.doubts:
            notes.append(f"doubtful: {published.doubts}")
        without = []
        for column in published.columns:
            used = [r for row in published.rows for r in self._records(row, column.name)]
            if not used:
                without.append(column)
                continue
            images = ""
            if column.num_images is not None:
                images = f"published on {column.num_images:,} images if all were used; "
            others, blind = "; ".join(self.unused[column.name]), baseline_note(used)
            notes.append(
                f"{column.name}: {images}here: {settings_of(used[0])}"
                f"{f'; {blind}' if blind else ''}"
                f"{f'; also recorded: {others}' if others else ''}"
            )
        for row, record in self.encoders.items():
            sha = f"sha256 {record.checkpoint_sha256[:8]}"
            notes.append(f"{row!r} here: {record.model}, {record.depth} blocks, {sha}")
        notes += choice_notes(self.ours, self.choice)
        if chosen:
            notes.append(provenance(records))
        if rows := [row for row in published.rows if row not in self.encoders]:
            notes.append(
                f"no encoder for {', '.join(map(repr, rows))}; give one with --as 'ROW'=CHECKPOINT,"
                f" recorded here: {', '.join(self.recorded) or 'none'}"
            )
        if strange := [column.name for column in without if not column.task]:
            notes.append(f"this suite has no probe for: {', '.join(strange)}")
        wanted = [_how_to_measure(column) for column in without if column.task]
        if wanted and self.encoders:
            notes.append(f"no record of these encoders for: {', '.join(wanted)}")
        return notes

    def _marks(self) -> tuple[str, ...]:
        chosen = [one for one in self.ours.values() if one is not None]
        lacking = NO_CHOICE_MARK if None in self.ours.values() else ""
        dagger = dagger_meaning(one.entry.arbitrary for one in chosen)
        return tuple(filter(None, (lacking, dagger)))

    def _records(self, row: str, column: str) -> Sequence[Record]:
        """Behind our number in a cell."""
        chosen = self.ours.get((row, column))
        return () if chosen is None else chosen.entry.records

    def _cells(self) -> Iterator[tuple[dict[str, Any], LayerSelection | None]]:
        """What is published, and ours."""
        for row, column in itertools.product(self.published.rows, self.published.columns):
            place = (row, column.name)
            told = {
                "row": row,
                "column": column.name,
                "published": self.published.values.get(place),
                "published_spread": self.published.spreads.get(place),
            }
            yield told, self.ours.get(place)

    def csv_rows(self) -> list[dict[str, Any]]:
        """A published cell a row, ours empty where there is none."""
        source = {"source": self.published.source}
        return [
            {**told, **source, **({} if chosen is None else chosen.csv_fields())}
            for told, chosen in self._cells()
        ]

    def as_json(self) -> dict[str, Any]:
        """Published cells, ours with what is needed to trust them, and what differs."""
        cells = [
            {
                **told,
                "ours": None
                if chosen is None
                else {"settings": settings_of(chosen.entry.records[0]), **chosen.as_json()},
            }
            for told, chosen in self._cells()
        ]
        return {
            "kind": "published",
            "paper": self.published.paper,
            "table": self.published.name,
            "source": self.published.source,
            "layer_selection": self.choice,
            "cells": cells,
            "notes": [*self.notes(), *self._marks()],
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
        unused[column.name] = tuple(
            f"{one.metric}, {one.facet}, protocol {one.named_protocol}" for one, *_ in series[1:]
        )
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
