"""Which records `table`, `compare` and `report` are asked for, and what they say of others."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssl_bench.composition.choices import choices, parse_names, require_choice
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError
from ssl_bench.layers import numbered_layers
from ssl_bench.results import SUPERVISED, Record, ResultStore, encoder_id
from ssl_bench.results.record import MOST_BYTES
from ssl_bench.results.store import summarise_problems
from ssl_bench.system.files import read_digests, read_within
from ssl_bench.system.paths import file_name
from ssl_bench.system.progress import say
from ssl_bench.tables.depth import DepthTable
from ssl_bench.tables.entries import choose_main_metric, model_names
from ssl_bench.tables.sheets import (
    FORMATS,
    Printable,
    as_parquet,
    default_format,
    render_tables,
)

FILTERS = ("dataset", "metric", "facet", "protocol")
"""Fields of a record by which `table` and `compare` choose."""

MOST_TABLES = 4
"""Of a task that was asked for alone; of more, or of several tasks, those of one metric."""

NO_RECORDS = "no records of --task {} in {}"

_MISFIT = "a link, or not what its record comes from"


def print_tables(tables: Sequence[Printable], style: str) -> None:
    """Print tables in one of `FORMATS`.

    Raises:
        ConfigurationError: what is no text would go to a terminal.
    """
    if style == "parquet":
        if sys.stdout.isatty():
            raise ConfigurationError("parquet is no text; put it into a file: > results.parquet")
        sys.stdout.buffer.write(as_parquet(tables))
        return
    print(render_tables(tables, style), end="" if style in ("csv", "json") else "\n")


def print_main_tables(tables: Sequence[DepthTable], store: ResultStore) -> None:
    """All of a task that has a few, of others those of the metric that stands for it."""
    by_task: dict[str, list[DepthTable]] = defaultdict(list)
    for table in tables:
        by_task[table.record.task].append(table)
    main = main_metrics([table.record for table in tables])
    most = MOST_TABLES if len(by_task) == 1 else 1
    for task, those in by_task.items():
        few = len(those) <= most
        asked = [t for t in those if few or main[task, t.record.dataset] == t.record.metric]
        shown = [table for table in asked if table.has_values] or asked[:1]
        print(render_tables(shown, default_format()))
        if len(shown) < len(those):
            more = f"ssl-bench table --task {task} --out {store.root}"
            number = len(those) - len(shown)
            say(f"{number} more table{'s' * (number > 1)} of {task}: {more}")


def main_metrics(
    records: Iterable[Record], names: Sequence[str] = ("task", "dataset")
) -> dict[tuple[Any, ...], str]:
    """The metric that stands for the task, by what records are asked for."""
    known: dict[tuple[Any, ...], dict[tuple[str, bool], None]] = defaultdict(dict)
    for record in records:
        asked = tuple(getattr(record, name) for name in names)
        known[asked][record.metric, record.is_ranked] = None
    return {asked: choose_main_metric(list(metrics)) for asked, metrics in known.items()}


def asked_format(asked: str | None) -> str:
    return default_format() if asked is None else require_choice("format", asked, FORMATS)


def load_selected_records(options: argparse.Namespace, store: ResultStore) -> list[Record]:
    records = of_tasks(options.task, store.records())
    records = _of_layers(filtered(options, records, store), options.layer)
    if not records:
        raise DataError(NO_RECORDS.format(options.task, store.root))
    return records


@contextmanager
def shown(out: str) -> Generator[ResultStore]:
    """A folder of results, of which is said in the end what could not be shown, and why.

    That is one line on records and one on the images' values of others; where nothing can be shown
    at all, the error names the records too.
    """
    store = ResultStore(Path(out))
    try:
        yield store
    except (ConfigurationError, DataError) as error:
        notes = store.notes()
        if not notes or str(store.root / "records") in str(error):
            raise
        raise type(error)("; ".join([str(error), *notes]), hint=error.hint) from error
    for line in store.notes():
        say(line)
    if damaged := dict.fromkeys(store.damaged, _MISFIT):
        say(f"ignored {summarise_problems(damaged)}; a probe with --overwrite makes both anew")


def of_tasks(asked: str, records: Sequence[Record]) -> list[Record]:
    tasks = parse_names("task", asked, [*choices("probe"), SUPERVISED])
    return [record for record in records if record.task in tasks]


def filtered(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[Record]:
    for name in FILTERS:
        records = _only(records, name, getattr(options, name), store)
    return list(records)


def _only(
    records: Sequence[Record], name: str, wanted: str | None, store: ResultStore
) -> list[Record]:
    if wanted is None:
        return list(records)
    have = sorted({getattr(record, name) for record in records})
    # A protocol with changed options has commas in its name.
    words = [wanted] if wanted in have else [word.strip() for word in wanted.split(",")]
    for word in words:
        if word not in have and any(_may_have(store, path, word) for path in store.unreadable):
            raise DataError(f"no record of --{name} {word} can be shown")
    chosen = [require_choice(name, word, have) for word in words]
    return [record for record in records if getattr(record, name) in chosen]


def _may_have(store: ResultStore, path: Path, word: str) -> bool:
    """Whether the place of a record, or what can be read of it, has a word among its fields."""
    if path.parent.name == file_name(word) or f"-{word}-" in path.name:
        return True
    try:
        return f'"{word}"'.encode() in read_within(store.root, path, MOST_BYTES)
    except OSError:
        return False


def asked_layers(asked: str) -> set[int] | None:
    """Blocks by number, below 0 from the last one on; None for all.

    Raises:
        ConfigurationError: not whole numbers.
    """
    if asked == "all":
        return None
    try:
        return set(numbered_layers(asked))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"expected blocks such as 11, -1, 0,5,11, 0-3 or all, got {asked!r}",
            hint=("--layer", "0-3"),
        ) from error


def _of_layers(records: Sequence[Record], asked: str) -> list[Record]:
    """Records of some blocks; -1 is the last one of each encoder."""
    layers = asked_layers(asked)
    if layers is None:
        return list(records)
    found = [r for r in records if r.layer in layers or r.layer - r.depth in layers]
    if records and not found:
        have = ", ".join(map(str, sorted({record.layer for record in records})))
        raise DataError(f"no record of block {asked}; recorded are {have}")
    return found


def find_recorded_encoder(
    name: str, records: Sequence[Record], store: ResultStore
) -> tuple[str, str]:
    """`Record.encoder_id` and name of an encoder.

    `name` is its name in tables, its id or the sha256 of its weights, both with as many digits as
    tell it apart, or its URI.

    Raises:
        DataError: there is no record of it, or there are several of this name.
    """
    models = {record.encoder_id: record for record in records}
    shown = model_names(records)
    found = [one for one, record in models.items() if name in (record.model, shown[one])]
    if not found and name:
        found = [
            one
            for one, record in models.items()
            if one.startswith(name) or record.checkpoint_sha256.startswith(name)
        ]
    if not found and name and Path(name).exists():
        # Of a run or file of this suite the digest beside it says which weights these are.
        weights = Path(name) / "last.safetensors" if Path(name).is_dir() else Path(name)
        stated = read_digests(weights.with_name(weights.name + ".sha256"))
        found = [
            one
            for one, record in models.items()
            if stated == [(record.checkpoint_sha256, weights.name)]
        ]
    place = name.rpartition("@")[0] or name
    if len(found) != 1 and name and (Path(name).exists() or Path(place).exists() or ":" in name):
        # Here, because torch takes seconds and a name in the tables needs none of it.
        from ssl_bench.models import identify_encoder

        try:
            asked = encoder_id(identify_encoder(name).identity())
            found = [asked] if asked in models else []
        except CheckpointError as error:
            # Perhaps what a table calls an encoder of a URI; then the known names help.
            if Path(name).exists() or Path(place).exists():
                raise
            say(str(error))
    if len(found) != 1:
        known = ", ".join(f"{models[one].model} {one[:8]}" for one in sorted(models))
        many = "several encoders are" if found else "no record is"
        raise DataError(f"{many} of {name!r} in {store.root}; known (name, id): {known}")
    return found[0], models[found[0]].model
