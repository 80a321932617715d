"""Isotropic ConvNeXt: patches, then blocks of one width and one grid."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.convnext_config import ConvNeXtConfig
from ssl_bench.models.vit import PatchEmbed

Maps = Float[Tensor, "batch dim rows cols"]
_FILTER_SIZE = 7
_EXPANSION = 4
_EPS = 1e-6


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, LayerNorm over channels, an MLP; the input is added to the output.

    There is no LayerScale: the reading of the thesis, which does not say.
    """

    def __init__(self, dim: int, *, frozen_filters: bool) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, _FILTER_SIZE, padding=_FILTER_SIZE // 2, groups=dim)
        self.depthwise.weight.requires_grad_(not frozen_filters)
        self.norm1 = nn.LayerNorm(dim, eps=_EPS)
        self.fc1 = nn.Linear(dim, _EXPANSION * dim)
        self.fc2 = nn.Linear(_EXPANSION * dim, dim)

    def forward(self, maps: Maps) -> Maps:
        x = self.norm1(self.depthwise(maps).permute(0, 2, 3, 1))  # batch rows cols dim
        return maps + self.fc2(F.gelu(self.fc1(x))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """The ConvNeXt-256/8 of figure 3.36; `build_encoder` makes one with initialised weights.

    Source: Liu et al., "A ConvNet for the 2020s", https://arxiv.org/abs/2201.03545, section 3.3
    for one stage; Trockman's thesis (2025) names width, depth and filters. Expansion 4, no
    LayerScale, and a norm before the mean are ours.
    """

    def __init__(self, config: ConvNeXtConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.dim)
        self.blocks = nn.ModuleList(
            ConvNeXtBlock(config.dim, frozen_filters=config.frozen_filters)
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.dim, eps=_EPS)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
        """Mean over all patches, for normalised images of any size the patch divides."""
        maps = self.patch_embed(images)
        for block in self.blocks:
            maps = block(maps)
        return self.norm(maps.flatten(2).transpose(1, 2)).mean(1)
