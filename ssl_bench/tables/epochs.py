"""Scores over the course of training, block by block, from records of encoders that a run kept."""

import math
from collections import defaultdict
from collections.abc import Sequence

from ssl_bench.errors import DataError
from ssl_bench.results import Record
from ssl_bench.tables.depth import DepthTable
from ssl_bench.tables.series import comparable_groups, differences, title


def epoch_tables(records: Sequence[Record]) -> list[DepthTable]:
    """One table a run and metric: epochs as rows, blocks as columns.

    `RUN@100`, `RUN@200` and `RUN`, its last encoder, are one run.

    Raises:
        DataError: no run has records of two epochs, or two runs have the same name.
    """
    groups = comparable_groups(records)
    for group in groups:
        for run, those in by_run(group).items():
            require_one_encoder_an_epoch(run, those)
    tables = [
        epoch_table(those, f"{title(those[0])}{differing}, {run}")
        for group, differing in zip(groups, differences(groups), strict=True)
        for run, those in followed_runs(group).items()
    ]
    if not tables:
        raise DataError(
            "no run has records of two epochs or more; pretrain with train.keep_epochs=[100,200] "
            "or train.keep_every=25, and probe RUN, RUN@100 and so on"
        )
    return tables


def epoch_table(records: Sequence[Record], heading: str) -> DepthTable:
    """Of one run, whose records are among those of `followed_runs`."""
    return DepthTable.of(
        records, heading, lambda record: (epoch_of(record), f"block {record.layer}"), "epoch"
    )


def followed_runs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Those of `by_run` that have records of two epochs or more, ordered by name."""
    return {
        run: those
        for run, those in sorted(by_run(records).items())
        if len({epoch_of(record) for record in those}) > 1
    }


def by_run(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of encoders whose epoch is known, by the name of their run."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        epoch = record.details.get("epoch")
        if isinstance(epoch, int | float) and math.isfinite(epoch):
            runs[record.model.partition("@")[0]].append(record)
    return runs


def require_one_encoder_an_epoch(run: str, records: Sequence[Record]) -> None:
    """Two runs of the same name are no course of one.

    Raises:
        DataError: two encoders are of the same epoch.
    """
    encoders: dict[float, str] = {}
    for record in records:
        epoch = epoch_of(record)
        if encoders.setdefault(epoch, record.encoder_id) != record.encoder_id:
            raise DataError(
                f"two encoders of runs called {run} are of epoch {epoch:g}; choose one with "
                "--out, or rename a run folder and probe it again"
            )


def epoch_of(record: Record) -> float:
    """How long the encoder was trained; of a record of `by_run`."""
    return float(record.details["epoch"])
