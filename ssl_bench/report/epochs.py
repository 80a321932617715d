"""The page that follows scores over the epochs of runs, one curve a block."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ssl_bench.errors import DataError
from ssl_bench.report.drawing.curves import Chart, Curve, Reference, Spot, draw
from ssl_bench.report.model import MOST_DRAWN, Panel, Point, best_of, points_of, said_units
from ssl_bench.report.pages import Filter, filters_of, spot_of
from ssl_bench.results import Record
from ssl_bench.tables.epochs import epoch_of, followed_runs, require_one_encoder_an_epoch

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

    def curves(self) -> tuple[Curve, ...]:
        """One a block."""
        return tuple(
            Curve(f"block {layer}", block_style(layer, self.depth), layer, self._spots(layer))
            for layer in self.layers
        )

    def _spots(self, layer: int) -> tuple[Spot, ...]:
        return tuple(
            spot_of(point, epoch, f"{self.run}, block {layer}, {self.along} {epoch:g}")
            for epoch in self.epochs
            if (point := self.at(epoch, layer)) is not None
        )


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

    def drawn(self) -> tuple[tuple[Course, Chart], ...]:
        """The shown courses, all on the same axes."""
        shown = self.shown
        curves = {course.run: course.curves() for course in shown}
        every = [curve for those in curves.values() for curve in those]
        unit, said = self.panel.unit, self.panel.measured
        floors = [Reference(*one) for one in self.panel.baselines]
        drawn = partial(draw, unit=unit, measured=said, along="epoch", beside=every, floors=floors)
        return tuple((course, drawn(curves[course.run])) for course in shown)


@dataclass(frozen=True)
class EpochsPage:
    """Scores over epochs, panel by panel."""

    followed: tuple[PanelCourses, ...]

    @property
    def blocks(self) -> tuple[Curve, ...]:
        """A curve of each, of the deepest encoder that has it."""
        courses = [course for one in self.followed for course in one.shown]
        by_depth = sorted(courses, key=lambda course: course.depth)
        found = {curve.number: curve for course in by_depth for curve in course.curves()}
        return tuple(curve for _, curve in sorted(found.items()))

    @property
    def filters(self) -> tuple[Filter, ...]:
        return filters_of([one.panel for one in self.followed])

    @property
    def units(self) -> str:
        return said_units([one.panel for one in self.followed])

    @property
    def has_arbitrary(self) -> bool:
        return any(one.panel.has_arbitrary for one in self.followed)


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
            courses.append(_course(run, {numbers[id(record)]: record for record in those}))
    return PanelCourses(panel, tuple(courses), tuple(ambiguous))


def _course(run: str, members: Mapping[int, Record]) -> Course:
    cells: dict[tuple[float, int], dict[int, Record]] = defaultdict(dict)
    for number, record in members.items():
        cells[epoch_of(record), record.layer][number] = record
    depth = max(record.depth for record in members.values())
    return Course(run, depth, points_of(cells))
