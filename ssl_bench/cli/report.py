"""`ssl-bench report`: write an HTML report of a results folder."""

import argparse
from functools import partial

from ssl_bench.cli.records import (
    find_recorded_encoder,
    load_selected_records,
    open_store,
    requested_layers,
)
from ssl_bench.report.pages import build_report
from ssl_bench.report.pairs import MAX_PAIRED
from ssl_bench.report.writing import require_replaceable, write_report
from ssl_bench.results.store import summarise_problems
from ssl_bench.system.files import expand_path
from ssl_bench.system.output import say
from ssl_bench.system.process import pause_garbage_collection


def command(options: argparse.Namespace) -> int:
    """Write an HTML report of a results folder, and print the path of the report."""
    with open_store(options.out) as store:
        folder = expand_path(options.into) if options.into else store.root / "report"
        require_replaceable(folder)
        records = load_selected_records(options, store)
        find = partial(find_recorded_encoder, records=records, store=store)
        pairs = [(find(first)[0], find(second)[0]) for first, second in options.pair or []]
        with pause_garbage_collection():
            report = build_report(store, records, pairs, layers=requested_layers(options.layer))
            number = len(report.checkpoints)
            if not report.pairs and number > MAX_PAIRED:
                say(
                    f"the report compares no pairs, because it has {number} checkpoints. Use "
                    "--pair A B to compare two of them."
                )
            write_report(report, folder)
        counts = f"{_count(len(records), 'record')} of {_count(number, 'checkpoint')}"
        say(f"{counts}: {folder / 'index.html'}")
    if refused := report.pictures.refused:
        say(f"{_count(len(refused), 'picture')} cannot be shown: {summarise_problems(refused)}")
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
