"""Flip, colour jitter, grey, blur, solarize and normalise a whole batch on its device.

Every view has parameters of its own. They stay on the CPU, so that choosing the views which an
operation applies to never waits for the device.

Source: the operations of torchvision.transforms.v2.functional on float images, batched. Official
DINO applies PIL's to 8-bit images: the same up to rounding after each operation, except that PIL
approximates the Gaussian blur by repeated box blurs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache

import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from ssl_bench.models.encoder import IMAGENET_NORMALIZATION, Normalization
from ssl_bench.system.device import to_device

Images = Float[Tensor, "views 3 height width"]
Rows = Int64[Tensor, " rows"]

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
_GREY_WEIGHTS = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class AugmentationParams:
    """What happens to each view after cropping.

    Attributes:
        order: Sequence of the four jitters, BRIGHTNESS, CONTRAST, SATURATION and HUE.
        factors: Their strengths in that numbering; 1 (for hue 0) changes nothing.
        blur_sigma: In pixels; 0 where the view is not blurred.
    """

    flip: Bool[Tensor, " views"]
    jitter: Bool[Tensor, " views"]
    order: Int64[Tensor, "views 4"]
    factors: Float32[Tensor, "views 4"]
    grey: Bool[Tensor, " views"]
    blur_sigma: Float32[Tensor, " views"]
    solarize: Bool[Tensor, " views"]

    def pin_memory(self) -> "AugmentationParams":
        return type(self)(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})

    def __getitem__(self, views: slice | Tensor) -> "AugmentationParams":
        return type(self)(**{f.name: getattr(self, f.name)[views] for f in fields(self)})


@torch.no_grad()
def apply_looks(
    pixels: UInt8[Tensor, "views 3 height width"],
    looks: AugmentationParams,
    *,
    solarize_threshold: float,
    colours: Normalization = IMAGENET_NORMALIZATION,
) -> Images:
    """Change 8-bit RGB views as `looks` says, and normalise them.

    Values from `solarize_threshold`, in [0, 1], on are inverted where a view is solarized.
    """
    if pixels.is_cuda:
        images = _coloured_on_gpu(pixels, looks)
    else:
        images = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        change(images, looks.flip, lambda chosen, _: chosen.flip(-1))
        jitter(images, looks.jitter, looks.order, looks.factors)
        change(images, looks.grey, lambda chosen, _: greyscale(chosen).expand_as(chosen))
    change(images, looks.blur_sigma > 0, lambda chosen, rows: blur(chosen, looks.blur_sigma[rows]))
    threshold = solarize_threshold
    change(images, looks.solarize, lambda x, _: torch.where(x >= threshold, 1 - x, x))
    return normalise(images, colours)


def jitter_all(
    images: Images,
    wanted: Bool[Tensor, " views"],
    kind: Int64[Tensor, " views"],
    factor: Float32[Tensor, " views"],
) -> Images:
    """One jitter of each view that wants it, by a choice at every pixel.

    Does more than a CPU would like, which works on the views concerned; a compiler makes of it two
    passes over the pixels.
    """
    is_hue, wanted = (views[:, None, None, None] for views in (kind == HUE, wanted))
    changed = torch.where(is_hue, shift_hue(images, factor), blend(images, kind, factor))
    return torch.where(wanted, changed, images)


@cache
def _jitter_compiled() -> Callable[..., Images]:
    # The compiler takes three seconds to import.
    return torch.compile(jitter_all, dynamic=False)


def _coloured_on_gpu(
    pixels: UInt8[Tensor, "views 3 height width"], looks: AugmentationParams
) -> Images:
    names = ("flip", "jitter", "order", "factors", "grey")
    flip, wanted, order, factors, grey = (
        to_device(getattr(looks, n), pixels.device) for n in names
    )
    pixels = torch.where(flip[:, None, None, None], pixels.flip(-1), pixels)
    images = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    # All in one piece: a compiled function is compiled anew for other strides.
    kinds, factors = order.T.contiguous(), factors.gather(1, order).T.contiguous()
    jitter_once = _jitter_compiled()
    for kind, factor in zip(kinds, factors, strict=True):
        images = jitter_once(images, wanted, kind, factor)
    # Grey is a saturation of 0.
    saturation, none_left = torch.full_like(kinds[0], SATURATION), torch.zeros_like(factors[0])
    return jitter_once(images, grey, saturation, none_left)


def normalise(images: Images, colours: Normalization = IMAGENET_NORMALIZATION) -> Images:
    """From values in [0, 1] to mean 0 and deviation 1 where those are `colours`, in place."""
    mean, std = to_device(torch.tensor(colours), images.device)[..., None, None]
    return images.sub_(mean).div_(std)


def change(
    images: Images,
    wanted: Bool[Tensor, " views"],
    operation: Callable[[Images, Rows], Images],
) -> None:
    """Replace the wanted views by operation(those views, their row numbers), in place."""
    rows = wanted.nonzero()[:, 0]
    if len(rows) == len(images):
        images.copy_(operation(images, rows))
    elif len(rows):
        there = to_device(rows, images.device)
        images.index_copy_(0, there, operation(images.index_select(0, there), rows))


def jitter(
    images: Images,
    wanted: Bool[Tensor, " views"],
    order: Int64[Tensor, "views kinds"],
    factors: Float32[Tensor, "views kinds"],
) -> None:
    """Apply all jitters to the views that want them, in place, each view in its own order.

    The sequence of kinds and their strengths are those of `AugmentationParams`; without HUE there
    are three.
    """
    for kind in order.unbind(1):
        factor = factors.gather(1, kind[:, None])[:, 0]

        def tone(
            chosen: Images, rows: Rows, kind: Tensor = kind, factor: Tensor = factor
        ) -> Images:
            return blend(chosen, kind[rows], factor[rows])

        def hue(chosen: Images, rows: Rows, factor: Tensor = factor) -> Images:
            return shift_hue(chosen, factor[rows])

        change(images, wanted & (kind != HUE), tone)
        change(images, wanted & (kind == HUE), hue)


def blend(
    images: Images, kind: Int64[Tensor, " views"], factor: Float32[Tensor, " views"]
) -> Images:
    """Brightness, contrast or saturation: mix each view with black, its mean grey or its greys."""
    grey = greyscale(images)
    mean = grey.mean(dim=(2, 3), keepdim=True)
    rest = 1 - factor
    weights = torch.stack([factor, rest * (kind == SATURATION), rest * (kind == CONTRAST)])
    own, of_grey, of_mean = to_device(weights, images.device)[..., None, None, None]
    return (own * images + of_grey * grey + of_mean * mean).clamp_(0, 1)


def shift_hue(images: Images, shift: Float[Tensor, " views"]) -> Images:
    """Turn the hue by a share of the colour circle, in [-.5, .5].

    Source: RGB to HSV and back, https://en.wikipedia.org/wiki/HSL_and_HSV.
    """
    red, green, blue = images.unbind(1)
    value, _ = images.max(dim=1)
    chroma = value - images.amin(dim=1)
    # Grey pixels have no hue; any divisor does, as their chroma is 0 again on the way back.
    divisor = torch.where(chroma == 0, 1, chroma)
    sixth = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixth = sixth + 6 * to_device(shift, images.device)[:, None, None]
    offsets = torch.arange(5.0, 0.0, -2.0, device=images.device)
    k = (sixth[:, None] + offsets[:, None, None]) % 6
    lost = torch.minimum(k, 4 - k).clamp_(0, 1)
    return value[:, None] - chroma[:, None] * lost


def greyscale(images: Images) -> Float[Tensor, "views 1 height width"]:
    """Luma of ITU-R 601-2."""
    red, green, blue = images.split(1, dim=1)
    return _GREY_WEIGHTS[0] * red + _GREY_WEIGHTS[1] * green + _GREY_WEIGHTS[2] * blue


def blur(images: Images, sigma: Float[Tensor, " views"]) -> Images:
    """Gaussian blur with a sigma for each view, mirrored at the border.

    Two products with a height x height and a width x width matrix: cheaper on every device than
    a convolution with a kernel a view.
    """
    height, width = images.shape[-2:]
    sigma = to_device(sigma, images.device)
    down, across = _blur_matrix(sigma, height), _blur_matrix(sigma, width)
    return down[:, None] @ images @ across[:, None].mT


def _blur_matrix(sigma: Float[Tensor, " views"], size: int) -> Float[Tensor, "views {size} {size}"]:
    """Row i holds the weights of every pixel in the blurred pixel i."""
    i = torch.arange(size, device=sigma.device, dtype=sigma.dtype)[:, None]
    j = i.T
    # A pixel is seen directly, and once more in the mirror at each border that it does not lie on.
    near, far = i + j, 2 * (size - 1) - i - j
    never = torch.inf
    distances = torch.stack(
        [i - j, torch.where(j > 0, near, never), torch.where(j < size - 1, far, never)]
    )
    scaled = distances / sigma[:, None, None, None]
    weights = torch.exp(-0.5 * scaled.square()).sum(dim=1)
    return weights / weights.sum(dim=2, keepdim=True)
