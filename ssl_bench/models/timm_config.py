"""Configuration of the timm models that this suite can train, and the families of these models."""

import re
from collections.abc import Collection, Mapping, Sequence
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
from ssl_bench.models.config import EncoderConfig, GrayingKind, check_divisible
from ssl_bench.models.initialisers import FILTER_INITIALISERS, INITIALISERS, make_initialiser

if TYPE_CHECKING:
    from ssl_bench.models.timm_model import BlockInfo, TimmEncoder

_PatchSize = Annotated[int, Bounds(0, 8192)]
_BLOCK_INITIALISERS = ("default", "skipless", "mimetic", "xavier")


@dataclass(frozen=True)
class Family:
    """Properties that all models of a timm family share.

    Attributes:
        name: Name of the family in messages.
        stages: Number of stages. Each stage after the first halves the token grid.
        patch_size: Patch size in pixels of models whose name states no patch size.
        arguments: timm's names of the constructor arguments that set the fields "widths", "depths"
            and "heads" of `TimmConfig`.
        options: Other arguments that timm's constructor accepts: some of "img_size", "patch_size",
            "window_size" and "dynamic_img_size". Models with "dynamic_img_size" accept images of
            any size.
        class_blocks: Whether the last blocks only update [CLS], as in CaiT.
        inits: Names of the initialisers that support the blocks of the family.
    """

    name: str
    stages: int
    patch_size: int
    arguments: Mapping[str, str]
    options: Collection[str]
    class_blocks: bool = False
    inits: Sequence[str] = _BLOCK_INITIALISERS


_VIT = {"widths": "embed_dim", "depths": "depth", "heads": "num_heads"}
_SWIN = {"widths": "embed_dim", "depths": "depths", "heads": "num_heads"}
_PVT = {"widths": "embed_dims", "depths": "depths", "heads": "num_heads"}
_CONVNEXT = {"widths": "dims", "depths": "depths"}
_CONVNEXT_INITIALISERS = ("default", "uniform", "covariance")
_DYNAMIC = ("img_size", "patch_size", "dynamic_img_size")

# Families by the prefix of the model's name in timm. `create_timm_model` checks the full name.
FAMILIES: Mapping[str, Family] = {
    "swin_": Family("Swin", 4, 4, _SWIN, (*_DYNAMIC, "window_size")),
    "cait_": Family("CaiT", 1, 16, _VIT, ("img_size", "patch_size"), class_blocks=True),
    "pvt_v2_": Family("PVT v2", 4, 4, _PVT, (), inits=("default",)),
    "convnext": Family("ConvNeXt", 4, 4, _CONVNEXT, ("patch_size",), inits=_CONVNEXT_INITIALISERS),
    "vit_": Family("ViT", 1, 16, _VIT, _DYNAMIC),
    "deit_": Family("DeiT", 1, 16, _VIT, _DYNAMIC),
}


@dataclass(frozen=True)
class TimmConfig(EncoderConfig):
    """Architecture and initialisation of timm's Swin, CaiT, PVT v2, ConvNeXt, ViT or DeiT.

    Args:
        name: timm's name of the model, without a tag. It determines all properties that no other
            field sets. An error is raised for DINOv3, and for a ConvNeXt whose stem is not a patch
            embedding.
        image_size: Side of the training images in pixels. It must be a multiple of the stride of
            the last stage. Each stage after the first halves the token grid.
        patch_size: Patch size of the first layer in pixels. 0 means the size in the name.
        window_size: Side of Swin's windows in patches. 0 means the size in the name. In stages
            whose token grid is smaller than this, timm uses the whole grid as the window.
        widths: Width of each stage. None means timm's widths.
        depths: Number of blocks of each stage. None means timm's depths.
        heads: Number of attention heads in each stage. None means timm's numbers.
        drop_path: timm's `drop_path_rate`, the probability of dropping a sub-block. CaiT has the
            same probability in all blocks. In other models, it increases linearly from 0 in the
            first block to this value in the last block.
        graying: Token graying before each block with attention, which increases small singular
            values of the token matrix.
        graying_exponent: Exponent of the graying in (0, 1]. A smaller exponent increases small
            singular values more. 1 changes nothing.
        graying_layers: Indices of the blocks with graying, numbered from 0 across all stages. None
            means all blocks.
        graying_scope: Tokens to which graying is applied as one matrix: all tokens of an image
            ("map"), or the tokens of one Swin window ("window").
        graying_class_blocks: Whether graying is also applied before CaiT's last blocks, which only
            update [CLS]. There, graying changes [CLS] and all patches.
        frozen_filters: Whether to keep the weights of ConvNeXt's depthwise convolutions fixed.
            Their biases are trained.
        init: "default" is timm's initialisation, and the only choice for PVT v2. ConvNeXt also has
            "uniform" (PyTorch's default for all layers) and "covariance" (like "uniform", but with
            other depthwise filters). All other models have the initialisers of `ViTConfig` except
            "osa".
        init_options: Options of the initialiser. An option that is None has its default value.
    """

    kind = "timm"
    training_fields = frozenset({"init", "init_options", "drop_path", "frozen_filters"})

    name: str = "swin_small_patch4_window7_224"
    image_size: Pixels = 224
    patch_size: _PatchSize = 0
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
        if "patch_size" not in family.options and self.patch_size not in (0, named):
            raise ConfigurationError(
                f"model.patch_size of {family.name} is always {named}, got {self.patch_size}. "
                "Remove this key"
            )
        object.__setattr__(self, "patch_size", self.patch_size or named)
        has_windows = "window_size" in family.options
        if self.window_size and not has_windows:
            raise ConfigurationError(
                f"only Swin has model.window_size, got {self.window_size} for {self.name}. "
                "Remove this key"
            )
        if has_windows and not self.window_size:
            match = re.search(r"window(\d+)", self.name)
            object.__setattr__(self, "window_size", int(match[1]) if match else 7)
        stages, known = family.stages, family.arguments
        for name in ("widths", "depths", "heads"):
            values = getattr(self, name)
            if values is not None and name not in known:
                raise ConfigurationError(f"{self.name} has no model.{name}. Remove this key")
            if values is not None and len(values) != stages:
                raise ConfigurationError(
                    f"model.{name} of {self.name} must have {stages} entries, got {list(values)}"
                )
        if has_windows and self.widths is not None:
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
                f"model.graying needs a model with attention, got {self.graying} for {self.name}",
                hint=("model.graying=none",),
            )
        if self.graying_scope == "window" and not has_windows:
            raise ConfigurationError(
                f"model.graying_scope=window needs Swin's windows, which {self.name} lacks",
                hint=("model.graying_scope=map",),
            )
        if self.graying_class_blocks and not family.class_blocks:
            raise ConfigurationError(
                f"{self.name} has no class blocks: expected a CaiT for "
                "model.graying_class_blocks=true",
                hint=("model.graying_class_blocks=false",),
            )
        every = {**INITIALISERS, **FILTER_INITIALISERS}
        make_initialiser({n: every[n] for n in family.inits}, self.init, self.init_options)
        if self.frozen_filters and "covariance" not in family.inits:
            raise ConfigurationError(
                f"{self.name} has no depthwise filters to freeze: expected a ConvNeXt for "
                "model.frozen_filters=true",
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
        """Properties of the timm family to which this model belongs."""
        families = [FAMILIES[start] for start in FAMILIES if self.name.startswith(start)]
        if not families or "." in self.name:
            raise ConfigurationError(
                "model.name must be the name of a timm model, without a tag, that begins with "
                f"{' or '.join(FAMILIES)}, got {self.name!r}",
                hint=("model.name=swin_small_patch4_window7_224",),
            )
        return families[0]

    @property
    def block_info(self) -> "BlockInfo":
        """Widths and strides of all blocks, computed with timm, whose import takes seconds."""
        from ssl_bench.models.timm_model import build_block_info

        return build_block_info(self)

    @property
    def dim(self) -> int:
        """Width of the last block."""
        return self.block_info.widths[-1]

    @property
    def depth(self) -> int:
        """Number of blocks in all stages, without blocks that only update [CLS]."""
        return len(self.block_info.widths)

    @property
    def num_heads(self) -> int:
        """Number of attention heads of the first block, or 0 if this block has no attention."""
        return self.block_info.num_heads

    @property
    def num_prefix_tokens(self) -> int:
        """Number of [CLS] and register tokens, which come before the patches."""
        return self.block_info.num_prefix_tokens

    @property
    def num_registers(self) -> int:
        return self.block_info.num_registers
