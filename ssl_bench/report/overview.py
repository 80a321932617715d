"""What a report says at a glance: sentences, tables of checkpoints and tasks, ranks of blocks."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from ssl_bench.report.comparing import MAX_PAIRED, side_of
from ssl_bench.report.drawing import Curve, RankChart, draw_ranks
from ssl_bench.report.model import (
    Checkpoint,
    Line,
    Panel,
    by_place,
    by_task,
    headline_metric,
    select_headline_panels,
    spot_of,
)
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.comparison import block_side, difference

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "segmentation": "A linear head names the class of every pixel from the patches of a block; "
        "mean IoU over the classes, more is better.",
        "tokencut": "The normalised cut of a block's patches gives a box an image; CorLoc: percent "
        "of the images whose box overlaps a true one with an IoU of 1/2, more is better. "
        "Without boxes, only the percent of graphs that say nothing (degenerate).",
        "retrieval": "Patches take the class of their nearest training patches, nothing is "
        "trained; mean IoU over the classes, more is better.",
        "classification": "A linear head names the class of the image; percent right, more is "
        "better.",
        "knn": "Images take the class of their nearest training images, nothing is trained; "
        "percent right, more is better.",
        "correspondence": "A point is looked for in another view or image by the nearest patch; "
        "PCK: percent found within a share of the side of the view, or of the object's box; more "
        "is better.",
        "discovery": "The cuts of a block's patches give several boxes an image; AP, AP50, AR100 "
        "as COCO counts them, of objects of any class, more is better.",
        "clustering": "k-means of the images, or of their patches, beside their classes, which it "
        "does not see; NMI and the like, more is better.",
        "geometry": "How the features of a data set lie in their space: on how many directions "
        "(RankMe, LiDAR, effective rank), how alike views of an image are (alignment), what "
        "patches tell of their place; most of these are neither good nor bad.",
        "pca": "How much of what the patches of an image differ in three components show; neither "
        "more nor less is better: patches that are all alike have one component.",
        "conditioning": "How near tokens, attention and Jacobians of a block are to singular; "
        "condition numbers (less is nearer to an isometry), ranks, CKA.",
    }
)
"""Of the tasks of this suite; others have none."""

Facts = Sequence[tuple[str, str]]
"""Names and values; those of one row have different names."""

MOST_BESIDE = 3
"""Columns of a table of blocks: what a phone shows without scrolling sideways."""

MOST_OPEN = 3
"""Tables of a group; the others are folded."""

FEWEST_RANKED = 2
"""Blocks with a value that are drawn by their ranks."""

_UNRANKED = "c7 d0"
_PLAIN = ("metric", "on", "facet")
_IN_HEADS = ("on", "facet", "protocol")
# For programs; the page of the checkpoint has it.
_NO_COLUMN = ("modules sha256", "position margin")

_NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip
_METRICS = {
    r"miou.*": "mIoU",
    r"corloc": "CorLoc",
    r"ap(\d*)": r"AP\1",
    r"ar(\d+)": r"AR\1",
    r"top(\d).*": r"top-\1 accuracy",
    r"pck_(.*)": r"PCK@\1",
    r"ami": "AMI",
    r"nmi": "NMI",
    r"rankme": "RankMe",
    r"degenerate": "degenerate graphs (percent of the images whose cut rounding chooses)",
}


class Differing(NamedTuple):
    """Facts of some rows: what the rows differ in, to be columns, and what is said once.

    Attributes:
        names: Those in which the rows differ, some of them by not having it.
        rows: Their values, row by row, empty where a row has none.
        shared: Names and values that all rows have.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shared: tuple[tuple[str, str], ...]

    def words(self, number: int) -> tuple[str, ...]:
        """Values of a row that explain themselves, others with their names."""
        return tuple(
            value if name in _PLAIN else f"{name} {value}"
            for name, value in zip(self.names, self.rows[number], strict=True)
            if value
        )


def differing(rows: Sequence[Facts]) -> Differing:
    """Take the facts of rows apart, in the order in which their names come up."""
    known = [dict(row) for row in rows]
    names = list(dict.fromkeys(name for row in known for name in row))
    differ = [name for name in names if len({row.get(name) for row in known}) > 1]
    return Differing(
        names=tuple(differ),
        rows=tuple(tuple(row.get(name, "") for name in differ) for row in known),
        shared=tuple((name, known[0][name]) for name in names if name not in differ),
    )


def board_of(panels: Sequence[Panel], checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """The first table of a report: a row a checkpoint, a column a task and dataset.

    Returns:
        `checkpoints`, what they differ in row by row; `columns`, the panel of each and what sets it
        apart from the others; `shared`, what all columns share.
    """
    chosen = select_headline_panels(panels)
    heads = [tuple(fact for fact in panel.facts if fact[0] in _IN_HEADS) for panel in chosen]
    rivals: dict[Any, list[int]] = defaultdict(list)
    for number, panel in enumerate(chosen):
        rivals[panel.task, panel.metric, heads[number]].append(number)
    facts, words = differing(heads), dict[int, Sequence[str]]()
    for those in rivals.values():
        # Of the same task, metric and head what else is different, such as the images' size.
        settings = differing([chosen[number].facts for number in those])
        for place, number in enumerate(those):
            words[number] = (*facts.words(number), *settings.words(place))
    rows = [[fact for fact in one.facts if fact[0] not in _NO_COLUMN] for one in checkpoints]
    columns = [(panel, words[number]) for number, panel in enumerate(chosen)]
    return {"checkpoints": differing(rows), "columns": columns, "shared": facts.shared}


BlockTable = Sequence[tuple[Panel, Line, tuple[str, ...]]]
"""A few measurements of a checkpoint, a row a block; the words set one apart from the others."""


class BlockGroup(NamedTuple):
    """The measurements of one checkpoint for a task on one split of a dataset.

    Attributes:
        shared: What all of them have in common.
        tables: Those of the metric that stands for the task, and a few more.
        folded: The others.
    """

    task: str
    where: str
    shared: Facts
    tables: Sequence[BlockTable]
    folded: Sequence[BlockTable]


def block_groups(lines: Sequence[tuple[Panel, Line]]) -> list[BlockGroup]:
    """The measurements of a checkpoint by task and split of a dataset."""
    own = {panel.number: line for panel, line in lines}
    groups = []
    for task, those in by_task([panel for panel, _ in lines]).items():
        for where, panels in by_place(those).items():
            metric = headline_metric(panels)
            panels.sort(key=lambda panel, metric=metric: panel.metric != metric)
            facts = differing(
                [[f for f in panel.facts if f[0] not in ("metric", "on")] for panel in panels]
            )
            columns = [(p, own[p.number], facts.words(number)) for number, p in enumerate(panels)]
            # As few tables as can be, of about as many columns each.
            count = -(-len(columns) // MOST_BESIDE)
            ends = [len(columns) * number // count for number in range(count + 1)]
            tables = [columns[a:b] for a, b in pairwise(ends)]
            groups.append(
                BlockGroup(task, where, facts.shared, tables[:MOST_OPEN], tables[MOST_OPEN:])
            )
    return groups


@dataclass(frozen=True)
class Profile:
    """One encoder, all questions: what its scores say, and at which blocks they are high.

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
    store: ResultStore, panels: Sequence[Panel], checkpoints: Sequence[Checkpoint]
) -> tuple[Profile, ...]:
    """One a checkpoint with scores; of a few its blocks are told apart by pairs of images."""
    chosen, paired = _of_each_protocol(panels), len(checkpoints) <= MAX_PAIRED
    profiles, protocols = [], defaultdict[tuple[str, str], set[str]](set)
    for panel in panels:
        protocols[panel.task, panel.where].add(panel.protocol)
    for checkpoint in checkpoints:
        # The panel that comes first, of several of one protocol.
        own: dict[tuple[str, str, str], tuple[Panel, Line]] = {}
        for panel in chosen:
            if line := panel.line(checkpoint):
                own.setdefault((panel.task, panel.where, panel.protocol), (panel, line))
        answers, questions, has_unranked = [], [], False
        for (task, where, protocol), (panel, line) in own.items():
            told = told_apart(store, panel, line, paired=paired)
            which = f", {protocol}," if len(protocols[task, where]) > 1 else ""
            answers.append(f"{task}{which} on {panel.dataset}: {answer(panel, line, told)}")
            ranked = [one for one in line.points if not one.is_degenerate]
            if sum(not math.isnan(point.value) for point in ranked) < FEWEST_RANKED:
                continue
            style = checkpoint.style if panel.is_ranked else _UNRANKED
            spots = [spot_of(one, one.layer, f"block {one.layer}") for one in ranked]
            about = f"{panel.metric}{which.rstrip(',')}\n{panel.dataset}"
            questions.append(Curve(task, style, checkpoint.number, spots, about))
            has_unranked |= not panel.is_ranked
        chart = draw_ranks(questions) if questions else None
        answers += dict.fromkeys(_left_out(panel.record) for panel, _ in own.values())
        answers = list(filter(None, answers))
        if answers:
            profiles.append(Profile(checkpoint, tuple(answers), chart, has_unranked))
    return tuple(profiles)


def _of_each_protocol(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels that stand for a task and place, and those of its other protocols."""
    chosen = {panel.number: panel for panel in select_headline_panels(panels)}
    for protocol in dict.fromkeys(panel.protocol for panel in panels):
        those = select_headline_panels([panel for panel in panels if panel.protocol == protocol])
        chosen |= {panel.number: panel for panel in those}
    places = list(dict.fromkeys((panel.task, panel.where) for panel in chosen.values()))
    return sorted(chosen.values(), key=lambda panel: places.index((panel.task, panel.where)))


def _left_out(record: Record) -> str:
    """Which images nobody could read; empty where all were."""
    gone = record.details.get("left_out", {}).values()
    if not gone:
        return ""
    number, names = sum(one["count"] for one in gone), [n for one in gone for n in one["first"]]
    more = ", ..." if number > len(names) else ""
    return f"left out of {record.dataset}, as they cannot be read: {', '.join(names)}{more}"


def told_apart(store: ResultStore, panel: Panel, line: Line, *, paired: bool) -> set[int] | None:
    """Blocks that are lower than the best one: by pairs of images, or else by their intervals.

    Degenerate blocks are not among them. Of several seeds the lowest is paired. None where there
    are neither.
    """
    best = line.best
    if best is None:
        return None
    side = side_of(store, panel, line.checkpoint) if paired else None
    if side is not None and best.layer in side.scored.blocks:
        highest = block_side(side.scored, best.layer)
        return {
            layer
            for layer in side.scored.blocks
            if difference("", highest, block_side(side.scored, layer)).is_significant
        }
    low = best.low
    ends = {point.layer: point.high for point in line.points if not point.is_degenerate}
    if low is None or any(high is None for high in ends.values()):
        return None
    return {layer for layer, high in ends.items() if high is not None and high < low}


def answer(panel: Panel, line: Line, told: set[int] | None) -> str:
    """Such as "best at block 5, mIoU 20.5; all others are lower on the same 30 images".

    Args:
        panel: The task's.
        line: The encoder's.
        told: Blocks whose images tell them from the best one; None where nothing is known of it.
    """
    known = [point for point in line.points if not math.isnan(point.value)]
    metric = _metric(panel.metric)
    if not known:
        why = line.points[0].reason
        return f"no block has a value of {metric}{f': {why}' if why else ''}"
    if not panel.is_ranked:
        low = min(known, key=lambda point: point.value)
        high = max(known, key=lambda point: point.value)
        metric, of = f"{metric} of {panel.facet}", f"on {panel.record.num_images} images"
        if low.value == high.value:
            return f"{metric} {low.parts[0]} at {_blocks([point.layer for point in known])} {of}"
        return (
            f"{metric} from {low.parts[0]} at block {low.layer} to {high.parts[0]} at block "
            f"{high.layer} {of}, where more is not better"
        )
    candidates = [point for point in known if point.is_rankable]
    degenerate = [point.layer for point in known if point.is_degenerate]
    arbitrary = "rounding, not the image, decides most answers"
    if not candidates:
        return f"no block is best: {arbitrary} at {_blocks(degenerate)} (degenerate)"
    if len(known) == 1:
        best = known[0]
        text = f"{metric} {best.parts[0]} at block {best.layer}, the only one with a value"
    elif not line.bests:
        best = candidates[0]
        text = f"all {_count(len(candidates))} blocks are alike, {metric} {best.parts[0]}"
    else:
        best, layers = line.bests[0], [point.layer for point in line.bests]
        others = len(candidates) - len(layers)
        where, number = _blocks(layers), panel.record.num_images
        it = "it" if len(layers) == 1 else "them"
        untold = None if told is None else others - len(told)
        text = f"best at {where}, {metric} {best.parts[0]}"
        if untold == others > 0:
            which = (
                f"none of the other {_count(others)}" if others > 1 else "not even the other one"
            )
            text = (
                f"no block stands out; {metric} is highest at {where}, {best.parts[0]}, but "
                f"{which} can be told from {it} on {number} images"
            )
        elif untold == 0 < others:
            which = "the other is" if others == 1 else "all others are"
            text += f"; {which} lower on the same {number} images"
        elif untold:
            text += f"; {_count(untold)} of the other {_count(others)} blocks cannot be told from "
            text += f"{it} on {number} images"
    unbeaten = panel.unbeaten(best)
    text += f"; that is {unbeaten}" if unbeaten else ""
    if degenerate:
        text += f"; left out: {_blocks(degenerate)}, where {arbitrary} (degenerate)"
    return text


def _metric(name: str) -> str:
    for pattern, words in _METRICS.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, words, name, count=1)
    return name.replace("_", " ")


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _blocks(layers: Sequence[int]) -> str:
    *some, last = map(str, layers)
    return f"blocks {', '.join(some)} and {last}" if some else f"block {last}"
