"""`ssl-bench compare`: two checkpoints, or the blocks of one, over the same images."""

import argparse
from collections.abc import Sequence
from itertools import chain

from ssl_bench.cli.records import (
    FILTERS,
    NO_RECORDS,
    asked_format,
    filtered,
    find_recorded_encoder,
    main_metrics,
    of_tasks,
    print_tables,
    shown,
)
from ssl_bench.errors import ConfigurationError, DataError, escape_braces
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.progress import say
from ssl_bench.tables.comparison import (
    Comparison,
    EpochComparison,
    code_warning,
    compare_runs,
    comparisons,
)
from ssl_bench.tables.depth import group_by_run

Table = Comparison | EpochComparison
_ASKED = ("task", "dataset", "split", "facet", "protocol", "seed")


def command(options: argparse.Namespace) -> int:
    """Print the differences between two checkpoints, or between the blocks of one."""
    style = asked_format(options.format)
    if len(options.checkpoints) > 2:
        raise ConfigurationError(f"expected one or two checkpoints, got {len(options.checkpoints)}")
    with shown(options.out) as store:
        every = store.records()
        records = of_tasks(options.task, every)
        if not records:
            raise DataError(NO_RECORDS.format(options.task, store.root))
        tables: Sequence[Table]
        if options.over_epochs:
            tables = _over_epochs(options, records, store)
        else:
            tables = _compared(options, every, filtered(options, records, store), store)
        shown_tables = tables if options.metric or options.all_metrics else _main(tables)
        print_tables(shown_tables, style)
        parts = [table.by_epoch.values() if isinstance(table, EpochComparison) else [table]
                 for table in shown_tables]  # fmt: skip
        if warning := code_warning(chain(*parts)):
            say(warning)
    return 0


def _main(tables: Sequence[Table]) -> list[Table]:
    """Of each task, dataset, facet, protocol and seed the metric that stands for the task."""
    main = main_metrics([table.record for table in tables], _ASKED)
    kept = [
        table
        for table in tables
        if main[tuple(getattr(table.record, name) for name in _ASKED)] == table.record.metric
    ]
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
            f"expected two runs with --over-epochs, got {' and '.join(runs)}",
            hint=("ssl-bench", "compare", "{run}", "{other_run}", "--over-epochs"),
        )
    return compare_runs(store, filtered(options, records, store), (runs[0], runs[1]))


def _recorded_run(name: str, records: Sequence[Record], store: ResultStore) -> str:
    """Name of a run: its own, or that of any of its encoders."""
    runs = group_by_run(records)
    if name in runs:
        return name
    encoder, model = find_recorded_encoder(name, records, store)
    known = (run for run, those in runs.items() if encoder in {r.encoder_id for r in those})
    run = next(known, None)
    if run is None:
        raise DataError(f"expected a run whose records say their epoch, got {model}")
    return run


def _compared(
    options: argparse.Namespace,
    every: Sequence[Record],
    records: Sequence[Record],
    store: ResultStore,
) -> list[Comparison]:
    chosen = [find_recorded_encoder(name, every, store) for name in options.checkpoints]
    encoders = {
        encoder: word for (encoder, _), word in zip(chosen, options.checkpoints, strict=True)
    }
    if len(encoders) < len(chosen):
        raise ConfigurationError(
            f"{' and '.join(options.checkpoints)} are one encoder, {chosen[0][1]}; name another "
            "one, or it alone to compare its blocks with its best"
        )
    for encoder, word in encoders.items():
        if not any(record.encoder_id == encoder for record in records):
            given = [f"--{name} {getattr(options, name)}" for name in ("task", *FILTERS)
                     if getattr(options, name) not in (None, "all")]  # fmt: skip
            probed = ("ssl-bench", "probe", "--task", escape_braces(options.task))
            has = ", ".join(sorted({r.task for r in every if r.encoder_id == encoder}))
            raise DataError(
                f"{word} has no record of {' '.join(given)} in {store.root}, only of {has}",
                hint=(
                    *probed,
                    "--checkpoint",
                    escape_braces(word),
                    "--out",
                    escape_braces(str(store.root)),
                ),
            )
    tables, reasons = comparisons(store, records, encoders)
    for task, why in reasons.items():
        say(f"left out: {task}: {why}")
    return tables
