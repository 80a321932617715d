"""The images of supervised training: one crop each, changed at random, and its class.

With what timm's recipes do: RandAugment, timm's operations, drawn from NumPy; mixup and CutMix,
which blend images with others and their classes with them; Cutout and random erasing, rectangles
that become grey, or noise.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from PIL import Image
from torch import Tensor

from pretrain.crops.augmentation import Images, Rows, change, jitter, normalise
from pretrain.crops.plain import Generators, PlainCrop, Samples, ViewMaker
from ssl_bench.composition.fields import (
    Bounds,
    CountOrZero,
    Fraction,
    FractionRange,
    PositiveOrZero,
    PositiveRange,
    check_fields,
)
from ssl_bench.models.encoder import IMAGENET_MEAN, IMAGENET_NORMALIZATION, Normalization
from ssl_bench.system.device import to_device

# Brightness, contrast and saturation: no hue.
_NUM_JITTERS = 3
# Of an image: what goes to the device, and what stays beside it.
_FAR, _NEAR = ("pixels", "labels"), ("order", "factors", "hidden", "erased")
# Of the rectangles that are erased.
_ATTEMPTS = 10
_AREA = (0.02, 1 / 3)
_ASPECT_RATIO = (0.3, 1 / 0.3)

Edges = Int64[np.ndarray, " 4"]
"""Top, bottom, left and right of a rectangle; the ends are no longer in it, nor need be inside."""


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


@dataclass(frozen=True)
class Mixture:
    """How the images of a part of a batch are blended with the same in reverse order.

    The first with the last, the second with the last but one; of an odd number the middle one
    stays as it is.

    Attributes:
        own_share: Of each image and of its class in the result, in [0, 1].
        box: Top, bottom, left and right of what comes from the other image alone (CutMix); all
            pixels are blended without it (mixup).
    """

    own_share: float = 1.0
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class LabelledCrops:
    """One crop of every image of a part, 8-bit, with what the device does to it.

    Attributes:
        order: Sequence of the jitters, BRIGHTNESS, CONTRAST and SATURATION.
        factors: Their strengths in that numbering.
        hidden: Edges of the square that Cutout takes.
        erased: Edges of the rectangle that becomes noise; zeros for none.
        noise_seed: Of the noise of the whole part.
    """

    pixels: UInt8[Tensor, "batch 3 size size"]
    labels: Int64[Tensor, " batch"]
    order: Int64[Tensor, "batch 3"]
    factors: Float32[Tensor, "batch 3"]
    hidden: Int64[Tensor, "batch 4"]
    erased: Int64[Tensor, "batch 4"]
    noise_seed: int
    mixture: Mixture

    def pin_memory(self) -> "LabelledCrops":
        return replace(self, pixels=self.pixels.pin_memory(), labels=self.labels.pin_memory())


@dataclass(frozen=True)
class SingleCrop(ViewMaker):
    """Crop, flip and RandAugment on the CPU; all that follows on the device.

    In this order: colour jitter, normalisation, Cutout, random erasing, mixup or CutMix.

    Attributes:
        scale: Least and largest share of the image's area in the crop.
        aspect_ratio: Least and largest width over height before resizing.
        num_ops: Operations of RandAugment that are drawn for each crop, half of which are applied;
            0 for none.
        magnitude: Their strength, 0 to 10.
        magnitude_deviation: Standard deviation of the strength about it.
        color_jitter: Largest relative change of brightness, contrast and saturation, in an order
            drawn for each crop. The recipes of DeiT and its followers name one, and timm leaves it
            out beside RandAugment (timm 1.0.31, timm/data/transforms_factory.py, line 187): for
            those it is 0.
        cutout: Side in pixels of a square that becomes grey (the mean colour), about a center
            anywhere in the crop; 0 for none.
        erasing_probability: Of a rectangle of noise, see `draw_rectangle`.
        mixup: The images of a part are blended with the same in reverse order, and stand for
            Beta(mixup, mixup) of the result and of the loss; 0 for none. See `draw_mixture`.
        cutmix: As mixup, with a box of the other image in place of a blend.
        mix_probability: That a part is mixed.
        switch_probability: That it is by CutMix, where both would be possible.

    What belongs to an image is drawn from its own generator; the mixture and the noise of a part,
    which a process computes in one go, from that of its first image.

    Source: the transforms and `Mixup` of timm, see `draw_operations`, `draw_mixture` and
    `draw_rectangle`.
    """

    scale: FractionRange = (0.08, 1.0)
    aspect_ratio: PositiveRange = (3 / 4, 4 / 3)
    flip_probability: Fraction = 0.5
    num_ops: Annotated[int, Bounds(0, 100)] = 2
    magnitude: Annotated[int, Bounds(0, LARGEST_MAGNITUDE)] = 9
    magnitude_deviation: PositiveOrZero = 0.5
    color_jitter: PositiveOrZero = 0.0
    cutout: CountOrZero = 0
    erasing_probability: Fraction = 0.0
    mixup: PositiveOrZero = 0.0
    cutmix: PositiveOrZero = 0.0
    mix_probability: Fraction = 1.0
    switch_probability: Fraction = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "objective.crops")
        PlainCrop(self.scale, self.aspect_ratio)  # refuses ranges without meaning

    def cut(self, samples: Samples, generators: Generators, sizes: Sequence[int]) -> LabelledCrops:
        """Crop every image once, and draw what else happens to it."""
        samples, generators, size = list(samples), list(generators), sizes[0]
        plain = PlainCrop(self.scale, self.aspect_ratio, self.flip_probability)
        pixels = []
        for sample, one in zip(samples, generators, strict=True):
            part = plain.cut_one(sample.image, one, size)
            pixels.append(apply_operations(part, self.draw_operations(one)))
        low, high = max(0.0, 1 - self.color_jitter), 1 + self.color_jitter
        return LabelledCrops(
            pixels=torch.stack(pixels),
            labels=torch.tensor([sample.label for sample in samples]),
            order=_rows(one.permutation(_NUM_JITTERS) for one in generators),
            factors=_rows(one.uniform(low, high, _NUM_JITTERS) for one in generators).float(),
            hidden=_rows(draw_square(one, size, self.cutout) for one in generators),
            erased=_rows(draw_rectangle(one, size, self.erasing_probability) for one in generators),
            noise_seed=int(generators[0].integers(2**62)),
            mixture=self.draw_mixture(generators[0], size),
        )

    def draw_operations(self, generator: np.random.Generator) -> list[Drawn]:
        """Several operations in a row, each of them drawn from all and applied half of the time.

        Magnitudes that fall outside of 0 to 10 become 0 or 10.

        Source: RandAugment, https://arxiv.org/abs/1909.13719 as timm 1.0.31 has it,
        timm/data/auto_augment.py, "rand-m9-mstd0.5-inc1" for two operations of 9 and .5, told to
        interpolate bicubically. So do
        https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/main.py
        (line 102), MAE's fine-tuning and Xu et al. (2024); untold, timm takes bicubic or bilinear.
        """
        numbers = generator.integers(len(_NAMES), size=self.num_ops).tolist()
        applied, negated = generator.random((2, self.num_ops)) < _HALF
        magnitudes = generator.normal(self.magnitude, self.magnitude_deviation, self.num_ops)
        levels = (magnitudes.clip(0, LARGEST_MAGNITUDE) / LARGEST_MAGNITUDE).tolist()
        names = [_NAMES[number] for number in numbers]
        return [
            (name, amount(name, level, negate=bool(negate)))
            for name, apply, negate, level in zip(names, applied, negated, levels, strict=True)
            if apply
        ]

    def draw_mixture(self, generator: np.random.Generator, size: int) -> Mixture:
        """One mixture for all square images of `size` pixels of a part.

        Source: mixup, https://arxiv.org/abs/1710.09412; CutMix, https://arxiv.org/abs/1905.04899;
        both as timm 1.0.31 has them, timm/data/mixup.py, `Mixup` in mode "batch". In timm 0.3 to
        0.6, which DeiT, MAE and Xu et al. (2024) used, boxes of an odd side are a pixel smaller.
        """
        mixup, cutmix = self.mixup, self.cutmix
        if not (mixup or cutmix) or generator.random() >= self.mix_probability:
            return Mixture()
        has_box = bool(cutmix)
        if mixup and cutmix:
            has_box = generator.random() < self.switch_probability
        if not has_box:
            return Mixture(generator.beta(mixup, mixup))
        # About a center anywhere; what of it lies outside is not lost from the own share.
        side = int(size * (1 - generator.beta(cutmix, cutmix)) ** 0.5)
        ends = []
        for center in generator.integers(0, size, size=2).tolist():
            ends += [max(center - side // 2, 0), min(center + (side + 1) // 2, size)]
        top, bottom, left, right = ends
        return Mixture(1 - (bottom - top) * (right - left) / size**2, (top, bottom, left, right))

    def join(self, pieces: Iterable[LabelledCrops], device: torch.device) -> LabelledCrops:
        """All crops; what belongs to the whole part is what the first piece says."""
        copies = []
        for piece in pieces:
            # Pixels and labels without a wait where they are pinned.
            far = {n: getattr(piece, n).to(device, non_blocking=True, copy=True) for n in _FAR}
            copies.append(replace(piece, **far, **{n: getattr(piece, n).clone() for n in _NEAR}))
        whole: dict[str, Any] = {
            n: torch.cat([getattr(one, n) for one in copies]) for n in (*_FAR, *_NEAR)
        }
        return replace(copies[0], **whole)

    def finish(
        self,
        groups: LabelledCrops,
        device: torch.device,
        colours: Normalization = IMAGENET_NORMALIZATION,
    ) -> tuple[Images, Int64[Tensor, " batch"], Float32[Tensor, ""]]:
        """The normalised images, the class of each, and its share of the mixture."""
        images = groups.pixels.to(device, non_blocking=True).float().div_(255)
        if self.color_jitter:
            jitter(images, torch.ones(len(images), dtype=torch.bool), groups.order, groups.factors)
        normalise(images, colours)
        if self.cutout:
            images.masked_fill_(_inside(images, groups.hidden), 0.0)
        erase(images, groups.erased, groups.noise_seed)
        mix(images, groups.mixture)
        own_share = torch.full((), groups.mixture.own_share, device=device)
        return images, groups.labels.to(device, non_blocking=True), own_share


def mix(images: Images, mixture: Mixture) -> Images:
    """Blend the images of a part, in place."""
    if mixture.box is not None:
        top, bottom, left, right = mixture.box
        inside = images[:, :, top:bottom, left:right]
        inside.copy_(inside.flip(0))
    elif mixture.own_share < 1:
        others = images.flip(0).mul_(1 - mixture.own_share)
        images.mul_(mixture.own_share).add_(others)
    return images


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
    top, bottom, left, right = to_device(edges, images.device)[..., None].unbind(1)
    rows, cols = (torch.arange(side, device=images.device) for side in images.shape[2:])
    is_row, is_col = (rows >= top) & (rows < bottom), (cols >= left) & (cols < right)
    return (is_row[:, :, None] & is_col[:, None, :])[:, None]


def _rows(values: Iterable[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(list(values)))
