"""The multi-crop recipe of DINO: crops to 8-bit on the CPU, everything else on the device."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped, UInt8
from torch import Tensor

from pretrain.crops.augmentation import AugmentationParams, Images, apply_looks
from pretrain.crops.plain import (
    BOX_NUMBERS,
    Generators,
    Samples,
    ViewMaker,
    as_tensor,
    check_spans,
    crop,
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

# Random numbers of a view, beside those of its box.
_LOOK_NUMBERS = 14
_REFERENCE_SIZE = 224

# For the first large crop, the second, and the small ones.
_PerCrop = Annotated[Sequence[Fraction], ListLength(3, 3)]


@dataclass(frozen=True)
class CropGroup:
    """Views of one size, 8-bit: first the first view of every image, then the second, ..."""

    pixels: UInt8[Tensor, "views 3 size size"]
    looks: AugmentationParams

    def pin_memory(self) -> "CropGroup":
        return CropGroup(self.pixels.pin_memory(), self.looks.pin_memory())


@dataclass(frozen=True)
class MultiCrop(ViewMaker):
    """Two large crops and several small ones of every image, each with a look of its own.

    Attributes:
        global_scale: Least and largest share of the image's area in a large crop.
        local_scale: Least and largest share of the image's area in a small crop.
        local_size: Side of a small crop beside large ones of 224 pixels; in proportion to others.
        aspect_ratio: Least and largest width over height before resizing.
        brightness: Largest relative change, as are contrast and saturation.
        hue: Largest turn, as a share of the colour circle.
        blur_sigma: Least and largest, in pixels.
        blur_probability: Of the first large crop, the second, and the small ones.
        solarize_probability: Of the first large crop, the second, and the small ones.
        solarize_threshold: Values from here on are inverted, 0 to 255.

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
        check_spans(
            global_scale=self.global_scale,
            local_scale=self.local_scale,
            aspect_ratio=self.aspect_ratio,
            blur_sigma=self.blur_sigma,
        )

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        """Sides of the large and, if there are any, the small crops: multiples of the patch."""
        local_size = image_size * self.local_size / _REFERENCE_SIZE
        patches = max(1, math.floor(local_size / patch_size + 0.5))
        return (image_size, patches * patch_size) if self.num_locals else (image_size,)

    def cut(
        self, samples: Samples, generators: Generators, sizes: Sequence[int]
    ) -> tuple[CropGroup, ...]:
        """Crop every image into all its views, and draw how each of them will look."""
        images = [as_tensor(sample.image) for sample in samples]
        boxes, looks = self.draw(generators, np.array([image.shape[:2] for image in images]))
        first_local = 2 * len(images)
        groups = []
        for views, rows, size in zip(
            (boxes[:2], boxes[2:]),
            (looks[:first_local], looks[first_local:]),
            sizes,
            strict=False,  # without small crops there is one size
        ):
            crops = [
                crop(image, box, size)
                for view in views
                for image, box in zip(images, view, strict=True)
            ]
            # In one piece, with the three values of a pixel side by side.
            stacked = torch.stack([pixels.permute(1, 2, 0) for pixels in crops])
            groups.append(CropGroup(stacked.permute(0, 3, 1, 2), rows))
        return tuple(groups)

    def join(
        self, pieces: Iterable[Sequence[CropGroup]], device: torch.device
    ) -> tuple[CropGroup, ...]:
        """The groups of all images: of each view, those of one piece after those of another."""
        names, joined = [item.name for item in fields(AugmentationParams)], []
        copies = [
            [
                # Pixels without a wait where they are pinned.
                (
                    group.pixels.to(device, non_blocking=True, copy=True).permute(0, 2, 3, 1),
                    *(getattr(group.looks, name).clone() for name in names),
                )
                for group in piece
            ]
            for piece in pieces
        ]
        for groups, num_views in zip(zip(*copies, strict=True), (2, self.num_locals), strict=False):
            pixels, *looks = (
                torch.cat([part.unflatten(0, (num_views, -1)) for part in parts], 1).flatten(0, 1)
                for parts in zip(*groups, strict=True)
            )
            # The three values of a pixel stay side by side.
            joined.append(CropGroup(pixels.permute(0, 3, 1, 2), AugmentationParams(*looks)))
        return tuple(joined)

    def draw(
        self,
        generators: Generators,
        image_sizes: Int64[np.ndarray, "images 2"],
    ) -> tuple[Int64[np.ndarray, "views images 4"], AugmentationParams]:
        """Boxes as in `place_boxes`, and looks: those of all first views, of all second, ..."""
        # One call a generator, and arithmetic for the whole batch: a call costs more than its work.
        shape = (2 + self.num_locals, BOX_NUMBERS + _LOOK_NUMBERS)
        numbers = np.stack([generator.random(shape) for generator in generators], axis=1)
        scales = np.array([self.global_scale] * 2 + [self.local_scale] * self.num_locals)
        boxes = place_boxes(numbers[..., :BOX_NUMBERS], image_sizes, scales, self.aspect_ratio)
        numbers = numbers[..., BOX_NUMBERS:]  # views images 14
        happens = np.moveaxis(numbers[..., :5] < self._probabilities(), -1, 0)
        flip, jitter, grey, blurred, solarize = (_rows(chosen) for chosen in happens)
        least, largest = self.blur_sigma
        sigma = _rows(least + (largest - least) * numbers[..., 5]).float()
        strengths = np.array([self.brightness, self.contrast, self.saturation])
        lowest = np.array([*np.maximum(1 - strengths, 0), -self.hue])
        highest = np.array([*(1 + strengths), self.hue])
        return boxes, AugmentationParams(
            flip=flip,
            jitter=jitter,
            order=_rows(numbers[..., 6:10].argsort(axis=-1)),
            factors=_rows(lowest + (highest - lowest) * numbers[..., 10:14]).float(),
            grey=grey,
            blur_sigma=torch.where(blurred, sigma, 0),
            solarize=solarize,
        )

    def _probabilities(self) -> Float64[np.ndarray, "views 1 5"]:
        """Of flip, jitter, grey, blur and solarize."""
        chances = [self.flip_probability, self.jitter_probability, self.grey_probability]
        both = zip(self.blur_probability, self.solarize_probability, strict=True)
        first, second, local = ([*chances, *own] for own in both)
        return np.array([first, second, *[local] * self.num_locals], float)[:, None]

    def finish(
        self,
        groups: Sequence[CropGroup],
        device: torch.device,
        colours: Normalization = IMAGENET_NORMALIZATION,
    ) -> tuple[Images, ...]:
        """Give every view its look on the device; the normalised views, group by group."""
        return tuple(
            apply_looks(
                group.pixels.to(device, non_blocking=True),
                group.looks,
                solarize_threshold=self.solarize_threshold / 255,
                colours=colours,
            )
            for group in groups
        )


def _rows(values: Shaped[np.ndarray, "views images ..."]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).flatten(0, 1)
