"""One encoder, all questions: what its scores say, and at which blocks they are high."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.comparing import MOST_PAIRED
from ssl_bench.report.drawing.ranks import Known, Question, RankChart, draw_ranks
from ssl_bench.report.model import Line, Panel, Point
from ssl_bench.report.overview.answers import answer, told_apart
from ssl_bench.report.overview.headlines import headline_panels
from ssl_bench.results import Record, ResultStore

_UNRANKED = "c7 d0"
FEWEST_BLOCKS = 2


@dataclass(frozen=True)
class Profile:
    """The headline metrics of an encoder over its blocks.

    Attributes:
        answers: A sentence each.
        chart: Of those with values at several blocks, if there are any.
        has_unranked: Whether more is not better in some of them.
    """

    checkpoint: Checkpoint
    answers: tuple[str, ...]
    chart: RankChart | None
    has_unranked: bool


def profiles_of(
    store: ResultStore,
    records: Sequence[Record],
    panels: Sequence[Panel],
    checkpoints: Sequence[Checkpoint],
) -> tuple[Profile, ...]:
    """One a checkpoint with scores; of a few its blocks are told apart by pairs of images."""
    chosen, paired = headline_panels(panels), len(checkpoints) <= MOST_PAIRED
    profiles, protocols = [], defaultdict[tuple[str, str], set[str]](set)
    for panel in panels:
        protocols[panel.task, panel.where].add(panel.protocol)
    for checkpoint in checkpoints:
        # Of a question that it was asked in two protocols, the panel that comes first.
        own: dict[tuple[str, str], tuple[Panel, Line]] = {}
        for panel in chosen:
            if line := panel.line(checkpoint):
                own.setdefault((panel.task, panel.where), (panel, line))
        lines = list(own.values())
        answers = [
            answer(
                p,
                line,
                told_apart(store, records, p, line, paired=paired),
                protocol=len(protocols[p.task, p.where]) > 1,
            )
            for p, line in lines
        ]
        several = [(p, line) for p, line in lines if _has_several(line)]
        unranked = any(not panel.is_ranked for panel, _ in several)
        chart = draw_ranks(_questions(checkpoint, several)) if several else None
        if lines:
            profiles.append(Profile(checkpoint, tuple(answers), chart, unranked))
    return tuple(profiles)


def _has_several(line: Line) -> bool:
    return sum(not math.isnan(point.value) for point in line.points) >= FEWEST_BLOCKS


def _questions(checkpoint: Checkpoint, lines: Sequence[tuple[Panel, Line]]) -> list[Question]:
    return [
        Question(
            panel.task,
            (panel.metric, panel.dataset),
            checkpoint.style if panel.is_ranked else _UNRANKED,
            tuple(_known(point) for point in line.points),
        )
        for panel, line in lines
    ]


def _known(point: Point) -> Known:
    low, high = (point.value if end is None else end for end in (point.entry.low, point.entry.high))
    return Known(point.layer, point.value, low, high, f"block {point.layer}: {point.text}")
