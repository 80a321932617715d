"""Arrange the records (stored scores) of a report into checkpoints and panels.

A panel is a group of comparable scores, drawn as one chart with one line per checkpoint. A
checkpoint has the same colour and dashes in all charts.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssl_bench.layers import INNER_FACETS
from ssl_bench.report.drawing import Point
from ssl_bench.results import Record
from ssl_bench.system.files import figures_folder_prefix, natural_sort_key
from ssl_bench.system.output import safe_file_name
from ssl_bench.tables.entries import (
    ScoreEntry,
    choose_main_metric,
    comparable_groups,
    differing_settings,
    explain_dagger,
    format_footnote,
    group_and_average,
    list_baselines,
    metric_with_unit,
    model_names,
    training_suffix,
)
from ssl_bench.tables.sheets import NO_VALUE
from ssl_bench.tables.styles import SKIPS, choose_styles, lacks_skips

MAX_LINES = 24
"""Largest number of checkpoints or runs that are drawn in one chart."""
PANEL_FIELDS = ("task", "dataset", "metric", "facet", "protocol")
"""Fields of stored scores by which readers can filter the charts of a page."""
FIRST_TASKS = ("segmentation", "tokencut")
"""Tasks that come first on a page, in this order."""

_MAX_LABEL_LETTERS = 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Names of tasks, protocols and metrics whose scores are computed without labels.
_UNLABELLED = frozenset({"pca", "conditioning", "geometry", "warps", "degenerate"})


@dataclass(frozen=True)
class Checkpoint:
    """An encoder in a report.

    Attributes:
        number: Index in the list of checkpoints, which is sorted by name.
        encoder_id: Digest of the weights, the architecture and the input normalisation.
        sha256: SHA-256 of the weights.
        name: Name of the checkpoint, which is unique in the report.
        distinction: Properties that distinguish the checkpoint from others with the same model
            name, such as "image size 224".
        label: Short name for the right end of a curve. The middle of a long name is left out.
        model: Model name as in records. Several checkpoints may have the same model name.
        facts: Names and values of the encoder's properties, such as ("depth", "12").
        is_skipless: Whether the architecture or the name says that the encoder has no skip
            connections.
        style: CSS classes for colour and dashes.
        page: File name of the checkpoint's HTML page.
        picture_folders: Names of the folders that contain pictures of the checkpoint, without their
            endings. An ending is "-" and eight digits that identify a set of images.
    """

    number: int
    encoder_id: str
    sha256: str
    name: str
    distinction: str
    label: str
    model: str
    depth: int
    facts: tuple[tuple[str, str], ...]
    is_skipless: bool
    style: str
    page: str
    picture_folders: tuple[str, ...]


def list_checkpoints(records: Sequence[Record]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that occur in the records (stored scores), sorted by name."""
    folders: dict[str, set[str]] = defaultdict(set)
    for encoder, model in {(record.encoder_id, record.model) for record in records}:
        folders[encoder].add(figures_folder_prefix(model, encoder))
    latest = {record.encoder_id: record for record in records}
    names = sorted(model_names(records).items(), key=lambda item: natural_sort_key(item[1]))
    skipless = {name: lacks_skips(name, latest[encoder].architecture) for encoder, name in names}
    styles = choose_styles(skipless)
    checkpoints = []
    for number, (encoder, name) in enumerate(names):
        record = latest[encoder]
        namesakes = [other for other in latest.values() if other.model == record.model]
        checkpoints.append(
            Checkpoint(
                number=number,
                encoder_id=encoder,
                sha256=record.checkpoint_sha256,
                name=name,
                distinction=_describe_distinction(record, namesakes),
                label=name if len(name) <= _MAX_LABEL_LETTERS else f"{name[:9]}…{name[-10:]}",
                model=record.model,
                depth=record.depth,
                facts=_list_encoder_facts(record),
                is_skipless=skipless[name],
                style=styles[name].css,
                page=f"checkpoint-{safe_file_name(name)}-{encoder[:8]}.html",
                picture_folders=tuple(sorted(folders[encoder])),
            )
        )
    return tuple(checkpoints)


def mute_checkpoints(
    checkpoints: Sequence[Checkpoint], coloured: Sequence[Checkpoint]
) -> tuple[Checkpoint, ...]:
    """Return copies of the checkpoints, which are drawn in grey unless they are in `coloured`."""
    styles = choose_styles({one.name: one.is_skipless for one in coloured})

    def style(checkpoint: Checkpoint) -> str:
        if checkpoint.name in styles:
            return styles[checkpoint.name].css
        return "muted d0s" if checkpoint.is_skipless else "muted d0"

    return tuple(replace(one, style=style(one)) for one in checkpoints)


def _describe_distinction(record: Record, namesakes: Sequence[Record]) -> str:
    """Return the properties that distinguish an encoder from others with the same model name.

    For example, the properties are "depth 12, image size 224". `namesakes` contains a stored score
    of each encoder with this model name.
    """

    def list_facts(other: Record) -> dict[str, str]:
        inputs = {"mean": list(other.mean), "std": list(other.std)}
        facts = dict(_list_encoder_facts(other))
        facts |= {name: str(value) for name, value in inputs.items()}
        return facts | {"weights": other.checkpoint_sha256[:12]}

    own, others = list_facts(record), [list_facts(other) for other in namesakes]
    names = dict.fromkeys(name for facts in (own, *others) for name in facts)
    differing = [n for n in names if any(other.get(n) != own.get(n) for other in others)]
    return ", ".join(f"{name} {own.get(name, 'not set')}" for name in differing)


def _list_encoder_facts(record: Record) -> tuple[tuple[str, str], ...]:
    architecture = record.architecture
    # It is unknown whether a user's module has skip connections.
    is_known = architecture.get("kind") != "module"
    facts: dict[str, Any] = {"skips": _describe_skips(architecture)} if is_known else {}
    facts["depth"] = record.depth
    facts |= {name: value for name, value in sorted(architecture.items()) if name not in SKIPS}
    epoch = record.details.get("epoch")
    if isinstance(epoch, (int, float)):
        facts["epoch"] = f"{epoch:g}"
    texts = {name: "not set" if value is None else str(value) for name, value in facts.items()}
    # Show only the first digits of a SHA-256 digest.
    return tuple(
        (name.replace("_", " "), text[:12] if _SHA256.fullmatch(text) else text)
        for name, text in texts.items()
    )


def _describe_skips(architecture: Mapping[str, Any]) -> str:
    """Return which parts of a block have skip connections: "attention", "mlp", "yes" or "no".

    "yes" means that all parts have skip connections, and "no" means that none has. `architecture`
    contains the configuration of the encoder.
    """
    missing = {name for name in SKIPS if architecture.get(name) is False}
    if missing in ({"skip_attention"}, {"skip_mlp"}):
        return "mlp" if "skip_attention" in missing else "attention"
    return "no" if missing else "yes"


@dataclass(frozen=True)
class ScoreLine:
    """The line of one checkpoint in a chart: its scores by block, averaged over seeds.

    Attributes:
        entries: The score of each block.
    """

    checkpoint: Checkpoint
    entries: tuple[ScoreEntry, ...]

    @cached_property
    def best_entry(self) -> ScoreEntry | None:
        """The entry (score at a block) with the highest score, or None if no block can be best.

        `ScoreEntry.is_rankable` states which blocks can be the best.
        """
        candidates = [entry for entry in self.entries if entry.is_rankable]
        return max(candidates, key=lambda entry: entry.value, default=None)

    @property
    def best_value(self) -> float:
        """The score of the best block, or minus infinity if `best_entry` is None."""
        return self.best_entry.value if self.best_entry else -math.inf

    @cached_property
    def marked_entries(self) -> tuple[ScoreEntry, ...]:
        """The scores that are marked as best: the highest score, or several if they tie.

        The tuple is empty if no block can be best, or if several blocks all have the same score.
        Degenerate blocks, where too many images have an arbitrary result, are ignored.
        """
        if self.best_entry is None:
            return ()
        equal = tuple(entry for entry in self._valid if entry.value == self.best_entry.value)
        return equal if len(equal) < len(self._valid) or len(equal) == 1 else ()

    @property
    def best_blocks_text(self) -> str:
        """The blocks with the best score as text, such as "block 3" or "all 12 blocks equal".

        If no block can be the best, the text names the last block. For example, the text "block 11,
        degenerate" means that too many images have an arbitrary result.
        """
        if not self.marked_entries and self.best_entry is not None:
            return f"all {len(self._valid)} blocks equal"
        if self.best_entry is None and self.entries[-1].is_degenerate:
            return f"{name_blocks([self.entries[-1].layer])}, degenerate"
        return name_blocks([entry.layer for entry in self.marked_entries or self.entries[-1:]])

    @property
    def _valid(self) -> tuple[ScoreEntry, ...]:
        return tuple(entry for entry in self.entries if not entry.is_degenerate)

    def find_entry(self, layer: int) -> ScoreEntry | None:
        """Return the score of a block, or None if the block was not scored."""
        return next((entry for entry in self.entries if entry.layer == layer), None)


@dataclass(frozen=True)
class ScorePanel:
    """Comparable scores of checkpoints: one metric on the same images with the same settings.

    A panel is drawn as one chart.

    Attributes:
        number: Index in the list of panels. Links to the panel contain this number.
        unit: "%", or "" for plain numbers.
        facet: Kind of feature, such as "token".
        protocol: Name of a preset of the probe's settings.
        settings_text: Settings that distinguish the panel from others with the same metric and
            protocol, such as ", lr=0.1", or "".
        lines: The scores of each checkpoint.
        footnote: Notes about the scores, such as the number of images, the seeds and the software
            versions.
    """

    number: int
    task: str
    dataset: str
    split: str
    metric: str
    unit: str
    facet: str
    protocol: str
    settings_text: str
    lines: tuple[ScoreLine, ...]
    footnote: str

    @property
    def split_name(self) -> str:
        """Dataset and split, such as "voc2012 val"."""
        return f"{self.dataset} {self.split}"

    @property
    def metric_label(self) -> str:
        """Metric and unit, such as "corloc (%)"."""
        return metric_with_unit(self.record)

    @property
    def variant(self) -> str:
        """Kind of feature, protocol and settings, such as "token, protocol fast, lr=0.1".

        A protocol is a preset of the probe's settings.
        """
        return f"{self.facet}, protocol {self.protocol}{self.settings_text}"

    @property
    def title(self) -> str:
        """Metric, kind of feature and protocol, such as "corloc, key, protocol reference".

        A protocol is a preset of the probe's settings.
        """
        return f"{self.metric}, {self.variant}"

    @property
    def record(self) -> Record:
        """The first record (stored score) of this panel.

        All records of a panel have the same images and settings, so any of them can be used.
        """
        return self.lines[0].entries[0].records[0]

    @property
    def is_ranked(self) -> bool:
        """Whether scores can be ranked: higher is better, and at least one score is not NaN."""
        has_value = any(not math.isnan(entry.value) for entry in self.entries)
        return has_value and self.record.is_ranked

    @property
    def has_labels(self) -> bool:
        """Whether labels of the images are required to compute the scores."""
        return _UNLABELLED.isdisjoint((self.task, self.protocol, self.metric))

    @property
    def is_corrupted(self) -> bool:
        return self.record.corruption is not None

    @property
    def drawn_lines(self) -> tuple[ScoreLine, ...]:
        """The lines to draw: up to `MAX_LINES` lines with the highest scores, sorted by name."""
        ordered = sorted(self.lines, key=lambda line: -line.best_value)
        chosen = {line.checkpoint.encoder_id for line in ordered[:MAX_LINES]}
        return tuple(line for line in self.lines if line.checkpoint.encoder_id in chosen)

    @property
    def ranked_lines(self) -> list[ScoreLine]:
        """The lines of checkpoints that have a best block (`ScoreLine.best_entry` is not None)."""
        return [line for line in self.lines if line.best_entry]

    @cached_property
    def entries(self) -> tuple[ScoreEntry, ...]:
        return tuple(entry for line in self.lines for entry in line.entries)

    @property
    def records(self) -> list[Record]:
        return [record for entry in self.entries for record in entry.records]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Indices of the scored blocks, in ascending order."""
        return tuple(sorted({entry.layer for entry in self.entries}))

    @cached_property
    def dagger_note(self) -> str:
        return explain_dagger(entry.degenerate_percent for entry in self.entries)

    @cached_property
    def baselines(self) -> tuple[tuple[str, float], ...]:
        return list_baselines(self.records)

    @property
    def newest(self) -> str:
        """Creation date of the newest record (stored score)."""
        return max(record.created for record in self.records)

    def describe_unbeaten(self, entry: ScoreEntry) -> str:
        """Return a text that names the baselines which a score does not significantly exceed.

        The baselines are image-independent. The text is, for example, "not significantly above
        centre box 43.0". The text is "" if all baselines are below the 95 % interval of the score.
        """
        low = entry.value if entry.low is None else entry.low
        names = [name for name, value in self.baselines if low <= value]
        return f"not significantly above {' and '.join(names)}" if names else ""

    def find_main_entry(self, checkpoint: Checkpoint) -> ScoreEntry | None:
        """Return the score that represents a checkpoint in overviews, or None if it has no score.

        The score of the best block represents the checkpoint. If no block can be the best, the
        score of the last block is used.
        """
        line = self.find_line(checkpoint)
        return (line.best_entry or line.entries[-1]) if line else None

    def find_line(self, checkpoint: Checkpoint) -> ScoreLine | None:
        return self._line_by_encoder.get(checkpoint.encoder_id)

    @cached_property
    def _line_by_encoder(self) -> Mapping[str, ScoreLine]:
        return {line.checkpoint.encoder_id: line for line in self.lines}


def group_into_panels(
    records: Sequence[Record], checkpoints: Sequence[Checkpoint]
) -> tuple[ScorePanel, ...]:
    """Return one panel for each group of comparable records (stored scores).

    Records can be compared if they have the same metric, images and settings.
    """
    groups = comparable_groups(records)
    firsts = [group[0] for group in groups]
    names = (*PANEL_FIELDS, "split")
    panels = []
    for number, group in enumerate(groups):
        first = group[0]
        namesakes = [r for r in firsts if all(getattr(r, n) == getattr(first, n) for n in names)]
        differing = differing_settings(first, namesakes)
        means = group_and_average(
            sorted(group, key=lambda record: record.seed),
            lambda record: (record.encoder_id, record.layer),
        )
        entries: dict[str, list[ScoreEntry]] = defaultdict(list)
        for (encoder, _), entry in sorted(means.items(), key=lambda item: item[0]):
            entries[encoder].append(entry)
        changed = first.protocol_label.removeprefix(first.protocol) + training_suffix(first)
        panels.append(
            ScorePanel(
                number=number,
                **{name: getattr(first, name) for name in (*names, "unit")},
                settings_text=changed + (f" [{', '.join(differing)}]" if differing else ""),
                lines=tuple(
                    ScoreLine(checkpoint, tuple(entries[checkpoint.encoder_id]))
                    for checkpoint in checkpoints
                    if checkpoint.encoder_id in entries
                ),
                footnote=format_footnote(group),
            )
        )
    return tuple(panels)


def make_point(entry: ScoreEntry, x: int | float, name: str) -> Point:
    """Return a point of a chart for the score `entry` at the horizontal position `x`.

    The tooltip of the point begins with `name`.
    """
    tooltip = f"{name}: {entry.text()}"
    return Point(x, entry.value, entry.low, entry.high, tooltip, entry.is_degenerate)


def explain_missing_values(entries: Iterable[ScoreEntry]) -> str:
    """Return a note on why scores are missing, such as "–: no class has two images".

    The note is "" if no reason is recorded.
    """
    reasons = dict.fromkeys(entry.reason for entry in entries if entry.reason)
    return f"{NO_VALUE}: {'; '.join(reasons)}" if reasons else ""


def name_blocks(layers: Sequence[int]) -> str:
    """Return block indices as text, such as "block 3", "blocks 0, 4 and 7" or "blocks 3 to 11"."""
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"blocks {layers[0]} to {layers[-1]}"
    *others, last = map(str, layers)
    return f"blocks {', '.join(others)} and {last}" if others else f"block {last}"


def find_main_metric(panels: Sequence[ScorePanel]) -> str:
    """Return the main metric of a task, which represents the task in overviews.

    `panels` contains the panels (groups of comparable scores) of this task.
    """
    return choose_main_metric(panels[0].task, [(panel.metric, panel.is_ranked) for panel in panels])


def select_main_panels(panels: Sequence[ScorePanel]) -> tuple[ScorePanel, ...]:
    """Return the panels that represent each task on each split of a dataset in overviews.

    A panel is a group of comparable scores. Among panels of the task's main metric, the panel with
    the most checkpoints is chosen. Further panels are added for checkpoints that this panel lacks.
    If possible, all chosen panels have the same facet (kind of feature) and protocol (preset).
    """

    def rank(panel: ScorePanel) -> tuple[int, int, int, bool, str, str]:
        sizes = (-len(panel.lines), -len(panel.layers), len(panel.record.changed))
        return *sizes, panel.facet in INNER_FACETS, panel.facet, panel.protocol

    chosen = []
    for of_task in group_by_task(panels).values():
        for of_split in group_by_split(of_task).values():
            metric = find_main_metric(of_split)
            candidates = [panel for panel in of_split if panel.metric == metric]
            # Sorting is stable, so newer panels come first among panels of equal rank.
            candidates.sort(key=lambda panel: panel.newest, reverse=True)
            candidates.sort(key=rank)
            kind = (candidates[0].facet, candidates[0].protocol)
            candidates.sort(key=lambda panel, kind=kind: (panel.facet, panel.protocol) != kind)
            covered: set[int] = set()
            for panel in candidates:
                numbers = {line.checkpoint.number for line in panel.lines}
                if not numbers <= covered:
                    chosen.append(panel)
                    covered |= numbers
    return tuple(chosen)


def rank_checkpoints(
    panels: Sequence[ScorePanel], checkpoints: Sequence[Checkpoint]
) -> list[Checkpoint]:
    """Sort checkpoints by their mean rank over panels, best first.

    A panel is a group of comparable scores. In each panel, checkpoints are ranked by the score of
    their best block, and ranks are divided by the number of ranked checkpoints. Panels with a
    single ranked checkpoint are ignored. Checkpoints without any rank come last.
    """
    ranks: dict[str, list[float]] = defaultdict(list)
    for panel in panels:
        lines = panel.ranked_lines
        values = sorted((line.best_value for line in lines), reverse=True)
        for line in lines if len(lines) > 1 else ():
            ranks[line.checkpoint.encoder_id].append(values.index(line.best_value) / len(lines))

    def mean_rank(checkpoint: Checkpoint) -> float:
        own = ranks[checkpoint.encoder_id]
        return sum(own) / len(own) if own else math.inf

    return sorted(checkpoints, key=mean_rank)


def group_by_split(panels: Sequence[ScorePanel]) -> dict[str, list[ScorePanel]]:
    groups: dict[str, list[ScorePanel]] = defaultdict(list)
    for panel in panels:
        groups[panel.split_name].append(panel)
    return groups


def group_by_task(panels: Sequence[ScorePanel]) -> dict[str, list[ScorePanel]]:
    """Group panels (groups of comparable scores) by task.

    Tasks are in the order in which pages show them. `FIRST_TASKS` come first, followed by tasks
    with a metric for which higher is better. The remaining tasks are sorted by their number of
    panels, in ascending order.
    """
    groups: dict[str, list[ScorePanel]] = defaultdict(list)
    for panel in panels:
        groups[panel.task].append(panel)

    def rank(task: str) -> tuple[int, int]:
        first = FIRST_TASKS.index(task) if task in FIRST_TASKS else len(FIRST_TASKS)
        is_ranked = any(panel.is_ranked for panel in groups[task])
        return first, 0 if is_ranked else len(groups[task])

    return {task: groups[task] for task in sorted(groups, key=rank)}
