"""The page of one checkpoint: its curves, classes, extremes and settings."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.comparing import Pair
from ssl_bench.report.model import (
    Line,
    Panel,
    Point,
    said_units,
)
from ssl_bench.report.outcomes import Extremes, ImageScore, Outcomes
from ssl_bench.report.overview.measured import BlockGroup, block_groups
from ssl_bench.report.overview.profiles import Profile
from ssl_bench.report.pages import number
from ssl_bench.report.pictures.viewers import GallerySection
from ssl_bench.results import Record
from ssl_bench.tables.notes import footnote


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
class SettingsGroup:
    """Records of a checkpoint that share their settings."""

    title: str
    footnote: str
    fingerprint: str
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CheckpointPage:
    """Everything about one checkpoint."""

    checkpoint: Checkpoint
    profile: Profile | None
    lines: tuple[tuple[Panel, Line], ...]
    pairs: tuple[Pair, ...]
    galleries: tuple[GallerySection, ...]
    outcomes: tuple[Outcomes, ...]
    extremes: tuple[ShownExtremes, ...]
    classes: tuple[ClassTable, ...]
    runs: tuple[SettingsGroup, ...]

    @property
    def has_labels(self) -> bool:
        """Whether there is more to read than to look at."""
        return any(panel.has_labels for panel, _ in self.lines)

    @property
    def scores(self) -> tuple[BlockGroup, ...]:
        """Of tasks in which more is better."""
        return block_groups([one for one in self.lines if one[0].task in self._ranked])

    @property
    def properties(self) -> tuple[BlockGroup, ...]:
        """Of all other tasks."""
        return block_groups([one for one in self.lines if one[0].task not in self._ranked])

    @property
    def _ranked(self) -> set[str]:
        return {panel.task for panel, _ in self.lines if panel.is_ranked}

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


def class_tables(
    lines: Sequence[tuple[Panel, Line]], records: Sequence[Record]
) -> tuple[ClassTable, ...]:
    """One table a dataset, protocol and facet: the first mean IoU of them, which is held out."""
    tables: dict[tuple[str, ...], ClassTable] = {}
    for panel, line in lines:
        where = (panel.task, panel.where, panel.facet, panel.protocol, panel.difference)
        if where in tables or not panel.metric.startswith("miou"):
            continue
        if found := _class_table(panel, line, records):
            tables[where] = found
    return tuple(tables.values())


def runs_of(records: Sequence[Record]) -> tuple[SettingsGroup, ...]:
    """Settings of some records, each once."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        title = (
            f"{record.task} on {record.dataset} {record.split}, protocol {record.named_protocol}"
        )
        same = (record.dataset_fingerprint, sorted(record.settings.items()))
        groups[title, repr(same)].append(record)
    return tuple(
        SettingsGroup(
            title,
            footnote(members),
            members[0].dataset_fingerprint,
            tuple((name, str(value)) for name, value in sorted(members[0].settings.items())),
        )
        for (title, _), members in sorted(groups.items())
    )


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
        ClassRow(name, tuple(number(iou.get(name)) for iou in found.values())) for name in names
    ]
    present = tuple(row for row in rows if any(value is not None for value in row.values))
    return ClassTable(panel, tuple(found), present, len(rows) - len(present))
