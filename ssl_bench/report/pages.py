"""What stands on each page, ready for the templates."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.comparing import Pair, PanelPair
from ssl_bench.report.curves import Chart, Curve, Reference, Spot, draw
from ssl_bench.report.model import (
    PANEL_FIELDS,
    Line,
    Panel,
    Point,
    said_units,
)
from ssl_bench.report.outcomes import Extremes, ImageScore, Outcomes
from ssl_bench.report.viewers import GallerySection
from ssl_bench.results import Record
from ssl_bench.system.escaping import in_file_names
from ssl_bench.tables.depth import provenance
from ssl_bench.tables.deviations import named_protocol
from ssl_bench.tables.published import PublishedValue, published_beside

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
    """A panel as it is drawn."""

    panel: Panel
    chart: Chart
    published: tuple[Published, ...]


@dataclass(frozen=True)
class PanelGroup:
    """The panels on one split of a dataset."""

    where: str
    views: tuple[PanelView, ...]


@dataclass(frozen=True)
class TaskSection:
    """The panels of one task."""

    task: str
    anchor: str
    groups: tuple[PanelGroup, ...]


@dataclass(frozen=True)
class Filter:
    """A field of panels and the values that readers can choose."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class IndexPage:
    """The overview."""

    num_records: int
    num_unreadable: int
    checkpoints: tuple[Checkpoint, ...]
    pairs: tuple[Pair, ...]
    views: tuple[PanelView, ...]

    @property
    def num_panels(self) -> int:
        return len(self.views)

    @property
    def ranked(self) -> tuple[Panel, ...]:
        """Where more is better."""
        return tuple(view.panel for view in self.views if view.panel.is_ranked)

    @property
    def units(self) -> str:
        return said_units([view.panel for view in self.views])

    @property
    def has_skipless(self) -> bool:
        return any(checkpoint.skipless for checkpoint in self.checkpoints)

    @property
    def has_arbitrary(self) -> bool:
        return any(view.panel.has_arbitrary for view in self.views)

    @property
    def filters(self) -> tuple[Filter, ...]:
        return tuple(
            Filter(name, tuple(sorted({getattr(view.panel, name) for view in self.views})))
            for name in PANEL_FIELDS
        )

    @property
    def sections(self) -> tuple[TaskSection, ...]:
        groups: dict[str, dict[str, list[PanelView]]] = defaultdict(lambda: defaultdict(list))
        for view in self.views:
            groups[view.panel.task][view.panel.where].append(view)
        return tuple(
            TaskSection(
                task,
                f"task-{in_file_names(task)}",
                tuple(PanelGroup(where, tuple(views)) for where, views in places.items()),
            )
            for task, places in groups.items()
        )


@dataclass(frozen=True)
class ClassRow:
    """IoU of one class by block in percent, None where it is absent."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class ClassTable:
    """IoU by class; classes that are absent at every block are counted only."""

    panel: Panel
    points: tuple[Point, ...]
    rows: tuple[ClassRow, ...]
    num_absent: int


@dataclass(frozen=True)
class ShownExtremes:
    """Extremes with the addresses of those images that are drawn."""

    extremes: Extremes
    sides: tuple[tuple[str, tuple[tuple[ImageScore, str], ...]], ...]


@dataclass(frozen=True)
class Run:
    """Records of a checkpoint that share their settings."""

    title: str
    footnote: str
    fingerprint: str
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CheckpointPage:
    """Everything about one checkpoint."""

    checkpoint: Checkpoint
    lines: tuple[tuple[Panel, Line], ...]
    pairs: tuple[Pair, ...]
    galleries: tuple[GallerySection, ...]
    outcomes: tuple[Outcomes, ...]
    extremes: tuple[ShownExtremes, ...]
    classes: tuple[ClassTable, ...]
    runs: tuple[Run, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({point.layer for _, line in self.lines for point in line.points}))

    @property
    def has_arbitrary(self) -> bool:
        return any(point.arbitrary for _, line in self.lines for point in line.points)

    @property
    def units(self) -> str:
        return said_units([panel for panel, _ in self.lines])

    @property
    def has_one_seed_of_several(self) -> bool:
        """Whether something on the page is of one seed beside means over several."""
        several = any(len(point.records) > 1 for _, line in self.lines for point in line.points)
        return several and bool(self.outcomes or self.extremes or self.classes)


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
    curves = [
        Curve(
            line.checkpoint.name,
            line.checkpoint.style,
            line.checkpoint.number,
            tuple(_spot(line.checkpoint, point) for point in line.points),
        )
        for line in panel.lines
    ]
    published = _published(panel, records)
    levels = [
        Reference(f"published: {value.row}, {value.column}, {value.value:.1f}", value.value)
        for beside in published
        for value in beside.values
        # Not beside a part of the dataset.
        if value.dataset == panel.dataset
    ]
    return PanelView(panel, draw(curves, levels, panel.unit), published)


def pair_view(compared: PanelPair, second: Checkpoint) -> PairView:
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
    return PairView(compared, draw([Curve(second.name, second.style, second.number, spots)]))


def class_tables(
    lines: Sequence[tuple[Panel, Line]], records: Sequence[Record]
) -> tuple[ClassTable, ...]:
    """One table a dataset, protocol and facet: the first mean IoU of them, which is held out."""
    tables: dict[tuple[str, ...], ClassTable] = {}
    for panel, line in lines:
        where = (panel.task, panel.where, panel.facet, panel.protocol, panel.difference)
        found = _class_table(panel, line, records)
        if found and panel.metric.startswith("miou"):
            tables.setdefault(where, found)
    return tuple(tables.values())


def runs_of(records: Sequence[Record]) -> tuple[Run, ...]:
    """Settings of some records, each once."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        title = (
            f"{record.task} on {record.dataset} {record.split}, protocol {named_protocol(record)}"
        )
        same = (record.dataset_fingerprint, sorted(record.settings.items()))
        groups[title, repr(same)].append(record)
    return tuple(
        Run(
            title,
            provenance(members),
            members[0].dataset_fingerprint,
            tuple((name, str(value)) for name, value in sorted(members[0].settings.items())),
        )
        for (title, _), members in sorted(groups.items())
    )


def _spot(checkpoint: Checkpoint, point: Point) -> Spot:
    doubtful = (point.arbitrary or 0.0) >= _DOUBTFUL_PERCENT
    hint = f"{checkpoint.name}, block {point.layer}: {point.text}"
    return Spot(point.layer, point.value, point.entry.low, point.entry.high, hint, doubtful)


def _published(panel: Panel, records: Sequence[Record]) -> tuple[Published, ...]:
    record = records[panel.lines[0].points[0].records[0]]
    groups: dict[tuple[str, str], list[PublishedValue]] = defaultdict(list)
    for beside in published_beside(record):
        groups[beside.value.source, beside.differs].append(beside.value)
    return tuple(Published(*where, tuple(values)) for where, values in groups.items())


def _class_table(panel: Panel, line: Line, records: Sequence[Record]) -> ClassTable | None:
    found = {
        point: iou
        for point in line.points
        if isinstance(iou := records[point.records[0]].details.get("iou_by_class"), dict)
    }
    if not found:
        return None
    names = list(dict.fromkeys(name for iou in found.values() for name in iou))
    rows = [
        ClassRow(name, tuple(_number(iou.get(name)) for iou in found.values())) for name in names
    ]
    present = tuple(row for row in rows if any(value is not None for value in row.values))
    return ClassTable(panel, tuple(found), present, len(rows) - len(present))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
