"""The crops of supervised training: one randomly augmented view of each image, and its class."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from PIL import Image
from torch import Tensor

from pretrain.crops.augmentation import Images, Rows, apply_jitters, apply_to_views, normalise
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
from ssl_bench.system.device import to_device, upload

Edges = Int64[np.ndarray, " 4"]
"""Top, bottom, left and right edge of a rectangle in pixels. Edges may lie outside the image.

The row of the bottom edge and the column of the right edge do not belong to the rectangle.
"""
Operation = tuple[str, int | float]
"""Name and argument of an operation of RandAugment. The argument is 0 if there is none."""
_Argument = Callable[[float], int | float]

# Brightness, contrast and saturation, without hue.
_NUM_JITTERS = 3
# Fields of `LabelledCrops` with one row for each image: those that are copied to the device, and
# those that stay in CPU memory.
_ON_DEVICE = ("pixels", "labels")
_ON_CPU = ("order", "factors", "cutout", "erased")
# Random erasing: number of attempts, range of the area as a share of the image, and range of the
# ratio height / width.
_ATTEMPTS = 10
_AREA = (0.02, 1 / 3)
_ASPECT_RATIO = (0.3, 1 / 0.3)
_MAX_MAGNITUDE = 10
# Probability with which RandAugment applies an operation, and with which it negates a level.
_HALF = 0.5
# Colour of pixels that lie outside the image before a geometric operation.
_FILL = tuple(round(255 * mean) for mean in IMAGENET_MEAN)
_POSTERIZE = "PosterizeIncreasing"


def _make_signed_operation(largest: float, center: float = 0.0) -> tuple[_Argument, bool]:
    """Return the entry in `OPERATIONS` for a RandAugment operation with negative levels.

    The returned pair consists of a function that computes center + largest * level, and True.
    """
    return lambda level: center + largest * level, True


# The operations of timm's RandAugment, in timm's order. An entry contains a function that computes
# the argument of the operation from a level in [0, 1], and whether the level is negated with
# probability 0.5. Three operations take no argument, so they have no function.
OPERATIONS: dict[str, tuple[_Argument | None, bool]] = {
    "AutoContrast": (None, False),
    "Equalize": (None, False),
    "Invert": (None, False),
    "Rotate": _make_signed_operation(30.0),
    _POSTERIZE: (lambda level: 4 - int(4 * level), False),
    "SolarizeIncreasing": (lambda level: 256 - int(256 * level), False),
    "SolarizeAdd": (lambda level: int(110 * level), False),
    "ColorIncreasing": _make_signed_operation(0.9, center=1.0),
    "ContrastIncreasing": _make_signed_operation(0.9, center=1.0),
    "BrightnessIncreasing": _make_signed_operation(0.9, center=1.0),
    "SharpnessIncreasing": _make_signed_operation(0.9, center=1.0),
    "ShearX": _make_signed_operation(0.3),
    "ShearY": _make_signed_operation(0.3),
    "TranslateXRel": _make_signed_operation(0.45),
    "TranslateYRel": _make_signed_operation(0.45),
}
_NAMES = list(OPERATIONS)


@dataclass(frozen=True)
class Mixture:
    """Parameters of mixup or CutMix, which mix the images of a micro-batch in pairs.

    The first image of a micro-batch is mixed with the last image, the second image with the
    second-to-last image, and so on. If the number of images is odd, the middle image stays
    unchanged.

    Attributes:
        lam: Weight in [0, 1] of each image and its class in the mixed image. The other image of the
            pair has the weight 1 - `lam`. With CutMix, `lam` is the fraction of pixels outside the
            box.
        box: Top, bottom, left and right edge of the box that CutMix copies from the other image.
            Without a box, each pixel is a weighted mean of both images (mixup).
    """

    lam: float = 1.0
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class LabelledCrops:
    """The 8-bit crops of a micro-batch, and parameters of augmentations to apply on the device.

    Attributes:
        pixels: One crop of each image.
        order: Order of the jitters of brightness (0), contrast (1) and saturation (2).
        factors: Strength of the three jitters: brightness, contrast and saturation.
        cutout: Top, bottom, left and right edge of the square that Cutout fills.
        erased: Top, bottom, left and right edge of the rectangle that random erasing fills with
            noise. All four edges are 0 if nothing is erased.
        noise_seed: Seed of the noise of random erasing for the whole micro-batch.
        mixture: Parameters of mixup or CutMix for the whole micro-batch.
    """

    pixels: UInt8[Tensor, "batch 3 size size"]
    labels: Int64[Tensor, " batch"]
    order: Int64[Tensor, "batch 3"]
    factors: Float32[Tensor, "batch 3"]
    cutout: Int64[Tensor, "batch 4"]
    erased: Int64[Tensor, "batch 4"]
    noise_seed: int
    mixture: Mixture

    def pin_memory(self) -> "LabelledCrops":
        """Return a copy with pixels and labels in pinned memory, for a DataLoader."""
        return replace(self, pixels=self.pixels.pin_memory(), labels=self.labels.pin_memory())


@dataclass(frozen=True)
class SingleCrop(ViewMaker):
    """One augmented crop of each image, with the class of the image.

    Crop, flip and RandAugment run on the CPU. Colour jitter, normalisation, Cutout, random erasing,
    and mixup or CutMix run on the device, in this order.

    Each image has its own random generator. The random generator of the first image also determines
    the mixture (mixup or CutMix) and the noise of the whole micro-batch.

    Attributes:
        scale: Minimum and maximum area of the crop, as a fraction of the image's area.
        aspect_ratio: Minimum and maximum ratio width / height of a crop before it is resized to a
            square.
        num_ops: Number of RandAugment operations drawn for each crop, or 0 for no RandAugment. Each
            operation is applied with probability 0.5.
        magnitude: Mean magnitude of RandAugment's operations, in [0, 10].
        magnitude_deviation: Standard deviation of the magnitude of RandAugment's operations.
        color_jitter: Maximum relative change of brightness, contrast and saturation, which are
            changed in random order. Use 0 for the recipes of DeiT and its successors. These recipes
            specify a colour jitter, but timm ignores colour jitter if RandAugment is used (timm
            1.0.31, timm/data/transforms_factory.py, line 187).
        cutout: Side length in pixels of a square that is filled with the mean colour, or 0 for no
            Cutout. The center of the square may be anywhere in the crop.
        erasing_probability: Probability that random erasing fills a rectangle with noise. The
            rectangle covers between 2 % and a third of the crop.
        mixup: Parameter a of the distribution Beta(a, a) from which mixup draws weights, or 0 for
            no mixup.
        cutmix: Parameter a of the distribution Beta(a, a) from which CutMix draws the fraction of
            the image that stays unchanged, or 0 for no CutMix.
        mix_probability: Probability that the images of a micro-batch are mixed.
        switch_probability: Probability of CutMix if both mixup and CutMix are used.

    Source: the transforms and the class `Mixup` of timm, which timm's recipes use.
    """

    scale: FractionRange = (0.08, 1.0)
    aspect_ratio: PositiveRange = (3 / 4, 4 / 3)
    flip_probability: Fraction = 0.5
    num_ops: Annotated[int, Bounds(0, 100)] = 2
    magnitude: Annotated[int, Bounds(0, _MAX_MAGNITUDE)] = 9
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
        PlainCrop(self.scale, self.aspect_ratio)  # checks the ranges

    def cut(self, samples: Samples, generators: Generators, sizes: Sequence[int]) -> LabelledCrops:
        """Crop each image, apply RandAugment, and draw the parameters of later augmentations.

        The crops are squares with a side length of `sizes[0]` pixels.
        """
        samples, generators, size = list(samples), list(generators), sizes[0]
        plain = PlainCrop(self.scale, self.aspect_ratio, self.flip_probability)
        pixels = []
        for sample, generator in zip(samples, generators, strict=True):
            cropped = plain.cut_one(sample.image, generator, size)
            pixels.append(apply_operations(cropped, self.draw_operations(generator)))
        low, high = max(0.0, 1 - self.color_jitter), 1 + self.color_jitter
        return LabelledCrops(
            pixels=torch.stack(pixels),
            labels=torch.tensor([sample.label for sample in samples]),
            order=_stack(g.permutation(_NUM_JITTERS) for g in generators),
            factors=_stack(g.uniform(low, high, _NUM_JITTERS) for g in generators).float(),
            cutout=_stack(draw_square(g, size, self.cutout) for g in generators),
            erased=_stack(draw_rectangle(g, size, self.erasing_probability) for g in generators),
            noise_seed=int(generators[0].integers(2**62)),
            mixture=self.draw_mixture(generators[0], size),
        )

    def draw_operations(self, generator: np.random.Generator) -> list[Operation]:
        """Draw the RandAugment operations for one crop, in the order of their application.

        `num_ops` operations are drawn at random, and each is applied with probability 0.5. Random
        magnitudes are clipped to [0, 10].

        Source: RandAugment, https://arxiv.org/abs/1909.13719, as implemented in
        timm/data/auto_augment.py of timm 1.0.31. The default values correspond to timm's
        configuration "rand-m9-mstd0.5-inc1" with bicubic interpolation. Bicubic interpolation is
        also used by the fine-tuning of MAE, by Xu et al. (2024), and by DeiT (line 102 of
        https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/main.py).
        By default, timm chooses bicubic or bilinear interpolation at random.
        """
        numbers = generator.integers(len(_NAMES), size=self.num_ops).tolist()
        applied, negated = generator.random((2, self.num_ops)) < _HALF
        magnitudes = generator.normal(self.magnitude, self.magnitude_deviation, self.num_ops)
        levels = (magnitudes.clip(0, _MAX_MAGNITUDE) / _MAX_MAGNITUDE).tolist()
        names = [_NAMES[number] for number in numbers]
        return [
            (name, compute_argument(name, level, negate=bool(negate)))
            for name, is_applied, negate, level in zip(names, applied, negated, levels, strict=True)
            if is_applied
        ]

    def draw_mixture(self, generator: np.random.Generator, size: int) -> Mixture:
        """Draw the parameters of mixup or CutMix for a micro-batch.

        The crops are squares with a side length of `size` pixels.

        Source: mixup, https://arxiv.org/abs/1710.09412, and CutMix,
        https://arxiv.org/abs/1905.04899. The implementation follows the class `Mixup` of timm
        1.0.31 (timm/data/mixup.py) in mode "batch". DeiT, MAE and Xu et al. (2024) used timm
        0.3 to 0.6, in which CutMix boxes with an odd side length are one pixel smaller.
        """
        mixup, cutmix = self.mixup, self.cutmix
        if not (mixup or cutmix) or generator.random() >= self.mix_probability:
            return Mixture()
        has_box = bool(cutmix)
        if mixup and cutmix:
            has_box = generator.random() < self.switch_probability
        if not has_box:
            return Mixture(generator.beta(mixup, mixup))
        # The center of the box may be anywhere in the image. The box is clipped to the image.
        side = int(size * (1 - generator.beta(cutmix, cutmix)) ** 0.5)
        edges = []
        for center in generator.integers(0, size, size=2).tolist():
            edges += [max(center - side // 2, 0), min(center + (side + 1) // 2, size)]
        top, bottom, left, right = edges
        return Mixture(1 - (bottom - top) * (right - left) / size**2, (top, bottom, left, right))

    def collate(self, chunks: Iterable[LabelledCrops], device: torch.device) -> LabelledCrops:
        """Copy the crops of several chunks to the device, and join them to a micro-batch.

        A chunk is a part of the micro-batch. The noise seed and the parameters of mixup or CutMix
        are taken from the first chunk.
        """
        copies = []
        for chunk in chunks:
            far: dict[str, Any] = {
                n: upload(getattr(chunk, n), device, copy=True) for n in _ON_DEVICE
            }
            near = {n: getattr(chunk, n).clone() for n in _ON_CPU}
            copies.append(replace(chunk, **far, **near))
        joined: dict[str, Any] = {
            n: torch.cat([getattr(one, n) for one in copies]) for n in (*_ON_DEVICE, *_ON_CPU)
        }
        return replace(copies[0], **joined)

    def augment_on_device(
        self,
        micro_batch: LabelledCrops,
        device: torch.device,
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> tuple[Images, Int64[Tensor, " batch"], Float32[Tensor, ""]]:
        """Augment and normalise the crops on the device.

        Returns:
            The crops, their classes, and a scalar in [0, 1], which is the weight of each image's
            own class. If images are mixed in pairs, the class of the other image has the remaining
            weight. Without mixing, the returned scalar is 1.
        """
        images = upload(micro_batch.pixels, device).float().div_(255)
        if self.color_jitter:
            apply_jitters(
                images,
                torch.ones(len(images), dtype=torch.bool),
                micro_batch.order,
                micro_batch.factors,
            )
        normalise(images, normalization)
        if self.cutout:
            # The mean colour is 0 after normalisation.
            images.masked_fill_(_is_inside(images, micro_batch.cutout), 0.0)
        erase(images, micro_batch.erased, micro_batch.noise_seed)
        mix(images, micro_batch.mixture)
        lam = torch.full((), micro_batch.mixture.lam, device=device)
        return images, upload(micro_batch.labels, device), lam


def compute_argument(name: str, level: float, *, negate: bool) -> int | float:
    """Return the argument of a RandAugment operation, such as an angle, for a level in [0, 1].

    If `negate` is true, the level is negated, except for operations without negative levels.
    """
    argument, is_signed = OPERATIONS[name]
    return 0 if argument is None else argument(-level if negate and is_signed else level)


def apply_operations(
    pixels: UInt8[Tensor, "3 height width"], operations: Sequence[Operation]
) -> UInt8[Tensor, "3 height width"]:
    """Apply a sequence of RandAugment operations to an image.

    The operations use PIL, which is two to three times as fast as operations on tensors.
    """
    # Imported here, because timm is slow to import and only supervised training needs it. The
    # parent process cuts a blank image, and so imports timm, before it forks data workers.
    from timm.data.auto_augment import NAME_TO_OP

    if not operations:
        return pixels
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    options = {"fillcolor": _FILL, "resample": Image.Resampling.BICUBIC}
    for name, argument in operations:
        if (name, argument) == (_POSTERIZE, 0):
            # An image with 0 bits per channel is black. Pillow rejects this argument.
            image = Image.new("RGB", image.size)
        else:
            arguments = [] if OPERATIONS[name][0] is None else [argument]
            image = NAME_TO_OP[name](image, *arguments, **options)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def draw_square(generator: np.random.Generator, size: int, side: int) -> Edges:
    """Return the edges of a random square for Cutout, in pixels.

    The center of the square lies in the image, but the square may extend beyond the border.

    Args:
        generator: Random number generator of the image.
        size: Side length of the image in pixels.
        side: Side length of the square in pixels.

    Source: Cutout, https://arxiv.org/abs/1708.04552.
    """
    center = generator.integers(0, size, size=2)
    return np.add.outer(center - side // 2, (0, side)).ravel()


def draw_rectangle(generator: np.random.Generator, size: int, probability: float) -> Edges:
    """Return the edges of a random rectangle to erase, or zeros if nothing is erased.

    The image is a square with a side length of `size` pixels. The rectangle covers between 2 % and
    a third of the image, with a ratio height / width between 0.3 and 3.33. Nothing is erased with
    probability 1 - `probability`, or if none of ten random rectangles fits into the image.

    Source: random erasing, https://arxiv.org/abs/1708.04896. The ranges of areas and ratios are the
    default values of `RandomErasing` in timm 1.0.31 (timm/data/random_erasing.py).
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
    """Fill a rectangle of each normalised image with standard normal noise, in place.

    `edges` contains the top, bottom, left and right edge of each rectangle in pixels. If all edges
    of a rectangle are 0, the image stays unchanged. `seed` determines the noise.

    Source: `RandomErasing` of timm in mode "pixel". The same seed gives different noise on
    different kinds of devices.
    """
    generator = torch.Generator(images.device).manual_seed(seed)

    def add_noise(views: Images, rows: Rows) -> Images:
        noise = torch.empty_like(views).normal_(generator=generator)
        return torch.where(_is_inside(views, edges[rows]), noise, views)

    apply_to_views(images, edges[:, 1] > edges[:, 0], add_noise)
    return images


def mix(images: Images, mixture: Mixture) -> Images:
    """Mix the images of a micro-batch in pairs by mixup or CutMix, in place.

    `mixture` contains the weights for mixup, or the box that CutMix exchanges between images.
    """
    if mixture.box is not None:
        top, bottom, left, right = mixture.box
        inside = images[:, :, top:bottom, left:right]
        inside.copy_(inside.flip(0))
    elif mixture.lam < 1:
        others = images.flip(0).mul_(1 - mixture.lam)
        images.mul_(mixture.lam).add_(others)
    return images


def _is_inside(
    images: Images, edges: Int64[Tensor, "views 4"]
) -> Bool[Tensor, "views 1 height width"]:
    """Return for each pixel whether it lies inside the rectangle of its image."""
    top, bottom, left, right = to_device(edges, images.device)[..., None].unbind(1)
    rows, cols = (torch.arange(side, device=images.device) for side in images.shape[2:])
    is_row, is_col = (rows >= top) & (rows < bottom), (cols >= left) & (cols < right)
    return (is_row[:, :, None] & is_col[:, None, :])[:, None]


def _stack(values: Iterable[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(list(values)))
