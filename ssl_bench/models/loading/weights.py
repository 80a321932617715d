"""Weights files of any origin, read without running anything they hold."""

import argparse
import pickle
import re
import warnings
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, escape_braces
from ssl_bench.system.files import file_sha256, open_regular, read_digests
from ssl_bench.system.process import reraise_out_of_memory

IN_PYTHON = "name a function that loads it in Python (docs/python.md)"
PYTHON_FILE = ("--checkpoint", "{file}.py:{name}")
TIMM_NAME = ("--checkpoint", "timm:{timm_name}@{file}")
MODEL_FOLDER = ("--checkpoint", "local-dir:{folder}")
"""What is typed once the advice of `IN_PYTHON`, or that of `with_model_args`, is taken."""

_SMALL_FILE = 2**20
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


def check_readable(path: Path) -> None:
    """Refuse what cannot be a weights file."""
    try:
        with open_regular(path) as file:
            start = file.read(256).lstrip()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}); give a weights file or a run folder"
        ) from error
    if not start:
        raise CheckpointError(f"{path} is empty; copy or download it again")
    if start.startswith(b"<"):
        raise CheckpointError(f"{path} is a web page, not weights; download the file itself")


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


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
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
            f"{'; '.join(faults)}; of another architecture take timm's name",
            hint=("--checkpoint", f"timm:{{timm_name}}@{escape_braces(str(path))}"),
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
