"""RandAugment as the recipes of Vision Transformers have it: timm's, drawn from NumPy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transform
from torch import Tensor

from ssl_bench.models import IMAGENET_MEAN

Picture = Image.Image

LARGEST_MAGNITUDE = 10
_HALF = 0.5
# What appears from beyond the border has the mean colour.
_FILL = tuple(round(255 * mean) for mean in IMAGENET_MEAN)


@dataclass(frozen=True)
class Operation:
    """A change of an 8-bit RGB picture.

    Attributes:
        change: (picture, amount) -> picture.
        amount: Of a level in [0, 1], which grows with the magnitude.
        either_way: The level is negated half of the time.
    """

    change: Callable[[Picture, float], Picture]
    amount: Callable[[float], float] = float
    either_way: bool = False

    def amount_at(self, level: float, *, negate: bool) -> float:
        return self.amount(-level if negate and self.either_way else level)


@dataclass(frozen=True)
class RandAugment:
    """Several operations in a row, each of them drawn from all and applied half of the time.

    Attributes:
        num_ops: How many are drawn, with replacement.
        magnitude: Mean of their magnitude, 0 to 10.
        deviation: Its standard deviation; what falls outside of 0 to 10 becomes 0 or 10.

    Source: https://arxiv.org/abs/1909.13719 as timm 1.0.31 has it, timm/data/auto_augment.py,
    "rand-m9-mstd0.5-inc1" for two operations of 9 and .5, told to interpolate bicubically. So do
    https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/main.py
    (line 102), MAE's fine-tuning and Xu et al. (2024); untold, timm takes bicubic or bilinear.
    """

    num_ops: int
    magnitude: int
    deviation: float

    def draw(self, generator: np.random.Generator) -> list[tuple[str, float]]:
        """The operations that are applied, by name, each with its amount."""
        numbers = generator.integers(len(_NAMES), size=self.num_ops).tolist()
        applied, negated = generator.random((2, self.num_ops)) < _HALF
        magnitudes = generator.normal(self.magnitude, self.deviation, self.num_ops)
        levels = (magnitudes.clip(0, LARGEST_MAGNITUDE) / LARGEST_MAGNITUDE).tolist()
        names = [_NAMES[number] for number in numbers]
        return [
            (name, OPERATIONS[name].amount_at(level, negate=bool(negate)))
            for name, apply, negate, level in zip(names, applied, negated, levels, strict=True)
            if apply
        ]


def apply_operations(
    pixels: UInt8[Tensor, "3 height width"], drawn: Sequence[tuple[str, float]]
) -> UInt8[Tensor, "3 height width"]:
    """Change a picture by named operations, one after the other.

    On PIL's pictures, whose operations are two to three times as fast as those on tensors.
    """
    if not drawn:
        return pixels
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    for name, amount in drawn:
        picture = OPERATIONS[name].change(picture, amount)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _rotated(picture: Picture, degrees: float) -> Picture:
    return picture.rotate(degrees, Resampling.BICUBIC, fillcolor=_FILL)


def _sheared_across(picture: Picture, slope: float) -> Picture:
    return _transformed(picture, (1, slope, 0, 0, 1, 0))


def _sheared_down(picture: Picture, slope: float) -> Picture:
    return _transformed(picture, (1, 0, 0, slope, 1, 0))


def _moved_across(picture: Picture, share: float) -> Picture:
    return _transformed(picture, (1, 0, share * picture.width, 0, 1, 0))


def _moved_down(picture: Picture, share: float) -> Picture:
    return _transformed(picture, (1, 0, 0, 0, 1, share * picture.height))


def _transformed(picture: Picture, matrix: Sequence[int | float]) -> Picture:
    return picture.transform(
        picture.size, Transform.AFFINE, matrix, Resampling.BICUBIC, fillcolor=_FILL
    )


def _posterized(picture: Picture, bits: float) -> Picture:
    """Keep the highest bits of each value; with none, which Pillow's own refuses, it is black."""
    kept = 256 - 2 ** (8 - int(bits))
    return picture.point([value & kept for value in range(256)] * 3)


def _brightened_below_half(picture: Picture, levels: float) -> Picture:
    table = [min(255, value + int(levels)) if value < 128 else value for value in range(256)]
    return picture.point(table * 3)


def _enhancing(enhancer: Callable[[Picture], Any]) -> Operation:
    """Away from 1, the picture as it is, to either side."""
    return Operation(
        lambda picture, factor: enhancer(picture).enhance(factor),
        lambda level: 1 + 0.9 * level,
        either_way=True,
    )


def _shifting(change: Callable[[Picture, float], Picture], largest: float) -> Operation:
    return Operation(change, lambda level: largest * level, either_way=True)


OPERATIONS = {
    "auto_contrast": Operation(lambda picture, _: ImageOps.autocontrast(picture)),
    "equalize": Operation(lambda picture, _: ImageOps.equalize(picture)),
    "invert": Operation(lambda picture, _: ImageOps.invert(picture)),
    "rotate": _shifting(_rotated, 30.0),
    "posterize": Operation(_posterized, lambda level: 4.0 - int(4 * level)),
    "solarize": Operation(
        lambda picture, threshold: ImageOps.solarize(picture, int(threshold)),
        lambda level: 256.0 - int(256 * level),
    ),
    "solarize_add": Operation(_brightened_below_half, lambda level: float(int(110 * level))),
    "color": _enhancing(ImageEnhance.Color),
    "contrast": _enhancing(ImageEnhance.Contrast),
    "brightness": _enhancing(ImageEnhance.Brightness),
    "sharpness": _enhancing(ImageEnhance.Sharpness),
    "shear_x": _shifting(_sheared_across, 0.3),
    "shear_y": _shifting(_sheared_down, 0.3),
    "translate_x": _shifting(_moved_across, 0.45),
    "translate_y": _shifting(_moved_down, 0.45),
}
_NAMES = list(OPERATIONS)
