"""The log-normaliser of bilinearly upsampled logits, summed over pixels, with its gradient.

Both forms go through the cells between patch centers in pieces that stay in the cache, and never
hold the upsampled logits of all heads.
"""

from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ssl_bench.system.device import float64_device

# Of one piece: the second-level cache of a CPU core; a GPU wants few, large kernels.
PIECE_BYTES = {"cpu": 2**20, "cuda": 2**28, "mps": 2**28}
# Columns below which matrix products and vector instructions lose their speed.
_NARROWEST = 64
# Pixels along a cell from which powers are faster than exponentials.
_POWERS_FROM = 8
# A class that matters at one corner, at most a step and 17 (24 bits) below the highest logit, is
# another step lower at the next: exp(-2 * 35 - 17) is about the smallest float32 of full precision.
_LARGEST_STEP = 35.0

Corners = Float[Tensor, "4 heads classes cells"]
Counted = Float[Tensor, "pixels cells"]
Sums = tuple[Float[Tensor, " heads"], Corners]


def summed_logsumexp(corners: Corners, counted: Counted) -> Sums:
    """Sum over the pixels of the log-normaliser of their logits, and its gradient by corner.

    Args:
        corners: Logits of the four patches around each cell: upper left, upper right, lower left,
            lower right.
        counted: Weight of each pixel, row by row in its cell; their number is a square.
    """
    side = _side(counted)
    # A device would have to say first which heads are gentle, and exponentials cost it little.
    if side < _POWERS_FROM or corners.device.type != "cpu":
        return by_exponentials(corners, counted)
    gentle = _is_gentle(corners)
    if gentle.all():
        return by_powers(corners, counted)
    total, gradient = corners.new_empty(corners.shape[1]), torch.empty_like(corners)
    for heads, form in ((gentle, by_powers), (~gentle, by_exponentials)):
        if heads.any():
            total[heads], gradient[:, heads] = form(corners[:, heads], counted)
    return total, gradient


def by_exponentials(corners: Corners, counted: Counted) -> Sums:
    """A product with the bilinear weights, a softmax, and the product with their transpose."""
    weights = corner_weights(_side(counted), corners.device).to(corners)
    total, gradient = corners.new_zeros(corners.shape[1]), torch.zeros_like(corners)
    # A GPU's softmax is up to four times as fast where classes are neighbours in memory.
    axis = 2 if corners.device.type == "cpu" else 3
    for heads, cells, pixels in product(*_cuts(corners, len(counted), pieces=1)):
        part = corners[:, heads, :, cells].movedim(2, axis)
        shape = part.shape[1:]
        logits = (weights[pixels] @ part.reshape(4, -1)).view(-1, *shape)
        shares = logits.softmax(axis)
        times = counted[pixels, None, cells]
        total[heads] += (logsumexp(logits, shares, axis) * times).sum((0, 2))
        shares.mul_(times.unsqueeze(axis))
        back = weights[pixels].T @ shares.flatten(1)
        gradient[:, heads, :, cells] += back.view(4, *shape).movedim(axis, 2)
    return total, gradient


def by_powers(corners: Corners, counted: Counted) -> Sums:
    """The same with two exponentials for each row of a cell's pixels.

    Along such a row logits are linear, so their exponentials are a geometric series. For heads
    whose logits change by less than `_LARGEST_STEP` from a patch to the next.
    """
    side = _side(counted)
    after = _positions(side).tolist()
    across = torch.stack([1 - _positions(side), _positions(side)]).to(corners)
    highest = corners.amax((0, 2))
    by_row = counted.unflatten(0, (side, side))
    total, gradient = corners.new_zeros(corners.shape[1]), torch.zeros_like(corners)
    # A row is visited less often than a pixel is; pieces may be larger.
    for heads, cells in product(*_cuts(corners, side, pieces=2)[:2]):
        top = highest[heads, cells]
        first, last = (corners[:, heads, :, cells] - top[:, None]).unflatten(0, (2, 2)).unbind(1)
        upper_step, lower_step = (last - first).div_(side)
        upper_left, lower_left = torch.lerp(first, last, after[0])
        back = gradient[:, heads, :, cells]
        for times, below in zip(by_row[:, :, None, cells], after, strict=True):
            left = torch.lerp(upper_left, lower_left, below)
            step = torch.lerp(upper_step, lower_step, below)
            exponentials = _geometric(left.exp_(), step.exp_(), side)
            sums = exponentials.sum(2)
            total[heads] += ((sums.log() + top) * times).sum((0, 2))
            exponentials.mul_((times / sums).unsqueeze(2))
            ends = (across @ exponentials.flatten(1)).view(2, *left.shape)
            back[:2].add_(ends, alpha=1 - below)
            back[2:].add_(ends, alpha=below)
    return total, gradient


def _geometric(
    first: Float[Tensor, "heads classes cells"], ratio: Float[Tensor, "heads classes cells"], n: int
) -> Float[Tensor, "n heads classes cells"]:
    series = first.new_empty(n, *first.shape)
    series[0] = first
    known = 1
    while known < n:
        more = min(known, n - known)
        torch.mul(series[:more], ratio, out=series[known : known + more])
        known += more
        if known < n:
            ratio = ratio * ratio
    return series


def _is_gentle(corners: Corners) -> Bool[Tensor, " heads"]:
    """Heads whose logits stay close from patch to patch; never those with NaN."""
    low, high = corners.aminmax(dim=0)
    return (high - low).amax((1, 2)) < _LARGEST_STEP


def corner_weights(side: int, device: torch.device | None = None) -> Float[Tensor, "pixels 4"]:
    """Bilinear weights of the four surrounding patches for the pixels of one cell.

    A cell lies between four patch centers; its pixels are those of bilinear upsampling with
    `align_corners=False`. Corners: upper left, upper right, lower left, lower right.
    """
    after = _positions(side, device)
    sides = torch.stack([1 - after, after], -1)
    return torch.einsum("yi,xj->yxij", sides, sides).reshape(-1, 4)


def _positions(side: int, device: torch.device | None = None) -> Float[Tensor, " side"]:
    """How far each pixel of a cell lies between two patch centers."""
    first = 0.5 if side % 2 == 0 else 0.0
    numbers = torch.arange(side, dtype=torch.float64, device=device and float64_device(device))
    return (numbers + first) / side


def logsumexp(logits: Tensor, shares: Tensor, axis: int) -> Tensor:
    """Logarithm of the sum of exponentials, from the softmax that is already known."""
    # The largest share is at least 1 / classes, so that its logarithm is exact.
    return logits.amax(axis) - shares.amax(axis).log_()


def _cuts(corners: Corners, pixels: int, *, pieces: int) -> tuple[list[slice], ...]:
    """Heads, cells and pixels, cut so that so many pieces of upsampled logits stay in the cache."""
    _, heads, classes, cells = corners.shape
    budget = pieces * PIECE_BYTES[corners.device.type] // (classes * corners.element_size())
    some_cells = min(cells, max(_NARROWEST, budget // pixels))
    some_pixels = min(pixels, max(1, budget // some_cells))
    some_heads = min(heads, max(1, budget // (some_cells * some_pixels)))
    counts = ((heads, some_heads), (cells, some_cells), (pixels, some_pixels))
    return tuple(
        [slice(first, first + some) for first in range(0, count, some)] for count, some in counts
    )


def _side(counted: Counted) -> int:
    return round(len(counted) ** 0.5)
