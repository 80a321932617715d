"""What moves, softens and magnifies: parts of corruptions.

Exponentials, sines and cosines are the C library's. NumPy's have a last bit that depends on the
processor (AVX-512), and what is cut to whole levels is then a level apart.
"""

import math
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped


def disk(radius: int, deviation: float) -> Float32[np.ndarray, "side side"]:
    """The weights of a lens that is out of focus, its rim smoothed; their sum is 1."""
    import cv2

    half = max(radius, 8)
    places = np.arange(-half, half + 1)
    inside = np.add.outer(places**2, places**2) <= radius**2
    weights = inside.astype(np.float32)
    weights /= np.sum(weights)
    side = 3 if radius <= 8 else 5
    return cv2.GaussianBlur(weights, ksize=(side, side), sigmaX=deviation)


def softened(
    values: Float64[np.ndarray, "height width *channels"],
    deviations: tuple[float, float],
    *,
    mode: Literal["nearest", "reflect"],
    truncate: int,
) -> Float64[np.ndarray, "height width *channels"]:
    """Normal means along rows and columns, as `scipy.ndimage.gaussian_filter` takes them.

    Args:
        values: Of each pixel.
        deviations: Of the weights down and to the right, in pixels.
        mode: What is outside, as SciPy names it.
        truncate: Of how many deviations the weights are.
    """
    from scipy.ndimage import correlate1d

    for axis, deviation in enumerate(deviations):
        reach = int(truncate * deviation + 0.5)
        scale = -0.5 / (deviation * deviation)
        weights = np.array([math.exp(scale * step**2) for step in range(-reach, reach + 1)])
        values = correlate1d(values, weights / weights.sum(), axis, mode=mode)
    return values


def magnified(
    image: Float[np.ndarray, "height width channels"], factor: float
) -> Float[np.ndarray, "rows columns channels"]:
    """The middle of an image, as large as the whole or a few pixels larger."""
    from scipy.ndimage import zoom

    height, width = image.shape[:2]
    sides = [math.ceil(side / factor) for side in (height, width)]
    top, left = ((side - part) // 2 for side, part in zip((height, width), sides, strict=True))
    middle = image[top : top + sides[0], left : left + sides[1]]
    return np.asarray(zoom(middle, (factor, factor, 1), order=1))


def smeared(
    image: Shaped[np.ndarray, "height width *channels"],
    *,
    radius: int,
    deviation: float,
    angle: float,
) -> Float[np.ndarray, "height width *channels"]:
    """An image that moved, the farther the fainter.

    Args:
        image: Its rim goes on outside of it.
        radius: Half of the longest way, in pixels.
        deviation: Of the normal weights along the way, in pixels.
        angle: Of the way against the x axis, in degrees.
    """
    length = 2 * radius + 1
    falling = [math.exp(-(step**2) / (2 * deviation**2)) for step in range(length)]
    weights = np.array(falling) / (math.sqrt(2 * math.pi) * deviation)
    weights = weights / np.sum(weights)
    height, width = image.shape[:2]
    padding = [(length, length), (length, length), *[(0, 0)] * (image.ndim - 2)]
    padded = np.pad(image, padding, mode="edge")
    total = np.zeros(image.shape)
    for weight, (down, right) in zip(weights, _way(length, angle), strict=True):
        if abs(down) >= height or abs(right) >= width:
            break
        top, left = length - down, length - right
        total = total + weight * padded[top : top + height, left : left + width]
    return total


def _way(length: int, angle: float) -> list[tuple[int, int]]:
    """Whole pixels down and to the right, step by step."""
    turn = math.radians(angle)
    down, right = length * math.sin(turn), length * math.cos(turn)
    whole = math.hypot(down, right)
    return [
        (-math.ceil(step * down / whole - 0.5), -math.ceil(step * right / whole - 0.5))
        for step in range(length)
    ]
