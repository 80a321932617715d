"""Compare two encoders, two training runs or two blocks by their scores on the same images."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ssl_bench.errors import DataError
from ssl_bench.intervals import SIGNIFICANCE_LEVEL, Estimate, holm
from ssl_bench.results import (
    ENCODER_FIELDS,
    TRAINING_IMAGES_KEY,
    Record,
    ResultStore,
    is_degenerate,
)
from ssl_bench.results.per_image import ImageCurve, load_curve
from ssl_bench.tables.depth import (
    PROBE_EPOCHS,
    epoch_number,
    group_by_run,
    require_one_encoder_per_epoch,
)
from ssl_bench.tables.entries import (
    comparable_groups,
    explain_dagger,
    format_dagger,
    image_size_note,
    table_title,
    table_titles,
    trusted_note,
)
from ssl_bench.tables.layer_selection import miou_choice_notes
from ssl_bench.tables.sheets import NO_VALUE, Cell, PrintedTable, Table

_SERIES = ("task", "dataset", "split", "metric", "facet", "protocol", "seed")
_MATCHED_FIELDS = ("task", "dataset", "metric", "facet", "protocol")
"""The other differences of two stored scores are only reported if these fields are equal."""


@dataclass(frozen=True)
class Difference:
    """Difference between two scores on the same images, first minus second, in percentage points.

    Attributes:
        name: Heading of the table row, such as "11" for block 11.
        first: First score in percent, or NaN if it is undefined.
        second: Second score in percent, or NaN if it is undefined.
        low: Lower end of the 95 % interval of the difference, or NaN if there is no interval.
        high: Upper end of the 95 % interval, or NaN if there is no interval.
        layers: Block indices of the first score and of the second score.
        degenerate_percents: For each score, the percentage of degenerate images, whose result is
            arbitrary. None if unknown.
        p: Two-sided p-value of the difference, or NaN if there is no interval.
        p_holm: The p-value after Holm's correction for the number of rows that compare two blocks.
            NaN for all other rows of the table, and for rows that were not tested.
    """

    name: str
    first: float
    second: float
    low: float
    high: float
    layers: tuple[tuple[int, ...], tuple[int, ...]]
    degenerate_percents: tuple[float | None, float | None] = (None, None)
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def value(self) -> float:
        return self.first - self.second

    @property
    def interval_excludes_0(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def is_degenerate(self) -> bool:
        """Whether at least one of the two scores is degenerate.

        A score is degenerate if more than `MAX_DEGENERATE_PERCENT` % of the images have an
        arbitrary result, for example because rounding errors decide it.
        """
        return any(map(is_degenerate, self.degenerate_percents))

    @property
    def is_significant(self) -> bool:
        """Whether the interval of the difference excludes 0 and neither score is degenerate.

        A score is degenerate if the results of too many images are arbitrary.
        """
        return self.interval_excludes_0 and not self.is_degenerate

    @property
    def is_significant_after_holm(self) -> bool:
        """Whether the difference is significant after Holm's correction over all blocks."""
        return self.is_significant and self.p_holm < SIGNIFICANCE_LEVEL

    @property
    def first_text(self) -> str:
        return _format_number(self.first, ".1f") + format_dagger(self.degenerate_percents[0])

    @property
    def second_text(self) -> str:
        return _format_number(self.second, ".1f") + format_dagger(self.degenerate_percents[1])

    @property
    def text(self) -> str:
        """The difference and its interval as text, such as "+2.5 [+1.0, +4.0] §".

        The sign § marks significance after Holm's correction. If a score is undefined, the text is
        a dash.
        """
        if math.isnan(self.value) or math.isnan(self.low + self.high):
            return _format_number(self.value, "+z.1f")
        sign = " §" if self.is_significant_after_holm else ""
        return f"{self.value:+z.1f} [{self.low:+z.1f}, {self.high:+z.1f}]{sign}"

    def as_json(self) -> dict[str, Any]:
        """Return the difference as a dictionary of JSON types, with None for NaN and infinity."""
        values = {"first": self.first, "second": self.second, "difference": self.value}
        values |= {"low": self.low, "high": self.high, "p": self.p, "p_holm": self.p_holm}
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        first, second = self.degenerate_percents
        return {
            **finite,
            "interval_leaves_out_0": self.interval_excludes_0,
            "significant_after_holm": self.is_significant_after_holm,
            "first_degenerate_percent": first,
            "second_degenerate_percent": second,
        }


def _format_number(value: float, style: str) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:{style}}"


class PairedScore(NamedTuple):
    """One of two compared scores.

    Attributes:
        estimate: The score, with the data for its confidence interval.
        layers: Indices of the blocks from which the score was computed.
        degenerate_percent: Percentage of degenerate images, whose result is arbitrary, or None if
            unknown.
    """

    estimate: Estimate
    layers: tuple[int, ...]
    degenerate_percent: float | None = None


def get_block_score(curve: ImageCurve, layer: int) -> PairedScore:
    return PairedScore(curve.layer_estimates[layer], (layer,), curve.degenerate.get(layer))


def _score_held_out(curve: ImageCurve) -> PairedScore:
    """Return the score of an encoder whose block is chosen on held-out images.

    The images are split into folds, and each fold is scored with the block that is best on the
    other folds. `curve` contains the per-image scores of the encoder at each block.
    """
    return PairedScore(
        curve.held_out_estimate, tuple(curve.layer_estimates), curve.held_out_degenerate_percent
    )


def subtract(name: str, first: PairedScore, second: PairedScore) -> Difference:
    """Return the difference of two scores on the same images, first minus second.

    If both are the same score, for example because a block is compared with itself, the difference
    has no confidence interval. `name` is the heading of the table row, such as "11" for block 11.
    """
    is_same = first.estimate is second.estimate
    interval = None if is_same else first.estimate.difference_ci95(second.estimate)
    low, high = interval or (math.nan, math.nan)
    return Difference(
        name,
        first.estimate.value,
        second.estimate.value,
        low,
        high,
        (first.layers, second.layers),
        (first.degenerate_percent, second.degenerate_percent),
        math.nan if interval is None else first.estimate.difference_p(second.estimate),
    )


def _correct_over_blocks(rows: Sequence[Difference]) -> list[Difference]:
    """Return copies of the rows with p-values after Holm's correction for multiple comparisons.

    The number of comparisons is the number of rows with a p-value. Rows with a degenerate score are
    ignored and get the p-value NaN. A score is degenerate if too many images have an arbitrary
    result.
    """
    ps = holm([math.nan if row.is_degenerate else row.p for row in rows])
    return [replace(row, p_holm=p) for row, p in zip(rows, ps, strict=True)]


def compare_block_by_block(first: ImageCurve, second: ImageCurve) -> list[Difference]:
    """Compare two encoders at every block index that was probed in both, on the same images.

    If the last probed blocks of the encoders have different indices, one more row compares these
    blocks. `first` and `second` contain the per-image scores of an encoder at each block.
    """
    pairs = [
        (str(n), n, n) for n in sorted(first.layer_estimates.keys() & second.layer_estimates.keys())
    ]
    last = max(first.layer_estimates), max(second.layer_estimates)
    if last[0] != last[1]:
        pairs.append((f"last ({last[0]}, {last[1]})", *last))
    return _correct_over_blocks(
        [
            subtract(name, get_block_score(first, a), get_block_score(second, b))
            for name, a, b in pairs
        ]
    )


def compare_best_blocks(first: ImageCurve, second: ImageCurve) -> list[Difference]:
    """Compare two encoders at their best blocks, and at blocks chosen on held-out images.

    The best blocks are chosen on the scored images, so their scores are optimistic. The choice on
    held-out images estimates the score for users who must choose a block before seeing the scored
    images. The list is empty if an encoder has no best block, for example because too many images
    have an arbitrary result at every block.
    """
    if not (first.has_best and second.has_best):
        return []
    one, other = first.best_layer, second.best_layer
    chosen = (_layer_list(first.held_out_layers), _layer_list(second.held_out_layers))
    name = f"held-out choice ({chosen[0]}; {chosen[1]})"
    return [
        subtract(
            f"best ({one}, {other})", get_block_score(first, one), get_block_score(second, other)
        ),
        subtract(name, _score_held_out(first), _score_held_out(second)),
    ]


def compare_checkpoints(first: ImageCurve, second: ImageCurve) -> list[Difference]:
    """Compare two encoders at each block, and at their best blocks if both have several blocks."""
    rows = compare_block_by_block(first, second)
    have_several = len(first.layer_estimates) > 1 and len(second.layer_estimates) > 1
    return rows + compare_best_blocks(first, second) if have_several else rows


def _compare_blocks_of_one(curve: ImageCurve) -> list[Difference]:
    """Compare each block of one encoder with the best block of this encoder.

    One more row compares the best block with a block that is chosen on held-out images. If no block
    can be the best, this row is left out, and each block is compared with the last block. `curve`
    contains the per-image scores at each block.
    """
    best = get_block_score(curve, curve.best_layer)
    rows = _correct_over_blocks(
        [subtract(str(n), get_block_score(curve, n), best) for n in sorted(curve.layer_estimates)]
    )
    if not curve.has_best:
        return rows
    name = f"held-out choice ({_layer_list(curve.held_out_layers)})"
    return [*rows, subtract(name, _score_held_out(curve), best)]


def _layer_list(layers: Iterable[int]) -> str:
    return ", ".join(str(layer) for layer in sorted(set(layers)))


@dataclass(frozen=True)
class Comparison(Table):
    """A table of differences of one metric, with one row per compared block.

    Attributes:
        record: A record (stored score), which states the task, the images and the settings.
        names: Column headings of the first and of the second score.
        encoders: One record of each compared encoder, so one or two in total.
        encoders_without_best: Names of the encoders without a best block, because all their blocks
            are degenerate (have too many images with an arbitrary result).
        code: For each encoder name, the versions of the code that computed its scores.
    """

    record: Record
    rows: tuple[Difference, ...]
    names: tuple[str, str]
    encoders: tuple[Record, ...]
    title: str = ""
    encoders_without_best: tuple[str, ...] = ()
    code: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def to_printed_table(self) -> PrintedTable:
        """Return the table to print, with significant differences in bold.

        Each row is tested on its own (`Difference.is_significant`), without a correction for
        multiple comparisons.
        """
        return PrintedTable(
            title=self.title,
            header=("block", *self.names, "first - second [95 %]"),
            rows=tuple(
                (
                    *map(Cell, (row.name, row.first_text, row.second_text)),
                    Cell(row.text, is_best=row.is_significant),
                )
                for row in self.rows
            ),
            notes=tuple(self._notes()),
            symbol_notes=difference_footnotes([self.rows]),
        )

    def _notes(self) -> list[str]:
        notes = [
            f"paired over {self.record.num_images} images{image_size_note(self.encoders)}"
            f"{trusted_note([self.record])}",
            "marked: the interval excludes 0 (without a correction for the number of rows)",
        ]
        if not self.record.is_ranked:
            notes.append("no block is best, because higher is not better")
        if self.encoders_without_best:
            names = " and ".join(self.encoders_without_best)
            notes.append(f"no block of {names} is best, because all are degenerate")
        # For example, the row "held-out choice (9, 11; 11)" averages over blocks 9 and 11.
        is_mixed = any(row.name.startswith("held-out") and "," in row.name for row in self.rows)
        notes += miou_choice_notes([self.record.metric] if is_mixed else [])
        first, second = self.rows[-1].layers
        if len(self.encoders) > 1 and len(first) > 1 and set(first) != set(second):
            sides = [
                f"{len(layers)} block{'s' if len(layers) > 1 else ''} ({_layer_list(layers)})"
                for layers in (first, second)
            ]
            notes.append(
                f"best block and held-out choice are among {sides[0]} of {self.names[0]} and "
                f"{sides[1]} of {self.names[1]}"
            )
        return notes

    def csv_rows(self) -> list[dict[str, Any]]:
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
        return {
            "kind": "comparison",
            **{name: getattr(self.record, name) for name in _SERIES},
            "dataset_fingerprint": self.record.dataset_fingerprint,
            "settings": dict(self.record.settings),
            "num_images": self.record.num_images,
            "names": list(self.names),
            **{name: [getattr(r, name) for r in self.encoders] for name in ENCODER_FIELDS},
            "version": self.record.version,
            "git_commit": self.record.git_commit,
            "device": self.record.device,
            "rows": [{"block": row.name, **row.as_json()} for row in self.rows],
        }


def difference_footnotes(tables: Sequence[Sequence[Difference]]) -> tuple[str, ...]:
    """Return footnotes that explain the signs § (significant) and † (degenerate images).

    The sign § is explained if any difference was tested, even if none is significant. The sign † is
    explained only if it occurs in a table. The result of a degenerate image is arbitrary, for
    example because rounding errors decide it.

    Args:
        tables: The rows of each table. Holm's correction was applied to each table separately.
    """
    rows, notes = list(itertools.chain(*tables)), []
    num_tested = [sum(not math.isnan(row.p_holm) for row in table) for table in tables]
    if most := max(num_tested, default=0):
        is_used = any(row.is_significant_after_holm for row in rows)
        counts = " or ".join(map(str, sorted(set(num_tested))))
        notes.append(
            f"§{'' if is_used else ' (none here)'}: significant at 5 % after Holm's correction "
            f"over {counts} block{'s' if most > 1 else ''}"
            f"{' at each epoch' if len(tables) > 1 else ''}"
        )
    if meaning := explain_dagger(percent for row in rows for percent in row.degenerate_percents):
        is_any = any(row.is_degenerate for row in rows)
        notes.append(f"{meaning}, and its differences are never marked" if is_any else meaning)
    return tuple(notes)


def code_warning(tables: Iterable[Comparison]) -> str:
    """Return a warning if different code versions computed the scores of a table, otherwise ""."""
    versions: dict[str, set[str]] = defaultdict(set)
    for table in tables:
        # The code can only explain a difference if the versions differ within one table.
        if len(set().union(*table.code.values())) > 1:
            for name, code in table.code.items():
                versions[name] |= code
    if not versions:
        return ""
    sides = "; ".join(f"{name}: {', '.join(sorted(code))}" for name, code in versions.items())
    return (
        f"warning: the compared results come from different code ({sides}). If the code may have "
        "changed the scores, recompute them with `ssl-bench probe --overwrite`"
    )


def code_versions(records: Iterable[Record]) -> frozenset[str]:
    """Return the versions of ssl-bench that computed the records, such as "0.2.0 (3f9a01b2c4)".

    The text in parentheses is the start of the Git commit hash. A record is a stored score.
    """
    versions = set()
    for record in records:
        commit = record.git_commit or "unknown"
        dirty = "-dirty" if commit.endswith("-dirty") else ""
        versions.add(f"{record.version} ({commit[:10]}{dirty})")
    return frozenset(versions)


def compare_encoders(
    store: ResultStore,
    records: Sequence[Record],
    encoders: Mapping[str, str],
    select: Callable[[Sequence[Record]], Collection[Record]] = list,
) -> tuple[list[Comparison], dict[str, str]]:
    """Compare two encoders, or the blocks of one encoder, in every task with per-image scores.

    Args:
        store: Results folder with the records (stored scores) and the per-image scores.
        records: The records to compare.
        encoders: Dictionary with one or two encoders. The keys are their `Record.encoder_id`. The
            values are the checkpoints as typed on the command line.
        select: Function that chooses the tables to compute. It receives one record for each
            possible table, and returns those records whose tables are wanted.

    Returns:
        The tables, one for each group of comparable records. Also a dictionary from each task
        without a table to the reason why there is none.

    Raises:
        DataError: No table can be computed.
    """
    ids = list(encoders)
    by_id = {record.encoder_id: record for record in records}
    names = [by_id[key].model if key in by_id else encoders[key] for key in ids]
    if len(set(names)) < len(names):
        names = [f"{name} {key[:6]}" for key, name in zip(ids, names, strict=True)]
    groups = [group for group in _groups_by_seed(records) if _has_per_image(store, group, ids)]
    titles = table_titles([group[:1] for group in groups])
    selected = {record.digest for record in select([group[0] for group in groups])}
    pairs = [
        (title, group, sides)
        for title, group in zip(titles, groups, strict=True)
        if group[0].digest in selected and (sides := _load_curves(store, group, ids))
    ]
    tasks = {record.task for record in records if record.encoder_id in encoders}
    reasons = {
        task: _explain_failure(store, [r for r in records if r.task == task], encoders)
        for task in sorted(tasks - {group[0].task for _, group, _ in pairs})
    }
    if not pairs:
        why = "; ".join(f"{task}: {reason}" for task, reason in reasons.items())
        raise DataError(
            f"nothing to compare in {store.root}. No task has per-image values of "
            f"{'both checkpoints' if len(ids) > 1 else 'the checkpoint'} for the same images, "
            f"settings and training images{f' ({why})' if why else ''}"
        )
    tables = []
    for title, group, sides in pairs:
        second = names[1] if len(ids) > 1 else "best block" if sides[0].has_best else "last block"
        encoders_without_best = [
            name
            for name, side in zip(names, sides, strict=True)
            if group[0].is_ranked and not side.has_best and len(side.layer_estimates) > 1
        ]
        by_encoder = [[r for r in group if r.encoder_id == key] for key in ids]
        tables.append(
            Comparison(
                title=f"{title}, seed {group[0].seed}",
                record=group[0],
                rows=tuple(
                    compare_checkpoints(*sides) if len(ids) > 1 else _compare_blocks_of_one(*sides)
                ),
                names=(names[0], second),
                encoders=tuple(own[-1] for own in by_encoder),
                encoders_without_best=tuple(encoders_without_best),
                code={
                    name: code_versions(own) for name, own in zip(names, by_encoder, strict=True)
                },
            )
        )
    return tables, reasons


def _groups_by_seed(records: Sequence[Record]) -> list[list[Record]]:
    """Group records (stored scores) that can be compared and have the same random seed.

    Only scores of the same group are compared image by image.
    """
    seeds = sorted({record.seed for record in records})
    groups = [
        [r for r in group if r.seed == n] for group in comparable_groups(records) for n in seeds
    ]
    return list(filter(None, groups))


def _has_per_image(store: ResultStore, group: Sequence[Record], encoders: Sequence[str]) -> bool:
    """Return whether the group has a record with per-image scores for each encoder.

    A record is a stored score. `encoders` contains the ids of the encoders.
    """
    return all(
        any(store.has_per_image(record) for record in group if record.encoder_id == key)
        for key in encoders
    )


def _load_curves(
    store: ResultStore, group: Sequence[Record], encoders: Sequence[str]
) -> list[ImageCurve]:
    """For each encoder, return the per-image scores of comparable records at every block.

    The list is empty if any encoder has no stored per-image scores. A record is a stored score.
    """
    curves = [load_curve(store, [r for r in group if r.encoder_id == key]) for key in encoders]
    is_complete = all(curve.per_image for curve in curves)
    return curves if is_complete else []


def _explain_failure(
    store: ResultStore, records: Sequence[Record], encoders: Mapping[str, str]
) -> str:
    """Return why the scores of a task cannot be compared and, if possible, how to fix this.

    `records` contains the stored scores of the task. `encoders` contains the names of the encoders
    to compare, by their ids.
    """
    task = records[0].task
    sides = {name: [r for r in records if r.encoder_id == key] for key, name in encoders.items()}
    for name, side in sides.items():
        if not side:
            datasets = sorted({r.dataset for r in records if r.encoder_id in encoders})
            return (
                f"no record of {name}, compute it with `ssl-bench probe --task {task} --dataset "
                f"{','.join(datasets)} --checkpoint ...`"
            )
    (first, *_), (*_, second) = sides.values(), sides.values()
    pairs = [
        (a, b)
        for a, b in itertools.product(first, second)
        if all(getattr(a, name) == getattr(b, name) for name in _MATCHED_FIELDS)
    ]
    if not pairs:
        measured = {
            name: sorted({f"{r.metric} {r.dataset} {r.facet} {r.protocol}" for r in side})
            for name, side in sides.items()
        }
        return "; ".join(
            f"{name} only has results for {', '.join(known)}" for name, known in measured.items()
        )
    has_images = [
        {r.layer for r in side if store.has_per_image(r.key())} for side in (first, second)
    ]
    if not any(has_images):
        return "no per-image values are stored"
    # Explain the pair of records with the fewest differences. If nothing differs, the comparison
    # failed because of the stored per-image values.
    if differing := min((_list_differences(*pair) for pair in pairs), key=len):
        return "; ".join(differing)
    again = f"`ssl-bench probe --task {task} --overwrite`"
    if not all(has_images):
        return f"per-image values are missing, recompute them with {again}"
    return f"per-image values do not match their records, recompute both with {again}"


def _list_differences(first: Record, second: Record) -> list[str]:
    fields: list[tuple[str, Any, Any]] = [("trained on", first.trained_on, second.trained_on)]
    for name in ("split", "dataset_fingerprint", "seed"):
        fields.append((name, getattr(first, name), getattr(second, name)))
    for name in sorted((first.settings.keys() | second.settings.keys()) - {TRAINING_IMAGES_KEY}):
        fields.append((name, first.settings.get(name), second.settings.get(name)))
    return [f"{name} {a} and {b}" for name, a, b in fields if a != b]


@dataclass(frozen=True)
class EpochComparison(Table):
    """Table of differences between two training runs, for each common block and epoch.

    Attributes:
        by_epoch: The differences of all blocks at each epoch, by epoch.
    """

    by_epoch: Mapping[float, Comparison]

    @property
    def record(self) -> Record:
        return next(iter(self.by_epoch.values())).record

    def to_printed_table(self) -> PrintedTable:
        """Return the table to print. The rows of all epochs are sorted by block, then by epoch."""
        printed = {
            epoch: comparison.to_printed_table() for epoch, comparison in self.by_epoch.items()
        }
        first = next(iter(printed.values()))
        rows = [
            (row[0], Cell(f"{epoch:g}"), *row[1:])
            for epoch, table in printed.items()
            for row in table.rows
        ]
        return replace(
            first,
            header=(first.header[0], "epoch", *first.header[1:]),
            # The sort is stable, so the epochs of a block stay in ascending order.
            rows=tuple(sorted(rows, key=lambda row: int(row[0].text))),
            symbol_notes=difference_footnotes([table.rows for table in self.by_epoch.values()]),
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        return [
            {"epoch": epoch, **row}
            for epoch, comparison in self.by_epoch.items()
            for row in comparison.csv_rows()
        ]

    def as_json(self) -> dict[str, Any]:
        epochs = [{"epoch": epoch, **table.as_json()} for epoch, table in self.by_epoch.items()]
        return {"kind": "comparison_over_epochs", "epochs": epochs}


def compare_runs(
    store: ResultStore, records: Sequence[Record], runs: tuple[str, str]
) -> list[EpochComparison]:
    """Compare two training runs block by block, at every epoch that was probed in both runs.

    There is one table for each group of comparable records (stored scores). `runs` contains the
    names of the runs. The encoder of the run `RUN` after 100 epochs is called `RUN@100`.

    Raises:
        DataError: A run has two encoders for the same epoch, or no table can be computed.
    """
    tables = []
    for group in _groups_by_seed(records):
        encoders = []
        for run in runs:
            run_records = group_by_run(group).get(run, [])
            require_one_encoder_per_epoch(run, run_records)
            encoders.append({epoch_number(record): record for record in run_records})
        by_epoch = {}
        for epoch in sorted(encoders[0].keys() & encoders[1].keys()):
            pair = (encoders[0][epoch], encoders[1][epoch])
            sides = _load_curves(store, group, [record.encoder_id for record in pair])
            # Do not compare best and last blocks, because they can be different blocks in the two
            # runs.
            rows = compare_block_by_block(*sides) if sides else []
            if blocks := _correct_over_blocks([row for row in rows if row.name.isdigit()]):
                code = {
                    run: code_versions(r for r in group if r.encoder_id == record.encoder_id)
                    for run, record in zip(runs, pair, strict=True)
                }
                title = f"{table_title(pair[0])}, seed {pair[0].seed}"
                by_epoch[epoch] = Comparison(pair[0], tuple(blocks), runs, pair, title, code=code)
        if by_epoch:
            tables.append(EpochComparison(by_epoch))
    if not tables:
        by_run = group_by_run(records)
        epochs = {run: sorted({epoch_number(r) for r in by_run.get(run, [])}) for run in runs}
        known = " and ".join(
            f"{run} {', '.join(f'{epoch:g}' for epoch in own) or 'none'}"
            for run, own in epochs.items()
        )
        raise DataError(
            f"nothing to compare over epochs in {store.root}. Both runs need per-image values of "
            "the same task at a common epoch, for the same images and settings (epochs with "
            f"results: {known})",
            hint=PROBE_EPOCHS,
        )
    return tables
