"""What the command `report` does once its arguments are read."""

import argparse

from ssl_bench.cli.records import (
    find_recorded_encoder,
    load_selected_records,
    open_store,
    requested_layers,
)
from ssl_bench.report.comparing import MAX_PAIRED
from ssl_bench.report.pages import build_report
from ssl_bench.report.writing import require_replaceable, write_report
from ssl_bench.results.store import summarise_problems
from ssl_bench.system.paths import expand_path
from ssl_bench.system.process import pause_garbage_collection
from ssl_bench.system.progress import say


def command(options: argparse.Namespace) -> int:
    """Write a folder of pages about the records of a folder of results."""
    with open_store(options.out) as store:
        folder = expand_path(options.into) if options.into else store.root / "report"
        require_replaceable(folder)
        records = load_selected_records(options, store)
        pairs = [
            (
                find_recorded_encoder(first, records, store)[0],
                find_recorded_encoder(second, records, store)[0],
            )
            for first, second in options.pair or []
        ]
        with pause_garbage_collection():
            report = build_report(store, records, pairs, layers=requested_layers(options.layer))
            if not report.pairs and len(report.checkpoints) > MAX_PAIRED:
                say(f"{len(report.checkpoints)} checkpoints: pairs are compared with --pair A B")
            write_report(report, folder)
        what = _counted(len(records), "record")
        say(f"{what} of {_counted(len(report.checkpoints), 'checkpoint')}: {folder / 'index.html'}")
    if refused := report.pictures.refused:
        say(f"{_counted(len(refused), 'picture')} cannot be shown: {summarise_problems(refused)}")
    return 0


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
