"""What the commands table and compare do once their arguments are read."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from ssl_bench.commands import asked_names
from ssl_bench.composition import choices, require_choice
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.models import identify_encoder
from ssl_bench.progress import say
from ssl_bench.results import SUPERVISED, Record, ResultStore, encoder_id
from ssl_bench.tables.block_choice import CHOICES
from ssl_bench.tables.comparison import Comparison, comparisons
from ssl_bench.tables.depth import depth_tables, insert_between_markers, model_names
from ssl_bench.tables.drawing import draw_curves
from ssl_bench.tables.epoch_comparison import EpochComparison, epoch_comparisons
from ssl_bench.tables.epochs import by_run, epoch_tables
from ssl_bench.tables.paper import paper_table
from ssl_bench.tables.pivot import pivot_table
from ssl_bench.tables.published import PublishedTable, published_table
from ssl_bench.tables.sheets import FORMATS, Printable, default_format, set_tables

FILTERS = ("dataset", "metric", "facet", "protocol")
"""Fields of a record by which `table` and `compare` choose."""

_MISFIT = "a link, or not what its record comes from"
_SHOWN = 5


def table(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print tables of the records in a folder."""
    del overrides
    style = _format(options.format)
    _check_together(options)
    store = ResultStore(Path(options.out))
    records = asked_records(options, store)
    tables = _tables(options, records, store)
    _print(tables, style)
    if options.into:
        insert_between_markers(Path(options.into), set_tables(tables, "markdown"))
        say(f"written into {options.into}")
    if options.figure:
        curves = epoch_tables if options.over_epochs else depth_tables
        draw_curves(curves(records), Path(options.figure))
        say(f"drawn: {options.figure}")
    say_ignored(store)
    return 0


def _check_together(options: argparse.Namespace) -> None:
    if options.best_layer is not None:
        require_choice("--best-layer", options.best_layer, CHOICES)
        if not (options.pivot or options.paper):
            raise ConfigurationError("--best-layer needs --pivot or --paper TABLE")
    chosen = {
        "--pivot": options.pivot,
        "--paper": options.paper,
        "--over-epochs": options.over_epochs,
    }
    asked = [flag for flag, value in chosen.items() if value]
    if len(asked) > 1:
        raise ConfigurationError(f"expected one of {', '.join(chosen)}, got {' and '.join(asked)}")
    if options.encoders and not options.paper:
        raise ConfigurationError("--as 'ROW'=CHECKPOINT needs --paper TABLE")


def _tables(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> Sequence[Printable]:
    choice = options.best_layer or "holdout"
    if options.pivot:
        return [pivot_table(records, store, choice)]
    if options.over_epochs:
        return epoch_tables(records)
    if options.paper is None:
        return depth_tables(records)
    published = published_table(options.paper)
    encoders = _encoders(options.encoders or [], published, records, store)
    return [paper_table(published, records, store, encoders=encoders, choice=choice)]


def _encoders(
    given: Sequence[str], published: PublishedTable, records: Sequence[Record], store: ResultStore
) -> dict[str, str]:
    """`Record.encoder_id` for each named row."""
    found = {}
    for pair in given:
        row, equals, name = pair.partition("=")
        if not equals:
            raise ConfigurationError(f"expected --as 'ROW'=CHECKPOINT, got {pair!r}")
        row = require_choice("row", row.strip(), published.rows)
        if row in found:
            raise ConfigurationError(f"expected one checkpoint for row {row!r}, got several")
        found[row] = recorded_checkpoint(name.strip(), records, store)[0]
    return found


def compare(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the differences between two checkpoints, or between the blocks of one."""
    del overrides
    style = _format(options.format)
    if len(options.checkpoints) > 2:
        raise ConfigurationError(f"expected one or two checkpoints, got {len(options.checkpoints)}")
    store = ResultStore(Path(options.out))
    records = _of_tasks(options.task, store.records())
    if not records:
        raise _none_of(options.task, store)
    if options.over_epochs:
        tables: Sequence[Printable] = _over_epochs(options, records, store)
    else:
        tables = _compared(options, records, store)
    _print(tables, style)
    say_ignored(store)
    return 0


def _over_epochs(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[EpochComparison]:
    runs = [_recorded_run(name, records, store) for name in options.checkpoints]
    if len(set(runs)) != 2:
        raise ConfigurationError(
            f"expected two runs to compare --over-epochs, got {' and '.join(runs)}"
        )
    return epoch_comparisons(store, _filtered(options, records), (runs[0], runs[1]))


def _recorded_run(name: str, records: Sequence[Record], store: ResultStore) -> str:
    """Name of a run: its own, or that of any of its encoders."""
    runs = by_run(records)
    if name in runs:
        return name
    encoder, model = recorded_checkpoint(name, records, store)
    known = (run for run, those in runs.items() if encoder in {r.encoder_id for r in those})
    run = next(known, None)
    if run is None:
        raise DataError(f"expected a run whose records say their epoch, got {model}")
    return run


def _compared(
    options: argparse.Namespace, records: Sequence[Record], store: ResultStore
) -> list[Comparison]:
    chosen = [recorded_checkpoint(name, records, store) for name in options.checkpoints]
    by_id = {record.encoder_id: record for record in records}
    records = _filtered(options, records)
    names = [model for _, model in chosen]
    if len(set(names)) < len(names):
        names = [f"{model} {encoder[:6]}" for encoder, model in chosen]
    heads = (names[0], names[1]) if len(names) == 2 else ("best block", names[0])
    encoders = tuple(by_id[encoder] for encoder, _ in chosen)
    return [
        Comparison(record, tuple(rows), heads, encoders)
        for record, rows in comparisons(store, records, [encoder for encoder, _ in chosen])
    ]


def _print(tables: Sequence[Printable], style: str) -> None:
    print(set_tables(tables, style), end="" if style in ("csv", "json") else "\n")


def _format(asked: str | None) -> str:
    return default_format() if asked is None else require_choice("format", asked, FORMATS)


def asked_records(options: argparse.Namespace, store: ResultStore) -> list[Record]:
    records = _of_tasks(options.task, store.records())
    records = _of_layers(_filtered(options, records), options.layer)
    if not records:
        raise _none_of(options.task, store)
    return records


def _none_of(task: str, store: ResultStore) -> DataError:
    unshown = f"; {_unshown(store)}" if store.unreadable else ""
    return DataError(f"no records of --task {task} in {store.root}{unshown}")


def _unshown(store: ResultStore) -> str:
    count = f"{len(store.unreadable)} of {store.found} records cannot be shown"
    return f"{count}: {first_few(store.unreadable)}; the next probe computes what is missing"


def say_ignored(store: ResultStore) -> None:
    """One line on the records that cannot be shown, and one on the images' values of others."""
    if store.unreadable:
        say(_unshown(store))
    if damaged := dict.fromkeys(store.damaged, _MISFIT):
        say(f"ignored {first_few(damaged)}; a probe with --overwrite makes both anew")


def first_few(reasons: Mapping[Path, str]) -> str:
    """Some files, each with what is wrong with it."""
    named = [f"{path}: {why}" for path, why in reasons.items()]
    more = [f"and {len(named) - _SHOWN} more"] if len(named) > _SHOWN else []
    return "; ".join([*named[:_SHOWN], *more])


def _of_tasks(asked: str, records: Sequence[Record]) -> list[Record]:
    tasks = asked_names("task", asked, [*choices("probe"), SUPERVISED])
    return [record for record in records if record.task in tasks]


def _filtered(options: argparse.Namespace, records: Sequence[Record]) -> list[Record]:
    for name in FILTERS:
        records = _only(records, name, getattr(options, name))
    return list(records)


def _only(records: Sequence[Record], name: str, wanted: str | None) -> list[Record]:
    if wanted is None:
        return list(records)
    have = sorted({getattr(record, name) for record in records})
    # A protocol with changed options has commas in its name.
    words = [wanted] if wanted in have else wanted.split(",")
    chosen = [require_choice(name, word.strip(), have) for word in words]
    return [record for record in records if getattr(record, name) in chosen]


def _of_layers(records: Sequence[Record], asked: str) -> list[Record]:
    """Records of some blocks; -1 is the last one of each encoder.

    Raises:
        ConfigurationError: not whole numbers.
        DataError: no record is of any of them.
    """
    if asked == "all":
        return list(records)
    try:
        layers = {int(word) for word in asked.split(",")}
    except ValueError as error:
        raise ConfigurationError(
            f"expected --layer 11, -1, 0,5,11 or all, got {asked!r}"
        ) from error
    found = [r for r in records if r.layer in layers or r.layer - r.depth in layers]
    if records and not found:
        have = ", ".join(map(str, sorted({record.layer for record in records})))
        raise DataError(f"no record of block {asked}; recorded are {have}")
    return found


def recorded_checkpoint(
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
    place = name.rpartition("@")[0] or name
    if not found and name and (Path(name).exists() or Path(place).exists() or ":" in name):
        asked = encoder_id(identify_encoder(name).identity())
        found = [asked] if asked in models else []
    if len(found) != 1:
        known = ", ".join(f"{models[one].model} {one[:8]}" for one in sorted(models))
        many = "several encoders are" if found else "no record is"
        raise DataError(f"{many} of {name!r} in {store.root}; known (name, id): {known}")
    return found[0], models[found[0]].model
