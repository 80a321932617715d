"""Build tables from the logs of pretraining runs, with training steps as rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.composition.choices import require_choice
from ssl_bench.tables.depth import ScoreTable
from ssl_bench.tables.entries import ScoreEntry
from ssl_bench.tables.run_logs import (
    NUM_ROWS,
    RunLog,
    interval_ends,
    is_monitored,
    measure_unit,
    sort_measures,
)
from ssl_bench.tables.sheets import NO_VALUE

MAX_POINTS = 500
"""Largest number of points of a drawn curve."""


@dataclass(frozen=True, eq=False)
class LoggedEntry(ScoreEntry):
    """A table entry that was computed from a training log instead of stored scores.

    For a measure that is logged at every step, `value` is the mean over several steps, and `low`
    and `high` are one standard deviation below and above this mean. For a measure that is logged
    less often, `value` is the latest logged value, and `low` and `high` are None.

    Attributes:
        measure: Name of the measure, such as "loss".
    """

    measure: str = ""

    @property
    def unit(self) -> str:
        return measure_unit(self.measure)

    @property
    def is_rankable(self) -> bool:
        """Always False, because no value is marked as best in a table over steps."""
        return False

    def text(self) -> str:
        return format_logged(self.value, self.unit)


def format_logged(value: float, unit: str) -> str:
    """Return a logged value as printed text, such as "2.307", "12,345" or "71.3".

    `unit` is "%" for a percentage, or "" for a plain number.
    """
    if math.isnan(value):
        return NO_VALUE
    if unit:
        return f"{value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


@dataclass(frozen=True, kw_only=True)
class StepTable(ScoreTable):
    """A table of training logs, with steps as rows, and with measures and runs as columns.

    Each element of `columns` is a pair (measure, run name). A printed row summarises an interval of
    steps. CSV, JSON and Parquet files contain one row for each row of a log.
    """

    logs: Sequence[RunLog]

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(measure for measure, _ in self.columns))

    def column_label(self, column: Any) -> str:
        measure, run = column
        words = [measure] if len(self.measures) > 1 or len(self.logs) == 1 else []
        return " ".join([*words, *([run] if len(self.logs) > 1 else [])])

    def csv_rows(self) -> list[dict[str, Any]]:
        return [row for log in self.logs for row in self._list_rows(log)]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "steps",
            "title": self.title,
            "measures": self.measures,
            "runs": [
                {
                    "run": log.name,
                    "folder": str(log.folder),
                    "problems": log.problems,
                    "rows": self._list_rows(log),
                }
                for log in self.logs
            ],
        }

    def _list_rows(self, log: RunLog) -> list[dict[str, Any]]:
        """Return one dictionary per row of a log, with only the measures that this row contains."""
        columns = {}
        for measure in self.measures:
            if measure in log.curves:
                steps, values = log.curves[measure]
                columns[measure] = dict(zip(steps.tolist(), values.tolist(), strict=True))
        length = log.steps_per_epoch
        return [
            {"run": log.name, "step": step}
            | ({"epoch": step / length} if length else {})
            | {measure: values[step] for measure, values in columns.items() if step in values}
            for step in log.steps.tolist()
        ]

    def curves_by_measure(self) -> list[ScoreTable]:
        """Return one table per logged measure, with one column (curve) for each run."""
        tables = []
        for measure in self.measures:
            table = tabulate_logs(self.logs, [measure], MAX_POINTS, title=measure)
            entries = {(step, run): entry for (step, (_, run)), entry in table.entries.items()}
            tables.append(
                ScoreTable(
                    title=table.title,
                    row_name=table.row_name,
                    rows=table.rows,
                    columns=tuple(run for _, run in table.columns),
                    entries=entries,
                    notes=table.notes,
                    skipless=frozenset(log.name for log in self.logs if log.is_skipless),
                )
            )
        return tables


def step_table(logs: Sequence[RunLog], metric: str | None, *, has_all: bool) -> StepTable:
    """Return a table of logged measures with at most `NUM_ROWS` rows.

    Each row summarises an interval of steps.

    Args:
        logs: Logs of pretraining runs.
        metric: Names of measures, separated by commas. By default, the loss and the measures of
            monitors, which evaluate the encoder during training, are selected.
        has_all: Whether all measures are selected if `metric` is None.

    Raises:
        ConfigurationError: No run logs a measure of this name.
    """
    known = sort_measures(logs)
    if metric is not None:
        words = [word.strip() for word in metric.split(",")]
        measures = list(dict.fromkeys(require_choice("metric", word, known) for word in words))
    else:
        main = [name for name in known if name == "loss" or is_monitored(name, logs)]
        measures = known if has_all else main or known
    of_run = f" of {logs[0].name}" if len(logs) == 1 else ""
    title = f"pretraining{of_run}: {', '.join(measures)}"
    return tabulate_logs(logs, measures, NUM_ROWS, title=title)


def tabulate_logs(
    logs: Sequence[RunLog], measures: Sequence[str], max_rows: int, *, title: str
) -> StepTable:
    """Return a table of training logs, in which each row summarises an interval of steps.

    There are at most `max_rows` intervals, whose lengths differ by at most one step. `measures`
    contains the names of the logged measures to show, such as "loss".
    """
    ends = interval_ends(max(log.last_step for log in logs), max_rows)
    entries = {
        (end, (measure, log.name)): LoggedEntry(
            mean.value, mean.low, mean.high, None, (), measure=measure
        )
        for log in logs
        for measure in measures
        if measure in log.curves
        for end, mean in log.summarise_intervals(measure, ends).items()
    }
    columns = [(measure, log.name) for measure in measures for log in logs if measure in log.curves]
    return StepTable(
        title=title,
        row_name="step",
        rows=tuple(sorted({end for end, _ in entries})),
        columns=tuple(columns),
        entries=entries,
        notes=tuple(describe_rows(logs, measures, ends)),
        logs=logs,
    )


def describe_rows(
    logs: Sequence[RunLog], measures: Sequence[str], ends: Sequence[int]
) -> list[str]:
    """Return notes on how a table row summarises several steps, and on damaged logs.

    Args:
        logs: The training logs of the table.
        measures: Names of the measures in the table.
        ends: Last step of each row, in ascending order.
    """
    notes = []
    if ends[0] > 1:
        names = {True: "latest value", False: "mean"}
        for is_latest, what in names.items():
            if own := [name for name in measures if is_monitored(name, logs) == is_latest]:
                notes.append(f"{', '.join(own)}: {what} of the steps since the row above")
    return [*notes, *(f"{log.name}: {', '.join(log.problems)}" for log in logs if log.problems)]
