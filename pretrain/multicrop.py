"""The multi-crop recipe of DINO: crops to 8-bit on the CPU, everything else on the device."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float64, Int64, UInt8
from torch import Tensor

from pretrain.augmentation import Images, Looks, apply_looks
from ssl_bench.errors import ConfigurationError

_ATTEMPTS = 10
_REFERENCE_SIZE = 224


@dataclass(frozen=True)
class CropGroup:
    """Views of one size, 8-bit: first the first view of every image, then the second, ..."""

    pixels: UInt8[Tensor, "views 3 size size"]
    looks: Looks

    def pin_memory(self) -> "CropGroup":
        return type(self)(self.pixels.pin_memory(), self.looks)


@dataclass(frozen=True)
class MultiCrop:
    """Two large crops and several small ones of every image, each with a look of its own.

    Attributes:
        global_scale: Least and largest share of the image's area in a large crop.
        local_scale: Likewise for a small crop.
        local_size: Side of a small crop beside large ones of 224 pixels; in proportion to others.
        aspect_ratio: Least and largest width over height before resizing.
        brightness: Largest relative change; likewise contrast and saturation.
        hue: Largest turn, as a share of the colour circle.
        blur_sigma: Least and largest, in pixels.
        blur_probability: Of the first large crop, the second, and the small ones.
        solarize_probability: Likewise.
        solarize_threshold: Values from here on are inverted, 0 to 255.

    Source: `DataAugmentationDINO` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/main_dino.py
    """

    global_scale: Sequence[float] = (0.4, 1.0)
    local_scale: Sequence[float] = (0.05, 0.4)
    num_locals: int = 8
    local_size: int = 96
    aspect_ratio: Sequence[float] = (3 / 4, 4 / 3)
    flip_probability: float = 0.5
    jitter_probability: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    grey_probability: float = 0.2
    blur_sigma: Sequence[float] = (0.1, 2.0)
    blur_probability: Sequence[float] = (1.0, 0.1, 0.5)
    solarize_probability: Sequence[float] = (0.0, 0.2, 0.0)
    solarize_threshold: int = 128

    def __post_init__(self) -> None:
        for name in ("global_scale", "local_scale", "aspect_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ConfigurationError(
                    f"crops.{name} expects 0 < least <= largest, got [{low}, {high}]"
                )
        for name in ("blur_probability", "solarize_probability"):
            if len(getattr(self, name)) != 3:
                raise ConfigurationError(
                    f"crops.{name} expects three values (first global, second global, locals), "
                    f"got {list(getattr(self, name))}"
                )
        if self.num_locals < 0 or not 0 <= self.hue <= 0.5:
            raise ConfigurationError(
                f"crops.num_locals must be 0 or more and crops.hue in [0, .5], "
                f"got {self.num_locals} and {self.hue}"
            )

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        """Sides of the large and, if there are any, the small crops: multiples of the patch."""
        local_size = image_size * self.local_size / _REFERENCE_SIZE
        patches = max(1, math.floor(local_size / patch_size + 0.5))
        return (image_size, patches * patch_size) if self.num_locals else (image_size,)

    def cut(
        self,
        images: Iterable[UInt8[np.ndarray, "_ _ 3"]],
        generators: Iterable[np.random.Generator],
        sizes: Sequence[int],
    ) -> tuple[CropGroup, ...]:
        """Crop every image into all its views, and draw how each of them will look."""
        samples = [
            self._cut_one(image, generator, sizes)
            for image, generator in zip(images, generators, strict=True)
        ]
        groups = []
        for views in (slice(0, 2), slice(2, None))[: len(sizes)]:
            pixels = torch.stack([torch.stack(crops[views]) for crops, _ in samples], dim=1)
            looks = Looks.stack([looks[views] for _, looks in samples])
            groups.append(CropGroup(pixels.flatten(0, 1), looks))
        return tuple(groups)

    def finish(self, groups: Sequence[CropGroup], device: torch.device) -> tuple[Images, ...]:
        """Give every view its look on the device; the normalised views, group by group."""
        return tuple(
            apply_looks(
                group.pixels.to(device, non_blocking=True),
                group.looks,
                solarize_threshold=self.solarize_threshold / 255,
            )
            for group in groups
        )

    def _cut_one(
        self, image: UInt8[np.ndarray, "height width 3"], generator: np.random.Generator, sizes
    ) -> tuple[list[Tensor], Looks]:
        num_views = 2 + self.num_locals
        scales = np.array([self.global_scale] * 2 + [self.local_scale] * self.num_locals)
        boxes = draw_boxes(generator, image.shape[:2], scales, self.aspect_ratio)
        # PyTorch warns about memory it may not write to.
        source = torch.from_numpy(image if image.flags.writeable else image.copy())
        view_sizes = [sizes[0]] * 2 + [sizes[-1]] * self.num_locals
        crops = [crop(source, box, size) for box, size in zip(boxes, view_sizes, strict=True)]
        return crops, self.draw_looks(generator, num_views)

    def draw_looks(self, generator: np.random.Generator, num_views: int) -> Looks:
        strengths = np.array([self.brightness, self.contrast, self.saturation])
        lowest, highest = np.maximum(1 - strengths, 0), 1 + strengths
        factors = generator.uniform([*lowest, -self.hue], [*highest, self.hue], size=(num_views, 4))
        order = generator.random((num_views, 4)).argsort(axis=1)
        sigma = generator.uniform(*self.blur_sigma, size=num_views)
        blurred = _happens(generator, _per_view(self.blur_probability, num_views))
        everywhere = np.ones(num_views)
        return Looks(
            flip=torch.from_numpy(_happens(generator, self.flip_probability * everywhere)),
            jitter=torch.from_numpy(_happens(generator, self.jitter_probability * everywhere)),
            order=torch.from_numpy(order),
            factors=torch.from_numpy(factors).float(),
            grey=torch.from_numpy(_happens(generator, self.grey_probability * everywhere)),
            blur_sigma=torch.from_numpy(np.where(blurred, sigma, 0)).float(),
            solarize=torch.from_numpy(
                _happens(generator, _per_view(self.solarize_probability, num_views))
            ),
        )


def draw_boxes(
    generator: np.random.Generator,
    image_size: tuple[int, int],
    scales: Float64[np.ndarray, "views 2"],
    aspect_ratio: Sequence[float],
) -> Int64[np.ndarray, "views 4"]:
    """Draw (top, left, height, width) of a crop for every view of one image.

    Each row of `scales` holds the least and largest share of the image's area.

    Source: `RandomResizedCrop.get_params` of torchvision: ten attempts, then the largest central
    crop of an allowed ratio.
    """
    height, width = image_size
    drawn = generator.random((2, len(scales), _ATTEMPTS))
    areas = height * width * (scales[:, :1] + (scales[:, 1:] - scales[:, :1]) * drawn[0])
    low, high = np.log(aspect_ratio)
    ratios = np.exp(low + (high - low) * drawn[1])
    widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    views, first = np.arange(len(scales)), fits.argmax(axis=1)
    sizes = np.stack([heights[views, first], widths[views, first]], axis=1)
    free = np.array([height, width]) + 1 - sizes
    corners = np.floor(generator.random(free.shape) * free)
    boxes = np.concatenate([corners, sizes], axis=1).astype(np.int64)
    boxes[~fits.any(axis=1)] = _central_box(height, width, aspect_ratio)
    return boxes


def crop(
    image: UInt8[Tensor, "height width 3"], box: Int64[np.ndarray, " 4"], size: int
) -> UInt8[Tensor, "3 {size} {size}"]:
    """Cut out (top, left, height, width) and resize it to a square, bicubic with antialiasing.

    PyTorch's 8-bit kernel: within two levels of PIL's, and some six times as fast.
    """
    top, left, height, width = box.tolist()
    part = image[top : top + height, left : left + width].permute(2, 0, 1)
    return F.interpolate(part[None], size=(size, size), mode="bicubic", antialias=True)[0]


def _central_box(height: int, width: int, aspect_ratio: Sequence[float]) -> tuple[int, ...]:
    box_width = min(width, round(height * max(aspect_ratio)))
    box_height = min(height, round(width / min(aspect_ratio)))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def _per_view(values: Sequence[float], num_views: int) -> Float64[np.ndarray, " views"]:
    """Values of the first large crop, the second, and all small ones -> one value a view."""
    return np.array([*values[:2], *[values[2]] * (num_views - 2)])


def _happens(
    generator: np.random.Generator, probability: Float64[np.ndarray, " views"]
) -> Bool[np.ndarray, " views"]:
    return generator.random(len(probability)) < probability
