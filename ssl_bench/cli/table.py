"""`ssl-bench table`: print results by block, encoder, epoch, severity or published table.

The command also prints the training logs of runs, by step.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.cli.records import (
    FILTERS,
    find_recorded_encoder,
    load_selected_records,
    open_store,
    print_tables,
    resolve_format,
    select_main_metrics,
)
from ssl_bench.composition.choices import require_choice
from ssl_bench.errors import ConfigurationError
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.per_image import check_values
from ssl_bench.results.store import PACKED_FILE
from ssl_bench.system.output import print_message
from ssl_bench.tables.depth import (
    ScoreTable,
    depth_tables,
    epoch_tables,
    print_main_tables,
)
from ssl_bench.tables.drawing import draw_curves
from ssl_bench.tables.encoders import encoder_table
from ssl_bench.tables.layer_selection import LAYER_CHOICES
from ssl_bench.tables.paper import paper_table
from ssl_bench.tables.published import PublishedTable, load_published_table
from ssl_bench.tables.run_logs import read_run_logs
from ssl_bench.tables.severities import severity_tables
from ssl_bench.tables.sheets import PROGRAM_FORMATS
from ssl_bench.tables.steps import step_table


def command(options: argparse.Namespace) -> int:
    """Print tables of the scores in a results folder, or of the training logs of runs.

    With `--pack`, only move the stored scores to one file.
    """
    style = resolve_format(options.format)
    _check_options(options)
    if options.over_steps:
        table = step_table(
            read_run_logs(options.over_steps), options.metric, has_all=style in PROGRAM_FORMATS
        )
        print_tables([table], style)
        _draw_figure(table.curves_by_measure(), options)
        return 0
    with open_store(options.out) as store:
        if options.pack:
            packed = store.root / PACKED_FILE
            print_message(f"packed {store.pack()} records into {packed}, which all commands read")
            return 0
        records = load_selected_records(options, store)
        check_values(store, records)
        tables = _make_tables(options, records, store)
        if _is_overview(options):
            print_main_tables(tables, store)
        else:
            print_tables(tables, style)
        curves = [curve for table in tables if (curve := table.curves()) is not None]
        _draw_figure(curves or depth_tables(records), options)
    return 0


def _draw_figure(tables: Sequence[ScoreTable], options: argparse.Namespace) -> None:
    if options.figure:
        draw_curves(tables, Path(options.figure))
        print_message(f"figure: {options.figure}")


def _is_overview(options: argparse.Namespace) -> bool:
    """Return whether to print only the tables of each task's main metric.

    The result is False if the user has chosen a task, dataset, metric, facet (kind of feature),
    protocol (preset), format, or another kind of table, such as `--pivot`.
    """
    kinds = (options.pivot, options.over_epochs, options.over_severity, options.paper)
    has_filter = any(getattr(options, name) is not None for name in (*FILTERS, "format"))
    return options.task == "all" and not has_filter and not any(kinds)


def _check_options(options: argparse.Namespace) -> None:
    """Raise ConfigurationError if options conflict, or if an option requires another one."""
    if options.best_layer is not None:
        require_choice("--best-layer", options.best_layer, LAYER_CHOICES)
        if not (options.pivot or options.paper):
            raise ConfigurationError(
                "--best-layer chooses one block of each encoder, and only works for tables with "
                "one score per encoder",
                hint=("--pivot", "or", "--paper", "{table}"),
            )
    exclusive = {
        "--pivot": options.pivot,
        "--paper": options.paper,
        "--over-epochs": options.over_epochs,
        "--over-severity": options.over_severity,
        "--over-steps": options.over_steps,
    }
    if options.pack:
        exclusive |= {"--pack": True, "--figure": options.figure, "--format": options.format}
    used = [flag for flag, value in exclusive.items() if value]
    if len(used) > 1:
        raise ConfigurationError(
            f"expected only one of the flags {', '.join(exclusive)}, got {' and '.join(used)}"
        )
    if options.over_steps:
        selecting = {
            name: value
            for name, value in vars(options).items()
            if name in ("task", "layer", "dataset", "facet", "protocol")
        }
        if given := [name for name, value in selecting.items() if value not in (None, "all")]:
            raise ConfigurationError(
                f"--{given[0]} selects among stored scores, but --over-steps prints training logs. "
                f"Leave out --{given[0]}, and select measures such as loss with --metric"
            )
    if options.encoders and not options.paper:
        raise ConfigurationError(
            "--as assigns a checkpoint to a row of a published table, so select a published table",
            hint=("--paper", "{table}"),
        )


def _make_tables(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> Sequence[ScoreTable]:
    if options.pivot:
        # Formats for programs, such as CSV, contain the columns of all metrics.
        is_for_reading = options.format not in PROGRAM_FORMATS
        if options.metric is None and is_for_reading and len({r.task for r in records}) > 1:
            advice = "--task to show all metrics of one task"
            records = select_main_metrics(records, ("task", "dataset"), advice)
        return [encoder_table(records, store, options.best_layer or "holdout")]
    if options.over_epochs:
        return epoch_tables(records)
    if options.over_severity:
        return severity_tables(records)
    if options.paper is None:
        return depth_tables(records)
    published = load_published_table(options.paper)
    encoders = _resolve_rows(options.encoders or [], published, records, store)
    return [paper_table(published, records, store, encoders=encoders, choice=options.best_layer)]


def _resolve_rows(
    pairs: Sequence[str],
    published: PublishedTable,
    records: Sequence[Record],
    store: ResultStore,
) -> dict[str, str]:
    """Return the encoders that the values of `--as` assign to rows of a published table.

    Args:
        pairs: Values of `--as` in the form ROW=CHECKPOINT.
        published: The published table.
        records: Stored scores. Each checkpoint must be the encoder of at least one of these scores.
        store: Results folder, for error messages.

    Returns:
        Encoder id of each assigned row, by the name of the row.
    """
    encoders = {}
    for pair in pairs:
        row, equals, name = pair.partition("=")
        if not equals:
            raise ConfigurationError(
                f"--as expects ROW=CHECKPOINT, got {pair!r}",
                hint=("--as", "{row}={checkpoint}"),
            )
        hint = ("--as", "{near}={checkpoint}")
        row = require_choice("row", row.strip(), published.rows, hint=hint)
        if row in encoders:
            raise ConfigurationError(
                f"expected one checkpoint for row {row!r}, got several. Keep one"
            )
        encoders[row] = find_recorded_encoder(name.strip(), records, store)[0]
    return encoders
