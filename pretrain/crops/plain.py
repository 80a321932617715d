"""The base class for random crops of images, and the random resized crops of MAE."""

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
from ssl_bench.system.device import upload

# Number of random sizes that are tried until a box fits into the image.
_ATTEMPTS = 10
NUM_RANDOMS_PER_BOX = 2 * _ATTEMPTS + 2
"""Number of random numbers from which the box of a crop is computed."""

Samples = Iterable[Sample]
Generators = Iterable[np.random.Generator]
"""One generator for each sample."""


class ViewMaker(ABC):
    """Base class of view makers, which turn images into views (such as random crops) for training.

    `cut` runs on the CPU in data workers, and `augment_on_device` runs on the device. Between `cut`
    and `augment_on_device`, a DataLoader copies tensors to pinned memory and turns tuples into
    lists. If `cut` returns an object that is no tensor, tuple or list, the class of the object
    needs a method `pin_memory`, which returns a copy in pinned memory.
    """

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        """Return the side length in pixels of each kind of view, such as global and local crops.

        Args:
            image_size: Side length of the encoder's images in pixels.
            patch_size: Side length of the encoder's patches in pixels.
        """
        del patch_size
        return (image_size,)

    @abstractmethod
    def cut(self, samples: Samples, generators: Generators, sizes: Sequence[int]) -> Any:
        """Return the 8-bit views of all samples, such as random crops.

        Args:
            samples: Images with their labels.
            generators: One random generator for each sample.
            sizes: Side lengths in pixels that the method `sizes` returned.
        """

    def collate(self, chunks: Iterable[Any], device: torch.device) -> Any:
        """Copy the results of several calls of `cut` to the device, and join them.

        The joined result equals the result of a single call of `cut` for all samples. Each result
        is copied as soon as it arrives, so that the shared memory of the data worker is freed.
        """
        return torch.cat([upload(chunk, device, copy=True) for chunk in chunks])

    @abstractmethod
    def augment_on_device(
        self,
        micro_batch: Any,
        device: torch.device,
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> Sequence[Tensor]:
        """Return normalised views on the device, and labels if the objective needs labels.

        Args:
            micro_batch: Result of `cut` or `collate`.
            device: Device of the learner.
            normalization: Mean and standard deviation of each channel.
        """


@dataclass(frozen=True)
class PlainCrop(ViewMaker):
    """A random resized crop with a random horizontal flip. Colours are not changed.

    Attributes:
        scale: Minimum and maximum area of the crop, as a fraction of the image's area.
        aspect_ratio: Minimum and maximum ratio width / height of a crop before it is resized to a
            square.

    Source: the pretraining of MAE, https://arxiv.org/abs/2111.06377, appendix A.1.
    """

    scale: FractionRange = (0.2, 1.0)
    aspect_ratio: PositiveRange = (3 / 4, 4 / 3)
    flip_probability: Fraction = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "objective.crops")
        check_ranges(scale=self.scale, aspect_ratio=self.aspect_ratio)

    def cut(
        self, samples: Samples, generators: Generators, sizes: Sequence[int]
    ) -> UInt8[Tensor, "batch 3 size size"]:
        """Return one random 8-bit crop of each image, with a side length of `sizes[0]` pixels."""
        pairs = zip(samples, generators, strict=True)
        return torch.stack([self.cut_one(one.image, own, sizes[0]) for one, own in pairs])

    def cut_one(
        self, image: UInt8[np.ndarray, "height width 3"], generator: np.random.Generator, size: int
    ) -> UInt8[Tensor, "3 {size} {size}"]:
        """Return a random crop of an image, resized to a square and possibly flipped."""
        sizes, scales = np.array([image.shape[:2]]), np.array([self.scale])
        numbers = generator.random((1, 1, NUM_RANDOMS_PER_BOX))
        box = place_boxes(numbers, sizes, scales, self.aspect_ratio)[0, 0]
        pixels = crop(image_to_tensor(image), box, size)
        return pixels.flip(-1) if generator.random() < self.flip_probability else pixels

    def augment_on_device(
        self,
        micro_batch: UInt8[Tensor, "batch 3 size size"],
        device: torch.device,
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> tuple[Images]:
        """Return the normalised crops on the device."""
        return (normalise(upload(micro_batch, device).float() / 255, normalization),)


def check_ranges(**ranges: Sequence[float]) -> None:
    """Check that the minimum of each range is positive and does not exceed the maximum.

    Raises:
        ConfigurationError: A range is invalid. The message contains the name of the range.
    """
    for name, (low, high) in ranges.items():
        if not 0 < low <= high:
            raise ConfigurationError(
                f"crops.{name} expects 0 < minimum <= maximum, got [{low}, {high}]"
            )


def place_boxes(
    numbers: Float64[np.ndarray, "views images 22"],
    image_sizes: Int64[np.ndarray, "images 2"],
    scales: Float64[np.ndarray, "views 2"],
    aspect_ratio: Sequence[float],
) -> Int64[np.ndarray, "views images 4"]:
    """Compute the box of each crop from uniform random numbers.

    Args:
        numbers: Random numbers in [0, 1) for each crop: ten areas and ten aspect ratios for up to
            ten attempts, and two numbers for the position.
        image_sizes: Height and width of each image in pixels.
        scales: Minimum and maximum area, as a fraction of the image's area.
        aspect_ratio: Minimum and maximum of width / height.

    Returns:
        Top, left, height and width of each box in pixels.

    Source: `RandomResizedCrop.get_params` of torchvision. The first of ten random boxes that fits
    into the image is used. If no box fits, the largest central box with an allowed aspect ratio is
    used.
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
    """Cut a box out of an image and resize it to a square with antialiased bicubic interpolation.

    PyTorch's kernel for 8-bit images is several times as fast as PIL, and the results differ by at
    most two grey levels. The three colour values of a pixel stay adjacent in memory, so that
    the image need not be copied.

    Args:
        image: 8-bit RGB image.
        box: Top, left, height and width in pixels.
        size: Side length of the result in pixels.
    """
    top, left, height, width = box.tolist()
    part = image[None, top : top + height, left : left + width].permute(0, 3, 1, 2)
    return F.interpolate(part, size=(size, size), mode="bicubic", antialias=True)[0]


def image_to_tensor(image: UInt8[np.ndarray, "height width 3"]) -> UInt8[Tensor, "height width 3"]:
    """Return an image as a tensor that shares the memory of the image.

    A read-only image is copied, because PyTorch would print a warning for shared read-only memory.
    """
    return torch.from_numpy(image if image.flags.writeable else image.copy())
