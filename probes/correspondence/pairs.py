"""Pairs of views as the encoder sees them, and the points that both show."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, UInt8
from PIL import Image
from torch import Tensor

from probes.correspondence.probe import Correspondence
from probes.correspondence.warps import (
    Points,
    drawn_points,
    drawn_warp,
    generator_of,
    moved,
    warped,
)
from ssl_bench.data.central_square import central_square
from ssl_bench.data.samples import Sample

View = UInt8[Tensor, "3 _size _size"]


@dataclass(frozen=True)
class ViewPair:
    """Two square views and points of the first whose true place in the second is known.

    Attributes:
        keys: What the views are called; equal for equal views.
        source: (x, y), relative to the side of the view.
        truth: The same points in the second view, relative to its side.
        units: Width and height of the second view in the unit in which errors are told.
        reference: What alphas are relative to, in that unit.
    """

    pair_id: str
    keys: tuple[str, str]
    views: tuple[View, View]
    source: Points
    truth: Points
    units: tuple[float, float]
    reference: float
    category: str | None = None

    def errors(self, predicted: Points) -> Float64[np.ndarray, " _points"]:
        """How far places lie from the true ones, relative to the reference.

        Args:
            predicted: Relative to the side of the second view.
        """
        return np.linalg.norm((predicted - self.truth) * self.units, axis=1) / self.reference

    def right(
        self, predicted: Points, alphas: Sequence[float]
    ) -> Bool[np.ndarray, "{len(alphas)} _points"]:
        """Which places are near enough, one row an alpha; one at that distance is."""
        return self.errors(predicted) <= np.array(alphas, np.float64)[:, None]


def warped_pair(sample: Sample, probe: Correspondence, size: int, seed: int) -> ViewPair:
    """The central square of an image, and a warp of it that is drawn with the seed and its id.

    The warp is made of the pixels of the first view: it never shows more than that.
    """
    chance = generator_of(seed, sample.image_id)
    view = central_square(sample.image, size, share=1.0)
    matrix = drawn_warp(probe.warp, size, probe.strength, chance)
    points = drawn_points(matrix, size, probe.num_points, chance)
    target = warped(np.ascontiguousarray(view.permute(1, 2, 0).numpy()), matrix)
    return ViewPair(
        pair_id=sample.image_id,
        keys=(sample.image_id, f"warp of {sample.image_id}"),
        views=(view, torch.from_numpy(target).permute(2, 0, 1)),
        source=points / size,
        truth=moved(points, matrix) / size,
        units=(float(size), float(size)),
        reference=float(size),
    )


def annotated_pair(sample: Sample, size: int) -> ViewPair:
    """Both images of a pair, squashed to squares; errors are told in pixels of the second."""
    assert sample.pair is not None
    pair = sample.pair
    (height, width), (other_height, other_width) = sample.image.shape[:2], pair.image.shape[:2]
    return ViewPair(
        pair_id=sample.image_id,
        keys=pair.image_ids,
        views=(_squashed(sample.image, size), _squashed(pair.image, size)),
        source=pair.source / (width, height),
        truth=pair.target / (other_width, other_height),
        units=(float(other_width), float(other_height)),
        reference=pair.extent,
        category=pair.category,
    )


def _squashed(image: UInt8[np.ndarray, "height width 3"], size: int) -> View:
    square = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)
