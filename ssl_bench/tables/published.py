"""Read tables of published results, and describe the published experiments next to ours."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ssl_bench.composition.choices import Paper, config_folder, papers, unknown_name_error
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.results import SUPERVISED, Record
from ssl_bench.tables.layer_selection import LAYER_CHOICES
from ssl_bench.tables.run_logs import RUN_MEASURES

RUN_TASK = "run"
"""Task of a column that is computed from the log of a pretraining run, not by a probe."""
DIFFERENCE = "difference"
"""Task of a column that contains the differences between rows of another column."""
LAST_BLOCK = "last"
"""Value of `PublishedColumn.choice` for columns that always show the score of the last block."""
SINGLE_BLOCK = "single"
"""Value of `probe.layers_mode` for heads that use the features of a single block."""
_COPIED_KEYS = ("name", "title", "setup", "unknown", "where", "doubts", "in_reports")
_RATE_CHOICES = {
    "miou_holdout": "learning rate chosen on held-out training images",
    "miou_oracle": "learning rate chosen on the scored images",
}


@dataclass(frozen=True)
class PublishedColumn:
    """A column of a published table.

    Attributes:
        task: Name of a probe, or "supervised" (accuracy of a supervised pretraining run), "run"
            (number from a training log) or "difference" (between rows of another column). Empty if
            ssl-bench cannot measure the column.
        dataset: Name of the dataset as in records (stored scores), or "".
        metric: Name of the metric as in records, or "".
        facets: Kinds of features that match the paper. An empty tuple allows every kind.
        num_images: Number of images in the full split, or None if unknown or if no split is scored.
            The paper is assumed to use all images, because papers do not always state this.
        probe: Overrides for the command `ssl-bench probe` that measures the column.
        layers_modes: Values of `probe.layers_mode` that match the paper, such as "single" for heads
            that use the features of a single block.
        layout: Value of `--dataset` that reads the images, if it differs from `dataset`.
        layer: Index of the block that the paper uses. A negative index counts from the last block.
            None if a block must be chosen.
        choice: How the paper chose the block: "oracle" (on the scored images), "last", or "holdout"
            if the paper does not state it.
        of: For a column of differences, the name of the column in which rows are compared.
        reference: For a column of differences, the name of the row with which each row is compared.
        is_loss: Whether a difference is a loss: the reference minus the row, instead of the row
            minus the reference.
    """

    name: str
    task: str
    dataset: str
    metric: str
    facets: tuple[str, ...]
    num_images: int | None
    probe: tuple[str, ...] = ()
    layers_modes: tuple[str, ...] = (SINGLE_BLOCK,)
    layout: str = ""
    layer: int | None = None
    choice: str = "holdout"
    of: str = ""
    reference: str = ""
    is_loss: bool = False

    def __post_init__(self) -> None:
        if self.choice not in (*LAYER_CHOICES, LAST_BLOCK):
            raise ValueError(
                f"column {self.name}: expected choice holdout, oracle or last, got {self.choice!r}"
            )
        if self.task == RUN_TASK and self.metric not in RUN_MEASURES:
            raise ValueError(
                f"column {self.name}: metric {self.metric!r} cannot be computed from a training log"
            )

    @property
    def is_probed(self) -> bool:
        """Whether `ssl-bench probe` measures the column."""
        return self.task not in ("", SUPERVISED, RUN_TASK, DIFFERENCE)

    def block(self, depth: int | None) -> int | None:
        """Return the index of the block to score in an encoder with `depth` blocks.

        Return None if the paper states no block, so that a block must be chosen. If the encoder has
        fewer blocks than the encoder of the paper, the index is clipped to the existing blocks.
        """
        if self.layer is None or depth is None:
            return self.layer
        return max(self.layer + depth, 0) if self.layer < 0 else min(self.layer, depth - 1)

    def is_measured_by(self, record: Record) -> bool:
        """Return whether a record (a stored score) measures the same quantity as this column.

        The task, metric, dataset, kind of feature and `layers_mode` must match. The protocol
        (preset of settings) and the number of images may differ.
        """
        names = (record.task, _metric_family(record.metric))
        if names != (self.task, _metric_family(self.metric)):
            return False
        # The name of a subset is its dataset and its number of images, such as DATASET-500.
        same_data = record.dataset == self.dataset or record.dataset.startswith(f"{self.dataset}-")
        if record.settings.get("layers_mode", SINGLE_BLOCK) not in self.layers_modes:
            return False
        return same_data and (not self.facets or record.facet in self.facets)


@dataclass(frozen=True)
class PublishedTable:
    """A published table with encoders as rows and measurements as columns.

    Attributes:
        paper: Name of the paper in `configs/papers`.
        name: Name of the table, such as "table2", which is unique within the paper.
        setup: Description of the experiment, according to the paper.
        unknown: Facts about the experiment that the paper does not state.
        source: Title of the paper, venue, and number of the table.
        values: Published values by (row, column), in percent unless the metric has another unit.
            Empty cells have no entry.
        spreads: Published numbers after the sign ±, by (row, column), in the unit of the value.
        where: Number of the table in the paper, such as "table B.9".
        doubts: Reason why a published value may be wrong, such as a contradiction in the paper, or
            "".
        runs: For each row name, our pretraining run that corresponds to it, as NAME or NAME@EPOCH.
        in_reports: Whether reports show the published values next to our scores.
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
        """Return the published value of a cell as text, or "-" if the cell is empty."""
        if (row, column) not in self.values:
            return "-"
        spread = self.spreads.get((row, column))
        return f"{self.values[row, column]}" + ("" if spread is None else f" ± {spread}")


@dataclass(frozen=True)
class PublishedValue:
    """A published value that a report shows next to one of our scores.

    Attributes:
        dataset: Name of the dataset of the column.
        value: The published value, in the unit of our score.
        source: Title of the paper, venue, and number of the table.
        experiment_notes: Description of the published experiment and of our experiment.
    """

    table: str
    row: str
    column: str
    dataset: str
    value: float
    source: str
    experiment_notes: str


def load_published_tables() -> tuple[PublishedTable, ...]:
    """Return all published tables, read from `configs/papers`."""
    return _load_tables(config_folder())


@cache
def _load_tables(folder: Path) -> tuple[PublishedTable, ...]:
    tables = tuple(_parse_table(paper, table) for paper in papers(folder) for table in paper.tables)
    names = [(table.paper, table.name) for table in tables]
    if len(set(names)) < len(names):
        raise ValueError(f"the tables of a paper must have different names, got {names}")
    return tables


def load_published_table(name: str) -> PublishedTable:
    """Return the published table with a name such as "table2" or "cutting_the_skip/table2".

    Raises:
        ConfigurationError: No published table has this name, or tables of several papers have it.
    """
    known = {f"{table.paper}/{table.name}": table for table in load_published_tables()}
    matches = {full: table for full, table in known.items() if name in (full, table.name)}
    if not matches:
        short = [table.name for table in load_published_tables()]
        message = f"no published table {name!r}"
        raise unknown_name_error(message, name, {*short, *known}, hint=("--paper", "{near}"))
    if len(matches) > 1:
        ways = [("--paper", full) for full in matches]
        raise ConfigurationError(
            f"{len(matches)} papers have a table {name!r}. Add the name of the paper",
            hint=join_alternatives(*ways),
        )
    return next(iter(matches.values()))


def find_published_values(record: Record) -> tuple[PublishedValue, ...]:
    """Return all published values that measure the same quantity as a record (a stored score)."""
    return tuple(
        PublishedValue(
            table=table.name,
            row=row,
            column=column.name,
            dataset=column.dataset,
            value=table.values[row, column.name],
            source=table.source,
            experiment_notes=describe_experiments(table, column, record),
        )
        for table in load_published_tables()
        for column in table.columns
        if table.in_reports and column.is_measured_by(record)
        for row in table.rows
        if (row, column.name) in table.values
    )


def describe_experiments(table: PublishedTable, column: PublishedColumn, record: Record) -> str:
    images = "" if column.num_images is None else f", {column.num_images:,} images if all were used"
    doubts = f". Doubtful: {table.doubts}" if table.doubts else ""
    return (
        f"published: {table.setup}{images}. Not stated: {table.unknown}{doubts}. "
        f"Here: {describe_settings(record)}"
    )


def describe_settings(record: Record) -> str:
    """Describe how a record (a stored score) was computed, by settings that papers usually report.

    An example is "4 images of voc2012 trainval, protocol reference, key features, 224 px".
    """
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


def _metric_family(metric: str) -> str:
    """Return the name of a metric without a suffix such as "_holdout" or the number of neighbours.

    For example, "miou_holdout" becomes "miou", and "top1_k20" becomes "top1_k".
    """
    if metric.startswith("miou"):
        return "miou"
    return re.sub(r"_k\d+$", "_k", metric)


def _parse_table(paper: Paper, values: Mapping[str, Any]) -> PublishedTable:
    columns = tuple(map(_parse_column, values["columns"]))
    column_names = {column.name for column in columns}
    rows = tuple(row["name"] for row in values["rows"])
    if len(set(rows)) < len(rows) or len(column_names) < len(columns):
        raise ValueError(f"{values['name']}: two rows or two columns have the same name")
    for column in columns:
        if column.task == DIFFERENCE and not (
            column.reference in rows and column.of in column_names
        ):
            raise ValueError(
                f"column {column.name}: `reference` must be the name of a row of {values['name']}, "
                "and `of` must be the name of a column"
            )

    def parse_cells(key: str) -> dict[tuple[str, str], float]:
        return {
            (row["name"], column.name): float(value)
            for row in values["rows"]
            if key in row
            # Use strict, because a missing number would shift all later numbers of the row.
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
