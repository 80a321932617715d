"""The view of a whole image that classifiers are validated on."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor


def central_square(
    image: UInt8[np.ndarray, "height width 3"], size: int, *, share: float
) -> UInt8[Tensor, "3 {size} {size}"]:
    """Cut the square out of the middle of an image and resize it, bicubic with antialiasing.

    Args:
        image: RGB, 0 to 255.
        size: Side of the result in pixels.
        share: Side of the square, relative to the image's shorter side; .875 equals the usual
            resizing to 256 and cropping to 224, up to rounding. In (0, 1].
    """
    height, width = image.shape[:2]
    side = max(1, round(share * min(height, width)))
    top, left = (height - side) // 2, (width - side) // 2
    square = torch.from_numpy(image[top : top + side, left : left + side].copy())
    pixels = square.permute(2, 0, 1)[None]
    return F.interpolate(pixels, size=(size, size), mode="bicubic", antialias=True)[0]
