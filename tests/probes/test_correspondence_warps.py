"""Warps: what they show, and where points of them lie."""

import numpy as np
import pytest

from probes.correspondence.views import (
    drawn_points,
    drawn_warp,
    generator_of,
    homography,
    moved,
    visible,
    warped,
    warped_pair,
)
from ssl_bench.data.samples import Sample

KINDS = ("homography", "crop", "flip")
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def gradient(size: int) -> np.ndarray:
    """Red is the column of a pixel, green its row."""
    row, col = np.indices((size, size))
    return np.stack([col, row, 0 * row], -1).astype(np.uint8)


def test_a_flip_and_a_shift_move_pixels_and_points_alike():
    image = np.random.default_rng(0).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    flip = drawn_warp("flip", 6, 0.25, generator_of(0, "a"))
    shift = np.array([[1.0, 0.0, -2.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])

    assert np.array_equal(warped(image, flip), image[:, ::-1])
    # The first pixel goes to the end of its row.
    assert moved(np.array([[0.5, 0.5]]), flip).tolist() == [[5.5, 0.5]]
    assert np.array_equal(warped(image, shift)[1:, :4], image[:5, 2:])
    assert moved(np.array([[2.5, 0.5]]), shift).tolist() == [[0.5, 1.5]]


def test_the_middle_of_a_square_is_enlarged_by_hand():
    matrix = homography(10.0 + 20.0 * SQUARE, 40.0 * SQUARE)

    found = moved(np.array([[10.0, 10.0], [20.0, 20.0], [15.0, 30.0], [9.0, 20.0]]), matrix)

    assert found == pytest.approx(np.array([[0, 0], [20, 20], [10, 40], [-2, 20.0]]))
    assert visible(found, 40).tolist() == [True, True, False, False]


def test_what_is_shown_lies_before_the_horizon_though_a_corner_lies_behind_it():
    shown = np.array([[33.0, 33.0], [100.0, 0.0], [100.0, 100.0], [0.0, 67.0]])

    found = moved(np.concatenate([shown, [[0.0, 0.0]]]), homography(shown, 100 * SQUARE))

    assert found[:4] == pytest.approx(100 * SQUARE, abs=1e-3)
    assert np.isnan(found[4]).all()


def test_points_beyond_the_horizon_are_nowhere():
    tilted = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -0.1, 1.0]])

    found = moved(np.array([[2.0, 5.0], [2.0, 20.0]]), tilted)

    assert found[0].tolist() == [4.0, 10.0]
    assert np.isnan(found[1]).all()
    assert visible(found, 20).tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_warp_shows_where_its_matrix_says(kind):
    size = 224
    for image_id in ("a", "b", "c"):
        chance = generator_of(0, image_id)
        matrix = drawn_warp(kind, size, 0.3, chance)
        points = drawn_points(matrix, size, 300, chance)
        target = moved(points, matrix)
        # What the warp shows at the pixel of the target point, against the column and row there.
        col, row = np.floor(target).astype(int).T
        seen = warped(gradient(size), matrix)[row, col, :2]
        middles = moved(np.column_stack([col, row]) + 0.5, np.linalg.inv(matrix))

        assert visible(target, size).all()
        assert np.abs(seen + 0.5 - middles).max() < 1.6
        # A shift by half a pixel would be half a level.
        assert np.abs((seen + 0.5 - middles).mean(0)).max() < 0.1


@pytest.mark.parametrize("kind", ["homography", "crop"])
def test_a_warp_shows_a_part_of_the_square_and_nothing_else(kind):
    for number in range(40):
        matrix = drawn_warp(kind, 100, 0.33, generator_of(number, "a"))
        corners = moved(100 * SQUARE, np.linalg.inv(matrix) / np.linalg.inv(matrix)[2, 2])

        assert (corners > -1e-3).all()
        assert (corners < 100 + 1e-3).all()
        inwards = np.minimum(corners, 100 - corners)
        assert (inwards < (33 if kind == "homography" else 66) + 1e-3).all()


def test_an_image_has_its_own_warp_whatever_comes_before_it():
    image = np.random.default_rng(1).integers(0, 255, (40, 50, 3), dtype=np.uint8)

    pairs = [
        warped_pair(Sample(name, image), 32, seed, warp="homography", strength=0.25, num_points=20)
        for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    ]

    same, *others = (np.array_equal(pairs[0].truth, pair.truth) for pair in pairs[1:])
    assert same
    assert not any(others)
