"""Weights files of any origin, read without running anything they hold."""

import argparse
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.models.loading.identity import check_readable
from ssl_bench.system.memory import pass_on_memory

_SMALL_FILE = 2**20
# Where training scripts keep the model; averaged weights are the better encoder, so they lead.
_CONTAINERS = (
    *("teacher", "state_dict_ema", "model_ema"),
    *("student", "state_dict", "model", "backbone"),
)
# Left out at each step is what the table beside them allows, and nothing else.
_PREFIXES = (
    *("module.", "_orig_mod.", "teacher.", "student.", "base_encoder.", "backbone."),
    *("vit.", "dinov2_with_registers.", "dinov2."),
)
_BESIDE_CONTAINERS = {
    "|".join(_CONTAINERS): "another copy of the model; averaged weights lead",
    r"\w*optim\w*|\w*sched\w*|\w*scaler\w*": "state of training",
    r"\w*loss\w*|queue|center": "state of a loss",
    r"\w*rng\w*|args|config|hyper_parameters|callbacks|loops": "state of training",
}
_BESIDE_PREFIXES = {
    r"student\..*": "the student; the teacher leads",
    r"momentum_encoder\..*": "momentum encoder of MoCo-v3, scored on its base encoder",
    r"momentum_backbone\..*": "a moving average of the encoder",
    r"(?:momentum_)?(?:predictor|projector|prototypes)\..*": "a head of pretraining",
    r"(?:\w+_)?(?:head|loss|center)\w*(?:\..*)?": "a head or its loss, after the encoder",
    r"(?:classifier|fc|pooler)\..*": "a head, after the encoder",
    r"decoder\..*": "decoder of MAE, after the encoder",
}
# timm's ConvNeXt keeps its final norm among its head.
_HEADS = {r"(?:head(?!\.norm\.)|head_dist|fc|classifier|pooler)\..*": "a head, after the encoder"}
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


def read_weights(path: Path) -> dict[str, Any]:
    """What a weights file holds: names to tensors, or containers of them.

    Raises:
        CheckpointError: Missing, cut, not a weights file, or holding objects that could run code.
    """
    check_readable(path)
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        # torch warns about unusual pickles; whether they load is all that matters here.
        ignoring = warnings.catch_warnings(action="ignore", category=UserWarning)
        with ignoring, torch.serialization.safe_globals(_HARMLESS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_pickle_message(path, str(error))) from error
    except Exception as error:  # A damaged file makes its reader fail in any way.
        # What asks for more than there is of a small file is damage.
        if path.stat().st_size > _SMALL_FILE:
            pass_on_memory(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is cut or no weights file ({reason[:120]}); copy or download it again"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, expected names and tensors; "
            "save model.state_dict() instead"
        )
    return dict(content)


@dataclass(frozen=True)
class Backbone:
    """The tensors of an encoder in somebody's file.

    Attributes:
        weights: Under names without the prefixes of wrappers.
        total: Tensors in the container that held them.
        ignored: Every other tensor of the file, or what held several, and why it is left out.
        prefixes: What was taken off the names.
    """

    weights: Mapping[str, Tensor]
    total: int
    ignored: Mapping[str, str]
    prefixes: tuple[str, ...] = ()


def backbone_weights(content: Mapping[str, Any], path: Path) -> Backbone:
    """The encoder's weights under plain names; the teacher comes before the student.

    Raises:
        CheckpointError: A tensor is neither the encoder's nor one that is known to be left out.
    """
    ignored: dict[str, str] = {}
    while container := _container(content):
        beside = [name for name, value in content.items() if name != container and _tensors(value)]
        ignored |= left_out(beside, _BESIDE_CONTAINERS, path)
        content = content[container]
    weights = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    nested = [name for name, value in content.items() if name not in weights and _tensors(value)]
    ignored |= left_out(nested, _BESIDE_CONTAINERS, path)
    total, prefixes = len(weights), []
    while prefix := _prefix(list(weights)):
        beside = [name for name in weights if not name.startswith(prefix)]
        ignored |= left_out(beside, _BESIDE_PREFIXES, path)
        weights = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        prefixes.append(prefix)
    heads = [name for name in weights if any(re.fullmatch(head, name) for head in _HEADS)]
    ignored |= left_out(heads, _HEADS, path)
    plain = {name: value for name, value in weights.items() if name not in heads}
    return Backbone(plain, total, ignored, tuple(prefixes))


def _container(content: Mapping[str, Any]) -> str | None:
    """The dictionary with the model: of a known name, or the only thing that holds tensors."""
    known = next((c for c in _CONTAINERS if isinstance(content.get(c), Mapping)), None)
    holding = [name for name, value in content.items() if _tensors(value)]
    if known is None and len(holding) == 1 and isinstance(content[holding[0]], Mapping):
        return holding[0]
    return known


def _prefix(names: Sequence[str]) -> str | None:
    """What wrappers put before names: a known word, or whatever all of several names begin with."""
    known = next((p for p in _PREFIXES if any(name.startswith(p) for name in names)), None)
    first = {name.partition(".")[0] for name in names}
    if known is None and len(first) == 1 and len(names) > 1 and all("." in n for n in names):
        return f"{first.pop()}."
    return known


def left_out(names: Iterable[str], known: Mapping[str, str], path: Path) -> dict[str, str]:
    """Why each tensor is not used.

    Args:
        names: Of tensors that nobody takes.
        known: Pattern of whole names to the reason.
        path: The file to name in an error.

    Raises:
        CheckpointError: No pattern fits a name.
    """
    reasons = {
        name: next((why for pattern, why in known.items() if re.fullmatch(pattern, name)), None)
        for name in names
    }
    unknown = [name for name, why in reasons.items() if why is None]
    if unknown:
        raise CheckpointError(
            f"{path} holds {_first(unknown)}, which is neither an encoder's nor known to be left "
            "out; save the encoder's state_dict alone"
        )
    return {name: why for name, why in reasons.items() if why is not None}


def _tensors(value: object) -> int:
    """How many tensors there are in containers of any depth."""
    if isinstance(value, Tensor):
        return 1
    if isinstance(value, Mapping):
        return sum(_tensors(item) for item in value.values())
    return sum(_tensors(item) for item in value) if isinstance(value, list | tuple) else 0


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy `weights` into `model`; every name and shape must fit.

    Raises:
        CheckpointError: Names the first keys that are missing, unknown or of another shape.
    """
    wanted = model.state_dict()
    wrong = {
        "missing": [name for name in wanted if name not in weights],
        "unknown": [name for name in weights if name not in wanted],
        "of another shape": [
            f"{name} ({_shape(weights[name])}, expected {_shape(wanted[name])})"
            for name in wanted
            if name in weights and weights[name].shape != wanted[name].shape
        ],
    }
    faults = [f"{_first(names)} {kind}" for kind, names in wrong.items() if names]
    if faults:
        fitting = len(wanted) - len(wrong["missing"]) - len(wrong["of another shape"])
        raise CheckpointError(
            f"{path} does not fit the encoder: {fitting}/{len(wanted)} keys fit; "
            f"{'; '.join(faults)}; for another architecture use timm:NAME@{path.name}"
        )
    model.load_state_dict(dict(weights))


def _pickle_message(path: Path, reason: str) -> str:
    culprit = re.search(r"GLOBAL (\S+)", reason)
    if culprit is None:
        return f"{path} is cut or no weights file; copy or download it again"
    return (
        f"{path} holds {culprit[1]}, which could run code, so nothing of it was read; where you "
        "trust it, load it and save only its tensors with safetensors.torch.save_file"
    )


def _shape(tensor: Tensor) -> str:
    return " x ".join(str(size) for size in tensor.shape)


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
