"""Is one better than the other? Paired over images: two checkpoints, two runs, blocks of one."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ssl_bench.errors import DataError
from ssl_bench.intervals import SIGNIFICANT, Estimate, holm
from ssl_bench.results import ENCODER_FIELDS, TRAINED_ON, Record, ResultStore, is_degenerate
from ssl_bench.results.per_image import CurveEstimates, load_curve
from ssl_bench.tables.depth import (
    PROBE_EPOCHS,
    epoch_of,
    group_by_run,
    require_one_encoder_per_epoch,
)
from ssl_bench.tables.entries import (
    comparable_groups,
    dagger,
    dagger_meaning,
    differences,
    image_size_note,
    title,
    trusted_note,
)
from ssl_bench.tables.layer_selection import mixed_notes
from ssl_bench.tables.sheets import NO_VALUE, Cell, Sheet

Layers = tuple[tuple[int, ...], tuple[int, ...]]

_SERIES = ("task", "dataset", "split", "metric", "facet", "protocol", "seed")
_SAME = ("task", "dataset", "metric", "facet", "protocol")


@dataclass(frozen=True)
class Difference:
    """First minus second, in points, over the same images.

    Attributes:
        low: Of the 95 % interval, NaN where the images do not tell.
        high: As `low`.
        layers: The blocks behind both sides.
        degenerate: Percent of degenerate images on both sides, where it is known.
        p: Two-sided, of the same test as the interval; NaN where there is none.
        p_holm: The same after Holm's correction over the blocks; NaN for what is no single block.
    """

    name: str
    first: float
    second: float
    low: float
    high: float
    layers: Layers
    degenerate: tuple[float | None, float | None] = (None, None)
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def value(self) -> float:
        return self.first - self.second

    @property
    def leaves_out_0(self) -> bool:
        """Whether the interval does."""
        return self.low > 0 or self.high < 0

    @property
    def is_degenerate(self) -> bool:
        """Whether rounding, not the images, decides most answers of a side."""
        return any(map(is_degenerate, self.degenerate))

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0 and neither side is degenerate."""
        return self.leaves_out_0 and not self.is_degenerate

    @property
    def is_clear_among_blocks(self) -> bool:
        """Whether it is clear after Holm's correction over the blocks too."""
        return self.is_clear and self.p_holm < SIGNIFICANT

    @property
    def first_text(self) -> str:
        """The value of the first with its dagger; a dash where it has none."""
        return _shown(self.first, ".1f") + dagger(self.degenerate[0])

    @property
    def second_text(self) -> str:
        return _shown(self.second, ".1f") + dagger(self.degenerate[1])

    @property
    def text(self) -> str:
        """Such as "+2.5 [+1.0, +4.0] §"; a dash where one side has no value."""
        if math.isnan(self.value) or math.isnan(self.low + self.high):
            return _shown(self.value, "+z.1f")
        sign = " §" if self.is_clear_among_blocks else ""
        return f"{self.value:+z.1f} [{self.low:+z.1f}, {self.high:+z.1f}]{sign}"

    def as_json(self) -> dict[str, Any]:
        """Its numbers, null where they are none."""
        values = {"first": self.first, "second": self.second, "difference": self.value}
        values |= {"low": self.low, "high": self.high, "p": self.p, "p_holm": self.p_holm}
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        first, second = self.degenerate
        return {
            **finite,
            "interval_leaves_out_0": self.leaves_out_0,
            "significant_after_holm": self.is_clear_among_blocks,
            "first_degenerate_percent": first,
            "second_degenerate_percent": second,
        }


class Side(NamedTuple):
    """One side of a difference: a score, the blocks behind it, its percent of degenerate images."""

    estimate: Estimate
    layers: tuple[int, ...]
    degenerate: float | None = None


def block_side(scored: CurveEstimates, layer: int) -> Side:
    """Return the score of one block."""
    return Side(scored.blocks[layer], (layer,), scored.degenerate.get(layer))


def held_out(scored: CurveEstimates) -> Side:
    """Return the score with the blocks that other images choose, all of which took part."""
    return Side(scored.held_out, tuple(scored.blocks), scored.held_out_degenerate_percent)


def difference(name: str, first: Side, second: Side) -> Difference:
    """Compare two scores of the same images; nothing is uncertain between one and itself."""
    one, other = first.estimate, second.estimate
    interval = None if one is other else one.difference_ci95(other)
    low, high = interval or (math.nan, math.nan)
    return Difference(
        name,
        one.value,
        other.value,
        low,
        high,
        (first.layers, second.layers),
        (first.degenerate, second.degenerate),
        math.nan if interval is None else one.difference_p(other),
    )


def corrected_over_blocks(rows: Sequence[Difference]) -> list[Difference]:
    """Add Holm's correction to differences of single blocks; degenerate ones are not tested."""
    ps = holm([math.nan if row.is_degenerate else row.p for row in rows])
    return [replace(row, p_holm=p) for row, p in zip(rows, ps, strict=True)]


def compare_block_by_block(first: CurveEstimates, second: CurveEstimates) -> list[Difference]:
    """The blocks that both have; and the last of each, where these are others."""
    pairs = [(str(n), n, n) for n in sorted(first.blocks.keys() & second.blocks.keys())]
    one, other = max(first.blocks), max(second.blocks)
    if one != other:
        pairs.append((f"last ({one}, {other})", one, other))
    return corrected_over_blocks(
        [difference(name, block_side(first, n), block_side(second, m)) for name, n, m in pairs]
    )


def compare_best_blocks(first: CurveEstimates, second: CurveEstimates) -> list[Difference]:
    """The best blocks, chosen on the scored images, and the held-out choice.

    The best block on the scored images flatters both sides; the held-out one is what somebody
    gets who must choose a block before seeing the image. None where no block of a side may be
    best.
    """
    if not (first.has_best and second.has_best):
        return []
    one, other = first.best, second.best
    chosen = (_named(first.held_out_layers), _named(second.held_out_layers))
    name = f"held-out choice ({chosen[0]}; {chosen[1]})"
    return [
        difference(f"best ({one}, {other})", block_side(first, one), block_side(second, other)),
        difference(name, held_out(first), held_out(second)),
    ]


def compare_checkpoints(first: CurveEstimates, second: CurveEstimates) -> list[Difference]:
    """Block by block; then, of several, the best blocks and those that were chosen held out."""
    rows = compare_block_by_block(first, second)
    several = len(first.blocks) > 1 and len(second.blocks) > 1
    return rows + compare_best_blocks(first, second) if several else rows


def between_blocks(scored: CurveEstimates) -> list[Difference]:
    """Every block, and the held-out choice, minus the best block on the scored images.

    Where no block may be best, minus the last block, and nothing is chosen.
    """
    best = block_side(scored, scored.best)
    rows = corrected_over_blocks(
        [difference(str(n), block_side(scored, n), best) for n in sorted(scored.blocks)]
    )
    if not scored.has_best:
        return rows
    name = f"held-out choice ({_named(scored.held_out_layers)})"
    return [*rows, difference(name, held_out(scored), best)]


@dataclass(frozen=True)
class Comparison:
    """Differences of one metric as a table, over blocks.

    Attributes:
        record: One of those that were compared; gives what they have in common.
        names: Heads of the two columns of values.
        encoders: A record of each that was compared, one or two.
        differing: What sets it apart from others of the same title, see `entries.differences`.
        without_best: Names of the encoders all of whose blocks are degenerate.
        code: By name of a side the versions and commits that computed it, see `code_of`.
    """

    record: Record
    rows: tuple[Difference, ...]
    names: tuple[str, str]
    encoders: tuple[Record, ...]
    differing: str = ""
    without_best: tuple[str, ...] = ()
    code: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def sheet(self, style: str) -> Sheet:
        """Differences whose interval leaves out 0 are marked."""
        del style
        record = self.record
        notes = [
            f"paired over {record.num_images} images{image_size_note(self.encoders)}"
            f"{trusted_note([record])}; marked where the interval leaves out 0, without a "
            "correction for the number of rows"
        ]
        if not record.is_ranked:
            notes.append("more of it is not better: no block is best")
        if self.without_best:
            words = " and ".join(self.without_best)
            notes.append(f"no block of {words} is best: all are degenerate")
        # Such as "held-out choice (9, 11)".
        is_mixed = any(row.name.startswith("held-out") and "," in row.name for row in self.rows)
        notes += mixed_notes([record.metric] if is_mixed else [])
        first, second = self.rows[-1].layers
        if len(self.encoders) > 1 and len(first) > 1 and set(first) != set(second):
            one, other = self.names
            notes.append(
                "best block and held-out choice are among "
                f"{_blocks(first)} of {one} and {_blocks(second)} of {other}"
            )
        return Sheet(
            title=f"{title(record)}, seed {record.seed}{self.differing}",
            head=("block", *self.names, "first - second [95 %]"),
            rows=tuple(
                (
                    *map(Cell, (row.name, row.first_text, row.second_text)),
                    Cell(row.text, row.is_clear),
                )
                for row in self.rows
            ),
            notes=tuple(notes),
            marks=difference_footnotes([self.rows]),
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        """A difference a row, with what tells the comparison from others."""
        return [
            {
                **{name: getattr(self.record, name) for name in _SERIES},
                "block": row.name,
                "first_name": self.names[0],
                "second_name": self.names[1],
                **row.as_json(),
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
            **{name: [getattr(one, name) for one in self.encoders] for name in ENCODER_FIELDS},
            "version": self.record.version,
            "git_commit": self.record.git_commit,
            "device": self.record.device,
            "rows": [{"block": row.name, **row.as_json()} for row in self.rows],
        }


def code_of(records: Iterable[Record]) -> frozenset[str]:
    """Return the versions and commits that computed some records, such as "0.2.0 (3f9a01b2c4)"."""

    def words(record: Record) -> str:
        commit = record.git_commit or "unknown"
        changed = "-dirty" if commit.endswith("-dirty") else ""
        return f"{record.version} ({commit[:10]}{changed})"

    return frozenset(map(words, records))


def code_warning(tables: Iterable[Comparison]) -> str:
    """Warn in one line if the sides of some comparisons come from different code; else empty."""
    found: dict[str, set[str]] = defaultdict(set)
    for table in tables:
        # Each table alone: code that changed from one to another explains no difference.
        if len(set().union(*table.code.values())) > 1:
            for name, code in table.code.items():
                found[name] |= code
    if not found:
        return ""
    sides = "; ".join(f"{name}: {', '.join(sorted(code))}" for name, code in found.items())
    return (
        f"warning: the compared results come from different code ({sides}), which may be why they "
        "differ; `ssl-bench probe --overwrite` computes a side again"
    )


def difference_footnotes(tables: Sequence[Sequence[Difference]]) -> tuple[str, ...]:
    """Explain the signs in the rows of one table, or of several, each corrected by itself."""
    rows, marks = list(itertools.chain(*tables)), []
    tested = [sum(not math.isnan(row.p_holm) for row in table) for table in tables]
    if most := max(tested, default=0):
        is_any = any(row.is_clear_among_blocks for row in rows)
        which = "§: significant" if is_any else "§ (none here): significant"
        counts = " or ".join(map(str, sorted(set(tested))))
        blocks = f"{counts} block{'s' if most > 1 else ''}"
        each = " at each epoch" if len(tables) > 1 else ""
        marks.append(f"{which} at 5 % after Holm's correction over {blocks}{each}")
    is_any = any(row.is_degenerate for row in rows)
    dagger = dagger_meaning(percent for row in rows for percent in row.degenerate)
    marks.append(f"{dagger}, nor is its difference marked" if is_any else dagger)
    return tuple(filter(None, marks))


def comparisons(
    store: ResultStore, records: Sequence[Record], encoders: Mapping[str, str]
) -> tuple[list[Comparison], dict[str, str]]:
    """Everything that one checkpoint, block by block, or two can be compared in.

    Args:
        store: Holds the images' contributions.
        records: Those to look at.
        encoders: One or two, by `Record.encoder_id` the name that somebody typed.

    Returns:
        A table of each comparable group; and by task, of those that have none, the reason.

    Raises:
        DataError: nothing can be compared.
    """
    asked = list(encoders)
    by_id = {record.encoder_id: record for record in records}
    names = [by_id[one].model if one in by_id else encoders[one] for one in asked]
    if len(set(names)) < len(names):
        names = [f"{name} {one[:6]}" for one, name in zip(asked, names, strict=True)]
    found = [
        (group, sides)
        for group in _paired_groups(records)
        if (sides := _sides_of(store, group, asked))
    ]
    tasks = {r.task for r in records if r.encoder_id in encoders}
    reasons = {
        task: _why_not(store, [r for r in records if r.task == task], encoders)
        for task in sorted(tasks - {group[0].task for group, _ in found})
    }
    if not found:
        why = "; ".join(f"{task}: {words}" for task, words in reasons.items())
        raise DataError(
            f"nothing to compare in {store.root}: no task was scored image by image for "
            f"{'both checkpoints' if len(asked) > 1 else 'the checkpoint'} on the same images "
            f"with the same settings and training images{f' ({why})' if why else ''}"
        )
    apart = differences([group[:1] for group, _ in found])
    tables = []
    for (group, sides), differing in zip(found, apart, strict=True):
        of = {record.encoder_id: record for record in group}
        beside = names[1:] or ["best block" if sides[0].has_best else "last block"]
        lacking = [
            name
            for name, side in zip(names, sides, strict=True)
            if group[0].is_ranked and not side.has_best and len(side.blocks) > 1
        ]
        tables.append(
            Comparison(
                record=group[0],
                rows=tuple(_rows_of(sides)),
                names=(names[0], beside[0]),
                encoders=tuple(of[one] for one in asked),
                differing=differing,
                without_best=tuple(lacking),
                code={
                    name: code_of(r for r in group if r.encoder_id == one)
                    for name, one in zip(names, asked, strict=True)
                },
            )
        )
    return tables, reasons


def _sides_of(
    store: ResultStore, group: Sequence[Record], encoders: Sequence[str]
) -> list[CurveEstimates]:
    """Return one a side; none if the values of single images of a side were not kept."""
    curves = [load_curve(store, [r for r in group if r.encoder_id == one]) for one in encoders]
    if not all(curve.per_image for curve in curves):
        return []
    return list(map(CurveEstimates.from_curve, curves))


def _rows_of(sides: Sequence[CurveEstimates]) -> list[Difference]:
    return between_blocks(sides[0]) if len(sides) == 1 else compare_checkpoints(*sides)


def _why_not(store: ResultStore, records: Sequence[Record], encoders: Mapping[str, str]) -> str:
    """Of one task why it cannot be compared, and where a command helps, which."""
    task = records[0].task
    sides = {word: [r for r in records if r.encoder_id == one] for one, word in encoders.items()}
    for word, side in sides.items():
        if not side:
            others = sorted({r.dataset for r in records if r.encoder_id in encoders})
            return (
                f"no record of {word}; `ssl-bench probe --task {task} --dataset "
                f"{','.join(others)}` with its --checkpoint leaves one"
            )
    (first, *_), (*_, second) = sides.values(), sides.values()
    pairs = [
        (one, other)
        for one, other in itertools.product(first, second)
        if all(getattr(one, name) == getattr(other, name) for name in _SAME)
    ]
    if not pairs:
        asked = {
            word: ", ".join(
                sorted({f"{r.metric} {r.dataset} {r.facet} {r.protocol}" for r in side})
            )
            for word, side in sides.items()
        }
        return "; ".join(f"of {word} {what} alone" for word, what in asked.items())
    kept = [{r.layer for r in side if store.has_per_image(r.key())} for side in (first, second)]
    if not any(kept):
        return "no values of single images are kept"
    # The nearest; one that differs in nothing has another reason.
    if differing := min(([*_differing(*pair)] for pair in pairs), key=len):
        return "; ".join(differing)
    again = f"`ssl-bench probe --task {task} --overwrite`"
    if not all(kept):
        return f"the values of single images are missing; {again} leaves them"
    return f"the values of single images do not fit their records; {again} makes both anew"


def _differing(one: Record, other: Record) -> Iterator[str]:
    """In what the same question was put to two encoders in another way."""
    beside: list[tuple[str, Any, Any]] = [("trained on", one.trained_on, other.trained_on)]
    for name in ("split", "dataset_fingerprint", "seed"):
        beside.append((name, getattr(one, name), getattr(other, name)))
    for name in sorted((one.settings.keys() | other.settings.keys()) - {TRAINED_ON}):
        beside.append((name, one.settings.get(name), other.settings.get(name)))
    return (f"{name} {ours} and {theirs}" for name, ours, theirs in beside if ours != theirs)


def _paired_groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records whose images may be paired, whatever the block and the model."""
    seeds = sorted({record.seed for record in records})
    groups = [
        [r for r in group if r.seed == n] for group in comparable_groups(records) for n in seeds
    ]
    return list(filter(None, groups))


@dataclass(frozen=True)
class EpochComparison:
    """Differences of one metric between two runs, over blocks and epochs.

    Attributes:
        by_epoch: Of blocks alone, in the order of the epochs, at least one.
    """

    by_epoch: Mapping[float, Comparison]

    @property
    def record(self) -> Record:
        """One of those that were compared."""
        return next(iter(self.by_epoch.values())).record

    def sheet(self, style: str) -> Sheet:
        """The epochs of a block below one another."""
        sheets = {epoch: one.sheet(style) for epoch, one in self.by_epoch.items()}
        whole = next(iter(sheets.values()))
        rows = [
            (row[0], Cell(f"{epoch:g}"), *row[1:])
            for epoch, sheet in sheets.items()
            for row in sheet.rows
        ]
        return replace(
            whole,
            head=(whole.head[0], "epoch", *whole.head[1:]),
            # Stable: the epochs stay in their order.
            rows=tuple(sorted(rows, key=lambda row: int(row[0].text))),
            marks=difference_footnotes([one.rows for one in self.by_epoch.values()]),
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        """A difference a row, with its epoch."""
        return [
            {"epoch": epoch, **row}
            for epoch, comparison in self.by_epoch.items()
            for row in comparison.csv_rows()
        ]

    def as_json(self) -> dict[str, Any]:
        """A comparison an epoch."""
        epochs = [{"epoch": epoch, **one.as_json()} for epoch, one in self.by_epoch.items()]
        return {"kind": "comparison_over_epochs", "epochs": epochs}


def compare_runs(
    store: ResultStore, records: Sequence[Record], runs: tuple[str, str]
) -> list[EpochComparison]:
    """First run minus second at every epoch of which both have a scored encoder.

    Args:
        store: Holds the images' contributions.
        records: Those to look at.
        runs: Their names: `RUN` for `RUN@100` and the like.

    Raises:
        DataError: a run has two encoders of an epoch, or nothing can be compared.
    """
    tables = []
    for group in _paired_groups(records):
        encoders = []
        for run in runs:
            those = group_by_run(group).get(run, [])
            require_one_encoder_per_epoch(run, those)
            encoders.append({epoch_of(record): record for record in those})
        by_epoch = {}
        for epoch in sorted(encoders[0].keys() & encoders[1].keys()):
            pair = tuple(of_epoch[epoch] for of_epoch in encoders)
            sides = _sides_of(store, group, [record.encoder_id for record in pair])
            rows = _rows_of(sides) if sides else []
            # Not the best block: it is another one at each epoch.
            if blocks := tuple(row for row in rows if row.name.isdigit()):
                code = {
                    run: code_of(r for r in group if r.encoder_id == record.encoder_id)
                    for run, record in zip(runs, pair, strict=True)
                }
                by_epoch[epoch] = Comparison(pair[0], blocks, runs, pair, code=code)
        if by_epoch:
            tables.append(EpochComparison(by_epoch))
    if not tables:
        known = [sorted({epoch_of(r) for r in group_by_run(records).get(run, [])}) for run in runs]
        told = " and ".join(
            f"{run} {', '.join(f'{epoch:g}' for epoch in epochs) or 'none'}"
            for run, epochs in zip(runs, known, strict=True)
        )
        raise DataError(
            f"nothing to compare over epochs in {store.root}: no task was scored image by image "
            "for both runs at a common epoch on the same images with the same settings (epochs "
            f"with records: {told}); keep epochs of both runs and probe each",
            hint=PROBE_EPOCHS,
        )
    return tables


def _named(layers: Sequence[int] | set[int]) -> str:
    return ", ".join(str(layer) for layer in sorted(set(layers)))


def _blocks(layers: Sequence[int]) -> str:
    return f"{len(layers)} block{'s' if len(layers) > 1 else ''} ({_named(layers)})"


def _shown(value: float, style: str) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:{style}}"
