"""Warps of an image whose geometry is known: what the target shows, and where points go.

A point is (x, y) in pixels; the middle of the pixel in column c and row r is (c + 0.5, r + 0.5).
"""

import hashlib

import cv2
import numpy as np
from jaxtyping import Bool, Float64, UInt8

from probes.correspondence.probe import Warp

Matrix = Float64[np.ndarray, "3 3"]
Points = Float64[np.ndarray, "_points 2"]

# From the middles of pixels, which OpenCV counts from 0, to the coordinates of this file.
_HALF = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])


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
