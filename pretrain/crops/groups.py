"""Views of one size on their way from a data worker to the device, in one piece or in several."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import UInt8
from torch import Tensor

from pretrain.crops.augmentation import AugmentationParams


@dataclass(frozen=True)
class CropGroup:
    """Views of one size, 8-bit: first the first view of every image, then the second, ..."""

    pixels: UInt8[Tensor, "views 3 size size"]
    looks: AugmentationParams

    def pin_memory(self) -> "CropGroup":
        return type(self)(self.pixels.pin_memory(), self.looks)

    def taken(self, device: torch.device) -> "CropGroup":
        """A copy with the pixels on a device."""
        return type(self)(taken(self.pixels, device), self.looks.copy())


def taken(values: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, without a wait where the values are pinned."""
    return values.to(device, non_blocking=True, copy=True)


def joined(groups: Sequence[CropGroup], num_views: int) -> CropGroup:
    """All images of several groups: of each of the views those of the first group, ..."""

    def together(parts: Sequence[Tensor]) -> Tensor:
        by_view = [part.unflatten(0, (num_views, -1)) for part in parts]
        return torch.cat(by_view, dim=1).flatten(0, 1)

    # The three values of a pixel stay side by side.
    pixels = together([group.pixels.permute(0, 2, 3, 1) for group in groups])
    looks = {
        item.name: together([getattr(group.looks, item.name) for group in groups])
        for item in fields(AugmentationParams)
    }
    return CropGroup(pixels.permute(0, 3, 1, 2), AugmentationParams(**looks))


def stacked(crops: Sequence[UInt8[Tensor, "3 _ _"]]) -> UInt8[Tensor, "views 3 _ _"]:
    """In one piece, with the three values of a pixel side by side."""
    return torch.stack([pixels.permute(1, 2, 0) for pixels in crops]).permute(0, 3, 1, 2)
