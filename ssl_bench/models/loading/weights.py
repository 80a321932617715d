"""Weights files of any origin, read without running anything they hold."""

import argparse
import os
import pickle
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.models.loading.layouts import refuse_strangers
from ssl_bench.system.files import open_regular, read_digests, sha256_of
from ssl_bench.system.memory import pass_on_memory

_SMALL_FILE = 2**20
# Of numbers in a config.json.
_LARGEST = 1e9
# The kernel of the patches tells where in a file an encoder begins. Files are seen flat: a slash
# stands between names of dictionaries, a number or whatever else is no text in brackets.
_KERNEL = re.compile(
    r"((?:.*[./])?)((?:patch_embed1?\.(?:module\.)*proj|embeddings\.patch_embeddings"
    r"(?:\.projection)?|conv_proj|stem\.0|downsample_layers\.0\.0)\.)weight"
)
_BLOCK = re.compile(r"(?:blocks?\d?|layers?|stages)\.\w*\d+\.")
_PART = re.compile(r"[./]")
# Words in a name that say which of several encoders it is; MoCo-v3 and solo-learn score the one
# that is trained.
_AVERAGED = {"averaged", "average", "averaging", "avg", "ema", "swa", "teacher", "target"}
_TRAINED = {"current", "momentum", "online", "student"}
# By the first part of a name, seen from where the encoder is.
_BESIDE = {
    r"student": "the student; the teacher leads",
    r"teacher": "a teacher that is no such encoder",
    r"momentum_encoder": "momentum encoder of MoCo-v3, scored on its base encoder",
    r"momentum_backbone": "a moving average of the encoder",
    r"(?:\w+_)?(?:predictor|projector|prototypes)": "a head of pretraining",
    r"(?:\w+_)?head\w*|classifier|fc|pooler": "a head, after the encoder",
    r"\w*(?:loss|criterion)\w*|(?:\w+_)?center\w*|queue": "state of a loss",
    r"decoder": "a decoder, after the encoder",
    r"text\w*|transformer|token_embedding|positional_embedding|ln_final|logit_\w+": "text of CLIP",
    r"\w*optim\w*|\w*sched\w*|\w*scaler\w*|\w*rng\w*": "state of training",
    r"args|config|hyper_parameters|callbacks\w*|loops": "state of training",
}
# timm's ConvNeXt keeps its final norm among its head.
_HEADS = {r"(?:head(?!\.norm\.)|head_dist|fc|classifier|pooler)\..*": "a head, after the encoder"}
# Not those of 8 bits: the factors that they are stored with stand elsewhere.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = re.compile(r"(?:.*\.)?(?:num_batches_tracked|relative_position_index|position_ids)")
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
def unreplaced(path: Path) -> Iterator[None]:
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
    digest = sha256_of(path)
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
    numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * 3
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
            pass_on_memory(error)
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


@dataclass(frozen=True)
class Backbone:
    """The tensors of an encoder in somebody's file.

    Attributes:
        weights: Under names without the prefixes of wrappers.
        total: Tensors in the dictionary that held them.
        ignored: Every other tensor of the file, or what held several, and why it is left out.
        prefixes: What was taken off the names.
        note: Which of several encoders this is.
    """

    weights: Mapping[str, Tensor]
    total: int
    ignored: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    note: str = ""


def backbone_weights(content: Mapping[str, Any], path: Path) -> Backbone:
    """The encoder's weights under plain names, whatever was written around them.

    Of several encoders the one is taken whose name says that it is an average.
    """
    leaves = list(_leaves(content))
    tensors = _once(((name, one) for name, one in leaves if isinstance(one, Tensor)), path)
    training = tuple(
        {name.partition("param_groups/")[0] for name, _ in leaves if "/param_groups/" in name}
    )
    # Before its first update an average holds what the model was initialised with.
    unaveraged = tuple(
        name.removesuffix("n_averaged")
        for name, value in leaves
        if name.endswith(("/n_averaged", ".n_averaged")) and str(value) in ("0", "tensor(0)")
    )
    candidates = {name: one for name, one in tensors.items() if not name.startswith(training)}
    encoders = _encoders(candidates)
    if not tensors:
        return Backbone({}, 0, {})
    if not (roots := encoders or _largest(candidates)):
        raise CheckpointError(
            f"{path} is no Vision Transformer: none of its tensors is named as a weight, but "
            f"{_first(list(tensors))}; save model.state_dict() instead"
        )
    root = _chosen(roots, unaveraged, path)
    others = [other for other in roots if other != root]
    container = root[: root.rfind("/") + 1]
    if odd := [name for name in tensors if name.startswith(f"{container}[")]:
        raise CheckpointError(
            f"{path}: {odd[0].removeprefix(container)} is a name that is no text; "
            "save model.state_dict() instead"
        )
    own: dict[str, Tensor] = {}
    ignored: dict[str, str] = {}
    unknown: list[str] = []
    inner = tuple(other for other in others if other.startswith(root))
    for name, value in tensors.items():
        is_inside = name.startswith(root) and not name.startswith(inner)
        if is_inside and not _is_number(name.removeprefix(root), value):
            own[name] = value
            continue
        above = _ancestor((root, name))
        # What lies in a dictionary of its own goes by the name of that.
        key = name.removeprefix(above).partition("/")[0]
        if name.startswith(training):
            ignored[key] = "state of training"
        elif why := _reason_beside(name, value, above, root, others):
            ignored[key] = why
        else:
            unknown.append(key)
    inside = ((_without("module", name.removeprefix(root)), own[name]) for name in own)
    weights = _once(inside, path)
    if unknown:
        if not encoders:
            refuse_strangers(list(weights), path)
        raise CheckpointError(
            f"{path} holds {_first(list(dict.fromkeys(unknown)))}, which is neither an encoder's "
            "nor known to be left out; save the encoder's state_dict alone"
        )
    heads = reasons(weights, _HEADS)
    plain = {name: value for name, value in weights.items() if name not in heads}
    total = sum(
        name.startswith(container) and "/" not in name[len(container) :] for name in tensors
    )
    note = f"{_shown(root)} is taken, not {_first([_shown(one) for one in others])}; "
    parts = tuple(f"{part}." for part in _PART.split(root) if part)
    return Backbone(usable(plain, path), total, {**ignored, **heads}, parts, note if others else "")


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """What containers of any depth hold, under names of the way to it."""
    items: Iterable[tuple[str, object]]
    if isinstance(value, Mapping):
        items = (
            (_without(r"_\w+", k) if isinstance(k, str) else f"[{k!r}]", v)
            for k, v in value.items()
        )
    elif isinstance(value, list | tuple):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}/{key}" if name else key)


def _without(wrapper: str, name: str) -> str:
    """A name of a tensor without the parts that wrappers of modules put anywhere into it."""
    return re.sub(rf"(?:^|(?<=\.)){wrapper}\.", "", name)


def _once(pairs: Iterable[tuple[str, Tensor]], path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(
                f"{path} holds {name} twice, with and without a wrapper around it; save the "
                "encoder's state_dict alone"
            )
        found[name] = value
    return found


def _encoders(names: Collection[str]) -> list[str]:
    """What stands before the names of each encoder: a patch kernel, its bias, and blocks."""
    kernels = dict.fromkeys(found.groups() for name in names if (found := _KERNEL.fullmatch(name)))
    return [
        root
        for root, kernel in kernels
        if any(name.startswith(root) and _BLOCK.search(name, len(root)) for name in names)
        and (
            f"{root}{kernel}bias" in names
            or not any(name.endswith(f"{kernel}bias") for name in names)
        )
    ]


def _largest(tensors: Mapping[str, Tensor]) -> list[str]:
    """The same where no encoder is known: for the dictionaries that hold the most tensors."""
    inside: dict[str, list[str]] = {}
    for name, value in tensors.items():
        container, _, key = name.rpartition("/")
        if not key.startswith("[") and not _is_number(key, value):
            inside.setdefault(f"{container}/" if container else "", []).append(name)
    most = max(map(len, inside.values()), default=0)
    return [
        _ancestor(names) if most > 1 else container
        for container, names in inside.items()
        if len(names) == most
    ]


def _chosen(roots: list[str], unaveraged: tuple[str, ...], path: Path) -> str:
    """Of encoders the one that is an average; where they part for the first time that is asked."""
    if len(roots) == 1:
        return roots[0]
    above = _ancestor(roots)
    branches: dict[str, list[str]] = {}
    for root in roots:
        branches.setdefault(_PART.split(root.removeprefix(above))[0], []).append(root)
    ranks = {
        branch: max(_rank(root, above, unaveraged) for root in inside)
        for branch, inside in branches.items()
    }
    best = [branch for branch in branches if ranks[branch] == max(ranks.values())]
    if len(best) > 1:
        shown = _first([_shown(branches[branch][0]) for branch in best])
        raise CheckpointError(
            f"{path} holds {len(best)} encoders ({shown}), and no name says which of them "
            "is the average; save the state_dict of one"
        )
    return _chosen(branches[best[0]], unaveraged, path)


def _rank(root: str, above: str, unaveraged: tuple[str, ...]) -> int:
    below = root.removeprefix(above)
    if any(len(place) > len(above) and root.startswith(place) for place in unaveraged):
        return 0
    for part in _PART.split(below):
        words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)}
        if words & _AVERAGED:
            return 2
        if "current" in words and f"{above}averaging_state/" in unaveraged:
            return 3
        if words & _TRAINED:
            return 0
    return 1


def _reason_beside(
    name: str, value: Tensor, above: str, root: str, others: Sequence[str]
) -> str | None:
    """Why a tensor that is not the encoder's is left out; None if nobody knows.

    Its name and `root`, with which those of the encoder begin, both begin with `above`.
    """
    beside = name.removeprefix(above)
    part = _PART.split(beside)[0]
    branch = name[: len(above) + len(part) + 1]
    if why := reasons([part], _BESIDE).get(part):
        return why
    if any(
        one.startswith(branch) or (root.startswith(one) and name.startswith(one)) for one in others
    ):
        return "another encoder, see the note"
    if _is_number(beside.rpartition("/")[2], value):
        return "a number beside the weights"
    is_outside = "/" in root[len(above) :] and not set("./") & set(beside)
    return "a tensor beside the state_dict of the model" if is_outside else None


def _is_number(key: str, value: Tensor) -> bool:
    """Whether this is no parameter of a module, nor the token or position of a damaged file."""
    return value.numel() == 1 and not re.search(r"\.|token|embed", key)


def _ancestor(names: Sequence[str]) -> str:
    """What names begin with, in whole parts."""
    common = os.path.commonprefix(names)  # noqa: RUF071 - cut at a whole part in the next line
    return common[: max(common.rfind("."), common.rfind("/")) + 1]


def _shown(root: str) -> str:
    return root.rstrip("./") or "what has no prefix"


def reasons(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Why tensors are not used, by patterns of whole names; without those that none fits."""
    found = (
        (name, next((w for p, w in known.items() if re.fullmatch(p, name)), None)) for name in names
    )
    return {name: why for name, why in found if why is not None}


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
    faults = [f"{_first(names)} {kind}" for kind, names in wrong.items() if names]
    if faults:
        fitting = len(wanted) - len(wrong["missing"]) - len(wrong["of another shape"])
        raise CheckpointError(
            f"{path} does not fit the encoder: {fitting}/{len(wanted)} keys fit; "
            f"{'; '.join(faults)}; for another architecture use timm:NAME@{path.name}"
        )
    model.load_state_dict(dict(weights))


def _no_weights(path: Path, reason: str) -> str:
    with path.open("rb") as file:
        begins = file.read(64)
    if begins and begins.isascii() and b"\0" not in begins:
        reason = "it begins as a text does"
    return f"{path} is no weights file, or a damaged one ({reason}); copy or download it again"


def shape_text(tensor: Tensor) -> str:
    """Such as `192 x 3 x 16 x 16`, for messages."""
    return " x ".join(str(size) for size in tensor.shape) or "one number"


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
