"""The frozen description of an encoder whose layers are timm's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from ssl_bench.composition.fields import (
    CountOrZero,
    Depth,
    Pixels,
    PositiveShare,
    ShareBelowOne,
    Width,
    Within,
    check_fields,
)
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.fields import (
    GrayingKind,
    GrayingScope,
    as_floats,
    check_divisible,
    from_dict,
    without_defaults,
)
from ssl_bench.models.initialisers.choice import make_initialiser
from ssl_bench.models.initialisers.options import BLOCK_OPTIONS, FILTER_OPTIONS
from ssl_bench.models.timm_families import FAMILIES, Family, family_of, window_of

if TYPE_CHECKING:
    from ssl_bench.models.timm_anatomy import Shape

_PixelsOrNamed = Annotated[int, Within(0, 8192)]
_OF_STAGES = ("widths", "depths", "heads")


@dataclass(frozen=True)
class TimmConfig:
    """Architecture and initialisation of a Swin, CaiT, PVT v2, ConvNeXt or ViT of timm.

    Args:
        name: timm's, without a tag; it gives everything that the other fields leave open.
        image_size: Side in pixels it is trained at, a multiple of what a token of the last stage
            stands for: every stage halves the grid.
        patch_size: Of the first layer; 0 takes what the name says.
        window_size: Patches along a side of Swin's windows; 0 takes what the name says. timm makes
            them no larger than the grid of their stage.
        widths: Of every stage in turn; None takes timm's.
        depths: Blocks of every stage.
        heads: Of every stage.
        drop_path: timm's `drop_path_rate`: the probability to drop a sub-block of the last block,
            of every one in CaiT.
        graying: What blocks with attention do to their tokens first, see
            `ssl_bench.models.graying`.
        graying_exponent: In (0, 1]; 1 changes nothing.
        graying_layers: Blocks that do so, counted through all stages; None stands for all.
        graying_scope: All tokens of an image are one matrix, or those of each of Swin's windows.
        graying_class_blocks: CaiT's blocks of [CLS] do so too, with [CLS] before the patches.
        frozen_filters: Leave ConvNeXt's depthwise filters, not their biases, as they were drawn.
        init: "default" is timm's own. Of ConvNeXt "uniform" (PyTorch's, all layers) and
            "covariance" (that, and its depthwise filters); of all others but PVT v2 the
            initialisers of `ViTConfig` for attention and MLP, where "osa" has no meaning.
        init_options: Its hyperparameters that differ from their defaults; None means the default.
    """

    name: str = "swin_small_patch4_window7_224"
    image_size: Pixels = 224
    patch_size: _PixelsOrNamed = 0
    window_size: CountOrZero = 0
    widths: Sequence[Width] | None = None
    depths: Sequence[Depth] | None = None
    heads: Sequence[Width] | None = None
    drop_path: ShareBelowOne = 0.0
    graying: GrayingKind = "none"
    graying_exponent: PositiveShare = 0.95
    graying_layers: Sequence[CountOrZero] | None = None
    graying_scope: GrayingScope = "map"
    graying_class_blocks: bool = False
    frozen_filters: bool = False
    init: str = "default"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "model")
        object.__setattr__(self, "init_options", without_defaults(self.init_options))
        as_floats(self)
        for name in (*_OF_STAGES, "graying_layers"):
            if getattr(self, name) is not None:
                # JSON and YAML give lists; equal configurations shall be equal.
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._take_sizes_from_name()
        self._check_stages()
        self._check_graying()
        self._check_init()

    @property
    def family(self) -> Family:
        """What timm's models of that name have in common.

        Raises:
            ConfigurationError: none that this suite trains.
        """
        found = family_of(self.name)
        if found is None or "." in self.name:
            raise ConfigurationError(
                f"model.name must be a model of timm that begins with {', '.join(FAMILIES)}, and "
                f"have no tag, got {self.name!r}; such as swin_small_patch4_window7_224"
            )
        return found

    @property
    def shape(self) -> "Shape":
        """What only timm knows of the model: its blocks. Imports torch; cached."""
        from ssl_bench.models.timm_anatomy import shape_of

        return shape_of(self)

    @property
    def dim(self) -> int:
        """Width of the last block, and of what the encoder gives."""
        return self.shape.widths[-1]

    @property
    def depth(self) -> int:
        """Blocks of all stages, without those of [CLS] alone."""
        return len(self.shape.widths)

    @property
    def num_heads(self) -> int:
        """Of the first block; 0 where there is no attention."""
        return self.shape.num_heads

    @property
    def num_prefix_tokens(self) -> int:
        """[CLS] and registers, which come before the patches in blocks."""
        return self.shape.num_prefix_tokens

    @property
    def num_registers(self) -> int:
        return self.shape.num_registers

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TimmConfig":
        """Read what `to_dict` wrote.

        Raises:
            ConfigurationError: A key that no version of this class knows, or a wrong value.
        """
        return from_dict(cls, values)

    def _take_sizes_from_name(self) -> None:
        family = self.family
        named = family.patch_of(self.name)
        if not family.any_patch and self.patch_size not in (0, named):
            raise ConfigurationError(
                f"model.patch_size of {family.name} is {named}, got {self.patch_size}; leave it out"
            )
        if self.window_size and not family.windows:
            raise ConfigurationError(
                f"model.window_size is of Swin alone, got {self.window_size} for {self.name}; "
                "leave it out"
            )
        object.__setattr__(self, "patch_size", self.patch_size or named)
        if family.windows:
            object.__setattr__(self, "window_size", self.window_size or window_of(self.name))

    def _check_stages(self) -> None:
        stages, given = self.family.stages, [n for n in _OF_STAGES if getattr(self, n) is not None]
        for name in given:
            values = getattr(self, name)
            if name not in self.family.arguments or len(values) != stages:
                needs = stages if name in self.family.arguments else 0
                raise ConfigurationError(
                    f"model.{name} of {self.name} must have {needs} entries, got {list(values)}"
                )
        if self.family.windows and self.widths is not None:
            doubled = [self.widths[0] * 2**stage for stage in range(stages)]
            if list(self.widths) != doubled:
                raise ConfigurationError(
                    f"model.widths of Swin must double from stage to stage, got "
                    f"{list(self.widths)}; take {doubled}"
                )
        check_divisible(self, "image_size", "patch_size")

    def _check_graying(self) -> None:
        family = self.family
        if self.graying != "none" and not family.has_attention:
            raise ConfigurationError(
                f"model.graying needs attention, got {self.graying} for {self.name}; "
                "set model.graying=none"
            )
        if self.graying_scope == "window" and not family.windows:
            raise ConfigurationError(
                f"model.graying_scope=window needs Swin's windows, {self.name} has none; take map"
            )
        if self.graying_class_blocks and not family.class_blocks:
            raise ConfigurationError(
                f"model.graying_class_blocks is of CaiT alone, got true for {self.name}; "
                "set it to false"
            )

    def _check_init(self) -> None:
        every = {**BLOCK_OPTIONS, **FILTER_OPTIONS}
        known = {name: every[name] for name in self.family.inits}
        make_initialiser(known, self.init, self.init_options)
        if self.frozen_filters and not self.family.has_filters:
            raise ConfigurationError(
                f"model.frozen_filters needs depthwise filters of ConvNeXt, got true for "
                f"{self.name}; set it to false"
            )
