"""Corruptions that change every value by itself.

Source of all formulas and constants here and in the modules beside: https://arxiv.org/abs/1903.12261
as https://pypi.org/project/imagecorruptions-imaug 1.1.5 has them, whose pixels these are.
docs/corruptions.md says where those of ImageNet-C itself differ.
"""

import numpy as np
from jaxtyping import UInt8

from ssl_bench.data.corruptions.levels import as_levels

Pixels = UInt8[np.ndarray, "height width 3"]


def gaussian_noise(image: Pixels, severity: int, seed: int) -> Pixels:
    """Normal noise of the same deviation everywhere."""
    deviation = (0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1]
    noise = np.random.RandomState(seed).normal(size=image.shape, scale=deviation)
    return as_levels(image / 255.0 + noise)


def shot_noise(image: Pixels, severity: int, seed: int) -> Pixels:
    """Few photons, whose number has a Poisson distribution."""
    photons = (60, 25, 12, 5, 3)[severity - 1]
    counted = np.random.RandomState(seed).poisson(image / 255.0 * photons)
    return as_levels(counted / float(photons))


def impulse_noise(image: Pixels, severity: int, seed: int) -> Pixels:
    """Values that are lost: as many are full as are zero."""
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[severity - 1]
    # Another generator than that of the others, for the original takes it from scikit-image.
    draws = np.random.default_rng(seed)
    is_lost, is_full = draws.random(image.shape) <= share, draws.random(image.shape) <= 0.5
    return np.where(is_lost, np.where(is_full, 255, 0), as_levels(image / 255.0)).astype(np.uint8)
