"""ConvMixer, with and without its skip connection: patches, then nothing but convolutions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.composition.fields import Depth, Pixels, Width, check_fields
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.fields import (
    as_floats,
    check_divisible,
    from_dict,
    without_defaults,
)
from ssl_bench.models.initialisers.convolutions import filter_initialiser_of
from ssl_bench.models.vit import PatchEmbed

Maps = Float[Tensor, "batch dim rows cols"]


@dataclass(frozen=True)
class ConvMixerConfig:
    """Architecture and initialisation of a ConvMixer; the defaults are ConvMixer-256/8.

    Args:
        image_size: Side in pixels it is trained at; any other size works, nothing is resized.
        kernel_size: Side of the depthwise filters in patches; odd.
        skip: Add the input of the depthwise convolution to its output, the only skip there is.
        frozen_filters: Leave the depthwise filters, not their biases, as they were drawn.
        init: Of the depthwise filters, see `ssl_bench.models.initialisers.convolutions`; all else
            starts as PyTorch starts convolutions.
        init_options: Its hyperparameters that differ from their defaults; None means the default.
    """

    image_size: Pixels = 32
    patch_size: Pixels = 2
    dim: Width = 256
    depth: Depth = 8
    kernel_size: Pixels = 9
    skip: bool = True
    frozen_filters: bool = False
    init: str = "uniform"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    # There is no attention, no [CLS] and no register.
    num_heads = 0
    num_prefix_tokens = 0
    num_registers = 0

    def __post_init__(self) -> None:
        check_fields(self, "model")
        object.__setattr__(self, "init_options", without_defaults(self.init_options))
        as_floats(self)
        check_divisible(self, "image_size", "patch_size")
        if self.kernel_size % 2 == 0:
            near = f"{self.kernel_size - 1} or {self.kernel_size + 1}"
            raise ConfigurationError(
                "model.kernel_size must be odd, so that a filter has a middle, got "
                f"{self.kernel_size}; take {near}"
            )
        filter_initialiser_of(self.init, self.init_options)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ConvMixerConfig":
        """Read what `to_dict` wrote.

        Raises:
            ConfigurationError: A key that no version of this class knows, or a wrong value.
        """
        return from_dict(cls, values)


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
