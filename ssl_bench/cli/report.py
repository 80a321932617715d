"""What the command `report` does once its arguments are read."""

import argparse
from collections.abc import Sequence

from ssl_bench.cli.records import (
    asked_layers,
    asked_records,
    recorded_checkpoint,
    shown,
)
from ssl_bench.composition.choices import asked_names, choices
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.report.comparing import MOST_PAIRED
from ssl_bench.report.folder import require_replaceable
from ssl_bench.report.pictures.files import PictureFiles, Place
from ssl_bench.report.writing import build_report, write_report
from ssl_bench.results import SUPERVISED, Record, ResultStore
from ssl_bench.results.store import first_few
from ssl_bench.system.memory import without_collections
from ssl_bench.system.paths import expanded
from ssl_bench.system.progress import say


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write a folder of pages about the records of a folder of results."""
    del overrides
    with shown(options.out) as store:
        folder = expanded(options.into) if options.into else store.root / "report"
        require_replaceable(folder)
        pictures = PictureFiles(store.root)
        unscored = _asked_pictures(options, pictures)
        records = _asked_records(options, store, required=not unscored)
        pairs = [
            (
                recorded_checkpoint(first, records, store)[0],
                recorded_checkpoint(second, records, store)[0],
            )
            for first, second in options.pair or []
        ]
        with without_collections():
            report = build_report(
                store, records, pairs, unscored, layers=asked_layers(options.layer)
            )
            if not report.pairs and len(report.checkpoints) > MOST_PAIRED:
                say(f"{len(report.checkpoints)} checkpoints: pairs are compared with --pair A B")
            write_report(report, folder)
        what = _counted(len(records), "record") if records else "pictures without scores"
        say(f"{what} of {_counted(len(report.checkpoints), 'checkpoint')}: {folder / 'index.html'}")
    if refused := pictures.refused | report.pictures.refused:
        say(f"{_counted(len(refused), 'picture')} cannot be shown: {first_few(refused)}")
    return 0


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _asked_pictures(options: argparse.Namespace, files: PictureFiles) -> list[Place]:
    """Pictures of the asked tasks and datasets that no record is about, as of unlabelled ones."""
    tasks = asked_names("task", options.task, [*choices("probe"), SUPERVISED])
    datasets = options.dataset.split(",") if options.dataset else None
    return [
        place
        for place in files.unscored()
        if place.task in tasks and (datasets is None or place.dataset in datasets)
    ]


def _asked_records(
    options: argparse.Namespace, store: ResultStore, *, required: bool
) -> list[Record]:
    try:
        return asked_records(options, store)
    except DataError:
        if required:
            raise
    except ConfigurationError:
        # Pictures may be of a dataset that no record is of.
        if required or not options.dataset:
            raise
    return []
