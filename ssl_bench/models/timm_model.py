"""Wrap timm models as encoders, and build the timm models that this suite can train."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import build_submodule, check_layers
from ssl_bench.models.initialisers import (
    FILTER_INITIALISERS,
    INITIALISERS,
    init_block_,
    init_conv_layers_,
    make_initialiser,
)
from ssl_bench.models.timm_config import TimmConfig
from ssl_bench.models.vit import EncoderModule, describe_resampling, resize_positions

Images = Float[Tensor, "batch 3 height width"]
Maps = Float[Tensor, "batch rows cols dim"]
HIERARCHICAL_CLASSES = (SwinTransformer, PyramidVisionTransformerV2, ConvNeXt)
TRAINABLE_CLASSES = (*HIERARCHICAL_CLASSES, Cait, VisionTransformer)
SUPPORTED_CLASSES = (*TRAINABLE_CLASSES, Eva)
"""timm classes that `list_blocks` supports. All other classes need `trace_blocks`."""


@dataclass(frozen=True)
class BlockInfo:
    """Widths, strides and token counts of a timm model's blocks, in order.

    Attributes:
        widths: Number of channels of each block.
        strides: Stride of each block in pixels.
        num_heads: Number of attention heads of the first block, or 0 if it has no attention.
        num_prefix_tokens: Number of [CLS] and register tokens before the patches.
        num_registers: Number of registers among the prefix tokens.
        channels_last: Whether the blocks return feature maps whose last axis is the channels.
        dynamic_image_size: Whether the model accepts image sizes other than its native size.
        blocks: Name of each block. Empty for the timm classes in `SUPPORTED_CLASSES`, such as
            VisionTransformer, because `list_blocks` finds their blocks.
    """

    widths: tuple[int, ...]
    strides: tuple[int, ...]
    num_heads: int
    num_prefix_tokens: int
    num_registers: int
    channels_last: bool
    dynamic_image_size: bool = True
    blocks: tuple[str, ...] = ()


class TimmBackbone(nn.Module):
    """A timm model with the attributes that encoders need: a list `blocks` and a final `norm`.

    Images of other sizes than the native size need resized position embeddings. Models of the timm
    classes in `SUPPORTED_CLASSES`, such as VisionTransformer, resize them as in DINO. timm's own
    resizing gives other features at these sizes, because it uses antialiasing and does not add
    DINO's margin of 0.1 to the grid size. All other models resize their position embeddings as timm
    does.

    Args:
        model: The timm model. It is not copied.
        traced_info: Result of `trace_blocks`, which contains the names of the blocks. None if the
            class of the model is in `SUPPORTED_CLASSES`, because `list_blocks` finds its blocks.
    """

    def __init__(self, model: nn.Module, traced_info: BlockInfo | None = None) -> None:
        super().__init__()
        # timm's models have no common base class that declares their attributes.
        self.model: Any = model
        self.traced_info = traced_info
        if isinstance(model, Cait):
            # Accept other image sizes, because `forward` resizes the position embedding.
            patch_embed: Any = model.patch_embed
            patch_embed.strict_img_size = False

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks of all stages in order, without CaiT's blocks that only update [CLS]."""
        if self.traced_info is not None:
            return nn.ModuleList(self.model.get_submodule(name) for name in self.traced_info.blocks)
        return nn.ModuleList(list_blocks(self.model))

    @property
    def norm(self) -> nn.Module:
        """Final norm, which is applied to the tokens of the last block.

        If the model has no final norm, the value is an identity module.
        """
        if self.traced_info is None:
            if isinstance(self.model, ConvNeXt):
                # timm applies this norm to the mean of a feature map.
                head: Any = self.model.head
                return _TokenNorm(head.norm)
            has_stage_norms = isinstance(self.model, PyramidVisionTransformerV2)
            return (self.model.stages[-1] if has_stage_norms else self.model).norm
        head, width = getattr(self.model, "head", None), self.traced_info.widths[-1:]
        for owner, name in ((self.model, "norm"), (head, "norm"), (self.model, "neck")):
            norm = getattr(owner, name, None)
            if isinstance(norm, nn.LayerNorm) and norm.normalized_shape == width:
                return _TokenNorm(norm)
        return nn.Identity()

    @property
    def position_rule(self) -> str | None:
        """Text that describes how the position embedding is resized for other image sizes.

        The value is None if the position embedding is never resized.
        """
        if self.traced_info is None:
            has_positions = getattr(self.model, "pos_embed", None) is not None
            return describe_resampling() if has_positions else None
        has_positions = any("pos" in name for name, _ in self.model.named_parameters())
        is_resized = has_positions and self.traced_info.dynamic_image_size
        return "as timm resizes them" if is_resized else None

    def forward(self, images: Images) -> Float[Tensor, "batch dim"]:
        """Return timm's features before its classifier: [CLS] or the mean patch token."""
        model: Any = self.model
        if self.traced_info is not None or getattr(model, "pos_embed", None) is None:
            return model(images)
        patch = model.patch_embed.feat_ratio()
        size = (images.shape[-2] // patch, images.shape[-1] // patch)
        native = model.patch_embed.grid_size
        if size == tuple(native):
            return model(images)
        resized = resize_positions(model.pos_embed, old_size=native, new_size=size)
        # Set the grid size so that timm does not resize the positions again.
        model.patch_embed.grid_size = size
        try:
            return torch.func.functional_call(model, {"pos_embed": resized}, (images,))
        finally:
            model.patch_embed.grid_size = native


class _TokenNorm(nn.Module):
    """LayerNorm for tokens that uses the parameters of a LayerNorm for feature maps."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.map_norm = norm

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        norm = self.map_norm
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class TimmEncoder(TimmBackbone, EncoderModule):
    """A timm model that this suite trains. Create it with `build_encoder`, which draws its weights.

    Each weight has timm's name with the prefix "model.".
    """

    config: TimmConfig

    def __init__(self, config: TimmConfig) -> None:
        super().__init__(create_timm_model(config))
        self.config = config
        stem: Any = getattr(self.model, "stem", None)
        if isinstance(self.model, ConvNeXt) and stem[0].stride[0] != config.patch_size:
            raise ConfigurationError(
                "expected a ConvNeXt whose stem is one convolution over non-overlapping patches, "
                f"but model.name={config.name} has another stem",
                hint=("model.name=convnext_atto",),
            )
        coarsest = max(read_block_info(self.model).strides)
        if config.image_size % coarsest:
            image_size = (config.image_size // coarsest + 1) * coarsest
            raise ConfigurationError(
                f"model.image_size must be a multiple of {coarsest}, the stride of the last stage "
                f"of {config.name}, got {config.image_size}. Increase it, or reduce "
                "model.patch_size",
                hint=(f"model.image_size={image_size}",),
            )
        gray_inputs(config, list_blocks(self.model), getattr(self.model, "blocks_token_only", ()))
        for filters in depthwise_filters(self.model) if config.frozen_filters else ():
            filters.weight.requires_grad_(False)


@torch.no_grad()
def build_timm(config: TimmConfig, *, seed: int) -> TimmEncoder:
    """Build a timm model with initial weights that depend only on `config` and `seed`.

    The global random state does not change. Weights that the initialiser does not set keep timm's
    initial values.

    If a ConvNeXt has the initialiser "uniform" or "covariance", all convolutions and linear layers
    first get PyTorch's default initialisation. Then the depthwise filters are redrawn, so "uniform"
    and "covariance" only differ in the depthwise filters. LayerScale keeps timm's values.
    Trockman's thesis does not state to which layers "uniform" applies.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TimmEncoder(config)
    generator = Generator().manual_seed(seed)
    if config.init in FILTER_INITIALISERS:
        filters = depthwise_filters(model.model)
        init_conv_layers_(model, filters, config.init, config.init_options, generator)
    elif config.init != "default":
        initialiser = make_initialiser(INITIALISERS, config.init, config.init_options)
        for block in model.blocks:
            init_block_(block, initialiser, generator)
    return model


def list_blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of all stages of a timm model, in order.

    The class of the model must be in `SUPPORTED_CLASSES`, such as VisionTransformer or
    SwinTransformer.
    """
    if (stages := _list_stages(model)) is None:
        return list(model.blocks)
    return [block for stage in stages for block in stage.blocks]


def _list_stages(model: Any) -> Any:
    return getattr(model, "layers", getattr(model, "stages", None))


def native_size(model: Any) -> tuple[int, int]:
    """Return the height and width in pixels of the images for which a timm model was made."""
    patch_embed: Any = getattr(model, "patch_embed", None)
    # Older versions of timm have no `_traits`.
    size = getattr(patch_embed, "img_size", None) or getattr(model, "_traits", {}).get("img_size")
    height, width = size or model.pretrained_cfg["input_size"][1:]
    return height, width


def token_arrangement(model: Any) -> Callable[[Tensor, int], Tensor] | None:
    """Return the function that arranges the patch tokens of a timm model as feature maps, or None.

    None means that the patch tokens are already in row-major order. Hiera needs a function, because
    it stores the patches of a window next to each other. The function maps tokens (batch, patches,
    dim) and the index of their block to feature maps (batch, rows, cols, dim).
    """
    return getattr(model, "reroll", None)


def count_heads(block: nn.Module) -> int:
    """Return the number of attention heads of a block, or 0 if it has no attention."""
    attention: Any = getattr(block, "attn", block)
    heads = getattr(attention, "num_heads", getattr(attention, "heads", 0))
    return heads if isinstance(heads, int) else 0


def count_registers(model: Any) -> int:
    """Return the number of register tokens of a timm model, or 0 if it has none."""
    registers = getattr(model, "reg_token", None)
    return getattr(model, "num_reg_tokens", 0) if registers is None else registers.shape[1]


def depthwise_filters(model: nn.Module) -> list[nn.Conv2d]:
    """Return the depthwise convolutions of a ConvNeXt, in the order of its blocks."""
    modules = (module for block in list_blocks(model) for module in block.modules())
    return [m for m in modules if isinstance(m, nn.Conv2d) and m.weight.shape[1] == 1]


def build_block_info(config: TimmConfig) -> BlockInfo:
    """Return the widths, strides and token counts of the blocks of a configured timm model.

    The model is built on the device "meta", so its weights need neither time nor memory.
    """
    fields = config.to_dict()
    described = {key: value for key, value in fields.items() if key not in config.training_fields}
    return _build_block_info(json.dumps(described))


@lru_cache(maxsize=32)
def _build_block_info(described: str) -> BlockInfo:
    return read_block_info(create_timm_model(TimmConfig.from_dict(json.loads(described)), "meta"))


def read_block_info(model: Any) -> BlockInfo:
    """Return the widths, strides and token counts of a timm model's blocks.

    The widths and strides are read from `model.feature_info`. The class of the model must be in
    `SUPPORTED_CLASSES`, such as VisionTransformer or SwinTransformer.
    """
    blocks, stages = list_blocks(model), _list_stages(model)
    # `feature_info` has one entry per stage, or one per block if the model has no stages.
    counts = [1] * len(blocks) if stages is None else [len(stage.blocks) for stage in stages]
    infos = [i for i, count in zip(model.feature_info, counts, strict=True) for _ in range(count)]
    no_prefix = (*HIERARCHICAL_CLASSES, Cait)
    return BlockInfo(
        widths=tuple(info["num_chs"] for info in infos),
        strides=tuple(info["reduction"] for info in infos),
        num_heads=count_heads(blocks[0]),
        num_prefix_tokens=0 if isinstance(model, no_prefix) else model.num_prefix_tokens,
        num_registers=count_registers(model),
        channels_last=isinstance(model, SwinTransformer),
    )


def create_timm_model(config: TimmConfig, device: str | None = None) -> Any:
    """Create a timm model from a configuration. The global random state does not change.

    `device` is "meta" for a model without memory for its weights.
    """
    if not timm.is_model(config.name):
        raise ConfigurationError(
            f"model.name must be a model of timm {timm.__version__}, got {config.name!r}. "
            f"`timm.list_models('*{config.name.partition('_')[0]}*')` lists similar names"
        )
    family = config.family
    arguments: dict[str, Any] = {"drop_path_rate": config.drop_path}
    for ours, theirs in family.arguments.items():
        if (values := getattr(config, ours)) is not None:
            is_one = family.stages == 1 or theirs == "embed_dim"
            arguments[theirs] = values[0] if is_one else values
    options = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "window_size": config.window_size,
        "dynamic_img_size": True,
    }
    arguments |= {option: options[option] for option in family.options}
    try:
        with torch.random.fork_rng(devices=[]):
            model: Any = timm.create_model(config.name, num_classes=0, device=device, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"model={config.name} cannot be built: {reason}") from error
    if not isinstance(model, TRAINABLE_CLASSES):
        raise ConfigurationError(
            f"model.name={config.name} is a {type(model).__name__}, expected one of "
            f"{', '.join(kind.__name__ for kind in TRAINABLE_CLASSES)}. Choose another name"
        )
    return model


def gray_inputs(
    config: TimmConfig, blocks: Sequence[nn.Module], class_blocks: Iterable[nn.Module]
) -> None:
    """Apply token graying to the inputs of the blocks that a configuration selects.

    Token graying reduces the condition number of the token matrix. A forward pre-hook of each block
    computes token graying.

    Args:
        config: Configuration that selects the blocks and the kind of graying.
        blocks: Blocks of the timm model, without `class_blocks`.
        class_blocks: Last blocks of CaiT, which only update [CLS].
    """
    check_layers("graying_layers", config.graying_layers, len(blocks))
    if config.graying == "none":
        return
    graying = build_submodule("graying", config)
    gray = gray_windows if config.graying_scope == "window" else gray_images
    layers = range(len(blocks)) if config.graying_layers is None else config.graying_layers
    for layer in layers:
        blocks[layer].register_forward_pre_hook(partial(gray, graying))
    for block in class_blocks if config.graying_class_blocks else ():
        block.register_forward_pre_hook(partial(gray_with_class, graying))


def gray_images(graying: nn.Module, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply token graying to all tokens of each image as one matrix, before a block.

    The function is a forward pre-hook of a timm block, so it returns the new inputs of the block.
    The first input is tokens, or feature maps with the channels last. All other inputs of the block
    do not change.

    Args:
        graying: Module that computes token graying.
        inputs: Positional arguments of the block.
    """
    x, *others = inputs
    if x.ndim == 3:
        return graying(x), *others
    return graying(x.flatten(1, 2)).unflatten(1, x.shape[1:3]), *others


def gray_windows(graying: nn.Module, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply token graying to the tokens of each window as one matrix, before a Swin block of timm.

    The function is a forward pre-hook, so it returns the new inputs of the block. As in the block
    itself, the feature map is shifted and padded with zeros to a multiple of the window size.

    Args:
        graying: Module that computes token graying.
        block: The Swin block, which states the shift and the window size.
        inputs: The feature maps, as the only positional argument of the block.
    """
    swin: Any = block
    (x,) = inputs
    (down, right), window = swin.shift_size, tuple(swin.window_size)
    shifted: Maps = torch.roll(x, shifts=(-down, -right), dims=(1, 2))
    rows, cols = x.shape[1:3]
    padded = F.pad(shifted, (0, 0, 0, -cols % window[1], 0, -rows % window[0]))
    # batch, windows down, rows, windows to the right, cols, dim
    tiles = padded.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0])).transpose(2, 3)
    gray = graying(tiles.flatten(0, 2).flatten(1, 2))
    tiles = gray.unflatten(1, window).unflatten(0, tiles.shape[:3]).transpose(2, 3)
    whole = tiles.flatten(3, 4).flatten(1, 2)[:, :rows, :cols]
    return (torch.roll(whole, shifts=(down, right), dims=(1, 2)),)


def gray_with_class(
    graying: nn.Module, _block: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Apply token graying to [CLS] and the patches as one matrix, before one of CaiT's last blocks.

    The function is a forward pre-hook, so it returns the new inputs of the block. The last blocks
    of CaiT only update [CLS].

    Args:
        graying: Module that computes token graying.
        inputs: The patch tokens and the [CLS] token.
    """
    x, cls_token = inputs
    gray = graying(torch.cat([cls_token, x], dim=1))
    return gray[:, cls_token.shape[1] :], gray[:, : cls_token.shape[1]]
