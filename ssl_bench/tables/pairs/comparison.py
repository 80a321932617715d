"""Is one better than the other? Paired over images, between checkpoints and between blocks."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.errors import DataError
from ssl_bench.intervals import Estimate
from ssl_bench.results import ENCODER, TRAINED_ON, Record, ResultStore
from ssl_bench.tables.notes import trusted_note
from ssl_bench.tables.pairs.image_scores import Scored, stored_curve
from ssl_bench.tables.printing.sheets import NO_VALUE, Cell, Sheet
from ssl_bench.tables.series import said_training, settings_text

Layers = tuple[tuple[int, ...], tuple[int, ...]]

_SERIES = ("task", "dataset", "split", "metric", "facet", "protocol", "seed")


@dataclass(frozen=True)
class Difference:
    """First minus second, in points, over the same images.

    Attributes:
        low: Of the 95 % interval, NaN where the images do not tell.
        high: As `low`.
        layers: The blocks behind both sides.
    """

    name: str
    first: float
    second: float
    low: float
    high: float
    layers: Layers

    @property
    def value(self) -> float:
        return self.first - self.second

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def first_text(self) -> str:
        """The value of the first; a dash where it has none."""
        return _shown(self.first, ".1f")

    @property
    def second_text(self) -> str:
        return _shown(self.second, ".1f")

    @property
    def text(self) -> str:
        """Such as "+2.5 [-1.0, +6.0]"; a dash where one side has no value."""
        if math.isnan(self.value) or math.isnan(self.low + self.high):
            return _shown(self.value, "+.1f")
        return f"{self.value:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def difference(name: str, first: Estimate, second: Estimate, layers: Layers) -> Difference:
    """Compare two estimates from the same images; nothing is uncertain between one and itself."""
    interval = None if first is second else first.difference_ci95(second)
    low, high = interval or (math.nan, math.nan)
    return Difference(name, first.value, second.value, low, high, layers)


def between_checkpoints(first: Scored, second: Scored) -> list[Difference]:
    """Block by block; then, of several, the best blocks and those that were chosen held out."""
    rows = block_by_block(first, second)
    return rows + best_blocks(first, second) if len(rows) > 1 else rows


def block_by_block(first: Scored, second: Scored) -> list[Difference]:
    """The blocks that both have."""
    return [
        difference(str(layer), first.blocks[layer], second.blocks[layer], ((layer,), (layer,)))
        for layer in sorted(first.blocks.keys() & second.blocks.keys())
    ]


def best_blocks(first: Scored, second: Scored) -> list[Difference]:
    """The best blocks, chosen on the scored images, and the held-out choice.

    The best block on the scored images flatters both sides; the held-out one is what somebody
    gets who must choose a block before seeing the image.
    """
    one, other = first.best, second.best
    best = (first.blocks[one], second.blocks[other], ((one,), (other,)))
    chosen = (_named(first.layers_held_out), _named(second.layers_held_out))
    # All blocks took part in the choice.
    every = (tuple(first.blocks), tuple(second.blocks))
    name = f"held-out choice ({chosen[0]}; {chosen[1]})"
    return [
        difference(f"best ({one}, {other})", *best),
        difference(name, first.held_out, second.held_out, every),
    ]


def between_blocks(scored: Scored) -> list[Difference]:
    """Every block, and the held-out choice, minus the best block on the scored images."""
    best, blocks = scored.blocks[scored.best], sorted(scored.blocks)
    rows = [
        difference(str(layer), scored.blocks[layer], best, ((layer,), (scored.best,)))
        for layer in blocks
    ]
    name = f"held-out choice ({_named(scored.layers_held_out)})"
    layers = (tuple(blocks), (scored.best,))
    return [*rows, difference(name, scored.held_out, best, layers)]


def comparisons(
    store: ResultStore, records: Sequence[Record], encoders: Sequence[str]
) -> list[tuple[Record, list[Difference]]]:
    """Everything that one checkpoint, block by block, or two can be compared in.

    Args:
        store: Holds the images' contributions.
        records: Those to look at.
        encoders: Their `Record.encoder_id`, one or two.

    Returns:
        A record of each comparable group, and its rows.

    Raises:
        DataError: nothing can be compared.
    """
    found = [
        (group[0], rows)
        for group in paired_groups(records)
        if (rows := rows_of(store, group, encoders))
    ]
    if not found:
        why = ", ".join(f"{task}: {words}" for task, words in apart(records, encoders).items())
        raise DataError(
            f"nothing to compare in {store.root}: no task was scored image by image for "
            f"{'both checkpoints' if len(encoders) > 1 else 'the checkpoint'} on the same images "
            f"with the same settings and training images{f' ({why})' if why else ''}"
            f"{_never_kept(store, records, encoders)}"
        )
    return found


def rows_of(
    store: ResultStore, group: Sequence[Record], encoders: Sequence[str]
) -> list[Difference]:
    """What one or two checkpoints of a group of `paired_groups` can be compared in."""
    curves = [stored_curve(store, [r for r in group if r.encoder_id == one]) for one in encoders]
    if not all(curve.per_image for curve in curves):
        return []
    sides = [Scored.of(curve) for curve in curves]
    return between_blocks(sides[0]) if len(sides) == 1 else between_checkpoints(*sides)


def _never_kept(store: ResultStore, records: Sequence[Record], encoders: Sequence[str]) -> str:
    """Whether it can be mended by another run: not where a task keeps nothing of single images."""
    own = [record for record in records if record.encoder_id in encoders]
    tasks = {record.task for record in own}
    if not own or {r.task for r in own if store.keeps_images(r.key())}:
        return "; run `ssl-bench probe --overwrite` for what is missing"
    return (
        f"; of {' and '.join(sorted(tasks))} no values of single images are kept that could be "
        "compared"
    )


def apart(records: Sequence[Record], encoders: Sequence[str]) -> dict[str, str]:
    """By task, in what scores of the same question to two encoders differ, if in anything."""
    same = ("task", "dataset", "metric", "facet", "protocol")
    asked = [[r for r in records if r.encoder_id == encoder] for encoder in encoders]
    found: dict[str, list[list[str]]] = defaultdict(list)
    for one, other in itertools.product(asked[0], asked[-1]):
        if all(getattr(one, name) == getattr(other, name) for name in same):
            found[one.task].append(
                [
                    f"{name} {ours} and {theirs}"
                    for name, ours, theirs in _beside(one, other)
                    if ours != theirs
                ]
            )
    # Of several pairs the nearest; one that differs in nothing has another reason.
    nearest = {task: min(those, key=len) for task, those in sorted(found.items())}
    return {task: "; ".join(those) for task, those in nearest.items() if those}


def _beside(one: Record, other: Record) -> Iterator[tuple[str, Any, Any]]:
    yield "trained on", one.trained_on, other.trained_on
    for name in ("split", "dataset_fingerprint", "seed"):
        yield name, getattr(one, name), getattr(other, name)
    for name in sorted((one.settings.keys() | other.settings.keys()) - {TRAINED_ON}):
        yield name, one.settings.get(name), other.settings.get(name)


@dataclass(frozen=True)
class Comparison:
    """Differences of one metric as a table, over blocks.

    Attributes:
        record: One of those that were compared; gives what they have in common.
        names: Heads of the two columns of values.
        encoders: Those that were compared, one or two records.
        differing: What sets it apart from others of the same title, see `series.difference`.
    """

    record: Record
    rows: tuple[Difference, ...]
    names: tuple[str, str]
    encoders: tuple[Record, ...]
    differing: str = ""

    def sheet(self, style: str) -> Sheet:
        """Differences whose interval leaves out 0 are marked."""
        del style
        cells = [
            (
                Cell(row.name),
                Cell(row.first_text),
                Cell(row.second_text),
                Cell(row.text, row.is_clear),
            )
            for row in self.rows
        ]
        record = self.record
        return Sheet(
            title=(
                f"{record.task}: {record.metric} (%) on {record.dataset} {record.split}, "
                f"{record.facet}, protocol {record.named_protocol}"
                f"{said_training(record)}, seed {record.seed}{self.differing}"
            ),
            head=("block", *self.names, "first - second [95 %]"),
            rows=tuple(cells),
            notes=(
                f"paired over {record.num_images} images{trusted_note([record])}; no correction "
                "for the number of rows",
            ),
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        """A difference a row, with what tells the comparison from others."""
        return [
            {
                **{name: getattr(self.record, name) for name in _SERIES},
                "block": row.name,
                "first_name": self.names[0],
                "second_name": self.names[1],
                **_numbers(row),
                "num_images": self.record.num_images,
            }
            for row in self.rows
        ]

    def as_json(self) -> dict[str, Any]:
        """The differences with what is needed to trust them."""
        return {
            "kind": "comparison",
            **{name: getattr(self.record, name) for name in _SERIES},
            "dataset_fingerprint": self.record.dataset_fingerprint,
            "settings": dict(self.record.settings),
            "num_images": self.record.num_images,
            "names": list(self.names),
            **{name: [getattr(one, name) for one in self.encoders] for name in ENCODER},
            "version": self.record.version,
            "git_commit": self.record.git_commit,
            "device": self.record.device,
            "rows": [{"block": row.name, **_numbers(row)} for row in self.rows],
        }


def _numbers(row: Difference) -> dict[str, Any]:
    values = {
        "first": row.first,
        "second": row.second,
        "difference": row.value,
        "low": row.low,
        "high": row.high,
    }
    finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
    return {**finite, "interval_leaves_out_0": row.is_clear}


def paired_groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records whose images may be paired, whatever the block and the model."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        where = (record.task, record.dataset, record.split, record.dataset_fingerprint)
        how = (record.metric, record.facet, record.protocol, record.seed, settings_text(record))
        groups[repr((where, how))].append(record)
    return [group for _, group in sorted(groups.items())]


def _named(layers: Sequence[int]) -> str:
    return ", ".join(str(layer) for layer in sorted(set(layers)))


def _shown(value: float, style: str) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:{style}}"
