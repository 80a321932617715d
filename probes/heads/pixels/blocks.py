"""Blocks of pixels whose corners do not say the class, and the classes that may win in them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from probes.heads.pixels.axes import Axis

NOBODY = 255
"""In the place of a class at a node where two may win."""

Places = tuple[Int64[Tensor, " blocks"], Int64[Tensor, " blocks"], Int64[Tensor, " blocks"]]
"""Head, row and column of blocks."""

_Corners = list[Float[Tensor, "blocks classes"]]


@dataclass(frozen=True)
class OpenBlocks:
    """Blocks with the classes that may win somewhere in them; those with most of them first.

    Attributes:
        margin: What lies closer together may be in another order once it is rounded.
        count: Classes of each block.
        classes: These in ascending order, then anything.
        corners: Their values above left, above right, below left, below right.
    """

    head: Int64[Tensor, " blocks"]
    row: Int64[Tensor, " blocks"]
    col: Int64[Tensor, " blocks"]
    margin: Float[Tensor, " blocks"]
    count: Int64[Tensor, " blocks"]
    classes: UInt8[Tensor, "most blocks"]
    corners: Float[Tensor, "4 most blocks"]

    @classmethod
    def of(
        cls,
        nodes: Float[Tensor, "heads rows cols classes"],
        places: Places,
        margin: Float[Tensor, " heads"],
    ) -> "OpenBlocks":
        corners = _corners(nodes, places)
        may_win = _may_win(corners, margin[places[0]])
        order = may_win.sum(1).argsort(descending=True)
        block, number = may_win.index_select(0, order).nonzero(as_tuple=True)
        count = torch.bincount(block, minlength=len(order))
        most = int(count[0]) if len(count) else 0
        rank = torch.arange(len(block)) - (count.cumsum(0) - count).index_select(0, block)
        into = rank.mul_(len(order)).add_(block)
        source = order.index_select(0, block).mul_(nodes.shape[-1]).add_(number)
        classes = torch.zeros(most * len(order), dtype=torch.uint8)
        classes.scatter_(0, into, number.to(torch.uint8))
        values = torch.zeros(4, most * len(order))
        for row, corner in zip(values, corners, strict=True):
            row.scatter_(0, into, corner.view(-1).index_select(0, source))
        head, row, col = (part.index_select(0, order) for part in places)
        shape = (most, len(order))
        return cls(head, row, col, margin[head], count, classes.view(shape), values.view(4, *shape))

    def split(self, at_once: int) -> Iterator["OpenBlocks"]:
        for start in range(0, len(self.count), at_once):
            some = slice(start, start + at_once)
            most = int(self.count[start])
            yield OpenBlocks(
                self.head[some],
                self.row[some],
                self.col[some],
                self.margin[some],
                self.count[some],
                self.classes[:most, some],
                self.corners[:, :most, some],
            )


def open_places(winner: UInt8[Tensor, "heads rows cols"], y: Axis, x: Axis) -> Places:
    """Blocks with pixels whose corners have several winners, or `NOBODY`."""
    first = winner[:, :-1, :-1]
    is_open = first == NOBODY
    for other in (winner[:, :-1, 1:], winner[:, 1:, :-1], winner[:, 1:, 1:]):
        is_open |= first != other
    is_open &= y.occupied[:, None] & x.occupied
    head, row, col = is_open.nonzero(as_tuple=True)
    return head, row, col


def _corners(nodes: Float[Tensor, "heads rows cols classes"], places: Places) -> _Corners:
    _, rows, cols, classes = nodes.shape
    head, row, col = places
    first, flat = (head * rows + row) * cols + col, nodes.view(-1, classes)
    return [flat.index_select(0, first + step) for step in (0, 1, cols, cols + 1)]


def _may_win(corners: _Corners, margin: Float[Tensor, " blocks"]) -> Bool[Tensor, "blocks classes"]:
    """Classes that are not below the class with the highest lowest corner, at all corners.

    What is below at all corners of a block is so everywhere in it.
    """
    lowest = torch.minimum(corners[0], corners[1])
    for corner in corners[2:]:
        torch.minimum(lowest, corner, out=lowest)
    high = lowest.argmax(1, keepdim=True)
    lead, other = corners[0] - corners[0].gather(1, high), lowest
    for corner in corners[1:]:
        torch.maximum(lead, torch.sub(corner, corner.gather(1, high), out=other), out=lead)
    return lead >= -margin[:, None]
