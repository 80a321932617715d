"""Scores of blocks over epochs of training and over severities of corruptions, a curve a block."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ssl_bench.errors import DataError
from ssl_bench.report.drawing import Chart, Curve, draw
from ssl_bench.report.model import (
    MOST_DRAWN,
    Panel,
    Point,
    best_of,
    points_of,
    spot_of,
)
from ssl_bench.results import Record
from ssl_bench.tables.epochs import epoch_of, followed_runs, require_one_encoder_an_epoch
from ssl_bench.tables.notes import baselines
from ssl_bench.tables.series import chosen_metric, metric_with_unit
from ssl_bench.tables.severities import SeverityTable, severity_tables

NUM_SHADES = 12
"""Of the blocks of an encoder in the style sheet, from the first to the last one."""


@dataclass(frozen=True)
class Course:
    """One run in one panel.

    Attributes:
        points: By epoch and block.
        depth: Blocks of the encoder, scored or not.
        along: What stands in the place of epochs.
    """

    run: str
    depth: int
    points: Mapping[tuple[float, int], Point] = field(compare=False)
    along: str = "epoch"

    @property
    def epochs(self) -> tuple[float, ...]:
        return tuple(sorted({epoch for epoch, _ in self.points}))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for _, layer in self.points}))

    def at(self, epoch: float, layer: int) -> Point | None:
        return self.points.get((epoch, layer))

    def best(self, layer: int) -> Point | None:
        """The highest point of a block."""
        return best_of(point for (_, its), point in self.points.items() if its == layer)

    @property
    def highest(self) -> float:
        """The highest value at any block and epoch; below all others where more is not better."""
        best = best_of(self.points.values())
        return -math.inf if best is None else best.value

    def curves(self) -> list[Curve]:
        """One a block."""
        curves = []
        for layer in self.layers:
            where = f"{self.run}, block {layer}, {self.along}"
            spots = [
                spot_of(point, x, f"{where} {x:g}")
                for x in self.epochs
                if (point := self.at(x, layer)) is not None
            ]
            curves.append(Curve(f"block {layer}", block_style(layer, self.depth), layer, spots))
        return curves


@dataclass(frozen=True)
class PanelCourses:
    """The runs of a panel that have records of two epochs or more.

    Attributes:
        ambiguous: Why others of its runs are not followed.
    """

    panel: Panel
    courses: tuple[Course, ...]
    ambiguous: tuple[str, ...]

    @property
    def shown(self) -> tuple[Course, ...]:
        """All courses, or of many those with the highest values, in the order of their names."""
        highest = sorted(self.courses, key=lambda course: -course.highest)[:MOST_DRAWN]
        chosen = {course.run for course in highest}
        return tuple(course for course in self.courses if course.run in chosen)

    def drawn(self) -> list[tuple[Course, Chart]]:
        """The shown courses, all on the same axes."""
        panel, curves = self.panel, [course.curves() for course in self.shown]
        axes = {"unit": panel.unit, "measured": panel.measured, "floors": panel.baselines}
        every = [curve for those in curves for curve in those]
        return [
            (course, draw(own, **axes, along="epoch", beside=every))
            for course, own in zip(self.shown, curves, strict=True)
        ]


def followed_panels(panels: Sequence[Panel], records: Sequence[Record]) -> tuple[PanelCourses, ...]:
    """The panels in which a run has records of two epochs or more."""
    found = (_panel_courses(panel, records) for panel in panels)
    return tuple(one for one in found if one.courses or one.ambiguous)


def block_style(layer: int, depth: int) -> str:
    """Classes in the style sheet: a shade by depth, dashes where blocks share one, hollow dots."""
    shades = [number * (NUM_SHADES - 1) // max(1, depth - 1) for number in range(layer + 1)]
    dashes = min(shades.count(shades[-1]) - 1, 2)
    return f"depth b{shades[-1]} d{dashes}{' hollow' if layer % 2 else ''}"


def _panel_courses(panel: Panel, records: Sequence[Record]) -> PanelCourses:
    members = {n: records[n] for line in panel.lines for p in line.points for n in p.records}
    numbers = {id(record): number for number, record in members.items()}
    courses, ambiguous = [], []
    for run, those in followed_runs(list(members.values())).items():
        try:
            require_one_encoder_an_epoch(run, those)
        except DataError as error:
            ambiguous.append(str(error))
        else:
            cells: dict[tuple[float, int], dict[int, Record]] = defaultdict(dict)
            for record in those:
                cells[epoch_of(record), record.layer][numbers[id(record)]] = record
            depth = max(record.depth for record in those)
            courses.append(Course(run, depth, points_of(cells)))
    return PanelCourses(panel, tuple(courses), tuple(ambiguous))


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

    def chart(self) -> Chart:
        """A curve a block."""
        records = [one for entry in self.table.entries.values() for one in entry.records]
        floors = [
            (f"{one} {scores[0]:.1f}", scores[0]) for one, scores in baselines(records).items()
        ]
        unit, measured = self.record.unit, metric_with_unit(self.record)
        return draw(
            self.course.curves(), unit=unit, measured=measured, along="severity", floors=floors
        )


def corrupted_scores(records: Sequence[Record]) -> tuple[CorruptedScores, ...]:
    """Of each task that was asked about corrupted images the metric that stands for it."""
    numbers = {id(record): number for number, record in enumerate(records)}
    some = [record for record in records if record.corrupted is not None]
    metrics = {
        task: chosen_metric([(one.metric, one.is_ranked) for one in some if one.task == task])
        for task in {record.task for record in some}
    }
    asked = [one for one in records if metrics.get(one.task) == one.metric]
    found = []
    for number, table in enumerate(severity_tables(asked) if some else ()):
        cells = {
            (float(severity), layer): {numbers[id(one)]: one for one in entry.records}
            for (layer, severity), entry in table.entries.items()
        }
        depth = max(one.depth for those in cells.values() for one in those.values())
        course = Course(table.model, depth, points_of(cells), along="severity")
        found.append(CorruptedScores(number, table, course))
    return tuple(found)
