"""Models of timm as encoders of this suite: all blocks in one row, whatever their stages."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
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
from torch import Generator, Tensor, nn

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import check_layers
from ssl_bench.models.graying import TokenGraying
from ssl_bench.models.initialisers import (
    FILTER_INITIALISERS,
    INITIALISERS,
    draw_convolutions,
    make_initialiser,
    set_block,
)
from ssl_bench.models.timm_config import TimmConfig
from ssl_bench.models.vit import EncoderModule, describe_resampling, resize_positions

Images = Float[Tensor, "batch 3 height width"]
Maps = Float[Tensor, "batch rows cols dim"]
STAGED = (SwinTransformer, PyramidVisionTransformerV2, ConvNeXt)
TRAINED = (*STAGED, Cait, VisionTransformer)


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


class TimmBackbone(nn.Module):
    """A model of timm as probes take it: all blocks in turn, and a norm for tokens.

    Its positions are resized as DINO's are. timm's own resampler antialiases and scales without
    margin, so its features differ at every size but the native one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # timm's models have no class in common that says what they have.
        self.model: Any = model
        if isinstance(model, Cait):
            # Its positions are resized instead.
            patch_embed: Any = model.patch_embed
            patch_embed.strict_img_size = False

    @property
    def blocks(self) -> nn.ModuleList:
        """Those of all stages in turn; CaiT's blocks of [CLS] alone are none of them."""
        return nn.ModuleList(blocks_of(self.model))

    @property
    def norm(self) -> nn.Module:
        """The final norm, for tokens of the last block."""
        if isinstance(self.model, ConvNeXt):
            # timm has it for maps, behind the mean.
            head: Any = self.model.head
            return _NormOfTokens(head.norm)
        pyramid = isinstance(self.model, PyramidVisionTransformerV2)
        last: Any = self.model.stages[-1] if pyramid else self.model
        return last.norm

    @property
    def position_rule(self) -> str | None:
        """How stored positions are resampled; None without any, as with rotary ones alone."""
        return None if getattr(self.model, "pos_embed", None) is None else describe_resampling()

    def forward(self, images: Images) -> Float[Tensor, "batch dim"]:
        """What timm's head would take: [CLS] or the mean over all patches."""
        model: Any = self.model
        if getattr(model, "pos_embed", None) is None:
            return model(images)
        patch = model.patch_embed.feat_ratio()
        size = (images.shape[-2] // patch, images.shape[-1] // patch)
        if size == tuple(model.patch_embed.grid_size):
            return model(images)
        # Meanwhile timm believes that these positions are its own.
        native = model.patch_embed.grid_size
        resized = resize_positions(model.pos_embed, old_size=native, new_size=size)
        model.patch_embed.grid_size = size
        try:
            return torch.func.functional_call(model, {"pos_embed": resized}, (images,))
        finally:
            model.patch_embed.grid_size = native


class _NormOfTokens(nn.Module):
    """A LayerNorm for maps, applied to tokens."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.of_maps = norm

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        norm = self.of_maps
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class TimmEncoder(TimmBackbone, EncoderModule):
    """A model of timm; `build_encoder` makes one with initialised weights.

    Its weights have timm's names behind "model.".
    """

    config: TimmConfig

    def __init__(self, config: TimmConfig) -> None:
        super().__init__(create(config))
        self.config = config
        stem: Any = getattr(self.model, "stem", None)
        if isinstance(self.model, ConvNeXt) and stem[0].stride[0] != config.patch_size:
            raise ConfigurationError(
                f"model.name={config.name} has another stem than patches, expected a ConvNeXt "
                "that begins with patches",
                hint=("model.name=convnext_atto",),
            )
        coarsest = max(shape_of_model(self.model).strides)
        if config.image_size % coarsest:
            image_size = (config.image_size // coarsest + 1) * coarsest
            raise ConfigurationError(
                f"model.image_size must be a multiple of {coarsest}, what a token of the last "
                f"stage of {config.name} stands for, got {config.image_size}; take a larger one, "
                "or a smaller model.patch_size",
                hint=(f"model.image_size={image_size}",),
            )
        gray_inputs(config, blocks_of(self.model), getattr(self.model, "blocks_token_only", ()))
        for filters in depthwise_filters(self.model) if config.frozen_filters else ():
            filters.weight.requires_grad_(False)


@torch.no_grad()
def build_timm(config: TimmConfig, *, seed: int) -> TimmEncoder:
    """An encoder whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    What the initialiser does not draw stays as timm draws it. Of convolutions first all layers are
    as PyTorch draws them, then the depthwise filters, so that the rest is the same; LayerScale
    stays. Which layers the thesis means by "uniform" it does not say.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TimmEncoder(config)
    generator = Generator().manual_seed(seed)
    if config.init in FILTER_INITIALISERS:
        filters = depthwise_filters(model.model)
        draw_convolutions(model, filters, config.init, config.init_options, generator)
    elif config.init != "default":
        initialiser = make_initialiser(INITIALISERS, config.init, config.init_options)
        for block in model.blocks:
            set_block(block, initialiser, generator)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of all stages in turn."""
    stages: Any = getattr(model, "layers", getattr(model, "stages", None))
    found: Any = getattr(model, "blocks", None)
    return list(found) if stages is None else [b for stage in stages for b in stage.blocks]


def depthwise_filters(model: nn.Module) -> list[nn.Conv2d]:
    """ConvNeXt's convolutions of one channel each, in the order of its blocks."""
    found = (module for block in blocks_of(model) for module in block.modules())
    return [m for m in found if isinstance(m, nn.Conv2d) and m.weight.shape[1] == 1]


def shape_of(config: TimmConfig) -> Shape:
    """What timm makes of a configuration, without its weights."""
    fields = config.to_dict()
    described = {key: value for key, value in fields.items() if key not in config.training_fields}
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
    registers = getattr(model, "reg_token", None)
    return Shape(
        widths=tuple(info["num_chs"] for info in infos),
        strides=tuple(info["reduction"] for info in infos),
        num_heads=getattr(attention, "num_heads", 0),
        num_prefix_tokens=0 if isinstance(model, (*STAGED, Cait)) else model.num_prefix_tokens,
        num_registers=0 if registers is None else registers.shape[1],
        channels_last=isinstance(model, SwinTransformer),
    )


def create(config: TimmConfig, device: str | None = None) -> Any:
    """The model as timm draws it; the global RNG is left alone."""
    if not timm.is_model(config.name):
        raise ConfigurationError(
            f"model.name must be a model of timm {timm.__version__}, got {config.name!r}; "
            f"`timm.list_models('*{config.name.partition('_')[0]}*')` lists them"
        )
    family = config.family
    arguments: dict[str, Any] = {"drop_path_rate": config.drop_path}
    for ours, theirs in family.arguments.items():
        if (values := getattr(config, ours)) is not None:
            is_one = family.stages == 1 or theirs == "embed_dim"
            arguments[theirs] = values[0] if is_one else values
    if family.any_patch:
        arguments["patch_size"] = config.patch_size
    if family.sized:
        arguments["img_size"] = config.image_size
    if family.windows:
        arguments["window_size"] = config.window_size
    if family.dynamic:
        arguments["dynamic_img_size"] = True
    try:
        with torch.random.fork_rng(devices=[]):
            model: Any = timm.create_model(config.name, num_classes=0, device=device, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"model={config.name} cannot be built: {reason}") from error
    if not isinstance(model, TRAINED):
        raise ConfigurationError(
            f"model.name={config.name} is a {type(model).__name__}, expected one of "
            f"{', '.join(kind.__name__ for kind in TRAINED)}; take another name"
        )
    return model


def gray_inputs(
    config: TimmConfig, blocks: Sequence[nn.Module], class_blocks: Iterable[nn.Module]
) -> None:
    """Let the blocks of timm that a configuration names gray their tokens first."""
    check_layers("graying_layers", config.graying_layers, len(blocks))
    if config.graying == "none":
        return
    graying = TokenGraying(config.graying, config.graying_exponent)
    gray = gray_windows if config.graying_scope == "window" else gray_images
    layers = range(len(blocks)) if config.graying_layers is None else config.graying_layers
    for layer in layers:
        blocks[layer].register_forward_pre_hook(partial(gray, graying))
    for block in class_blocks if config.graying_class_blocks else ():
        block.register_forward_pre_hook(partial(gray_with_class, graying))


def gray_images(
    graying: TokenGraying, _block: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """All tokens of an image are one matrix; maps with channels last are rows of tokens."""
    x, *others = inputs
    if x.ndim == 3:
        return graying(x), *others
    return graying(x.flatten(1, 2)).unflatten(1, x.shape[1:3]), *others


def gray_windows(
    graying: TokenGraying, block: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The tokens of each window of a block of timm's Swin are one matrix, moved as they are there.

    Where windows do not divide the map, zeros fill up the last ones, as before its attention.
    """
    swin: Any = block
    (x,) = inputs
    (down, right), window = swin.shift_size, tuple(swin.window_size)
    moved: Maps = torch.roll(x, shifts=(-down, -right), dims=(1, 2))
    rows, cols = x.shape[1:3]
    padded = F.pad(moved, (0, 0, 0, -cols % window[1], 0, -rows % window[0]))
    # batch, windows down, rows, windows to the right, cols, dim
    tiles = padded.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0])).transpose(2, 3)
    gray = graying(tiles.flatten(0, 2).flatten(1, 2))
    tiles = gray.unflatten(1, window).unflatten(0, tiles.shape[:3]).transpose(2, 3)
    whole = tiles.flatten(3, 4).flatten(1, 2)[:, :rows, :cols]
    return (torch.roll(whole, shifts=(down, right), dims=(1, 2)),)


def gray_with_class(
    graying: TokenGraying, _block: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """[CLS] and the patches that it looks at are one matrix, for CaiT's last blocks."""
    x, cls_token = inputs
    gray = graying(torch.cat([cls_token, x], dim=1))
    return gray[:, cls_token.shape[1] :], gray[:, : cls_token.shape[1]]
