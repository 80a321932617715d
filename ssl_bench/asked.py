"""From what people type to what is meant: names, probes, checkpoints, folders."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from ssl_bench.composition.choices import asked_names, choices, require_choice
from ssl_bench.composition.compose import compose_config, has_key
from ssl_bench.data.files.readable import OnBadImage
from ssl_bench.errors import BrokenFile, CheckpointError, ConfigurationError, MachineError
from ssl_bench.layers import numbered_layers, resolve_layers
from ssl_bench.models import Encoder, identify_encoder, load_encoder
from ssl_bench.models.encoder import ASSUMED
from ssl_bench.models.loading.addresses import expand, kept_epoch, with_baselines
from ssl_bench.models.loading.checkpoint import read_metadata
from ssl_bench.models.loading.layouts import DINO
from ssl_bench.models.loading.load import stated_identity
from ssl_bench.planning import (
    BATCH_SIZES,
    PlannedProbe,
    dataset_roots,
    plan_probes,
    sharing_datasets,
)
from ssl_bench.results import ResultStore
from ssl_bench.system.files import remove_orphans, remove_orphans_below
from ssl_bench.system.progress import in_words, say

# By width and depth; timm has all of them for patches and images of these sizes.
_SIZES_IN_TIMM = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"}
# Of any encoder; only to know whether what was typed are numbers.
_DEEPEST = 9999
_PATCH_IN_TIMM, _SIDES_IN_TIMM = 16, (224, 384)


def asked_probes(options: argparse.Namespace, overrides: Sequence[str]) -> list[PlannedProbe]:
    """The probes and datasets of the flags that `probe` and `sweep` share; all files are there.

    Raises:
        ConfigurationError: a task, a dataset, a key or a value is wrong.
        DataError: nothing fits, or files are missing.
    """
    plan = planned_probes(options, overrides)
    for planned in sharing_datasets(plan):
        planned.require_images()
    return plan


def require_on_bad_image(options: argparse.Namespace) -> None:
    """Refuse what --on-bad-image does not take; without it each dataset has its own way."""
    if options.on_bad_image is not None:
        require_choice("--on-bad-image", options.on_bad_image, get_args(OnBadImage))


def planned_probes(options: argparse.Namespace, overrides: Sequence[str]) -> list[PlannedProbe]:
    """As `asked_probes`, before any file is looked for."""
    tasks = asked_names("task", options.task, choices("probe"))
    if options.task == "all":
        tasks = _importable(tasks)
    datasets = asked_names("dataset", options.dataset, choices("dataset"))
    require_on_bad_image(options)
    roots = dataset_roots(options.data_root, datasets)
    sizes = [] if options.batch_size is None else _batch_sizes(tasks, options.batch_size)
    plan = plan_probes(
        tasks,
        datasets,
        [*sizes, *overrides],
        roots,
        leaves_out=options.task == "all",
        on_bad_image=options.on_bad_image,
    )
    if options.task == "all":
        plan = [one for planned in plan for one in (planned, *planned.in_further_protocols())]
        if slow := sorted({one.probe.task for one in plan if one.probe.takes_long}):
            say(f"last: {', '.join(slow)}, where an image passes the encoder many times")

    def order(one: PlannedProbe) -> tuple[int, bool, str]:
        # Those of a dataset that look at the same images follow each other, so that what passed
        # the encoder for one need not be held for long.
        return datasets.index(one.choice[1]), one.probe.takes_long, one.probe.role

    return sorted(plan, key=order)


def _importable(tasks: Sequence[str]) -> list[str]:
    """The tasks whose files can be imported; a mistake in one is said, and the others go on."""
    found = []
    for task in tasks:
        try:
            compose_config("probing", [f"probe={task}"])
            found.append(task)
        except BrokenFile as error:
            say(f"left out: {task}: {error}")
    return found


def _batch_sizes(tasks: Sequence[str], size: int) -> list[str]:
    """What --batch-size is short for: no score hangs on how many images the encoder takes."""
    configs = [compose_config("probing", [f"probe={task}"]) for task in tasks]
    taken = [key for key in BATCH_SIZES if any(has_key(config, key) for config in configs)]
    if not taken:
        training = [c for c in configs if has_key(c, "probe.training.batch_size")]
        hint = f"; that of training is probe.training.batch_size={size}" if training else ""
        raise ConfigurationError(
            f"--batch-size is not for {', '.join(tasks)}, which choose how many images the "
            f"encoder takes at once themselves{hint}"
        )
    return [f"{key}={size}" for key in taken]


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


def opened_store(folder: str) -> ResultStore:
    """A store that can be written, without what killed writers left there."""
    store = ResultStore(Path(folder))
    require_writable(store.root)
    for name in ("records", "images", "pictures"):
        remove_orphans_below(store.root / name)
    remove_orphans(store.root)
    return store


def asked_encoders(options: argparse.Namespace) -> list[str]:
    """The addresses of the encoders that `probe` and `sweep` are asked for."""
    uris = expand(options.checkpoint or [newest_checkpoint(Path("runs"))])
    if not options.baselines:
        return uris
    return with_baselines(uris, [identify_encoder(uri).patch_size for uri in uris])


def require_layers(layers: str, checkpoints: Sequence[str] | None) -> None:
    """Refuse blocks that an encoder lacks before images are looked for, where its file says it.

    Raises:
        ConfigurationError: no numbers, or blocks outside of an encoder.
    """
    if layers != "all":
        numbered_layers(layers, _DEEPEST)
    newest = None if checkpoints else _newest(Path("runs"))
    for uri in expand(checkpoints or ([str(newest)] if newest else [])):
        # What else is wrong with it is said when its turn comes.
        with suppress(CheckpointError):
            if (encoder := stated_identity(uri)) is not None:
                resolve_layers(layers, encoder.depth)


def announced_encoder(uri: str) -> Encoder:
    """Load an encoder and say what it is."""
    encoder = load_encoder(uri)
    loaded = f"{encoder.loaded_keys} of {encoder.total_keys} tensors of the file loaded"
    mean, std = (" ".join(f"{one:g}" for one in colour) for colour in (encoder.mean, encoder.std))
    say(
        f"encoder {encoder.name}: {encoder.depth} blocks, sha256 {encoder.sha256[:12]}, "
        f"{loaded if encoder.total_keys else 'no file'}, mean {mean}, deviation {std} "
        f"({encoder.colours_from})"
    )
    if encoder.contents.note:
        say(encoder.contents.note)
    file = encoder.contents.file
    # The names of timm are those of DINO.
    is_unnamed = encoder.contents.layout == DINO.name and file and "dino" not in file.name.lower()
    if encoder.colours_from == ASSUMED and is_unnamed:
        size, side = _SIZES_IN_TIMM.get((encoder.dim, encoder.depth)), encoder.native_size[0]
        other = f"mean=0.5,std=0.5:{file} takes it"
        if size and encoder.patch_size == _PATCH_IN_TIMM and side in _SIDES_IN_TIMM:
            other = f"timm:vit_{size}_patch{_PATCH_IN_TIMM}_{side}@{file} takes timm's"
        say(f"trained with timm, whose ViTs often have mean 0.5? --checkpoint {other}")
    return encoder


def newest_checkpoint(folder: Path) -> str:
    """Path of the encoder weights below a folder that were written last; says which it is.

    Raises:
        CheckpointError: there are none.
    """
    newest = _newest(folder)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint below {folder}/; pass --checkpoint URI, such as demo:skip, or make one "
            "with `ssl-bench pretrain`"
        )
    ago = in_words(max(0.0, time.time() - newest.stat().st_mtime))
    steps = ""
    with suppress(CheckpointError):
        if "step" in (told := read_metadata(newest)):
            steps = f"trained for {told['step']} steps, "
    say(f"no --checkpoint: the newest below {folder}/ is {newest}, {steps}written {ago} ago")
    return str(newest)


def _newest(folder: Path) -> Path | None:
    files = [path for path in folder.glob("**/*.safetensors") if path.is_file()]
    found = [path for path in files if kept_epoch(path) is None]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
