"""Write the texts and tables of a report: summaries, a leaderboard and the scores of each block."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from ssl_bench.report.pairs import MAX_PAIRED, load_per_image_scores
from ssl_bench.report.panels import (
    Checkpoint,
    ScoreLine,
    ScorePanel,
    find_main_metric,
    group_by_split,
    group_by_task,
    name_blocks,
    rank_checkpoints,
    select_main_panels,
)
from ssl_bench.results import ResultStore
from ssl_bench.tables.comparison import get_block_score, subtract
from ssl_bench.tables.tasks import task_texts

_MAX_COLUMNS = 3
# Largest number of tables per task and split that are shown without unfolding.
_MAX_OPEN_TABLES = 3
# Properties of a checkpoint that are only shown on the checkpoint's own page.
_NOT_IN_LEADERBOARD = ("modules sha256", "position margin")


class Leaderboard(NamedTuple):
    """A table of checkpoints (rows) with their scores and the properties in which they differ.

    Attributes:
        panels: One panel (a group of comparable scores) per column of scores. Each task and split
            has at least one column.
        checkpoints: The rows, from the best to the worst mean rank over the panels.
        fact_names: Names of the properties that differ between checkpoints, such as "depth".
        fact_rows: Values of the properties in `fact_names`, with one row per checkpoint in order of
            `Checkpoint.number`. Missing values are "".
        shared_facts: Names and values of the properties that are equal for all checkpoints.
    """

    panels: Sequence[ScorePanel]
    checkpoints: Sequence[Checkpoint]
    fact_names: Sequence[str]
    fact_rows: Sequence[Sequence[str]]
    shared_facts: Sequence[tuple[str, str]]


def build_leaderboard(
    panels: Sequence[ScorePanel], checkpoints: Sequence[Checkpoint]
) -> Leaderboard:
    facts = [dict(checkpoint.facts) for checkpoint in checkpoints]
    names = dict.fromkeys(n for row in facts for n in row if n not in _NOT_IN_LEADERBOARD)
    differing = [name for name in names if len({row.get(name) for row in facts}) > 1]
    main_panels = select_main_panels(panels)
    return Leaderboard(
        panels=main_panels,
        checkpoints=rank_checkpoints(main_panels, checkpoints),
        fact_names=differing,
        fact_rows=[[row.get(name, "") for name in differing] for row in facts],
        shared_facts=[(name, facts[0][name]) for name in names if name not in differing],
    )


def find_best_checkpoints(panel: ScorePanel) -> set[Checkpoint]:
    """Return the checkpoint with the highest score at its best block, or several if they tie.

    `panel` contains the comparable scores of all checkpoints. The set is empty if fewer than two
    checkpoints have a best block.
    """
    highest = max((line.best_value for line in panel.ranked_lines), default=None)
    lines = panel.ranked_lines if len(panel.ranked_lines) > 1 else ()
    return {line.checkpoint for line in lines if line.best_value == highest}


def find_tied_checkpoints(store: ResultStore, panel: ScorePanel) -> set[Checkpoint]:
    """Return the checkpoints whose score is lower than the highest one, but not significantly.

    `panel` contains the comparable scores of all checkpoints. Each checkpoint is represented by the
    score of its best block. The test of significance depends on the stored scores:

    - If both checkpoints have per-image scores for the same images and seed, a difference is
      significant if its 95 % interval excludes 0.
    - Otherwise, a difference is significant if the 95 % intervals of the two scores do not overlap.
      If one of these intervals is unknown, the difference also counts as significant.
    """
    entries = {line.checkpoint: best for line in panel.lines if (best := line.best_entry)}
    best = find_best_checkpoints(panel)
    if not best:
        return set()
    first = max(entries, key=lambda checkpoint: entries[checkpoint].value)
    highest, top = load_per_image_scores(store, panel, first), entries[first]
    found = set()
    for checkpoint in entries.keys() - best:
        other, entry = load_per_image_scores(store, panel, checkpoint), entries[checkpoint]
        if highest and other and highest.is_paired_with(other):
            difference = subtract(
                "",
                get_block_score(highest.curve, top.layer),
                get_block_score(other.curve, entry.layer),
            )
            is_clear = difference.is_significant and difference.value > 0
        else:
            is_clear = top.low is None or entry.high is None or entry.high < top.low
        if not is_clear:
            found.add(checkpoint)
    return found


def list_winners(panel: ScorePanel) -> set[Checkpoint]:
    """Return the checkpoints with the highest score if it is significantly above all baselines.

    `panel` contains the comparable scores of all checkpoints. A baseline is an image-independent
    prediction, such as the most frequent class.
    """
    entries = {one: panel.find_main_entry(one) for one in find_best_checkpoints(panel)}
    return {one for one, entry in entries.items() if entry and not panel.describe_unbeaten(entry)}


def summarize_leaderboard(panels: Sequence[ScorePanel]) -> list[str]:
    """Return sentences with the encoders that are most often the best, and the unbeaten baselines.

    A baseline is an image-independent prediction, such as the most frequent class. A baseline is
    unbeaten if no encoder scores significantly higher. Each of `panels` is a group of comparable
    scores: one metric on the same images with the same settings.
    """
    compared = [panel for panel in panels if find_best_checkpoints(panel)]
    won: dict[Checkpoint, list[str]] = defaultdict(list)
    for panel in compared:
        for checkpoint in list_winners(panel):
            won[checkpoint].append(_name_column(panel))
    sentences = [
        f"{checkpoint.name} is best in {len(names)} of {len(compared)} comparisons: "
        f"{join_names(dict.fromkeys(names))}."
        for checkpoint, names in sorted(
            won.items(), key=lambda item: (-len(item[1]), item[0].number)
        )[:3]
    ]
    with_baseline = [panel for panel in panels if panel.is_ranked and panel.baselines]
    unbeaten = [
        panel
        for panel in with_baseline
        if all(panel.describe_unbeaten(line.best_entry) for line in panel.lines if line.best_entry)
    ]
    if unbeaten:
        # With other settings, an encoder may beat the baseline of the same task and dataset.
        beaten = {_name_column(panel) for panel in with_baseline if panel not in unbeaten}
        names = [
            f"{name} ({panel.title})" if (name := _name_column(panel)) in beaten else name
            for panel in unbeaten
        ]
        listed = join_names(dict.fromkeys(names))
        sentences.append(f"No encoder is significantly above the baseline in {listed}.")
    return sentences


def _name_column(panel: ScorePanel) -> str:
    return f"{panel.task} on {panel.dataset}"


def join_names(names: Iterable[str]) -> str:
    """Join names into a text such as "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


BlockTable = Sequence[tuple[ScorePanel, ScoreLine]]
"""A table with blocks as rows. A panel (chart) and one of its score lines stand for each column."""


class BlockGroup(NamedTuple):
    """Scores of one checkpoint for one task on one split of a dataset, as tables.

    Attributes:
        split_name: Dataset and split, such as "voc2012 val".
        tables: Tables that are always visible. Columns of the task's main metric come first.
        folded: Tables that are hidden until a reader unfolds them.
    """

    task: str
    split_name: str
    tables: Sequence[BlockTable]
    folded: Sequence[BlockTable]


def group_block_tables(lines: Sequence[tuple[ScorePanel, ScoreLine]]) -> list[BlockGroup]:
    """Return the scores of one checkpoint as tables, grouped by task and split.

    A table has at most `_MAX_COLUMNS` columns. `lines` contains pairs of a panel (group of
    comparable scores) and the checkpoint's scores in this panel.
    """
    line_by_panel = {panel.number: line for panel, line in lines}
    groups = []
    for task, of_task in group_by_task([panel for panel, _ in lines]).items():
        for split_name, of_split in group_by_split(of_task).items():
            metric = find_main_metric(of_split)
            panels = sorted(of_split, key=lambda panel, metric=metric: panel.metric != metric)
            columns = [(panel, line_by_panel[panel.number]) for panel in panels]
            # Make as few tables as possible, with numbers of columns that differ by at most one.
            count = -(-len(columns) // _MAX_COLUMNS)
            ends = [len(columns) * number // count for number in range(count + 1)]
            tables = [columns[start:end] for start, end in pairwise(ends)]
            shown, folded = tables[:_MAX_OPEN_TABLES], tables[_MAX_OPEN_TABLES:]
            groups.append(BlockGroup(task, split_name, shown, folded))
    return groups


def summarize_checkpoints(
    store: ResultStore, panels: Sequence[ScorePanel], checkpoints: Sequence[Checkpoint]
) -> dict[Checkpoint, list[str]]:
    """Return texts that summarise each checkpoint, one per task, split and protocol.

    A protocol is a preset of a probe's settings. Each text compares the best block of the
    checkpoint with its other blocks, by paired differences on the same images. With more than
    `MAX_PAIRED` checkpoints, paired differences would take too long, so the 95 % intervals of the
    scores are compared instead. Checkpoints without scores are left out.

    Args:
        store: Results folder with the per-image scores.
        panels: Groups of comparable scores.
        checkpoints: The checkpoints to summarise.
    """
    chosen = _select_summarized_panels(panels)
    protocols = defaultdict[tuple[str, str], set[str]](set)
    for panel in panels:
        protocols[panel.task, panel.split_name].add(panel.protocol)
    is_paired = len(checkpoints) <= MAX_PAIRED
    summaries = {}
    for checkpoint in checkpoints:
        lines: dict[tuple[str, str, str], tuple[ScorePanel, ScoreLine]] = {}
        for panel in chosen:
            if line := panel.find_line(checkpoint):
                key = (panel.task, panel.split_name, panel.protocol)
                lines.setdefault(key, (panel, line))
        texts = defaultdict[str, list[str]](list)
        for (task, split_name, protocol), (panel, line) in lines.items():
            lower = find_lower_blocks(store, panel, line, is_paired=is_paired)
            has_rivals = len(protocols[task, split_name]) > 1
            subject = task_texts(task).title or task
            subject += f" (protocol {protocol})" if has_rivals else ""
            texts[task].append(summarize_line(subject, panel, line, lower))
        if texts:
            # Interleave the tasks, so that the first summaries are about different tasks.
            rows = zip_longest(*texts.values())
            summaries[checkpoint] = [text for row in rows for text in row if text]
    return summaries


def _select_summarized_panels(panels: Sequence[ScorePanel]) -> list[ScorePanel]:
    """Return the main panels (groups of comparable scores) of each protocol (preset of settings).

    `select_main_panels` chooses these panels, once from all panels and once from the panels of each
    protocol. Panels of the same task and split are neighbours.
    """
    chosen = {panel.number: panel for panel in select_main_panels(panels)}
    for protocol in dict.fromkeys(panel.protocol for panel in panels):
        of_protocol = [panel for panel in panels if panel.protocol == protocol]
        chosen |= {panel.number: panel for panel in select_main_panels(of_protocol)}
    order = list(dict.fromkeys((panel.task, panel.split_name) for panel in chosen.values()))
    return sorted(chosen.values(), key=lambda panel: order.index((panel.task, panel.split_name)))


def find_lower_blocks(
    store: ResultStore, panel: ScorePanel, line: ScoreLine, *, is_paired: bool
) -> set[int] | None:
    """Return the blocks that score significantly lower than the best block, or None if unknown.

    If `is_paired` is true and per-image scores are stored, two blocks are compared image by image.
    In paired tests, a block is significantly lower if the 95 % interval of the difference excludes
    0. Otherwise, the 95 % interval of a block's score must lie below that of the best block.
    Degenerate blocks, where too many images have an arbitrary result, are never returned.

    Args:
        store: Results folder with the per-image scores.
        panel: The group of comparable scores.
        line: The scores of one checkpoint in this group.
        is_paired: Whether to compare blocks image by image.
    """
    best = line.best_entry
    if best is None:
        return None
    side = load_per_image_scores(store, panel, line.checkpoint) if is_paired else None
    if side is not None and best.layer in side.curve.layer_estimates:
        highest = get_block_score(side.curve, best.layer)
        rows = [
            subtract("", highest, get_block_score(side.curve, n))
            for n in side.curve.layer_estimates
        ]
        return {row.layers[1][0] for row in rows if row.is_significant and row.value > 0}
    low = best.low
    highs = {entry.layer: entry.high for entry in line.entries if not entry.is_degenerate}
    if low is None or any(high is None for high in highs.values()):
        return None
    return {layer for layer, high in highs.items() if high is not None and high < low}


def summarize_line(subject: str, panel: ScorePanel, line: ScoreLine, lower: set[int] | None) -> str:
    """Return sentences on the best block of a checkpoint in one task.

    Args:
        subject: Name of the task at the start of a sentence.
        panel: The panel (group of comparable scores) to summarise.
        line: Scores of the checkpoint in this panel.
        lower: The blocks that score significantly lower than the best one. None if unknown.
    """
    metric = task_texts(panel.task).metrics.get(panel.metric, panel.metric)
    beginning = f"{subject} on {panel.dataset}"
    valued = [entry for entry in line.entries if not math.isnan(entry.value)]
    if not valued:
        reason = line.entries[0].reason
        return f"{beginning} has no {metric} at any block{f' ({reason})' if reason else ''}."
    if not panel.is_ranked:
        low = min(valued, key=lambda entry: entry.value)
        high = max(valued, key=lambda entry: entry.value)
        name = f"On {panel.dataset}, {panel.metric} ({panel.facet})"
        if low.value == high.value:
            blocks = name_blocks([entry.layer for entry in valued])
            return f"{name} is {low.text_parts[0]} at {blocks}. Higher is not better."
        return (
            f"{name} ranges from {low.text_parts[0]} at block {low.layer} to {high.text_parts[0]} "
            f"at block {high.layer}. Higher is not better."
        )
    degenerate = [entry.layer for entry in valued if entry.is_degenerate]
    best = line.best_entry
    if best is None:
        blocks = name_blocks(degenerate)
        return f"{beginning} has no best block because {blocks} {_be(len(degenerate))} degenerate."
    value = f"{best.text_parts[0]} % {metric}"
    count = sum(entry.is_rankable for entry in valued)
    others = count - len(line.marked_entries)
    if count == 1:
        sentences = [f"{beginning} reaches {value} at block {best.layer}."]
    elif not line.marked_entries:
        sentences = [f"{beginning} reaches {value} at all {count} blocks."]
    else:
        blocks = name_blocks([entry.layer for entry in line.marked_entries])
        clearly = f", {_count_lower(len(lower), others)}" if lower is not None and others else ""
        sentences = [f"{beginning} works best at {blocks}: {value}{clearly}."]
    if unbeaten := panel.describe_unbeaten(best):
        sentences.append(f"That is {unbeaten}, an image-independent baseline.")
    if degenerate:
        blocks = name_blocks(degenerate).capitalize()
        sentences.append(f"{blocks} {_be(len(degenerate))} degenerate and cannot be best.")
    return " ".join(sentences)


def _count_lower(number: int, others: int) -> str:
    if others == 1:
        return f"{'' if number else 'not '}significantly more than at the other block"
    if number == 0:
        return "not significantly more than at any other block"
    blocks = f"all {others}" if number == others else f"{number} of the {others}"
    return f"significantly more than at {blocks} other blocks"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def list_unreadable_images(panels: Sequence[ScorePanel]) -> list[str]:
    """Return a sentence for each dataset with unreadable images, which names some of these images.

    Each of `panels` is a group of comparable scores on one dataset.
    """
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
