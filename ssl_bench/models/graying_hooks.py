"""Token graying in front of somebody else's blocks, by hooks that leave their weights alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.fields import check_layers
from ssl_bench.models.graying import TokenGraying
from ssl_bench.models.timm_config import TimmConfig

Tokens = Float[Tensor, "batch tokens dim"]
Maps = Float[Tensor, "batch rows cols dim"]


def gray_inputs(
    config: TimmConfig, blocks: Sequence[nn.Module], class_blocks: Iterable[nn.Module]
) -> None:
    """Let the blocks that a configuration names gray their tokens first.

    Raises:
        ConfigurationError: there is no such block.
    """
    check_layers(config.graying_layers, len(blocks))
    if config.graying == "none":
        return
    graying = TokenGraying(config.graying, config.graying_exponent)
    layers = range(len(blocks)) if config.graying_layers is None else config.graying_layers
    hook = GrayWindows(graying) if config.graying_scope == "window" else GrayImages(graying)
    for layer in layers:
        blocks[layer].register_forward_pre_hook(hook)
    for block in class_blocks if config.graying_class_blocks else ():
        block.register_forward_pre_hook(GrayWithClass(graying))


@dataclass(frozen=True)
class GrayImages:
    """All tokens of an image are one matrix; maps with channels last are rows of tokens."""

    graying: TokenGraying

    def __call__(self, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        if x.ndim == 3:
            return self.graying(x), *others
        return self.graying(x.flatten(1, 2)).unflatten(1, x.shape[1:3]), *others


@dataclass(frozen=True)
class GrayWindows:
    """The tokens of each window of a block of timm's Swin are one matrix, moved as they are there.

    Where windows do not divide the map, zeros fill up the last ones, as before its attention.
    """

    graying: TokenGraying

    def __call__(self, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        swin: Any = block
        (x,) = inputs
        down, right = swin.shift_size
        moved = torch.roll(x, shifts=(-down, -right), dims=(1, 2))
        gray = self._of_windows(moved, tuple(swin.window_size))
        return (torch.roll(gray, shifts=(down, right), dims=(1, 2)),)

    def _of_windows(self, x: Maps, window: tuple[int, int]) -> Maps:
        rows, cols = x.shape[1:3]
        padded = F.pad(x, (0, 0, 0, -cols % window[1], 0, -rows % window[0]))
        # batch, windows down, rows, windows to the right, cols, dim
        tiles = padded.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
        tiles = tiles.transpose(2, 3)
        gray = self.graying(tiles.flatten(0, 2).flatten(1, 2))
        tiles = gray.unflatten(1, window).unflatten(0, tiles.shape[:3]).transpose(2, 3)
        return tiles.flatten(3, 4).flatten(1, 2)[:, :rows, :cols]


@dataclass(frozen=True)
class GrayWithClass:
    """[CLS] and the patches that it looks at are one matrix, for CaiT's last blocks."""

    graying: TokenGraying

    def __call__(self, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, cls_token = inputs
        gray = self.graying(torch.cat([cls_token, x], dim=1))
        return gray[:, cls_token.shape[1] :], gray[:, : cls_token.shape[1]]
