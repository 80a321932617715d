"""Correspondence: points and their places in warps, matching, correct places and figures."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probes.correspondence import (
    GAP,
    SIDE,
    Correspondence,
    ViewPair,
    argmax_places,
    cosine_similarities,
    draw_matches,
    homography,
    image_generator,
    is_inside,
    make_warped_pair,
    order_by_category,
    sample_features,
    sample_points,
    sample_warp,
    soft_argmax_places,
    transform_points,
    warp_image,
)
from probes.pictures import MARGIN
from ssl_bench.data.samples import Sample

KINDS = ("homography", "crop", "flip")
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def test_a_flip_and_a_shift_move_pixels_and_points_alike():
    image = np.random.default_rng(0).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    flip = sample_warp("flip", 6, 0.25, image_generator(0, "a"))
    shift = np.array([[1.0, 0.0, -2.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])

    assert np.array_equal(warp_image(image, flip), image[:, ::-1])
    # The first pixel goes to the end of its row.
    assert transform_points(np.array([[0.5, 0.5]]), flip).tolist() == [[5.5, 0.5]]
    assert np.array_equal(warp_image(image, shift)[1:, :4], image[:5, 2:])
    assert transform_points(np.array([[2.5, 0.5]]), shift).tolist() == [[0.5, 1.5]]


def test_points_behind_the_horizon_have_no_place():
    shown = np.array([[33.0, 33.0], [100.0, 0.0], [100.0, 100.0], [0.0, 67.0]])

    found = transform_points(np.concatenate([shown, [[0.0, 0.0]]]), homography(shown, 100 * SQUARE))

    assert found[:4] == pytest.approx(100 * SQUARE, abs=1e-3)
    assert np.isnan(found[4]).all()
    assert not is_inside(found[4:], 100).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_warp_shows_where_its_matrix_says(kind):
    # Red is the column of a pixel, green its row.
    size, (row, col) = 224, np.indices((224, 224))
    gradient = np.stack([col, row, 0 * row], -1).astype(np.uint8)
    for image_id in ("a", "b", "c"):
        generator = image_generator(0, image_id)
        matrix = sample_warp(kind, size, 0.3, generator)
        points = sample_points(matrix, size, 300, generator)
        target = transform_points(points, matrix)
        # What the warp shows at the pixel of the target point, against the column and row there.
        col, row = np.floor(target).astype(int).T
        seen = warp_image(gradient, matrix)[row, col, :2]
        middles = transform_points(np.column_stack([col, row]) + 0.5, np.linalg.inv(matrix))

        assert is_inside(target, size).all()
        assert np.abs(seen + 0.5 - middles).max() < 1.6
        # A shift by half a pixel would be half a level.
        assert np.abs((seen + 0.5 - middles).mean(0)).max() < 0.1


@pytest.mark.parametrize("kind", ["homography", "crop"])
def test_a_warp_shows_a_part_of_the_square_and_nothing_else(kind):
    for number in range(40):
        matrix = sample_warp(kind, 100, 0.33, image_generator(number, "a"))
        corners = transform_points(
            100 * SQUARE, np.linalg.inv(matrix) / np.linalg.inv(matrix)[2, 2]
        )

        assert (corners > -1e-3).all()
        assert (corners < 100 + 1e-3).all()
        inwards = np.minimum(corners, 100 - corners)
        assert (inwards < (33 if kind == "homography" else 66) + 1e-3).all()


def test_an_image_has_its_own_warp_whatever_comes_before_it():
    image = np.random.default_rng(1).integers(0, 255, (40, 50, 3), dtype=np.uint8)

    pairs = [
        make_warped_pair(Sample(name, image), 32, seed, Correspondence(num_points=20))
        for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    ]

    same, *others = (np.array_equal(pairs[0].truth, pair.truth) for pair in pairs[1:])
    assert same
    assert not any(others)


@pytest.mark.parametrize(
    ("sigma", "indices"),
    [
        (7.0, [[1.822745680809021, 2.9561963081359863], [3.8296804428100586, 1.1564617156982422]]),
        (1.0, [[2.0, 3.0], [4.000000476837158, 1.000000238418579]]),
    ],
)
def test_the_soft_place_is_that_of_insid3_and_half_a_patch(sigma, indices):
    # `kernel_softargmax_get_matches_logits(scores, 0.04, sigma)` of `utils/keypoints.py` of
    # https://github.com/visinf/INSID3 (f1c9622a) gave these indices of patches.
    scores = (torch.arange(70).double() * 37 % 71 / 71).view(1, 2, 5, 7).float()

    found = soft_argmax_places(scores, sigma=sigma, temperature=0.04)

    assert found[0].numpy() == pytest.approx((np.array(indices) + 0.5) / (7, 5), abs=1e-5)


@pytest.mark.parametrize("sampling", ["bilinear", "patch"])
def test_matches_are_those_of_a_plain_loop_in_float64(sampling):
    generator = np.random.default_rng(0)
    source, target = generator.standard_normal((2, 4, 5, 6))
    points = generator.random((12, 2))

    source_map, target_map, places = (
        torch.from_numpy(x[None]).float() for x in (source, target, points)
    )
    features = sample_features(source_map, places, sampling)
    found = argmax_places(cosine_similarities(features, target_map))

    # The cosine does not depend on the lengths of features.
    for point, place in zip(points, found[0].numpy(), strict=True):
        if sampling == "patch":
            wanted = source[int(point[1] * 4), int(point[0] * 5)]
        else:
            # Distance to the middles in patches, at most one patch away, none beyond the rim.
            at = np.clip(point * (5, 4) - 0.5, 0, (4, 3))
            wanted = sum(
                source[r, c] * max(0, 1 - abs(at[0] - c)) * max(0, 1 - abs(at[1] - r))
                for r in range(4)
                for c in range(5)
            )
        cosine = target @ wanted / np.linalg.norm(target, axis=-1)
        row, col = np.unravel_index(cosine.argmax(), cosine.shape)
        assert place == pytest.approx(((col + 0.5) / 5, (row + 0.5) / 4))


def test_points_on_the_edges_of_the_image_belong_to_the_outermost_patches():
    source = torch.arange(6.0).view(1, 2, 3, 1)
    points = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [1 / 3, 0.0], [0.0, 0.5]]])

    assert sample_features(source, points, "patch").flatten().tolist() == [0, 5, 1, 3]


def test_features_that_encode_the_position_find_every_point():
    size, grid = 224, 14
    middles = (np.stack(np.meshgrid(*[np.arange(grid)] * 2), -1).reshape(-1, 2) + 0.5) / grid

    def encode(places: np.ndarray) -> torch.Tensor:
        """Return the place of each patch in the first view, on a sphere."""
        flat = np.column_stack([places - 0.5, np.ones(len(places))])
        return torch.from_numpy(flat).float().view(1, grid, grid, 3)

    for image_id in ("a", "b"):
        image = np.zeros((size, size, 3), np.uint8)
        pair = make_warped_pair(Sample(image_id, image), size, 0, Correspondence(num_points=200))
        generator = image_generator(0, image_id)
        matrix = sample_warp("homography", size, 0.25, generator)
        target = transform_points(middles * size, np.linalg.inv(matrix)) / size
        points = torch.from_numpy(pair.source[None]).float()
        features = sample_features(encode(middles), points, "bilinear")
        found = argmax_places(cosine_similarities(features, encode(target)))

        # No further than from a corner of a patch to its middle, and what the sphere bends.
        right = pair.is_correct(
            found[0].double().numpy(), [1.25 * math.sqrt(0.5) / grid, 0.1 / grid]
        )
        assert right[0].all()
        assert not right[1].all()


def view_pair(truth: Sequence[Sequence[float]], **changed: Any) -> ViewPair:
    view = torch.zeros(3, 8, 8, dtype=torch.uint8)
    values = {"units": (100.0, 100.0), "reference": 50.0, **changed}
    places = np.array(truth, np.float64)
    return ViewPair("pair", ("a", "b"), (view, view), places, places, **values)


def test_errors_are_measured_in_pixels_of_the_second_image():
    pair = view_pair([[0.2, 0.2], [0.5, 0.5]])
    found = np.array([[0.24, 0.2], [0.5, 0.44]])

    # 4 and 6 pixels of a box of 50.
    assert pair.is_correct(found, [0.07, 0.1, 0.13]).mean(1).tolist() == [0.0, 0.5, 1.0]
    # Of an image that is twice as wide as high: 20 and 10 pixels.
    wide = view_pair([[0.5, 0.5], [0.5, 0.5]], units=(200.0, 100.0))
    near = wide.is_correct(np.array([[0.6, 0.5], [0.5, 0.6]]), [0.19, 0.21, 0.39, 0.41])
    assert near.T.tolist() == [[False, False, False, True], [False, True, True, True]]
    # A place at exactly the largest distance is correct. These numbers are not rounded.
    even = view_pair([[0.5, 0.5]], units=(8.0, 8.0), reference=8.0)
    assert even.is_correct(np.array([[0.75, 0.5]]), [0.25, 0.24]).tolist() == [[True], [False]]


def test_pairs_of_a_category_and_of_an_image_follow_each_other():
    ids = ["1-b-c:dog", "2-z-c:cat", "3-b-a:dog", "4-a-c:cat"]

    assert order_by_category(ids) == [3, 1, 2, 0]


def test_a_line_is_green_where_a_point_is_right_and_red_elsewhere(tmp_path):
    pair = view_pair([[0.5, 0.25], [0.5, 0.75]])
    places = np.array([[0.5, 0.25], [0.5, 0.5]])

    draw_matches(pair, places, np.array([True, False]), "title", tmp_path / "a.png")

    picture = np.asarray(Image.open(tmp_path / "a.png")).astype(int)
    views = picture[picture.shape[0] - SIDE - MARGIN :, MARGIN:]
    middle = (2 * SIDE + GAP) // 2
    # Half of the way from one view to the other, there where both are black.
    right, wrong = (
        views[row - 2 : row + 3, middle - GAP // 2 - 4].reshape(-1, 3).max(0)
        for row in (SIDE // 4, round(0.63 * SIDE))
    )
    assert right[1] > 100 > right[0]
    assert wrong[0] > 100 > wrong[1]
    # The ring around the true place, four pixels wide on either side, on nothing else.
    ring = views[round(0.75 * SIDE) - 6 : round(0.75 * SIDE) + 7, middle + GAP // 2 + SIDE // 2]
    assert (ring[:, 1] > 100).any()
