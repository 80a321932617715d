"""Ours beside a published table, with every known difference between the experiments."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_bench.results import SUPERVISED, Record, ResultStore
from ssl_bench.system.paths import natural_sort_key
from ssl_bench.tables.entries import baseline_note, comparable_groups, dagger_meaning, provenance
from ssl_bench.tables.layer_selection import (
    NO_CHOICE_MARK,
    LayerSelection,
    choice_notes,
    choose_block,
    columns_with_seeds_said,
)
from ssl_bench.tables.published import (
    DIFFERENCE,
    LAST,
    RUN,
    PublishedColumn,
    PublishedTable,
    settings_of,
)
from ssl_bench.tables.run_logs import RUN_MEASURES, measured_by_run
from ssl_bench.tables.sheets import Cell, Sheet


@dataclass(frozen=True)
class PaperTable:
    """A published table and, in the cells where there is one, a number of this suite.

    Attributes:
        choice: How the block is chosen in every column; None for each column's own way.
        encoders: A record of the encoder that stands for a published row, by row.
        ours: By row and column; None where no held-out choice was possible.
        derived: By row and column the numbers that no record holds: measures of the runs, and
            differences between rows.
        unused: Names of other series that fit a column, by column.
        recorded: Names of the encoders that could be given for a row.
    """

    published: PublishedTable
    choice: str | None
    encoders: dict[str, Record]
    ours: dict[tuple[str, str], LayerSelection | None]
    derived: dict[tuple[str, str], float]
    unused: dict[str, tuple[str, ...]]
    recorded: tuple[str, ...]

    def sheet(self, style: str) -> Sheet:
        """Published values with ours behind them; nothing is ranked."""
        del style
        rows = [
            (Cell(row), *(self._word(row, column) for column in self.published.columns))
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

    def _word(self, row: str, column: PublishedColumn) -> Cell:
        value, place = self.published.cell(row, column.name), (row, column.name)
        if place in self.derived:
            digits = RUN_MEASURES[column.metric].digits if column.task == RUN else ".1f"
            return Cell(f"{value} | {self.derived[place]:{digits}}")
        if place not in self.ours:
            return Cell(f"{value} | -")
        chosen = self.ours[place]
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
            if any(name == column.name for _, name in self.derived):
                notes.append(f"{column.name}: here: {_derivation(column)}")
                continue
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
        notes += self._choice_notes()
        if chosen:
            notes.append(provenance(records))
        filled = {*self.encoders, *(row for row, _ in self.derived)}
        takes_records = any(c.task not in ("", RUN) for c in published.columns)
        if takes_records and (rows := [row for row in published.rows if row not in filled]):
            notes.append(
                f"no encoder for {', '.join(map(repr, rows))}; give one with --as 'ROW'=CHECKPOINT,"
                f" recorded here: {', '.join(self.recorded) or 'none'}"
            )
        if strange := [column.name for column in without if not column.task]:
            notes.append(f"this suite has no probe for: {', '.join(strange)}")
        wanted = [
            _how_to_measure(column)
            for column in without
            if column.task and (self.encoders or column.task == RUN)
        ]
        if wanted:
            notes.append(f"no record of these encoders for: {', '.join(wanted)}")
        return notes

    def _marks(self) -> tuple[str, ...]:
        chosen = [one for one in self.ours.values() if one is not None]
        lacking = NO_CHOICE_MARK if None in self.ours.values() else ""
        dagger = dagger_meaning(one.entry.arbitrary for one in chosen)
        return tuple(filter(None, (lacking, dagger)))

    def choices(self) -> dict[str, list[str]]:
        """Return the columns in which the block is chosen in each way."""
        found = dict[str, list[str]]()
        for column in self.published.columns:
            found.setdefault(_choice(column, self.choice), []).append(column.name)
        return found

    def _choice_notes(self) -> Iterator[str]:
        """Name the columns where a table has several ways of choosing."""
        several = len(self.choices()) > 1
        for choice, columns in self.choices().items():
            own = {place: one for place, one in self.ours.items() if place[1] in columns}
            found = choice_notes(own, choice) if choice != LAST else []
            if choice == LAST and any(own.values()):
                found = ["block: the last one (@), whose number counts all blocks"]
            yield from (f"{', '.join(columns)}: {note}" if several else note for note in found)

    def _records(self, row: str, column: str) -> Sequence[Record]:
        """Behind our number in a cell."""
        chosen = self.ours.get((row, column))
        return () if chosen is None else chosen.entry.records

    def _cells(self) -> Iterator[tuple[dict[str, Any], LayerSelection | float | None]]:
        """Give what is published, and ours."""
        for row, column in itertools.product(self.published.rows, self.published.columns):
            place = (row, column.name)
            told = {
                "row": row,
                "column": column.name,
                "published": self.published.values.get(place),
                "published_spread": self.published.spreads.get(place),
            }
            yield told, self.derived.get(place, self.ours.get(place))

    def csv_rows(self) -> list[dict[str, Any]]:
        """A published cell a row, ours empty where there is none."""
        source = {"source": self.published.source}

        def fields(ours: LayerSelection | float | None) -> dict[str, Any]:
            if isinstance(ours, LayerSelection):
                return ours.csv_fields()
            return {} if ours is None else {"value": ours}

        return [{**told, **source, **fields(ours)} for told, ours in self._cells()]

    def as_json(self) -> dict[str, Any]:
        """Published cells, ours with what is needed to trust them, and what differs."""

        def fields(ours: LayerSelection | float | None) -> dict[str, Any] | None:
            if isinstance(ours, LayerSelection):
                return {"settings": settings_of(ours.entry.records[0]), **ours.as_json()}
            return None if ours is None else {"value": ours}

        cells = [{**told, "ours": fields(ours)} for told, ours in self._cells()]
        return {
            "kind": "published",
            "paper": self.published.paper,
            "table": self.published.name,
            "source": self.published.source,
            "layer_selection": ", ".join(self.choices()),
            "cells": cells,
            "notes": [*self.notes(), *self._marks()],
        }


def _choice(column: PublishedColumn, choice: str | None) -> str:
    """Return how the block of a column is chosen, where `choice` asks for one way or for none."""
    return column.choice if choice is None or column.choice == LAST else choice


def _derivation(column: PublishedColumn) -> str:
    """Say where a number comes from that no record holds."""
    if column.task == RUN:
        return RUN_MEASURES[column.metric].words
    kind = "less than" if column.is_loss else "more than"
    return f"{column.of}, points {kind} {column.reference!r}"


def _how_to_measure(column: PublishedColumn) -> str:
    if column.task in (RUN, DIFFERENCE):
        return f"{column.name} ({_derivation(column)}; `ssl-bench reproduce` fills it)"
    if column.task == SUPERVISED:
        return (
            f"{column.name} (the head of a supervised run itself: `ssl-bench pretrain ... "
            f"monitor.results=DIR`, images in a folder named {column.dataset})"
        )
    command = ["--task", column.task, "--dataset", column.layout or column.dataset, *column.probe]
    command += [] if column.layer is None else ["--layer", str(column.layer)]
    return f"{column.name} ({' '.join(command)}, facet {' or '.join(column.facets)})"


def paper_table(
    published: PublishedTable,
    records: Sequence[Record],
    store: ResultStore,
    *,
    encoders: Mapping[str, str],
    choice: str | None = None,
    runs: Mapping[str, Path] | None = None,
) -> PaperTable:
    """Lay records beside a published table.

    Args:
        published: Its rows and columns are kept.
        records: Those that may stand there.
        store: Holds the images' contributions.
        encoders: `Record.encoder_id` of what stands for a row, by row.
        choice: How a block is chosen where several were probed; see `choose_block`. None for the
            way of each column.
        runs: Run folders, by row.
    """
    asked = {row: encoders[row] for row in published.rows if row in encoders}
    candidates = [record for record in records if record.encoder_id in asked.values()]
    ours: dict[tuple[str, str], LayerSelection | None] = {}
    unused = {}
    for column in published.columns:
        series = _series(column, candidates, published.paper)
        unused[column.name] = tuple(
            f"{one.metric}, {one.facet}, protocol {one.protocol_label}" for one, *_ in series[1:]
        )
        for row, encoder in asked.items():
            fitting = [
                record
                for record in (series[0] if series else ())
                if record.encoder_id == encoder and _is_of_block(column, record)
            ]
            if fitting:
                own = _choice(column, choice)
                ours[row, column.name] = choose_block(fitting, store, own)
    by_id = {record.encoder_id: record for record in records}
    return PaperTable(
        published=published,
        choice=choice,
        encoders={row: by_id[encoder] for row, encoder in asked.items() if encoder in by_id},
        ours=columns_with_seeds_said(ours),
        derived=_derived(published, ours, runs or {}),
        unused=unused,
        recorded=tuple(sorted({record.model for record in records}, key=natural_sort_key)),
    )


def _is_of_block(column: PublishedColumn, record: Record) -> bool:
    """Say whether a record is of the block that a column is of, or one to choose from."""
    wanted = record.depth - 1 if column.choice == LAST else column.block(record.depth)
    return wanted in (None, record.layer)


def _derived(
    published: PublishedTable,
    ours: Mapping[tuple[str, str], LayerSelection | None],
    runs: Mapping[str, Path],
) -> dict[tuple[str, str], float]:
    """Return the numbers that no record holds, by row and column, as far as they are known."""
    found: dict[tuple[str, str], float] = {}
    for column in published.columns:
        known = {
            row: one.entry.value for (row, name), one in ours.items() if one and name == column.of
        }
        for row in published.rows:
            value = None
            if column.task == RUN and row in runs:
                value = measured_by_run(column.metric, runs[row])
            elif column.task == DIFFERENCE and {row, column.reference} <= known.keys():
                value = known[row] - known[column.reference]
                value = 0.0 - value if column.is_loss else value
            if value is not None:
                found[row, column.name] = value
    return found


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
