"""`ssl-bench report`: write an HTML report of a results folder."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ssl_bench.cli.records import (
    find_recorded_encoder,
    load_selected_records,
    open_store,
    requested_layers,
)
from ssl_bench.errors import DataError
from ssl_bench.report.pages import build_report
from ssl_bench.report.pairs import MAX_PAIRED
from ssl_bench.report.runs import find_recorded_runs
from ssl_bench.report.writing import require_replaceable, write_report
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.store import summarise_problems
from ssl_bench.system.files import resolve_links
from ssl_bench.system.output import print_message
from ssl_bench.system.process import pause_garbage_collection
from ssl_bench.tables.run_logs import RunLog, read_run_logs


def command(options: argparse.Namespace) -> int:
    """Write an HTML report of a results folder, and print the path of the report."""
    with open_store(options.out) as store:
        folder = Path(options.into) if options.into else store.root / "report"
        require_replaceable(folder)
        records = _load_records(options, store)
        logs = _read_logs(options, records, store)
        find = partial(find_recorded_encoder, records=records, store=store)
        pairs = [(find(first)[0], find(second)[0]) for first, second in options.pair or []]
        with pause_garbage_collection():
            report = build_report(
                store, records, pairs, layers=requested_layers(options.layer), logs=logs
            )
            number = len(report.checkpoints)
            if not report.pairs and number > MAX_PAIRED:
                print_message(
                    f"the report compares no pairs, because it has {number} checkpoints. Use "
                    "--pair A B to compare two of them."
                )
            write_report(report, folder)
        counts = f"{_count(len(records), 'record')} of {_count(number, 'checkpoint')}"
        counts += f", {_count(len(logs), 'run')}" if logs else ""
        print_message(f"{counts}: {folder / 'index.html'}")
    if rejected := report.pictures.rejected_paths:
        print_message(
            f"{_count(len(rejected), 'picture')} cannot be shown: {summarise_problems(rejected)}"
        )
    return 0


def _load_records(options: argparse.Namespace, store: ResultStore) -> list[Record]:
    """Read the records (stored scores) that the user's flags select.

    If the results folder is empty and `--runs` is given, return an empty list, because the report
    then only shows training logs.

    Raises:
        DataError: No record is selected.
    """
    try:
        return load_selected_records(options, store)
    except DataError:
        if options.run_folders and not store.num_records:
            return []
        raise


def _read_logs(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[RunLog]:
    """Read the training logs of the run folders in `--runs`.

    Without `--runs`, read the logs of all runs whose checkpoints have records (stored scores). The
    folders of these runs are searched for in `runs/` and next to the results folder. If the logs
    cannot be read, print a message and return an empty list.
    """
    if options.run_folders:
        return read_run_logs(options.run_folders)
    places = (Path("runs"), resolve_links(store.root).parent)
    try:
        return read_run_logs(find_recorded_runs(records, dict.fromkeys(places)))
    except (DataError, OSError) as error:
        print_message(f"the report has no training curves: {error}")
        return []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
