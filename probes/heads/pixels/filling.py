"""The class of every pixel of open blocks, many blocks side by side."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.heads.pixels.axes import Axis
from probes.heads.pixels.blocks import OpenBlocks

# Pixels of a piece: few enough for a core's cache, many enough to outweigh the calls.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Filling:
    """Fills maps of classes; the memory it needs is used again for every piece.

    Attributes:
        floats: The value of a class, the best one so far, the next best one.
        bytes: The class that is best so far; where another one is better.
    """

    y: Axis
    x: Axis
    floats: Float[Tensor, "3 piece"]
    bytes: UInt8[Tensor, "2 piece"]
    index: Int64[Tensor, " piece"]

    @classmethod
    def of(cls, y: Axis, x: Axis) -> "Filling":
        size = max(1, _PIECE // (y.most * x.most)) * y.most * x.most
        floats, small = torch.empty(3, size), torch.empty(2, size, dtype=torch.uint8)
        return cls(y, x, floats, small, torch.empty(size, dtype=torch.int64))

    def fill(
        self, predicted: UInt8[Tensor, "heads height width"], blocks: OpenBlocks
    ) -> Int64[Tensor, " pixels"]:
        """Fill the pixels of the blocks; those whose two best are too close are returned."""
        pixels = self.y.most * self.x.most
        close = [self._fill(predicted, piece) for piece in blocks.split(len(self.index) // pixels)]
        return torch.cat([self.index[:0], *close])

    def _fill(
        self, predicted: UInt8[Tensor, "heads height width"], blocks: OpenBlocks
    ) -> Int64[Tensor, " pixels"]:
        lead = self._compete(blocks)
        index = self._index(blocks)
        label = self._shaped(self.bytes[0], blocks)
        predicted.view(-1).scatter_(0, index.view(-1), label.view(-1))
        close = ~np.greater(lead.numpy(), blocks.margin.numpy())
        return index[torch.from_numpy(close)] if close.any() else index.new_empty(0)

    def _compete(self, blocks: OpenBlocks) -> Float[Tensor, "height width blocks"]:
        """Leave the best class of each pixel in the first bytes; how far it is above the next."""
        below = self.y.weights.index_select(1, blocks.row)[:, None]
        right = self.x.weights.index_select(1, blocks.col)[None]
        value, best, second = (self._shaped(part, blocks) for part in self.floats)
        label, higher = (self._shaped(part, blocks) for part in self.bytes)
        _interpolate(blocks.corners[:, 0], below, right, into=best)
        label.copy_(blocks.classes[0].expand_as(label))
        second.fill_(-torch.inf)
        for number, count in enumerate(_remaining(blocks)[1:], 1):
            some = (..., slice(count))
            corners, new = blocks.corners[:, number, :count], value[some]
            _interpolate(corners, below[some], right[some], into=new)
            # By numpy, which compares four times as fast.
            np.greater(new.numpy(), best[some].numpy(), out=higher[some].numpy().view(bool))
            # Classes ascend, so a later one stays.
            higher[some] *= blocks.classes[number, :count]
            torch.maximum(label[some], higher[some], out=label[some])
            torch.maximum(second[some], torch.minimum(best[some], new), out=second[some])
            torch.maximum(best[some], new, out=best[some])
        return best.sub_(second)

    def _index(self, blocks: OpenBlocks) -> Int64[Tensor, "height width blocks"]:
        """Where their pixels lie in all maps, one after the other."""
        row = self.y.pixels.index_select(1, blocks.row).add_(blocks.head * self.y.size)
        col = self.x.pixels.index_select(1, blocks.col)
        into = self._shaped(self.index, blocks)
        return torch.add(row.mul_(self.x.size)[:, None], col[None], out=into)

    def _shaped(self, part: Tensor, blocks: OpenBlocks) -> Tensor:
        shape = (self.y.most, self.x.most, len(blocks.count))
        return part[: np.prod(shape)].view(shape)


def _remaining(blocks: OpenBlocks) -> list[int]:
    """How many blocks have a first class, a second one, ..."""
    numbers = torch.arange(len(blocks.classes))[:, None]
    return (blocks.count > numbers).sum(1).tolist()


def _interpolate(
    corners: Float[Tensor, "4 blocks"],
    below: Float[Tensor, "height 1 blocks"],
    right: Float[Tensor, "1 width blocks"],
    into: Float[Tensor, "height width blocks"],
) -> None:
    before = torch.lerp(corners[0], corners[2], below)
    behind = torch.lerp(corners[1], corners[3], below)
    torch.addcmul(before, behind.sub_(before), right, out=into)
