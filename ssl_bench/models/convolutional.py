"""ConvMixer and a single-stage ConvNeXt. All blocks have the same token grid and width."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from ssl_bench.composition.fields import Bounds, Depth, Pixels, RateOrZero, Width
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import EncoderConfig, check_divisible
from ssl_bench.models.initialisers import FILTER_INITIALISERS, init_conv_layers_, make_initialiser
from ssl_bench.models.vit import EncoderModule, PatchEmbed

Images = Float[Tensor, "batch 3 height width"]
Maps = Float[Tensor, "batch dim rows cols"]
_FILTER_SIZE = 7
_EXPANSION = 4
_EPS = 1e-6


@dataclass(frozen=True)
class ConvMixerConfig(EncoderConfig):
    """Architecture and initialisation of a ConvMixer. The defaults are ConvMixer-256/8.

    Attributes:
        kernel_size: Side of the depthwise filters in patches, an odd number.
        skip: Whether to add the input of the depthwise convolution to its output.
        frozen_filters: Whether to keep the weights of the depthwise convolutions fixed. Their
            biases are trained.
        init: Initialiser of the depthwise filters, from `ssl_bench.models.initialisers`. All other
            weights have PyTorch's default initialisation.
        init_options: Options of the initialiser. An option that is None has its default value.
    """

    kind = "conv_mixer"
    training_fields = frozenset({"init", "init_options", "frozen_filters"})

    image_size: Pixels = 32
    patch_size: Pixels = 2
    dim: Width = 256
    depth: Depth = 8
    kernel_size: Pixels = 9
    skip: bool = True
    frozen_filters: bool = False
    init: str = "uniform"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divisible(self, "image_size", "patch_size")
        if self.kernel_size % 2 == 0:
            near = self.kernel_size + 1
            raise ConfigurationError(
                "model.kernel_size must be odd, so that filters have a central pixel, got "
                f"{self.kernel_size}",
                hint=(f"model.kernel_size={near}",),
            )
        make_initialiser(FILTER_INITIALISERS, self.init, self.init_options)

    def build(self, *, seed: int) -> "ConvMixer":
        return _build(ConvMixer, self, seed)[0]

    def build_empty(self) -> "ConvMixer":
        return ConvMixer(self)


@dataclass(frozen=True)
class ConvNeXtConfig(EncoderConfig):
    """Architecture and initialisation of a single-stage ConvNeXt. The defaults are ConvNeXt-256/8.

    Attributes:
        frozen_filters: Whether to keep the weights of the depthwise convolutions fixed. Their
            biases are trained.
        mlp_mean: Constant that is added to all initial weights of the first layer of each MLP, as
            in equation 3.40 of Trockman, "Mimetic initialization" (2025).
        mlp_input_std: Standard deviation of random offsets of the initial weights in the first
            layer of each MLP. One normal offset is drawn per input channel, and is added to the
            weights from this channel to all hidden units. Source: equation 3.39 of Trockman's
            thesis.
        init: Initialiser of the 7 x 7 depthwise filters, from `ssl_bench.models.initialisers`. All
            other weights have PyTorch's default initialisation.
        init_options: Options of the initialiser. An option that is None has its default value.
    """

    kind = "convnext"
    training_fields = frozenset(
        {"init", "init_options", "frozen_filters", "mlp_mean", "mlp_input_std"}
    )

    image_size: Pixels = 32
    patch_size: Pixels = 2
    dim: Width = 256
    depth: Depth = 8
    frozen_filters: bool = False
    mlp_mean: Annotated[float, Bounds(-1000, 1000)] = 0.0
    mlp_input_std: RateOrZero = 0.0
    init: str = "uniform"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divisible(self, "image_size", "patch_size")
        make_initialiser(FILTER_INITIALISERS, self.init, self.init_options)

    @torch.no_grad()
    def build(self, *, seed: int) -> "ConvNeXt":
        model, generator = _build(ConvNeXt, self, seed)
        # These offsets are drawn last, so that no other weights depend on `mlp_input_std`.
        for block in model.blocks:
            weight = block.fc1.weight  # hidden_dim dim
            weight += self.mlp_mean
            weight += self.mlp_input_std * torch.randn(1, self.dim, generator=generator)
        return model

    def build_empty(self) -> "ConvNeXt":
        return ConvNeXt(self)


class _ConvEncoder(EncoderModule):
    """Base class of ConvMixer and ConvNeXt encoders, which return the mean of all patch tokens."""

    patch_embed: PatchEmbed

    def forward(self, images: Images) -> Float[Tensor, "batch dim"]:
        """Return the mean of all patch tokens of each image.

        The images must be normalised, and their sides must be multiples of the patch size.
        """
        return self.forward_features(images).mean(1)

    def forward_features(self, images: Images) -> Float[Tensor, "batch tokens dim"]:
        """Return the patch tokens after the final norm, row by row."""
        maps = self.embed(images)
        for block in self.blocks:
            maps = block(maps)
        return self.norm(maps.flatten(2).transpose(1, 2))

    def embed(self, images: Images) -> Maps:
        """Return the feature maps that enter the first block."""
        return self.patch_embed(images)


class ConvMixer(_ConvEncoder):
    """ConvMixer encoder. Create it with `build_encoder`, which draws its weights.

    Source: Trockman and Kolter, "Patches are all you need?", https://arxiv.org/abs/2201.09792,
    equations 2.1-2.3 of Trockman's thesis (2025). With `skip=False`, it is the model that table 2.3
    of the thesis calls "- Residual in Eq. 2.2".
    """

    config: ConvMixerConfig

    def __init__(self, config: ConvMixerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.dim)
        self.patch_norm = nn.BatchNorm2d(config.dim)
        self.blocks = nn.ModuleList(ConvMixerBlock(config) for _ in range(config.depth))
        # Each block ends with its own norm.
        self.norm = nn.Identity()

    def embed(self, images: Images) -> Maps:
        return self.patch_norm(F.gelu(self.patch_embed(images)))


class ConvMixerBlock(nn.Module):
    """A depthwise convolution with an optional skip connection, then a pointwise convolution.

    Each convolution is followed by GELU and batch normalisation.
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


class ConvNeXt(_ConvEncoder):
    """Single-stage ConvNeXt encoder. Create it with `build_encoder`, which draws its weights.

    The default configuration is ConvNeXt-256/8 of figure 3.36 in Trockman's thesis (2025). The
    thesis does not state three details that we chose: an MLP expansion of 4, no LayerScale, and a
    norm before the patches are averaged.

    Source: Liu et al., "A ConvNet for the 2020s", https://arxiv.org/abs/2201.03545, section 3.3,
    with one stage only.
    """

    config: ConvNeXtConfig

    def __init__(self, config: ConvNeXtConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config.patch_size, config.dim)
        self.blocks = nn.ModuleList(ConvNeXtBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=_EPS)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, a LayerNorm over channels and an MLP, with one skip connection.

    The skip connection adds the input of the block to the output of the MLP.
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


@torch.no_grad()
def _build(kind: Any, config: Any, seed: int) -> tuple[Any, Generator]:
    """Return a convolutional encoder with initial weights, and the generator that drew them.

    `kind` is the class of the encoder, `ConvMixer` or `ConvNeXt`.
    """
    with torch.random.fork_rng(devices=[]):
        model = kind(config)
    generator = torch.Generator().manual_seed(seed)
    depthwise = [block.depthwise for block in model.blocks]
    init_conv_layers_(model, depthwise, config.init, config.init_options, generator)
    return model, generator
