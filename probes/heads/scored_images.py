"""How an image is shown to the encoder for scoring, and how logits become classes of its pixels.

`probe.inference` of linear segmentation.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from probes.features.views import nearest_labels, resized, tensors
from probes.heads.pixels import predict_pixels
from ssl_bench.composition.fields import Pixels, check_fields
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
class Squashed:
    """The whole image, squashed to a square; logits are upsampled to the size of the mask.

    Attributes:
        score_size: Masks are reduced to this height and width before scoring; the original size if
            None.
    """

    score_size: Pixels | None = None

    def __post_init__(self) -> None:
        check_fields(self, "probe.inference")

    def settings(self) -> dict[str, Any]:
        return {"scoring": "squash", "score_size": self.score_size}

    def prepare(
        self, sample: Sample, size: int, mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ) -> ScoredImage:
        """Show an image in a square of this side; `mean` is the colour of what lies beyond it."""
        del mean
        image, mask = tensors(sample)
        if self.score_size is not None:
            mask = nearest_labels(mask, self.score_size, self.score_size)
        squashed = resized(image, size, size)
        return ScoredImage(sample.image_id, squashed[None], ((0, 0),), (size, size), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        """Classes of the pixels of a mask from the logits of patches."""
        return predict_pixels(logits[0], *image.mask.shape)


@dataclass(frozen=True)
class ByPatch(Squashed):
    """Squashed images, each pixel of which takes the class of the patch over it."""

    def settings(self) -> dict[str, Any]:
        return {"scoring": "patch", "score_size": self.score_size}

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        winners = logits[0].argmax(-1).to(torch.uint8)
        return F.interpolate(winners[None], size=image.mask.shape, mode="nearest-exact")[0]


@dataclass(frozen=True)
class SlidingWindows:
    """Square windows over the image, whose shorter side is resized to that of a window.

    Windows are two thirds of their side apart; where they overlap, their upsampled logits are
    averaged before they are resized to the size of the mask.

    Source: test mode "slide" of https://github.com/open-mmlab/mmsegmentation, as the linear heads
    of https://github.com/facebookresearch/dinov2 use it (512 pixels, 341 apart).
    """

    def settings(self) -> dict[str, Any]:
        return {"scoring": "slide", "score_size": None}

    def prepare(self, sample: Sample, size: int, mean: tuple[float, float, float]) -> ScoredImage:
        """In windows of this side; `mean` is the colour of what lies beyond a very long image."""
        image, mask = tensors(sample)
        scale = min(size / min(mask.shape), _LONGEST * size / max(mask.shape))
        height, width = (max(1, round(scale * side)) for side in mask.shape)
        colour = torch.tensor(mean).view(3, 1, 1)
        beyond = (0, max(0, size - width), 0, max(0, size - height))
        padded = F.pad(resized(image, height, width) - colour, beyond) + colour
        # The last window ends with the image.
        down, across = (
            [*range(0, max(0, length - size), max(1, 2 * size // 3)), max(0, length - size)]
            for length in (height, width)
        )
        corners = tuple((top, left) for top in down for left in across)
        windows = [padded[:, top : top + size, left : left + size] for top, left in corners]
        return ScoredImage(sample.image_id, torch.stack(windows), corners, (height, width), mask)

    def predict(
        self, logits: Float[Tensor, "windows values rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "values height width"]:
        """As of squashed images, one rate at a time: the upsampled logits of one take 100 MB."""
        return torch.stack([self._predict(of_rate, image) for of_rate in logits.unbind(1)])

    def _predict(
        self, logits: Float[Tensor, "windows rows cols classes"], image: ScoredImage
    ) -> UInt8[Tensor, "height width"]:
        (height, width), size = image.size, image.windows.shape[-1]
        total = logits.new_zeros(logits.shape[-1], height, width)
        times = logits.new_zeros(height, width)
        for window, (top, left) in zip(logits, image.corners, strict=True):
            maps = window.movedim(-1, 0)[None]
            upsampled = F.interpolate(maps, size=(size, size), mode="bilinear")[0]
            rows, cols = slice(top, top + size), slice(left, left + size)
            part = total[:, rows, cols]
            part += upsampled[:, : part.shape[1], : part.shape[2]]
            times[rows, cols] += 1
        original = F.interpolate((total / times)[None], size=image.mask.shape, mode="bilinear")[0]
        return original.argmax(0).to(torch.uint8)
