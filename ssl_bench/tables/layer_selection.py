"""Choose the block whose score represents an encoder.

A held-out choice of a block never uses the scored images. An oracle choice uses the scored images.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ssl_bench.results import Record, ResultStore
from ssl_bench.results.per_image import NUM_FOLDS, load_curve
from ssl_bench.tables.entries import (
    ScoreEntry,
    average_entries,
    average_known,
    average_over_seeds,
    show_seed_counts,
)

LAYER_CHOICES = ("holdout", "oracle")
CHOICE_NOTES = {
    "holdout": (
        f"block: held-out choice. Each of {NUM_FOLDS} folds of the images is scored with the block "
        "that is best on the other folds (listed after @). Intervals do not include the "
        "uncertainty of the choice"
    ),
    "oracle": (
        "block: ORACLE, the best block on the scored images themselves (listed after @), which is "
        "optimistic for every encoder"
    ),
}
NO_CHOICE_MARK = (
    "‡: no block was chosen, because per-image values are missing or most images are degenerate at "
    "every block. `--best-layer oracle` needs no per-image values, and `--layer N` shows one block"
)


def choose_block(records: Sequence[Record], store: ResultStore, choice: str) -> ScoreEntry | None:
    """Choose the block that represents an encoder, and return its score.

    If seeds were probed at different sets of blocks, only the seeds with the largest set are used.
    If several sets of blocks are equally large, the most frequent set is used.

    Args:
        records: Records (stored scores) of one encoder, which differ only in block and seed.
        store: Results folder with the per-image scores.
        choice: "oracle" for the block that is best on the scored images, or "holdout" for a choice
            on other images. With "holdout", each seed chooses its own block.

    Returns:
        The score, with `ScoreEntry.candidate_layers` and `ScoreEntry.omitted_seeds`. None if there
        are several blocks and none can be chosen. This is the case if a higher value of the metric
        is not better, or if every block is degenerate (too many images have an arbitrary result).
        It is also the case if a held-out choice lacks per-image scores.
    """
    by_seed: dict[int, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.seed):
        by_seed[record.seed].append(record)
    blocks = {seed: tuple(sorted(r.layer for r in group)) for seed, group in by_seed.items()}
    all_blocks = list(blocks.values())
    offered = max(all_blocks, key=lambda layers: (len(layers), all_blocks.count(layers)))
    omitted = tuple(seed for seed in by_seed if blocks[seed] != offered)
    seeds = [group for seed, group in by_seed.items() if seed not in omitted]
    if len(offered) > 1 and not records[0].is_ranked:
        return None
    if len(offered) == 1 or choice == "oracle":
        entry = _best_entry(seeds, offered)
    else:
        entry = _held_out_entry(seeds, store)
    if entry is None:
        return None
    return replace(entry, candidate_layers=offered, omitted_seeds=omitted)


def _best_entry(seeds: Sequence[Sequence[Record]], layers: Sequence[int]) -> ScoreEntry | None:
    """Return the score of the block with the highest mean over seeds, or None if there is no block.

    If there are several blocks, degenerate blocks are left out. A block is degenerate if the
    results of more than half of the images are arbitrary. `seeds` contains the records (stored
    scores) of each seed.
    """
    entries = [
        average_over_seeds([record for seed in seeds for record in seed if record.layer == layer])
        for layer in layers
    ]
    if len(layers) > 1:
        entries = [entry for entry in entries if not entry.is_degenerate]
    if not entries:
        return None
    values = [-math.inf if math.isnan(entry.value) else entry.value for entry in entries]
    return entries[values.index(max(values))]


def _held_out_entry(seeds: Sequence[Sequence[Record]], store: ResultStore) -> ScoreEntry | None:
    """Return the mean score over seeds, where each seed chooses its own block on held-out images.

    `seeds` contains the records (stored scores) of each seed. Return None if no block can be chosen
    for one of the seeds.
    """
    choices = [_held_out_choice(seed, store) for seed in seeds]
    entries = [entry for entry in choices if entry is not None]
    return average_entries(entries) if len(entries) == len(choices) else None


def _held_out_choice(records: Sequence[Record], store: ResultStore) -> ScoreEntry | None:
    curve = load_curve(store, records)
    by_layer = {record.layer: record for record in records}
    if curve.per_image.keys() != by_layer.keys() or not curve.candidates:
        return None
    mixed, layers = curve.choose_held_out()
    if len(set(layers)) == 1:
        return average_over_seeds([by_layer[layers[0]]])
    estimate = curve.estimate(mixed)
    # Folds differ by at most one image, so their mean weights all images about equally.
    shares = [by_layer[layer].degenerate_percent for layer in layers]
    return ScoreEntry(
        estimate.value,
        *(estimate.ci95() or (None, None)),
        average_known(shares),
        tuple(by_layer[layer] for layer in sorted(set(layers))),
    )


def choice_notes(entries: Collection[ScoreEntry], choice: str) -> list[str]:
    """Return notes for a table on how the block of each score was chosen.

    Args:
        entries: The scores of the table.
        choice: "holdout" (blocks were chosen on other images than the scored ones) or "oracle" (on
            the scored images).
    """
    notes = [CHOICE_NOTES[choice]] if any(len(e.candidate_layers) > 1 for e in entries) else []
    if choice == "holdout":
        notes += miou_choice_notes(e.records[0].metric for e in entries if len(e.layers) > 1)
    if any(map(_seeds_differ, entries)):
        notes.append(
            "each seed chooses its own block (the blocks of all seeds are listed after @), and the "
            "mean is over seeds"
        )
    if omitted := sorted({seed for entry in entries for seed in entry.omitted_seeds}):
        notes.append(
            f"seed {', '.join(map(str, omitted))} is left out of scores for which it was probed at "
            "other blocks than the remaining seeds"
        )
    return notes


def _seeds_differ(entry: ScoreEntry) -> bool:
    blocks: dict[int, set[int]] = defaultdict(set)
    for record in entry.records:
        blocks[record.seed].add(record.layer)
    return len(set(map(frozenset, blocks.values()))) > 1


def miou_choice_notes(metrics: Iterable[str]) -> list[str]:
    """Return a note on why the mean IoU may be low if blocks were chosen on held-out images.

    The list is empty if none of the metrics is mean IoU.
    """
    if not any(metric.startswith("miou") for metric in metrics):
        return []
    return [
        "a held-out choice of several blocks averages over the classes that any of them predicts, "
        "so its mean IoU may be below that of each block"
    ]


def choice_as_json(entry: ScoreEntry) -> dict[str, list[int]]:
    return {"blocks": list(entry.layers), "blocks_offered": list(entry.candidate_layers)}


def blocks_text(entry: ScoreEntry) -> str:
    """Return the chosen blocks as text, such as "@3,5"."""
    return f"@{','.join(map(str, entry.layers))}"


def show_seed_counts_by_column(
    entries: Mapping[tuple[str, str], ScoreEntry],
) -> dict[tuple[str, str], ScoreEntry]:
    """Return table entries that state their numbers of seeds, unless equal within the column.

    The keys of `entries` are pairs (row, column).
    """
    counted: dict[tuple[str, str], ScoreEntry] = {}
    for column in dict.fromkeys(column for _, column in entries):
        counted |= show_seed_counts({at: e for at, e in entries.items() if at[1] == column})
    return counted
