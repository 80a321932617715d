"""`ssl-bench compare`: two checkpoints, or the blocks of one, over the same images."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.cli.records import (
    asked_format,
    filtered,
    none_of,
    of_tasks,
    print_tables,
    recorded_checkpoint,
    say_ignored,
)
from ssl_bench.errors import ConfigurationError
from ssl_bench.results import ResultStore
from ssl_bench.tables.comparison import Comparison, comparisons


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the differences between two checkpoints, or between the blocks of one."""
    del overrides
    style = asked_format(options.format)
    if len(options.checkpoints) > 2:
        raise ConfigurationError(f"expected one or two checkpoints, got {len(options.checkpoints)}")
    store = ResultStore(Path(options.out))
    records = of_tasks(options.task, store.records())
    if not records:
        raise none_of(options.task, store)
    chosen = [recorded_checkpoint(name, records, store) for name in options.checkpoints]
    by_id = {record.encoder_id: record for record in records}
    records = filtered(options, records)
    names = [model for _, model in chosen]
    if len(set(names)) < len(names):
        names = [f"{model} {encoder[:6]}" for encoder, model in chosen]
    heads = (names[0], names[1]) if len(names) == 2 else ("best block", names[0])
    encoders = tuple(by_id[encoder] for encoder, _ in chosen)
    tables = [
        Comparison(record, tuple(rows), heads, encoders)
        for record, rows in comparisons(store, records, [encoder for encoder, _ in chosen])
    ]
    print_tables(tables, style)
    say_ignored(store)
    return 0
