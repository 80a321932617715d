"""Predict the class of every pixel from the logits of patches.

The logits are upsampled bilinearly to the size of the image, and each pixel gets the class with the
largest upsampled logit. For one head with 150 classes on a CPU, `F.interpolate` and `argmax` take
88 ms, and `predict_pixels_exactly` takes 17 ms (results/tables/pixels.md).

Stored results from CPUs depend on `predict_pixels_exactly`, so the following definition of the
predicted class must not change. The upsampled logit of a pixel is the sum of weight * logit over
the four surrounding patches, from upper left to lower right. Every product and sum is rounded to
float32. If several classes have the largest upsampled logit, the class with the largest single
patch logit wins. If several classes are still equal, the class with the smallest number wins.

Only pixels whose class depends on rounding are computed directly by this definition. The algorithm
has four steps:

1. Cut the image into blocks of at most 10 x 10 pixels. Interpolate the logits at the corners of the
   blocks, which are called nodes (`Axis`).
2. If one class clearly has the largest logit at all four nodes of a block, it has the largest logit
   in the whole block.
3. In all other blocks, interpolate only the logits of classes that can be the largest
   (`UndecidedBlocks`).
4. If the two largest logits of a pixel are too close, apply the definition (`_apply_definition`).
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

# results/tables/pixels.md compares other sizes.
_MAX_BLOCK_SIDE = 10
# This value replaces the class of a node at which no logit is clearly the largest.
_UNDECIDED = 255
# Maximum number of logits at nodes that are computed together.
_NODE_LOGITS = 1 << 19
# Number of pixels that are filled together, so that they fit into the cache of a core.
_PIECE_PIXELS = 1 << 16
# Bound on rounding errors, relative to the largest logit. Logits that are interpolated from nodes
# differ by less than 25 eps from the definition in the docstring of this module. Differences of two
# logits therefore differ by less than 50 eps.
_ROUNDING = 64 * torch.finfo(torch.float32).eps
# Differences of logits with a larger magnitude may overflow.
_MAX_LOGIT = 1e30
_EXACT_PIXELS = 4096


def predict_pixels(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """For every pixel, return the class with the largest bilinearly upsampled logit.

    `logits` are the logits of patches. On a GPU, all logits are upsampled. On a CPU, the faster
    function `predict_pixels_exactly` is used, except for heads with huge or non-finite logits. The
    two methods may give different classes for pixels whose class depends on rounding.
    """
    if logits.device.type != "cpu":
        return predict_pixels_upsampled(logits, height, width)
    is_bounded = logits.abs().amax((1, 2, 3)) < _MAX_LOGIT
    predicted = torch.empty(len(logits), height, width, dtype=torch.uint8)
    for heads, predict in [
        (is_bounded, predict_pixels_exactly),
        (~is_bounded, predict_pixels_upsampled),
    ]:
        if heads.all():
            return predict(logits, height, width)
        if heads.any():
            predicted[heads] = predict(logits[heads], height, width)
    return predicted


def predict_pixels_upsampled(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """Predict the class of every pixel by bilinear upsampling of all patch logits.

    To limit the memory, the logits of only a few heads are upsampled at a time.
    """
    maps = logits.movedim(-1, 1)
    pixel_bytes = maps.shape[1] * maps.element_size()
    num_heads = max(1, PIECE_BYTES[logits.device.type] // (height * width * pixel_bytes))
    size = (height, width)
    predicted = [F.interpolate(m, size, mode="bilinear").argmax(1) for m in maps.split(num_heads)]
    return torch.cat(predicted).to(torch.uint8)


def predict_pixels_exactly(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """Predict the class of every pixel from patch logits on a CPU, with exactly defined results.

    All products and sums are rounded to float32 in a fixed order. If several classes have the
    largest logit, the class with the largest single patch logit wins, and then the class with the
    smallest number. All logits must be finite and have a magnitude below 1e30, because differences
    could overflow otherwise. Each thread computes whole groups of heads, because single operations
    are too small to be divided among threads.
    """
    y, x = Axis.divide(height, logits.shape[1]), Axis.divide(width, logits.shape[2])
    threads = torch.get_num_threads()
    num_heads = _NODE_LOGITS // (y.num_nodes * x.num_nodes * logits.shape[3])
    groups = logits.split(max(1, min(num_heads, -(-len(logits) // threads))))
    if threads == 1:
        return torch.cat([_predict_group(group, y, x) for group in groups])
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.cat(list(pool.map(lambda group: _predict_group(group, y, x), groups)))
    finally:
        # `set_num_threads` in a worker also applies to threads that are started later.
        torch.set_num_threads(threads)


# A new thread does not inherit `no_grad` from the caller.
@torch.no_grad()
def _predict_group(
    logits: Float[Tensor, "heads rows cols classes"], y: "Axis", x: "Axis"
) -> UInt8[Tensor, "heads height width"]:
    margin = _ROUNDING * logits.abs().amax((1, 2, 3))
    nodes = x.interpolate_nodes(y.interpolate_nodes(logits, 1), 2)
    largest, winner = nodes.max(-1)
    close = nodes >= (largest - margin[:, None, None])[..., None]
    is_tied = close.sum(-1, dtype=torch.uint8) != 1
    winner = winner.to(torch.uint8).masked_fill_(is_tied, _UNDECIDED)
    upper_left = winner[:, :-1, :-1]
    is_undecided = upper_left == _UNDECIDED
    for corner in (winner[:, :-1, 1:], winner[:, 1:, :-1], winner[:, 1:, 1:]):
        is_undecided |= upper_left != corner
    is_undecided &= y.has_pixels[:, None] & x.has_pixels
    head, row, col = is_undecided.nonzero(as_tuple=True)
    predicted = upper_left.index_select(2, x.block).index_select(1, y.block)
    blocks = UndecidedBlocks.select(nodes, (head, row, col), margin)
    tied = _fill_blocks(predicted, blocks, y, x)
    for pixels in tied.unique().split(_EXACT_PIXELS):
        predicted.view(-1)[pixels] = _apply_definition(logits, pixels, y, x)
    return predicted


@dataclass(frozen=True)
class Axis:
    """The pixels along one axis of an image, divided into blocks between the patch centers.

    A block consists of at most ten adjacent pixels. The outermost patches are repeated beyond the
    edge, so every pixel lies in a gap between two patch centers. Each gap is divided into blocks of
    equal length, whose number is a power of two. The ends of the blocks are called nodes. The
    positions of nodes have no rounding errors, because the number of blocks is a power of two.

    Attributes:
        patches: Number of patches.
        patch_before: Index of the last patch center before each pixel, or -1 if there is none.
        weight_after: Interpolation weight of the patch center after each pixel.
        blocks_per_gap: Number of blocks between two patch centers.
        block: Index of the block of each pixel.
        has_pixels: Whether each block contains pixels.
        block_pixels: Indices of the pixels of each block. If a block has fewer pixels than the
            largest one, its last pixel is repeated.
        node_weights: Interpolation weight of the node after each pixel of `block_pixels`.
    """

    patches: int
    patch_before: Int64[Tensor, " size"]
    weight_after: Float[Tensor, " size"]
    blocks_per_gap: int
    block: Int64[Tensor, " size"]
    has_pixels: Bool[Tensor, " blocks"]
    block_pixels: Int64[Tensor, "max_block_size blocks"]
    node_weights: Float[Tensor, "max_block_size blocks"]

    @classmethod
    def divide(cls, size: int, patches: int) -> "Axis":
        """Divide an image axis with `size` pixels and `patches` patches into blocks of pixels."""
        position = (torch.arange(size) + 0.5) * (patches / size) - 0.5
        before, blocks_per_gap = position.floor(), 1
        while size / patches / blocks_per_gap > _MAX_BLOCK_SIDE:
            blocks_per_gap *= 2
        weight_after = position - before
        within = weight_after * blocks_per_gap
        block = ((before + 1) * blocks_per_gap + within.floor()).long()
        count = torch.bincount(block, minlength=(patches + 1) * blocks_per_gap)
        number = torch.arange(int(count.max()))[:, None]
        last = count.cumsum(0) - 1
        pixels = torch.minimum(last + 1 - count + number, last).clamp(min=0)
        weights = (within - within.floor())[pixels]
        return cls(
            patches, before.long(), weight_after, blocks_per_gap, block, count > 0, pixels, weights
        )

    @property
    def size(self) -> int:
        return len(self.block)

    @property
    def max_block_size(self) -> int:
        """Return the number of pixels in the largest block of this axis."""
        return len(self.block_pixels)

    @property
    def num_nodes(self) -> int:
        return len(self.has_pixels) + 1

    def neighbours(
        self, pixels: Int64[Tensor, " pixels"]
    ) -> list[tuple[Int64[Tensor, " pixels"], Float[Tensor, " pixels"]]]:
        """Return the patches before and after some pixels, and their interpolation weights.

        The first element of the list contains the indices and weights of the patches before the
        pixels. The second element contains those of the patches after the pixels.
        """
        before, after = self.patch_before[pixels], self.weight_after[pixels]
        behind = (before + 1).clamp(max=self.patches - 1)
        return [(before.clamp(min=0), 1 - after), (behind, after)]

    def interpolate_nodes(self, values: Float[Tensor, "*some"], dim: int) -> Float[Tensor, "*more"]:
        """Interpolate the values of patches at the nodes, which are the ends of blocks of pixels.

        `dim` is the tensor dimension of `values` that belongs to the patches along this axis.
        """
        first, last = values.narrow(dim, 0, 1), values.narrow(dim, self.patches - 1, 1)
        padded = torch.cat([first, values, last], dim)
        before, behind = (padded.narrow(dim, start, self.patches + 1) for start in (0, 1))
        shape = list(values.shape)
        shape[dim] = self.num_nodes
        nodes = values.new_empty(shape)
        nodes.narrow(dim, self.num_nodes - 1, 1).copy_(last)
        gaps = nodes.narrow(dim, 0, self.num_nodes - 1).unflatten(dim, (-1, self.blocks_per_gap))
        for number, part in enumerate(gaps.unbind(dim + 1)):
            torch.lerp(before, behind, number / self.blocks_per_gap, out=part)
        return nodes


@dataclass(frozen=True)
class UndecidedBlocks:
    """Blocks of pixels with an undecided class: several classes can have the largest logit.

    Attributes:
        head: Index of the head whose predictions are undecided in each block.
        row: Row of each block in the grid of all blocks.
        col: Column of each block in the grid of all blocks.
        margin: Logits that differ by less than the margin are tied, because rounding can change
            their order.
        count: Number of classes that can have the largest logit in each block. The blocks are
            sorted by this number, largest first.
        classes: The classes that can have the largest logit, in ascending order. Only the first
            `count` classes of each block are valid.
        corners: Logits of `classes` at the upper left, upper right, lower left and lower right
            corner of each block.
    """

    head: Int64[Tensor, " blocks"]
    row: Int64[Tensor, " blocks"]
    col: Int64[Tensor, " blocks"]
    margin: Float[Tensor, " blocks"]
    count: Int64[Tensor, " blocks"]
    classes: UInt8[Tensor, "max_count blocks"]
    corners: Float[Tensor, "4 max_count blocks"]

    @classmethod
    def select(
        cls,
        nodes: Float[Tensor, "heads rows cols classes"],
        places: tuple[Int64[Tensor, " blocks"], Int64[Tensor, " blocks"], Int64[Tensor, " blocks"]],
        margin: Float[Tensor, " heads"],
    ) -> "UndecidedBlocks":
        """Find the classes that can have the largest logit in each of the given blocks of pixels.

        Args:
            nodes: Logits at the corners of all blocks.
            places: Head, row and column of each of the given blocks.
            margin: Largest difference between two logits that rounding can cause, for each head.
        """
        _, rows, cols, num_classes = nodes.shape
        head, row, col = places
        first, flat = (head * rows + row) * cols + col, nodes.view(-1, num_classes)
        corners = [flat.index_select(0, first + step) for step in (0, 1, cols, cols + 1)]
        # In each block, compare all classes with a rival: the class with the largest minimum over
        # the four corners. A class below the rival at all four corners is below it in the whole
        # block.
        smallest = torch.minimum(corners[0], corners[1])
        for corner in corners[2:]:
            torch.minimum(smallest, corner, out=smallest)
        rival = smallest.argmax(1, keepdim=True)
        lead, buffer = corners[0] - corners[0].gather(1, rival), smallest
        for corner in corners[1:]:
            torch.maximum(lead, torch.sub(corner, corner.gather(1, rival), out=buffer), out=lead)
        can_win = lead >= -margin[head][:, None]

        order = can_win.sum(1).argsort(descending=True)
        block, number = can_win.index_select(0, order).nonzero(as_tuple=True)
        count = torch.bincount(block, minlength=len(order))
        max_count = int(count[0]) if len(count) else 0
        rank = torch.arange(len(block)) - (count.cumsum(0) - count).index_select(0, block)
        target = rank.mul_(len(order)).add_(block)
        source = order.index_select(0, block).mul_(num_classes).add_(number)
        classes = torch.zeros(max_count * len(order), dtype=torch.uint8)
        classes.scatter_(0, target, number.to(torch.uint8))
        values = torch.zeros(4, max_count * len(order))
        for target_row, corner in zip(values, corners, strict=True):
            target_row.scatter_(0, target, corner.view(-1).index_select(0, source))
        head, row, col = (part.index_select(0, order) for part in places)
        shape = (max_count, len(order))
        return cls(head, row, col, margin[head], count, classes.view(shape), values.view(4, *shape))

    def split(self, size: int) -> Iterator["UndecidedBlocks"]:
        """Split the blocks into groups of at most `size` blocks."""
        for start in range(0, len(self.count), size):
            piece = slice(start, start + size)
            max_count = int(self.count[start])
            yield UndecidedBlocks(
                *(self.head[piece], self.row[piece], self.col[piece], self.margin[piece]),
                self.count[piece],
                self.classes[:max_count, piece],
                self.corners[:, :max_count, piece],
            )


def _fill_blocks(
    predicted: UInt8[Tensor, "heads height width"], blocks: UndecidedBlocks, y: Axis, x: Axis
) -> Int64[Tensor, " pixels"]:
    """Predict the class of each pixel in some blocks of pixels, and write it into `predicted`.

    Return the pixels whose two largest logits are so close that rounding can change their order.
    The returned pixels are indices into the flattened `predicted`. `y` and `x` are the axes of the
    image.
    """
    num_blocks = max(1, _PIECE_PIXELS // (y.max_block_size * x.max_block_size))
    size = num_blocks * y.max_block_size * x.max_block_size
    # Buffers for all pieces.
    floats, labels = torch.empty(3, size), torch.empty(2, size, dtype=torch.uint8)
    indices, tied = torch.empty(size, dtype=torch.int64), []
    for piece in blocks.split(num_blocks):
        shape = (y.max_block_size, x.max_block_size, len(piece.count))
        value, largest, second = (buffer[: np.prod(shape)].view(shape) for buffer in floats)
        label, candidate = (buffer[: np.prod(shape)].view(shape) for buffer in labels)
        index = indices[: np.prod(shape)].view(shape)
        _find_largest(piece, y, x, (value, largest, second, label, candidate))
        row = y.block_pixels.index_select(1, piece.row).add_(piece.head * y.size)
        col = x.block_pixels.index_select(1, piece.col)
        torch.add(row.mul_(x.size)[:, None], col[None], out=index)
        predicted.view(-1).scatter_(0, index.view(-1), label.view(-1))
        is_tied = ~np.greater(largest.sub_(second).numpy(), piece.margin.numpy())
        if is_tied.any():
            tied.append(index[torch.from_numpy(is_tied)])
    return torch.cat([indices[:0], *tied])


def _find_largest(blocks: UndecidedBlocks, y: Axis, x: Axis, buffers: Sequence[Tensor]) -> None:
    """Compute the two largest logits of each pixel in some blocks, and the class of the largest.

    `buffers` are five tensors of shape height x width x blocks: value, largest, second, label and
    candidate. The results are written to the tensors largest, second and label. The tensors value
    and candidate store intermediate results. `y` and `x` are the axes of the image.
    """
    value, largest, second, label, candidate = buffers
    below = y.node_weights.index_select(1, blocks.row)[:, None]
    right = x.node_weights.index_select(1, blocks.col)[None]
    _interpolate(blocks.corners[:, 0], below, right, out=largest)
    label.copy_(blocks.classes[0].expand_as(label))
    second.fill_(-torch.inf)
    numbers = torch.arange(len(blocks.classes))[:, None]
    # Blocks with more classes come first, so the first `count` blocks have a further class.
    for number, count in enumerate((blocks.count > numbers).sum(1).tolist()[1:], 1):
        some = (..., slice(count))
        corners, new = blocks.corners[:, number, :count], value[some]
        _interpolate(corners, below[some], right[some], out=new)
        # numpy compares four times as fast as torch.
        np.greater(new.numpy(), largest[some].numpy(), out=candidate[some].numpy().view(bool))
        # Classes ascend, so the maximum of the labels is the newest one.
        candidate[some] *= blocks.classes[number, :count]
        torch.maximum(label[some], candidate[some], out=label[some])
        torch.maximum(second[some], torch.minimum(largest[some], new), out=second[some])
        torch.maximum(largest[some], new, out=largest[some])


def _interpolate(
    corners: Float[Tensor, "4 blocks"],
    below: Float[Tensor, "height 1 blocks"],
    right: Float[Tensor, "1 width blocks"],
    out: Float[Tensor, "height width blocks"],
) -> None:
    before = torch.lerp(corners[0], corners[2], below)
    behind = torch.lerp(corners[1], corners[3], below)
    torch.addcmul(before, behind.sub_(before), right, out=out)


def _apply_definition(
    logits: Float[Tensor, "heads rows cols classes"],
    pixels: Int64[Tensor, " pixels"],
    y: Axis,
    x: Axis,
) -> UInt8[Tensor, " pixels"]:
    """Predict the classes of some pixels by upsampling logits with exactly defined rounding.

    The weighted sums of patch logits are rounded to float32 in a fixed order. `pixels` are indices
    into the flattened maps of all heads. `y` and `x` are the axes of the image.
    """
    head, row, col = pixels // (y.size * x.size), pixels // x.size % y.size, pixels % x.size
    total, highest = torch.zeros(1), torch.tensor(-torch.inf)
    for patch_row, row_weight in y.neighbours(row):
        for patch_col, col_weight in x.neighbours(col):
            corner = logits[head, patch_row, patch_col]
            total = total + corner * (row_weight * col_weight)[:, None]
            highest = torch.maximum(highest, corner)
    is_largest = total == total.amax(1, keepdim=True)
    return highest.masked_fill(~is_largest, -torch.inf).argmax(1).to(torch.uint8)
