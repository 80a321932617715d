"""Which block of an encoder stands for it: one chosen on other images, or the best on the same."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssl_bench.results import Record, ResultStore
from ssl_bench.results.per_image import NUM_FOLDS, load_curve
from ssl_bench.tables.entries import Entry, mean_entry, mean_of, mean_of_known, with_seeds_said

CHOICES = ("holdout", "oracle")
CHOICE_NOTES = {
    "holdout": (
        f"block: held-out choice, each of {NUM_FOLDS} folds of the images is scored with the block "
        "that the other folds choose (@: those blocks); intervals take the choice as given"
    ),
    "oracle": (
        "block: ORACLE, the best one on the scored images themselves (@), "
        "which flatters every encoder"
    ),
}
NO_CHOICE_MARK = (
    "‡: no block was chosen: either no values of single images were kept to choose on other images "
    "(--best-layer oracle needs none), or most images are degenerate at every block; --layer N "
    "shows one block"
)


@dataclass(frozen=True)
class LayerSelection:
    """The score of an encoder with the blocks that were chosen for it.

    Attributes:
        layers: Several where folds or seeds chose different ones.
        offered: Those that could have been chosen.
        left_out: Seeds that were not probed at all of these.
        seeds_differ: Whether each of several seeds chose for itself, and not all the same.
    """

    entry: Entry
    layers: tuple[int, ...]
    offered: tuple[int, ...]
    left_out: tuple[int, ...] = ()
    seeds_differ: bool = False

    def csv_fields(self) -> dict[str, Any]:
        """Blocks and numbers."""
        return {"blocks": " ".join(map(str, self.layers)), **self.entry.csv_fields()}

    def as_json(self) -> dict[str, Any]:
        """Blocks, those that could have been chosen, and numbers."""
        offered = {"blocks": list(self.layers), "blocks_offered": list(self.offered)}
        return {**offered, **self.entry.as_json()}


def choose_block(
    records: Sequence[Record], store: ResultStore, choice: str
) -> LayerSelection | None:
    """Score one encoder with a block chosen from comparable records of several.

    A mean over seeds is of seeds that could choose among the same blocks: of those with the most
    blocks, then of the most seeds. Held out, each chooses its own, as somebody with that seed
    alone would have.

    Args:
        records: Of one checkpoint; they differ in block and seed alone.
        store: Holds the images' contributions.
        choice: "holdout" or "oracle"; ignored where there is one block.

    Returns:
        None where a held-out choice lacks the values of single images, for what is not ranked, and
        where every block is degenerate.
    """
    by_seed: dict[int, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.seed):
        by_seed[record.seed].append(record)
    blocks = {seed: tuple(sorted(r.layer for r in those)) for seed, those in by_seed.items()}
    all_blocks = list(blocks.values())
    offered = max(all_blocks, key=lambda layers: (len(layers), all_blocks.count(layers)))
    left_out = tuple(seed for seed in by_seed if blocks[seed] != offered)
    seeds = [those for seed, those in by_seed.items() if seed not in left_out]
    if len(offered) > 1 and not records[0].is_ranked:
        return None
    if len(offered) == 1 or choice == "oracle":
        entries = [
            mean_entry([record for those in seeds for record in those if record.layer == layer])
            for layer in offered
        ]
        if len(offered) > 1:
            entries = [entry for entry in entries if not entry.is_degenerate]
        if not entries:
            return None
        values = [-math.inf if math.isnan(entry.value) else entry.value for entry in entries]
        best = entries[values.index(max(values))]
        return LayerSelection(best, (best.layer,), offered, left_out)
    found = [_held_out(those, store) for those in seeds]
    entries = [entry for entry in found if entry is not None]
    if len(entries) < len(seeds):
        return None
    chosen = [tuple(sorted({record.layer for record in entry.records})) for entry in entries]
    return LayerSelection(
        mean_of(entries),
        tuple(sorted({layer for layers in chosen for layer in layers})),
        offered,
        left_out,
        seeds_differ=len(set(chosen)) > 1,
    )


def _held_out(records: Sequence[Record], store: ResultStore) -> Entry | None:
    curve = load_curve(store, records)
    by_layer = {record.layer: record for record in records}
    if curve.per_image.keys() != by_layer.keys() or not curve.candidates:
        return None
    mixed, layers = curve.choose_held_out()
    if len(set(layers)) == 1:
        return mean_entry([by_layer[layers[0]]])
    estimate = curve.estimate(mixed)
    # Folds are of equal size, so a block counts as often as it was chosen.
    shares = [by_layer[layer].degenerate_percent for layer in layers]
    return Entry(
        estimate.value,
        *(estimate.ci95() or (None, None)),
        mean_of_known(shares),
        tuple(by_layer[layer] for layer in sorted(set(layers))),
    )


def choice_notes(cells: Mapping[tuple[str, str], LayerSelection | None], choice: str) -> list[str]:
    """How blocks were chosen, as far as it concerns what stands in some cells."""
    chosen = [one for one in cells.values() if one is not None]
    notes = [CHOICE_NOTES[choice]] if any(len(one.offered) > 1 for one in chosen) else []
    if choice == "holdout":
        notes += mixed_notes(one.entry.records[0].metric for one in chosen if len(one.layers) > 1)
    if any(one.seeds_differ for one in chosen):
        notes.append("each seed chooses its own block (@: those of all); the mean is over seeds")
    if left_out := sorted({seed for one in chosen for seed in one.left_out}):
        notes.append(
            f"seed {', '.join(map(str, left_out))} is left out where it was probed at other blocks "
            "than the seeds shown"
        )
    return notes


def mixed_notes(metrics: Iterable[str]) -> list[str]:
    """Of metrics of which several blocks stand for an encoder: a mean over classes that occur."""
    if not any(metric.startswith("miou") for metric in metrics):
        return []
    return [
        "a held-out choice of several blocks counts the classes that any of them predicts: its "
        "mean IoU may be below that of each"
    ]


def columns_with_seeds_said(
    cells: Mapping[tuple[str, str], LayerSelection | None],
) -> dict[tuple[str, str], LayerSelection | None]:
    """As `with_seeds_said`, of cells by row and column, column by column."""
    entries = {at: chosen.entry for at, chosen in cells.items() if chosen is not None}
    for column in {column for _, column in entries}:
        entries |= with_seeds_said({at: e for at, e in entries.items() if at[1] == column})
    return {
        at: None if chosen is None else replace(chosen, entry=entries[at])
        for at, chosen in cells.items()
    }
