"""The images of supervised training: one crop each, changed at random, and its class."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import RandAugment

from pretrain.augmentation import Images, normalise
from pretrain.plain_crop import PlainCrop
from ssl_bench.data.samples import Sample
from ssl_bench.fields import (
    CountOrZero,
    PositiveOrZero,
    Share,
    ShareSpan,
    Span,
    Within,
    check_fields,
)


@dataclass(frozen=True)
class LabelledCrops:
    """One crop of every image of a part, 8-bit, with what the device does to it.

    Attributes:
        centres: Row and column of the middle of the square that is cut out.
        own_share: Of the image itself in its mixture with the next one; 1 without mixup.
    """

    pixels: UInt8[Tensor, "batch 3 size size"]
    labels: Int64[Tensor, " batch"]
    centres: Int64[Tensor, "batch 2"]
    own_share: Float32[Tensor, " batch"]

    def pin_memory(self) -> "LabelledCrops":
        return self.each(Tensor.pin_memory)

    def to(self, device: torch.device) -> "LabelledCrops":
        return self.each(lambda values: values.to(device, non_blocking=True))

    def each(self, change) -> "LabelledCrops":
        return type(self)(*(change(getattr(self, f.name)) for f in fields(self)))


@dataclass(frozen=True)
class SingleCrop:
    """Crop, flip and RandAugment on the CPU; normalise, Cutout and mixup on the device.

    Attributes:
        scale: Least and largest share of the image's area in the crop.
        aspect_ratio: Least and largest width over height before resizing.
        num_ops: Operations of RandAugment on each crop; 0 for none.
        magnitude: Their strength, 0 to 30.
        cutout: Side in pixels of a square that becomes grey (the mean colour), about a centre
            anywhere in the crop; 0 for none.
        mixup: Each image is blended with the next one of its part, which stands for
            Beta(mixup, mixup) of the result and of the loss; 0 for none.

    Source: RandAugment, https://arxiv.org/abs/1909.13719, as torchvision has it; Cutout,
    https://arxiv.org/abs/1708.04552; mixup, https://arxiv.org/abs/1710.09412, with a share of its
    own for each image.
    """

    scale: ShareSpan = (0.08, 1.0)
    aspect_ratio: Span = (3 / 4, 4 / 3)
    flip_probability: Share = 0.5
    num_ops: Annotated[int, Within(0, 100)] = 2
    magnitude: Annotated[int, Within(0, 30)] = 9
    cutout: CountOrZero = 0
    mixup: PositiveOrZero = 0.0

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
        cuts = [
            self._cut_one(sample, generator, sizes[0])
            for sample, generator in zip(samples, generators, strict=True)
        ]
        pixels, labels, centres, shares = zip(*cuts, strict=True)
        return LabelledCrops(
            pixels=torch.stack(pixels),
            labels=torch.tensor(labels),
            centres=torch.from_numpy(np.stack(centres)),
            own_share=torch.tensor(shares, dtype=torch.float32),
        )

    def finish(
        self, groups: LabelledCrops, device: torch.device
    ) -> tuple[Images, Int64[Tensor, " batch"], Float32[Tensor, " batch"]]:
        """The normalised images, the class of each, and its own share of the mixture."""
        crops = groups.to(device)
        images = normalise(crops.pixels.float() / 255)
        if self.cutout:
            hidden = squares(crops.centres, images.shape[-1], self.cutout)
            images = images.masked_fill(hidden[:, None], 0.0)
        if self.mixup:
            share = crops.own_share[:, None, None, None]
            images = share * images + (1 - share) * images.roll(-1, 0)
        return images, crops.labels, crops.own_share

    def _cut_one(
        self, sample: Sample, generator: np.random.Generator, size: int
    ) -> tuple[UInt8[Tensor, "3 size size"], int, Int64[np.ndarray, " 2"], float]:
        assert sample.label is not None
        plain = PlainCrop(self.scale, self.aspect_ratio, self.flip_probability)
        pixels = plain.cut_one(sample.image, generator, size)
        pixels = self._augmented(pixels, int(generator.integers(2**62)))
        centre = generator.integers(0, size, size=2)
        share = generator.beta(self.mixup, self.mixup) if self.mixup else 1.0
        return pixels, sample.label, centre, share

    def _augmented(
        self, pixels: UInt8[Tensor, "3 size size"], seed: int
    ) -> UInt8[Tensor, "3 size size"]:
        if not self.num_ops:
            return pixels
        # PIL's operations: two to three times as fast as those on tensors.
        image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        # They draw from PyTorch's generator, which may differ from worker to worker.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            image = self._rand_augment(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    @cached_property
    def _rand_augment(self) -> RandAugment:
        return RandAugment(self.num_ops, self.magnitude)


def squares(
    centres: Int64[Tensor, "batch 2"], size: int, side: int
) -> Bool[Tensor, "batch {size} {size}"]:
    """Which pixels lie in a square about each centre; what of it lies outside is lost."""
    places = torch.arange(size, device=centres.device)
    offset = places - centres[..., None] + side // 2  # batch 2 size
    rows, cols = ((offset >= 0) & (offset < side)).unbind(1)
    return rows[:, :, None] & cols[:, None, :]
