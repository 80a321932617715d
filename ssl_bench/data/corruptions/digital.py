"""Corruptions by processing; see `noise` for their source."""

import io

import numpy as np
from jaxtyping import Float32
from PIL import Image

from ssl_bench.data.corruptions.lens import softened
from ssl_bench.data.corruptions.levels import as_levels
from ssl_bench.data.corruptions.noise import Pixels


def contrast(image: Pixels, severity: int, seed: int) -> Pixels:
    """Every channel nearer to its mean."""
    del seed
    kept = (0.4, 0.3, 0.2, 0.1, 0.05)[severity - 1]
    shares = image / 255.0
    means = np.mean(shares, axis=(0, 1), keepdims=True)
    return as_levels((shares - means) * kept + means)


def elastic_transform(image: Pixels, severity: int, seed: int) -> Pixels:
    """Smooth moves of all pixels, as far as 1.5 to 3 percent of the image's height."""
    from scipy.ndimage import map_coordinates

    strength = 250 * (0.05, 0.065, 0.085, 0.1, 0.12)[severity - 1]
    draws = np.random.RandomState(seed)
    height, width = image.shape[:2]
    right = _moves(height, width, strength, draws)
    down = _moves(height, width, strength, draws)
    rows, columns = np.indices((height, width))
    places = (rows + down).ravel(), (columns + right).ravel()
    shares = np.array(image, np.float32) / 255.0
    moved = [
        map_coordinates(shares[..., c], places, order=1, mode="reflect").reshape(height, width)
        for c in range(3)
    ]
    return as_levels(np.stack(moved, -1))


def pixelate(image: Pixels, severity: int, seed: int) -> Pixels:
    """Made small and large again."""
    del seed
    kept = (0.6, 0.5, 0.4, 0.3, 0.25)[severity - 1]
    height, width = image.shape[:2]
    small = (max(1, int(width * kept)), max(1, int(height * kept)))
    shrunk = Image.fromarray(image).resize(small, Image.Resampling.BOX)
    return np.array(shrunk.resize((width, height), Image.Resampling.NEAREST))


def jpeg_compression(image: Pixels, severity: int, seed: int) -> Pixels:
    """Saved as a JPEG of low quality."""
    del seed
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=(25, 18, 15, 10, 7)[severity - 1])
    return np.array(Image.open(file))


def _moves(
    height: int, width: int, strength: float, draws: np.random.RandomState
) -> Float32[np.ndarray, "height width"]:
    """Smooth ones along one axis, in pixels."""
    most = height * 0.005
    rough = draws.uniform(-most, most, size=(height, width))
    smooth = softened(rough, (height * 0.01, width * 0.01), mode="reflect", truncate=3)
    return (smooth * strength).astype(np.float32)
