"""How far the patches of an image have become one token, block by block; no label is asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ssl_bench.data.samples import ImageSet
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder

SAME = 0.99
"""Patches whose cosine with the mean patch of their image is above count as one token."""


@dataclass(frozen=True)
class Closeness:
    """Of the patches after a block, means over images.

    Attributes:
        cosine: With the mean patch of the same image, in [-1, 1].
        merged: Percent of the patches that are one token.
    """

    cosine: float
    merged: float


def closeness(
    encoder: Encoder, images: ImageSet, count: int, layers: Sequence[int]
) -> list[Closeness]:
    """What is left between the patches of unseen images after each of these blocks.

    Args:
        encoder: Frozen.
        images: Of the size that it takes.
        count: So many of them, evenly spread.
        layers: Block indices from 0 to depth - 1.

    Returns:
        In the order of `layers`.
    """
    extract = FeatureExtractor(encoder, layers=layers)
    found: dict[int, list[Closeness]] = {layer: [] for layer in layers}
    for number in range(count):
        pixels = images[number * len(images) // count].image
        features = extract(torch.from_numpy(pixels)[None].permute(0, 3, 1, 2) / 255)
        for layer, of_images in found.items():
            of_images.append(closeness_of(features[layer]["token"].flatten(0, 2)))
    return [
        Closeness(fmean(one.cosine for one in found[n]), fmean(one.merged for one in found[n]))
        for n in layers
    ]


def closeness_of(patches: Float[Tensor, "patches dim"]) -> Closeness:
    """Of the patches of an image."""
    cosines = F.cosine_similarity(patches, patches.mean(0, keepdim=True))
    return Closeness(float(cosines.mean()), 100 * float((cosines > SAME).float().mean()))
