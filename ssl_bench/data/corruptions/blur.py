"""Corruptions by lenses and movement; see `noise` for their source."""

import numpy as np
from jaxtyping import Float64, Int64

from ssl_bench.data.corruptions.lens import disk, magnified, smeared, softened
from ssl_bench.data.corruptions.levels import as_levels
from ssl_bench.data.corruptions.noise import Pixels


def defocus_blur(image: Pixels, severity: int, seed: int) -> Pixels:
    """A lens that is out of focus: the mean of a disk around each pixel."""
    import cv2

    del seed
    weights = disk(*((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[severity - 1])
    shares = image / 255.0
    # Channel by channel, as the original does: large disks go through a Fourier transform.
    return as_levels(np.stack([cv2.filter2D(shares[..., c], -1, weights) for c in range(3)], -1))


def glass_blur(image: Pixels, severity: int, seed: int) -> Pixels:
    """Frosted glass: pixels that took the place of near ones, between two blurs.

    They are copied, not exchanged, as in the original, whose exchange of views copies too.
    """
    deviation, reach, times = ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[
        severity - 1
    ]
    blurred = (_blurred(image / 255.0, deviation) * 255).astype(np.uint8)
    height, width = image.shape[:2]
    flat = blurred.reshape(-1, 3)
    inner = max(height - 2 * reach, 0) * max(width - 2 * reach, 0)
    moves = np.random.RandomState(seed).randint(-reach, reach, size=(times, inner, 2))
    for some in moves:
        flat = flat[_origins(height, width, reach, some)]
    return as_levels(_blurred(flat.reshape(image.shape) / 255.0, deviation))


def motion_blur(image: Pixels, severity: int, seed: int) -> Pixels:
    """A camera that moved on a line, within 45 degrees of level."""
    radius, deviation = ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0))[severity - 1]
    angle = np.random.RandomState(seed).uniform(-45, 45)
    moved = smeared(image, radius=radius, deviation=deviation, angle=angle)
    return np.clip(moved, 0, 255).astype(np.uint8)


def zoom_blur(image: Pixels, severity: int, seed: int) -> Pixels:
    """A camera that came nearer: the mean of the image in several sizes."""
    del seed
    end, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[severity - 1]
    factors = np.arange(1, end, step)
    shares = (image / 255.0).astype(np.float32)
    total = np.zeros_like(shares)
    for factor in factors:
        total += magnified(shares, factor)[: image.shape[0], : image.shape[1]]
    return as_levels((shares + total) / (len(factors) + 1))


def _blurred(
    shares: Float64[np.ndarray, "height width 3"], deviation: float
) -> Float64[np.ndarray, "height width 3"]:
    return softened(shares, (deviation, deviation), mode="nearest", truncate=4)


def _origins(
    height: int, width: int, reach: int, moves: Int64[np.ndarray, "inner 2"]
) -> Int64[np.ndarray, " pixels"]:
    """Where each pixel comes from once all inner ones were replaced, the last one first.

    A pixel that takes the place of another may have been replaced itself before: of those the
    origin is looked up until it is none of them, all at once and each time twice as far.

    Args:
        height: Of the image.
        width: Of the image.
        reach: Rows and columns at the rim that stay, beside one more at the top and the left.
        moves: To the right and down, in the order of the replacements.
    """
    pixels = height * width
    rows = np.arange(height - reach, reach, -1)
    columns = np.arange(width - reach, reach, -1)
    places = np.add.outer(rows * width, columns).ravel()
    taken = places + moves[:, 1] * width + moves[:, 0]
    is_inner = np.zeros(pixels, bool)
    is_inner[places] = True
    # Places before the replacements, and behind them the same places after them.
    came_from = np.concatenate([np.arange(pixels), np.arange(pixels)])
    is_replaced_before = is_inner[taken] & (taken > places)
    came_from[pixels + places] = np.where(is_replaced_before, pixels + taken, taken)
    while (came_from >= pixels).any():
        came_from = came_from[came_from]
    return came_from[pixels:]
