"""Scores of blocks over epochs of training and over severities of corruptions, a curve a block."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.errors import DataError
from ssl_bench.report.drawing import Chart, Curve, draw
from ssl_bench.report.model import MOST_DRAWN, Panel, said_baselines, spot_of
from ssl_bench.results import Record
from ssl_bench.tables.depth import (
    Pivot,
    epoch_table,
    require_one_encoder_per_epoch,
    runs_with_several_epochs,
)
from ssl_bench.tables.entries import Entry, choose_main_metric, metric_with_unit
from ssl_bench.tables.severities import SeverityTable, severity_tables

NUM_SHADES = 12
"""Of the blocks of an encoder in the style sheet, from the first to the last one."""


@dataclass(frozen=True)
class Course:
    """One run or encoder in one panel.

    Attributes:
        table: Its blocks are columns.
    """

    name: str
    table: Pivot

    @property
    def depth(self) -> int:
        """Blocks of the encoder, scored or not."""
        return max(one.depth for _, _, entry in self.table.scores() for one in entry.records)

    @property
    def highest(self) -> float:
        """The highest value at any block and epoch; below all others if none may be best."""
        entries = [entry for _, _, entry in self.table.scores()]
        return max((one.value for one in entries if one.is_rankable), default=-math.inf)

    def at(self, row: float, block: str) -> Entry | None:
        """The score of a column."""
        return self.table.entries.get((row, block))

    def curves(self) -> list[Curve]:
        """One a block."""
        curves = []
        for block in self.table.columns:
            known = [(x, one) for x in self.table.rows if (one := self.at(x, block)) is not None]
            where = f"{self.name}, {block}, {self.table.row_name}"
            layer = known[0][1].layer
            style = block_style(layer, self.depth)
            spots = [spot_of(entry, x, f"{where} {x:g}") for x, entry in known]
            curves.append(Curve(block, style, layer, spots))
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
        chosen = {course.name for course in highest}
        return tuple(course for course in self.courses if course.name in chosen)

    def drawn(self) -> list[tuple[Course, Chart]]:
        """The shown courses, all on the same axes."""
        panel, curves = self.panel, [course.curves() for course in self.shown]
        axes = {"unit": panel.unit, "measured": panel.measured, "floors": panel.baselines}
        every = [curve for those in curves for curve in those]
        return [
            (course, draw(own, **axes, along="epoch", beside=every))
            for course, own in zip(self.shown, curves, strict=True)
        ]


def followed_panels(panels: Sequence[Panel]) -> tuple[PanelCourses, ...]:
    """The panels in which a run has records of two epochs or more."""
    found = map(_panel_courses, panels)
    return tuple(one for one in found if one.courses or one.ambiguous)


def block_style(layer: int, depth: int) -> str:
    """Classes in the style sheet: a shade by depth, dashes where blocks share one, hollow dots."""
    shades = [number * (NUM_SHADES - 1) // max(1, depth - 1) for number in range(layer + 1)]
    dashes = min(shades.count(shades[-1]) - 1, 2)
    return f"depth b{shades[-1]} d{dashes}{' hollow' if layer % 2 else ''}"


def _panel_courses(panel: Panel) -> PanelCourses:
    courses, ambiguous = [], []
    for run, those in runs_with_several_epochs(panel.records).items():
        try:
            require_one_encoder_per_epoch(run, those)
        except DataError as error:
            ambiguous.append(str(error))
        else:
            courses.append(Course(run, epoch_table(those, run)))
    return PanelCourses(panel, tuple(courses), tuple(ambiguous))


def corrupted_scores(records: Sequence[Record]) -> list[tuple[SeverityTable, Chart]]:
    """Of each task that was asked about corrupted images the metric that stands for it.

    Each is of one encoder under one corruption, drawn with a curve a block.
    """
    some = [record for record in records if record.corrupted is not None]
    metrics = {
        task: choose_main_metric([(one.metric, one.is_ranked) for one in some if one.task == task])
        for task in {record.task for record in some}
    }
    asked = [one for one in records if metrics.get(one.task) == one.metric]
    found = []
    for table in severity_tables(asked) if some else ():
        chart = draw(
            Course(table.model, table.curves()).curves(),
            unit=table.record.unit,
            measured=metric_with_unit(table.record),
            along="severity",
            floors=said_baselines([r for _, _, entry in table.scores() for r in entry.records]),
        )
        found.append((table, chart))
    return found
