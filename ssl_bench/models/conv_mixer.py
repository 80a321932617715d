"""ConvMixer, with and without its skip connection: patches, then nothing but convolutions."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.config import ConvMixerConfig
from ssl_bench.models.vit import PatchEmbed

Maps = Float[Tensor, "batch dim rows cols"]


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


class ConvMixer(nn.Module):
    """The convolutional encoder of the suite; `build_encoder` makes one with initialised weights.

    Source: Trockman and Kolter, "Patches are all you need?", https://arxiv.org/abs/2201.09792,
    equations 2.1-2.3 of Trockman's thesis (2025). Without its skip it is the row "- Residual in Eq.
    2.2" of table 2.3 there.
    """

    def __init__(self, config: ConvMixerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.dim)
        self.patch_norm = nn.BatchNorm2d(config.dim)
        self.blocks = nn.ModuleList(ConvMixerBlock(config) for _ in range(config.depth))
        # A block ends with a norm of its own.
        self.norm = nn.Identity()

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
        """Mean over all patches, for normalised images of any size the patch divides."""
        return self.forward_features(images).mean(1)

    def forward_features(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """The patches after the last block, row by row."""
        maps = self.embed(images)
        for block in self.blocks:
            maps = block(maps)
        return self.norm(maps.flatten(2).transpose(1, 2))

    def embed(self, images: Float[Tensor, "batch 3 height width"]) -> Maps:
        """The patches that enter the first block."""
        return self.patch_norm(F.gelu(self.patch_embed(images)))
