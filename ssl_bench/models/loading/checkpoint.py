"""Read weights files from any source, and read and write checkpoints of this suite.

A checkpoint of this suite is a safetensors file, whose header contains the configuration of the
model. Next to the checkpoint, a second file such as last.safetensors.sha256 contains the SHA-256 of
the checkpoint.
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

from ssl_bench.errors import CheckpointError, escape_braces
from ssl_bench.models.config import EncoderConfig, config_from_dict
from ssl_bench.models.encoder import (
    IMAGENET_NORMALIZATION,
    Encoder,
    EncoderIdentity,
    Normalization,
    WeightsInfo,
    describe_config,
    encoder_from_model,
    require_image_encoder,
)
from ssl_bench.models.loading.addresses import display_name
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
# The kind of model in checkpoints that do not state a kind.
_UNNAMED_KIND = "vit"
_SMALL_FILE = 2**20
# Name of a shard, which is one of several weights files of a large Hugging Face model.
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.(?:safetensors|bin)")
# Largest absolute number in a config.json.
_LARGEST = 1e9
# Errors of json.loads. Brackets that are nested too deeply raise RecursionError.
JSON_ERRORS = (ValueError, RecursionError)
# 8-bit floats are not supported, because their scale factors are stored in separate tensors.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = re.compile(r"(?:.*\.)?(?:num_batches_tracked|relative_position_index|position_ids)")
# Zip files that were not written by torch.save: pattern of a file inside the zip file, description,
# and Python code that returns the weights.
_ARCHIVES = (
    (r".*/code/.*", "a TorchScript module", "torch.jit.load({!r}).state_dict()"),
    (r".*/archive_format", "a torch.export program", "torch.export.load({!r}).state_dict"),
    (r".*\.npy", "NumPy arrays", "{{n: torch.tensor(v) for n, v in numpy.load({!r}).items()}}"),
)
_NUMPY_SCALAR = np.float64(0).__reduce__()[0]
# Types in official DINO checkpoints that are safe to unpickle, because they run no code.
_ALLOWED_TYPES: list[Any] = [
    argparse.Namespace,
    np.dtype,
    np.dtypes.Float32DType,
    np.dtypes.Float64DType,
    np.dtypes.Int64DType,
    _NUMPY_SCALAR,
    (_NUMPY_SCALAR, "numpy.core.multiarray.scalar"),
]


def save_encoder(path: Path, model: EncoderModule, metadata: Mapping[str, str]) -> None:
    """Write a checkpoint with weights, configuration and metadata, and its .sha256 file.

    The .sha256 file contains the SHA-256 of the checkpoint. Equal arguments give bitwise identical
    files. If the process is killed, either the old or the new checkpoint can still be loaded: while
    the weights are replaced, the .sha256 file contains the SHA-256 of both.

    Raises:
        MachineError: The folder cannot be written, or the disk is full. Old files stay intact.
    """
    header = {"format": _FORMAT, "version": _VERSION, "config": json.dumps(model.config.to_dict())}
    if model.config.kind != _UNNAMED_KIND:
        header["kind"] = model.config.kind
    if (block_info := model.config.block_info) is not None:
        # Store the strides, so that `read_identity` does not import timm to compute them.
        header["strides"] = json.dumps(block_info.strides)
    content = _serialize(model.state_dict(), {**metadata, **header})
    line = f"{sha256(content).hexdigest()}  {path.name}\n"
    sidecar = _sidecar_path(path)
    if path.is_file() and _exists(sidecar):
        before = "".join(f"{digest}  {name}\n" for digest, name in read_digests(sidecar))
        write_text_atomically(sidecar, before + line)
    write_atomically(path, lambda file: file.write(content))
    write_text_atomically(sidecar, line)


def load_suite_encoder(uri: str, path: Path) -> Encoder:
    """Load the encoder in a checkpoint of this suite.

    `uri` is the address that the user entered, and `path` is the file to which it refers.
    """
    model, digest = load_checkpoint(path)
    metadata, keys = read_metadata(path), len(model.state_dict())
    epoch = metadata.get("epoch", "")
    trained = float(epoch) if re.fullmatch(r"\d+(\.\d+)?", epoch) else None
    return encoder_from_model(
        model,
        name=display_name(path),
        uri=uri,
        sha256=digest,
        keys=(keys, keys),
        normalization=_read_normalization(path, metadata),
        weights_info=WeightsInfo("ssl-bench", file=path, epoch=trained),
    )


def load_checkpoint(path: Path) -> tuple[EncoderModule, str]:
    """Return the model in a checkpoint of this suite, and the SHA-256 of the file."""
    with require_unchanged(path):
        digest, sidecar = verify_sha256(path), _sidecar_path(path)
        if not _exists(sidecar):
            folder, name = quote_command([str(path.parent)]), quote_command([path.name])
            raise CheckpointError(
                f"{sidecar} is missing, so {path.name} cannot be verified. Copy both files, or, "
                f"if you trust the file, run: cd {folder} && sha256sum {name} > {name}.sha256"
            )
        metadata = read_metadata(path)
        if metadata.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} has format version {metadata.get('version')}, but this program reads "
                f"version {_VERSION}. Install a newer ssl-bench"
            )
        model = _read_config(path, metadata).build_empty()
        load_weights(model, check_tensors(read_weights(path), path), path)
    return model, digest


def normalization_metadata(normalization: Normalization) -> dict[str, str]:
    """Return the mean and standard deviation of the training images as metadata of a checkpoint.

    For ImageNet's mean and standard deviation, which are the default, the result is empty.
    """
    if normalization == IMAGENET_NORMALIZATION:
        return {}
    return {"mean": json.dumps(normalization[0]), "std": json.dumps(normalization[1])}


def _serialize(weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    content = safetensors.torch.save(tensors, dict(metadata))
    # Sort the metadata, because the library writes them in random order, but equal checkpoints must
    # have the same SHA-256.
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def read_identity(uri: str, path: Path) -> EncoderIdentity:
    """Read the properties that identify the encoder in a checkpoint of this suite, but no weights.

    The SHA-256 is copied from the .sha256 file, if that file has a single line for this checkpoint.
    Otherwise, the SHA-256 is computed from the checkpoint. A copied SHA-256 is not verified until
    `load_checkpoint` loads the weights.

    Args:
        uri: Address of the encoder.
        path: The checkpoint.
    """
    metadata = read_metadata(path)
    config = _read_config(path, metadata)
    # If the blocks of a model may differ in stride, its checkpoint contains all strides.
    text = metadata.get("strides", "[]")
    try:
        strides = json.loads(text)
    except JSON_ERRORS:
        strides = None
    if not isinstance(strides, list) or not all(type(n) is int and n > 0 for n in strides):
        raise CheckpointError(f"{path} states strides that are not positive integers: {text[:80]}")
    require_image_encoder(config, uri)
    stated = read_digests(_sidecar_path(path))
    # The file has two lines while the weights are replaced, and it may list other files.
    is_single = [name for _, name in stated] == [path.name]
    digest = stated[0][0] if is_single else verify_sha256(path)
    mean, std = _read_normalization(path, metadata)
    is_staged = len(set(strides)) > 1
    return EncoderIdentity(
        uri=uri,
        name=display_name(path),
        sha256=digest,
        architecture=describe_config(config, strides=strides),
        patch_size=strides[0] if strides else config.patch_size,
        depth=len(strides) if strides else config.depth,
        num_heads=None if strides else config.num_heads,
        # timm's hierarchical encoders have no prefix tokens.
        num_prefix_tokens=0 if is_staged else config.num_prefix_tokens,
        native_size=(config.image_size, config.image_size),
        mean=mean,
        std=std,
        num_registers=0 if is_staged else config.num_registers,
        strides=tuple(strides),
    )


def is_suite_checkpoint(path: Path) -> bool:
    """Return whether `save_encoder` wrote this safetensors file."""
    return read_metadata(path).get("format") == _FORMAT


def _read_normalization(path: Path, metadata: Mapping[str, str]) -> Normalization:
    def read(name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        text = metadata.get(name, json.dumps(default))
        try:
            value = json.loads(text)
        except JSON_ERRORS:
            value = text
        return read_rgb({name: value}, name, path)

    mean, std = IMAGENET_NORMALIZATION
    return read("mean", mean), read("std", std)


def _read_config(path: Path, metadata: Mapping[str, str]) -> EncoderConfig:
    try:
        kind = metadata.get("kind", _UNNAMED_KIND)
        return config_from_dict(kind, json.loads(metadata["config"]))
    except (KeyError, TypeError, *JSON_ERRORS) as error:
        raise CheckpointError(
            f"{path} contains a model configuration that cannot be read ({error}). Use the "
            "version of ssl-bench that wrote the file"
        ) from error


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file, as texts.

    In a checkpoint of this suite, the keys are `format`, `version`, `config` and others.
    """
    _check_readable(path)
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Copy or download it again"
        ) from error


PYTHON_ADVICE = "write a Python function that loads the encoder (docs/python.md)"
PYTHON_FILE = ("--checkpoint", "{file}.py:{name}")
TIMM_HINT = ("--checkpoint", "timm:{timm_name}@{file}")
MODEL_FOLDER = ("--checkpoint", "local-dir:{folder}")
"""Advice, and hints for loading with a Python function, with timm, or from a model folder."""


def timm_hint(path: Path, name: str = "{timm_name}") -> tuple[str, str]:
    """Return command-line arguments that load a weights file into the timm model `name`.

    Error messages suggest these arguments as a hint.
    """
    return "--checkpoint", f"timm:{name}@{escape_braces(str(path))}"


def reject_sharded(path: Path) -> None:
    """Raise CheckpointError if a checkpoint consists of several files.

    `path` is the checkpoint, its folder, or one of its files.
    """
    folder = path if path.is_dir() else path.parent
    is_given = path.suffix == ".distcp" or path.name == ".metadata"
    if is_given or (not path.is_file() and next(folder.glob("*.distcp"), None)):
        whole = resolve_links(folder)
        joined = whole.with_name(f"{whole.name}.pth")
        way = ["python", "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
        raise CheckpointError(
            f"{folder} is a checkpoint of torch.distributed in several files, expected one file. "
            f"To join them, run: {quote_command([*way, str(folder), str(joined)])}",
            hint=("--checkpoint", escape_braces(str(joined))),
        )
    if _SHARD.fullmatch(path.name):
        raise CheckpointError(
            f"{path} is one of several files of a model, expected one file. Save them in one: "
            "model.save_pretrained(FOLDER, max_shard_size='100GB')"
        )


def _check_readable(path: Path) -> None:
    """Raise CheckpointError if a file cannot be read, is empty, or does not contain the weights.

    Examples of files without the weights are a web page and a Git LFS pointer.
    """
    reject_sharded(path)
    try:
        with open_regular(path) as file:
            substitute = describe_substitute(file.read(256))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}), expected a weights file or a run folder"
        ) from error
    if substitute:
        raise CheckpointError(f"{path} {substitute}")


@contextmanager
def require_unchanged(path: Path) -> Generator[None]:
    """Raise CheckpointError if a file is replaced in this context, for example by a training run.

    Without this check, results of the new weights could be stored with the SHA-256 of the old
    weights.
    """
    before = _file_state(path)
    try:
        yield
    finally:
        if _file_state(path) != before:
            raise CheckpointError(f"{path} was replaced while it was read. Run the command again")


def verify_sha256(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        CheckpointError: The file cannot be read, or the .sha256 file next to it states another
            SHA-256. If there is no .sha256 file, no error is raised.
    """
    _check_readable(path)
    digest = file_sha256(path)
    sidecar = _sidecar_path(path)
    if not _exists(sidecar):
        return digest
    expected = [stated for stated, _ in read_digests(sidecar)]
    if digest not in expected:
        raise CheckpointError(
            f"{path} has sha256 {digest[:12]}..., but {sidecar.name} states "
            f"{' or '.join(item[:12] for item in expected) or 'nothing'}.... The file was "
            "truncated or changed: copy or download both again"
        )
    return digest


def _sidecar_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _exists(sidecar: Path) -> bool:
    try:
        return sidecar.is_file()
    except OSError:  # With the suffix, the file name is too long.
        return False


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_rgb(content: Mapping[str, Any], key: str, path: Path) -> tuple[float, float, float]:
    """Read the mean or standard deviation of RGB channels in `content[key]`.

    The value is one number for all channels, or three numbers. Values of keys that end with "std"
    must be positive. `path` is the file with this content, for the error message.
    """
    value: Any = content.get(key)
    numbers: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value] * 3
    is_rgb = len(numbers) == 3 and all(map(is_number, numbers))
    if not is_rgb or (key.endswith("std") and min(numbers) <= 0):
        what = "positive numbers" if key.endswith("std") else "numbers"
        raise CheckpointError(
            f"{path}: expected {key} to be one or three {what}, got {value!r:.80}. Use the "
            "original file"
        )
    red, green, blue = map(float, numbers)
    return red, green, blue


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number with an absolute value below 1e9."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def read_weights(path: Path) -> dict[str, Any]:
    """Return the content of a weights file, which is a dictionary.

    The values are tensors, or nested dictionaries and lists of tensors and other values.

    Raises:
        CheckpointError: The file is damaged, contains something else, or could run code.
    """
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        # Ignore torch's warnings about unusual pickles, because loading either succeeds or fails.
        ignoring = warnings.catch_warnings(action="ignore", category=UserWarning)
        with ignoring, torch.serialization.safe_globals(_ALLOWED_TYPES):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL (\S+)", str(error))
        if culprit is None:
            raise CheckpointError(_describe_damage(path, "not a pickle of torch")) from error
        if culprit[1].startswith("torch.distributed"):
            raise CheckpointError(
                f"{path} contains {culprit[1]}: it has only the tensors of one process of a "
                "distributed run. Gather the full state_dict() in that run, and save it"
            ) from error
        raise CheckpointError(
            f"{path} contains {culprit[1]}, which could run code, so it was not loaded. If you "
            "trust it, load it and save only its tensors with safetensors.torch.save_file"
        ) from error
    except Exception as error:  # Reading a damaged file can raise any exception.
        # If a small file needs too much memory, the file is damaged.
        if path.stat().st_size > _SMALL_FILE:
            reraise_out_of_memory(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(_describe_damage(path, reason[:120])) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} contains a {type(content).__name__}, expected names and tensors. "
            "Save model.state_dict() instead"
        )
    return dict(content)


def check_tensors(weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Check that the weights are dense floating-point tensors on the CPU, and return them.

    Known integer buffers, such as `num_batches_tracked`, are also accepted.
    """
    for name, value in weights.items():
        is_index = value.dtype == torch.int64 and _INTEGERS.fullmatch(name)
        is_numeric = value.dtype in _FLOATS or is_index
        if not is_numeric or value.layout != torch.strided or value.device.type != "cpu":
            kind = f"{value.dtype}, {value.layout}, on {value.device}".replace("torch.", "")
            raise CheckpointError(
                f"{path}: {name} is {kind}, expected dense floating-point numbers of 16, 32 or 64 "
                "bits on the CPU. Save the weights without quantisation or sparse tensors"
            )
    return dict(weights)


def load_weights(
    model: nn.Module, weights: Mapping[str, Tensor], path: Path, *, hint: Sequence[str] = ()
) -> None:
    """Copy `weights` into `model`.

    Args:
        model: The model.
        weights: Tensors by name.
        path: The weights file, for the error message.
        hint: Command-line arguments that the error message suggests.

    Raises:
        CheckpointError: A name or shape differs between the model and the weights.
    """
    expected = model.state_dict()
    wrong = {
        "missing": [name for name in expected if name not in weights],
        "unknown": [name for name in weights if name not in expected],
        "of another shape": [
            f"{name} ({format_shape(weights[name])}, expected {format_shape(expected[name])})"
            for name in expected
            if name in weights and weights[name].shape != expected[name].shape
        ],
    }
    faults = [f"{list_names(names)} {kind}" for kind, names in wrong.items() if names]
    if faults:
        fitting = len(expected) - len(wrong["missing"]) - len(wrong["of another shape"])
        raise CheckpointError(
            f"{path} does not fit the encoder: {fitting}/{len(expected)} keys fit; "
            f"{'; '.join(faults)}",
            hint=hint,
        )
    model.load_state_dict(dict(weights))


def _describe_damage(path: Path, reason: str) -> str:
    with suppress(Exception), zipfile.ZipFile(path) as archive:
        for pattern, what, weights in _ARCHIVES:
            if any(re.fullmatch(pattern, name) for name in archive.namelist()):
                return (
                    f"{path} contains {what}, expected names and tensors. Save them: "
                    f"torch.save({weights.format(str(path))}, 'weights.pth')"
                )
    with path.open("rb") as file:
        start = file.read(64)
    if start and start.isascii() and b"\0" not in start:
        reason = "it begins with text"
    return f"{path} is not a weights file, or is damaged ({reason}). Copy or download it again"


def advise_model_folder(path: Path, different: str, name: str = "NAME") -> str:
    """Return advice for an error message: load the weights from a folder with a config.json.

    The config.json states the name of a timm model and the arguments that differ from timm's.

    Args:
        path: The weights file.
        different: The arguments that differ, as items of a JSON object, such as `"num_heads": 3`.
        name: timm's name of the model.
    """
    file = "model.safetensors" if path.suffix == ".safetensors" else "pytorch_model.bin"
    return (
        f'save the weights as {file} in a folder with a config.json, {{"architecture": '
        f'"{name}", "model_args": {{{different}}}}}'
    )


def format_shape(tensor: Tensor) -> str:
    """Format the shape of a tensor for messages, such as `192 x 3 x 16 x 16`."""
    return " x ".join(str(size) for size in tensor.shape) or "one number"


def list_names(names: list[str]) -> str:
    """Format a list of names for a message, such as "a, b, c and 4 more".

    The text contains only the first three names.
    """
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
