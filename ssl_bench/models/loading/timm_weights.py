"""A file's tensors in a model of timm as they are: nothing is resized on the way in.

timm renames the tensors of many libraries, and resizes positions, patches and tables of relative
positions that do not fit, without a word.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.models.loading.foreign import ASSUMED_GRID
from ssl_bench.models.loading.weights import shape_text

_KERNEL, _POSITIONS = "patch_embed.proj.weight", "pos_embed"
Weights = Mapping[str, Tensor]


def without_register_positions(weights: Weights) -> dict[str, Tensor]:
    """Those of a DINOv2 with registers as timm has them: the position of [CLS] is added to it."""
    found = dict(weights)
    positions, cls_token = weights.get(_POSITIONS), weights.get("cls_token")
    if "register_tokens" not in weights or positions is None or cls_token is None:
        return found
    if positions.ndim == cls_token.ndim == 3 and positions.shape[2] == cls_token.shape[2]:
        found["reg_token"] = found.pop("register_tokens")
        found["cls_token"] = cls_token + positions[:, 0]
        found[_POSITIONS] = positions[:, 1:]
    return found


def patch_of_file(model: Any, weights: Weights) -> dict[str, Any]:
    """What timm is told where patches of the file are not of the model's size."""
    kernel, own = weights.get(_KERNEL), model.state_dict().get(_KERNEL)
    if kernel is None or own is None or not kernel.ndim == own.ndim == 4:
        return {}
    rows, cols = kernel.shape[2:]
    return {"patch_size": rows} if rows == cols != own.shape[3] and rows else {}


def images_of_file(model: Any, weights: Weights) -> tuple[dict[str, Any], str]:
    """What timm is told where the file has another square of positions than the model, and a note.

    Any other number of them is refused by `require_weights`.
    """
    positions, own = weights.get(_POSITIONS), getattr(model, _POSITIONS, None)
    if positions is None or own is None or positions.ndim != 3:
        return {}, ""
    num_patches = positions.shape[1] - own.shape[1] + model.patch_embed.num_patches
    side = math.isqrt(max(num_patches, 0))
    if num_patches in (0, model.patch_embed.num_patches) or side**2 != num_patches:
        return {}, ""
    images = {"img_size": side * model.patch_embed.feat_ratio()}
    return images, ASSUMED_GRID.format(side, side)


def require_weights(model: nn.Module, weights: Weights, path: Path, name: str) -> None:
    """Every number of the model is one of the file, under timm's name or another.

    Raises:
        CheckpointError: Names tensors that timm made of others.
    """
    own = model.state_dict()
    changed = {
        ours: _bits(value)
        for ours, value in own.items()
        if ours not in weights or not _is_same(weights[ours], value)
    }
    renamed: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for theirs, value in weights.items() if changed else ():
        renamed[_key(_bits(value))].append(theirs)
    left = {
        ours: bits
        for ours, bits in changed.items()
        if not any(
            theirs != ours and torch.equal(_bits(weights[theirs]), bits)
            for theirs in renamed[_key(bits)]
        )
    }
    made = {ours: own[ours] for ours in left if ours in weights}
    if len(made) < len(left):
        # Layers that are joined or cut under other names, and biases that are 0 here.
        numbers = torch.cat([torch.zeros(1, dtype=torch.int32), *map(_bits, weights.values())])
        made |= {o: own[o] for o, bits in left.items() if not torch.isin(bits, numbers).all()}
    if made:
        raise CheckpointError(_mismatch(path, name, weights, made))


def wrong_shapes(model: nn.Module, weights: Weights, path: Path, name: str) -> str | None:
    """A line on the tensors that are of one name in file and model and of other shapes."""
    wrong = {
        ours: value
        for ours, value in model.state_dict().items()
        if ours in weights and weights[ours].shape != value.shape
    }
    return _mismatch(path, name, weights, wrong) if wrong else None


def _mismatch(path: Path, name: str, weights: Weights, wrong: Weights) -> str:
    shown = "; ".join(
        f"{ours} is {shape_text(weights[ours]) if ours in weights else 'of no such name'}, "
        f"expected {shape_text(value)}"
        for ours, value in list(wrong.items())[:3]
    )
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    rows = (
        ", or say img_size=[HEIGHT, WIDTH] among model_args of a config.json beside it and type "
        "local-dir:FOLDER"
    )
    return (
        f"timm:{name} does not fit {path}: {shown}{more}, and nothing is resized; take timm's "
        f"name of the file's architecture{rows if _POSITIONS in wrong else ''}"
    )


def _is_same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and torch.equal(_bits(value), _bits(other))


def _bits(value: Tensor) -> Int[Tensor, " numbers"]:
    """Of all numbers in single precision; any NaN equals itself."""
    return value.detach().float().contiguous().flatten().view(torch.int32)


def _key(bits: Int[Tensor, " numbers"]) -> tuple[int, ...]:
    return (len(bits), *bits[:1].tolist(), *bits[-1:].tolist())
