"""How an image is shown to the encoder for scoring, and how logits become classes of its pixels."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from probes.features.views import nearest_labels, resized, tensors
from probes.heads.pixels import predict_pixels
from ssl_bench.data.samples import Sample

# Of the longer side to the shorter one, beyond which an image is shrunk further.
_LONGEST = 4


@dataclass(frozen=True)
class ScoredImage:
    """One image as the encoder sees it, and what its pixels are compared with.

    Attributes:
        windows: RGB in [0, 1].
        corners: Upper left pixel of each window in the resized image.
        size: Height and width of the resized image.
        mask: Class of each pixel, 255 where it is ignored; predictions have its size.
    """

    image_id: str
    windows: Float[Tensor, "windows 3 side side"]
    corners: tuple[tuple[int, int], ...]
    size: tuple[int, int]
    mask: UInt8[Tensor, "height width"]


@dataclass(frozen=True)
class SquashedScoring:
    """The whole image, squashed to a square; logits are upsampled to the size of the mask.

    Attributes:
        mask_size: Masks are reduced to this height and width first; None leaves them as they are.
    """

    size: int
    mask_size: int | None = None

    def prepare(self, sample: Sample) -> ScoredImage:
        image, mask = tensors(sample)
        if self.mask_size is not None:
            mask = nearest_labels(mask, self.mask_size, self.mask_size)
        squashed = resized(image, self.size, self.size)
        return ScoredImage(sample.image_id, squashed[None], ((0, 0),), (self.size, self.size), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        return predict_pixels(logits[0], *image.mask.shape)


@dataclass(frozen=True)
class PatchScoring(SquashedScoring):
    """Squashed images, each pixel of which takes the class of the patch over it."""

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        winners = logits[0].argmax(-1).to(torch.uint8)
        return F.interpolate(winners[None], size=image.mask.shape, mode="nearest-exact")[0]


@dataclass(frozen=True)
class SlidingScoring:
    """Square windows over the image, whose shorter side is resized to that of a window.

    Windows are two thirds of their side apart; where they overlap, their upsampled logits are
    averaged before they are resized to the size of the mask.

    Attributes:
        mean: Colour of what lies beyond a very long image.

    Source: test mode "slide" of https://github.com/open-mmlab/mmsegmentation, as the linear heads
    of https://github.com/facebookresearch/dinov2 use it (512 pixels, 341 apart).
    """

    size: int
    mean: tuple[float, float, float]

    def prepare(self, sample: Sample) -> ScoredImage:
        image, mask = tensors(sample)
        scale = min(self.size / min(mask.shape), _LONGEST * self.size / max(mask.shape))
        height, width = (max(1, round(scale * side)) for side in mask.shape)
        mean = torch.tensor(self.mean).view(3, 1, 1)
        beyond = (0, max(0, self.size - width), 0, max(0, self.size - height))
        padded = F.pad(resized(image, height, width) - mean, beyond) + mean
        corners = tuple((top, left) for top in self._starts(height) for left in self._starts(width))
        windows = [
            padded[:, top : top + self.size, left : left + self.size] for top, left in corners
        ]
        return ScoredImage(sample.image_id, torch.stack(windows), corners, (height, width), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        # One rate at a time: the upsampled logits of one image already take 100 MB.
        predicted = [self._predict(logits[:, rate], image) for rate in range(logits.shape[1])]
        return torch.stack(predicted)

    def _predict(
        self, logits: Float[Tensor, "windows rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "height width"]:
        height, width = image.size
        total = logits.new_zeros(logits.shape[-1], height, width)
        times = logits.new_zeros(height, width)
        side = (self.size, self.size)
        for window, (top, left) in zip(logits, image.corners, strict=True):
            upsampled = F.interpolate(window.movedim(-1, 0)[None], size=side, mode="bilinear")[0]
            rows, cols = slice(top, top + self.size), slice(left, left + self.size)
            part = total[:, rows, cols]
            part += upsampled[:, : part.shape[1], : part.shape[2]]
            times[rows, cols] += 1
        original = F.interpolate((total / times)[None], size=image.mask.shape, mode="bilinear")[0]
        return original.argmax(0).to(torch.uint8)

    def _starts(self, length: int) -> list[int]:
        """First pixels of the windows along one axis; the last window ends with the image."""
        last, stride = max(0, length - self.size), max(1, 2 * self.size // 3)
        return [*range(0, last, stride), last]


Scoring = SquashedScoring | SlidingScoring
"""Shows an image to the encoder (`prepare`); makes classes of the logits of patches (`predict`)."""
