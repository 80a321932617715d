"""The view of a whole image that classifiers are validated on."""

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor


def central_square(
    image: UInt8[np.ndarray, "height width 3"], size: int, *, share: float
) -> UInt8[Tensor, "3 {size} {size}"]:
    """Resize an image, bicubic with antialiasing, and cut the square out of its middle.

    Only what lies in the square is computed. Equal to torchvision's `Resize` of the shorter side
    and `CenterCrop`, with which DINO is evaluated, up to rounding.

    Args:
        image: RGB, 0 to 255.
        size: Side of the result in pixels.
        share: Side of the square, relative to the image's shorter side; .875 resizes to 256 where
            `size` is 224. In (0, 1].
    """
    sides, short = image.shape[:2], max(size, round(size / share))
    scaled = [short * side // min(sides) for side in sides]
    first = [round((side - size) / 2) for side in scaled]
    # Pixels around the box count at its rim, as if the whole had been resized.
    top, left = (start * side / new for start, side, new in zip(first, sides, scaled, strict=True))
    bottom, right = (
        (start + size) * side / new for start, side, new in zip(first, sides, scaled, strict=True)
    )
    box = (left, top, right, bottom)
    square = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)
