"""The page that says which block survives noise: scores over severities, one curve a block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssl_bench.report.drawing.curves import Chart, Reference, draw
from ssl_bench.report.epochs import Course
from ssl_bench.report.model import Point, points_of
from ssl_bench.report.overview.headlines import chosen_metric
from ssl_bench.results import Record
from ssl_bench.tables.notes import baselines
from ssl_bench.tables.severities import SeverityTable, severity_tables


@dataclass(frozen=True)
class CorruptedScores:
    """One encoder under one corruption.

    Attributes:
        number: From 0; names its place in the page.
        course: By severity and block, 0 for images as they are.
    """

    number: int
    table: SeverityTable
    course: Course

    @property
    def record(self) -> Record:
        """One of those behind the values."""
        return next(iter(self.table.entries.values())).records[0]

    @property
    def survivors(self) -> tuple[int, ...]:
        """The blocks that lose the smallest share of their clean score."""
        return tuple(sorted(self.table.survivors))

    def drop(self, layer: int) -> str:
        """What a block loses, as the table of the command line says it."""
        lost = self.table.drop(layer)
        return "" if lost is None else f"{lost:.1f}"

    def at(self, severity: int, layer: int) -> Point | None:
        return self.course.at(float(severity), layer)

    def chart(self) -> Chart:
        """A curve a block."""
        records = [one for entry in self.table.entries.values() for one in entry.records]
        floors = [
            Reference(f"{answer} {values[0]:.1f}", values[0])
            for answer, values in baselines(records).items()
        ]
        unit, metric = self.record.unit, self.record.metric
        said = f"{metric} ({unit})" if unit else metric
        return draw(self.course.curves(), unit=unit, measured=said, along="severity", floors=floors)


@dataclass(frozen=True)
class SeveritiesPage:
    """Scores of corrupted images, of one metric a task."""

    followed: tuple[CorruptedScores, ...]


def corrupted_scores(records: Sequence[Record]) -> tuple[CorruptedScores, ...]:
    """Of each task that was asked about corrupted images the metric that stands for it."""
    numbers = {id(record): number for number, record in enumerate(records)}
    some = [record for record in records if record.corrupted is not None]
    if not some:
        return ()
    tasks = {record.task for record in some}
    metrics = {
        task: chosen_metric([(one.metric, one.is_ranked) for one in some if one.task == task])
        for task in tasks
    }
    asked = [one for one in records if metrics.get(one.task) == one.metric]
    tables = severity_tables(asked)
    return tuple(
        CorruptedScores(
            number,
            table,
            Course(table.model, _depth(table), _points(table, numbers), along="severity"),
        )
        for number, table in enumerate(tables)
    )


def _depth(table: SeverityTable) -> int:
    return max(one.depth for entry in table.entries.values() for one in entry.records)


def _points(table: SeverityTable, numbers: Mapping[int, int]) -> dict[tuple[float, int], Point]:
    return points_of(
        {
            (float(severity), layer): {numbers[id(one)]: one for one in entry.records}
            for (layer, severity), entry in table.entries.items()
        }
    )
