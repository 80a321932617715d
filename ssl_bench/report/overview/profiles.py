"""One encoder, all questions: at which blocks its values are high."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.drawing.ranks import Known, Question, RankChart, draw_ranks
from ssl_bench.report.model import Line, Panel, Point
from ssl_bench.report.overview.headlines import headline_panels

_UNRANKED = "c7 d0"
FEWEST_BLOCKS = 2


@dataclass(frozen=True)
class Profile:
    """The headline metrics of an encoder over its blocks.

    Attributes:
        has_unranked: Whether more is not better in some of them.
    """

    checkpoint: Checkpoint
    chart: RankChart
    has_unranked: bool


def profiles_of(panels: Sequence[Panel], checkpoints: Sequence[Checkpoint]) -> tuple[Profile, ...]:
    """One a checkpoint of which several blocks were asked."""
    chosen = headline_panels(panels)
    found = ((c, [(p, line) for p in chosen if (line := _asked(p, c))]) for c in checkpoints)
    return tuple(_profile(checkpoint, lines) for checkpoint, lines in found if lines)


def _asked(panel: Panel, checkpoint: Checkpoint) -> Line | None:
    """Its line, if it has values at several blocks."""
    line = panel.line(checkpoint)
    values = [point.value for point in line.points] if line else []
    return line if sum(not math.isnan(value) for value in values) >= FEWEST_BLOCKS else None


def _profile(checkpoint: Checkpoint, lines: Sequence[tuple[Panel, Line]]) -> Profile:
    questions = [
        Question(
            panel.task,
            f"{panel.metric}, {panel.dataset}",
            checkpoint.style if panel.is_ranked else _UNRANKED,
            tuple(_known(point) for point in line.points),
        )
        for panel, line in lines
    ]
    unranked = any(not panel.is_ranked for panel, _ in lines)
    return Profile(checkpoint, draw_ranks(questions), unranked)


def _known(point: Point) -> Known:
    low, high = (point.value if end is None else end for end in (point.entry.low, point.entry.high))
    return Known(point.layer, point.value, low, high, f"block {point.layer}: {point.text}")
