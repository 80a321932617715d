"""Convolutional encoders of one grid and width: ConvMixer, with and without skip, and ConvNeXt."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.config import ConvMixerConfig, ConvNeXtConfig
from ssl_bench.models.initialisers import draw_convolutions
from ssl_bench.models.vit import EncoderModule, PatchEmbed

Images = Float[Tensor, "batch 3 height width"]
Maps = Float[Tensor, "batch dim rows cols"]
_FILTER_SIZE = 7
_EXPANSION = 4
_EPS = 1e-6


class ConvMixerBlock(nn.Module):
    """A depthwise convolution, which adds its input if its skip is on, then a pointwise one.

    Each is followed by GELU and batch normalisation.
    """

    def __init__(self, config: ConvMixerConfig) -> None:
        super().__init__()
        dim, size = config.dim, config.kernel_size
        self.skip = config.skip
        self.depthwise = nn.Conv2d(dim, dim, size, padding=size // 2, groups=dim)
        self.depthwise.weight.requires_grad_(not config.frozen_filters)
        self.norm1 = nn.BatchNorm2d(dim)
        self.pointwise = nn.Conv2d(dim, dim, 1)
        self.norm2 = nn.BatchNorm2d(dim)

    def forward(self, maps: Maps) -> Maps:
        update = self.norm1(F.gelu(self.depthwise(maps)))
        mixed = maps + update if self.skip else update
        return self.norm2(F.gelu(self.pointwise(mixed)))


class _OneGrid(EncoderModule):
    """What both have in common: maps of one grid, from the patches to the mean."""

    patch_embed: PatchEmbed
    norm: nn.Module

    def forward(self, images: Images) -> Float[Tensor, "batch dim"]:
        """Mean over all patches, for normalised images of any size the patch divides."""
        return self.forward_features(images).mean(1)

    def forward_features(self, images: Images) -> Float[Tensor, "batch tokens dim"]:
        """The patches after the last block and the final norm, row by row."""
        maps = self.embed(images)
        for block in self.blocks:
            maps = block(maps)
        return self.norm(maps.flatten(2).transpose(1, 2))

    def embed(self, images: Images) -> Maps:
        """The patches that enter the first block."""
        return self.patch_embed(images)


class ConvMixer(_OneGrid):
    """The convolutional encoder of the suite; `build_encoder` makes one with initialised weights.

    Source: Trockman and Kolter, "Patches are all you need?", https://arxiv.org/abs/2201.09792,
    equations 2.1-2.3 of Trockman's thesis (2025). Without its skip it is the row "- Residual in Eq.
    2.2" of table 2.3 there.
    """

    config: ConvMixerConfig

    def __init__(self, config: ConvMixerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.dim)
        self.patch_norm = nn.BatchNorm2d(config.dim)
        self.blocks = nn.ModuleList(ConvMixerBlock(config) for _ in range(config.depth))
        # A block ends with a norm of its own.
        self.norm = nn.Identity()

    def embed(self, images: Images) -> Maps:
        """The patches that enter the first block."""
        return self.patch_norm(F.gelu(self.patch_embed(images)))


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, LayerNorm over channels, an MLP; the input is added to the output.

    There is no LayerScale: the reading of the thesis, which does not say.
    """

    def __init__(self, config: ConvNeXtConfig) -> None:
        super().__init__()
        dim = config.dim
        self.depthwise = nn.Conv2d(dim, dim, _FILTER_SIZE, padding=_FILTER_SIZE // 2, groups=dim)
        self.depthwise.weight.requires_grad_(not config.frozen_filters)
        self.norm1 = nn.LayerNorm(dim, eps=_EPS)
        self.fc1 = nn.Linear(dim, _EXPANSION * dim)
        self.fc2 = nn.Linear(_EXPANSION * dim, dim)

    def forward(self, maps: Maps) -> Maps:
        x = self.norm1(self.depthwise(maps).permute(0, 2, 3, 1))  # batch rows cols dim
        return maps + self.fc2(F.gelu(self.fc1(x))).permute(0, 3, 1, 2)


class ConvNeXt(_OneGrid):
    """The ConvNeXt-256/8 of figure 3.36; `build_encoder` makes one with initialised weights.

    Source: Liu et al., "A ConvNet for the 2020s", https://arxiv.org/abs/2201.03545, section 3.3
    for one stage; Trockman's thesis (2025) names width, depth and filters. Expansion 4, no
    LayerScale, and a norm before the mean are ours.
    """

    config: ConvNeXtConfig

    def __init__(self, config: ConvNeXtConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.dim)
        self.blocks = nn.ModuleList(ConvNeXtBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=_EPS)


@torch.no_grad()
def build_convolutional(
    config: ConvMixerConfig | ConvNeXtConfig, *, seed: int
) -> ConvMixer | ConvNeXt:
    """An encoder whose weights depend on `config` and `seed` alone; the global RNG is left alone.

    Depthwise filters come after all other weights, so that these are the same under any `init`;
    last comes what is added to a ConvNeXt's MLPs.
    """
    with torch.random.fork_rng(devices=[]):
        model = ConvMixer(config) if isinstance(config, ConvMixerConfig) else ConvNeXt(config)
    generator = torch.Generator().manual_seed(seed)
    depthwise = [block.depthwise for block in model.blocks]
    draw_convolutions(model, depthwise, config.init, config.init_options, generator)
    if isinstance(config, ConvNeXtConfig):
        for block in model.blocks:
            first = block.fc1.weight  # hidden_dim dim
            first += config.mlp_mean
            first += config.mlp_input_std * torch.randn(1, config.dim, generator=generator)
    return model
