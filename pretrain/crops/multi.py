"""DINO's multi-crop augmentation. Crops are cut on the CPU and augmented on the device."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped, UInt8
from torch import Tensor

from pretrain.crops.augmentation import AugmentationParams, Images, augment
from pretrain.crops.plain import (
    NUM_RANDOMS_PER_BOX,
    Generators,
    Samples,
    ViewMaker,
    check_ranges,
    crop,
    image_to_tensor,
    place_boxes,
)
from ssl_bench.composition.fields import (
    Bounds,
    Fraction,
    FractionRange,
    ListLength,
    Pixels,
    PositiveOrZero,
    PositiveRange,
    check_fields,
)
from ssl_bench.models.encoder import IMAGENET_NORMALIZATION, Normalization
from ssl_bench.system.device import upload

# Number of random numbers for the augmentation of a view. Its box needs further random numbers.
_AUGMENTATION_NUMBERS = 14
# Side length of the global crops in the official recipe, in pixels.
_REFERENCE_SIZE = 224

# Values for the first global crop, the second global crop and the local crops.
_PerCrop = Annotated[Sequence[Fraction], ListLength(3, 3)]


@dataclass(frozen=True)
class CropGroup:
    """Crops (views) of equal size for some images, and their augmentation parameters.

    The first views of all images come first, then the second views of all images, and so on.

    Attributes:
        pixels: 8-bit RGB pixels of the crops.
        params: Augmentation parameters, with one row for each crop.
    """

    pixels: UInt8[Tensor, "views 3 size size"]
    params: AugmentationParams

    def pin_memory(self) -> "CropGroup":
        """Return a copy in pinned memory, for a DataLoader."""
        return CropGroup(self.pixels.pin_memory(), self.params.map(Tensor.pin_memory))


@dataclass(frozen=True)
class MultiCrop(ViewMaker):
    """Two large global crops and several small local crops of each image.

    Each crop has its own random augmentation.

    Attributes:
        global_scale: Minimum and maximum area of a global crop, as a fraction of the image's area.
        local_scale: Minimum and maximum area of a local crop, as a fraction of the image's area.
        local_size: Side length of a local crop in pixels for global crops of 224 pixels. For other
            sizes of global crops, this side length is scaled in proportion.
        aspect_ratio: Minimum and maximum ratio width / height of a crop before it is resized to a
            square.
        brightness: Maximum relative change of brightness, such as 0.4 for a factor of 0.6 to 1.4.
        hue: Maximum shift of the hue, as a fraction of a full turn of the colour circle.
        blur_sigma: Minimum and maximum standard deviation of the Gaussian blur in pixels.
        blur_probability: Probability of a blur for the first global crop, the second global crop,
            and each local crop.
        solarize_probability: Probability of solarization for the first global crop, the second
            global crop, and each local crop.
        solarize_threshold: Solarization inverts 8-bit values at or above this threshold. With a
            threshold of 256, no value is inverted.

    Source: `DataAugmentationDINO` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/main_dino.py
    """

    global_scale: FractionRange = (0.4, 1.0)
    local_scale: FractionRange = (0.05, 0.4)
    num_locals: Annotated[int, Bounds(0, 1000)] = 8
    local_size: Pixels = 96
    aspect_ratio: PositiveRange = (3 / 4, 4 / 3)
    flip_probability: Fraction = 0.5
    jitter_probability: Fraction = 0.8
    brightness: PositiveOrZero = 0.4
    contrast: PositiveOrZero = 0.4
    saturation: PositiveOrZero = 0.2
    hue: Annotated[float, Bounds(0, 0.5)] = 0.1
    grey_probability: Fraction = 0.2
    blur_sigma: PositiveRange = (0.1, 2.0)
    blur_probability: _PerCrop = (1.0, 0.1, 0.5)
    solarize_probability: _PerCrop = (0.0, 0.2, 0.0)
    solarize_threshold: Annotated[int, Bounds(0, 256)] = 128

    def __post_init__(self) -> None:
        check_fields(self, "objective.crops")
        check_ranges(
            global_scale=self.global_scale,
            local_scale=self.local_scale,
            aspect_ratio=self.aspect_ratio,
            blur_sigma=self.blur_sigma,
        )

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        """Return the side lengths in pixels of global crops and, if there are any, of local crops.

        The side length of the local crops is rounded to a multiple of the patch size.
        """
        local_size = image_size * self.local_size / _REFERENCE_SIZE
        patches = max(1, math.floor(local_size / patch_size + 0.5))
        return (image_size, patches * patch_size) if self.num_locals else (image_size,)

    def cut(
        self, samples: Samples, generators: Generators, sizes: Sequence[int]
    ) -> tuple[CropGroup, ...]:
        """Cut the global crops and the local crops of all images, without augmenting them.

        Args:
            samples: Images to crop.
            generators: One random number generator for each image.
            sizes: Side length of the global crops and, if there are any, of the local crops, in
                pixels.

        Returns:
            A group with the global crops and, if there are any, a group with the local crops.
        """
        images = [image_to_tensor(sample.image) for sample in samples]
        boxes, params = self.draw(generators, np.array([image.shape[:2] for image in images]))
        first_local, groups = 2 * len(images), []
        places = ((boxes[:2], slice(first_local)), (boxes[2:], slice(first_local, None)))
        # Without local crops there is only one size.
        for (group_boxes, rows), size in zip(places, sizes, strict=False):
            crops = [
                crop(image, box, size)
                for view_boxes in group_boxes
                for image, box in zip(images, view_boxes, strict=True)
            ]
            # In this tensor, the three values of a pixel are next to each other in memory.
            stacked = torch.stack([pixels.permute(1, 2, 0) for pixels in crops])
            groups.append(CropGroup(stacked.permute(0, 3, 1, 2), params.map(itemgetter(rows))))
        return tuple(groups)

    def draw(
        self, generators: Generators, image_sizes: Int64[np.ndarray, "images 2"]
    ) -> tuple[Int64[np.ndarray, "views images 4"], AugmentationParams]:
        """Draw random crop boxes and augmentation parameters for all views.

        Args:
            generators: One random number generator for each image.
            image_sizes: Height and width of each image in pixels.

        Returns:
            Top, left, height and width of each box in pixels, and the augmentation parameters. The
            first views of all images come first, then the second views of all images, and so on.
        """
        # Each generator is called only once, because a call takes longer than drawing the numbers.
        shape = (2 + self.num_locals, NUM_RANDOMS_PER_BOX + _AUGMENTATION_NUMBERS)
        numbers = np.stack([generator.random(shape) for generator in generators], axis=1)
        scales = np.array([self.global_scale] * 2 + [self.local_scale] * self.num_locals)
        boxes = place_boxes(
            numbers[..., :NUM_RANDOMS_PER_BOX], image_sizes, scales, self.aspect_ratio
        )
        numbers = numbers[..., NUM_RANDOMS_PER_BOX:]  # views images 14
        decisions = np.moveaxis(numbers[..., :5] < self._probabilities(), -1, 0)
        flip, jitter, grey, is_blurred, solarize = (_flatten_views(d) for d in decisions)
        least, largest = self.blur_sigma
        sigma = _flatten_views(least + (largest - least) * numbers[..., 5]).float()
        strengths = np.array([self.brightness, self.contrast, self.saturation])
        lowest = np.array([*np.maximum(1 - strengths, 0), -self.hue])
        highest = np.array([*(1 + strengths), self.hue])
        factors = lowest + (highest - lowest) * numbers[..., 10:14]
        return boxes, AugmentationParams(
            flip=flip,
            jitter=jitter,
            order=_flatten_views(numbers[..., 6:10].argsort(axis=-1)),
            factors=_flatten_views(factors).float(),
            grey=grey,
            blur_sigma=torch.where(is_blurred, sigma, 0),
            solarize=solarize,
        )

    def _probabilities(self) -> Float64[np.ndarray, "views 1 5"]:
        """Return the probabilities of flip, jitter, grey, blur and solarization for each view."""
        shared = [self.flip_probability, self.jitter_probability, self.grey_probability]
        per_crop = zip(self.blur_probability, self.solarize_probability, strict=True)
        first, second, local = ([*shared, *own] for own in per_crop)
        return np.array([first, second, *[local] * self.num_locals], float)[:, None]

    def collate(
        self, chunks: Iterable[Sequence[CropGroup]], device: torch.device
    ) -> tuple[CropGroup, ...]:
        """Copy the results of several calls of `cut` to the device, and join them.

        The returned tuple contains one group for each crop size, with the crops of all images.
        """
        copies = [[_copy_group(group, device) for group in chunk] for chunk in chunks]
        num_views = (2, self.num_locals)
        return tuple(
            _join_groups(groups, count)
            for groups, count in zip(zip(*copies, strict=True), num_views, strict=False)
        )

    def augment_on_device(
        self,
        micro_batch: Sequence[CropGroup],
        device: torch.device,
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> tuple[Images, ...]:
        """Augment and normalise crops on the device. Return one tensor for each crop size."""
        return tuple(
            augment(
                upload(group.pixels, device),
                group.params,
                solarize_threshold=self.solarize_threshold / 255,
                normalization=normalization,
            )
            for group in micro_batch
        )


def _flatten_views(values: Shaped[np.ndarray, "views images ..."]) -> Tensor:
    """Convert an array [views, images, ...] to a tensor [views * images, ...]."""
    return torch.from_numpy(np.ascontiguousarray(values)).flatten(0, 1)


def _copy_group(group: CropGroup, device: torch.device) -> CropGroup:
    """Return a copy of a group, with its pixels on the device and its parameters in CPU memory."""
    pixels = upload(group.pixels, device, copy=True)
    return CropGroup(pixels, group.params.map(Tensor.clone))


def _join_groups(groups: Sequence[CropGroup], num_views: int) -> CropGroup:
    """Join crop groups of different images to one group. Each image has `num_views` crops."""

    def join(tensors: Iterable[Tensor]) -> Tensor:
        by_view = [tensor.unflatten(0, (num_views, -1)) for tensor in tensors]
        return torch.cat(by_view, 1).flatten(0, 1)

    # The three values of a pixel stay next to each other in memory.
    pixels = join(group.pixels.permute(0, 2, 3, 1) for group in groups).permute(0, 3, 1, 2)
    params = {
        f.name: join(getattr(group.params, f.name) for group in groups)
        for f in fields(AugmentationParams)
    }
    return CropGroup(pixels, AugmentationParams(**params))
