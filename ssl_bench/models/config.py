"""The frozen descriptions of encoders; what a checkpoint stores beside its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
from ssl_bench.models.initialisers import FILTER_INITIALISERS, INITIALISERS, make_initialiser

Config = TypeVar("Config", bound="EncoderConfig")
AttentionKind = Literal["softmax", "linear", "osa_qr", "osa_newton_schulz"]
GrayingKind = Literal["none", "svd", "dct"]
Norm = Literal["layernorm", "none"]
PositionEmbedding = Literal["learned", "sinusoidal"]
# Fields that were among `init_options` once.
_OLDER_OPTIONS = {"mlp_mean", "mlp_input_std"}


class EncoderConfig:
    """What describes an encoder of any kind; each kind is a frozen dataclass.

    Attributes:
        kind: Its name in checkpoints.
        image_size: Side in pixels.
        patch_size: Side in pixels.
        num_prefix_tokens: Tokens before the patches: [CLS], registers.
        num_registers: How many of these are no [CLS].
    """

    kind: ClassVar[str]
    # What says to type checkers that every kind is a dataclass.
    __dataclass_fields__: ClassVar[dict[str, Any]]
    image_size: int
    patch_size: int
    dim: int
    depth: int
    # Unless a kind says otherwise, there is no attention, no [CLS] and no register.
    num_heads: int = 0
    num_prefix_tokens: int = 0
    num_registers: int = 0
    # Of every block, where only timm knows them.
    shape: Any = None

    def __post_init__(self) -> None:
        """Hold fields to their types; equal configurations become equal texts."""
        check_fields(self, "model")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "init_options":
                value = {key: one for key, one in value.items() if one is not None}
            elif isinstance(item.default, float):
                value = float(value)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
            object.__setattr__(self, item.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[Config], values: Mapping[str, Any]) -> Config:
        """Read what `to_dict` wrote.

        Raises:
            ConfigurationError: A key that no version of this class knows, or a wrong value.
        """
        if unknown := values.keys() - {item.name for item in fields(cls)}:
            raise ConfigurationError(f"model has no key {', '.join(map(repr, sorted(unknown)))}")
        return cls(**values)


@dataclass(frozen=True)
class ViTConfig(EncoderConfig):
    """Architecture and initialisation of a Vision Transformer.

    Args:
        image_size: Side in pixels for which positions are stored; other sizes resize them.
        mlp_ratio: Hidden width of the MLP over `dim`.
        attention: "linear" has no softmax; "osa_qr" and "osa_newton_schulz" rotate the tokens, see
            `ssl_bench.models.OrthogonalAttention`; they have no biases.
        graying: What a block does to its tokens first, see
            `ssl_bench.models.graying.TokenGraying`.
        graying_exponent: In (0, 1]; 1 changes nothing. The default is the paper's for "dct", which
            takes .85 to .97 there, and "svd" .5 to .9.
        graying_layers: Blocks that do so; None stands for all.
        skip_attention: Add the input of the attention sub-block to its output.
        skip_mlp: Add the input of the MLP sub-block to its output.
        drop_path: Probability, in [0, 1), to drop a sub-block of the last block for a sample; it
            rises linearly from 0 at the first block. Needs skips.
        num_registers: Extra tokens between [CLS] and the patches; they carry no position.
        position_embedding: "sinusoidal" is fixed, "learned" is trained.
        truncated_tokens: [CLS], registers and learned positions start within two deviations of 0.
            Official DINO and timm cut at -2 and 2, which is a hundred deviations.
        position_scale: Factor of sinusoidal positions; learned ones have none.
        mlp_mean: Added to all entries of the first matrix of every MLP, whatever drew it.
        mlp_input_std: Deviation of a normal number that each input channel of that matrix adds to
            its weights towards all hidden units.
        init: Name of an initialiser, see `ssl_bench.models.initialisers`.
        init_options: Its hyperparameters that differ from their defaults; None means the default.
            `mlp_mean` and `mlp_input_std` among them are older names of the fields.
    """

    kind = "vit"

    image_size: Pixels = 224
    patch_size: Pixels = 16
    dim: Width = 384
    depth: Depth = 12
    num_heads: Width = 6
    mlp_ratio: Annotated[float, Bounds(0, 1000, allow_low=False)] = 4.0
    attention: AttentionKind = "softmax"
    graying: GrayingKind = "none"
    graying_exponent: PositiveFraction = 0.95
    graying_layers: Sequence[CountOrZero] | None = None
    skip_attention: bool = True
    skip_mlp: bool = True
    norm: Norm = "layernorm"
    qkv_bias: bool = True
    drop_path: FractionBelowOne = 0.0
    num_registers: Annotated[int, Bounds(0, 1000)] = 0
    position_embedding: PositionEmbedding = "learned"
    truncated_tokens: bool = False
    position_scale: Annotated[float, Bounds(0, 1000, allow_low=False)] = 1.0
    mlp_mean: Annotated[float, Bounds(-1000, 1000)] = 0.0
    mlp_input_std: RateOrZero = 0.0
    init: str = "default"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        said = dict(self.init_options)
        for item in (one for one in fields(self) if one.name in _OLDER_OPTIONS & said.keys()):
            value, here = said.pop(item.name), getattr(self, item.name)
            require_type(f"model.init_options.{item.name}", item.type, value)
            if here not in (item.default, value):
                raise ConfigurationError(
                    f"model.init_options.{item.name} is an older name of model.{item.name}, got "
                    f"{value} and {here}; give the latter alone"
                )
            object.__setattr__(self, item.name, float(value))
        object.__setattr__(self, "init_options", said)
        check_divisible(self, "image_size", "patch_size")
        check_divisible(self, "dim", "num_heads")
        if self.position_embedding == "sinusoidal" and self.dim % 4:
            raise ConfigurationError(
                f"model.dim must be a multiple of 4 for sinusoidal positions, got {self.dim}"
            )
        check_layers("graying_layers", self.graying_layers, self.depth)
        if self.drop_path and not (self.skip_attention and self.skip_mlp):
            raise ConfigurationError(
                f"model.drop_path needs both skips, got {self.drop_path} for a skipless encoder",
                hint=("model.drop_path=0",),
            )
        if self.position_scale != 1 and self.position_embedding != "sinusoidal":
            raise ConfigurationError(
                f"model.position_scale scales sinusoidal positions, got {self.position_scale:g} "
                f"and {self.position_embedding} positions",
                hint=("model.position_embedding=sinusoidal", "or", "model.position_scale=1"),
            )
        if self.attention.startswith("osa") and self.qkv_bias:
            raise ConfigurationError(
                f"model.attention={self.attention} has no biases", hint=("model.qkv_bias=false",)
            )
        if self.init == "osa" and self.num_heads < 2:
            raise ConfigurationError(
                "model.init=osa draws 2 x head width orthogonal columns of model.dim entries, "
                f"expected two heads or more, got {self.num_heads}",
                hint=("model.num_heads=2",),
            )
        make_initialiser(INITIALISERS, self.init, self.init_options)

    @property
    def grid_size(self) -> int:
        """Patches along one side of the stored position embedding."""
        return self.image_size // self.patch_size

    @property
    def hidden_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return round(self.dim * self.mlp_ratio)

    @property
    def num_prefix_tokens(self) -> int:
        """[CLS] and registers, which come before the patches."""
        return 1 + self.num_registers


@dataclass(frozen=True)
class ConvMixerConfig(EncoderConfig):
    """Architecture and initialisation of a ConvMixer; the defaults are ConvMixer-256/8.

    Args:
        image_size: Side in pixels it is trained at; any other size works, nothing is resized.
        kernel_size: Side of the depthwise filters in patches; odd.
        skip: Add the input of the depthwise convolution to its output, the only skip there is.
        frozen_filters: Leave the depthwise filters, not their biases, as they were drawn.
        init: Of the depthwise filters, see `ssl_bench.models.initialisers`; all else starts as
            PyTorch starts convolutions.
        init_options: Its hyperparameters that differ from their defaults; None means the default.
    """

    kind = "conv_mixer"

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
                "model.kernel_size must be odd, so that a filter has a middle, got "
                f"{self.kernel_size}",
                hint=(f"model.kernel_size={near}",),
            )
        make_initialiser(FILTER_INITIALISERS, self.init, self.init_options)


@dataclass(frozen=True)
class ConvNeXtConfig(EncoderConfig):
    """Architecture and initialisation of a ConvNeXt of one stage; the defaults are 256/8.

    Args:
        image_size: Side in pixels it is trained at; any other size works, nothing is resized.
        frozen_filters: Leave the depthwise filters, not their biases, as they were drawn.
        mlp_mean: Added to all entries of the first matrix of every MLP, equation 3.40 of the thesis
            whose ConvNeXt this is (Trockman, "Mimetic initialization", 2025).
        mlp_input_std: Deviation of a normal number that each input channel of that matrix adds to
            its weights towards all hidden units, equation 3.39.
        init: Of the depthwise filters of 7 x 7, see `ssl_bench.models.initialisers`; all else
            starts as PyTorch starts convolutions.
        init_options: Its hyperparameters that differ from their defaults; None means the default.
    """

    kind = "convnext"

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


KINDS: Mapping[str, tuple[str, str, str]] = {
    "vit": ("config.ViTConfig", "vit.VisionTransformer", "vit.build_vit"),
    "conv_mixer": (
        "config.ConvMixerConfig",
        "convolutional.ConvMixer",
        "convolutional.build_convolutional",
    ),
    "convnext": (
        "config.ConvNeXtConfig",
        "convolutional.ConvNeXt",
        "convolutional.build_convolutional",
    ),
    "timm": ("timm_config.TimmConfig", "timm_model.TimmEncoder", "timm_model.build_timm"),
    "state_space": (
        "state_space.StateSpaceConfig",
        "state_space.StateSpaceModel",
        "state_space.build_state_space_model",
    ),
}
"""Of each kind of encoder the configuration, the class, and what makes one with initial weights.

By name, and imported when there is one: timm takes seconds, and these files import this one.
"""


def of_kind(address: str) -> Any:
    """What a part of `KINDS` names."""
    module, _, name = address.rpartition(".")
    return getattr(import_module(f"ssl_bench.models.{module}"), name)


def config_of(kind: str, values: Mapping[str, Any]) -> EncoderConfig:
    """What `to_dict` of a configuration of that kind wrote.

    Raises:
        ConfigurationError: A kind or key that this version does not know, or a wrong value.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"expected {' or '.join(KINDS)}, got a model of kind {kind!r}")
    config, _, _ = KINDS[kind]
    return of_kind(config).from_dict(values)


def check_divisible(config: EncoderConfig, name: str, divisor_name: str) -> None:
    """Refuse a field that another one does not divide; the message names the nearest that fit."""
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
    """Refuse blocks that an encoder does not have; None stands for all."""
    if layers is None:
        return
    outside = [layer for layer in layers if layer not in range(depth)]
    if outside or not layers:
        raise ConfigurationError(
            f"model.{name} must lie in 0..{depth - 1}, got "
            f"{', '.join(map(str, outside)) or 'none'}; null stands for all blocks"
        )
