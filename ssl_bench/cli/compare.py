"""`ssl-bench compare`: two checkpoints, or the blocks of one, over the same images."""

import argparse
from collections import defaultdict
from collections.abc import Sequence

from ssl_bench.cli.records import (
    asked_format,
    filtered,
    none_of,
    of_tasks,
    print_tables,
    recorded_checkpoint,
    shown,
)
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.report.model import chosen_metric
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.progress import say
from ssl_bench.tables.epochs import by_run
from ssl_bench.tables.pairs.comparison import Comparison, apart, comparisons
from ssl_bench.tables.pairs.epoch_comparison import EpochComparison, epoch_comparisons
from ssl_bench.tables.series import difference

Table = Comparison | EpochComparison
_ASKED = ("task", "dataset", "split", "facet", "protocol", "seed")


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the differences between two checkpoints, or between the blocks of one."""
    del overrides
    style = asked_format(options.format)
    if len(options.checkpoints) > 2:
        raise ConfigurationError(f"expected one or two checkpoints, got {len(options.checkpoints)}")
    with shown(options.out) as store:
        records = of_tasks(options.task, store.records())
        if not records:
            raise none_of(options.task, store)
        tables: Sequence[Table]
        if options.over_epochs:
            tables = _over_epochs(options, records, store)
        else:
            tables = _compared(options, records, store)
        print_tables(tables if options.metric or options.all_metrics else _main(tables), style)
    return 0


def _main(tables: Sequence[Table]) -> list[Table]:
    """Of each task, dataset, facet, protocol and seed the metric that stands for the task."""
    groups: dict[tuple[object, ...], list[Table]] = defaultdict(list)
    for table in tables:
        record = table.record
        groups[tuple(getattr(record, name) for name in _ASKED)].append(table)
    kept = []
    for those in groups.values():
        metric = chosen_metric([(one.record.metric, one.record.is_ranked) for one in those])
        kept += [one for one in those if one.record.metric == metric]
    metrics = {table.record.metric for table in kept}
    if more := sorted({table.record.metric for table in tables} - metrics):
        say(f"not shown: {', '.join(more)}; --metric {more[0]} shows one, --all-metrics all")
    return kept


def _over_epochs(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[EpochComparison]:
    runs = [_recorded_run(name, records, store) for name in options.checkpoints]
    if len(set(runs)) != 2:
        raise ConfigurationError(
            f"expected two runs to compare --over-epochs, got {' and '.join(runs)}"
        )
    return epoch_comparisons(store, filtered(options, records, store), (runs[0], runs[1]))


def _recorded_run(name: str, records: Sequence[Record], store: ResultStore) -> str:
    """Name of a run: its own, or that of any of its encoders."""
    runs = by_run(records)
    if name in runs:
        return name
    encoder, model = recorded_checkpoint(name, records, store)
    known = (run for run, those in runs.items() if encoder in {r.encoder_id for r in those})
    run = next(known, None)
    if run is None:
        raise DataError(f"expected a run whose records say their epoch, got {model}")
    return run


def _compared(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[Comparison]:
    chosen = [recorded_checkpoint(name, records, store) for name in options.checkpoints]
    by_id = {record.encoder_id: record for record in records}
    records = filtered(options, records, store)
    names = [model for _, model in chosen]
    if len(chosen) == 2 and chosen[0] == chosen[1]:
        raise ConfigurationError(
            f"{' and '.join(options.checkpoints)} are one encoder, {names[0]}; name another one, "
            "or it alone to compare its blocks with its best"
        )
    if len(set(names)) < len(names):
        names = [f"{model} {encoder[:6]}" for encoder, model in chosen]
    heads = (names[0], names[1]) if len(names) == 2 else (names[0], "best block")
    encoders = tuple(by_id[encoder] for encoder, _ in chosen)
    found = comparisons(store, records, [encoder for encoder, _ in chosen])
    own = {record.task for record in records if record.encoder_id in dict(chosen)}
    left = own - {record.task for record, _ in found}
    differing = apart([r for r in records if r.task in left], [encoder for encoder, _ in chosen])
    for task, words in differing.items():
        say(f"left out: {task}: {words}")
    if kept_nothing := sorted(left - differing.keys()):
        tasks = ", ".join(kept_nothing)
        say(f"left out: {tasks}: no values of single images are there to be paired")
    alike = [[record] for record, _ in found]
    return [
        Comparison(record, tuple(rows), heads, encoders, difference(record, alike))
        for record, rows in found
    ]
