"""Scores over the course of training, block by block, from records of encoders that a run kept."""

import math
from collections import defaultdict
from collections.abc import Sequence

from ssl_bench.errors import DataError
from ssl_bench.results import Record
from ssl_bench.tables.depth import (
    DepthTable,
    Row,
    comparable_groups,
    difference,
    mean_entry,
    provenance,
    title,
)


def epoch_tables(records: Sequence[Record]) -> list[DepthTable]:
    """One table a run and metric: epochs as rows, blocks as columns.

    `RUN@100`, `RUN@200` and `RUN`, its last encoder, are one run.

    Raises:
        DataError: no run has records of two epochs, or two runs have the same name.
    """
    groups = comparable_groups(records)
    tables = [
        _epoch_table(those, f"{title(those[0])}{difference(group[0], groups)}, {run}")
        for group in groups
        for run, those in sorted(_by_run(group).items())
        if len({_epoch(record) for record in those}) > 1
    ]
    if not tables:
        raise DataError(
            "no run has records of two epochs or more; pretrain with train.keep_epochs=[100,200] "
            "or train.keep_every=25, and probe RUN, RUN@100 and so on"
        )
    return tables


def _by_run(records: Sequence[Record]) -> dict[str, list[Record]]:
    runs: dict[str, list[Record]] = defaultdict(list)
    encoders: dict[tuple[str, float], str] = {}
    for record in records:
        if _is_number(record.details.get("epoch")):
            run, epoch = record.model.partition("@")[0], _epoch(record)
            if encoders.setdefault((run, epoch), record.encoder_id) != record.encoder_id:
                raise DataError(
                    f"two encoders of runs called {run} are of epoch {epoch:g}; choose one with "
                    "--out, or rename a run folder and probe it again"
                )
            runs[run].append(record)
    return runs


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _epoch(record: Record) -> float:
    return float(record.details["epoch"])


def _epoch_table(records: Sequence[Record], heading: str) -> DepthTable:
    cells: dict[tuple[Row, str], list[Record]] = defaultdict(list)
    for record in records:
        cells[_epoch(record), f"block {record.layer}"].append(record)
    return DepthTable(
        title=heading,
        models=tuple(f"block {layer}" for layer in sorted({r.layer for r in records})),
        layers=tuple(sorted({_epoch(record) for record in records})),
        entries={cell: mean_entry(seeds) for cell, seeds in cells.items()},
        provenance=provenance(records),
        rows="epoch",
    )
