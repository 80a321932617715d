"""Text and tables of a report: sentences, leaderboard, and scores by block."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from ssl_bench.report.pairs import MAX_PAIRED, load_side
from ssl_bench.report.panels import (
    Checkpoint,
    Line,
    Panel,
    choose_headline_metric,
    group_by_split,
    group_by_task,
    name_blocks,
    select_headline_panels,
)
from ssl_bench.results import ResultStore
from ssl_bench.tables.comparison import block_side, difference

TASK_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "segmentation": "A linear head predicts the class of every pixel from the patches of one "
        "block. The score is the mean IoU over classes. Higher is better.",
        "tokencut": "The normalised cut of a block's patches gives one box per image. CorLoc is "
        "the percentage of images whose box overlaps a true box with an IoU of at least 50 %. "
        "Higher is better. Without true boxes, only the percentage of degenerate cuts is reported.",
        "retrieval": "Every patch gets the class of its nearest training patches, without "
        "training. The score is the mean IoU over classes. Higher is better.",
        "classification": "A linear head predicts the class of the image. The score is the "
        "accuracy in percent. Higher is better.",
        "knn": "Every image gets the class of its nearest training images, without training. The "
        "score is the accuracy in percent. Higher is better.",
        "correspondence": "The nearest patch in another view or image is the match of a point. "
        "PCK is the percentage of matches within a fraction of the side of the view or of the "
        "object's box. Higher is better.",
        "discovery": "The cuts of a block's patches give several boxes per image. AP, AP50 and "
        "AR100 are computed as in COCO, without classes. Higher is better.",
        "clustering": "k-means clusters images or patches and is compared with their classes, "
        "which it does not use. NMI, AMI and similar scores are reported. Higher is better.",
        "geometry": "Measures the feature space: its effective dimensionality (RankMe, LiDAR, "
        "effective rank), the alignment of two views, and the position that patches encode. Most "
        "of these numbers are neither good nor bad.",
        "pca": "The share of the variance between the patches of an image that three components "
        "explain. Neither high nor low is better: identical patches have one component.",
        "conditioning": "Measures how close the tokens, attention and Jacobians of a block are to "
        "singular matrices: condition numbers, ranks and CKA. A lower condition number is closer "
        "to an isometry.",
    }
)
"""Descriptions of the tasks of this suite. Other tasks have none."""

_MAX_COLUMNS = 3
# Tables of one task and split that are not folded.
_MAX_OPEN_TABLES = 3
# Only the page of the checkpoint shows them.
_NOT_IN_LEADERBOARD = ("modules sha256", "position margin")


class Leaderboard(NamedTuple):
    """One row per checkpoint, with scores and with the facts in which the checkpoints differ.

    Attributes:
        panels: Panels of the columns with scores, one per task and dataset.
        fact_names: Names of the facts in which the checkpoints differ.
        fact_rows: Their values by checkpoint. A missing value is an empty string.
        shared_facts: Names and values that are the same for all checkpoints.
    """

    panels: Sequence[Panel]
    fact_names: Sequence[str]
    fact_rows: Sequence[Sequence[str]]
    shared_facts: Sequence[tuple[str, str]]


def build_leaderboard(panels: Sequence[Panel], checkpoints: Sequence[Checkpoint]) -> Leaderboard:
    """Choose the columns of the leaderboard and compare the facts of the checkpoints."""
    facts = [dict(checkpoint.facts) for checkpoint in checkpoints]
    names = dict.fromkeys(n for row in facts for n in row if n not in _NOT_IN_LEADERBOARD)
    differing = [name for name in names if len({row.get(name) for row in facts}) > 1]
    return Leaderboard(
        panels=select_headline_panels(panels),
        fact_names=differing,
        fact_rows=[[row.get(name, "") for name in differing] for row in facts],
        shared_facts=[(name, facts[0][name]) for name in names if name not in differing],
    )


BlockTable = Sequence[tuple[Panel, Line]]
"""Columns of a table with one row per block."""


class BlockGroup(NamedTuple):
    """Scores of one checkpoint for a task on one split of a dataset.

    Attributes:
        task: Task of the probe.
        split_name: Dataset and split.
        tables: Tables that are shown, first those of the headline metric.
        folded: Tables that readers unfold.
    """

    task: str
    split_name: str
    tables: Sequence[BlockTable]
    folded: Sequence[BlockTable]


def group_block_tables(lines: Sequence[tuple[Panel, Line]]) -> list[BlockGroup]:
    """Arrange the scores of one checkpoint as tables with few columns."""
    line_by_panel = {panel.number: line for panel, line in lines}
    groups = []
    for task, of_task in group_by_task([panel for panel, _ in lines]).items():
        for split_name, of_split in group_by_split(of_task).items():
            metric = choose_headline_metric(of_split)
            panels = sorted(of_split, key=lambda panel, metric=metric: panel.metric != metric)
            columns = [(panel, line_by_panel[panel.number]) for panel in panels]
            # As few tables as possible, with almost equal numbers of columns.
            count = -(-len(columns) // _MAX_COLUMNS)
            ends = [len(columns) * number // count for number in range(count + 1)]
            tables = [columns[start:end] for start, end in pairwise(ends)]
            shown, folded = tables[:_MAX_OPEN_TABLES], tables[_MAX_OPEN_TABLES:]
            groups.append(BlockGroup(task, split_name, shown, folded))
    return groups


def summarize_checkpoints(
    store: ResultStore, panels: Sequence[Panel], checkpoints: Sequence[Checkpoint]
) -> dict[Checkpoint, list[str]]:
    """Return the summaries of each checkpoint, one per task, dataset and protocol.

    Checkpoints without scores are omitted. With at most `MAX_PAIRED` checkpoints, blocks are
    compared on the same images. With more, this would take too long, so intervals are compared.
    """
    chosen = _select_summarized_panels(panels)
    protocols = defaultdict[tuple[str, str], set[str]](set)
    for panel in panels:
        protocols[panel.task, panel.split_name].add(panel.protocol)
    is_paired = len(checkpoints) <= MAX_PAIRED
    summaries = {}
    for checkpoint in checkpoints:
        lines: dict[tuple[str, str, str], tuple[Panel, Line]] = {}
        for panel in chosen:
            if line := panel.find_line(checkpoint):
                key = (panel.task, panel.split_name, panel.protocol)
                lines.setdefault(key, (panel, line))
        texts = []
        for (task, split_name, protocol), (panel, line) in lines.items():
            lower = find_lower_blocks(store, panel, line, is_paired=is_paired)
            has_rivals = len(protocols[task, split_name]) > 1
            name = f"{task}, protocol {protocol}" if has_rivals else task
            texts.append(f"{name}, {panel.dataset}: {summarize_line(panel, line, lower)}")
        if texts:
            summaries[checkpoint] = texts
    return summaries


def _select_summarized_panels(panels: Sequence[Panel]) -> list[Panel]:
    """Return the headline panels of every protocol, in the order of the tasks."""
    chosen = {panel.number: panel for panel in select_headline_panels(panels)}
    for protocol in dict.fromkeys(panel.protocol for panel in panels):
        of_protocol = [panel for panel in panels if panel.protocol == protocol]
        chosen |= {panel.number: panel for panel in select_headline_panels(of_protocol)}
    order = list(dict.fromkeys((panel.task, panel.split_name) for panel in chosen.values()))
    return sorted(chosen.values(), key=lambda panel: order.index((panel.task, panel.split_name)))


def find_lower_blocks(
    store: ResultStore, panel: Panel, line: Line, *, is_paired: bool
) -> set[int] | None:
    """Return the blocks that are significantly lower than the best one.

    A block is lower if the 95 % interval of the difference over the same images excludes 0.
    Degenerate blocks are never among them.

    Args:
        store: Holds the per-image values.
        panel: The panel of the line.
        line: Scores of one checkpoint. The best block has the highest mean over seeds. The
            per-image values are those of the lowest seed.
        is_paired: Whether to load per-image values. If they are not loaded or not stored, a block
            is lower if its 95 % interval lies below that of the best block.

    Returns:
        Block indices, or None if there are neither per-image values nor intervals.
    """
    best = line.best
    if best is None:
        return None
    side = load_side(store, panel, line.checkpoint) if is_paired else None
    if side is not None and best.layer in side.curve.blocks:
        highest = block_side(side.curve, best.layer)
        differences = {
            layer: difference("", highest, block_side(side.curve, layer))
            for layer in side.curve.blocks
        }
        return {layer for layer, d in differences.items() if d.is_significant and d.value > 0}
    low = best.low
    highs = {entry.layer: entry.high for entry in line.entries if not entry.is_degenerate}
    if low is None or any(high is None for high in highs.values()):
        return None
    return {layer for layer, high in highs.items() if high is not None and high < low}


def summarize_line(panel: Panel, line: Line, lower: set[int] | None) -> str:
    """Return sentences on the best block of a checkpoint.

    Args:
        panel: The panel of the line.
        line: Scores of one checkpoint.
        lower: Blocks that are significantly lower than the best one, or None if unknown.
    """
    metric, num_images = panel.metric, panel.record.num_images
    valued = [entry for entry in line.entries if not math.isnan(entry.value)]
    if not valued:
        reason = line.entries[0].reason
        return f"No block has a value of {metric}{f' ({reason})' if reason else ''}."
    if not panel.is_ranked:
        low = min(valued, key=lambda entry: entry.value)
        high = max(valued, key=lambda entry: entry.value)
        name = f"On {num_images} images, {metric} of {panel.facet}"
        if low.value == high.value:
            blocks = name_blocks([entry.layer for entry in valued])
            return f"{name} is {low.parts[0]} at {blocks}. Higher is not better."
        return (
            f"{name} ranges from {low.parts[0]} (block {low.layer}) to {high.parts[0]} "
            f"(block {high.layer}). Higher is not better."
        )
    degenerate = [entry.layer for entry in valued if entry.is_degenerate]
    candidates = [entry for entry in valued if entry.is_rankable]
    if not candidates:
        blocks = name_blocks(degenerate)
        return f"No block is best because {blocks} {_be(len(degenerate))} degenerate."
    best = line.best or candidates[0]
    value, others = best.parts[0], len(candidates) - len(line.all_best)
    if len(candidates) == 1:
        sentences = [f"On {num_images} images, {metric} is {value} at block {best.layer}."]
    elif not line.all_best:
        count = len(candidates)
        sentences = [f"On {num_images} images, {metric} is {value} at all {count} blocks."]
    else:
        blocks = name_blocks([entry.layer for entry in line.all_best])
        sentences = [f"On {num_images} images, {metric} is highest at {blocks} ({value})."]
        if lower is not None and others:
            sentences.append(_count_lower(len(lower), others))
    if unbeaten := panel.describe_unbeaten(best):
        sentences.append(f"This is {unbeaten} (image-independent baseline).")
    if degenerate:
        blocks = name_blocks(degenerate).capitalize()
        sentences.append(f"{blocks} {_be(len(degenerate))} degenerate and excluded.")
    return " ".join(sentences)


def _count_lower(number: int, others: int) -> str:
    """Return a sentence on how many of the other blocks are significantly lower."""
    if others == 1:
        return f"The other block is {'' if number else 'not '}significantly lower."
    if number == others:
        return f"All {others} other blocks are significantly lower."
    if number == 0:
        return f"None of the {others} other blocks is significantly lower."
    return f"{number} of the {others} other blocks {_be(number)} significantly lower."


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def list_unreadable_images(panels: Sequence[Panel]) -> list[str]:
    """Return one sentence for each dataset with unreadable images."""
    sentences = []
    for panel in panels:
        left_out = panel.record.details.get("left_out", {}).values()
        if not left_out:
            continue
        count = sum(split["count"] for split in left_out)
        names = [name for split in left_out for name in split["first"]]
        more = f" and {count - len(names)} more" if count > len(names) else ""
        images = f"{count} image{'s' if count > 1 else ''} of {panel.dataset}"
        sentences.append(
            f"{images} cannot be read and {_be(count)} left out: {', '.join(names)}{more}"
        )
    return list(dict.fromkeys(sentences))
