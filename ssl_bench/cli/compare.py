"""`ssl-bench compare`: compare two encoders, or the blocks of one encoder, on the same images."""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import chain

from ssl_bench.cli.records import (
    FILTERS,
    filter_records,
    find_recorded_encoder,
    no_records_error,
    open_store,
    print_tables,
    resolve_format,
    select_main_metrics,
    select_tasks,
)
from ssl_bench.errors import ConfigurationError, DataError, escape_braces
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.output import print_message
from ssl_bench.tables.comparison import (
    Comparison,
    EpochComparison,
    code_warning,
    compare_encoders,
    compare_runs,
)
from ssl_bench.tables.depth import group_by_run

Table = Comparison | EpochComparison
# If the records of two tables agree in all of these fields, the tables only differ in the metric.
_TABLE_FIELDS = ("task", "dataset", "split", "facet", "protocol", "seed")


def command(options: argparse.Namespace) -> int:
    """Print the score differences between two encoders, or between the blocks of one encoder."""
    style = resolve_format(options.format)
    if len(options.checkpoints) > 2:
        raise ConfigurationError(f"expected one or two checkpoints, got {len(options.checkpoints)}")
    with open_store(options.out) as store:
        compare = _compare_runs if options.over_epochs else _compare_encoders
        tables: Sequence[Table] = compare(options, store)
        print_tables(tables, style)
        parts = [table.by_epoch.values() if isinstance(table, EpochComparison) else [table]
                 for table in tables]  # fmt: skip
        if warning := code_warning(chain(*parts)):
            print_message(warning)
    return 0


def _select_tables(options: argparse.Namespace, records: Sequence[Record]) -> list[Record]:
    """Choose the tables to print, and return one record (a stored score) of each of these tables.

    By default, only tables of each task's main metric are chosen. With `--metric` or
    `--all-metrics`, all tables are chosen. `records` contains one record of each table that could
    be printed.
    """
    if options.metric or options.all_metrics:
        return list(records)
    return select_main_metrics(records, _TABLE_FIELDS, "--all-metrics to show all metrics")


def _compare_runs(options: argparse.Namespace, store: ResultStore) -> list[EpochComparison]:
    records = select_tasks(options.task, store.records())
    if not records:
        raise no_records_error(options.task, store)
    runs = [_find_run(name, records, store) for name in options.checkpoints]
    if len(set(runs)) != 2:
        raise ConfigurationError(
            f"expected two runs with --over-epochs, got {' and '.join(runs)}",
            hint=("ssl-bench", "compare", "{run}", "{other_run}", "--over-epochs"),
        )
    tables = compare_runs(store, filter_records(options, records, store), (runs[0], runs[1]))
    selected = _select_tables(options, [table.record for table in tables])
    return [table for table in tables if table.record in selected]


def _find_run(name: str, records: Sequence[Record], store: ResultStore) -> str:
    """Return the name of the training run that `name` identifies.

    `name` is the name of a run, or identifies an encoder of a run, for example by its checkpoint
    file.

    Raises:
        DataError: No run in the records (stored scores) matches `name`.
    """
    runs = group_by_run(records)
    if name in runs:
        return name
    encoder, model = find_recorded_encoder(name, records, store)
    for run, run_records in runs.items():
        if encoder in {record.encoder_id for record in run_records}:
            return run
    raise DataError(f"--over-epochs needs a pretraining run whose epochs were probed, got {model}")


def _compare_encoders(options: argparse.Namespace, store: ResultStore) -> list[Comparison]:
    # Do not read the records of other encoders.
    paths = store.encoders()
    resolved = [find_recorded_encoder(name, paths, store) for name in options.checkpoints]
    encoders = {
        encoder: name for (encoder, _), name in zip(resolved, options.checkpoints, strict=True)
    }
    if len(encoders) < len(resolved):
        raise ConfigurationError(
            f"{' and '.join(options.checkpoints)} are the same encoder ({resolved[0][1]}). Give "
            "two different encoders, or give one encoder to compare its blocks with its best block"
        )
    own_paths = chain(*(paths[one] for one in paths if one.encoder_id in encoders))
    own_records = store.records(list(own_paths))
    records = _select(options, own_records, store)
    for encoder, name in encoders.items():
        if not any(record.encoder_id == encoder for record in records):
            flags = [f"--{flag} {getattr(options, flag)}" for flag in ("task", *FILTERS)
                     if getattr(options, flag) not in (None, "all")]  # fmt: skip
            probe = ("ssl-bench", "probe", "--task", escape_braces(options.task))
            out = ("--out", escape_braces(str(store.root)))
            tasks = ", ".join(sorted({r.task for r in own_records if r.encoder_id == encoder}))
            raise DataError(
                f"{name} has no record of {' '.join(flags)} in {store.root}. The folder has "
                f"records of this encoder for the tasks {tasks}",
                hint=(*probe, "--checkpoint", escape_braces(name), *out),
            )
    tables, reasons = compare_encoders(
        store, records, encoders, select=partial(_select_tables, options)
    )
    for task, reason in reasons.items():
        print_message(f"left out: {task}: {reason}")
    return tables


def _select(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[Record]:
    try:
        return filter_records(options, select_tasks(options.task, records), store)
    except ConfigurationError:
        # A flag such as `--dataset` may have a value that occurs only in records of other encoders.
        # This is not an error, but selects no record. The next call raises an error for any other
        # value.
        filter_records(options, select_tasks(options.task, store.records()), store)
        return []
