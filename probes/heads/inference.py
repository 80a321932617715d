"""From patch logits to the class of every pixel of the original image."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from probes.heads.upsampled_logsumexp import PIECE_BYTES


def predict_pixels(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """Class with the largest bilinearly upsampled logit, for every pixel.

    Equals `F.interpolate(mode="bilinear").argmax(1)` without making all upsampled logits: where the
    four patches around a pixel agree so does the pixel, and elsewhere a class is upsampled only if
    it can win somewhere between its four patches.
    """
    if logits.is_cuda:
        return predict_upsampled(logits, height, width)
    y = _lines(height, logits.shape[1], logits.device)
    x = _lines(width, logits.shape[2], logits.device)
    winners = logits.argmax(-1).to(torch.uint8)
    corners = [winners[:, row][:, :, col] for row in y.ends for col in x.ends]
    mixed = torch.stack([corner != corners[0] for corner in corners[1:]]).any(0)
    mixed &= y.occupied[:, None] & x.occupied
    predicted = corners[0][:, y.gap_of_pixel][:, :, x.gap_of_pixel].contiguous()
    _predict_cells(predicted, logits, mixed.nonzero(), y, x)
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


@dataclass(frozen=True)
class _Lines:
    """Pixels along one axis, sorted into the gaps between patch centers.

    Attributes:
        ends: Patch before and after each gap; beyond the edge the last patch is repeated.
        occupied: Whether there are pixels in the gap.
        pixels: These, the last one repeated up to the largest number in a gap.
        weights: Bilinear weights of the two ends for them.
    """

    gap_of_pixel: Int64[Tensor, " size"]
    ends: Int64[Tensor, "2 gaps"]
    occupied: Bool[Tensor, " gaps"]
    pixels: Int64[Tensor, "gaps most"]
    weights: Float[Tensor, "gaps 2 most"]


def _lines(size: int, patches: int, device: torch.device) -> _Lines:
    position = (torch.arange(size, device=device) + 0.5) * (patches / size) - 0.5
    gap_of_pixel = position.floor().long() + 1
    count = torch.bincount(gap_of_pixel, minlength=patches + 1)
    place = torch.arange(int(count.max()), device=device)
    last = count.cumsum(0)[:, None] - 1
    pixels = torch.minimum(last + 1 - count[:, None] + place, last).clamp(min=0)
    after = (position - position.floor())[pixels]
    gap = torch.arange(patches + 1, device=device)
    return _Lines(
        gap_of_pixel=gap_of_pixel,
        ends=torch.stack([(gap - 1).clamp(min=0), gap.clamp(max=patches - 1)]),
        occupied=count > 0,
        pixels=pixels,
        weights=torch.stack([1 - after, after], 1),
    )


def _predict_cells(
    predicted: UInt8[Tensor, "heads height width"],
    logits: Float[Tensor, "heads rows cols classes"],
    cells: Int64[Tensor, "cells 3"],
    y: _Lines,
    x: _Lines,
) -> None:
    """Fill the pixels of some cells (head, gap of rows, gap of columns) of `predicted`."""
    head, row, col = cells.unbind(1)
    corners = torch.stack(
        [logits[head, above[row], left[col]] for above in y.ends for left in x.ends], 1
    )
    # What stays below the lowest corner of another class everywhere cannot win.
    highest, floor = corners.amax(1), corners.amin(1).amax(-1, keepdim=True)
    candidates = (highest >= floor).sum(-1)
    order = candidates.argsort()
    pixels = y.pixels.shape[1] * x.pixels.shape[1]
    budget = PIECE_BYTES[logits.device.type] // (pixels * corners.element_size())
    start = 0
    while start < len(order):
        # The widest cell of a piece sets its width, so the pieces are cut in ascending order.
        width = int(candidates[order[min(start + budget // 8, len(order) - 1)]])
        some = order[start : start + max(1, budget // width)]
        width = int(candidates[some].max())
        classes = highest[some].topk(width).indices
        values = corners[some].gather(2, classes[:, None].expand(-1, 4, -1))
        best = torch.bmm(_cell_weights(y, x, row[some], col[some]), values).argmax(-1)
        _write(predicted, classes.gather(1, best), (head[some], row[some], col[some]), y, x)
        start += len(some)


def _cell_weights(
    y: _Lines, x: _Lines, row: Int64[Tensor, " cells"], col: Int64[Tensor, " cells"]
) -> Float[Tensor, "cells pixels 4"]:
    # Pixels last, where the product runs fastest.
    weights = y.weights[row][:, :, None, :, None] * x.weights[col][:, None, :, None, :]
    return weights.flatten(3).flatten(1, 2).mT


def _write(
    predicted: UInt8[Tensor, "heads height width"],
    values: Int64[Tensor, "cells pixels"],
    cells: tuple[Tensor, Tensor, Tensor],
    y: _Lines,
    x: _Lines,
) -> None:
    head, row, col = cells
    _, height, width = predicted.shape
    index = (head[:, None] * height + y.pixels[row])[:, :, None] * width + x.pixels[col][:, None]
    predicted.view(-1)[index.flatten(1)] = values.to(torch.uint8)
