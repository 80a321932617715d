"""What the overview shows: records grouped into panels, one line a checkpoint."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.results import Record
from ssl_bench.tables.entry import Entry, K, mean_entry, with_seeds_said
from ssl_bench.tables.notes import baselines, footnote
from ssl_bench.tables.series import comparable_groups, differing_settings, said_training

PANEL_FIELDS = ("task", "dataset", "metric", "facet", "protocol")
"""What readers choose panels by."""


_UNLABELLED = frozenset({"pca", "conditioning", "geometry", "warps", "degenerate"})
"""Tasks, protocols and metrics that take photographs as they are."""

MOST_DRAWN = 24
"""Curves of checkpoints, or drawings of runs, in a panel; with more nobody tells them apart."""


@dataclass(frozen=True)
class Point:
    """The score of one block, averaged over seeds.

    Attributes:
        records: Numbers of the records it comes from, in the order of their seeds.
        entry: What the tables of the command line show.
    """

    layer: int
    records: tuple[int, ...]
    # Records hold mappings, which have no hash.
    entry: Entry = field(compare=False)

    @property
    def value(self) -> float:
        return self.entry.value

    @property
    def arbitrary(self) -> float | None:
        return self.entry.arbitrary

    @property
    def text(self) -> str:
        return self.entry.text()

    @property
    def parts(self) -> tuple[str, ...]:
        """The value and what is behind it, which may stand below it."""
        number, _, interval = self.text.partition(" ")
        return (number, interval) if interval else (number,)

    @property
    def sort_key(self) -> str:
        """As JavaScript reads numbers; empty where there is no value."""
        if math.isnan(self.value):
            return ""
        return "Infinity" if self.value == math.inf else str(self.value)


@dataclass(frozen=True)
class Line:
    """One checkpoint over its blocks."""

    checkpoint: Checkpoint
    points: tuple[Point, ...]

    @cached_property
    def best(self) -> Point | None:
        """The highest point; None when no block has a value or more is not better."""
        return best_of(self.points)

    @cached_property
    def bests(self) -> tuple[Point, ...]:
        """All points as high as the best one; none where all of several are."""
        if self.best is None:
            return ()
        found = tuple(point for point in self.points if point.value == self.best.value)
        return found if len(found) < len(self.points) or len(found) == 1 else ()

    @property
    def said_best(self) -> str:
        """Such as "block 3", "blocks 0, 4", or that no block stands out."""
        if self.best is not None and not self.bests:
            return f"all {len(self.points)} alike"
        shown = [point.layer for point in self.bests or self.points[-1:]]
        return f"block{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))}"

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
        facts: All that a row of a table has to say of it, by name.
        footnote: Where all of its numbers are from.
    """

    number: int
    task: str
    dataset: str
    split: str
    metric: str
    unit: str
    facet: str
    protocol: str
    difference: str
    facts: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]
    footnote: str

    @property
    def where(self) -> str:
        return f"{self.dataset} {self.split}"

    @property
    def measured(self) -> str:
        """Such as "corloc (%)"."""
        return f"{self.metric} ({self.unit})" if self.unit else self.metric

    @property
    def title(self) -> str:
        return f"{self.metric}, {self.facet}, protocol {self.protocol}{self.difference}"

    @property
    def record(self) -> Record:
        """One of those behind the values, which share images, settings and what was asked."""
        return self.lines[0].points[0].entry.records[0]

    @property
    def num_changed(self) -> int:
        """How many options differ from those of the protocol."""
        return len(self.record.changed)

    @property
    def newest(self) -> str:
        """When the last of its records was made."""
        points = (point for line in self.lines for point in line.points)
        return max(record.created for point in points for record in point.entry.records)

    @property
    def is_ranked(self) -> bool:
        return any(line.best for line in self.lines)

    @property
    def has_labels(self) -> bool:
        """Whether its scores come from labels, and not from the pictures alone."""
        return _UNLABELLED.isdisjoint((self.task, self.protocol, self.metric))

    @property
    def is_corrupted(self) -> bool:
        """Whether the scored images are not as they are."""
        return self.record.corrupted is not None

    @property
    def drawn(self) -> tuple[Line, ...]:
        """All lines, or of many those with the highest values, in the order of their names."""
        highest = sorted(self.lines, key=lambda line: -line.best.value if line.best else math.inf)
        chosen = {line.checkpoint.encoder_id for line in highest[:MOST_DRAWN]}
        return tuple(line for line in self.lines if line.checkpoint.encoder_id in chosen)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({point.layer for line in self.lines for point in line.points}))

    @cached_property
    def has_arbitrary(self) -> bool:
        return any(point.arbitrary for line in self.lines for point in line.points)

    @cached_property
    def baselines(self) -> tuple[tuple[str, float], ...]:
        """Answers that look at no image, in words with their score, and that score."""
        points = (point for line in self.lines for point in line.points)
        found = baselines([record for point in points for record in point.entry.records])
        return tuple((f"{answer} {v[0]:.1f}", v[0]) for answer, v in found.items())

    def line(self, checkpoint: Checkpoint) -> Line | None:
        return self._by_encoder.get(checkpoint.encoder_id)

    @cached_property
    def _by_encoder(self) -> Mapping[str, Line]:
        return {line.checkpoint.encoder_id: line for line in self.lines}


def panels_of(records: Sequence[Record], checkpoints: Sequence[Checkpoint]) -> tuple[Panel, ...]:
    """Group records by everything that must be the same for numbers to be compared."""
    groups = comparable_groups(records)
    firsts = [group[0] for group in groups]
    numbers = {id(record): number for number, record in enumerate(records)}
    return tuple(
        _panel(number, {numbers[id(r)]: r for r in group}, _rivals(group[0], firsts), checkpoints)
        for number, group in enumerate(groups)
    )


def _panel(
    number: int,
    members: Mapping[int, Record],
    rivals: Sequence[Record],
    checkpoints: Sequence[Checkpoint],
) -> Panel:
    first = next(iter(members.values()))
    cells: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    for i, record in members.items():
        cells[record.encoder_id, record.layer][i] = record
    points: dict[str, list[Point]] = defaultdict(list)
    for (encoder, _), point in sorted(points_of(cells).items(), key=lambda one: one[0]):
        points[encoder].append(point)
    lines = (Line(c, tuple(points[c.encoder_id])) for c in checkpoints if c.encoder_id in points)
    return Panel(
        number=number,
        task=first.task,
        dataset=first.dataset,
        split=first.split,
        metric=first.metric,
        unit=first.unit,
        facet=first.facet,
        protocol=first.protocol,
        difference=_difference(first, rivals),
        facts=tuple(_facts(first, rivals).items()),
        lines=tuple(lines),
        footnote=footnote(list(members.values())),
    )


def _rivals(record: Record, firsts: Sequence[Record]) -> list[Record]:
    """Records of the panels of the same names."""
    same = (*PANEL_FIELDS, "split")
    return [r for r in firsts if all(getattr(r, n) == getattr(record, n) for n in same)]


def _difference(record: Record, rivals: Sequence[Record]) -> str:
    """What the protocol's name leaves out, and what sets a panel apart from others of its names."""
    differing = differing_settings(record, rivals)
    changed = record.named_protocol.removeprefix(record.protocol)
    training = said_training(record)
    return changed + training + (f" [{', '.join(differing)}]" if differing else "")


def _facts(record: Record, rivals: Sequence[Record]) -> dict[str, str]:
    """What `Panel.title` and `_difference` say, one by one."""
    facts = {name: str(getattr(record, name)) for name in ("metric", "facet", "protocol")}
    facts["on"] = f"{record.dataset} {record.split}"
    facts |= {name: str(value) for name, value in sorted(record.changed.items())}
    if record.trained_on is not None:
        facts["trained on"] = str(record.trained_on)
    differing = (text.partition(separator) for text, separator in _said(record, rivals))
    return facts | {name: value for name, _, value in differing}


def _said(record: Record, rivals: Sequence[Record]) -> list[tuple[str, str]]:
    """Differing settings, and what parts their names from their values."""
    return [(text, "=" if "=" in text else " ") for text in differing_settings(record, rivals)]


def best_of(points: Iterable[Point]) -> Point | None:
    """The highest point; None when none has a value or more is not better."""
    finite = [p for p in points if not math.isnan(p.value) and p.entry.records[0].is_ranked]
    return max(finite, key=lambda point: point.value, default=None)


def points_of(cells: Mapping[K, Mapping[int, Record]]) -> dict[K, Point]:
    """Of cells that stand side by side the means of their records, which come by their numbers."""
    numbers = {at: sorted(those, key=lambda n: those[n].seed) for at, those in cells.items()}
    entries = with_seeds_said(
        {at: mean_entry([those[n] for n in numbers[at]]) for at, those in cells.items()}
    )
    return {
        at: Point(entry.records[0].layer, tuple(numbers[at]), entry)
        for at, entry in entries.items()
    }


def said_units(panels: Sequence[Panel]) -> str:
    """Such as "percent, except plain numbers: condition_number"."""
    plain = sorted({panel.metric for panel in panels if not panel.unit})
    if not plain:
        return "percent"
    if all(not panel.unit for panel in panels):
        return "plain numbers"
    return f"percent, except plain numbers: {', '.join(plain)}"
