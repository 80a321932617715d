"""The frozen descriptions of encoders; what a checkpoint stores beside its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, get_args

from ssl_bench.composition.fields import (
    CountOrZero,
    Depth,
    Pixels,
    PositiveShare,
    RateOrZero,
    ShareBelowOne,
    Width,
    Within,
    check_fields,
)
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.convnext_config import ConvNeXtConfig
from ssl_bench.models.fields import (
    GrayingKind,
    as_floats,
    check_divisible,
    check_layers,
    from_dict,
    take_older_names,
    without_defaults,
)
from ssl_bench.models.initialisers.options import check_block_options, check_filter_options
from ssl_bench.models.state_space.config import StateSpaceConfig
from ssl_bench.models.timm_config import TimmConfig

AttentionKind = Literal["softmax", "linear", "osa_qr", "osa_newton_schulz"]
Norm = Literal["layernorm", "none"]
PositionEmbedding = Literal["learned", "sinusoidal"]


@dataclass(frozen=True)
class ViTConfig:
    """Architecture and initialisation of a Vision Transformer.

    Args:
        image_size: Side in pixels for which positions are stored; other sizes resize them.
        mlp_ratio: Hidden width of the MLP over `dim`.
        attention: "linear" has no softmax; "osa_qr" and "osa_newton_schulz" rotate the tokens, see
            `ssl_bench.models.attention.OrthogonalAttention`; they have no biases.
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
        init: Name of an initialiser, see `ssl_bench.models.initialisers.options`.
        init_options: Its hyperparameters that differ from their defaults; None means the default.
            `mlp_mean` and `mlp_input_std` among them are older names of the fields.
    """

    image_size: Pixels = 224
    patch_size: Pixels = 16
    dim: Width = 384
    depth: Depth = 12
    num_heads: Width = 6
    mlp_ratio: Annotated[float, Within(0, 1000, above=True)] = 4.0
    attention: AttentionKind = "softmax"
    graying: GrayingKind = "none"
    graying_exponent: PositiveShare = 0.95
    graying_layers: Sequence[CountOrZero] | None = None
    skip_attention: bool = True
    skip_mlp: bool = True
    norm: Norm = "layernorm"
    qkv_bias: bool = True
    drop_path: ShareBelowOne = 0.0
    num_registers: Annotated[int, Within(0, 1000)] = 0
    position_embedding: PositionEmbedding = "learned"
    truncated_tokens: bool = False
    position_scale: Annotated[float, Within(0, 1000, above=True)] = 1.0
    mlp_mean: Annotated[float, Within(-1000, 1000)] = 0.0
    mlp_input_std: RateOrZero = 0.0
    init: str = "default"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "model")
        object.__setattr__(self, "init_options", without_defaults(self.init_options))
        take_older_names(self, "init_options", ("mlp_mean", "mlp_input_std"))
        as_floats(self)
        self._check_sizes()
        self._check_graying()
        self._check_names()
        check_block_options(self.init, self.init_options)

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ViTConfig":
        """Read what `to_dict` wrote.

        Raises:
            ConfigurationError: A key that no version of this class knows, or a wrong value.
        """
        return from_dict(cls, values)

    def _check_sizes(self) -> None:
        check_divisible(self, "image_size", "patch_size")
        check_divisible(self, "dim", "num_heads")
        if self.position_embedding == "sinusoidal" and self.dim % 4:
            raise ConfigurationError(
                f"model.dim must be a multiple of 4 for sinusoidal positions, got {self.dim}"
            )

    def _check_graying(self) -> None:
        if self.graying_layers is not None:
            # JSON and YAML give lists; equal configurations shall be equal.
            object.__setattr__(self, "graying_layers", tuple(self.graying_layers))
        check_layers(self.graying_layers, self.depth)

    def _check_names(self) -> None:
        choices = {
            "attention": AttentionKind,
            "graying": GrayingKind,
            "norm": Norm,
            "position_embedding": PositionEmbedding,
        }
        for name, kinds in choices.items():
            value, known = getattr(self, name), get_args(kinds)
            if value not in known:
                raise ConfigurationError(
                    f"model.{name} must be one of {', '.join(known)}, got {value!r}"
                )
        if self.drop_path and not (self.skip_attention and self.skip_mlp):
            raise ConfigurationError(
                f"model.drop_path needs both skips, got {self.drop_path} for a skipless encoder; "
                "set model.drop_path=0"
            )
        if self.position_scale != 1 and self.position_embedding != "sinusoidal":
            raise ConfigurationError(
                "model.position_scale goes with model.position_embedding=sinusoidal, got "
                f"{self.position_scale:g} and {self.position_embedding} positions"
            )
        if self.attention.startswith("osa") and self.qkv_bias:
            raise ConfigurationError(
                f"model.attention={self.attention} has no biases; set model.qkv_bias=false"
            )
        if self.init == "osa" and self.num_heads < 2:
            raise ConfigurationError(
                "model.init=osa draws 2 x head width orthogonal columns of model.dim entries, so "
                f"model.num_heads must be 2 or more, got {self.num_heads}"
            )


@dataclass(frozen=True)
class ConvMixerConfig:
    """Architecture and initialisation of a ConvMixer; the defaults are ConvMixer-256/8.

    Args:
        image_size: Side in pixels it is trained at; any other size works, nothing is resized.
        kernel_size: Side of the depthwise filters in patches; odd.
        skip: Add the input of the depthwise convolution to its output, the only skip there is.
        frozen_filters: Leave the depthwise filters, not their biases, as they were drawn.
        init: Of the depthwise filters, see `ssl_bench.models.initialisers.options`; all else
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
        check_filter_options(self.init, self.init_options)

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


EncoderConfig = ViTConfig | ConvMixerConfig | ConvNeXtConfig | TimmConfig | StateSpaceConfig
_KINDS: Mapping[str, type[EncoderConfig]] = {
    "vit": ViTConfig,
    "conv_mixer": ConvMixerConfig,
    "convnext": ConvNeXtConfig,
    "timm": TimmConfig,
    "state_space": StateSpaceConfig,
}


def kind_of(config: EncoderConfig) -> str:
    """The name under which `config_of` knows its class."""
    (kind,) = (name for name, known in _KINDS.items() if isinstance(config, known))
    return kind


def config_of(kind: str, values: Mapping[str, Any]) -> EncoderConfig:
    """What `to_dict` of a configuration of that kind wrote.

    Raises:
        ConfigurationError: A kind or key that this version does not know, or a wrong value.
    """
    if kind not in _KINDS:
        raise ConfigurationError(f"expected {' or '.join(_KINDS)}, got a model of kind {kind!r}")
    return _KINDS[kind].from_dict(values)
