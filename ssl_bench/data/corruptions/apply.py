"""One corruption of one image: which function, and with which draws."""

from collections.abc import Callable, Mapping
from hashlib import sha256

from ssl_bench.data.corruptions import blur, digital, noise, weather
from ssl_bench.data.corruptions.named import Corruption
from ssl_bench.data.corruptions.noise import Pixels

FUNCTIONS: Mapping[str, Callable[[Pixels, int, int], Pixels]] = {
    function.__name__: function
    for function in (
        *(noise.gaussian_noise, noise.shot_noise, noise.impulse_noise),
        *(blur.defocus_blur, blur.glass_blur, blur.motion_blur, blur.zoom_blur),
        *(weather.snow, weather.fog, weather.brightness),
        *(digital.contrast, digital.elastic_transform, digital.pixelate, digital.jpeg_compression),
    )
}


def corrupted(image: Pixels, corruption: Corruption, image_id: str) -> Pixels:
    """An image after a corruption, the same whenever and wherever it is asked for.

    Args:
        image: RGB, 0 to 255.
        corruption: Whose radii and distances are in pixels of this image.
        image_id: With the corruption it decides the draws.
    """
    return FUNCTIONS[corruption.name](image, corruption.severity, _seed(corruption, image_id))


def _seed(corruption: Corruption, image_id: str) -> int:
    """Of 32 bits, and of no generator that others draw from."""
    text = f"{corruption}\n{image_id}".encode(errors="surrogateescape")
    return int.from_bytes(sha256(text).digest()[:4], "big")
