"""What the commands probe, pretrain and table do once their arguments are read."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch

from ssl_bench.composition import (
    as_plain,
    build,
    choices,
    compose_config,
    require_choice,
)
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, MachineError
from ssl_bench.evaluation import Evaluation
from ssl_bench.features import resolve_layers
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.planning import PlannedProbe, plan_probes
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables import FORMATS, depth_tables, draw_curves, insert_between_markers, render


def say(line: str) -> None:
    """Tell the user on stderr; stdout is for tables."""
    print(line, file=sys.stderr, flush=True)


def probe(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Probe every asked layer of every asked checkpoint; print the tables."""
    tasks = _names("task", options.task, choices("probe"))
    datasets = _names("dataset", options.dataset, choices("dataset"))
    plan = plan_probes(tasks, datasets, _with_root(overrides, options.data_root))
    device = choose_device(options.device)
    store = ResultStore(Path(options.out))
    require_writable(store.root)
    records: list[Record] = []
    for uri in options.checkpoint or [newest_checkpoint(Path("runs"))]:
        encoder = load_encoder(uri)
        say(f"encoder {encoder.name}: {encoder.depth} blocks, sha256 {encoder.sha256[:12]}")
        layers = resolve_layers(options.layer, encoder.depth)
        for planned in plan:
            evaluation = _evaluation(planned, encoder, layers, device)
            records += evaluation.run(store, say=say, overwrite=options.overwrite)
    print_tables(records, "text")
    say(f"records and pictures in {store.root}; `ssl-bench table --out {store.root}`")
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
    for name in ("dataset", "metric"):
        records = _only(records, name, getattr(options, name))
    if not records:
        raise DataError(f"no records of {', '.join(tasks)} in {store.root}; see --task")
    print_tables(records, options.format)
    if options.into:
        markdown = "\n".join(render(t, "markdown") for t in depth_tables(records))
        insert_between_markers(Path(options.into), markdown)
        say(f"written into {options.into}")
    if options.figure:
        draw_curves(depth_tables(records), Path(options.figure))
        say(f"drawn: {options.figure}")
    return 0


def print_tables(records: Sequence[Record], style: str) -> None:
    for depth_table in depth_tables(records):
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
    chosen = [require_choice(name, word.strip(), have) for word in wanted.split(",")]
    return [record for record in records if getattr(record, name) in chosen]


def _default_run(overrides: Sequence[str]) -> str:
    chosen = {key: value for key, _, value in (o.partition("=") for o in overrides)}
    model = chosen.get("model", "vit_small_skip")
    optimizer = chosen.get("optimizer", "adamw")
    return f"runs/{model}-{optimizer}-{datetime.now():%Y%m%d-%H%M%S}"
