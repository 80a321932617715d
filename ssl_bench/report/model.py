"""What the overview shows: records grouped into panels, one line a checkpoint."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.results import Record
from ssl_bench.tables.depth import (
    arbitrary_percent,
    comparable_groups,
    differing_settings,
    provenance,
)

PANEL_FIELDS = ("task", "dataset", "metric", "facet", "protocol")
"""What readers choose panels by."""


@dataclass(frozen=True)
class Point:
    """The score of one block, averaged over seeds, in percent.

    Attributes:
        low: Of the 95 % interval, None without one; likewise `high`.
        arbitrary: Percent of the images whose answer rounding chose; None where none can be.
        records: Numbers of the records it comes from.
    """

    layer: int
    value: float
    low: float | None
    high: float | None
    arbitrary: float | None
    records: tuple[int, ...]

    @property
    def text(self) -> str:
        """As in the tables of the command line."""
        return f"{self.number}{self.interval}{self.dagger}"

    @property
    def number(self) -> str:
        return "no value" if math.isnan(self.value) else f"{self.value:.1f}"

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None or math.isnan(self.value):
            return ""
        return f" ± {(self.high - self.low) / 2:.1f}"

    @property
    def dagger(self) -> str:
        if not self.arbitrary:
            return ""
        return f" †{self.arbitrary:.{0 if self.arbitrary >= 1 else 1}f}"


@dataclass(frozen=True)
class Line:
    """One checkpoint over its blocks."""

    checkpoint: Checkpoint
    points: tuple[Point, ...]

    @property
    def best(self) -> Point | None:
        """The highest point; None when no block has a value."""
        finite = [point for point in self.points if not math.isnan(point.value)]
        return max(finite, key=lambda point: point.value, default=None)

    @property
    def last(self) -> Point:
        return self.points[-1]

    def at(self, layer: int) -> Point | None:
        return next((point for point in self.points if point.layer == layer), None)


@dataclass(frozen=True)
class Panel:
    """Numbers that may be compared: one metric on the same images with the same settings.

    Attributes:
        number: From 0; names its place in the pages.
        difference: What sets it apart from panels of the same names, else empty.
        footnote: Where all of its numbers are from.
    """

    number: int
    task: str
    dataset: str
    split: str
    metric: str
    facet: str
    protocol: str
    difference: str
    lines: tuple[Line, ...]
    footnote: str

    @property
    def where(self) -> str:
        return f"{self.dataset} {self.split}"

    @property
    def title(self) -> str:
        return f"{self.metric}, {self.facet}, protocol {self.protocol}{self.difference}"

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({point.layer for line in self.lines for point in line.points}))

    @property
    def has_arbitrary(self) -> bool:
        return any(point.arbitrary for line in self.lines for point in line.points)

    def line(self, checkpoint: Checkpoint) -> Line | None:
        return next((line for line in self.lines if line.checkpoint == checkpoint), None)


def panels_of(records: Sequence[Record], checkpoints: Sequence[Checkpoint]) -> tuple[Panel, ...]:
    """Group records by everything that must be the same for numbers to be compared."""
    groups = comparable_groups(records)
    firsts = [group[0] for group in groups]
    numbers = {id(record): number for number, record in enumerate(records)}
    return tuple(
        _panel(
            number, {numbers[id(r)]: r for r in group}, _difference(group[0], firsts), checkpoints
        )
        for number, group in enumerate(groups)
    )


def _panel(
    number: int,
    members: Mapping[int, Record],
    difference: str,
    checkpoints: Sequence[Checkpoint],
) -> Panel:
    first = next(iter(members.values()))
    cells: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    for i, record in members.items():
        cells[record.checkpoint_sha256, record.layer][i] = record
    lines = (
        Line(c, tuple(_point(cells[key]) for key in sorted(cells) if key[0] == c.sha256))
        for c in checkpoints
    )
    return Panel(
        number=number,
        task=first.task,
        dataset=first.dataset,
        split=first.split,
        metric=first.metric,
        facet=first.facet,
        protocol=first.protocol,
        difference=difference,
        lines=tuple(line for line in lines if line.points),
        footnote=provenance(list(members.values())),
    )


def _difference(record: Record, firsts: Sequence[Record]) -> str:
    """What sets a panel apart from the others of the same names."""
    same = (*PANEL_FIELDS, "split")
    rivals = [r for r in firsts if all(getattr(r, n) == getattr(record, n) for n in same)]
    differing = differing_settings(record, rivals)
    return f" [{', '.join(differing)}]" if differing else ""


def _point(seeds: Mapping[int, Record]) -> Point:
    records = list(seeds.values())
    intervals = [r.ci95 for r in records if r.ci95 is not None]
    return Point(
        layer=records[0].layer,
        value=fmean([r.value for r in records]),
        low=fmean([low for low, _ in intervals]) if intervals else None,
        high=fmean([high for _, high in intervals]) if intervals else None,
        arbitrary=arbitrary_percent(records),
        records=tuple(seeds),
    )
