"""What stands on each page, ready for the templates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.comparing import Pair, PanelPair
from ssl_bench.report.drawing.curves import Chart, Curve, Reference, Spot, draw
from ssl_bench.report.model import (
    PANEL_FIELDS,
    Line,
    Panel,
    Point,
)
from ssl_bench.report.overview.board import Board
from ssl_bench.report.overview.headlines import by_place, by_task, headline_metric
from ssl_bench.report.overview.meanings import MEANINGS
from ssl_bench.report.overview.measured import TaskTable, task_tables
from ssl_bench.report.overview.profiles import Profile
from ssl_bench.report.pictures.strips import Strip
from ssl_bench.report.pictures.viewers import GallerySection
from ssl_bench.results import Record
from ssl_bench.system.escaping import in_file_names
from ssl_bench.tables.published import PublishedValue, published_beside

MOST_UNFOLDED = 2
"""Of more panels on one split of a dataset only those of the headline metric stand open."""

_DOUBTFUL_PERCENT = 50.0


@dataclass(frozen=True)
class Site:
    """What all pages say of the report."""

    source: str
    version: str
    written: str


@dataclass(frozen=True)
class Published:
    """Published values of the same task, dataset and metric, of one paper's table."""

    source: str
    differs: str
    values: tuple[PublishedValue, ...]


@dataclass(frozen=True)
class PanelView:
    """A panel as it is drawn.

    Attributes:
        lines: Those that are drawn.
    """

    panel: Panel
    lines: tuple[Line, ...]
    chart: Chart
    published: tuple[Published, ...]


@dataclass(frozen=True)
class PanelGroup:
    """The panels on one split of a dataset.

    Attributes:
        views: Those of the metric that stands for the task.
        folded: All others.
    """

    where: str
    views: tuple[PanelView, ...]
    folded: tuple[PanelView, ...]


@dataclass(frozen=True)
class TaskSection:
    """The panels of one task."""

    task: str
    anchor: str
    groups: tuple[PanelGroup, ...]

    @property
    def meaning(self) -> str:
        return MEANINGS.get(self.task, "")


@dataclass(frozen=True)
class Filter:
    """A field of panels and the values that readers can choose."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class IndexPage:
    """The overview.

    Attributes:
        profiles: The places of the blocks of each checkpoint, question by question.
        board: One number a task.
        strips: A few pictures of each checkpoint.
        followed: Numbers of the panels that the page on epochs follows runs in.
        has_corrupted: Whether there is a page on severities.
    """

    num_records: int
    num_unreadable: int
    checkpoints: tuple[Checkpoint, ...]
    pairs: tuple[Pair, ...]
    profiles: tuple[Profile, ...]
    board: Board
    strips: tuple[Strip, ...]
    views: tuple[PanelView, ...]
    followed: frozenset[int]
    has_corrupted: bool

    @property
    def num_panels(self) -> int:
        return len(self.views)

    @property
    def measured(self) -> tuple[TaskTable, ...]:
        """Where more is better."""
        return task_tables([view.panel for view in self.views])

    @property
    def has_labels(self) -> bool:
        """Whether there is more to read than to look at."""
        return any(view.panel.has_labels for view in self.views)

    @property
    def has_skipless(self) -> bool:
        return any(checkpoint.skipless for checkpoint in self.checkpoints)

    @property
    def has_arbitrary(self) -> bool:
        return any(view.panel.has_arbitrary for view in self.views)

    @property
    def filters(self) -> tuple[Filter, ...]:
        return filters_of([view.panel for view in self.views])

    @property
    def sections(self) -> tuple[TaskSection, ...]:
        views = {view.panel.number: view for view in self.views}
        tasks = by_task([view.panel for view in self.views])
        return tuple(
            TaskSection(
                task,
                f"task-{in_file_names(task)}",
                _groups(panels, views),
            )
            for task, panels in tasks.items()
        )


def _groups(panels: Sequence[Panel], views: Mapping[int, PanelView]) -> tuple[PanelGroup, ...]:
    """By split of a dataset; folded is what is not of the metric, and what more is not better of.

    But for the panels of a task that has a few of them.
    """
    groups = []
    for where, some in by_place(panels).items():
        those, metric = [views[panel.number] for panel in some], headline_metric(some)
        shown = [v for v in those if v.panel.metric == metric and v.panel.is_ranked]
        if len(those) <= MOST_UNFOLDED:
            shown = those
        folded = [view for view in those if view not in shown]
        groups.append(PanelGroup(where, tuple(shown), tuple(folded)))
    return tuple(groups)


@dataclass(frozen=True)
class PairView:
    """A comparison as it is drawn."""

    compared: PanelPair
    chart: Chart


@dataclass(frozen=True)
class PairPage:
    """Two checkpoints side by side."""

    pair: Pair
    views: tuple[PairView, ...]
    galleries: tuple[GallerySection, ...]


def panel_view(panel: Panel, records: Sequence[Record]) -> PanelView:
    """Draw a panel with the published values of its dataset that its axes hold."""
    lines = panel.drawn
    curves = [
        Curve(
            line.checkpoint.name,
            line.checkpoint.style,
            line.checkpoint.number,
            tuple(
                spot_of(point, point.layer, f"{line.checkpoint.name}, block {point.layer}")
                for point in line.points
            ),
            line.checkpoint.label if len(lines) > 1 else "",
        )
        for line in lines
    ]
    published = _published(panel, records)
    levels = [
        Reference(f"published: {value.row}, {value.column}, {value.value:.1f}", value.value)
        for beside in published
        for value in beside.values
        # Not beside a part of the dataset.
        if value.dataset == panel.dataset
    ]
    floors = [Reference(*one) for one in panel.baselines]
    chart = draw(curves, levels, panel.unit, measured=panel.measured, floors=floors)
    return PanelView(panel, lines, chart, published)


def pair_view(compared: PanelPair, first: Checkpoint) -> PairView:
    """Draw the differences block by block."""
    differences = [row.difference for row in compared.rows]
    spots = tuple(
        Spot(
            int(one.name),
            one.value,
            one.low,
            one.high,
            f"block {one.name}: {one.text}",
        )
        for one in differences
    )
    curve = Curve(first.name, first.style, first.number, spots)
    measured = f"difference in {compared.panel.metric} (points)"
    return PairView(compared, draw([curve], measured=measured))


def filters_of(panels: Sequence[Panel]) -> tuple[Filter, ...]:
    """What readers choose some panels by."""
    return tuple(
        Filter(name, tuple(sorted({getattr(panel, name) for panel in panels})))
        for name in PANEL_FIELDS
    )


def spot_of(point: Point, x: int | float, where: str) -> Spot:
    """A score in a drawing, a cross where most images have an arbitrary box."""
    doubtful = (point.arbitrary or 0.0) >= _DOUBTFUL_PERCENT
    hint = f"{where}: {point.text}"
    return Spot(x, point.value, point.entry.low, point.entry.high, hint, doubtful)


def _published(panel: Panel, records: Sequence[Record]) -> tuple[Published, ...]:
    record = records[panel.lines[0].points[0].records[0]]
    groups: dict[tuple[str, str], list[PublishedValue]] = defaultdict(list)
    for beside in published_beside(record):
        groups[beside.value.source, beside.differs].append(beside.value)
    return tuple(Published(*where, tuple(values)) for where, values in groups.items())


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
