"""Turn training images and their masks into square inputs of an encoder, called views.

The features of all views are computed once and cached, so random crops are not drawn again in each
epoch.
"""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.features import central_square
from ssl_bench.scores import IGNORED

View = tuple[Float[Tensor, "3 size size"], UInt8[Tensor, "height width"]]
"""RGB values in [0, 1], and the mask of the same part of the image in its own resolution."""

_TRIES = 10
# Maximum ratio of the longer side of a scaled image to its intended shorter side.
_MAX_ASPECT = 4


class TrainingViews:
    """Base class of the kinds of views, which are frozen dataclasses.

    Attributes:
        count: Number of views of each image.
    """

    count: int

    def view(self, sample: Sample, number: int, size: int) -> View:
        """Return a view of an image. It is the same whenever it is requested.

        Args:
            sample: Image and mask.
            number: Which view, from 0 to `count` - 1.
            size: Height and width of the view in pixels.

        Raises:
            DataError: The sample has no mask.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class WholeImage(TrainingViews):
    """The whole image, resized to a square. The second view is its mirror image."""

    count: int = 1

    def view(self, sample: Sample, number: int, size: int) -> View:
        image, mask = image_and_mask(sample)
        view = resize_bilinear(image, size, size), mask
        return _mirror(*view) if number else view


@dataclass(frozen=True)
class CentralSquare(TrainingViews):
    """The central square of an image that has a class, but no mask. The mask is a single 0.

    Attributes:
        share: Ratio of the square's side to the shorter side of the image.
    """

    share: float
    count: int = 1

    def view(self, sample: Sample, number: int, size: int) -> View:
        del number
        pixels = central_square(sample.image, size, share=self.share)
        return pixels.float() / 255, torch.zeros(1, 1, dtype=torch.uint8)


@dataclass(frozen=True)
class ResizedCrops(TrainingViews):
    """Crops of random area and aspect ratio, resized to a square. Half of them are mirrored.

    Attributes:
        seed: Seed of the crops.
        area: Range of the crop's share of the image area.
        aspect: Range of the ratio of width to height.
    """

    count: int
    seed: int
    area: tuple[float, float] = (0.8, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

    def view(self, sample: Sample, number: int, size: int) -> View:
        random = _view_generator(self.seed, sample.image_id, number)
        image, mask = image_and_mask(sample)
        rows, cols = self._draw_window(random, *mask.shape)
        view = resize_bilinear(image[:, rows, cols], size, size), mask[rows, cols]
        return _mirror(*view) if random.random() < 0.5 else view

    def _draw_window(
        self, random: np.random.Generator, height: int, width: int
    ) -> tuple[slice, slice]:
        for _ in range(_TRIES):
            area = height * width * random.uniform(*self.area)
            aspect = np.exp(random.uniform(*np.log(self.aspect)))
            rows, cols = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
            if 0 < rows <= height and 0 < cols <= width:
                return _random_slice(random, height, rows), _random_slice(random, width, cols)
        # The image is too long. Use the largest central window with an allowed aspect ratio.
        least, most = self.aspect
        rows, cols = min(height, round(width / least)), min(width, round(height * most))
        top, left = (height - rows) // 2, (width - cols) // 2
        return slice(top, top + rows), slice(left, left + cols)


@dataclass(frozen=True)
class ScaledCrops(TrainingViews):
    """Square crops of the image scaled by a random factor. Half of them are mirrored.

    The shorter side of the scaled image is `factor` times the side of the crop, and its longer side
    is at most four times that. If the image is smaller than the crop, the rest of the crop has the
    mean colour and is ignored in the mask.

    Attributes:
        seed: Seed of the crops.
        mean: Mean colour, RGB in [0, 1].
        factor: Range of the factor.
        dominance: A crop is drawn again, up to ten times, if one class has at least this share of
            its labelled pixels, or if it has no labelled pixel.

    Source: Resize, RandomCrop, RandomFlip and Pad of https://github.com/open-mmlab/mmsegmentation,
    with the settings for linear heads of https://github.com/facebookresearch/dinov2.
    """

    count: int
    seed: int
    mean: tuple[float, float, float]
    factor: tuple[float, float] = (0.5, 2.0)
    dominance: float = 0.75

    def view(self, sample: Sample, number: int, size: int) -> View:
        random = _view_generator(self.seed, sample.image_id, number)
        image, mask = image_and_mask(sample)
        short_side = random.uniform(*self.factor) * size
        scale = min(short_side / min(mask.shape), _MAX_ASPECT * short_side / max(mask.shape))
        height, width = (max(1, round(scale * side)) for side in mask.shape)
        image, mask = resize_bilinear(image, height, width), resize_mask(mask, height, width)

        rows, cols = self._draw_window(random, mask, size)
        image, mask = image[:, rows, cols], mask[rows, cols]
        padding = (0, size - mask.shape[1], 0, size - mask.shape[0])
        mean = torch.tensor(self.mean).view(3, 1, 1)
        image = F.pad(image - mean, padding) + mean
        view = image, F.pad(mask, padding, value=IGNORED)
        return _mirror(*view) if random.random() < 0.5 else view

    def _draw_window(
        self, random: np.random.Generator, mask: UInt8[Tensor, "height width"], size: int
    ) -> tuple[slice, slice]:
        window = slice(None), slice(None)
        for _ in range(_TRIES):
            height, width = mask.shape
            window = (
                _random_slice(random, height, min(height, size)),
                _random_slice(random, width, min(width, size)),
            )
            counts = torch.bincount(mask[window].flatten(), minlength=256)[:IGNORED]
            if 0 < counts.max() < self.dominance * counts.sum():
                break
        return window


def make_views(
    crops: str, count: int, seed: int, mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
) -> TrainingViews:
    """Return the views for the settings `crops` and `views` of a probe.

    The mean colour fills the part of scaled crops that lies outside of the image.
    """
    if crops == "resized":
        return ResizedCrops(count, seed)
    if crops == "scaled":
        return ScaledCrops(count, seed, mean)
    return WholeImage(count)


def reject_identical_views(crops: str, count: int) -> None:
    """Raise a ConfigurationError if whole images would have more than two views."""
    if crops == "whole" and count > 2:
        raise ConfigurationError(
            f"whole images have one view, or two with their mirror images, got {count}",
            hint=("probe.views=1", "or", "probe.views=2"),
        )


def image_and_mask(
    sample: Sample,
) -> tuple[Float[Tensor, "3 height width"], UInt8[Tensor, "height width"]]:
    """Return the image of a sample with values in [0, 1], and its mask.

    Raises:
        DataError: The sample has no mask.
    """
    if sample.mask is None:
        raise DataError(f"{sample.image_id} has no mask, expected a mask for every image")
    pixels = torch.from_numpy(np.ascontiguousarray(sample.image.transpose(2, 0, 1)))
    return pixels.float().div_(255), torch.from_numpy(sample.mask)


def resize_bilinear(
    image: Float[Tensor, "3 height width"], rows: int, cols: int
) -> Float[Tensor, "3 rows cols"]:
    """Resize an image by bilinear interpolation with antialiasing, without keeping its shape."""
    size = (rows, cols)
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0].clamp_(0, 1)


def resize_bicubic(
    image: UInt8[np.ndarray, "height width 3"], rows: int, cols: int
) -> Float[Tensor, "3 {rows} {cols}"]:
    """Resize an RGB image by bicubic interpolation with antialiasing, to values in [0, 1]."""
    pixels = Image.fromarray(image).resize((cols, rows), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1).float() / 255


def resize_mask(
    mask: UInt8[Tensor, "height width"], rows: int, cols: int
) -> UInt8[Tensor, "rows cols"]:
    """Return the label at the center of each cell of a coarser or finer grid."""
    # The mode "nearest" takes the label at the corner of a cell, which shifts the mask.
    return F.interpolate(mask[None, None], size=(rows, cols), mode="nearest-exact")[0, 0]


def _mirror(image: Float[Tensor, "3 size size"], mask: UInt8[Tensor, "height width"]) -> View:
    return image.flip(-1), mask.flip(-1)


def _view_generator(seed: int, image_id: str, number: int) -> np.random.Generator:
    """Return a random generator that depends only on the seed, the image and the view."""
    digest = sha256(image_id.encode(errors="surrogateescape")).digest()
    return np.random.default_rng([seed, number, int.from_bytes(digest[:8], "little")])


def _random_slice(random: np.random.Generator, length: int, part: int) -> slice:
    start = int(random.integers(length - part + 1))
    return slice(start, start + part)
