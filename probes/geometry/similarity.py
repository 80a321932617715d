"""How near views of one image are to each other, and how evenly images fill the sphere."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float64
from torch import Tensor

from ssl_bench.intervals import Jackknife

# Vectors whose distances to all others are in memory at once.
_AT_ONCE = 1024


def alignment(views: Float64[Tensor, "images views dim"]) -> Float64[np.ndarray, " images"]:
    """Of each image the mean squared distance of two views, at unit length, in [0, 4].

    NaN where a view is a zero vector, which has no direction.

    Source: Wang and Isola, "Understanding Contrastive Representation Learning", 2020.
    """
    unit, times = _unit(views), views.shape[1]
    # Distances of all pairs add up to views^2 minus the squared length of the sum.
    total = times**2 - unit.sum(1).square().sum(1)
    return (total / (times * (times - 1) / 2)).clamp(min=0.0).cpu().numpy()


def uniformity(vectors: Float64[Tensor, "images dim"]) -> Jackknife:
    """The logarithm of the mean of exp(-2 distance^2) over pairs of unit vectors, in [-8, 0].

    0 where all have one direction, and lower the more evenly they are spread. NaN for fewer than
    two images, and where one is a zero vector. Costs images^2 * dim.

    Source: Wang and Isola, 2020, https://github.com/ssnl/align_uniform/tree/78ccdb19.
    """
    unit, count = _unit(vectors), len(vectors)
    sums = [
        torch.exp(4 * (some @ unit.T) - 4).sum(1) - torch.exp(4 * some.square().sum(1) - 4)
        for some in unit.split(_AT_ONCE)
    ]
    by_image = torch.cat(sums).cpu().numpy()
    total, pairs, fewer = by_image.sum(), count * (count - 1), (count - 1) * (count - 2)
    value = float(np.log(total / pairs)) if pairs else math.nan
    left = np.log((total - 2 * by_image) / fewer) if fewer else np.full(count, value)
    return Jackknife(value, left)


def _unit(vectors: Float64[Tensor, "*some dim"]) -> Float64[Tensor, "*some dim"]:
    """Of length 1, or NaN."""
    length = vectors.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, F.normalize(vectors, dim=-1, eps=1e-300), math.nan)
