"""Where the pixels of one axis lie: between two patches, and in blocks of a few pixels."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

# Blocks have at most this many pixels along an axis; results/tables/pixels.md has others.
_SIDE = 10


@dataclass(frozen=True)
class Axis:
    """Pixels along one axis.

    Beyond the edge the outermost patches are repeated, so that every pixel lies between two. Each
    gap between patches is cut into a power of two of equal blocks, whose ends are the nodes: by it
    no position is rounded once more.

    Attributes:
        before: Of each pixel the patch before it, from -1.
        after: Weight of the patch behind it.
        parts: Blocks of a gap.
        block: Of each pixel.
        occupied: Whether there are pixels in a block.
        pixels: These, the last one repeated up to the largest number in a block.
        weights: Of the node behind them.
    """

    patches: int
    before: Int64[Tensor, " size"]
    after: Float[Tensor, " size"]
    parts: int
    block: Int64[Tensor, " size"]
    occupied: Bool[Tensor, " blocks"]
    pixels: Int64[Tensor, "most blocks"]
    weights: Float[Tensor, "most blocks"]

    @classmethod
    def of(cls, size: int, patches: int) -> "Axis":
        position = (torch.arange(size) + 0.5) * (patches / size) - 0.5
        before = position.floor()
        after, parts = position - before, _parts(size / patches)
        within = after * parts
        block = ((before + 1) * parts + within.floor()).long()
        count = torch.bincount(block, minlength=(patches + 1) * parts)
        place = torch.arange(int(count.max()))[:, None]
        last = count.cumsum(0) - 1
        pixels = torch.minimum(last + 1 - count + place, last).clamp(min=0)
        weights = (within - within.floor())[pixels]
        return cls(patches, before.long(), after, parts, block, count > 0, pixels, weights)

    @property
    def size(self) -> int:
        return len(self.block)

    @property
    def most(self) -> int:
        """Pixels in the largest block."""
        return len(self.pixels)

    @property
    def num_nodes(self) -> int:
        return len(self.occupied) + 1

    def corners(
        self, pixels: Int64[Tensor, " some"]
    ) -> list[tuple[Int64[Tensor, " some"], Float[Tensor, " some"]]]:
        """Patches before and behind some pixels, with their weights."""
        before, after = self.before[pixels], self.after[pixels]
        behind = (before + 1).clamp(max=self.patches - 1)
        return [(before.clamp(min=0), 1 - after), (behind, after)]

    def nodes(self, values: Float[Tensor, "*some"], dim: int) -> Float[Tensor, "*more"]:
        """Values at the nodes from those at the patches, which lie along `dim`."""
        first, last = values.narrow(dim, 0, 1), values.narrow(dim, self.patches - 1, 1)
        padded = torch.cat([first, values, last], dim)
        before, behind = (padded.narrow(dim, start, self.patches + 1) for start in (0, 1))
        shape = list(values.shape)
        shape[dim] = self.num_nodes
        found = values.new_empty(shape)
        found.narrow(dim, self.num_nodes - 1, 1).copy_(last)
        cut = found.narrow(dim, 0, self.num_nodes - 1).unflatten(dim, (-1, self.parts))
        for number, part in enumerate(cut.unbind(dim + 1)):
            torch.lerp(before, behind, number / self.parts, out=part)
        return found


def _parts(gap: float) -> int:
    parts = 1
    while gap / parts > _SIDE:
        parts *= 2
    return parts
