"""The images of supervised training: one crop each, changed at random, and its class."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from torch import Tensor

from pretrain.crops.augmentation import Images, jitter, normalise
from pretrain.crops.erasing import draw_rectangle, draw_square, erase, grey_out
from pretrain.crops.groups import taken
from pretrain.crops.mixing import Mixing, Mixture, mix
from pretrain.crops.plain import PlainCrop
from pretrain.crops.rand_augment import LARGEST_MAGNITUDE, RandAugment, apply_operations
from ssl_bench.composition.fields import (
    CountOrZero,
    PositiveOrZero,
    Share,
    ShareSpan,
    Span,
    Within,
    check_fields,
)
from ssl_bench.data.samples import Sample
from ssl_bench.models.encoder import IMAGENET_COLOURS, Colours

# Brightness, contrast and saturation: no hue.
_NUM_JITTERS = 3
_BY_IMAGE = ("pixels", "labels", "order", "factors", "hidden", "erased")


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

    def taken(self, device: torch.device) -> "LabelledCrops":
        """A copy with pixels and labels on a device."""
        copies = {name: getattr(self, name).clone() for name in _BY_IMAGE[2:]}
        there = {"pixels": taken(self.pixels, device), "labels": taken(self.labels, device)}
        return replace(self, **there, **copies)


@dataclass(frozen=True)
class SingleCrop:
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
            Beta(mixup, mixup) of the result and of the loss; 0 for none. See `Mixing`.
        cutmix: As mixup, with a box of the other image in place of a blend.
        mix_probability: That a part is mixed.
        switch_probability: That it is by CutMix, where both would be possible.

    What belongs to an image is drawn from its own generator; the mixture and the noise of a part,
    which a process computes in one go, from that of its first image.

    Source: the transforms and `Mixup` of timm, see `RandAugment`, `Mixing` and `draw_rectangle`.
    """

    scale: ShareSpan = (0.08, 1.0)
    aspect_ratio: Span = (3 / 4, 4 / 3)
    flip_probability: Share = 0.5
    num_ops: Annotated[int, Within(0, 100)] = 2
    magnitude: Annotated[int, Within(0, LARGEST_MAGNITUDE)] = 9
    magnitude_deviation: PositiveOrZero = 0.5
    color_jitter: PositiveOrZero = 0.0
    cutout: CountOrZero = 0
    erasing_probability: Share = 0.0
    mixup: PositiveOrZero = 0.0
    cutmix: PositiveOrZero = 0.0
    mix_probability: Share = 1.0
    switch_probability: Share = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "objective.crops")
        PlainCrop(self.scale, self.aspect_ratio)  # refuses ranges without meaning

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        del patch_size
        return (image_size,)

    def cut(
        self,
        samples: Iterable[Sample],
        generators: Iterable[np.random.Generator],
        sizes: Sequence[int],
    ) -> LabelledCrops:
        """Crop every image once, and draw what else happens to it."""
        samples, generators, size = list(samples), list(generators), sizes[0]
        pairs = zip(samples, generators, strict=True)
        pixels = torch.stack([self._cut_one(sample, one, size) for sample, one in pairs])
        labels = torch.tensor([sample.label for sample in samples])
        return LabelledCrops(
            pixels=pixels,
            labels=labels,
            order=_rows(one.permutation(_NUM_JITTERS) for one in generators),
            factors=_rows(self._draw_factors(one) for one in generators).float(),
            hidden=_rows(draw_square(one, size, self.cutout) for one in generators),
            erased=_rows(draw_rectangle(one, size, self.erasing_probability) for one in generators),
            noise_seed=int(generators[0].integers(2**62)),
            mixture=self.mixing.draw(generators[0], size),
        )

    def join(self, pieces: Iterable[LabelledCrops], device: torch.device) -> LabelledCrops:
        """All crops; what belongs to the whole part is what the first piece says."""
        copies = [piece.taken(device) for piece in pieces]
        whole = {name: torch.cat([getattr(one, name) for one in copies]) for name in _BY_IMAGE}
        return replace(copies[0], **whole)

    def finish(
        self, groups: LabelledCrops, device: torch.device, colours: Colours = IMAGENET_COLOURS
    ) -> tuple[Images, Int64[Tensor, " batch"], Float32[Tensor, ""]]:
        """The normalised images, the class of each, and its share of the mixture."""
        images = groups.pixels.to(device, non_blocking=True).float().div_(255)
        if self.color_jitter:
            jitter(images, torch.ones(len(images), dtype=torch.bool), groups.order, groups.factors)
        normalise(images, colours)
        if self.cutout:
            grey_out(images, groups.hidden)
        erase(images, groups.erased, groups.noise_seed)
        mix(images, groups.mixture)
        own_share = torch.full((), groups.mixture.own_share, device=device)
        return images, groups.labels.to(device, non_blocking=True), own_share

    def _cut_one(
        self, sample: Sample, generator: np.random.Generator, size: int
    ) -> UInt8[Tensor, "3 {size} {size}"]:
        plain = PlainCrop(self.scale, self.aspect_ratio, self.flip_probability)
        pixels = plain.cut_one(sample.image, generator, size)
        return apply_operations(pixels, self.rand_augment.draw(generator))

    def _draw_factors(self, generator: np.random.Generator) -> Float64[np.ndarray, " 3"]:
        low, high = max(0.0, 1 - self.color_jitter), 1 + self.color_jitter
        return generator.uniform(low, high, _NUM_JITTERS)

    @cached_property
    def rand_augment(self) -> RandAugment:
        return RandAugment(self.num_ops, self.magnitude, self.magnitude_deviation)

    @cached_property
    def mixing(self) -> Mixing:
        return Mixing(self.mixup, self.cutmix, self.mix_probability, self.switch_probability)


def _rows(values: Iterable[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(list(values)))
