"""Which architectures of timm can be trained here, and what of a configuration each can take."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OF_BLOCKS = ("default", "skipless", "mimetic", "xavier")
_PATCH = re.compile(r"patch(\d+)")
_WINDOW = re.compile(r"window(\d+)")


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
    class_blocks: bool = False
    inits: Sequence[str] = _OF_BLOCKS

    @property
    def has_attention(self) -> bool:
        """Whether there are tokens that could be grayed."""
        return "heads" in self.arguments

    @property
    def has_filters(self) -> bool:
        """Whether there are depthwise filters to be drawn."""
        return "covariance" in self.inits

    def patch_of(self, name: str) -> int:
        """In pixels, as the name of a model says."""
        return int(match[1]) if (match := _PATCH.search(name)) else self.patch_size


_WHOLE = {"widths": "embed_dim", "depths": "depth", "heads": "num_heads"}
_SWIN = {"widths": "embed_dim", "depths": "depths", "heads": "num_heads"}
_PVT = {"widths": "embed_dims", "depths": "depths", "heads": "num_heads"}
_CONVNEXT = {"widths": "dims", "depths": "depths"}
_CONVOLUTIONS = ("default", "uniform", "covariance")

# By the start of timm's name; timm itself says whether the rest is one.
FAMILIES: Mapping[str, Family] = {
    "swin_": Family("Swin", 4, 4, _SWIN, windows=True),
    "cait_": Family("CaiT", 1, 16, _WHOLE, class_blocks=True),
    "pvt_v2_": Family("PVT v2", 4, 4, _PVT, sized=False, any_patch=False, inits=("default",)),
    "convnext": Family("ConvNeXt", 4, 4, _CONVNEXT, sized=False, inits=_CONVOLUTIONS),
    "vit_": Family("ViT", 1, 16, _WHOLE),
    "deit_": Family("DeiT", 1, 16, _WHOLE),
}


def family_of(name: str) -> Family | None:
    """That of a model of timm; None for one that cannot be trained here."""
    found = (family for start, family in FAMILIES.items() if name.startswith(start))
    return next(found, None)


def window_of(name: str) -> int:
    """Patches along a side of a window, as the name of a model says; 7 otherwise."""
    return int(match[1]) if (match := _WINDOW.search(name)) else 7
