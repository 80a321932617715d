"""From patch logits to the class of every pixel of the original image.

The label of a pixel is the class with the largest sum of weight times logit over the four patches
around it, in float32, products and sums one after the other from above left to below right. Of
equal sums that class wins whose largest of the four logits is larger, then the first one. On a CPU
only pixels where rounding decides are computed in that order, all others in whatever way is fast:

1. logits are interpolated at the corners of blocks of at most ten pixels a side (`Axis`);
2. where one class wins at all four corners it does between them;
3. elsewhere only classes that are below no other one at all four are interpolated (`OpenBlocks`);
4. pixels whose two best classes are too close are computed as they are defined (`_exactly`).
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from probes.heads.losses import PIECE_BYTES

# Blocks have at most this many pixels along an axis; results/tables/pixels.md has others.
_SIDE = 10
# In the place of a class at a node where two may win.
_NOBODY = 255
# Values at nodes that are made together; whole heads.
_NODES = 1 << 19
# Pixels of open blocks that are filled together: few enough for a core's cache, many enough to
# outweigh the calls.
_PIECE = 1 << 16
# Of the largest logit. Interpolation twice over, at the nodes and between them, and once in the
# order of the definition is off by less than 25 eps, the difference of two classes by twice that.
_ROUNDING = 64 * torch.finfo(torch.float32).eps
# Above it differences may overflow.
_HUGE = 1e30
_EXACT_AT_ONCE = 4096

Places = tuple[Int64[Tensor, " blocks"], Int64[Tensor, " blocks"], Int64[Tensor, " blocks"]]
"""Head, row and column of blocks."""


def predict_pixels(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """Class with the largest bilinearly upsampled logit, for every pixel.

    As `F.interpolate(mode="bilinear").argmax(1)`, which rounds otherwise, without making all
    upsampled logits. Heads with logits that are huge or not finite are upsampled whole.
    """
    if logits.device.type != "cpu":
        return predict_upsampled(logits, height, width)
    tame = logits.abs().amax((1, 2, 3)) < _HUGE
    predicted = torch.empty(len(logits), height, width, dtype=torch.uint8)
    for some, predict in [(tame, _predict), (~tame, predict_upsampled)]:
        if some.all():
            return predict(logits, height, width)
        if some.any():
            predicted[some] = predict(logits[some], height, width)
    return predicted


def predict_upsampled(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """The same by way of all upsampled logits, those of a few heads at a time.

    For devices, which would have to say first where patches agree.
    """
    maps = logits.movedim(-1, 1)
    pixel_bytes = maps.shape[1] * maps.element_size()
    at_once = max(1, PIECE_BYTES[logits.device.type] // (height * width * pixel_bytes))
    size = (height, width)
    predicted = [F.interpolate(m, size, mode="bilinear").argmax(1) for m in maps.split(at_once)]
    return torch.cat(predicted).to(torch.uint8)


def _predict(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """A few heads at a time, each group by a thread alone.

    The operations are so small that threads which share one mostly wait for each other.
    """
    y, x = Axis.of(height, logits.shape[1]), Axis.of(width, logits.shape[2])
    threads = torch.get_num_threads()
    fitting = _NODES // (y.num_nodes * x.num_nodes * logits.shape[3])
    groups = logits.split(max(1, min(fitting, -(-len(logits) // threads))))
    if threads == 1:
        return torch.cat([_predict_some(some, y, x) for some in groups])
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.cat(list(pool.map(lambda some: _predict_some(some, y, x), groups)))
    finally:
        # What the threads said of themselves holds for threads that are started later, too.
        torch.set_num_threads(threads)


# Here, because a new thread does not know that the caller wants no gradients.
@torch.no_grad()
def _predict_some(
    logits: Float[Tensor, "heads rows cols classes"], y: "Axis", x: "Axis"
) -> UInt8[Tensor, "heads height width"]:
    margin = _ROUNDING * logits.abs().amax((1, 2, 3))
    nodes = x.nodes(y.nodes(logits, 1), 2)
    # The class with the largest value at each node, nobody where another one is too close.
    best, winner = nodes.max(-1)
    close = nodes >= (best - margin[:, None, None])[..., None]
    winner = winner.to(torch.uint8).masked_fill_(close.sum(-1, dtype=torch.uint8) != 1, _NOBODY)
    first = winner[:, :-1, :-1]
    is_open = first == _NOBODY
    for other in (winner[:, :-1, 1:], winner[:, 1:, :-1], winner[:, 1:, 1:]):
        is_open |= first != other
    is_open &= y.occupied[:, None] & x.occupied
    head, row, col = is_open.nonzero(as_tuple=True)
    predicted = first.index_select(2, x.block).index_select(1, y.block)
    unsure = _fill(predicted, OpenBlocks.of(nodes, (head, row, col), margin), y, x)
    for some in unsure.unique().split(_EXACT_AT_ONCE):
        predicted.view(-1)[some] = _exactly(logits, some, y, x)
    return predicted


@dataclass(frozen=True)
class Axis:
    """Pixels along one axis, between two patches and in blocks.

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
        before, parts = position.floor(), 1
        while size / patches / parts > _SIDE:
            parts *= 2
        after = position - before
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
        _, rows, cols, num_classes = nodes.shape
        head, row, col = places
        first, flat = (head * rows + row) * cols + col, nodes.view(-1, num_classes)
        corners = [flat.index_select(0, first + step) for step in (0, 1, cols, cols + 1)]
        # What is below the class with the highest lowest corner, at all corners of a block, is so
        # everywhere in it.
        lowest = torch.minimum(corners[0], corners[1])
        for corner in corners[2:]:
            torch.minimum(lowest, corner, out=lowest)
        high = lowest.argmax(1, keepdim=True)
        lead, other = corners[0] - corners[0].gather(1, high), lowest
        for corner in corners[1:]:
            torch.maximum(lead, torch.sub(corner, corner.gather(1, high), out=other), out=lead)
        may_win = lead >= -margin[head][:, None]

        order = may_win.sum(1).argsort(descending=True)
        block, number = may_win.index_select(0, order).nonzero(as_tuple=True)
        count = torch.bincount(block, minlength=len(order))
        most = int(count[0]) if len(count) else 0
        rank = torch.arange(len(block)) - (count.cumsum(0) - count).index_select(0, block)
        into = rank.mul_(len(order)).add_(block)
        source = order.index_select(0, block).mul_(num_classes).add_(number)
        classes = torch.zeros(most * len(order), dtype=torch.uint8)
        classes.scatter_(0, into, number.to(torch.uint8))
        values = torch.zeros(4, most * len(order))
        for into_row, corner in zip(values, corners, strict=True):
            into_row.scatter_(0, into, corner.view(-1).index_select(0, source))
        head, row, col = (part.index_select(0, order) for part in places)
        shape = (most, len(order))
        return cls(head, row, col, margin[head], count, classes.view(shape), values.view(4, *shape))

    def split(self, at_once: int) -> Iterator["OpenBlocks"]:
        for start in range(0, len(self.count), at_once):
            some = slice(start, start + at_once)
            most = int(self.count[start])
            places = self.head[some], self.row[some], self.col[some]
            classes, corners = self.classes[:most, some], self.corners[:, :most, some]
            yield OpenBlocks(*places, self.margin[some], self.count[some], classes, corners)


def _fill(
    predicted: UInt8[Tensor, "heads height width"], blocks: OpenBlocks, y: Axis, x: Axis
) -> Int64[Tensor, " pixels"]:
    """Fill the pixels of the blocks; those whose two best are too close are returned."""
    at_once = max(1, _PIECE // (y.most * x.most))
    size = at_once * y.most * x.most
    # Used again for every piece: the value of a class, the best one so far, the next best one; the
    # class that is best so far, where another one is better; where pixels lie.
    floats, small = torch.empty(3, size), torch.empty(2, size, dtype=torch.uint8)
    places, close = torch.empty(size, dtype=torch.int64), []
    for piece in blocks.split(at_once):
        shape = (y.most, x.most, len(piece.count))
        value, best, second = (part[: np.prod(shape)].view(shape) for part in floats)
        label, higher = (part[: np.prod(shape)].view(shape) for part in small)
        index = places[: np.prod(shape)].view(shape)
        _compete(piece, y, x, (value, best, second, label, higher))
        row = y.pixels.index_select(1, piece.row).add_(piece.head * y.size)
        col = x.pixels.index_select(1, piece.col)
        torch.add(row.mul_(x.size)[:, None], col[None], out=index)
        predicted.view(-1).scatter_(0, index.view(-1), label.view(-1))
        unsure = ~np.greater(best.sub_(second).numpy(), piece.margin.numpy())
        if unsure.any():
            close.append(index[torch.from_numpy(unsure)])
    return torch.cat([places[:0], *close])


def _compete(blocks: OpenBlocks, y: Axis, x: Axis, into: Sequence[Tensor]) -> None:
    """Leave the best class of each pixel, its value and that of the next one in `into`.

    These are of height, width and block: value, best, second, label, higher.
    """
    value, best, second, label, higher = into
    below = y.weights.index_select(1, blocks.row)[:, None]
    right = x.weights.index_select(1, blocks.col)[None]
    _interpolate(blocks.corners[:, 0], below, right, into=best)
    label.copy_(blocks.classes[0].expand_as(label))
    second.fill_(-torch.inf)
    numbers = torch.arange(len(blocks.classes))[:, None]
    # How many blocks have a second class, a third one, ...
    for number, count in enumerate((blocks.count > numbers).sum(1).tolist()[1:], 1):
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


def _interpolate(
    corners: Float[Tensor, "4 blocks"],
    below: Float[Tensor, "height 1 blocks"],
    right: Float[Tensor, "1 width blocks"],
    into: Float[Tensor, "height width blocks"],
) -> None:
    before = torch.lerp(corners[0], corners[2], below)
    behind = torch.lerp(corners[1], corners[3], below)
    torch.addcmul(before, behind.sub_(before), right, out=into)


def _exactly(
    logits: Float[Tensor, "heads rows cols classes"],
    pixels: Int64[Tensor, " pixels"],
    y: Axis,
    x: Axis,
) -> UInt8[Tensor, " pixels"]:
    """Classes of some pixels of all maps, as they are defined."""
    head, row, col = pixels // (y.size * x.size), pixels // x.size % y.size, pixels % x.size
    total, highest = torch.zeros(1), torch.tensor(-torch.inf)
    for above, weight in y.corners(row):
        for left, share in x.corners(col):
            corner = logits[head, above, left]
            total = total + corner * (weight * share)[:, None]
            highest = torch.maximum(highest, corner)
    is_best = total == total.amax(1, keepdim=True)
    return highest.masked_fill(~is_best, -torch.inf).argmax(1).to(torch.uint8)
