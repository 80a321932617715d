"""What the commands probe, pretrain, table and compare do once their arguments are read."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from ssl_bench.comparison import comparison_sheet, comparisons
from ssl_bench.composition import (
    as_plain,
    build,
    choices,
    compose_config,
    require_choice,
)
from ssl_bench.data.manifests import MANIFEST, check_manifest, write_manifest
from ssl_bench.data.readable import ReadableDataset
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, MachineError
from ssl_bench.evaluation import Evaluation
from ssl_bench.features import resolve_layers
from ssl_bench.files import remove_orphans
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.planning import PlannedProbe, plan_probes
from ssl_bench.progress import show_progress
from ssl_bench.results import Record, ResultStore
from ssl_bench.sheets import STYLES, set_sheet
from ssl_bench.tables import (
    FORMATS,
    DepthTable,
    depth_tables,
    draw_curves,
    insert_between_markers,
    render,
)

ON_BAD_IMAGE = ("fail", "skip")

FILTERS = ("dataset", "metric", "facet", "protocol")
"""Fields of a record by which `table` and `compare` choose."""


def say(line: str) -> None:
    """Tell the user on stderr; stdout is for tables."""
    print(line, file=sys.stderr, flush=True)


def probe(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Probe every asked layer of every asked checkpoint; print the tables."""
    tasks = _names("task", options.task, choices("probe"))
    datasets = _names("dataset", options.dataset, choices("dataset"))
    require_choice("--on-bad-image", options.on_bad_image, ON_BAD_IMAGE)
    plan = plan_probes(tasks, datasets, _with_root(overrides, options.data_root))
    if options.on_bad_image == "skip":
        plan = [replace(planned, dataset=ReadableDataset(planned.dataset)) for planned in plan]
    for planned in plan:
        planned.require_images()
    device = choose_device(options.device)
    store = ResultStore(Path(options.out))
    require_writable(store.root)
    remove_orphans(store.root)
    records: list[Record] = []
    for uri in options.checkpoint or [newest_checkpoint(Path("runs"))]:
        encoder = load_encoder(uri)
        loaded = f"{encoder.loaded_keys} of {encoder.total_keys} tensors of the file loaded"
        say(
            f"encoder {encoder.name}: {encoder.depth} blocks, sha256 {encoder.sha256[:12]}, "
            f"{loaded if encoder.total_keys else 'no file'}"
        )
        layers = resolve_layers(options.layer, encoder.depth)
        for planned in plan:
            evaluation = _evaluation(planned, encoder, layers, device)
            records += evaluation.run(store, say=say, overwrite=options.overwrite)
    print_tables(depth_tables(records), "text")
    if records:
        say(f"records and pictures in {store.root}; `ssl-bench table --out {store.root}`")
    else:
        say(f"nothing was scored; pictures in {store.root}")
    return 0


def pretrain(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Pretrain one encoder into a run folder."""
    overrides = _with_root(overrides, options.data_root)
    config = compose_config("pretraining", overrides)
    if options.resume and options.out is None:
        raise ConfigurationError("--resume needs --out DIR, the run folder to go on with")
    out = Path(options.out or _default_run(overrides))
    say(f"run folder {out}")
    build(config).run(
        out,
        resume=options.resume,
        overwrite=options.overwrite,
        device=choose_device(options.device),
        config=as_plain(config),
    )
    say(f"next: ssl-bench probe --task all --checkpoint {out}")
    return 0


def table(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the tables of the records in a folder."""
    del overrides
    require_choice("format", options.format, FORMATS)
    tasks = _names("task", options.task, choices("probe"))
    store = ResultStore(Path(options.out))
    records = [record for record in store.records() if record.task in tasks]
    for path in store.unreadable:
        say(f"ignored {path}: not a complete record; the next probe computes it again")
    for name in FILTERS:
        records = _only(records, name, getattr(options, name))
    if not records:
        raise DataError(f"no records of {', '.join(tasks)} in {store.root}; see --task")
    tables = depth_tables(records)
    print_tables(tables, options.format)
    if options.into:
        markdown = "\n".join(render(t, "markdown") for t in tables)
        insert_between_markers(Path(options.into), markdown)
        say(f"written into {options.into}")
    if options.figure:
        draw_curves(tables, Path(options.figure))
        say(f"drawn: {options.figure}")
    return 0


def compare(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the differences between two checkpoints, or between the blocks of one."""
    del overrides
    require_choice("format", options.format, STYLES)
    if len(options.checkpoints) > 2:
        raise ConfigurationError(f"expected one or two checkpoints, got {len(options.checkpoints)}")
    tasks = _names("task", options.task, choices("probe"))
    store = ResultStore(Path(options.out))
    records = [record for record in store.records() if record.task in tasks]
    chosen = [_recorded(name, records, store) for name in options.checkpoints]
    for name in FILTERS:
        records = _only(records, name, getattr(options, name))
    names = [model for _, model in chosen]
    heads = (names[0], names[1]) if len(names) == 2 else ("best block", names[0])
    for record, rows in comparisons(store, records, [sha for sha, _ in chosen]):
        print(set_sheet(comparison_sheet(record, rows, heads), options.format))
    return 0


def data(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Compare the files of a dataset with the list of their sha256, or write that list."""
    del overrides
    root = Path(options.root).expanduser()
    manifest = Path(options.manifest).expanduser() if options.manifest else root / MANIFEST
    if options.update or not manifest.exists():
        count = write_manifest(root, manifest, show_progress)
        say(f"{count} files listed in {manifest}; `ssl-bench data verify {root}` compares them")
        return 0
    found = check_manifest(root, manifest, show_progress)
    for what, names in (("new, not in the list", found.added), ("missing", found.missing)):
        if names:
            say(f"{len(names)} {what}: {_some(names)}")
    if found.is_damage:
        raise DataError(
            f"{len(found.changed)} files below {root} differ from {manifest} and "
            f"{len(found.missing)} are missing: {_some([*found.changed, *found.missing])}; fetch "
            "them again, or --update the list if that is on purpose"
        )
    say(f"all files below {root} are as {manifest} lists them")
    return 0


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def print_tables(tables: Sequence[DepthTable], style: str) -> None:
    for depth_table in tables:
        print(render(depth_table, style))


def choose_device(name: str | None) -> torch.device:
    """The asked device, or a GPU if there is one.

    Raises:
        ConfigurationError: torch does not know the name.
        MachineError: the device is not there.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"expected --device cpu, cuda or cuda:N, got {name!r}") from error
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MachineError(f"device {name} is not usable here; try --device cpu") from error
    return device


def _names(kind: str, text: str, valid: list[str]) -> list[str]:
    if text == "all":
        return valid
    return [require_choice(kind, name.strip(), [*valid, "all"]) for name in text.split(",")]


def _with_root(overrides: Sequence[str], root: str | None) -> list[str]:
    quoted = [] if root is None else ["data.root='" + str(root).replace("'", "\\'") + "'"]
    return [*quoted, *overrides]


def _evaluation(
    planned: PlannedProbe, encoder: Encoder, layers: tuple[int, ...], device: torch.device
) -> Evaluation:
    return Evaluation(
        encoder=encoder,
        dataset=planned.dataset,
        probe=planned.probe,
        layers=layers,
        seed=planned.seed,
        device=device,
        dtype=planned.dtype,
    )


def require_writable(folder: Path) -> None:
    """Find out before hours of work whether results can be saved.

    Raises:
        MachineError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MachineError(
            f"cannot write into {folder}: {error.strerror}; choose another folder with --out"
        ) from error


def newest_checkpoint(folder: Path) -> str:
    """Path of the encoder weights below a folder that were written last.

    Raises:
        CheckpointError: there are none.
    """
    found = list(folder.glob("**/*.safetensors"))
    if not found:
        raise CheckpointError(
            f"no checkpoint below {folder}/; pass --checkpoint URI or make one with "
            "`ssl-bench pretrain` or `ssl-bench quickstart`"
        )
    return str(max(found, key=lambda path: path.stat().st_mtime))


def _only(records: Sequence[Record], name: str, wanted: str | None) -> list[Record]:
    if wanted is None:
        return list(records)
    have = sorted({getattr(record, name) for record in records})
    # A protocol with changed options has commas in its name.
    words = [wanted] if wanted in have else wanted.split(",")
    chosen = [require_choice(name, word.strip(), have) for word in words]
    return [record for record in records if getattr(record, name) in chosen]


def _recorded(name: str, records: Sequence[Record], store: ResultStore) -> tuple[str, str]:
    """Weights and name of a checkpoint given by its name in tables, its sha256 or its URI.

    Raises:
        DataError: there is no record of it, or there are several of this name.
    """
    models = {record.checkpoint_sha256: record.model for record in records}
    found = [sha for sha, model in models.items() if name == model or sha.startswith(name)]
    if not found and (Path(name).exists() or ":" in name):
        found = [sha for sha in models if sha == load_encoder(name).sha256]
    if len(found) != 1:
        known = ", ".join(f"{model} {sha[:8]}" for sha, model in sorted(models.items()))
        many = "several checkpoints are" if found else "no record is"
        raise DataError(f"{many} of {name!r} in {store.root}; known (name, sha256): {known}")
    return found[0], models[found[0]]


def _default_run(overrides: Sequence[str]) -> str:
    chosen = {key: value for key, _, value in (o.partition("=") for o in overrides)}
    parts = [chosen.get("model", "vit_small_skip"), chosen.get("optimizer", "adamw")]
    if "experiment" in chosen:
        parts = [chosen["experiment"]]
    return f"runs/{'-'.join(parts)}-{datetime.now():%Y%m%d-%H%M%S}"
