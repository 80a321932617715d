"""All measurements of a task against checkpoints, and of one checkpoint against its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ssl_bench.report.model import Line, Panel
from ssl_bench.report.overview.differing import Differing, Facts, differing
from ssl_bench.report.overview.headlines import by_place, by_task, headline_metric

MOST_BESIDE = 3
"""Columns of a table of blocks: what a phone shows without scrolling sideways."""

MOST_OPEN = 3
"""Tables of a group; the others are folded."""


@dataclass(frozen=True)
class TaskTable:
    """What is measured for one task, a row a panel.

    Attributes:
        facts: What the rows differ in, and what they share.
    """

    task: str
    panels: tuple[Panel, ...]
    facts: Differing


@dataclass(frozen=True)
class BlockColumn:
    """One measurement of one checkpoint.

    Attributes:
        facts: What sets it apart from the other columns of its group.
    """

    panel: Panel
    line: Line
    facts: tuple[str, ...]


@dataclass(frozen=True)
class BlockTable:
    """A few measurements, a row a block."""

    columns: tuple[BlockColumn, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        points = (point for column in self.columns for point in column.line.points)
        return tuple(sorted({point.layer for point in points}))


@dataclass(frozen=True)
class BlockGroup:
    """The measurements of one checkpoint for a task on one split of a dataset.

    Attributes:
        shared: What all of them have in common.
        tables: Those of the metric that stands for the task, and a few more.
        folded: The others.
    """

    task: str
    where: str
    shared: Facts
    tables: tuple[BlockTable, ...]
    folded: tuple[BlockTable, ...]

    @property
    def num_folded(self) -> int:
        return sum(len(table.columns) for table in self.folded)


def task_tables(panels: Sequence[Panel]) -> tuple[TaskTable, ...]:
    """One a task, of the panels in which more is better."""
    ranked = [panel for panel in panels if panel.is_ranked]
    return tuple(
        TaskTable(task, tuple(those), differing([panel.facts for panel in those]))
        for task, those in by_task(ranked).items()
    )


def block_groups(lines: Sequence[tuple[Panel, Line]]) -> tuple[BlockGroup, ...]:
    """The measurements of a checkpoint by task and split of a dataset."""
    own = {panel.number: line for panel, line in lines}
    groups = []
    for task, those in by_task([panel for panel, _ in lines]).items():
        for where, panels in by_place(those).items():
            metric = headline_metric(panels)
            first = sorted(panels, key=lambda panel: panel.metric != metric)
            groups.append(_group(task, where, [(p, own[p.number]) for p in first]))
    return tuple(groups)


def _group(task: str, where: str, lines: Sequence[tuple[Panel, Line]]) -> BlockGroup:
    said = ("metric", "on")
    facts = differing([[fact for fact in p.facts if fact[0] not in said] for p, _ in lines])
    columns = [
        BlockColumn(panel, line, facts.words(number)) for number, (panel, line) in enumerate(lines)
    ]
    tables = tuple(map(BlockTable, _few(columns)))
    return BlockGroup(task, where, facts.shared, tables[:MOST_OPEN], tables[MOST_OPEN:])


def _few(columns: Sequence[BlockColumn]) -> list[tuple[BlockColumn, ...]]:
    """As few tables as can be, of about as many columns each."""
    count = -(-len(columns) // MOST_BESIDE)
    ends = [len(columns) * number // count for number in range(count + 1)]
    return [tuple(columns[a:b]) for a, b in pairwise(ends)]
