"""What the command `report` does once its arguments are read."""

import argparse

from ssl_bench.cli.records import (
    asked_layers,
    asked_records,
    recorded_checkpoint,
    shown,
)
from ssl_bench.report.comparing import MOST_PAIRED
from ssl_bench.report.pages import build_report
from ssl_bench.report.writing import require_replaceable, write_report
from ssl_bench.results.store import first_few
from ssl_bench.system.memory import without_collections
from ssl_bench.system.paths import expanded
from ssl_bench.system.progress import say


def command(options: argparse.Namespace) -> int:
    """Write a folder of pages about the records of a folder of results."""
    with shown(options.out) as store:
        folder = expanded(options.into) if options.into else store.root / "report"
        require_replaceable(folder)
        records = asked_records(options, store)
        pairs = [
            (
                recorded_checkpoint(first, records, store)[0],
                recorded_checkpoint(second, records, store)[0],
            )
            for first, second in options.pair or []
        ]
        with without_collections():
            report = build_report(store, records, pairs, layers=asked_layers(options.layer))
            if not report.pairs and len(report.checkpoints) > MOST_PAIRED:
                say(f"{len(report.checkpoints)} checkpoints: pairs are compared with --pair A B")
            write_report(report, folder)
        what = _counted(len(records), "record")
        say(f"{what} of {_counted(len(report.checkpoints), 'checkpoint')}: {folder / 'index.html'}")
    if refused := report.pictures.refused:
        say(f"{_counted(len(refused), 'picture')} cannot be shown: {first_few(refused)}")
    return 0


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
