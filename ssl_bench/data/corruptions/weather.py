"""Corruptions by weather; see `noise` for their source."""

import numpy as np
from jaxtyping import Float32

from ssl_bench.data.corruptions.lens import magnified, smeared
from ssl_bench.data.corruptions.levels import as_levels
from ssl_bench.data.corruptions.noise import Pixels


def snow(image: Pixels, severity: int, seed: int) -> Pixels:
    """Flakes that fall, and their picture upside down, over a paler image."""
    import cv2

    mean, deviation, size, least, radius, spread, kept = (
        (0.1, 0.3, 3.0, 0.5, 10, 4.0, 0.8),
        (0.2, 0.3, 2.0, 0.5, 12, 4.0, 0.7),
        (0.55, 0.3, 4.0, 0.9, 12, 8.0, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8.0, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12.0, 0.55),
    )[severity - 1]
    draws = np.random.RandomState(seed)
    shares = np.array(image, np.float32) / 255.0
    dots = draws.normal(size=image.shape[:2], loc=mean, scale=deviation)
    flakes = magnified(dots[..., np.newaxis], size)[..., 0]
    flakes = np.clip(np.where(flakes < least, 0, flakes), 0, 1)
    angle = draws.uniform(-135, -45)
    falling = smeared(flakes, radius=radius, deviation=spread, angle=angle)
    layer = np.round(falling * 255).astype(np.uint8) / 255.0
    layer = layer[: image.shape[0], : image.shape[1], np.newaxis]
    grey = cv2.cvtColor(shares, cv2.COLOR_RGB2GRAY)[..., np.newaxis]
    paler = kept * shares + (1 - kept) * np.maximum(shares, grey * 1.5 + 0.5)
    return as_levels(paler + layer + np.rot90(layer, k=2))


def fog(image: Pixels, severity: int, seed: int) -> Pixels:
    """Clouds before the image, whose brightest value stays the brightest."""
    density, decay = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[severity - 1]
    height, width = image.shape[:2]
    side = 2 ** (max(height, width, 3) - 1).bit_length()
    clouds = density * _clouds(side, decay, np.random.RandomState(seed))[:height, :width]
    shares = image / 255.0
    brightest = shares.max()
    return as_levels((shares + clouds[..., np.newaxis]) * brightest / (brightest + density))


def brightness(image: Pixels, severity: int, seed: int) -> Pixels:
    """More of the value of hue, saturation and value."""
    from skimage.color import hsv2rgb, rgb2hsv

    del seed
    more = (0.1, 0.2, 0.3, 0.4, 0.5)[severity - 1]
    hsv = rgb2hsv(image / 255.0)
    hsv[..., 2] = np.clip(hsv[..., 2] + more, 0, 1)
    return as_levels(hsv2rgb(hsv))


def _clouds(
    side: int, decay: float, draws: np.random.RandomState
) -> Float32[np.ndarray, "side side"]:
    """Heights from 0 to 1 by diamonds and squares, on a torus.

    Args:
        side: A power of 2, 4 or more.
        decay: By what the draws become smaller wherever the mesh is halved.
        draws: Where they are from.
    """
    heights = np.zeros((side, side), np.float32)
    step, reach = side, 100.0

    def around(sums: np.ndarray) -> np.ndarray:
        """The means of four corners, and what is added to them."""
        return sums / 4 + reach * draws.uniform(-reach, reach, sums.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        pairs = corners + np.roll(corners, -1, 0)
        heights[half::step, half::step] = around(pairs + np.roll(pairs, -1, 1))
        middles = heights[half::step, half::step]
        across = corners + np.roll(corners, -1, 1)
        heights[::step, half::step] = around((middles + np.roll(middles, 1, 0)) + across)
        down = corners + np.roll(corners, -1, 0)
        heights[half::step, ::step] = around((middles + np.roll(middles, 1, 1)) + down)
        step, reach = half, reach / decay
    heights -= heights.min()
    return heights / heights.max()
