"""From patch logits to the class of every pixel of the original image.

The label of a pixel is the class with the largest sum of weight times logit over the four patches
around it, in float32, products and sums one after the other from above left to below right. Of
equal sums that class wins whose largest of the four logits is larger, then the first one. On a CPU
only pixels where rounding decides are computed in that order, all others in whatever way is fast.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.heads.pixels.axes import Axis
from probes.heads.pixels.blocks import NOBODY, OpenBlocks, open_places
from probes.heads.pixels.filling import Filling
from probes.heads.upsampled_logsumexp import PIECE_BYTES

# Values at nodes that are made together; whole heads.
_NODES = 1 << 19
# Of the largest logit. Interpolation twice over, at the nodes and between them, and once in the
# order of the definition is off by less than 25 eps, the difference of two classes by twice that.
_ROUNDING = 64 * torch.finfo(torch.float32).eps
# Above it differences may overflow.
_HUGE = 1e30
_EXACT_AT_ONCE = 4096


def predict_pixels(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """Class with the largest bilinearly upsampled logit, for every pixel.

    As `F.interpolate(mode="bilinear").argmax(1)`, which rounds otherwise, without making all
    upsampled logits. They are interpolated at the corners of blocks of at most ten pixels a side.
    Where one class wins at all four it does between them; elsewhere only classes are interpolated
    that are not below another one at all four. Heads with logits that are huge or not finite are
    upsampled whole.
    """
    if logits.device.type != "cpu":
        return predict_upsampled(logits, height, width)
    tame = logits.abs().amax((1, 2, 3)) < _HUGE
    if tame.all():
        return _predict(logits, height, width)
    predicted = torch.empty(len(logits), height, width, dtype=torch.uint8)
    for some, predict in [(tame, _predict), (~tame, predict_upsampled)]:
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
    y, x = Axis.of(height, logits.shape[1]), Axis.of(width, logits.shape[2])
    threads = torch.get_num_threads()
    fitting = _NODES // (y.num_nodes * x.num_nodes * logits.shape[3])
    at_once = max(1, min(fitting, -(-len(logits) // threads)))
    return torch.cat(
        _mapped(lambda some: _predict_some(some, y, x), logits.split(at_once), threads)
    )


def _mapped(
    function: Callable[[Tensor], Tensor], groups: Sequence[Tensor], threads: int
) -> list[Tensor]:
    """The function's values, each computed by a thread alone.

    Its operations are so small that threads which share one mostly wait for each other.
    """
    if threads == 1:
        return [function(some) for some in groups]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, groups))
    finally:
        # What the threads said of themselves holds for threads that are started later, too.
        torch.set_num_threads(threads)


# Here, because a new thread does not know that the caller wants no gradients.
@torch.no_grad()
def _predict_some(
    logits: Float[Tensor, "heads rows cols classes"], y: Axis, x: Axis
) -> UInt8[Tensor, "heads height width"]:
    margin = _ROUNDING * logits.abs().amax((1, 2, 3))
    nodes = x.nodes(y.nodes(logits, 1), 2)
    winner = _winners(nodes, margin)
    predicted = winner[:, :-1, :-1].index_select(2, x.block).index_select(1, y.block)
    blocks = OpenBlocks.of(nodes, open_places(winner, y, x), margin)
    close = Filling.of(y, x).fill(predicted, blocks)
    for some in close.unique().split(_EXACT_AT_ONCE):
        predicted.view(-1)[some] = _exactly(logits, some, y, x)
    return predicted


def _winners(
    nodes: Float[Tensor, "heads rows cols classes"], margin: Float[Tensor, " heads"]
) -> UInt8[Tensor, "heads rows cols"]:
    """Class with the largest value at each node, `NOBODY` where another one is too close."""
    best, winner = nodes.max(-1)
    close = nodes >= (best - margin[:, None, None])[..., None]
    return winner.to(torch.uint8).masked_fill_(close.sum(-1, dtype=torch.uint8) != 1, NOBODY)


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
