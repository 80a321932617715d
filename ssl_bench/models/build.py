"""From a configuration and a seed to an initialised encoder."""

from collections.abc import Iterable

import torch
from torch import Generator, nn

from ssl_bench.models.config import ConvMixerConfig, ViTConfig
from ssl_bench.models.conv_mixer import ConvMixer, ConvMixerBlock
from ssl_bench.models.convnext import ConvNeXt, ConvNeXtBlock
from ssl_bench.models.convnext_config import ConvNeXtConfig
from ssl_bench.models.initialisers.blocks import ShiftedInputs, initialiser_of, set_block
from ssl_bench.models.initialisers.convolutions import (
    draw_filters,
    draw_uniform,
    filter_initialiser_of,
)
from ssl_bench.models.vit import Block, VisionTransformer

_TOKEN_STD = 0.02
# Source: Zhang and Martens, "Orthogonal Self-Attention", appendix D.
_CUT = 2 * _TOKEN_STD


def build_vit(
    config: ViTConfig, *, seed: int, grid_size: tuple[int, int] | None = None
) -> VisionTransformer:
    """An encoder whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    The skipless initialisation decomposes a dim x dim matrix a head: seconds for ViT-S.
    """
    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer(config, grid_size)
    generator = torch.Generator().manual_seed(seed)
    _initialise_tokens(model, generator, truncated=config.truncated_tokens)
    initialiser = initialiser_of(config.init, config.init_options)
    if config.mlp_mean or config.mlp_input_std:
        initialiser = ShiftedInputs(initialiser, config.mlp_mean, config.mlp_input_std)
    for block in model.blocks:
        assert isinstance(block, Block)
        set_block(block, initialiser, generator)
    return model


@torch.no_grad()
def build_conv_mixer(config: ConvMixerConfig, *, seed: int) -> ConvMixer:
    """A ConvMixer whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    Depthwise filters come last, so that all other weights are the same under any `init`.
    """
    with torch.random.fork_rng(devices=[]):
        model = ConvMixer(config)
    generator = torch.Generator().manual_seed(seed)
    draw_uniform(model.patch_embed.proj, generator)
    for block in model.blocks:
        assert isinstance(block, ConvMixerBlock)
        draw_uniform(block.depthwise, generator)
        draw_uniform(block.pointwise, generator)
    initialiser = filter_initialiser_of(config.init, config.init_options)
    draw_filters(_depthwise(model.blocks), initialiser, generator)
    return model


@torch.no_grad()
def build_convnext(config: ConvNeXtConfig, *, seed: int) -> ConvNeXt:
    """As `build_conv_mixer`, with one more linear layer a block."""
    with torch.random.fork_rng(devices=[]):
        model = ConvNeXt(config)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            draw_uniform(module, generator)
    initialiser = filter_initialiser_of(config.init, config.init_options)
    draw_filters(_depthwise(model.blocks), initialiser, generator)
    # Last, so that all else is as it is without.
    for block in model.blocks:
        first = block.get_submodule("fc1").get_parameter("weight")  # hidden_dim dim
        first += config.mlp_mean
        first += config.mlp_input_std * torch.randn(1, config.dim, generator=generator)
    return model


def _depthwise(blocks: Iterable[nn.Module]) -> list[nn.Conv2d]:
    found = []
    for block in blocks:
        assert isinstance(block, ConvMixerBlock | ConvNeXtBlock)
        found.append(block.depthwise)
    return found


@torch.no_grad()
def _initialise_tokens(model: VisionTransformer, generator: Generator, *, truncated: bool) -> None:
    # Official DINO leaves the patch convolution at PyTorch's default.
    draw_uniform(model.patch_embed.proj, generator)
    for name in ("cls_token", "reg_token", "pos_embed"):
        parameter = model.get_parameter(name) if hasattr(model, name) else None
        if parameter is not None and parameter.requires_grad:
            nn.init.trunc_normal_(parameter, std=_TOKEN_STD, generator=generator)
            if truncated:
                _redraw_tails(parameter)


def _redraw_tails(parameter: nn.Parameter) -> None:
    """Draw anew what lies beyond two deviations, until nothing does."""
    # From a generator of its own, so that all that is drawn later stays as it is without.
    own = Generator().manual_seed(int(parameter.flatten()[0].view(torch.int32)))
    within = torch.empty_like(parameter)
    nn.init.trunc_normal_(within, 0, _TOKEN_STD, -_CUT, _CUT, generator=own)
    parameter.copy_(torch.where(parameter.abs() > _CUT, within, parameter))
