"""Other ways from patch logits to classes of pixels, which `pixels.py` compares with ours."""

from dataclasses import dataclass

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from probes.heads.upsampled_logsumexp import PIECE_BYTES


def by_gaps(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """The former way: cells between four patches, a product of matrices for the mixed ones.

    With 16 classes and more in a piece of cells, the product fuses its additions.
    """
    y = _lines(height, logits.shape[1], logits.device)
    x = _lines(width, logits.shape[2], logits.device)
    winners = logits.argmax(-1).to(torch.uint8)
    corners = [winners[:, row][:, :, col] for row in y.ends for col in x.ends]
    mixed = torch.stack([corner != corners[0] for corner in corners[1:]]).any(0)
    mixed &= y.occupied[:, None] & x.occupied
    predicted = corners[0][:, y.gap_of_pixel][:, :, x.gap_of_pixel].contiguous()
    _predict_cells(predicted, logits, mixed.nonzero(), y, x)
    return predicted


def by_resizing(
    logits: Float[Tensor, "heads rows cols classes"], height: int, width: int
) -> UInt8[Tensor, "heads height width"]:
    """A class after the other over the whole map, by OpenCV, which rounds weights otherwise."""
    cv2.setNumThreads(torch.get_num_threads())
    found = np.empty((len(logits), height, width), dtype=np.uint8)
    for label, head in zip(found, logits.movedim(-1, 1).contiguous().numpy(), strict=True):
        best = np.full((height, width), -np.inf, np.float32)
        label[:] = 0
        for number, patches in enumerate(head):
            value = cv2.resize(patches, (width, height), interpolation=cv2.INTER_LINEAR)
            np.maximum(label, np.multiply(value > best, np.uint8(number)), out=label)
            np.maximum(best, value, out=best)
    return torch.from_numpy(found)


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
