"""Which block of an encoder stands for it: one chosen on other images, or the best on the same."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.entry import Entry, arbitrary_percent, mean_entry, with_seeds_said
from ssl_bench.tables.pairs.image_scores import FOLDS, stored_curve

CHOICES = ("holdout", "oracle")
CHOICE_NOTES = {
    "holdout": (
        f"block: held-out choice, each of {FOLDS} folds of the images is scored with the block "
        "that the other folds choose (@: those blocks); intervals take the choice as given"
    ),
    "oracle": (
        "block: ORACLE, the best one on the scored images themselves (@), "
        "which flatters every encoder"
    ),
}
NO_IMAGES_NOTE = (
    "‡: no block was chosen: no values of single images were kept to choose on other images; "
    "--layer N shows one block, --best-layer oracle the best"
)
UNRANKED_NOTE = "‡ of {}: no block was chosen: more of it is not better; --layer N shows one block"


@dataclass(frozen=True)
class LayerSelection:
    """The score of an encoder with the blocks that were chosen for it.

    Attributes:
        layers: Several where folds or seeds chose different ones.
        offered: Those that could have been chosen.
    """

    entry: Entry
    layers: tuple[int, ...]
    offered: tuple[int, ...]


def choose_block(
    records: Sequence[Record], store: ResultStore, choice: str
) -> LayerSelection | None:
    """Score one encoder with a block chosen from comparable records of several.

    Args:
        records: Of one checkpoint; they differ in block and seed alone.
        store: Holds the images' contributions.
        choice: "holdout" or "oracle"; ignored where there is one block.

    Returns:
        None where a held-out choice lacks the values of single images, and for what is not ranked.
    """
    offered = tuple(sorted({record.layer for record in records}))
    if len(offered) > 1 and not records[0].is_ranked:
        return None
    if len(offered) == 1 or choice == "oracle":
        return _oracle(records, offered)
    seeds = sorted({record.seed for record in records})
    found = [_held_out([r for r in records if r.seed == seed], store) for seed in seeds]
    entries = [entry for entry in found if entry is not None]
    return _mean(entries, offered) if len(entries) == len(seeds) else None


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


def _oracle(records: Sequence[Record], offered: tuple[int, ...]) -> LayerSelection:
    entries = {
        layer: mean_entry([record for record in records if record.layer == layer])
        for layer in offered
    }

    def value(layer: int) -> float:
        return -math.inf if math.isnan(entries[layer].value) else entries[layer].value

    best = max(offered, key=value)
    return LayerSelection(entries[best], (best,), offered)


def _held_out(records: Sequence[Record], store: ResultStore) -> Entry | None:
    curve = stored_curve(store, records)
    by_layer = {record.layer: record for record in records}
    if curve.per_image.keys() != by_layer.keys():
        return None
    mixed, layers = curve.held_out()
    if len(set(layers)) == 1:
        return mean_entry([by_layer[layers[0]]])
    estimate = curve.estimate(mixed)
    low, high = estimate.ci95() or (None, None)
    return Entry(
        value=estimate.value,
        low=low,
        high=high,
        # Folds are of equal size, so a block counts as often as it was chosen.
        arbitrary=arbitrary_percent([by_layer[layer] for layer in layers]),
        records=tuple(by_layer[layer] for layer in sorted(set(layers))),
    )


def _mean(entries: Sequence[Entry], offered: tuple[int, ...]) -> LayerSelection:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    records = tuple(record for entry in entries for record in entry.records)
    entry = Entry(
        value=sum(entry.value for entry in entries) / len(entries),
        low=mean([entry.low for entry in entries]),
        high=mean([entry.high for entry in entries]),
        arbitrary=mean([entry.arbitrary for entry in entries]),
        records=records,
    )
    return LayerSelection(entry, tuple(sorted({record.layer for record in records})), offered)
