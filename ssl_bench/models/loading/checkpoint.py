"""Read weights files of any source, and read and write our own checkpoints.

Our checkpoint is a safetensors file with its configuration and a file with its SHA-256 next to it.
All weights pass `usable`, whatever file they come from.
"""

import argparse
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, ConfigurationError, escape_braces
from ssl_bench.models.config import EncoderConfig, config_from_dict
from ssl_bench.models.encoder import (
    IMAGENET_COLOURS,
    Colours,
    Contents,
    Encoder,
    EncoderIdentity,
    configured,
    encoder_from_model,
    require_images,
)
from ssl_bench.models.loading.addresses import name_of
from ssl_bench.models.vit import EncoderModule
from ssl_bench.system.files import (
    describe_substitute,
    file_sha256,
    open_regular,
    read_digests,
    resolve_links,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.output import quote_command
from ssl_bench.system.process import reraise_out_of_memory

_FORMAT = "ssl-bench"
_VERSION = "1"
# What a checkpoint holds that does not say it, as all did when there was one kind.
_UNNAMED_KIND = "vit"
_SMALL_FILE = 2**20
# Hugging Face splits large models.
_PART = re.compile(r".*-\d{5}-of-\d{5}\.(?:safetensors|bin)")
# Of numbers in a config.json.
_LARGEST = 1e9
# Not those of 8 bits: the factors that they are stored with stand elsewhere.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = re.compile(r"(?:.*\.)?(?:num_batches_tracked|relative_position_index|position_ids)")
# Other zips than torch.save writes: by a name in them, what they are and what gives their weights.
_ARCHIVES = (
    (r".*/code/.*", "a TorchScript module", "torch.jit.load({!r}).state_dict()"),
    (r".*/archive_format", "a torch.export program", "torch.export.load({!r}).state_dict"),
    (r".*\.npy", "NumPy arrays", "{{n: torch.tensor(v) for n, v in numpy.load({!r}).items()}}"),
)
_NUMPY_SCALAR = np.float64(0).__reduce__()[0]
# Plain data that official DINO checkpoints hold beside the weights. None of them runs code.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    np.dtypes.Float32DType,
    np.dtypes.Float64DType,
    np.dtypes.Int64DType,
    _NUMPY_SCALAR,
    (_NUMPY_SCALAR, "numpy.core.multiarray.scalar"),
]


def save_encoder(path: Path, model: EncoderModule, metadata: Mapping[str, str]) -> None:
    """Write weights, configuration and `metadata`; equal content gives equal bytes.

    A kill at any moment leaves a file that loads: while the weights are replaced, the sha256 file
    names the old and the new ones.

    Raises:
        MachineError: The folder cannot be written or the disk is full; older files stay intact.
    """
    ours = {"format": _FORMAT, "version": _VERSION, "config": json.dumps(model.config.to_dict())}
    if model.config.kind != _UNNAMED_KIND:
        ours["kind"] = model.config.kind
    if (shape := model.config.shape) is not None:
        # So that nobody has to ask timm, and torch, which blocks there are.
        ours["strides"] = json.dumps(shape.strides)
    content = _serialised(model.state_dict(), {**metadata, **ours})
    line = f"{sha256(content).hexdigest()}  {path.name}\n"
    sidecar = sidecar_of(path)
    if path.is_file() and is_there(sidecar):
        before = "".join(f"{digest}  {name}\n" for digest, name in read_digests(sidecar))
        write_text_atomically(sidecar, before + line)
    write_atomically(path, lambda file: file.write(content))
    write_text_atomically(sidecar, line)


def load_own_encoder(uri: str, path: Path) -> Encoder:
    """The frozen encoder in a file of ours."""
    model, digest = load_checkpoint(path)
    metadata, keys = read_metadata(path), len(model.state_dict())
    epoch = metadata.get("epoch", "")
    trained = float(epoch) if re.fullmatch(r"\d+(\.\d+)?", epoch) else None
    return encoder_from_model(
        model,
        name=name_of(path),
        uri=uri,
        sha256=digest,
        keys=(keys, keys),
        colours=_stated_colours(path, metadata),
        contents=Contents("ssl-bench", file=path, epoch=trained),
    )


def load_checkpoint(path: Path) -> tuple[EncoderModule, str]:
    """The model that `save_encoder` wrote and the sha256 of its file."""
    with unreplaced(path):
        digest, sidecar = verified_sha256(path), sidecar_of(path)
        if not is_there(sidecar):
            folder, name = quote_command([str(path.parent)]), quote_command([path.name])
            raise CheckpointError(
                f"{sidecar} is missing, so {path.name} cannot be verified; copy both files, or, "
                f"if you trust it, run: cd {folder} && sha256sum {name} > {name}.sha256"
            )
        metadata = read_metadata(path)
        if metadata.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} has format version {metadata.get('version')}, this program reads "
                f"{_VERSION}; install a newer ssl-bench"
            )
        model = _stated_config(path, metadata).build_empty()
        load_weights(model, usable(read_weights(path), path), path)
    return model, digest


def colours_metadata(colours: Colours) -> dict[str, str]:
    """Metadata for `save_encoder` of an encoder whose images are not normalised as ImageNet's."""
    if colours == IMAGENET_COLOURS:
        return {}
    return {"mean": json.dumps(colours[0]), "std": json.dumps(colours[1])}


def _serialised(weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    content = safetensors.torch.save(tensors, dict(metadata))
    # The library writes the metadata in random order; sorted, equal weights have equal sha256.
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def stated_encoder(uri: str, path: Path) -> EncoderIdentity:
    """The encoder in a file of ours; its weights are not read if possible.

    The sha256 is the one beside the file, which loading holds the file against.
    """
    metadata = read_metadata(path)
    config = _stated_config(path, metadata)
    # Of every block, where they may differ.
    text = metadata.get("strides", "[]")
    try:
        strides = json.loads(text)
    except json.JSONDecodeError:
        strides = None
    if not isinstance(strides, list) or not all(type(one) is int and one > 0 for one in strides):
        raise CheckpointError(f"{path} states strides that are no whole numbers: {text[:80]}")
    require_images(config, uri)
    stated = read_digests(sidecar_of(path))
    # While the weights are replaced two lines stand there; others may speak of other files.
    is_single = [name for _, name in stated] == [path.name]
    digest = stated[0][0] if is_single else verified_sha256(path)
    return EncoderIdentity(
        uri,
        name_of(path),
        digest,
        configured(config, strides=strides),
        *_stated_colours(path, metadata),
        depth=len(strides) if strides else config.depth,
        patch_size=strides[0] if strides else config.patch_size,
        native_size=(config.image_size, config.image_size),
        num_heads=None if strides else config.num_heads,
        is_staged=(is_staged := len(set(strides)) > 1),
        has_cls=not is_staged and config.num_prefix_tokens > config.num_registers,
    )


def is_ours(path: Path) -> bool:
    """Whether a readable safetensors file was written by `save_encoder`."""
    return read_metadata(path).get("format") == _FORMAT


def _stated_colours(path: Path, metadata: Mapping[str, str]) -> Colours:
    found = [(0.0, 0.0, 0.0)] * 2
    for place, name in enumerate(("mean", "std")):
        text = metadata.get(name, json.dumps(IMAGENET_COLOURS[place]))
        try:
            red, green, blue = (float(value) for value in json.loads(text))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} states a mean or deviation of images that is not three numbers: "
                f"{text[:80]}"
            ) from error
        found[place] = (red, green, blue)
    return found[0], found[1]


def _stated_config(path: Path, metadata: Mapping[str, str]) -> EncoderConfig:
    try:
        kind = metadata.get("kind", _UNNAMED_KIND)
        return config_from_dict(kind, json.loads(metadata["config"]))
    except (KeyError, TypeError, json.JSONDecodeError, ConfigurationError) as error:
        raise CheckpointError(
            f"{path} holds a model configuration that cannot be read ({error}); "
            "it needs the version of ssl-bench that wrote it"
        ) from error


def read_metadata(path: Path) -> dict[str, str]:
    """What `save_encoder` wrote beside the weights: format, version, kind, config, step ..."""
    check_readable(path)
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}); it is cut or something else: "
            "copy or download it again"
        ) from error


IN_PYTHON = "name a function that loads it in Python (docs/python.md)"
PYTHON_FILE = ("--checkpoint", "{file}.py:{name}")
TIMM_NAME = ("--checkpoint", "timm:{timm_name}@{file}")
MODEL_FOLDER = ("--checkpoint", "local-dir:{folder}")
"""What is typed once the advice of `IN_PYTHON`, or that of `with_model_args`, is taken."""


def reject_parts(path: Path) -> None:
    """Refuse a part, or a folder of parts, of a checkpoint that is stored in several files."""
    folder = path if path.is_dir() else path.parent
    is_given = path.suffix == ".distcp" or path.name == ".metadata"
    if is_given or (not path.is_file() and next(folder.glob("*.distcp"), None)):
        whole = resolve_links(folder)
        joined = whole.with_name(f"{whole.name}.pth")
        way = ["python", "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
        raise CheckpointError(
            f"{folder} is a checkpoint of torch.distributed in several parts, expected one file; "
            f"run: {quote_command([*way, str(folder), str(joined)])}",
            hint=("--checkpoint", escape_braces(str(joined))),
        )
    if _PART.fullmatch(path.name):
        raise CheckpointError(
            f"{path} is one of several parts of a model, expected one file; save them in one: "
            "model.save_pretrained(FOLDER, max_shard_size='100GB')"
        )


def check_readable(path: Path) -> None:
    """Refuse what cannot be a weights file."""
    reject_parts(path)
    try:
        with open_regular(path) as file:
            substitute = describe_substitute(file.read(256))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}); give a weights file or a run folder"
        ) from error
    if substitute:
        raise CheckpointError(f"{path} {substitute}")


@contextmanager
def unreplaced(path: Path) -> Generator[None]:
    """Refuse what was read of a file that a running pretraining replaced meanwhile.

    Otherwise the sha256 of one checkpoint would stand beside the numbers of the next.
    """
    before = _stamp(path)
    try:
        yield
    finally:
        if _stamp(path) != before:
            raise CheckpointError(f"{path} was replaced while it was read; type the command again")


def verified_sha256(path: Path) -> str:
    """The sha256 of a file, compared with the one beside it where there is one."""
    check_readable(path)
    digest = file_sha256(path)
    sidecar = sidecar_of(path)
    if not is_there(sidecar):
        return digest
    expected = [stated for stated, _ in read_digests(sidecar)]
    if digest not in expected:
        raise CheckpointError(
            f"{path} has sha256 {digest[:12]}..., {sidecar.name} says "
            f"{' or '.join(item[:12] for item in expected) or 'nothing'}...; the file was cut or "
            "changed: copy or download both again"
        )
    return digest


def sidecar_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def is_there(sidecar: Path) -> bool:
    try:
        return sidecar.is_file()
    # The name of the weights may be so long that none beside it can be longer.
    except OSError:
        return False


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def colour_of(described: Mapping[str, Any], key: str, path: Path) -> tuple[float, float, float]:
    """Mean or deviation of red, green and blue in a configuration; a deviation ends with std."""
    value: Any = described.get(key)
    numbers: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value] * 3
    sound = len(numbers) == 3 and all(is_number(one) for one in numbers)
    if not sound or (key.endswith("std") and min(numbers) <= 0):
        raise CheckpointError(
            f"{path}: expected {key} of red, green and blue, three numbers and no deviation of 0, "
            f"came {value!r}; fetch it again"
        )
    red, green, blue = map(float, numbers)
    return red, green, blue


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number as images and norms have them."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def read_weights(path: Path) -> dict[str, Any]:
    """What a weights file holds: names to tensors, or containers of them."""
    check_readable(path)
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        # torch warns about unusual pickles; whether they load is all that matters here.
        ignoring = warnings.catch_warnings(action="ignore", category=UserWarning)
        with ignoring, torch.serialization.safe_globals(_HARMLESS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL (\S+)", str(error))
        if culprit is None:
            raise CheckpointError(_no_weights(path, "no pickle of torch")) from error
        if culprit[1].startswith("torch.distributed"):
            raise CheckpointError(
                f"{path} holds {culprit[1]}: it is the part of one process of a distributed run; "
                "gather the whole state_dict() in that run, and save it"
            ) from error
        raise CheckpointError(
            f"{path} holds {culprit[1]}, which could run code, so nothing of it was read; where "
            "you trust it, load it and save only its tensors with safetensors.torch.save_file"
        ) from error
    except Exception as error:  # A damaged file makes its reader fail in any way.
        # What asks for more than there is of a small file is damage.
        if path.stat().st_size > _SMALL_FILE:
            reraise_out_of_memory(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(_no_weights(path, reason[:120])) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, expected names and tensors; "
            "save model.state_dict() instead"
        )
    return dict(content)


def usable(weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The gate for weights of all sources: dense floating numbers, on the CPU."""
    for name, value in weights.items():
        is_index = value.dtype == torch.int64 and _INTEGERS.fullmatch(name)
        is_number = value.dtype in _FLOATS or is_index
        if not is_number or value.layout != torch.strided or value.device.type != "cpu":
            kind = f"{value.dtype}, {value.layout}, on {value.device}".replace("torch.", "")
            raise CheckpointError(
                f"{path}: {name} is {kind}; expected dense floating numbers of 16, 32 or 64 bits "
                "on the CPU: save the weights as they were trained"
            )
    return dict(weights)


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], path: Path, *, hint: Sequence[str] = ()
) -> None:
    """Copy `weights` into `model`; every name and shape must fit."""
    wanted = model.state_dict()
    wrong = {
        "missing": [name for name in wanted if name not in weights],
        "unknown": [name for name in weights if name not in wanted],
        "of another shape": [
            f"{name} ({shape_text(weights[name])}, expected {shape_text(wanted[name])})"
            for name in wanted
            if name in weights and weights[name].shape != wanted[name].shape
        ],
    }
    faults = [f"{named(names)} {kind}" for kind, names in wrong.items() if names]
    if faults:
        fitting = len(wanted) - len(wrong["missing"]) - len(wrong["of another shape"])
        raise CheckpointError(
            f"{path} does not fit the encoder: {fitting}/{len(wanted)} keys fit; "
            f"{'; '.join(faults)}",
            hint=hint,
        )
    model.load_state_dict(dict(weights))


def _no_weights(path: Path, reason: str) -> str:
    with suppress(Exception), zipfile.ZipFile(path) as archive:
        for pattern, what, weights in _ARCHIVES:
            if any(re.fullmatch(pattern, name) for name in archive.namelist()):
                return (
                    f"{path} holds {what}, expected names and tensors; save them: "
                    f"torch.save({weights.format(str(path))}, 'weights.pth')"
                )
    with path.open("rb") as file:
        begins = file.read(64)
    if begins and begins.isascii() and b"\0" not in begins:
        reason = "it begins as a text does"
    return f"{path} is no weights file, or a damaged one ({reason}); copy or download it again"


def with_model_args(path: Path, different: str, name: str = "NAME") -> str:
    """What to do with a model that timm made with arguments of one's own."""
    file = "model.safetensors" if path.suffix == ".safetensors" else "pytorch_model.bin"
    return (
        f'put it as {file} into a folder with a config.json, {{"architecture": '
        f'"{name}", "model_args": {{{different}}}}}'
    )


def shape_text(tensor: Tensor) -> str:
    """Such as `192 x 3 x 16 x 16`, for messages."""
    return " x ".join(str(size) for size in tensor.shape) or "one number"


def named(names: list[str]) -> str:
    """The first three of them, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
