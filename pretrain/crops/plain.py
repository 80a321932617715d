"""What makes views of images, how a box is drawn and cut out, and the plainest maker of views."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int64, UInt8
from torch import Tensor

from pretrain.crops.augmentation import Images, normalise
from ssl_bench.composition.fields import Fraction, FractionRange, PositiveRange, check_fields
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.encoder import IMAGENET_NORMALIZATION, Normalization

_ATTEMPTS = 10
BOX_NUMBERS = 2 * _ATTEMPTS + 2

Samples = Iterable[Sample]
Generators = Iterable[np.random.Generator]
"""As many as samples."""


class ViewMaker(ABC):
    """From samples to the views a learner takes: the part for the CPU, then that for the device.

    What `cut` gives comes through a DataLoader, which makes lists of tuples and pins what has
    `pin_memory`: give tensors, lists of them, or a class such as `LabelledCrops`.
    """

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        """Sides of the views in pixels, for an encoder of such images and patches."""
        del patch_size
        return (image_size,)

    @abstractmethod
    def cut(self, samples: Samples, generators: Generators, sizes: Sequence[int]) -> Any:
        """The views of the samples, in which each draws from its own generator."""

    def join(self, pieces: Iterable[Any], device: torch.device) -> Any:
        """What was cut from some images, then some more, ...: on the device, as if cut at once.

        Each piece is copied as it comes, so that the memory of the worker that cut it is free.
        """
        return torch.cat([piece.to(device, non_blocking=True, copy=True) for piece in pieces])

    @abstractmethod
    def finish(
        self, groups: Any, device: torch.device, colours: Normalization = IMAGENET_NORMALIZATION
    ) -> Sequence[Tensor]:
        """What was cut, on the device, as the learner takes it."""


@dataclass(frozen=True)
class PlainCrop(ViewMaker):
    """Crop and flip on the CPU; normalise on the device. No class and no colour is touched.

    Attributes:
        scale: Least and largest share of the image's area in the crop.
        aspect_ratio: Least and largest width over height before resizing.

    Source: what MAE pretrains with, https://arxiv.org/abs/2111.06377, appendix A.1.
    """

    scale: FractionRange = (0.2, 1.0)
    aspect_ratio: PositiveRange = (3 / 4, 4 / 3)
    flip_probability: Fraction = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "objective.crops")
        check_spans(scale=self.scale, aspect_ratio=self.aspect_ratio)

    def cut(
        self, samples: Samples, generators: Generators, sizes: Sequence[int]
    ) -> UInt8[Tensor, "batch 3 size size"]:
        """Crop every image once."""
        pairs = zip(samples, generators, strict=True)
        return torch.stack([self.cut_one(one.image, draws, sizes[0]) for one, draws in pairs])

    def cut_one(
        self, image: UInt8[np.ndarray, "height width 3"], generator: np.random.Generator, size: int
    ) -> UInt8[Tensor, "3 {size} {size}"]:
        """A random part of one image, resized to a square, bicubic, and mirrored or not."""
        sizes, scales = np.array([image.shape[:2]]), np.array([self.scale])
        numbers = generator.random((1, 1, BOX_NUMBERS))
        box = place_boxes(numbers, sizes, scales, self.aspect_ratio)[0, 0]
        pixels = crop(as_tensor(image), box, size)
        return pixels.flip(-1) if generator.random() < self.flip_probability else pixels

    def finish(
        self,
        groups: UInt8[Tensor, "batch 3 size size"],
        device: torch.device,
        colours: Normalization = IMAGENET_NORMALIZATION,
    ) -> tuple[Images]:
        """The normalised images."""
        return (normalise(groups.to(device, non_blocking=True).float() / 255, colours),)


def check_spans(**spans: Sequence[float]) -> None:
    """Refuse a least value that is not above 0, or above the largest.

    Raises:
        ConfigurationError: one is.
    """
    for name, (low, high) in spans.items():
        if not 0 < low <= high:
            raise ConfigurationError(
                f"crops.{name} expects 0 < least <= largest, got [{low}, {high}]"
            )


def place_boxes(
    numbers: Float64[np.ndarray, "views images 22"],
    image_sizes: Int64[np.ndarray, "images 2"],
    scales: Float64[np.ndarray, "views 2"],
    aspect_ratio: Sequence[float],
) -> Int64[np.ndarray, "views images 4"]:
    """Turn numbers in [0, 1) into the (top, left, height, width) of every crop.

    Args:
        numbers: Ten for the area, ten for the ratio, two for the place.
        image_sizes: Height and width.
        scales: Least and largest share of the image's area.
        aspect_ratio: Least and largest.

    Source: `RandomResizedCrop.get_params` of torchvision: ten attempts, then the largest central
    crop of an allowed ratio.
    """
    height, width = image_sizes.T[..., None]
    least, largest = scales.T[..., None, None]
    low, high = np.log(aspect_ratio)
    areas = height * width * (least + (largest - least) * numbers[..., :_ATTEMPTS])
    ratios = np.exp(low + (high - low) * numbers[..., _ATTEMPTS:-2])
    sides = np.rint(np.sqrt(np.stack([areas / ratios, areas * ratios], axis=-1)))
    fits = ((sides > 0) & (sides <= image_sizes[:, None])).all(axis=-1)  # views images attempts
    first = fits.argmax(axis=-1)[..., None, None]
    box_sizes = np.take_along_axis(sides, first, axis=2)[..., 0, :]
    corners = np.floor(numbers[..., -2:] * (image_sizes + 1 - box_sizes))
    boxes = np.concatenate([corners, box_sizes], axis=-1).astype(np.int64)
    for view, image in np.argwhere(~fits.any(axis=-1)):
        height, width = image_sizes[image].tolist()
        box_width = min(width, round(height * max(aspect_ratio)))
        box_height = min(height, round(width / min(aspect_ratio)))
        corner = (height - box_height) // 2, (width - box_width) // 2
        boxes[view, image] = (*corner, box_height, box_width)
    return boxes


def crop(
    image: UInt8[Tensor, "height width 3"], box: Int64[np.ndarray, " 4"], size: int
) -> UInt8[Tensor, "3 {size} {size}"]:
    """Cut out (top, left, height, width) and resize it to a square, bicubic with antialiasing.

    PyTorch's 8-bit kernel: within two levels of PIL's, and several times as fast. In memory the
    three values of a pixel stay side by side, which spares it two passes over the pixels.
    """
    top, left, height, width = box.tolist()
    part = image[None, top : top + height, left : left + width].permute(0, 3, 1, 2)
    return F.interpolate(part, size=(size, size), mode="bicubic", antialias=True)[0]


def as_tensor(image: UInt8[np.ndarray, "height width 3"]) -> UInt8[Tensor, "height width 3"]:
    """The image itself, or a copy where PyTorch would warn of memory it may not write to."""
    return torch.from_numpy(image if image.flags.writeable else image.copy())
