"""Cutout and random erasing: rectangles of an image that become grey, or noise."""

import math

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from pretrain.crops.augmentation import Images, Rows, change

_ATTEMPTS = 10
_AREA = (0.02, 1 / 3)
_ASPECT_RATIO = (0.3, 1 / 0.3)

Edges = Int64[np.ndarray, " 4"]
"""Top, bottom, left and right of a rectangle; the ends are no longer in it, nor need be inside."""


def draw_square(generator: np.random.Generator, size: int, side: int) -> Edges:
    """A square about a center anywhere in the image; what of it lies outside is lost.

    Source: Cutout, https://arxiv.org/abs/1708.04552.
    """
    center = generator.integers(0, size, size=2)
    return np.add.outer(center - side // 2, (0, side)).ravel()


def draw_rectangle(generator: np.random.Generator, size: int, probability: float) -> Edges:
    """A rectangle of 2 % to a third of the image, .3 to 1 / .3 times as high as wide; or none.

    None is all zeros: it is drawn with `1 - probability`, or if ten attempts do not fit.

    Source: random erasing, https://arxiv.org/abs/1708.04896, as timm 1.0.31 has it,
    timm/data/random_erasing.py; areas and ratios are the defaults of `RandomErasing` there.
    """
    if generator.random() < probability:
        for _ in range(_ATTEMPTS):
            area = size**2 * generator.uniform(*_AREA)
            ratio = math.exp(generator.uniform(*np.log(_ASPECT_RATIO)))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if max(height, width) < size:
                top, left = generator.integers(0, (size - height + 1, size - width + 1))
                return np.array([top, top + height, left, left + width])
    return np.zeros(4, np.int64)


def grey_out(images: Images, edges: Int64[Tensor, "views 4"]) -> Images:
    """Give a rectangle of every normalised image the mean colour, in place."""
    return images.masked_fill_(_inside(images, edges), 0.0)


def erase(images: Images, edges: Int64[Tensor, "views 4"], seed: int) -> Images:
    """Fill a rectangle of normalised images with noise of N(0, 1), in place.

    Source: `RandomErasing` of timm in mode "pixel". The same seed gives other noise on another
    kind of device.
    """
    generator = torch.Generator(images.device).manual_seed(seed)

    def noisy(chosen: Images, rows: Rows) -> Images:
        noise = torch.empty_like(chosen).normal_(generator=generator)
        return torch.where(_inside(chosen, edges[rows]), noise, chosen)

    change(images, edges[:, 1] > edges[:, 0], noisy)
    return images


def _inside(
    images: Images, edges: Int64[Tensor, "views 4"]
) -> Bool[Tensor, "views 1 height width"]:
    """Which pixels lie in the rectangle of each image."""
    top, bottom, left, right = edges.to(images.device, non_blocking=True)[..., None].unbind(1)
    rows, cols = (torch.arange(side, device=images.device) for side in images.shape[2:])
    is_row, is_col = (rows >= top) & (rows < bottom), (cols >= left) & (cols < right)
    return (is_row[:, :, None] & is_col[:, None, :])[:, None]
