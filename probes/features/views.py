"""What the encoder sees of a training image: the whole of it and its mirror image, or crops."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from ssl_bench.features import central_square
from ssl_bench.scores import IGNORED

# RGB in [0, 1], and a mask that covers the same part of the scene at a resolution of its own.
View = tuple[Float[Tensor, "3 size size"], UInt8[Tensor, "height width"]]


@dataclass(frozen=True)
class WholeImage:
    """The image squashed to a square; with two views also its mirror image."""

    count: int = 1

    def view(self, sample: Sample, number: int, size: int) -> View:
        image, mask = image_and_mask(sample)
        view = resize_bilinear(image, size, size), mask
        return mirrored(*view) if number else view


@dataclass(frozen=True)
class CentralSquare:
    """The central square of an image that has a class as a whole; its mask says nothing.

    Attributes:
        share: Side of the square, relative to the image's shorter side.
    """

    share: float
    count: int = 1

    def view(self, sample: Sample, number: int, size: int) -> View:
        del number
        pixels = central_square(sample.image, size, share=self.share)
        return pixels.float() / 255, torch.zeros(1, 1, dtype=torch.uint8)


@dataclass(frozen=True)
class ResizedCrops:
    """Crops of random area and aspect ratio, resized to a square, half of them mirrored."""

    count: int
    seed: int
    area: tuple[float, float] = (0.8, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

    def view(self, sample: Sample, number: int, size: int) -> View:
        random = generator(self.seed, sample.image_id, number)
        image, mask = image_and_mask(sample)
        rows, cols = self._window(random, *mask.shape)
        view = resize_bilinear(image[:, rows, cols], size, size), mask[rows, cols]
        return mirrored(*view) if random.random() < 0.5 else view

    def _window(self, random: np.random.Generator, height: int, width: int) -> tuple[slice, slice]:
        for _ in range(10):
            area = height * width * random.uniform(*self.area)
            aspect = np.exp(random.uniform(*np.log(self.aspect)))
            tall, wide = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
            if 0 < tall <= height and 0 < wide <= width:
                return _placed(random, height, tall), _placed(random, width, wide)
        # None fits into a long image: its middle, as long as the aspect ratio allows.
        narrowest, widest = self.aspect
        tall, wide = min(height, round(width / narrowest)), min(width, round(height * widest))
        top, left = (height - tall) // 2, (width - wide) // 2
        return slice(top, top + tall), slice(left, left + wide)


@dataclass(frozen=True)
class ScaledCrops:
    """Square crops of the image scaled by a random factor, half of them mirrored.

    A factor of one brings the shorter side to the size of the crop, if the longer one then stays
    below four times that. What lies beyond the image is of the mean colour and ignored.

    Attributes:
        dominance: Share of the labelled pixels above which one class makes a crop dull; up to ten
            are tried.

    Source: Resize, RandomCrop, RandomFlip and Pad of https://github.com/open-mmlab/mmsegmentation
    as the linear heads of https://github.com/facebookresearch/dinov2 use them.
    """

    count: int
    seed: int
    mean: tuple[float, float, float]
    factor: tuple[float, float] = (0.5, 2.0)
    dominance: float = 0.75

    def view(self, sample: Sample, number: int, size: int) -> View:
        random = generator(self.seed, sample.image_id, number)
        image, mask = self._scaled(*image_and_mask(sample), random.uniform(*self.factor) * size)
        rows, cols = self._window(random, mask, size)
        image, mask = image[:, rows, cols], mask[rows, cols]
        below, right = size - mask.shape[0], size - mask.shape[1]
        centered = image - torch.tensor(self.mean).view(3, 1, 1)
        image = F.pad(centered, (0, right, 0, below)) + torch.tensor(self.mean).view(3, 1, 1)
        view = image, F.pad(mask, (0, right, 0, below), value=IGNORED)
        return mirrored(*view) if random.random() < 0.5 else view

    def _window(
        self, random: np.random.Generator, mask: UInt8[Tensor, "height width"], size: int
    ) -> tuple[slice, slice]:
        window = slice(None), slice(None)
        for _ in range(10):
            height, width = mask.shape
            window = (
                _placed(random, height, min(height, size)),
                _placed(random, width, min(width, size)),
            )
            counts = torch.bincount(mask[window].flatten(), minlength=256)[:IGNORED]
            if 0 < counts.max() < self.dominance * counts.sum():
                break
        return window

    def _scaled(
        self,
        image: Float[Tensor, "3 height width"],
        mask: UInt8[Tensor, "height width"],
        short_side: float,
    ) -> tuple[Float[Tensor, "3 rows cols"], UInt8[Tensor, "rows cols"]]:
        scale = min(short_side / min(mask.shape), 4 * short_side / max(mask.shape))
        height, width = (max(1, round(scale * side)) for side in mask.shape)
        return resize_bilinear(image, height, width), resize_mask(mask, height, width)


TrainingViews = WholeImage | CentralSquare | ResizedCrops | ScaledCrops
"""Gives `count` views of every image, so that their features can be kept.

`view` is always the same for the same sample and number.
"""


def image_and_mask(
    sample: Sample,
) -> tuple[Float[Tensor, "3 height width"], UInt8[Tensor, "height width"]]:
    """Image in [0, 1] and mask of a sample.

    Raises:
        DataError: the sample has no mask.
    """
    if sample.mask is None:
        raise DataError(f"{sample.image_id} has no mask; segmentation needs one for every image")
    pixels = torch.from_numpy(np.ascontiguousarray(sample.image.transpose(2, 0, 1)))
    return pixels.float().div_(255), torch.from_numpy(sample.mask)


def resize_bilinear(
    image: Float[Tensor, "3 height width"], rows: int, cols: int
) -> Float[Tensor, "3 rows cols"]:
    """Bilinear, over all pixels under a new one where the image shrinks."""
    size = (rows, cols)
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0].clamp_(0, 1)


def resize_mask(
    mask: UInt8[Tensor, "height width"], rows: int, cols: int
) -> UInt8[Tensor, "rows cols"]:
    """The label at the center of each cell of a coarser or finer grid."""
    # "nearest-exact": plain "nearest" looks at the corner of a cell and shifts the mask.
    return F.interpolate(mask[None, None], size=(rows, cols), mode="nearest-exact")[0, 0]


def mirrored(image: Float[Tensor, "3 size size"], mask: UInt8[Tensor, "height width"]) -> View:
    return image.flip(-1), mask.flip(-1)


def generator(seed: int, image_id: str, number: int) -> np.random.Generator:
    """Random numbers that depend on nothing but the seed, the image and the view."""
    digest = sha256(image_id.encode(errors="surrogateescape")).digest()
    return np.random.default_rng([seed, number, int.from_bytes(digest[:8], "little")])


def _placed(random: np.random.Generator, length: int, part: int) -> slice:
    start = int(random.integers(length - part + 1))
    return slice(start, start + part)


def resize_bicubic(
    image: UInt8[np.ndarray, "height width 3"], rows: int, cols: int
) -> Float[Tensor, "3 {rows} {cols}"]:
    """An image in a size of `rows` x `cols` pixels, whatever its shape: RGB in [0, 1], bicubic."""
    small = Image.fromarray(image).resize((cols, rows), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).float() / 255
