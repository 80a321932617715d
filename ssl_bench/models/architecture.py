"""What an encoder computes, apart from its weights: part of who it is."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ssl_bench.models.config import EncoderConfig, kind_of

if TYPE_CHECKING:
    from torch import nn

NORM_EPS = 1e-6
# They decide how the weights came about, not what is done with them.
_OF_TRAINING = frozenset(
    {
        *("init", "init_options", "truncated_tokens", "drop_path", "frozen_filters"),
        # Positions are weights: their scale is in them.
        *("position_scale", "mlp_mean", "mlp_input_std"),
    }
)
# The same sums on another path: timm decides it by the machine.
_OF_MACHINE = frozenset({"training", "fused_attn"})


def configured(config: EncoderConfig, *, norm_eps: float = NORM_EPS) -> dict[str, Any]:
    """Architecture of an encoder of ours in plain JSON types.

    All whole numbers, and what else differs from a plain encoder of its kind.
    """
    plain = asdict(type(config)())
    described = {
        name: value
        for name, value in asdict(config).items()
        if name not in _OF_TRAINING and (type(value) is int or value != plain[name])
    }
    eps = {} if norm_eps == NORM_EPS else {"norm_eps": norm_eps}
    return json.loads(json.dumps({"kind": kind_of(config), **described, **eps}))


def staged(config: EncoderConfig, strides: Sequence[int]) -> dict[str, Any]:
    """As `configured`, with the pixels along a side of what a token of each block stands for."""
    return {**configured(config), "strides": list(strides)}


def of_library(model: "nn.Module", library: str, name: str) -> dict[str, Any]:
    """Architecture of somebody else's model: its name there, and a digest of all of its modules."""
    lines = [
        json.dumps([path, _class_name(module), _plain_attributes(module)])
        for path, module in model.named_modules()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"kind": library, "name": name, "modules_sha256": digest}


def _class_name(module: "nn.Module") -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _plain_attributes(module: "nn.Module") -> Mapping[str, str]:
    """Numbers, texts and functions that a module holds beside its weights, such as epsilons."""
    return {
        name: getattr(value, "__qualname__", None) or repr(value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in _OF_MACHINE and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    is_function = callable(value) and hasattr(value, "__qualname__")
    return value is None or isinstance(value, (bool, int, float, str)) or is_function
