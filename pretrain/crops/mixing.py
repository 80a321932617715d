"""mixup and CutMix: images blended with others of their batch, and their classes with them."""

from dataclasses import dataclass

import numpy as np

from pretrain.crops.augmentation import Images


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
class Mixing:
    """One draw for all images of a part.

    Attributes:
        mixup: Of Beta(mixup, mixup), which the own share is drawn from; 0 for no mixup.
        cutmix: Of Beta(cutmix, cutmix), the same for CutMix; 0 for no CutMix.
        probability: That images are mixed at all.
        switch_probability: That it is CutMix where both would be possible.

    Source: mixup, https://arxiv.org/abs/1710.09412; CutMix, https://arxiv.org/abs/1905.04899; both
    as timm 1.0.31 has them, timm/data/mixup.py, `Mixup` in mode "batch". In timm 0.3 to 0.6, which
    DeiT, MAE and Xu et al. (2024) used, boxes of an odd side are a pixel smaller.
    """

    mixup: float
    cutmix: float
    probability: float
    switch_probability: float

    def draw(self, generator: np.random.Generator, size: int) -> Mixture:
        """A mixture of square images of `size` pixels."""
        if not (self.mixup or self.cutmix) or generator.random() >= self.probability:
            return Mixture()
        if self._switches(generator):
            return _with_box(generator, size, generator.beta(self.cutmix, self.cutmix))
        return Mixture(generator.beta(self.mixup, self.mixup))

    def _switches(self, generator: np.random.Generator) -> bool:
        if self.mixup and self.cutmix:
            return generator.random() < self.switch_probability
        return bool(self.cutmix)


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


def _with_box(generator: np.random.Generator, size: int, own_share: float) -> Mixture:
    """A box about a center anywhere; what of it lies outside is not lost from the own share."""
    side = int(size * (1 - own_share) ** 0.5)
    ends = []
    for center in generator.integers(0, size, size=2).tolist():
        ends += [max(center - side // 2, 0), min(center + (side + 1) // 2, size)]
    top, bottom, left, right = ends
    return Mixture(1 - (bottom - top) * (right - left) / size**2, (top, bottom, left, right))
