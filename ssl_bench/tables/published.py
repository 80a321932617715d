"""Published values, and how the experiments behind them differ from a record of this suite."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ssl_bench.composition.choices import Paper, config_folder, papers, unknown_name_error
from ssl_bench.results import SUPERVISED, Record
from ssl_bench.tables.layer_selection import CHOICES
from ssl_bench.tables.run_logs import RUN_MEASURES

RUN = "run"
"""Task of a column that is read from the log of a run, in place of a record."""
DIFFERENCE = "difference"
"""Task of a column that holds differences between two rows of another column."""
LAST = "last"
"""Choice of the last block, in a column whose number of a block counts all blocks up to it."""
SINGLE = "single"
_AS_THEY_STAND = ("name", "title", "setup", "unknown", "where", "doubts", "in_reports")
_CHOSEN_BY = {
    "miou_holdout": "learning rate chosen on held-out training images",
    "miou_oracle": "learning rate chosen on the scored images",
}


@dataclass(frozen=True)
class PublishedColumn:
    """What a published column measures.

    Attributes:
        task: Name of this suite's probe, "supervised", "run" or "difference"; empty where this
            suite measures no such thing.
        dataset: Name of its dataset; empty where there is none.
        metric: Name in its records; empty where there is none.
        facets: Of records that measure the same kind of feature; any if there are none.
        layers_modes: How many blocks a head sees there: one, unless something else is said.
        num_images: Of the usual whole split, which papers do not always name; None for times.
        probe: Overrides with which the probe asks the column's question.
        layout: Name of the dataset component that reads the images, if that is another.
        layer: The block that the column is of, negative ones from the last; None for a chosen one.
        choice: How the paper chose the block where several were probed: "oracle" on the scored
            images, "holdout" where it does not say, or "last".
        of: The column whose rows are subtracted, for the task "difference".
        reference: The row that others are subtracted from, or that is subtracted from them.
        is_loss: Whether the others are subtracted from the reference.
    """

    name: str
    task: str
    dataset: str
    metric: str
    facets: tuple[str, ...]
    num_images: int | None
    probe: tuple[str, ...] = ()
    layers_modes: tuple[str, ...] = (SINGLE,)
    layout: str = ""
    layer: int | None = None
    choice: str = "holdout"
    of: str = ""
    reference: str = ""
    is_loss: bool = False

    def __post_init__(self) -> None:
        if self.choice not in (*CHOICES, LAST):
            raise ValueError(f"column {self.name}: unknown choice of the block {self.choice!r}")
        if self.task == RUN and self.metric not in RUN_MEASURES:
            raise ValueError(f"column {self.name}: no run measures {self.metric!r}")

    @property
    def is_probed(self) -> bool:
        """Whether a probe fills it, and not a run."""
        return self.task not in ("", SUPERVISED, RUN, DIFFERENCE)

    def block(self, depth: int | None) -> int | None:
        """Return the number of its block in an encoder of some depth; None for a chosen one.

        A shallower encoder than the paper's has its last block there.
        """
        if self.layer is None or depth is None:
            return self.layer
        return max(self.layer + depth, 0) if self.layer < 0 else min(self.layer, depth - 1)

    def is_measured_by(self, record: Record) -> bool:
        """Whether a record, of whatever protocol, answers the same question on the same data."""
        names = (record.task, _family(record.metric))
        if names != (self.task, _family(self.metric)):
            return False
        # A dataset of fewer images than published carries their number after a dash.
        same_data = record.dataset == self.dataset or record.dataset.startswith(f"{self.dataset}-")
        if record.settings.get("layers_mode", SINGLE) not in self.layers_modes:
            return False
        return same_data and (not self.facets or record.facet in self.facets)


@dataclass(frozen=True)
class PublishedTable:
    """A published table; its rows are encoders, its columns what is measured of them.

    Attributes:
        name: Unique among all papers, such as "table2".
        setup: What the paper says of the experiment.
        unknown: What it leaves open.
        doubts: What makes a value doubtful, such as a text that contradicts it; empty for none.
        source: Paper, venue and number of the table.
        where: That number, such as "table B.9".
        values: By row and column, in percent unless the metric says otherwise; none for a cell that
            is empty there.
        spreads: What is printed behind them as ±, in the same unit, where anything is.
        runs: Which experiment stands for a row here, by row, as NAME or NAME@EPOCH.
        in_reports: Whether its values stand beside records that nobody laid there; not where
            hundreds of variants would hide the records.
    """

    paper: str
    name: str
    title: str
    setup: str
    unknown: str
    source: str
    rows: tuple[str, ...]
    columns: tuple[PublishedColumn, ...]
    values: dict[tuple[str, str], float]
    spreads: Mapping[tuple[str, str], float] = field(default_factory=dict)
    where: str = ""
    doubts: str = ""
    runs: Mapping[str, str] = field(default_factory=dict)
    in_reports: bool = True

    def cell(self, row: str, column: str) -> str:
        """A cell as text, "-" where nothing is published."""
        if (row, column) not in self.values:
            return "-"
        spread = self.spreads.get((row, column))
        return f"{self.values[row, column]}" + ("" if spread is None else f" ± {spread}")


@dataclass(frozen=True)
class PublishedValue:
    """One cell of a published table that may stand beside a record, never as the same experiment.

    Attributes:
        differs: One sentence: what is known of the published experiment, and of the record.
    """

    table: str
    row: str
    column: str
    dataset: str
    value: float
    source: str
    differs: str


def load_published_tables() -> tuple[PublishedTable, ...]:
    """All published tables, from the files in `configs/papers`."""
    return _tables(config_folder())


@cache
def _tables(folder: Path) -> tuple[PublishedTable, ...]:
    tables = tuple(_table(paper, table) for paper in papers(folder) for table in paper.tables)
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ValueError(f"expected every published table to have its own name, got {names}")
    return tables


def load_published_table(name: str) -> PublishedTable:
    """A table by its name, such as "table2" or "cutting_the_skip:table2".

    Raises:
        ConfigurationError: there is none of this name.
    """
    known = {f"{table.paper}:{table.name}": table for table in load_published_tables()}
    found = [table for full, table in known.items() if name in (full, table.name)]
    if not found:
        short = [table.name for table in load_published_tables()]
        message = f"no published table {name!r}"
        raise unknown_name_error(message, name, {*short, *known}, hint=("--paper", "{near}"))
    return found[0]


def find_published_values(record: Record) -> tuple[PublishedValue, ...]:
    """The published values of the task, dataset and metric of a record, whatever its protocol."""
    return tuple(
        PublishedValue(
            table=table.name,
            row=row,
            column=column.name,
            dataset=column.dataset,
            value=table.values[row, column.name],
            source=table.source,
            differs=describe_experiments(table, column, record),
        )
        for table in load_published_tables()
        for column in table.columns
        if table.in_reports and column.is_measured_by(record)
        for row in table.rows
        if (row, column.name) in table.values
    )


def describe_experiments(table: PublishedTable, column: PublishedColumn, record: Record) -> str:
    """One sentence on both experiments; it claims for none of them to be the other."""
    images = "" if column.num_images is None else f", {column.num_images:,} images if all were used"
    doubts = f", doubtful: {table.doubts}" if table.doubts else ""
    return (
        f"published: {table.setup}{images}, not stated: {table.unknown}{doubts}; "
        f"here: {settings_of(record)}"
    )


def settings_of(record: Record) -> str:
    """What was measured here, in words that compare with those of a paper."""
    settings = record.settings
    words = [
        f"{record.num_images:,} images of {record.dataset} {record.split}",
        f"protocol {record.protocol}",
        f"{record.facet} features",
    ]
    if record.task == SUPERVISED:
        words[-1] = f"its own head after {record.details.get('training', 'training')}"
    if size := settings.get("image_size") or record.details.get("image_size"):
        words.append(f"{size} px")
    if record.trained_on is not None:
        words.append(f"trained on {record.trained_on}")
    if settings.get("epochs"):
        words.append(f"{settings['epochs']} epochs of the head")
    if settings.get("train_images"):
        words.append(f"at most {settings['train_images']} training images")
    return ", ".join([*words, *filter(None, [_CHOSEN_BY.get(record.metric)])])


def _family(metric: str) -> str:
    """Return the name that variants of a metric share: of mean IoUs, of k-NN by any neighbours."""
    if metric.startswith("miou"):
        return "miou"
    return re.sub(r"_k\d+$", "_k", metric)


def _table(paper: Paper, told: Mapping[str, Any]) -> PublishedTable:
    columns = tuple(map(_column, told["columns"]))
    names = tuple(row["name"] for row in told["rows"])
    if len(set(names)) < len(names) or len({c.name for c in columns}) < len(columns):
        raise ValueError(f"rows or columns of {told['name']} share a name")
    for column in columns:
        if column.task == DIFFERENCE and not (
            column.reference in names and column.of in {c.name for c in columns}
        ):
            raise ValueError(f"column {column.name} expects a row and a column of {told['name']}")

    def cells(key: str) -> dict[tuple[str, str], float]:
        return {
            (row["name"], column.name): float(value)
            for row in told["rows"]
            if key in row
            # Strict: a row with a number too many or too few would shift all that follow.
            for column, value in zip(columns, row[key], strict=True)
            if value is not None
        }

    return PublishedTable(
        paper=paper.name,
        source=f"{paper.title}, {paper.reference}, {told['where']}",
        rows=names,
        columns=columns,
        values=cells("values"),
        spreads=cells("spreads"),
        runs={row["name"]: row["run"] for row in told["rows"] if "run" in row},
        **{key: told[key] for key in _AS_THEY_STAND if key in told},
    )


def _column(told: Mapping[str, Any]) -> PublishedColumn:
    def plain(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    values = {key: plain(value) for key, value in told.items()}
    return PublishedColumn(num_images=values.pop("images"), **values)
