"""From a configuration and a seed to an initialised encoder."""

import torch
from torch import Generator, nn

from ssl_bench.models.config import ConvMixerConfig, ViTConfig
from ssl_bench.models.conv_mixer import ConvMixer, ConvMixerBlock
from ssl_bench.models.initialisers.blocks import Initialiser, initialiser_of, shifted_inputs
from ssl_bench.models.initialisers.convolutions import filter_initialiser_of
from ssl_bench.models.vit import Block, VisionTransformer

_TOKEN_STD = 0.02
# Source: Zhang and Martens, "Orthogonal Self-Attention", appendix D.
_CUT = 2 * _TOKEN_STD


def build_vit(config: ViTConfig, *, seed: int) -> VisionTransformer:
    """An encoder whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    The skipless initialisation decomposes a dim x dim matrix a head: seconds for ViT-S.
    """
    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer(config)
    generator = torch.Generator().manual_seed(seed)
    _initialise_tokens(model, generator, truncated=config.truncated_tokens)
    initialiser = initialiser_of(config.init, config.init_options)
    for block in model.blocks:
        assert isinstance(block, Block)
        _initialise_block(block, config, initialiser, generator)
    return model


@torch.no_grad()
def build_conv_mixer(config: ConvMixerConfig, *, seed: int) -> ConvMixer:
    """A ConvMixer whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    Depthwise filters come last, so that all other weights are the same under any `init`.
    """
    with torch.random.fork_rng(devices=[]):
        model = ConvMixer(config)
    generator = torch.Generator().manual_seed(seed)
    _draw_uniform(model.patch_embed.proj, generator)
    for block in model.blocks:
        assert isinstance(block, ConvMixerBlock)
        _draw_uniform(block.depthwise, generator)
        _draw_uniform(block.pointwise, generator)
    initialiser = filter_initialiser_of(config.init, config.init_options)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, ConvMixerBlock)
        depth = layer / max(1, config.depth - 1)
        filters = initialiser.filters(config.dim, config.kernel_size, depth, generator)
        block.depthwise.weight.copy_(filters[:, None])
    return model


def _draw_uniform(convolution: nn.Conv2d, generator: Generator) -> None:
    """Weights and biases as PyTorch draws them by default."""
    bound = convolution.weight[0].numel() ** -0.5
    for parameter in convolution.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


@torch.no_grad()
def _initialise_tokens(model: VisionTransformer, generator: Generator, *, truncated: bool) -> None:
    # Official DINO leaves the patch convolution at PyTorch's default.
    _draw_uniform(model.patch_embed.proj, generator)
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


@torch.no_grad()
def _initialise_block(
    block: Block, config: ViTConfig, initialiser: Initialiser, generator: Generator
) -> None:
    attention = initialiser.attention(config.dim, config.num_heads, generator)
    mlp = initialiser.mlp(config.dim, config.hidden_dim, generator)
    if config.mlp_mean or config.mlp_input_std:
        mlp = shifted_inputs(mlp, config.mlp_mean, config.mlp_input_std)
    inputs = torch.cat([attention.query, attention.key, attention.value], dim=1)
    linears = (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2)
    matrices = (inputs, attention.output, mlp.first, mlp.second)
    for linear, matrix in zip(linears, matrices, strict=True):
        linear.weight.copy_(matrix.T)
        if linear.bias is not None:
            linear.bias.zero_()
