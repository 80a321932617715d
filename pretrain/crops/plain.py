"""One crop of every image, mirrored or not, and nothing else: no class and no colour is touched."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from pretrain.crops.augmentation import Images, normalise
from pretrain.crops.groups import taken
from pretrain.crops.multi import crop, draw_boxes
from ssl_bench.composition.fields import Share, ShareSpan, Span, check_fields
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.encoder import IMAGENET_COLOURS, Colours


@dataclass(frozen=True)
class PlainCrop:
    """Crop and flip on the CPU; normalise on the device.

    Attributes:
        scale: Least and largest share of the image's area in the crop.
        aspect_ratio: Least and largest width over height before resizing.

    Source: what MAE pretrains with, https://arxiv.org/abs/2111.06377, appendix A.1.
    """

    scale: ShareSpan = (0.2, 1.0)
    aspect_ratio: Span = (3 / 4, 4 / 3)
    flip_probability: Share = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "objective.crops")
        for name in ("scale", "aspect_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ConfigurationError(
                    f"crops.{name} expects 0 < least <= largest, got [{low}, {high}]"
                )

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]:
        del patch_size
        return (image_size,)

    def cut(
        self,
        samples: Iterable[Sample],
        generators: Iterable[np.random.Generator],
        sizes: Sequence[int],
    ) -> UInt8[Tensor, "batch 3 size size"]:
        """Crop every image once."""
        crops = [
            self.cut_one(sample.image, generator, sizes[0])
            for sample, generator in zip(samples, generators, strict=True)
        ]
        return torch.stack(crops)

    def cut_one(
        self, image: UInt8[np.ndarray, "height width 3"], generator: np.random.Generator, size: int
    ) -> UInt8[Tensor, "3 {size} {size}"]:
        """A random part of one image, resized to a square, bicubic, and mirrored or not."""
        (box,) = draw_boxes(generator, image.shape[:2], np.array([self.scale]), self.aspect_ratio)
        # PyTorch warns about memory it may not write to.
        pixels = crop(torch.from_numpy(image if image.flags.writeable else image.copy()), box, size)
        return pixels.flip(-1) if generator.random() < self.flip_probability else pixels

    def join(
        self, pieces: Iterable[UInt8[Tensor, "_ 3 size size"]], device: torch.device
    ) -> UInt8[Tensor, "batch 3 size size"]:
        """All images in one piece, on the device."""
        return torch.cat([taken(pixels, device) for pixels in pieces])

    def finish(
        self,
        groups: UInt8[Tensor, "batch 3 size size"],
        device: torch.device,
        colours: Colours = IMAGENET_COLOURS,
    ) -> tuple[Images]:
        """The normalised images."""
        return (normalise(groups.to(device, non_blocking=True).float() / 255, colours),)
