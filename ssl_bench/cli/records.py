"""Select records for `table`, `compare` and `report`, print tables, and report ignored files."""

import argparse
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from ssl_bench.composition.choices import choices, parse_names, require_choice
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError
from ssl_bench.layers import parse_layer_numbers
from ssl_bench.results import SUPERVISED, Record, RecordedEncoder, ResultStore, encoder_id
from ssl_bench.results.record import MAX_FILE_BYTES
from ssl_bench.results.store import summarise_problems
from ssl_bench.system.files import file_name, read_digests, read_untrusted
from ssl_bench.system.output import print_message
from ssl_bench.tables.depth import main_metrics
from ssl_bench.tables.entries import model_names
from ssl_bench.tables.sheets import FORMATS, Table, as_parquet, default_format, render_tables

FILTERS = ("dataset", "metric", "facet", "protocol")
"""Record fields for which `table`, `compare` and `report` have a flag that selects records."""

_MISMATCH = "does not match its record, or is a symbolic link"


def print_tables(tables: Sequence[Table], style: str) -> None:
    """Print tables to stdout. `style` is their format, as `resolve_format` returns it."""
    if style == "parquet":
        sys.stdout.buffer.write(as_parquet(tables))
        return
    print(render_tables(tables, style), end="" if style in ("csv", "json") else "\n")


def resolve_format(name: str | None) -> str:
    """Return the output format `name` after checking it, or the default format if it is None.

    Raises:
        ConfigurationError: The format is unknown, or Parquet, a binary format, would be printed to
            a terminal.
    """
    style = default_format() if name is None else require_choice("format", name, FORMATS)
    if style == "parquet" and sys.stdout.isatty():
        raise ConfigurationError(
            "Parquet cannot be printed to a terminal. Redirect it: > results.parquet"
        )
    return style


def load_selected_records(options: argparse.Namespace, store: ResultStore) -> list[Record]:
    """Read the records (stored scores) that the user selected with flags such as `--task`.

    The flags that select records are `--task`, `--layer` and the flags for the fields in `FILTERS`.

    Raises:
        DataError: No record is selected.
    """
    records = select_tasks(options.task, store.records())
    records = _select_layers(filter_records(options, records, store), options.layer)
    if not records:
        raise no_records_error(options.task, store)
    return records


def no_records_error(task: str, store: ResultStore) -> DataError:
    return DataError(f"no records of --task {task} in {store.root}")


@contextmanager
def open_store(out: str) -> Generator[ResultStore]:
    """Open the results folder `out` for a `with` block. At the end, print which files were ignored.

    The ignored files contain unreadable or outdated records, for example. If the `with` block
    raises an error about the configuration or the data, the error message also lists the ignored
    files.
    """
    store = ResultStore(Path(out))
    try:
        yield store
    except (ConfigurationError, DataError) as error:
        notes = store.describe_left_out()
        if not notes or str(store.root / "records") in str(error):
            raise
        raise type(error)("; ".join([str(error), *notes]), hint=error.hint) from error
    for line in store.describe_left_out():
        print_message(line)
    if mismatches := dict.fromkeys(store.damaged_files, _MISMATCH):
        print_message(
            f"ignored per-image values: {summarise_problems(mismatches)}. Probe again with "
            "--overwrite to replace them"
        )


def select_main_metrics(
    records: Sequence[Record], fields: Sequence[str], advice: str
) -> list[Record]:
    """Return the records of each group's main metric, and print which metrics are left out.

    A record is a stored score. The main metric represents its task in overviews. Records with equal
    values of `fields` form a group. The printed message ends with `advice`, which says how to show
    all metrics.
    """
    main = main_metrics(records, fields)
    selected = [r for r in records if main[tuple(getattr(r, name) for name in fields)] == r.metric]
    shown = {record.metric for record in selected}
    if others := sorted({record.metric for record in records} - shown):
        print_message(
            f"metrics not shown: {', '.join(others)}. Use --metric {others[0]} to show one metric, "
            f"or {advice}"
        )
    return selected


def select_tasks(task: str, records: Sequence[Record]) -> list[Record]:
    """Return the records (stored scores) of the tasks in `task`, such as "knn,pca" or "all"."""
    tasks = parse_names("task", task, [*choices("probe"), SUPERVISED])
    return [record for record in records if record.task in tasks]


def filter_records(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[Record]:
    """Return the records (stored scores) that the user selected by the flags for `FILTERS`.

    If the user set none of the flags for `FILTERS`, all records are returned.
    """
    for name in FILTERS:
        records = _filter_by(records, name, getattr(options, name), store)
    return list(records)


def _filter_by(
    records: Sequence[Record], name: str, value: str | None, store: ResultStore
) -> list[Record]:
    """Return the records (stored scores) whose field `name` has one of the values in `value`.

    `value` is a comma-separated list, or None to return all records.

    Raises:
        ConfigurationError: A value occurs in no record.
        DataError: A value occurs only in unreadable records.
    """
    if value is None:
        return list(records)
    known = sorted({getattr(record, name) for record in records})
    # Do not split a known value, because names may contain commas.
    values = [value] if value in known else [word.strip() for word in value.split(",")]
    for one in values:
        if one not in known and any(_may_contain(store, path, one) for path in store.unreadable):
            raise DataError(f"all records of --{name} {one} are unreadable. Probe again")
    selected = [require_choice(name, one, known) for one in values]
    return [record for record in records if getattr(record, name) in selected]


def _may_contain(store: ResultStore, path: Path, value: str) -> bool:
    """Return whether the path or the content of an unreadable record file contains a value."""
    if path.parent.name == file_name(value) or f"-{value}-" in path.name:
        return True
    try:
        return f'"{value}"'.encode() in read_untrusted(store.root, path, MAX_FILE_BYTES)
    except OSError:
        return False


def requested_layers(layers: str) -> set[int] | None:
    """Parse a value of `--layer`, such as "0,5,-1" or "all", and return a set of block indices.

    Negative indices count from the last block. Return None if all blocks are requested.
    """
    if layers == "all":
        return None
    try:
        return set(parse_layer_numbers(layers))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"expected block indices such as 11, -1, 0,5,11 or 0-3, or all, got {layers!r}",
            hint=("--layer", "0-3"),
        ) from error


def _select_layers(records: Sequence[Record], layers: str) -> list[Record]:
    indices = requested_layers(layers)
    if indices is None:
        return list(records)
    selected = [r for r in records if r.layer in indices or r.layer - r.depth in indices]
    if records and not selected:
        known = ", ".join(map(str, sorted({record.layer for record in records})))
        raise DataError(f"no record of block {layers}, expected one of the blocks {known}")
    return selected


def find_recorded_encoder(
    name: str, records: Iterable[Record] | Iterable[RecordedEncoder], store: ResultStore
) -> tuple[str, str]:
    """Find the encoder that `name` identifies, and return its id and its model name.

    `name` may be the name of the encoder in tables, the first digits of its id, or the first digits
    of the SHA-256 of its weights. `name` may also be a checkpoint file, a run folder, or any other
    address for `--checkpoint`.

    Raises:
        DataError: `name` matches no encoder, or more than one encoder, in `records`.
    """
    encoders = {one.encoder_id: one for one in records}
    labels = model_names(encoders.values())
    matches = [one for one, encoder in encoders.items() if name in (encoder.model, labels[one])]
    if not matches and name:
        matches = [
            one
            for one, encoder in encoders.items()
            if one.startswith(name) or encoder.checkpoint_sha256.startswith(name)
        ]
    if not matches and name and Path(name).exists():
        # ssl-bench writes a .sha256 file next to each checkpoint, whose digest identifies the
        # weights.
        weights = Path(name) / "last.safetensors" if Path(name).is_dir() else Path(name)
        digests = read_digests(weights.with_name(weights.name + ".sha256"))
        matches = [
            one
            for one, encoder in encoders.items()
            if digests == [(encoder.checkpoint_sha256, weights.name)]
        ]
    place = name.rpartition("@")[0] or name
    is_file = bool(name) and (Path(name).exists() or Path(place).exists())
    if len(matches) != 1 and (is_file or ":" in name):
        # Import it only here, because importing torch takes seconds.
        from ssl_bench.models import identify_encoder

        try:
            identity = encoder_id(identify_encoder(name).identity())
            matches = [identity] if identity in encoders else []
        except CheckpointError as error:
            if is_file:
                raise
            # `name` may be a misspelled name. The error below lists the known names.
            print_message(str(error))
    if len(matches) != 1:
        known = ", ".join(f"{encoders[one].model} {one[:8]}" for one in sorted(encoders))
        problem = "several encoders match" if matches else "no encoder with records matches"
        raise DataError(f"{problem} {name!r} in {store.root}. Known (name, id): {known}")
    return matches[0], encoders[matches[0]].model
