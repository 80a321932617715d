"""Read published tables, and describe how their experiments differ from a record."""

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
"""Task of a column that is read from the log of a run instead of a record."""
DIFFERENCE = "difference"
"""Task of a column with differences between two rows of another column."""
LAST = "last"
"""Choice of the last block, for metrics whose value at a block averages all blocks up to it."""
SINGLE = "single"
"""Heads that see the features of one block."""
_COPIED_KEYS = ("name", "title", "setup", "unknown", "where", "doubts", "in_reports")
_RATE_CHOICES = {
    "miou_holdout": "learning rate chosen on held-out training images",
    "miou_oracle": "learning rate chosen on the scored images",
}


@dataclass(frozen=True)
class PublishedColumn:
    """A column of a published table.

    Attributes:
        name: Head of the column.
        task: Name of a probe, "supervised", "run" or "difference"; empty if this suite cannot
            measure the column.
        dataset: Name of the dataset in records; empty if there is none.
        metric: Name of the metric in records; empty if there is none.
        facets: Facets that measure the same kind of feature; empty if any does.
        num_images: Number of images of the usual complete split; None for durations. Papers do not
            always state the images.
        probe: Overrides with which the probe measures the column.
        layers_modes: How many blocks a head may see, as in `probe.layers_mode`.
        layout: Name of the dataset component that reads the images, if it is not `dataset`.
        layer: The block of the column, counted from the last one if negative; None if a block is
            chosen.
        choice: How the paper chose a block: "oracle" on the scored images, "holdout" if it does
            not say, or "last".
        of: For a column of differences, the column whose rows are subtracted.
        reference: For a column of differences, the row that every other row is compared with.
        is_loss: Whether the rows are subtracted from the reference, and not the other way round.
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
            raise ValueError(f"column {self.name}: unknown choice of a block {self.choice!r}")
        if self.task == RUN and self.metric not in RUN_MEASURES:
            raise ValueError(f"column {self.name}: runs do not measure {self.metric!r}")

    @property
    def is_probed(self) -> bool:
        """Whether a probe measures the column."""
        return self.task not in ("", SUPERVISED, RUN, DIFFERENCE)

    def block(self, depth: int | None) -> int | None:
        """Return the index of the column's block in an encoder of `depth` blocks.

        If the encoder is shallower than the paper's, this is its last block. It is None if the
        block is chosen among several.
        """
        if self.layer is None or depth is None:
            return self.layer
        return max(self.layer + depth, 0) if self.layer < 0 else min(self.layer, depth - 1)

    def is_measured_by(self, record: Record) -> bool:
        """Return whether a record of any protocol has the same task, data, metric and facet."""
        names = (record.task, _family(record.metric))
        if names != (self.task, _family(self.metric)):
            return False
        # The name of a subset of a dataset ends with a dash and its number of images.
        same_data = record.dataset == self.dataset or record.dataset.startswith(f"{self.dataset}-")
        if record.settings.get("layers_mode", SINGLE) not in self.layers_modes:
            return False
        return same_data and (not self.facets or record.facet in self.facets)


@dataclass(frozen=True)
class PublishedTable:
    """A published table of encoders (rows) against measurements (columns).

    Attributes:
        paper: Name of the paper in `configs/papers`.
        name: Unique among all papers, such as "table2".
        title: What the table is about.
        setup: The experiment as the paper describes it.
        unknown: What the paper does not state.
        source: Paper, venue and number of the table.
        rows: Names of the encoders.
        values: Published values by row and column, in percent unless the metric has another unit.
            Empty cells are missing.
        spreads: Published values behind ±, in the same unit.
        where: Number of the table in the paper, such as "table B.9".
        doubts: Why a value is doubtful, such as a text that contradicts it; empty without doubts.
        runs: The experiment of this suite for a row, as NAME or NAME@EPOCH.
        in_reports: Whether reports show the values next to records. This is off for tables of
            hundreds of variants.
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
        """Return a cell as text, or "-" if nothing is published."""
        if (row, column) not in self.values:
            return "-"
        spread = self.spreads.get((row, column))
        return f"{self.values[row, column]}" + ("" if spread is None else f" ± {spread}")


@dataclass(frozen=True)
class PublishedValue:
    """A cell of a published table that is shown next to a record of another experiment.

    Attributes:
        table: Name of the table.
        value: The published value, in the unit of the record.
        source: Paper, venue and number of the table.
        differs: Description of the published experiment and of the record.
    """

    table: str
    row: str
    column: str
    dataset: str
    value: float
    source: str
    differs: str


def load_published_tables() -> tuple[PublishedTable, ...]:
    """Return all published tables, read from `configs/papers`."""
    return _load_tables(config_folder())


@cache
def _load_tables(folder: Path) -> tuple[PublishedTable, ...]:
    tables = tuple(_parse_table(paper, table) for paper in papers(folder) for table in paper.tables)
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ValueError(f"names of published tables must be unique, got {names}")
    return tables


def load_published_table(name: str) -> PublishedTable:
    """Return a table by its name, such as "table2" or "cutting_the_skip:table2".

    Raises:
        ConfigurationError: No table has this name.
    """
    known = {f"{table.paper}:{table.name}": table for table in load_published_tables()}
    matches = [table for full, table in known.items() if name in (full, table.name)]
    if not matches:
        short = [table.name for table in load_published_tables()]
        message = f"no published table {name!r}"
        raise unknown_name_error(message, name, {*short, *known}, hint=("--paper", "{near}"))
    return matches[0]


def find_published_values(record: Record) -> tuple[PublishedValue, ...]:
    """Return the published values for the task, dataset and metric of a record."""
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
    """Return what is known of a published experiment and of a record."""
    images = "" if column.num_images is None else f", {column.num_images:,} images if all were used"
    doubts = f". Doubtful: {table.doubts}" if table.doubts else ""
    return (
        f"published: {table.setup}{images}. Not stated: {table.unknown}{doubts}. "
        f"Here: {describe_settings(record)}"
    )


def describe_settings(record: Record) -> str:
    """Return the settings of a record that papers usually state."""
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
        words.append(f"head trained for {settings['epochs']} epochs")
    if settings.get("train_images"):
        words.append(f"at most {settings['train_images']} training images")
    if record.metric in _RATE_CHOICES:
        words.append(_RATE_CHOICES[record.metric])
    return ", ".join(words)


def _family(metric: str) -> str:
    """Return the common name of variants of a metric: mean IoU, or k-NN with any k."""
    if metric.startswith("miou"):
        return "miou"
    return re.sub(r"_k\d+$", "_k", metric)


def _parse_table(paper: Paper, values: Mapping[str, Any]) -> PublishedTable:
    columns = tuple(map(_parse_column, values["columns"]))
    column_names = {column.name for column in columns}
    rows = tuple(row["name"] for row in values["rows"])
    if len(set(rows)) < len(rows) or len(column_names) < len(columns):
        raise ValueError(f"names of rows and columns of {values['name']} must be unique")
    for column in columns:
        if column.task == DIFFERENCE and not (
            column.reference in rows and column.of in column_names
        ):
            raise ValueError(
                f"column {column.name}: `reference` must be a row of {values['name']}, and `of` a "
                "column"
            )

    def parse_cells(key: str) -> dict[tuple[str, str], float]:
        return {
            (row["name"], column.name): float(value)
            for row in values["rows"]
            if key in row
            # Strict, because a missing number would shift all that follow.
            for column, value in zip(columns, row[key], strict=True)
            if value is not None
        }

    return PublishedTable(
        paper=paper.name,
        source=f"{paper.title}, {paper.reference}, {values['where']}",
        rows=rows,
        columns=columns,
        values=parse_cells("values"),
        spreads=parse_cells("spreads"),
        runs={row["name"]: row["run"] for row in values["rows"] if "run" in row},
        **{key: values[key] for key in _COPIED_KEYS if key in values},
    )


def _parse_column(values: Mapping[str, Any]) -> PublishedColumn:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    return PublishedColumn(num_images=fields.pop("images"), **fields)
