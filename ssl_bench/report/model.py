"""Who is in a report and how each is drawn; records in panels of numbers that may be compared.

A checkpoint has the same colour and line wherever it appears, and one line in a panel; one panel
stands for a task where there is room for one.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ssl_bench.layers import INNER_FACETS
from ssl_bench.report.drawing import Spot
from ssl_bench.results import Record
from ssl_bench.system.escaping import safe_file_name
from ssl_bench.system.paths import encoder_folder, natural_sort_key
from ssl_bench.tables.entries import (
    Entry,
    baselines,
    choose_main_metric,
    comparable_groups,
    dagger_meaning,
    differing_settings,
    footnote,
    mean_entries,
    metric_with_unit,
    model_names,
    training_suffix,
)
from ssl_bench.tables.sheets import NO_VALUE

NUM_COLOURS = 8
_LONGEST_LABEL = 20
_NO_SKIP = re.compile(r"skip-?less|no-?skip|without-?skip", re.IGNORECASE)
_SKIPS = ("skip", "skip_attention", "skip_mlp")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """One encoder.

    Attributes:
        number: From 0, in the order of the names.
        encoder_id: As in records.
        sha256: Of its weights.
        name: Unique in the report.
        apart: What sets it apart from others of its model, such as "image size 224"; else empty.
        label: Its name, for the end of its curves; of a long one both ends.
        model: As recorded; several checkpoints may share it.
        depth: Number of blocks.
        facts: What is recorded of the encoder, by name.
        skipless: Its architecture lacks a skip connection, or its name says so; drawn dashed.
        page: File name.
        folders: How the names of the folders of its pictures begin: each `encoder_folder`.
    """

    number: int
    encoder_id: str
    sha256: str
    name: str
    apart: str
    label: str
    model: str
    depth: int
    facts: tuple[tuple[str, str], ...]
    skipless: bool
    page: str
    folders: tuple[str, ...]

    @property
    def style(self) -> str:
        """Classes of its lines in the style sheet: colour, and dashes for skipless."""
        again = self.number // NUM_COLOURS
        return f"c{self.number % NUM_COLOURS} d{min(again, 2)}{'s' if self.skipless else ''}"


def list_checkpoints(records: Sequence[Record]) -> tuple[Checkpoint, ...]:
    """The checkpoints of some records, ordered by name."""
    folders: dict[str, set[str]] = defaultdict(set)
    for encoder, model in {(record.encoder_id, record.model) for record in records}:
        folders[encoder].add(encoder_folder(model, encoder))
    latest = {record.encoder_id: record for record in records}
    known = sorted(model_names(records).items(), key=lambda one: natural_sort_key(one[1]))
    return tuple(
        Checkpoint(
            number=number,
            encoder_id=encoder,
            sha256=record.checkpoint_sha256,
            name=name,
            apart=_apart(record, [one for one in latest.values() if one.model == record.model]),
            label=name if len(name) <= _LONGEST_LABEL else f"{name[:9]}…{name[-10:]}",
            model=record.model,
            depth=record.depth,
            facts=_encoder_facts(record),
            skipless=any(record.architecture.get(skip) is False for skip in _SKIPS)
            or bool(_NO_SKIP.search(name)),
            page=f"checkpoint-{safe_file_name(name)}-{encoder[:8]}.html",
            folders=tuple(sorted(folders[encoder])),
        )
        for number, (encoder, name) in enumerate(known)
        if (record := latest[encoder])
    )


def _apart(record: Record, namesakes: Sequence[Record]) -> str:
    """What is recorded of an encoder and differs among those of its name."""

    def known(one: Record) -> dict[str, str]:
        used = {"mean": list(one.mean), "std": list(one.std), "weights": one.checkpoint_sha256[:12]}
        return dict(_encoder_facts(one)) | {name: str(value) for name, value in used.items()}

    own, others = known(record), [known(one) for one in namesakes]
    names = dict.fromkeys(name for one in (own, *others) for name in one)
    differing = [n for n in names if any(other.get(n) != own.get(n) for other in others)]
    return ", ".join(f"{name} {own.get(name, 'not set')}" for name in differing)


def _encoder_facts(record: Record) -> tuple[tuple[str, str], ...]:
    own = record.architecture
    # Of somebody's own module nobody said.
    known = {} if own.get("kind") == "module" else {"skips": _skips(own)}
    facts: dict[str, Any] = {**known, "depth": record.depth}
    facts |= {name: value for name, value in sorted(own.items()) if name not in _SKIPS}
    epoch = record.details.get("epoch")
    if isinstance(epoch, (int, float)):
        facts["epoch"] = f"{epoch:g}"
    # A digest by its first digits, as elsewhere.
    return tuple(
        (name.replace("_", " "), text[:12] if _DIGEST.fullmatch(text) else text)
        for name, text in ((n, "not set" if v is None else str(v)) for n, v in facts.items())
    )


def _skips(architecture: Mapping[str, Any]) -> str:
    """Such as "attention" where only that has one; what is not recorded is the usual thing."""
    lacking = {name for name in _SKIPS if architecture.get(name) is False}
    if lacking in ({"skip_attention"}, {"skip_mlp"}):
        return "mlp" if "skip_attention" in lacking else "attention"
    return "no" if lacking else "yes"


PANEL_FIELDS = ("task", "dataset", "metric", "facet", "protocol")
"""What readers choose panels by."""

FIRST_TASKS = ("segmentation", "tokencut")
"""The tasks that readers come for stand first."""

_UNLABELLED = frozenset({"pca", "conditioning", "geometry", "warps", "degenerate"})
"""Tasks, protocols and metrics that take photographs as they are."""

MOST_DRAWN = 24
"""Curves of checkpoints, or drawings of runs, in a panel; with more nobody tells them apart."""


@dataclass(frozen=True)
class Line:
    """One checkpoint over its blocks."""

    checkpoint: Checkpoint
    points: tuple[Entry, ...]

    @cached_property
    def best(self) -> Entry | None:
        """The highest point; None when no block may be best, see `Entry.is_rankable`."""
        candidates = [point for point in self.points if point.is_rankable]
        return max(candidates, key=lambda point: point.value, default=None)

    @cached_property
    def bests(self) -> tuple[Entry, ...]:
        """All points as high as the best one; none where all of several are."""
        if self.best is None:
            return ()
        found = tuple(point for point in self._sound if point.value == self.best.value)
        return found if len(found) < len(self._sound) or len(found) == 1 else ()

    @property
    def said_best(self) -> str:
        """Such as "block 3", "blocks 0, 4", or that no block stands out."""
        if not self.bests and self.best is not None:
            return f"all {len(self._sound)} alike"
        shown = [point.layer for point in self.bests or self.points[-1:]]
        return f"block{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))}"

    @property
    def _sound(self) -> tuple[Entry, ...]:
        return tuple(point for point in self.points if not point.is_degenerate)

    @property
    def last(self) -> Entry:
        return self.points[-1]

    def at(self, layer: int) -> Entry | None:
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
        return metric_with_unit(self.record)

    @property
    def title(self) -> str:
        return f"{self.metric}, {self.facet}, protocol {self.protocol}{self.difference}"

    @property
    def record(self) -> Record:
        """One of those behind the values, which share images, settings and what was asked."""
        return self.lines[0].points[0].records[0]

    @property
    def is_ranked(self) -> bool:
        """Whether more is better, and some block has a value."""
        has_value = any(not math.isnan(point.value) for point in self.points)
        return has_value and self.record.is_ranked

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
    def points(self) -> tuple[Entry, ...]:
        """Those of all lines."""
        return tuple(point for line in self.lines for point in line.points)

    @property
    def records(self) -> list[Record]:
        """Those behind its values."""
        return [record for point in self.points for record in point.records]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({point.layer for point in self.points}))

    @cached_property
    def dagger_meaning(self) -> str:
        """What a dagger beside its numbers means; empty if there is none."""
        return dagger_meaning(point.degenerate_percent for point in self.points)

    @cached_property
    def baselines(self) -> tuple[tuple[str, float], ...]:
        """Answers that look at no image, in words with their score, and that score."""
        return said_baselines(self.records)

    @property
    def newest(self) -> str:
        """When its latest record was made."""
        return max(record.created for record in self.records)

    def unbeaten(self, point: Entry | None) -> str:
        """The answers without a look at the images that a score does not beat, in words."""
        found = [name for name, score in self.baselines if point and point.value <= score]
        return f"not above {' and '.join(found)}" if found else ""

    def shown(self, checkpoint: Checkpoint) -> Entry | None:
        """The best point of a checkpoint, or that of its last block if none may be best."""
        line = self.line(checkpoint)
        return (line.best or line.last) if line else None

    def line(self, checkpoint: Checkpoint) -> Line | None:
        return self._by_encoder.get(checkpoint.encoder_id)

    @cached_property
    def _by_encoder(self) -> Mapping[str, Line]:
        return {line.checkpoint.encoder_id: line for line in self.lines}


def group_into_panels(
    records: Sequence[Record], checkpoints: Sequence[Checkpoint]
) -> tuple[Panel, ...]:
    """Group records by everything that must be the same for numbers to be compared."""
    groups = comparable_groups(records)
    firsts = [group[0] for group in groups]
    same = (*PANEL_FIELDS, "split")
    panels = []
    for number, group in enumerate(groups):
        first = group[0]
        # Panels of the same names.
        rivals = [r for r in firsts if all(getattr(r, n) == getattr(first, n) for n in same)]
        differing = differing_settings(first, rivals)
        entries = mean_entries(
            sorted(group, key=lambda one: one.seed), lambda one: (one.encoder_id, one.layer)
        )
        points: dict[str, list[Entry]] = defaultdict(list)
        for (encoder, _), point in sorted(entries.items(), key=lambda one: one[0]):
            points[encoder].append(point)
        # What the protocol's name leaves out, and what sets it apart from the rivals.
        changed = first.protocol_label.removeprefix(first.protocol) + training_suffix(first)
        panels.append(
            Panel(
                number=number,
                **{name: getattr(first, name) for name in (*PANEL_FIELDS, "split", "unit")},
                difference=changed + (f" [{', '.join(differing)}]" if differing else ""),
                facts=tuple(_facts(first, differing).items()),
                lines=tuple(
                    Line(one, tuple(points[one.encoder_id]))
                    for one in checkpoints
                    if one.encoder_id in points
                ),
                footnote=footnote(group),
            )
        )
    return tuple(panels)


def _facts(record: Record, differing: Sequence[str]) -> dict[str, str]:
    """What `Panel.title` and `Panel.difference` say, one by one."""
    facts = {name: str(getattr(record, name)) for name in ("metric", "facet", "protocol")}
    facts["on"] = f"{record.dataset} {record.split}"
    facts |= {name: str(value) for name, value in sorted(record.changed.items())}
    if record.trained_on is not None:
        facts["trained on"] = str(record.trained_on)
    parts = (text.partition("=" if "=" in text else " ") for text in differing)
    return facts | {name: value for name, _, value in parts}


def spot_of(point: Entry, x: int | float, where: str) -> Spot:
    """A score in a drawing, a cross where it is degenerate."""
    hint = f"{where}: {point.text()}"
    return Spot(x, point.value, point.low, point.high, hint, point.is_degenerate)


def said_baselines(records: Sequence[Record]) -> tuple[tuple[str, float], ...]:
    """Answers that look at no image, in words with their score, and that score."""
    return tuple((f"{answer} {v[0]:.1f}", v[0]) for answer, v in baselines(records).items())


def said_reasons(points: Iterable[Entry]) -> str:
    """Why some of them have no value, such as "–: no class has two images"; empty if all have."""
    found = dict.fromkeys(point.reason for point in points if point.reason)
    return f"{NO_VALUE}: {'; '.join(found)}" if found else ""


def said_units(panels: Sequence[Panel]) -> str:
    """Such as "percent, except plain numbers: condition_number"."""
    plain = sorted({panel.metric for panel in panels if not panel.unit})
    if not plain:
        return "percent"
    if all(not panel.unit for panel in panels):
        return "plain numbers"
    return f"percent, except plain numbers: {', '.join(plain)}"


def headline_metric(panels: Sequence[Panel]) -> str:
    """The metric that stands for a task: of the known ones, or the first in which more is better.

    Args:
        panels: Of one task.
    """
    return choose_main_metric([(panel.metric, panel.is_ranked) for panel in panels])


def select_headline_panels(panels: Sequence[Panel]) -> tuple[Panel, ...]:
    """Of each task and split of a dataset the panel of its metric with the most checkpoints.

    Then, of checkpoints that it lacks, as those that were seen in another protocol, the next one,
    so that none is without its number: of the same facet and protocol where there is one, which is
    a panel of its own where an encoder takes another size. Of equals it is that with the most
    blocks, so a look at one does not take the place of a run over all; then that of the protocol as
    it is; then by its facet's name, one from inside of a block last, so that a run again changes
    nothing; then, as before and after an image was replaced, the newer one.
    """

    def weight(panel: Panel) -> tuple[int, int, int, bool, str, str]:
        size = -len(panel.lines), -len(panel.layers), len(panel.record.changed)
        return *size, panel.facet in INNER_FACETS, panel.facet, panel.protocol

    chosen = []
    for those in by_task(panels).values():
        # Boxes and masks of one task have metrics of their own.
        for rivals in by_place(those).values():
            metric, shown = headline_metric(rivals), set[int]()
            newest_first = sorted(rivals, key=lambda p: p.newest, reverse=True)
            of_metric = [panel for panel in newest_first if panel.metric == metric]
            best = min(of_metric, key=weight)
            kind = (best.facet, best.protocol)
            for panel in sorted(
                of_metric, key=lambda p, kind=kind: ((p.facet, p.protocol) != kind, weight(p))
            ):
                there = {line.checkpoint.number for line in panel.lines}
                if not there <= shown:
                    chosen.append(panel)
                    shown |= there
    return tuple(chosen)


def by_place(panels: Sequence[Panel]) -> dict[str, list[Panel]]:
    """Panels of a task by split of a dataset."""
    places: dict[str, list[Panel]] = defaultdict(list)
    for panel in panels:
        places[panel.where].append(panel)
    return places


def by_task(panels: Sequence[Panel]) -> dict[str, list[Panel]]:
    """Panels by task: the first ones, those in which more is better, others with few panels."""
    tasks: dict[str, list[Panel]] = defaultdict(list)
    for panel in panels:
        tasks[panel.task].append(panel)

    def place(task: str) -> tuple[int, int]:
        first = FIRST_TASKS.index(task) if task in FIRST_TASKS else len(FIRST_TASKS)
        is_ranked = any(panel.is_ranked for panel in tasks[task])
        return first, 0 if is_ranked else len(tasks[task])

    return {task: tasks[task] for task in sorted(tasks, key=place)}
