"""Load the frozen encoder at an address, and find the encoders that a command evaluates."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import torch

from ssl_bench.composition.choices import entry_points, load_entry_point
from ssl_bench.errors import (
    BrokenFileError,
    CheckpointError,
    SslBenchError,
    broken_file_error,
    escape_braces,
    with_hint,
)
from ssl_bench.layers import parse_layer_numbers, resolve_layers
from ssl_bench.models.encoder import ASSUMED, DINO_NAMES, Encoder, EncoderIdentity
from ssl_bench.models.loading.addresses import (
    FILE_AND_NAME,
    LAST_CHECKPOINT,
    add_baselines,
    display_name,
    expand_addresses,
    has_random_baseline,
    is_baseline,
    parse_epoch,
    resolve_file,
)
from ssl_bench.models.loading.checkpoint import (
    is_suite_checkpoint,
    load_suite_encoder,
    read_identity,
    read_metadata,
    reject_sharded,
)
from ssl_bench.system.device import preserve_process_state
from ssl_bench.system.output import format_duration, print_message

_SEED = 0
# timm's names of model sizes, by width and depth. timm has a ViT of each size for patches of 16
# pixels and images of 224 or 384 pixels.
_SIZES_IN_TIMM = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"}
_PATCH_IN_TIMM, _SIDES_IN_TIMM = 16, (224, 384)
# A depth that no encoder reaches. It is used to check only the form of layer numbers.
_MAX_DEPTH = 9999
_NORMALIZED = re.compile(r"mean=([\d./]+),std=([\d./]+):(.+)", re.DOTALL)


@dataclass(frozen=True)
class Address:
    """One form of an encoder's address, as `ssl-bench models` lists it.

    Attributes:
        form: Address with placeholders, such as `timm:NAME@FILE`.
        example: An example of such an address. Empty if the loader provides no example.
        meaning: Description of the encoder that such an address loads.
    """

    form: str
    example: str
    meaning: str


_HUB_EXAMPLE = "torchhub:facebookresearch/dino:dino_vits16"
ADDRESSES = (
    Address("FOLDER", "runs/skip", "run folder (its last.safetensors)"),
    Address("FOLDER@EPOCH", "runs/skip@200", "encoder that a run saved at an epoch"),
    Address("FILE.safetensors", "runs/skip/last.safetensors", "checkpoint of ssl-bench"),
    Address("FILE", "dinov2_vits14_pretrain.pth", "weights in a layout listed below"),
    Address("FILE.py:NAME", "my_model.py:encoder", "your own module (runs the file)"),
    Address("timm:NAME.TAG", "timm:vit_small_patch16_224.dino", "published timm weights"),
    Address(
        "timm:NAME@FILE", "timm:vit_small_patch16_224@mine.pth", "timm model with your weights"
    ),
    Address("timm:NAME", "timm:vit_small_patch16_224", "timm model with random weights"),
    Address("hf-hub:ORG/NAME@REVISION", "hf-hub:facebook/dinov2-small", "timm or transformers"),
    Address(
        "local-dir:FOLDER", "local-dir:/models/dinov2-small", "config.json and model.safetensors"
    ),
    Address("torchhub:REPOSITORY:NAME", _HUB_EXAMPLE, "weights of torch hub (its code is not run)"),
    Address("demo:NAME", "demo:skip", "built-in encoder (skip or skipless)"),
    Address("mean=0.5,std=0.5:URI", "mean=0.5,std=0.5:my.pth", "URI with this image normalisation"),
    Address("random:URI", "random:runs/skip", "encoder of URI with random weights"),
    Address("colours:PATCH", "colours:16", "raw colours of patches of this size"),
)
LOADERS = {
    "timm": "timm_encoder.load_timm",
    "hf-hub": "hugging_face.load_hugging_face",
    "local-dir": "hugging_face.load_hugging_face",
    "torchhub": "hub.load_torch_hub",
    "demo": "load.load_path",
    "random": "baselines.load_random",
    "colours": "baselines.load_colours",
}
"""Module and function of each built-in loader, by scheme (the text before the colon).

A module is only imported when it is needed, because timm takes seconds to import. Other packages
add loaders as entry points in the group `ssl_bench.encoder`. The name of the entry point is the
scheme, and its function takes the whole address and returns an `Encoder`.
"""


def list_addresses() -> list[Address]:
    """Return all supported forms of encoder addresses, including forms that packages add.

    A package adds a form of address by a loader function. The attribute `example` of this function
    is an example of such an address. If the function has no such attribute or cannot be imported,
    the example is empty.
    """
    added: list[Address] = []
    for scheme, point in entry_points("encoder").items():
        example = ""
        with suppress(BrokenFileError):
            example = getattr(load_entry_point(point), "example", "")
        added.append(Address(f"{scheme}:ADDRESS", example, f"loader {point.value}"))
    return [*ADDRESSES, *added]


def load_encoder(uri: str) -> Encoder:
    """Load a frozen encoder from an address, such as a path or `timm:NAME`.

    Code in a weights file is never run.

    Args:
        uri: One of these addresses:

            - `RUN`, `RUN@EPOCH` or `FILE.safetensors`: a checkpoint of this suite.
            - `FILE`: weights in the layout of DINO, DINOv2, MAE, iBOT, MoCo-v3, torchvision or
              mmpretrain, or an ONNX file.
            - `FILE.py:NAME`: a user's module. The Python file is run.
            - `timm:NAME` (random weights), `timm:NAME.TAG` (published) or `timm:NAME@FILE`.
            - `hf-hub:ORG/NAME@REVISION`, `local-dir:FOLDER` or `torchhub:REPOSITORY:NAME`.
            - `demo:skip` or `demo:skipless`: small encoders of this suite.
            - `random:URI`: the encoder at URI with initial weights.
            - `colours:PATCH`: raw colours of patches of PATCH x PATCH pixels.
            - `mean=0.5,std=0.5:URI`: the encoder at URI with this image normalisation, if its file
              states none.
            - `SCHEME:ADDRESS`: an encoder from the loader of an installed package.

    Raises:
        CheckpointError: The encoder cannot be loaded. The message says which address or file was
            expected.
    """
    with preserve_process_state():
        # Make loaders that draw random numbers reproducible.
        torch.manual_seed(_SEED)
        return _find_loader(uri)(uri)


def _find_loader(uri: str) -> Callable[[str], Encoder]:
    """Return the function that loads the encoder at an address.

    The forms of addresses are tried in this order: `mean=...:URI`, the schemes in `LOADERS`,
    `FILE.py:NAME`, the schemes of installed packages, paths. Installed packages therefore cannot
    replace a scheme in `LOADERS`.
    """
    scheme, colon, _ = uri.partition(":")
    if uri.startswith("mean="):
        return _load_normalized
    if colon and scheme in LOADERS:
        module, _, function = LOADERS[scheme].partition(".")
        return getattr(import_module(f"ssl_bench.models.loading.{module}"), function)
    if FILE_AND_NAME.fullmatch(uri):
        from ssl_bench.models.loading.own_module import load_python_object

        return load_python_object
    if colon and (point := entry_points("encoder").get(scheme)):
        return lambda uri: _load_by_entry_point(point, uri)
    return load_path


def _load_by_entry_point(point: EntryPoint, uri: str) -> Encoder:
    """Load an encoder with the loader of an installed package, and check the type of the result.

    Args:
        point: Entry point that refers to the loader.
        uri: Address of the encoder.

    Raises:
        CheckpointError: The loader raised an unexpected error, or returned something other than an
            `Encoder`.
    """
    source = f"the encoder loader {point.name} = {point.value}"
    try:
        encoder = load_entry_point(point)(uri)
    except SslBenchError:
        raise
    except Exception as error:  # Code of another package can raise any exception.
        reason = broken_file_error(error, [point.module.partition(".")[0]])
        raise CheckpointError(f"{source} could not load {uri}: {reason}") from error
    if not isinstance(encoder, Encoder):
        raise CheckpointError(
            f"{source} returned a {type(encoder).__name__}, expected an ssl_bench.Encoder"
        )
    return replace(encoder, uri=uri)


def identify_encoder(uri: str) -> EncoderIdentity:
    """Return the properties that identify the encoder at an address, such as its SHA-256.

    For a checkpoint of this suite, only the header and the .sha256 file are read, so damaged
    weights are not detected. To identify any other encoder, this function loads the encoder.

    Raises:
        CheckpointError: The encoder cannot be loaded.
    """
    if (stated := read_header_identity(uri)) is not None:
        return stated
    encoder = load_encoder(uri)
    return EncoderIdentity(
        **{item.name: getattr(encoder, item.name) for item in fields(EncoderIdentity)}
    )


def read_header_identity(uri: str) -> EncoderIdentity | None:
    """Return the properties of an encoder that are stored in the header of its checkpoint.

    Return None if the address does not belong to a checkpoint of this suite.

    Raises:
        CheckpointError: The header of the checkpoint cannot be read.
    """
    path = resolve_file(uri)
    is_stated = path.suffix == ".safetensors" and path.is_file() and is_suite_checkpoint(path)
    return read_identity(uri, path) if is_stated else None


def _load_normalized(uri: str) -> Encoder:
    """Load the encoder at URI for an address `mean=...,std=...:URI`.

    The encoder normalises images by the mean and standard deviation in the address.

    Raises:
        CheckpointError: The address is malformed, or the file at URI states its own normalisation.
    """
    match = _NORMALIZED.fullmatch(uri)
    try:
        texts = match.groups()[:2] if match else ("", "")
        mean, std = ([float(number) for number in text.split("/")] for text in texts)
    except ValueError:
        mean, std = [], []
    mean, std = (values * 3 if len(values) == 1 else values for values in (mean, std))
    is_valid = all(0 <= one <= 1 for one in mean) and all(0 < one <= 1 for one in std)
    if match is None or len(mean) != 3 or len(std) != 3 or not is_valid:
        raise CheckpointError(
            "expected mean=NUMBERS,std=NUMBERS:URI with a mean in [0, 1] and a standard deviation "
            f"in (0, 1], got {uri!r}",
            hint=(
                "--checkpoint",
                "mean=0.5,std=0.5:{file}",
                "or",
                "--checkpoint",
                "mean=0.48/0.46/0.41,std=0.27/0.26/0.28:{file}",
            ),
        )
    if match[3].startswith(("hf-hub:", "local-dir:")):
        from ssl_bench.models.loading.hugging_face import load_hugging_face

        encoder = load_hugging_face(match[3], allow_missing_preprocessor=True)
    else:
        encoder = load_encoder(match[3])
    if not encoder.normalization_source.startswith("assumed"):
        raise CheckpointError(
            f"{encoder.uri} already has a mean and standard deviation "
            f"({encoder.normalization_source}), so the address must not state others",
            hint=("--checkpoint", escape_braces(match[3])),
        )
    return replace(
        encoder,
        uri=uri,
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
        normalization_source="the address",
    )


def load_path(uri: str) -> Encoder:
    """Load a checkpoint of this suite, a demo encoder, or a weights file of another project.

    `uri` is a path, a run folder, `RUN@EPOCH` or `demo:NAME`.
    """
    path = resolve_file(uri)
    is_missing = path.name == LAST_CHECKPOINT and not path.is_file()
    if is_missing and path.with_name("config.json").is_file():
        folder = path.parent
        raise CheckpointError(
            f"{folder} is a folder in the Hugging Face format, expected a run folder",
            hint=("--checkpoint", f"local-dir:{escape_braces(str(folder))}"),
        )
    reject_sharded(path)
    if not path.is_file():
        names: list[str] = []
        with suppress(OSError):
            names = [file.name for file in path.parent.iterdir()]
        near = get_close_matches(path.name, names, n=1, cutoff=0.8)
        address = escape_braces(str(path.with_name(near[0]))) if near else _guess_address(uri)
        forms = ", ".join(address.form for address in list_addresses())
        raise CheckpointError(
            f"no checkpoint at {path}" + ("" if address else f", expected one of {forms}"),
            hint=("--checkpoint", address) if address else ("ssl-bench", "models"),
        )
    if path.suffix == ".py":
        raise CheckpointError(
            f"{path} is a Python file, expected FILE.py:NAME with the name of an encoder",
            hint=("--checkpoint", f"{escape_braces(str(path))}:{{name}}"),
        )
    if path.suffix != ".safetensors" or not is_suite_checkpoint(path):
        from ssl_bench.models.loading.foreign import load_foreign

        return load_foreign(path, uri=uri, name=display_name(path))
    return load_suite_encoder(uri, path)


def _guess_address(name: str) -> str | None:
    """Guess the encoder address that a user meant by a name, or return None if unknown.

    For example, `dino_vits16` is in torch hub, and `facebook/dinov2-small` is on Hugging Face. The
    address is a suggestion for an error message, and may contain a placeholder such as {tag}.
    """
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
        checkpoints: Addresses and patterns such as `runs/*`. If empty, the newest checkpoint below
            `runs/` is used.
        baselines: Whether to add untrained baselines: each encoder with random weights, and raw
            patch colours.
    """
    uris = expand_addresses(checkpoints or [newest_checkpoint(Path("runs"))])
    if not baselines:
        return uris
    unknown = [uri for uri in uris if not is_baseline(uri) and not has_random_baseline(uri)]
    if unknown:
        print_message(
            f"no random baseline for {', '.join(unknown)}, because the initialisation is unknown"
        )
    return add_baselines(uris, [identify_encoder(uri).patch_size for uri in uris])


def require_layers(layers: str | int | Sequence[int], checkpoints: Sequence[str]) -> None:
    """Check that encoders have the layers (blocks) to probe, before any encoder is loaded.

    The number of blocks is read from the header of checkpoints of this suite. Encoders from other
    sources are not checked, because loading them takes long.

    Args:
        layers: Requested layers, as numbers, a text such as "0-3", or "all".
        checkpoints: Addresses of the encoders, and patterns such as `runs/*`. If empty, the newest
            checkpoint below `runs/` is checked.

    Raises:
        ConfigurationError: The layers are not numbers, or a checkpoint does not have these layers.
    """
    if layers != "all":
        parse_layer_numbers(layers, _MAX_DEPTH)
    newest = None if checkpoints else _find_newest(Path("runs"))
    for uri in expand_addresses(checkpoints or ([str(newest)] if newest else [])):
        # Other errors are reported when the encoder is loaded.
        with suppress(CheckpointError):
            if (encoder := read_header_identity(uri)) is not None:
                resolve_layers(layers, encoder.depth)


def load_and_log(uri: str) -> Encoder:
    """Load an encoder, and print its depth, SHA-256, normalisation and notes of the loader."""
    encoder = load_encoder(uri)
    loaded = f"{encoder.loaded_keys} of {encoder.total_keys} tensors of the file loaded"
    mean, std = (" ".join(f"{value:g}" for value in rgb) for rgb in (encoder.mean, encoder.std))
    print_message(
        f"encoder {encoder.name}: {encoder.depth} blocks, sha256 {encoder.sha256[:12]}, "
        f"{loaded if encoder.total_keys else 'not read from a file'}, mean {mean}, std {std} "
        f"({encoder.normalization_source})"
    )
    if (info := encoder.weights_info).note:
        print_message(info.note)
    file = info.file
    # timm models have the same tensor names as DINO models.
    may_be_timm = info.layout == DINO_NAMES and file and "dino" not in file.name.lower()
    if encoder.normalization_source == ASSUMED and may_be_timm:
        size, side = _SIZES_IN_TIMM.get((encoder.dim, encoder.depth)), encoder.native_size[0]
        address = f"mean=0.5,std=0.5:{escape_braces(str(file))}"
        if size and encoder.patch_size == _PATCH_IN_TIMM and side in _SIDES_IN_TIMM:
            address = f"timm:vit_{size}_patch{_PATCH_IN_TIMM}_{side}@{escape_braces(str(file))}"
        line = "if it was trained with timm, its normalisation may differ"
        print_message(with_hint(line, hint=("--checkpoint", address)))
    return encoder


def newest_checkpoint(folder: Path) -> str:
    """Return the path of the newest checkpoint below a folder, and print this path.

    Files that store an intermediate epoch of a training run are ignored.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    newest = _find_newest(folder)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint below {folder}/",
            hint=("--checkpoint", "demo:skip", "or", "ssl-bench", "pretrain"),
        )
    ago = format_duration(max(0.0, time.time() - newest.stat().st_mtime))
    steps = ""
    with suppress(CheckpointError):
        if "step" in (metadata := read_metadata(newest)):
            steps = f"trained for {metadata['step']} steps, "
    print_message(
        f"using the newest checkpoint below {folder}/: {newest}, {steps}written {ago} ago"
    )
    return str(newest)


def _find_newest(folder: Path) -> Path | None:
    paths = folder.glob("**/*.safetensors")
    files = [path for path in paths if path.is_file() and parse_epoch(path) is None]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)
