"""RandAugment as recipes of Vision Transformers have it: timm's operations, drawn from NumPy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from ssl_bench.models import IMAGENET_MEAN

LARGEST_MAGNITUDE = 10
_HALF = 0.5
# What appears from beyond the border has the mean colour.
_FILL = tuple(round(255 * mean) for mean in IMAGENET_MEAN)
_POSTERIZE = "PosterizeIncreasing"

Amount = Callable[[float], int | float]


def _either_way(largest: float, about: float = 0.0) -> tuple[Amount, bool]:
    return lambda level: about + largest * level, True


# timm's operations in its order. The amount of each at a level in [0, 1], which grows with the
# magnitude, where it has one; and whether the level is negated half of the time.
OPERATIONS: dict[str, tuple[Amount | None, bool]] = {
    "AutoContrast": (None, False),
    "Equalize": (None, False),
    "Invert": (None, False),
    "Rotate": _either_way(30.0),
    _POSTERIZE: (lambda level: 4 - int(4 * level), False),
    "SolarizeIncreasing": (lambda level: 256 - int(256 * level), False),
    "SolarizeAdd": (lambda level: int(110 * level), False),
    "ColorIncreasing": _either_way(0.9, about=1.0),
    "ContrastIncreasing": _either_way(0.9, about=1.0),
    "BrightnessIncreasing": _either_way(0.9, about=1.0),
    "SharpnessIncreasing": _either_way(0.9, about=1.0),
    "ShearX": _either_way(0.3),
    "ShearY": _either_way(0.3),
    "TranslateXRel": _either_way(0.45),
    "TranslateYRel": _either_way(0.45),
}
_NAMES = list(OPERATIONS)

Drawn = tuple[str, int | float]
"""Name of an operation, and its amount; 0 where it has none."""


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

    def draw(self, generator: np.random.Generator) -> list[Drawn]:
        """The operations that are applied."""
        numbers = generator.integers(len(_NAMES), size=self.num_ops).tolist()
        applied, negated = generator.random((2, self.num_ops)) < _HALF
        magnitudes = generator.normal(self.magnitude, self.deviation, self.num_ops)
        levels = (magnitudes.clip(0, LARGEST_MAGNITUDE) / LARGEST_MAGNITUDE).tolist()
        names = [_NAMES[number] for number in numbers]
        return [
            (name, amount(name, level, negate=bool(negate)))
            for name, apply, negate, level in zip(names, applied, negated, levels, strict=True)
            if apply
        ]


def amount(name: str, level: float, *, negate: bool) -> int | float:
    """What an operation is called with at a level in [0, 1]."""
    of_level, either_way = OPERATIONS[name]
    return 0 if of_level is None else of_level(-level if negate and either_way else level)


def apply_operations(
    pixels: UInt8[Tensor, "3 height width"], drawn: Sequence[Drawn]
) -> UInt8[Tensor, "3 height width"]:
    """Change a picture by operations, one after the other.

    On PIL's pictures, whose operations are two to three times as fast as those on tensors.
    """
    # Slow to import, and not for everybody; once, before data workers are forked.
    from timm.data.auto_augment import NAME_TO_OP

    if not drawn:
        return pixels
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    options = {"fillcolor": _FILL, "resample": Image.Resampling.BICUBIC}
    for name, value in drawn:
        if (name, value) == (_POSTERIZE, 0):
            # Pillow refuses to keep no bit.
            picture = Image.new("RGB", picture.size)
        else:
            amounts = [] if OPERATIONS[name][0] is None else [value]
            picture = NAME_TO_OP[name](picture, *amounts, **options)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
