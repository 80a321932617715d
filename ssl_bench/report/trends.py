"""Draw charts of scores over pretraining epochs or over severities of image corruptions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ssl_bench.errors import DataError
from ssl_bench.report.drawing import Chart, Curve, draw_chart
from ssl_bench.report.panels import MAX_LINES, ScorePanel, make_point
from ssl_bench.results import Record
from ssl_bench.tables.depth import (
    ScoreTable,
    epoch_table,
    main_metrics,
    require_one_encoder_per_epoch,
    runs_with_several_epochs,
)
from ssl_bench.tables.entries import ScoreEntry, list_baselines, metric_with_unit
from ssl_bench.tables.severities import SeverityTable, severity_tables

NUM_SHADES = 12
"""Number of colour shades in the style sheet, which show a block's position in its encoder."""


@dataclass(frozen=True)
class Trend:
    """Scores of all blocks over the epochs of a run, or over severities of an image corruption.

    Attributes:
        name: Name of the run or of the encoder.
        table: The scores, with epochs or severities as rows and blocks as columns.
    """

    name: str
    table: ScoreTable

    @property
    def depth(self) -> int:
        """Number of blocks of the encoder, including blocks without a score."""
        records = (record for entry in self.table.entries.values() for record in entry.records)
        return max(record.depth for record in records)

    @property
    def highest(self) -> float:
        """Highest score that can be marked as best, or minus infinity if there is no such score."""
        entries = self.table.entries.values()
        return max((entry.value for entry in entries if entry.is_rankable), default=-math.inf)

    def find_entry(self, row: float, block: str) -> ScoreEntry | None:
        return self.table.entries.get((row, block))

    def make_curves(self) -> list[Curve]:
        """Return one curve per block, to be drawn in a chart."""
        curves = []
        for block in self.table.columns:
            entries = {x: entry for x in self.table.rows if (entry := self.find_entry(x, block))}
            name = f"{self.name}, {block}, {self.table.row_name}"
            layer = next(iter(entries.values())).layer
            points = [make_point(entry, x, f"{name} {x:g}") for x, entry in entries.items()]
            curves.append(Curve(block, style_block(layer, self.depth), layer, points))
        return curves


class PanelTrends(NamedTuple):
    """Scores over epochs for the runs that were probed at several epochs.

    Attributes:
        panel: The panel (group of comparable scores) to which all scores belong.
        trends: The scores of each run.
        problems: Reasons why some runs are not drawn, for example because two runs have the same
            name.
    """

    panel: ScorePanel
    trends: Sequence[Trend]
    problems: Sequence[str]

    @property
    def drawn_trends(self) -> Sequence[Trend]:
        """The runs to draw, in original order: up to `MAX_LINES` runs with the highest scores."""
        ordered = sorted(self.trends, key=lambda trend: -trend.highest)
        names = {trend.name for trend in ordered[:MAX_LINES]}
        return [trend for trend in self.trends if trend.name in names]

    def draw_charts(self) -> list[tuple[Trend, Chart]]:
        """Draw one chart per run. All charts have the same axes."""
        panel, curves = self.panel, [trend.make_curves() for trend in self.drawn_trends]
        charts = [
            draw_chart(
                own,
                unit=panel.unit,
                y_label=panel.metric_label,
                x_label="epoch",
                axis_curves=[curve for others in curves for curve in others],
                baselines=panel.baselines,
            )
            for own in curves
        ]
        return list(zip(self.drawn_trends, charts, strict=True))


def find_epoch_trends(panels: Sequence[ScorePanel]) -> tuple[PanelTrends, ...]:
    """Return the scores over epochs for each panel with a run that was probed at several epochs.

    A panel is a group of comparable scores.
    """
    groups = map(_find_runs, panels)
    return tuple(group for group in groups if group.trends or group.problems)


def _find_runs(panel: ScorePanel) -> PanelTrends:
    trends, problems = [], []
    for run, records in runs_with_several_epochs(panel.records).items():
        try:
            require_one_encoder_per_epoch(run, records)
        except DataError as error:
            problems.append(str(error))
        else:
            trends.append(Trend(run, epoch_table(records, run)))
    return PanelTrends(panel, trends, problems)


def style_block(layer: int, depth: int) -> str:
    """Return the CSS classes for the curve of the block with index `layer`.

    The colour shade shows the position of the block in the encoder, which has `depth` blocks.
    Blocks with the same shade have different dashes. Blocks with odd indices have hollow dots.
    """
    shades = [number * (NUM_SHADES - 1) // max(1, depth - 1) for number in range(layer + 1)]
    dashes = min(shades.count(shades[-1]) - 1, 2)
    return f"depth b{shades[-1]} d{dashes}{' hollow' if layer % 2 else ''}"


def draw_severities(records: Sequence[Record]) -> list[tuple[SeverityTable, Chart]]:
    """Return tables and charts of scores over severities of image corruptions.

    There is one table and one chart per encoder and corruption, for the main metric of each task.
    The list is empty if there are no records of corrupted images.
    """
    corrupted = [record for record in records if record.corruption is not None]
    metrics = main_metrics(corrupted, ("task",))
    shown = [record for record in records if metrics.get((record.task,)) == record.metric]
    drawn = []
    for table in severity_tables(shown) if corrupted else ():
        table_records = [record for entry in table.entries.values() for record in entry.records]
        chart = draw_chart(
            Trend(table.model, table.curves()).make_curves(),
            unit=table.record.unit,
            y_label=metric_with_unit(table.record),
            x_label="severity",
            baselines=list_baselines(table_records),
        )
        drawn.append((table, chart))
    return drawn
