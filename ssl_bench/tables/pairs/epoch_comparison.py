"""Is one run better than the other, and from which epoch on? Paired over images, block by block."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.epochs import by_run, epoch_of, require_one_encoder_an_epoch
from ssl_bench.tables.pairs.comparison import Comparison, paired_groups, rows_of
from ssl_bench.tables.printing.sheets import Cell, Sheet


@dataclass(frozen=True)
class EpochComparison:
    """Differences of one metric between two runs, over blocks and epochs.

    Attributes:
        by_epoch: Of blocks alone, in the order of the epochs, at least one.
    """

    by_epoch: Mapping[float, Comparison]

    @property
    def record(self) -> Record:
        """One of those that were compared."""
        return next(iter(self.by_epoch.values())).record

    def sheet(self, style: str) -> Sheet:
        """The epochs of a block below one another."""
        sheets = {epoch: one.sheet(style) for epoch, one in self.by_epoch.items()}
        whole = next(iter(sheets.values()))
        rows = [
            (row[0], Cell(f"{epoch:g}"), *row[1:])
            for epoch, sheet in sheets.items()
            for row in sheet.rows
        ]
        return replace(
            whole,
            head=(whole.head[0], "epoch", *whole.head[1:]),
            # Stable: the epochs stay in their order.
            rows=tuple(sorted(rows, key=lambda row: int(row[0].text))),
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        """A difference a row, with its epoch."""
        return [
            {"epoch": epoch, **row}
            for epoch, comparison in self.by_epoch.items()
            for row in comparison.csv_rows()
        ]

    def as_json(self) -> dict[str, Any]:
        """A comparison an epoch."""
        epochs = [{"epoch": epoch, **one.as_json()} for epoch, one in self.by_epoch.items()]
        return {"kind": "comparison_over_epochs", "epochs": epochs}


def epoch_comparisons(
    store: ResultStore, records: Sequence[Record], runs: tuple[str, str]
) -> list[EpochComparison]:
    """First run minus second at every epoch of which both have a scored encoder.

    Args:
        store: Holds the images' contributions.
        records: Those to look at.
        runs: Their names: `RUN` for `RUN@100` and the like.

    Raises:
        DataError: a run has two encoders of an epoch, or nothing can be compared.
    """
    found = [
        EpochComparison(compared)
        for group in paired_groups(records)
        if (compared := dict(_at_common_epochs(store, group, runs)))
    ]
    if not found:
        known = [sorted({epoch_of(r) for r in by_run(records).get(run, [])}) for run in runs]
        told = " and ".join(
            f"{run} {', '.join(f'{epoch:g}' for epoch in epochs) or 'none'}"
            for run, epochs in zip(runs, known, strict=True)
        )
        raise DataError(
            f"nothing to compare over epochs in {store.root}: no task was scored image by image "
            "for both runs at a common epoch on the same images with the same settings (epochs "
            f"with records: {told}); pretrain with train.keep_epochs=[100,200] and probe "
            "RUN@100 and so on"
        )
    return found


def _at_common_epochs(
    store: ResultStore, group: Sequence[Record], runs: tuple[str, str]
) -> Iterator[tuple[float, Comparison]]:
    first, second = (_encoders(run, by_run(group).get(run, [])) for run in runs)
    for epoch in sorted(first.keys() & second.keys()):
        encoders = (first[epoch], second[epoch])
        rows = rows_of(store, group, [record.encoder_id for record in encoders])
        # Not the best block: it is another one at each epoch.
        blocks = tuple(row for row in rows if row.name.isdigit())
        if blocks:
            yield epoch, Comparison(encoders[0], blocks, runs, encoders)


def _encoders(run: str, records: Sequence[Record]) -> dict[float, Record]:
    """A record of the encoder of each epoch."""
    require_one_encoder_an_epoch(run, records)
    return {epoch_of(record): record for record in records}
