"""What the commands probe and pretrain do once their arguments are read."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
from omegaconf import DictConfig

from ssl_bench.composition import (
    as_plain,
    build,
    choices,
    compose_config,
    key_lines,
    require_choice,
)
from ssl_bench.data.readable import ReadableDataset
from ssl_bench.endings import is_heard
from ssl_bench.errors import CheckpointError, ConfigurationError, MachineError
from ssl_bench.escaping import json_text
from ssl_bench.evaluation import Evaluation
from ssl_bench.features import resolve_layers
from ssl_bench.files import remove_orphans_below
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.addresses import expand, kept_epoch
from ssl_bench.planning import (
    PlannedProbe,
    dataset_roots,
    plan_probes,
    probing_config,
    with_root,
)
from ssl_bench.progress import say
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.sheets import default_format, set_tables

ON_BAD_IMAGE = ("fail", "skip")


def probe(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Probe every asked layer of every asked checkpoint; print the tables."""
    if options.keys:
        return _print_keys(*probing_defaults(options.task, options.dataset, overrides))
    plan = asked_probes(options, overrides)
    device = choose_device(options.device)
    store = opened_store(options.out)
    records: list[Record] = []
    for uri in expand(options.checkpoint or [newest_checkpoint(Path("runs"))]):
        encoder = announced_encoder(uri)
        layers = resolve_layers(options.layer, encoder.depth)
        for planned in plan:
            evaluation = planned_evaluation(planned, encoder, layers, device)
            records += evaluation.run(store, say=say, overwrite=options.overwrite)
    if options.json:
        print(json_text([record.as_json() for record in records]))
    else:
        print(set_tables(depth_tables(records), default_format()))
    if records:
        say(f"records and pictures in {store.root}; `ssl-bench table --out {store.root}`")
    else:
        say(f"nothing was scored; pictures in {store.root}")
    return 0


def asked_probes(options: argparse.Namespace, overrides: Sequence[str]) -> list[PlannedProbe]:
    """The probes and datasets of the flags that `probe` and `sweep` share; all files are there.

    Raises:
        ConfigurationError: a task, a dataset, a key or a value is wrong.
        DataError: nothing fits, or files are missing.
    """
    tasks = asked_names("task", options.task, choices("probe"))
    datasets = asked_names("dataset", options.dataset, choices("dataset"))
    require_choice("--on-bad-image", options.on_bad_image, ON_BAD_IMAGE)
    plan = plan_probes(tasks, datasets, overrides, dataset_roots(options.data_root, datasets))
    if options.on_bad_image == "skip":
        plan = [replace(planned, dataset=ReadableDataset(planned.dataset)) for planned in plan]
    for planned in plan:
        planned.require_images()
    return plan


def opened_store(folder: str) -> ResultStore:
    """A store that can be written, without what killed writers left there."""
    store = ResultStore(Path(folder))
    require_writable(store.root)
    for name in ("records", "images", "pictures"):
        remove_orphans_below(store.root / name)
    return store


def announced_encoder(uri: str) -> Encoder:
    """Load an encoder and say what it is."""
    encoder = load_encoder(uri)
    loaded = f"{encoder.loaded_keys} of {encoder.total_keys} tensors of the file loaded"
    say(
        f"encoder {encoder.name}: {encoder.depth} blocks, sha256 {encoder.sha256[:12]}, "
        f"{loaded if encoder.total_keys else 'no file'}, mean {_listed(encoder.mean)}, "
        f"deviation {_listed(encoder.std)} ({encoder.colours_from})"
    )
    return encoder


def _listed(colour: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in colour)


def planned_evaluation(
    planned: PlannedProbe, encoder: Encoder, layers: tuple[int, ...], device: torch.device
) -> Evaluation:
    """What `Evaluation.run` needs to compute the pending cells of one probe and one encoder."""
    return Evaluation(
        encoder=encoder,
        dataset=planned.dataset,
        probe=planned.probe,
        layers=layers,
        seed=planned.seed,
        device=device,
        dtype=planned.dtype,
    )


def pretrain(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Pretrain one encoder into a run folder."""
    overrides = with_root(overrides, options.data_root)
    config = compose_config("pretraining", overrides)
    if options.keys:
        return _print_keys(config)
    if (options.resume or options.must_resume or options.extend) and options.out is None:
        raise ConfigurationError("--resume and --extend need --out DIR, the run to go on with")
    out = Path(options.out or _default_run(overrides))
    if is_heard():
        say(f"run folder {out}")
    build(config).run(
        out,
        resume=options.resume,
        must_resume=options.must_resume,
        extend=options.extend,
        overwrite=options.overwrite,
        device=choose_device(options.device),
        config=as_plain(config),
    )
    if is_heard():
        say(f"next: ssl-bench probe --task all --checkpoint {out}")
    return 0


def probing_defaults(task: str, dataset: str, overrides: Sequence[str]) -> list[DictConfig]:
    """The configurations of some tasks on some datasets, before anything is opened."""
    return [
        probing_config(one, where, overrides)
        for one in asked_names("task", task, choices("probe"))
        for where in asked_names("dataset", dataset, choices("dataset"))
    ]


def _print_keys(*configs: DictConfig) -> int:
    lines = [line for config in configs for line in key_lines(config)]
    print("\n".join(dict.fromkeys(lines)))
    return 0


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
        # The device "meta" makes tensors, but none that holds a number.
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MachineError(f"device {name} is not usable here; try --device cpu") from error
    return device


def asked_names(kind: str, text: str, valid: list[str]) -> list[str]:
    """The names of a list with commas, or all of them.

    Raises:
        ConfigurationError: an unknown name.
    """
    if text == "all":
        return valid
    return [require_choice(kind, name.strip(), [*valid, "all"]) for name in text.split(",")]


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
    files = [path for path in folder.glob("**/*.safetensors") if path.is_file()]
    found = [path for path in files if kept_epoch(path) is None]
    if not found:
        raise CheckpointError(
            f"no checkpoint below {folder}/; pass --checkpoint URI or make one with "
            "`ssl-bench pretrain` or `ssl-bench quickstart`"
        )
    return str(max(found, key=lambda path: path.stat().st_mtime))


def _default_run(overrides: Sequence[str]) -> str:
    chosen = {key: value for key, _, value in (o.partition("=") for o in overrides)}
    parts = [chosen.get("model", "vit_small_skip"), chosen.get("optimizer", "adamw")]
    if "experiment" in chosen:
        parts = [chosen["experiment"]]
    return f"runs/{'-'.join(parts)}-{datetime.now():%Y%m%d-%H%M%S}"
