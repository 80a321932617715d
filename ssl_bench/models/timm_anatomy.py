"""What only timm knows of its models: how they are made, and what their blocks are."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import timm
import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.positions import resize_positions
from ssl_bench.models.timm_config import TimmConfig
from ssl_bench.models.timm_model import Images, blocks_of

STAGED = (SwinTransformer, PyramidVisionTransformerV2, ConvNeXt)
TRAINED = (*STAGED, Cait, VisionTransformer)
_OF_TRAINING = frozenset({"init", "init_options", "drop_path", "frozen_filters"})


@dataclass(frozen=True)
class Shape:
    """Of every block in turn.

    Attributes:
        strides: Pixels along a side of what a token stands for.
        num_heads: Of the first block; 0 without attention.
        channels_last: Of what the blocks give, where that is maps.
    """

    widths: tuple[int, ...]
    strides: tuple[int, ...]
    num_heads: int
    num_prefix_tokens: int
    num_registers: int
    channels_last: bool


def final_norm(model: nn.Module) -> nn.Module:
    """The final norm, for tokens; timm's ConvNeXt has it for maps, behind the mean."""
    last: Any = model
    if isinstance(model, ConvNeXt):
        return _NormOfTokens(last.head.norm)
    return last.stages[-1].norm if isinstance(model, PyramidVisionTransformerV2) else last.norm


class _NormOfTokens(nn.Module):
    """A LayerNorm for maps, applied to tokens."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.of_maps = norm

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        norm = self.of_maps
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def pooled(model: Any, images: Images) -> Float[Tensor, "batch dim"]:
    """The pooled output of timm, with positions resized as in DINO."""
    if getattr(model, "pos_embed", None) is None:
        return model(images)
    patch = model.patch_embed.feat_ratio()
    size = (images.shape[-2] // patch, images.shape[-1] // patch)
    if size == tuple(model.patch_embed.grid_size):
        return model(images)
    with resized_positions(model, size) as positions:
        return torch.func.functional_call(model, positions, (images,))


@contextmanager
def resized_positions(model: Any, size: tuple[int, int]) -> Iterator[dict[str, Tensor]]:
    """Positions for `size` = (rows, cols); meanwhile timm believes that they are its own."""
    if model.pos_embed is None:
        yield {}
        return
    native = model.patch_embed.grid_size
    resized = resize_positions(model.pos_embed, old_size=native, new_size=size)
    model.patch_embed.grid_size = size
    try:
        yield {"pos_embed": resized}
    finally:
        model.patch_embed.grid_size = native


def shape_of(config: TimmConfig) -> Shape:
    """What timm makes of a configuration, without its weights.

    Raises:
        ConfigurationError: timm knows no such model, or cannot make it.
    """
    described = {key: value for key, value in config.to_dict().items() if key not in _OF_TRAINING}
    return _shape_of(json.dumps(described))


@lru_cache(maxsize=32)
def _shape_of(described: str) -> Shape:
    return shape_of_model(create(TimmConfig.from_dict(json.loads(described)), "meta"))


def shape_of_model(model: Any) -> Shape:
    """Widths and strides as timm states them, stage by stage or block by block."""
    if isinstance(model, STAGED):
        stages: Any = getattr(model, "layers", getattr(model, "stages", None))
        counts = [len(stage.blocks) for stage in stages]
    else:
        counts = [1] * len(blocks_of(model))
    infos = [i for i, count in zip(model.feature_info, counts, strict=True) for _ in range(count)]
    attention: Any = getattr(blocks_of(model)[0], "attn", None)
    is_plain = isinstance(model, VisionTransformer)
    registers = getattr(model, "reg_token", None)
    return Shape(
        widths=tuple(info["num_chs"] for info in infos),
        strides=tuple(info["reduction"] for info in infos),
        num_heads=getattr(attention, "num_heads", 0),
        num_prefix_tokens=model.num_prefix_tokens if is_plain else 0,
        num_registers=0 if registers is None else registers.shape[1],
        channels_last=isinstance(model, SwinTransformer),
    )


def create(config: TimmConfig, device: str | None = None) -> Any:
    """The model as timm draws it; the global RNG is left alone.

    Raises:
        ConfigurationError: timm knows no such model, cannot build it, or it is of another family.
    """
    if not timm.is_model(config.name):
        raise ConfigurationError(
            f"model.name must be a model of timm {timm.__version__}, got {config.name!r}; "
            f"`timm.list_models('*{config.name.partition('_')[0]}*')` lists them"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            model: Any = timm.create_model(
                config.name, num_classes=0, device=device, **_arguments(config)
            )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"model={config.name} cannot be built: {reason}") from error
    if not isinstance(model, TRAINED):
        raise ConfigurationError(
            f"model.name={config.name} is a {type(model).__name__}, expected one of "
            f"{', '.join(kind.__name__ for kind in TRAINED)}; take another name"
        )
    if isinstance(model, Cait):
        # Its positions are resized instead.
        patch_embed: Any = model.patch_embed
        patch_embed.strict_img_size = False
    return model


def _arguments(config: TimmConfig) -> dict[str, Any]:
    """The words of timm for what the configuration says."""
    family = config.family
    found: dict[str, Any] = {"drop_path_rate": config.drop_path}
    for ours, theirs in family.arguments.items():
        if (values := getattr(config, ours)) is not None:
            is_one = family.stages == 1 or theirs == "embed_dim"
            found[theirs] = values[0] if is_one else values
    if family.any_patch:
        found["patch_size"] = config.patch_size
    if family.sized:
        found["img_size"] = config.image_size
    if family.windows:
        found |= {"window_size": config.window_size, "dynamic_img_size": True}
    if family.name in ("ViT", "DeiT"):
        found["dynamic_img_size"] = True
    return found


def check_sizes(config: TimmConfig, model: Any) -> None:
    """Refuse images or a stem that the model cannot take as the configuration says.

    Raises:
        ConfigurationError: another stem than patches, or a side that the last stage cannot divide.
    """
    if isinstance(model, ConvNeXt) and _stem_stride(model) != config.patch_size:
        raise ConfigurationError(
            f"model.name={config.name} has another stem than patches, expected a ConvNeXt that "
            "begins with patches; such as convnext_atto"
        )
    coarsest = max(shape_of_model(model).strides)
    if config.image_size % coarsest:
        raise ConfigurationError(
            f"model.image_size must be a multiple of {coarsest}, what a token of the last stage of "
            f"{config.name} stands for, got {config.image_size}; "
            f"take {(config.image_size // coarsest + 1) * coarsest}, or a smaller model.patch_size"
        )


def _stem_stride(model: Any) -> int:
    return model.stem[0].stride[0]
