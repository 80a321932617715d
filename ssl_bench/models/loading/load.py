"""Load the frozen encoder of an address, and resolve the addresses that a command names."""

import importlib.util
import inspect
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ssl_bench.errors import CheckpointError, broken_file_error, escape_braces, with_hint
from ssl_bench.layers import parse_layer_numbers, resolve_layers
from ssl_bench.models.encoder import ASSUMED, DINO_NAMES, Contents, Encoder, EncoderIdentity
from ssl_bench.models.loading.addresses import (
    COLOURS,
    LAST,
    OWN,
    RANDOM,
    WEIGHTS,
    expand,
    file_of,
    kept_epoch,
    name_of,
    with_baselines,
)
from ssl_bench.models.loading.checkpoint import (
    is_ours,
    load_own_encoder,
    read_metadata,
    reject_parts,
    stated_encoder,
)
from ssl_bench.system.files import expand_path, resolve_links
from ssl_bench.system.output import format_duration, say

_SEED = 0

# By width and depth; timm has all of them for patches and images of these sizes.
_SIZES_IN_TIMM = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"}
_PATCH_IN_TIMM, _SIDES_IN_TIMM = 16, (224, 384)
# Of any encoder; only to know whether what was typed are numbers.
_DEEPEST = 9999
# Mean and deviation of an encoder whose file does not say them: one number, or three with /.
_STATED = re.compile(r"mean=([\d./]+),std=([\d./]+):(.+)", re.DOTALL)
_KINDS = (
    f"a run folder, RUN@EPOCH, a file ({', '.join(WEIGHTS)}), FILE.py:NAME, timm:NAME, "
    "timm:NAME.TAG, timm:NAME@FILE, hf-hub:ORG/NAME, local-dir:FOLDER, "
    "torchhub:facebookresearch/dino:dino_vits16, demo:skip, random:URI or colours:PATCH; "
    "`ssl-bench models` lists them"
)


def load_encoder(uri: str) -> Encoder:
    """Load the frozen encoder that `uri` names; nothing that a file of weights holds is ever run.

    Args:
        uri: Our checkpoint, its run folder, or `RUN@EPOCH` for one it kept; a local file in the
            layout of DINO, DINOv2, MAE, iBOT or MoCo-v3; `timm:NAME` (random weights),
            `timm:NAME.TAG` (published), `timm:NAME@FILE`; `hf-hub:ORG/NAME@REVISION`;
            `local-dir:FOLDER`; `torchhub:REPOSITORY:NAME`; `demo:skip` and `demo:skipless`, which
            come with this suite; `mean=0.5,std=0.5:URI`, an encoder whose file does not say what
            its images are normalised by; `FILE.py:NAME`, a module of one's own, whose file is run;
            `random:URI`, that encoder before it was trained;
            `colours:PATCH`, patches as they are.

    Raises:
        CheckpointError: In one line, what was expected, what came and what to do.
    """
    if uri.startswith("mean="):
        return _with_stated_colours(uri)
    scheme, colon, rest = uri.partition(":")
    if scheme == RANDOM and colon:
        from ssl_bench.models.loading.baselines import random_encoder

        return random_encoder(load_encoder(rest), uri)
    if own := OWN.fullmatch(uri):
        return _from_own_file(uri, own[1], own[2])
    if not colon:
        return _from_path(uri)
    if scheme == COLOURS:
        from ssl_bench.models.loading.baselines import colour_patches

        return colour_patches(uri)
    if scheme == "timm":
        # timm takes seconds to import.
        from ssl_bench.models.loading.timm_encoder import load_timm

        return load_timm(uri)
    if scheme in ("hf-hub", "local-dir"):
        from ssl_bench.models.loading.hugging_face import load_hugging_face

        return load_hugging_face(uri)
    if scheme == "torchhub":
        return _from_torch_hub(uri)
    if scheme == "torchvision":
        raise CheckpointError(
            f"{uri}: addresses of torchvision are not supported; save the state_dict() of its "
            f"Vision Transformer and give that file, or give {_KINDS}",
            hint=("ssl-bench", "models"),
        )
    return _from_path(uri)


def identify_encoder(uri: str) -> EncoderIdentity:
    """The identity that `load_encoder(uri)` will have.

    Milliseconds for a checkpoint of ours, whose header and sha256 file say it all; any other is
    loaded and let go again.

    Raises:
        CheckpointError: As `load_encoder`; damaged weights are found only there.
    """
    if (stated := stated_identity(uri)) is not None:
        return stated
    encoder = load_encoder(uri)
    return EncoderIdentity(
        **{item.name: getattr(encoder, item.name) for item in fields(EncoderIdentity)}
    )


def stated_identity(uri: str) -> EncoderIdentity | None:
    """As `identify_encoder` of a checkpoint of ours; None for any other, which takes seconds.

    Raises:
        CheckpointError: As `stated_encoder`.
    """
    path = file_of(uri)
    is_stated = path.suffix == ".safetensors" and path.is_file() and is_ours(path)
    return stated_encoder(uri, path) if is_stated else None


def _with_stated_colours(uri: str) -> Encoder:
    """An encoder with another mean and deviation than were assumed: another encoder."""
    found = _STATED.fullmatch(uri)
    try:
        words = found.groups()[:2] if found else ("", "")
        mean, std = ([float(number) for number in part.split("/")] for part in words)
    except ValueError:
        mean, std = [], []
    mean, std = (one * 3 if len(one) == 1 else one for one in (mean, std))
    if found is None or len(mean) != 3 or len(std) != 3 or max(mean) > 1 or not 0 < min(std) <= 1:
        raise CheckpointError(
            "expected mean=NUMBERS,std=NUMBERS:URI, of images from 0 to 1 and no deviation of 0, "
            f"got {uri!r}",
            hint=(
                "--checkpoint",
                "mean=0.5,std=0.5:{file}",
                "or",
                "--checkpoint",
                "mean=0.48/0.46/0.41,std=0.27/0.26/0.28:{file}",
            ),
        )
    if found[3].startswith(("hf-hub:", "local-dir:")):
        from ssl_bench.models.loading.hugging_face import load_hugging_face

        encoder = load_hugging_face(found[3], colours_stated=True)
    else:
        encoder = load_encoder(found[3])
    if not encoder.colours_from.startswith("assumed"):
        raise CheckpointError(
            f"{encoder.uri} has a mean and deviation of its own ({encoder.colours_from}), got "
            f"{uri!r}; leave them out of the address"
        )
    colours = (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
    return replace(encoder, uri=uri, mean=colours[0], std=colours[1], colours_from="the address")


def _from_torch_hub(uri: str) -> Encoder:
    from ssl_bench.models.loading.foreign import load_foreign
    from ssl_bench.models.loading.hub import HUB_WEIGHTS, downloaded_file

    # A branch may follow the repository, as torch.hub writes it: REPOSITORY:main:NAME.
    match = re.fullmatch(r"torchhub:([^:]+):(?:[^:]+:)?([^:]+)", uri)
    repository, name = (match[1], match[2]) if match else ("", "")
    url = HUB_WEIGHTS.get(repository, {}).get(name)
    if url is None:
        known = (f"torchhub:{repo}:{one}" for repo, names in HUB_WEIGHTS.items() for one in names)
        raise CheckpointError(f"unknown {uri!r}; known are {', '.join(known)}")
    return load_foreign(downloaded_file(url), uri=uri, name=name)


def _from_path(uri: str) -> Encoder:
    path = file_of(uri)
    if path.name == LAST and not path.is_file() and path.with_name("config.json").is_file():
        folder = path.parent
        raise CheckpointError(
            f"{folder} is a folder of Hugging Face",
            hint=("--checkpoint", f"local-dir:{escape_braces(str(folder))}"),
        )
    reject_parts(path)
    if not path.is_file():
        names: list[str] = []
        with suppress(OSError):
            names = [one.name for one in path.parent.iterdir()]
        near = get_close_matches(path.name, names, n=1, cutoff=0.8)
        address = escape_braces(str(path.with_name(near[0]))) if near else _address_of(uri)
        raise CheckpointError(
            f"no checkpoint at {path}" + ("" if address else f"; give {_KINDS}"),
            hint=("--checkpoint", address) if address else ("ssl-bench", "models"),
        )
    if path.suffix == ".py":
        raise CheckpointError(
            f"{path} is Python; name the module in it",
            hint=("--checkpoint", f"{escape_braces(str(path))}:{{name}}"),
        )
    if path.suffix != ".safetensors" or not is_ours(path):
        from ssl_bench.models.loading.foreign import load_foreign

        return load_foreign(path, uri=uri, name=name_of(path))
    return load_own_encoder(uri, path)


def _from_own_file(uri: str, file: str, name: str) -> Encoder:
    """Load `FILE.py:NAME`: a module, an `Encoder`, or a function without arguments that gives one.

    The file is run, as `python FILE.py` would run it, with its folder among those of imports.
    What it draws at random is always the same.
    """
    path = resolve_links(expand_path(file))
    if not path.is_file():
        raise CheckpointError(f"no file {path}", hint=("--checkpoint", "{file}.py:{name}"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        given = _called(path, name)
    if isinstance(given, Encoder):
        return replace(given, uri=uri)
    if not isinstance(given, nn.Module):
        raise CheckpointError(
            f"{name} of {path} gives a {type(given).__name__}; expected a torch.nn.Module, an "
            "ssl_bench.Encoder, or a function without arguments that returns one"
        )
    encoder = Encoder.from_module(given, name=f"{path.stem}.{name}")
    return replace(encoder, uri=uri, contents=Contents("module", file=path))


def _called(path: Path, name: str) -> Any:
    """What a name of a file stands for; called, where it is a function or a class."""
    spec = importlib.util.spec_from_file_location(f"ssl_bench_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its classes are asked for their source, which is found by the name of their module.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            known = [
                key
                for key, value in vars(module).items()
                if not key.startswith("_")
                and (callable(value) or isinstance(value, Encoder))
                # Not the classes and functions that it imports.
                and (not isinstance(value, type | FunctionType) or value.__module__ == spec.name)
            ]
            raise CheckpointError(f"{path} has no {name}; it has {', '.join(known) or 'nothing'}")
        found = getattr(module, name)
        if isinstance(found, nn.Module) or not callable(found):
            return found
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise CheckpointError(
                f"{path}:{name} cannot be called without arguments ({error}); name a function that "
                "makes the module"
            ) from error
        return found()
    except CheckpointError:
        raise
    except Exception as error:  # Somebody's file may fail in any way.
        raise CheckpointError(str(broken_file_error(error, ()))) from error
    finally:
        sys.path.remove(str(path.parent))


def _address_of(name: str) -> str | None:
    """Return the address of a model that is known elsewhere by a name, as a word of a hint."""
    from ssl_bench.models.loading.hub import HUB_WEIGHTS

    own = re.fullmatch(r"(.+):(\w+)", name)
    if own and Path(f"{own[1]}.py").is_file():
        return escape_braces(f"{own[1]}.py:{own[2]}")
    for repository, names in HUB_WEIGHTS.items():
        if name in names:
            return f"torchhub:{repository}:{name}"
    if re.fullmatch(r"[\w-]+/[\w.-]+", name) and not Path(name).parent.is_dir():
        return f"hf-hub:{name}"
    if "/" in name:
        return None
    import timm

    if not timm.is_model(name.partition(".")[0]):
        return None
    return f"timm:{name}" if "." in name else f"timm:{name}.{{tag}}"


def encoder_addresses(checkpoints: Sequence[str], *, baselines: bool) -> list[str]:
    """Return the addresses of all encoders to probe.

    Args:
        checkpoints: Addresses and patterns. If there are none, the newest run below `runs/`
            is used.
        baselines: Add untrained encoders and raw colours.
    """
    uris = expand(checkpoints or [newest_checkpoint(Path("runs"))])
    if not baselines:
        return uris
    if own := ", ".join(filter(OWN.fullmatch, uris)):
        say(f"without random weights of {own}: name a function of the file that draws them too")
    return with_baselines(uris, [identify_encoder(uri).patch_size for uri in uris])


def require_layers(layers: str | int | Sequence[int], checkpoints: Sequence[str]) -> None:
    """Refuse blocks that an encoder lacks before images are looked for, where its file says it.

    Raises:
        ConfigurationError: no numbers, or blocks outside of an encoder.
    """
    if layers != "all":
        parse_layer_numbers(layers, _DEEPEST)
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
    is_unnamed = encoder.contents.layout == DINO_NAMES and file and "dino" not in file.name.lower()
    if encoder.colours_from == ASSUMED and is_unnamed:
        size, side = _SIZES_IN_TIMM.get((encoder.dim, encoder.depth)), encoder.native_size[0]
        address = f"mean=0.5,std=0.5:{escape_braces(str(file))}"
        if size and encoder.patch_size == _PATCH_IN_TIMM and side in _SIDES_IN_TIMM:
            address = f"timm:vit_{size}_patch{_PATCH_IN_TIMM}_{side}@{escape_braces(str(file))}"
        line = "if it was trained with timm, its normalisation may differ"
        say(with_hint(line, hint=("--checkpoint", address)))
    return encoder


def newest_checkpoint(folder: Path) -> str:
    """Path of the encoder weights below a folder that were written last; says which it is.

    Raises:
        CheckpointError: there are none.
    """
    newest = _newest(folder)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint below {folder}/",
            hint=("--checkpoint", "demo:skip", "or", "ssl-bench", "pretrain"),
        )
    ago = format_duration(max(0.0, time.time() - newest.stat().st_mtime))
    steps = ""
    with suppress(CheckpointError):
        if "step" in (told := read_metadata(newest)):
            steps = f"trained for {told['step']} steps, "
    say(f"using the newest checkpoint below {folder}/: {newest}, {steps}written {ago} ago")
    return str(newest)


def _newest(folder: Path) -> Path | None:
    files = [path for path in folder.glob("**/*.safetensors") if path.is_file()]
    found = [path for path in files if kept_epoch(path) is None]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
