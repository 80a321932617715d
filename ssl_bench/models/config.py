"""Configurations of encoders. A checkpoint stores the configuration together with the weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import torch

from ssl_bench.composition.choices import entry_points, load_entry_point
from ssl_bench.composition.fields import (
    Bounds,
    CountOrZero,
    Depth,
    FractionBelowOne,
    Pixels,
    PositiveFraction,
    RateOrZero,
    Width,
    check_fields,
    require_type,
)
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.models.initialisers import INITIALISERS, make_initialiser

if TYPE_CHECKING:
    from ssl_bench.models.vit import EncoderModule, VisionTransformer

Config = TypeVar("Config", bound="EncoderConfig")
# Fields of ViTConfig that were keys of `init_options` in earlier versions.
_FORMER_INIT_OPTIONS = {"mlp_mean", "mlp_input_std"}
# Import paths of the built-in encoders, attention modules and token graying modules. A module is
# imported when its name is used. Packages add names by entry points (docs/extending.md).
_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    # Subclasses of `EncoderConfig`, by their `kind`.
    "model": {
        "vit": "config:ViTConfig",
        "conv_mixer": "convolutional:ConvMixerConfig",
        "convnext": "convolutional:ConvNeXtConfig",
        "timm": "timm_config:TimmConfig",
        "state_space": "state_space:StateSpaceConfig",
    },
    # Functions that build a module from a configuration. Their key is the value of the field
    # `attention` or `graying`.
    "attention": {
        "softmax": "vit:Attention.from_config",
        "linear": "orthogonal:LinearAttention.from_config",
        "osa_qr": "orthogonal:OrthogonalAttention.from_config",
        "osa_newton_schulz": "orthogonal:OrthogonalAttention.from_config",
    },
    "graying": {
        "none": "vit:nn.Identity",
        "svd": "graying:TokenGraying.from_config",
        "dct": "graying:TokenGraying.from_config",
    },
}


def registered_names(group: str) -> list[str]:
    """Return the names of all implementations in a group, including names that packages add.

    Args:
        group: "model" (encoders such as "vit"), "attention" (attention modules such as "softmax")
            or "graying" (modules that increase small singular values of the token matrix).
    """
    return [*_BUILT_IN[group], *entry_points(group)]


def find_registered(group: str, name: str) -> Any:
    """Import and return the class or function that is registered under a name.

    Args:
        group: "model", "attention" or "graying".
        name: Name of a built-in implementation, or of an entry point of an installed package.

    Raises:
        ConfigurationError: The group does not contain the name.
        BrokenFileError: The module of an installed package cannot be imported.
    """
    if address := _BUILT_IN[group].get(name):
        module, _, attribute = address.partition(":")
        return attrgetter(attribute)(import_module(f"ssl_bench.models.{module}"))
    if name in (points := entry_points(group)):
        return load_entry_point(points[name])
    expected = " or ".join(registered_names(group))
    raise ConfigurationError(
        f"expected {expected} as {group}, got {name!r}. If this name comes from another package, "
        "install that package"
    )


def build_submodule(group: str, config: Any) -> Any:
    """Build the attention or token graying module that an encoder's configuration selects.

    Args:
        group: "attention", or "graying" (token graying, which increases small singular values of
            the token matrix). The field of this name in `config` selects the module.
        config: Configuration of the encoder.
    """
    return find_registered(group, getattr(config, group))(config)


class RegisteredName:
    """Rule for a field of a configuration: its value must be a registered name, such as "softmax".

    The type of such a field is `Annotated[str, RegisteredName(group)]`.

    Args:
        group: Group that contains the name: "model", "attention" or "graying".
    """

    def __init__(self, group: str) -> None:
        self.group = group

    def contains(self, value: str) -> bool:
        return value in _BUILT_IN[self.group] or value in entry_points(self.group)

    def __str__(self) -> str:
        return " or ".join(registered_names(self.group))


GrayingKind = Annotated[str, RegisteredName("graying")]


class EncoderConfig(ABC):
    """Base class of encoder configurations. Subclasses are frozen dataclasses.

    All fields must have JSON types. Other packages register a subclass with an entry point in the
    group `ssl_bench.model`. The name of the entry point must equal `kind`.

    Attributes:
        kind: Name that identifies the subclass in checkpoints, such as "vit".
        training_fields: Names of the fields that affect training but not the forward pass. Result
            records (stored results) do not contain these fields, because the weights already
            reflect them.
        image_size: Side of training images in pixels.
        patch_size: Side of a patch in pixels, or 0 if the model reads tokens instead of images.
        dim: Width of the tokens.
        depth: Number of blocks.
        num_heads: Number of attention heads, or 0 if there is no attention.
        num_prefix_tokens: Number of tokens before the patches: [CLS] and registers.
        num_registers: Number of registers among the prefix tokens.
        block_info: A `ssl_bench.models.timm_model.BlockInfo` with the width and stride of each
            block. None if all blocks have the width `dim` and the stride `patch_size`.
    """

    kind: ClassVar[str]
    training_fields: ClassVar[frozenset[str]] = frozenset({"init", "init_options"})
    # Tells type checkers that all subclasses are dataclasses.
    __dataclass_fields__: ClassVar[dict[str, Any]]
    image_size: int
    patch_size: int
    dim: int
    depth: int
    num_heads: int = 0
    num_prefix_tokens: int = 0
    num_registers: int = 0
    block_info: Any = None

    @abstractmethod
    def build(self, *, seed: int) -> "EncoderModule":
        """Return an encoder with initial weights.

        The weights depend only on the configuration and the seed. The state of PyTorch's global
        random number generator does not change.
        """

    @abstractmethod
    def build_empty(self) -> "EncoderModule":
        """Return an encoder with arbitrary weights, for callers that load a checkpoint into it."""

    def __post_init__(self) -> None:
        """Check the types of all fields, and convert lists to tuples.

        Initialiser options that are None are removed.
        """
        check_fields(self, "model")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "init_options":
                value = {key: option for key, option in value.items() if option is not None}
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
            object.__setattr__(self, item.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that can be stored as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[Config], values: Mapping[str, Any]) -> Config:
        """Create a configuration from a dictionary that `to_dict` returned.

        Raises:
            ConfigurationError: A key is unknown or a value is not allowed.
        """
        if unknown := values.keys() - {item.name for item in fields(cls)}:
            raise ConfigurationError(f"model has no key {', '.join(map(repr, sorted(unknown)))}")
        return cls(**values)

    @property
    def reads_images(self) -> bool:
        return self.patch_size > 0

    def summary(self) -> str:
        """Return a text such as "8 blocks of width 96, patches of 4 pixels, images of 32 x 32"."""
        side, patch = self.image_size, self.patch_size
        blocks = f"{self.depth} blocks of width {self.dim}"
        return f"{blocks}, patches of {patch} pixels, images of {side} x {side}"


@dataclass(frozen=True)
class ViTConfig(EncoderConfig):
    """Architecture and initialisation of a Vision Transformer.

    Attributes:
        image_size: Side in pixels of the images for which the position embedding is stored. It is
            resized for images of other sizes.
        mlp_ratio: Hidden width of the MLP divided by `dim`.
        attention: Kind of attention in all blocks. "softmax" is standard attention, and "linear" is
            attention without a softmax. "osa_qr" and "osa_newton_schulz" are orthogonal
            self-attention without biases, computed by a QR decomposition or by Newton-Schulz
            iterations.
        graying: Token graying at the start of a block, which increases small singular values of the
            token matrix. "svd" changes the singular values directly, and "dct" changes cosine
            coefficients instead.
        graying_exponent: Exponent of token graying in (0, 1]. 1 does not change the tokens. The
            paper "Always Skip Attention" uses 0.85 to 0.97 for "dct" and 0.5 to 0.9 for "svd".
        graying_layers: Indices of the blocks with token graying, starting at 0. None means all
            blocks.
        skip_attention: Whether to add the input of the attention sub-block to its output.
        skip_mlp: Whether to add the input of the MLP sub-block to its output.
        norm: Normalisation before the attention, before the MLP and after the last block.
        qkv_bias: Whether to add biases to queries, keys and values.
        drop_path: Probability of dropping a sub-block of the last block, for each sample in
            training. The probability increases linearly from 0 in the first block to this value. A
            value above 0 requires both skip connections.
        num_registers: Number of registers between [CLS] and the patches. Registers have no position
            embedding.
        position_embedding: Position embedding that is trained ("learned") or fixed ("sinusoidal").
        truncated_tokens: Whether to draw the initial [CLS], registers and learned positions within
            two standard deviations of 0. Official DINO and timm truncate at -2 and 2, which is 100
            standard deviations.
        position_scale: Factor by which sinusoidal positions are multiplied.
        mlp_mean: Constant that is added to all initial weights of the first layer of each MLP.
        mlp_input_std: Standard deviation of random offsets of the initial weights in the first
            layer of each MLP. One normal offset is drawn per input channel, and is added to the
            weights from this channel to all hidden units.
        init: Name of an initialiser in `ssl_bench.models.initialisers`.
        init_options: Options of the initialiser. An option that is None has its default value.
    """

    kind = "vit"
    training_fields = frozenset(
        {
            *("init", "init_options", "mlp_mean", "mlp_input_std"),
            # Stored positions are already multiplied by `position_scale`.
            *("truncated_tokens", "position_scale", "drop_path"),
        }
    )

    image_size: Pixels = 224
    patch_size: Pixels = 16
    dim: Width = 384
    depth: Depth = 12
    num_heads: Width = 6
    mlp_ratio: Annotated[float, Bounds(0, 1000, allow_low=False)] = 4.0
    attention: Annotated[str, RegisteredName("attention")] = "softmax"
    graying: GrayingKind = "none"
    graying_exponent: PositiveFraction = 0.95
    graying_layers: Sequence[CountOrZero] | None = None
    skip_attention: bool = True
    skip_mlp: bool = True
    norm: Literal["layernorm", "none"] = "layernorm"
    qkv_bias: bool = True
    drop_path: FractionBelowOne = 0.0
    num_registers: Annotated[int, Bounds(0, 1000)] = 0
    position_embedding: Literal["learned", "sinusoidal"] = "learned"
    truncated_tokens: bool = False
    position_scale: Annotated[float, Bounds(0, 1000, allow_low=False)] = 1.0
    mlp_mean: Annotated[float, Bounds(-1000, 1000)] = 0.0
    mlp_input_std: RateOrZero = 0.0
    init: str = "default"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._move_former_options()
        check_divisible(self, "image_size", "patch_size")
        check_divisible(self, "dim", "num_heads")
        if self.position_embedding == "sinusoidal" and self.dim % 4:
            step = math.lcm(4, self.num_heads)
            width = -(-self.dim // step) * step
            raise ConfigurationError(
                f"model.dim must be a multiple of 4 for sinusoidal positions, got {self.dim}",
                hint=(f"model.dim={width}",),
            )
        check_layers("graying_layers", self.graying_layers, self.depth)
        if self.drop_path and not (self.skip_attention and self.skip_mlp):
            raise ConfigurationError(
                f"model.drop_path={self.drop_path} needs model.skip_attention=true and "
                "model.skip_mlp=true",
                hint=("model.drop_path=0",),
            )
        if self.position_scale != 1 and self.position_embedding != "sinusoidal":
            raise ConfigurationError(
                f"model.position_scale needs sinusoidal positions, got {self.position_scale:g} "
                f"with {self.position_embedding} positions",
                hint=("model.position_embedding=sinusoidal", "or", "model.position_scale=1"),
            )
        with torch.device("meta"):
            build_submodule("attention", self)
        initialiser = make_initialiser(INITIALISERS, self.init, self.init_options)
        if self.num_heads < (min_heads := initialiser.min_heads):
            raise ConfigurationError(
                f"model.init={self.init} needs at least {min_heads} heads, got {self.num_heads}",
                hint=(f"model.num_heads={min_heads}",),
            )

    def _move_former_options(self) -> None:
        """Move options that earlier versions stored in `init_options` to fields of their own."""
        options = dict(self.init_options)
        for item in fields(self):
            if item.name not in _FORMER_INIT_OPTIONS & options.keys():
                continue
            option, value = options.pop(item.name), getattr(self, item.name)
            require_type(f"model.init_options.{item.name}", item.type, option)
            if value not in (item.default, option):
                raise ConfigurationError(
                    f"model.init_options.{item.name}={option} is the former name of a key that now "
                    f"has another value: model.{item.name}={value}",
                    hint=(f"model.init_options.{item.name}=null",),
                )
            object.__setattr__(self, item.name, float(option))
        object.__setattr__(self, "init_options", options)

    def build(self, *, seed: int) -> "VisionTransformer":
        from ssl_bench.models.vit import build_vit

        return build_vit(self, seed=seed)

    def build_empty(self) -> "VisionTransformer":
        from ssl_bench.models.vit import VisionTransformer

        return VisionTransformer(self)

    @property
    def grid_size(self) -> int:
        """Number of patches along one side of the stored position embedding."""
        return self.image_size // self.patch_size

    @property
    def hidden_dim(self) -> int:
        """Width of the hidden layer of each MLP."""
        return round(self.dim * self.mlp_ratio)

    @property
    def num_prefix_tokens(self) -> int:
        return 1 + self.num_registers


def config_from_dict(kind: str, values: Mapping[str, Any]) -> EncoderConfig:
    """Create the configuration of an encoder from a dictionary.

    Args:
        kind: Name of the configuration class, such as "vit".
        values: Fields of the configuration, in the form that `EncoderConfig.to_dict` returns.

    Raises:
        ConfigurationError: The kind or a key is unknown, or a value is not allowed.
    """
    return find_registered("model", kind).from_dict(values)


def check_divisible(config: EncoderConfig, name: str, divisor_name: str) -> None:
    """Raise ConfigurationError if a field of a configuration is not a multiple of another field.

    The error message suggests the nearest multiples.
    """
    value, divisor = getattr(config, name), getattr(config, divisor_name)
    if value % divisor:
        lower = value - value % divisor
        key = f"model.{name}"
        ways = [(f"{key}={size}",) for size in (lower, lower + divisor) if size]
        raise ConfigurationError(
            f"{key} must be a multiple of model.{divisor_name} = {divisor}, got {value}",
            hint=join_alternatives(*ways),
        )


def check_layers(name: str, layers: Sequence[int] | None, depth: int) -> None:
    """Raise ConfigurationError unless a field is None or a non-empty list of block indices.

    Args:
        name: Name of the field, for the error message.
        layers: Value of the field.
        depth: Number of blocks. Valid indices are 0 to depth - 1.
    """
    if layers is None:
        return
    outside = [layer for layer in layers if layer not in range(depth)]
    if outside or not layers:
        raise ConfigurationError(
            f"model.{name} expects blocks in 0..{depth - 1}, or null for all blocks, got "
            f"{', '.join(map(str, outside)) or 'none'}",
            hint=(f"model.{name}=null",),
        )
