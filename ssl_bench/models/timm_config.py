"""The frozen description of an encoder whose layers are timm's, and the families it may be of."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssl_bench.composition.fields import (
    Bounds,
    CountOrZero,
    Depth,
    FractionBelowOne,
    Pixels,
    PositiveFraction,
    Width,
)
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import EncoderConfig, check_divisible
from ssl_bench.models.initialisers import FILTER_INITIALISERS, INITIALISERS, make_initialiser
from ssl_bench.models.registry import GrayingKind

if TYPE_CHECKING:
    from ssl_bench.models.timm_model import Shape, TimmEncoder

_PixelsOrNamed = Annotated[int, Bounds(0, 8192)]
_OF_BLOCKS = ("default", "skipless", "mimetic", "xavier")


@dataclass(frozen=True)
class Family:
    """What timm's models of one family have in common.

    Attributes:
        name: In messages.
        stages: How often the blocks change their grid; every stage halves it.
        patch_size: What a name without one stands for.
        arguments: timm's names of width, depth and heads, each of a stage or of all.
        sized: Whether timm is told the size of images.
        any_patch: Whether `patch_size` can be another one.
        windows: Whether attention stays within windows.
        dynamic: Whether timm has to be told that images may be of any size.
        class_blocks: Whether blocks of [CLS] alone come last.
        inits: Initialisers that know what to do with its blocks.
    """

    name: str
    stages: int
    patch_size: int
    arguments: Mapping[str, str]
    sized: bool = True
    any_patch: bool = True
    windows: bool = False
    dynamic: bool = False
    class_blocks: bool = False
    inits: Sequence[str] = _OF_BLOCKS


_WHOLE = {"widths": "embed_dim", "depths": "depth", "heads": "num_heads"}
_SWIN = {"widths": "embed_dim", "depths": "depths", "heads": "num_heads"}
_PVT = {"widths": "embed_dims", "depths": "depths", "heads": "num_heads"}
_CONVNEXT = {"widths": "dims", "depths": "depths"}
_CONVOLUTIONS = ("default", "uniform", "covariance")

# By the start of timm's name; timm itself says whether the rest is one.
FAMILIES: Mapping[str, Family] = {
    "swin_": Family("Swin", 4, 4, _SWIN, windows=True, dynamic=True),
    "cait_": Family("CaiT", 1, 16, _WHOLE, class_blocks=True),
    "pvt_v2_": Family("PVT v2", 4, 4, _PVT, sized=False, any_patch=False, inits=("default",)),
    "convnext": Family("ConvNeXt", 4, 4, _CONVNEXT, sized=False, inits=_CONVOLUTIONS),
    "vit_": Family("ViT", 1, 16, _WHOLE, dynamic=True),
    "deit_": Family("DeiT", 1, 16, _WHOLE, dynamic=True),
}


def family_of(name: str) -> Family | None:
    """That of a model of timm; None for one that cannot be trained here."""
    return next((family for start, family in FAMILIES.items() if name.startswith(start)), None)


@dataclass(frozen=True)
class TimmConfig(EncoderConfig):
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

    kind = "timm"
    training_fields = frozenset({"init", "init_options", "drop_path", "frozen_filters"})

    name: str = "swin_small_patch4_window7_224"
    image_size: Pixels = 224
    patch_size: _PixelsOrNamed = 0
    window_size: CountOrZero = 0
    widths: Sequence[Width] | None = None
    depths: Sequence[Depth] | None = None
    heads: Sequence[Width] | None = None
    drop_path: FractionBelowOne = 0.0
    graying: GrayingKind = "none"
    graying_exponent: PositiveFraction = 0.95
    graying_layers: Sequence[CountOrZero] | None = None
    graying_scope: Literal["map", "window"] = "map"
    graying_class_blocks: bool = False
    frozen_filters: bool = False
    init: str = "default"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        family = self.family
        match = re.search(r"patch(\d+)", self.name)
        named = int(match[1]) if match else family.patch_size
        if not family.any_patch and self.patch_size not in (0, named):
            raise ConfigurationError(
                f"model.patch_size of {family.name} is {named}, got {self.patch_size}; leave it out"
            )
        object.__setattr__(self, "patch_size", self.patch_size or named)
        if self.window_size and not family.windows:
            raise ConfigurationError(
                f"model.window_size is of Swin alone, got {self.window_size} for {self.name}; "
                "leave it out"
            )
        if family.windows and not self.window_size:
            match = re.search(r"window(\d+)", self.name)
            object.__setattr__(self, "window_size", int(match[1]) if match else 7)
        stages, known = family.stages, family.arguments
        for name in ("widths", "depths", "heads"):
            values = getattr(self, name)
            if values is not None and (name not in known or len(values) != stages):
                raise ConfigurationError(
                    f"model.{name} of {self.name} must have {stages if name in known else 0} "
                    f"entries, got {list(values)}"
                )
        if family.windows and self.widths is not None:
            doubled = [self.widths[0] * 2**stage for stage in range(stages)]
            if list(self.widths) != doubled:
                widths = str(doubled).replace(" ", "")
                raise ConfigurationError(
                    "model.widths of Swin must double from stage to stage, got "
                    f"{list(self.widths)}",
                    hint=(f"model.widths={widths}",),
                )
        check_divisible(self, "image_size", "patch_size")
        if self.graying != "none" and "heads" not in family.arguments:
            raise ConfigurationError(
                f"model.graying needs attention, got {self.graying} for {self.name}",
                hint=("model.graying=none",),
            )
        if self.graying_scope == "window" and not family.windows:
            raise ConfigurationError(
                f"model.graying_scope=window needs Swin's windows, {self.name} has none",
                hint=("model.graying_scope=map",),
            )
        if self.graying_class_blocks and not family.class_blocks:
            raise ConfigurationError(
                f"model.graying_class_blocks is of CaiT alone, got true for {self.name}",
                hint=("model.graying_class_blocks=false",),
            )
        every = {**INITIALISERS, **FILTER_INITIALISERS}
        make_initialiser({n: every[n] for n in family.inits}, self.init, self.init_options)
        if self.frozen_filters and "covariance" not in family.inits:
            raise ConfigurationError(
                "model.frozen_filters needs depthwise filters of ConvNeXt, got true for "
                f"{self.name}",
                hint=("model.frozen_filters=false",),
            )

    def build(self, *, seed: int) -> "TimmEncoder":
        from ssl_bench.models.timm_model import build_timm

        return build_timm(self, seed=seed)

    def build_empty(self) -> "TimmEncoder":
        from ssl_bench.models.timm_model import TimmEncoder

        return TimmEncoder(self)

    @property
    def family(self) -> Family:
        """What timm's models of that name have in common."""
        found = family_of(self.name)
        if found is None or "." in self.name:
            raise ConfigurationError(
                f"model.name must be a model of timm that begins with {', '.join(FAMILIES)}, and "
                f"have no tag, got {self.name!r}",
                hint=("model.name=swin_small_patch4_window7_224",),
            )
        return found

    @property
    def shape(self) -> "Shape":
        """What only timm knows of the model: its blocks. Imports timm, which takes seconds."""
        from ssl_bench.models.timm_model import shape_of

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
