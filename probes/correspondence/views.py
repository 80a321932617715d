"""Pairs of views as the encoder sees them, and points whose places in both are known.

A point is (x, y); in pixels the middle of the one in column c and row r is (c + 0.5, r + 0.5).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float64, UInt8
from PIL import Image
from torch import Tensor

from ssl_bench.data.central_square import central_square
from ssl_bench.data.samples import Sample

View = UInt8[Tensor, "3 _size _size"]
Matrix = Float64[np.ndarray, "3 3"]
Points = Float64[np.ndarray, "_points 2"]
Warp = Literal["homography", "crop", "flip"]

# From the middles of pixels, which OpenCV counts from 0, to the coordinates of this file.
_HALF = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])


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


def warped_pair(
    sample: Sample, size: int, seed: int, *, warp: Warp, strength: float, num_points: int
) -> ViewPair:
    """The central square of an image, and a warp of it that is drawn with the seed and its id.

    The warp is made of the pixels of the first view: it never shows more than that.
    """
    chance = generator_of(seed, sample.image_id)
    view = central_square(sample.image, size, share=1.0)
    matrix = drawn_warp(warp, size, strength, chance)
    points = drawn_points(matrix, size, num_points, chance)
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

    def squashed(image: UInt8[np.ndarray, "height width 3"]) -> View:
        square = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)

    (height, width), (other_height, other_width) = sample.image.shape[:2], pair.image.shape[:2]
    return ViewPair(
        pair_id=sample.image_id,
        keys=pair.image_ids,
        views=(squashed(sample.image), squashed(pair.image)),
        source=pair.source / (width, height),
        truth=pair.target / (other_width, other_height),
        units=(float(other_width), float(other_height)),
        reference=pair.extent,
        category=pair.category,
    )


def generator_of(seed: int, image_id: str) -> np.random.Generator:
    """Random numbers of an image, the same whatever images come before it."""
    digest = hashlib.sha256(f"{seed}\0{image_id}".encode(errors="surrogateescape")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def drawn_warp(kind: Warp, size: int, strength: float, chance: np.random.Generator) -> Matrix:
    """A matrix that takes points of a square to those of its warp, which is as large.

    The warp shows a part of the square and nothing else.

    Args:
        kind: As `Correspondence.warp` has them.
        size: Side of the square in pixels.
        strength: How far inwards the corners of what is shown lie at most, relative to the side.
        chance: Where the numbers come from.
    """
    if kind == "flip":
        return np.array([[-1.0, 0.0, size], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    corners = size * np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    if kind == "crop":
        share = 1.0 - 2.0 * strength * chance.random()
        shown = share * corners + (1.0 - share) * size * chance.random(2)
    else:
        inwards = np.where(corners > 0, -1.0, 1.0)
        shown = corners + inwards * strength * size * chance.random((4, 2))
    return homography(shown, corners)


def homography(source: Float64[np.ndarray, "4 2"], target: Float64[np.ndarray, "4 2"]) -> Matrix:
    """The matrix that takes four points to four others, with a positive scale between them."""
    matrix = cv2.getPerspectiveTransform(source.astype(np.float32), target.astype(np.float32))
    # The scale is known up to its sign, which tells what lies before the horizon.
    return matrix * np.sign(matrix[2] @ [*source.mean(0), 1.0])


def warped(
    image: UInt8[np.ndarray, "height width 3"], matrix: Matrix
) -> UInt8[np.ndarray, "height width 3"]:
    """The image as `matrix` shows it, bicubic, in a frame of the same size."""
    height, width = image.shape[:2]
    return cv2.warpPerspective(
        image,
        np.linalg.inv(_HALF) @ matrix @ _HALF,
        (width, height),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )


def moved(points: Points, matrix: Matrix) -> Points:
    """Where points go; NaN for those beyond the horizon."""
    found = np.column_stack([points, np.ones(len(points))]) @ matrix.T
    scale = np.where(found[:, 2:] > 0, found[:, 2:], np.nan)
    return found[:, :2] / scale


def visible(points: Points, size: int) -> Bool[np.ndarray, " _points"]:
    """Whether points lie in a square."""
    x, y = points.T
    return (x >= 0) & (x < size) & (y >= 0) & (y < size)


def drawn_points(matrix: Matrix, size: int, count: int, chance: np.random.Generator) -> Points:
    """So many middles of pixels, all of which are to be seen in the warp; some may come twice."""
    found: list[Points] = []
    while sum(map(len, found)) < count:
        some = chance.integers(size, size=(2 * count, 2)) + 0.5
        found.append(some[visible(moved(some, matrix), size)])
    return np.concatenate(found)[:count]
