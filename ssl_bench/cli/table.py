"""`ssl-bench table`: records over blocks, encoders, epochs, severities, or beside papers."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.cli.records import (
    FILTERS,
    asked_format,
    find_recorded_encoder,
    load_selected_records,
    main_metrics,
    print_main_tables,
    print_tables,
    shown,
)
from ssl_bench.composition.choices import require_choice
from ssl_bench.errors import ConfigurationError
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.contributions import check_values
from ssl_bench.results.store import PACKED
from ssl_bench.system.progress import say
from ssl_bench.tables.depth import DepthTable, depth_tables, epoch_tables
from ssl_bench.tables.drawing import draw_curves
from ssl_bench.tables.layer_selection import CHOICES
from ssl_bench.tables.paper import paper_table
from ssl_bench.tables.pivot import pivot_table
from ssl_bench.tables.published import PublishedTable, load_published_table
from ssl_bench.tables.severities import SeverityTable, severity_tables
from ssl_bench.tables.sheets import Printable


def command(options: argparse.Namespace) -> int:
    """Print tables of the records in a folder."""
    style = asked_format(options.format)
    _check_together(options)
    with shown(options.out) as store:
        if options.pack:
            say(f"{store.pack()} records are in {store.root / PACKED} now, which is read like them")
            return 0
        records = load_selected_records(options, store)
        check_values(store, records)
        tables = _tables(options, records, store)
        over_blocks = [table for table in tables if isinstance(table, DepthTable)]
        if _is_plain(options):
            print_main_tables(over_blocks, store)
        else:
            print_tables(tables, style)
        if options.figure:
            severities = [table.curves() for table in tables if isinstance(table, SeverityTable)]
            draw_curves(over_blocks or severities or depth_tables(records), Path(options.figure))
            say(f"drawn: {options.figure}")
    return 0


def _is_plain(options: argparse.Namespace) -> bool:
    """Whether nothing says which tables are meant: then those that stand for the others."""
    chosen = (options.pivot, options.over_epochs, options.over_severity, options.paper)
    narrowed = any(getattr(options, name) is not None for name in (*FILTERS, "format"))
    return options.task == "all" and not narrowed and not any(chosen)


def _check_together(options: argparse.Namespace) -> None:
    if options.best_layer is not None:
        require_choice("--best-layer", options.best_layer, CHOICES)
        if not (options.pivot or options.paper):
            raise ConfigurationError(
                "--best-layer belongs to other tables",
                hint=("--pivot", "or", "--paper", "{table}"),
            )
    chosen = {
        "--pivot": options.pivot,
        "--paper": options.paper,
        "--over-epochs": options.over_epochs,
        "--over-severity": options.over_severity,
    }
    if options.pack:
        chosen |= {"--pack": True, "--figure": options.figure, "--format": options.format}
    asked = [flag for flag, value in chosen.items() if value]
    if len(asked) > 1:
        raise ConfigurationError(f"expected one of {', '.join(chosen)}, got {' and '.join(asked)}")
    if options.encoders and not options.paper:
        raise ConfigurationError(
            "--as 'ROW'=CHECKPOINT belongs to a published table", hint=("--paper", "{table}")
        )


def _tables(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> Sequence[Printable]:
    if options.pivot:
        # Programs that read it are given all columns.
        if options.metric is None and options.format not in ("csv", "json", "parquet"):
            records = _headlines(records)
        return [pivot_table(records, store, options.best_layer or "holdout")]
    if options.over_epochs:
        return epoch_tables(records)
    if options.over_severity:
        return severity_tables(records)
    if options.paper is None:
        return depth_tables(records)
    published = load_published_table(options.paper)
    encoders = _encoders(options.encoders or [], published, records, store)
    return [paper_table(published, records, store, encoders=encoders, choice=options.best_layer)]


def _headlines(records: Sequence[Record]) -> list[Record]:
    """Of several tasks the metric that stands for each, dataset by dataset; of one task all."""
    if len({record.task for record in records}) == 1:
        return list(records)
    main = main_metrics(records)
    kept = [record for record in records if main[record.task, record.dataset] == record.metric]
    if more := sorted({record.metric for record in records} - set(main.values())):
        say(f"not shown: {', '.join(more)}; --metric {more[0]} shows one, --task shows all of one")
    return kept


def _encoders(
    given: Sequence[str], published: PublishedTable, records: Sequence[Record], store: ResultStore
) -> dict[str, str]:
    """`Record.encoder_id` for each named row."""
    found = {}
    for pair in given:
        row, equals, name = pair.partition("=")
        if not equals:
            raise ConfigurationError(
                f"expected a row and a checkpoint, got {pair!r}",
                hint=("--as", "{row}={checkpoint}"),
            )
        hint = ("--as", "{near}={checkpoint}")
        row = require_choice("row", row.strip(), published.rows, hint=hint)
        if row in found:
            raise ConfigurationError(f"expected one checkpoint for row {row!r}, got several")
        found[row] = find_recorded_encoder(name.strip(), records, store)[0]
    return found
