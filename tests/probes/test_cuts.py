"""Test the object discovery methods TokenCut, MaskCut and LOST."""

import numpy as np
import pytest
import torch

from probes.tokencut.cuts import (
    Cut,
    PatchGrid,
    discover,
    discover_with_lost,
    discover_with_maskcut,
    object_at_peak,
    run_maskcut,
    split_away_from_corners,
)
from probes.tokencut.eigensolver import FiedlerVector

GRID = PatchGrid(height=60, width=80, patch_size=10)
SQUARE = PatchGrid(height=90, width=90, patch_size=10)
BACKGROUND, OBJECT, OTHER = 0, 1, 2
PAPER = Cut(tau=0.15)


def scene(*rectangles: tuple[slice, slice]):
    """Return patch labels and the one-hot features of these labels."""
    labels = np.zeros((6, 8), int)
    for label, (rows, cols) in enumerate(rectangles, start=1):
        labels[rows, cols] = label
    return labels, torch.eye(4)[torch.from_numpy(labels)]


def mosaic(seed: int) -> torch.Tensor:
    """Return random patch features that are similar within square tiles."""
    generator = np.random.default_rng(seed)
    tiles = generator.standard_normal((3, 3, 6)).repeat(3, 0).repeat(3, 1)
    return torch.from_numpy(tiles + 0.5 * generator.standard_normal((9, 9, 6))).float()


def fiedler_vector(vector) -> FiedlerVector:
    return FiedlerVector(np.ravel(vector).astype(float), 0.1, 0.5, 0.0, degenerate=False)


def row_grid(count: int) -> PatchGrid:
    return PatchGrid(10, 10 * count, 10)


def test_objects_and_their_clipped_boxes_equal_hand_counts():
    labels, features = scene((slice(4, 6), slice(5, 8)))
    for height, width in ((60, 80), (51, 71), (55, 80)):
        found = discover(features, PatchGrid(height, width, 10))

        assert np.array_equal(found.mask, labels == OBJECT)
        assert found.box.tolist() == [50, 40, width, height]
        degrees = 6 + 42e-5, 42 + 6e-5
        assert found.eigenvalue == pytest.approx(42e-5 / degrees[0] + 6e-5 / degrees[1])
        assert not found.degenerate


@pytest.mark.parametrize(
    ("vector", "cut", "patches", "tied"),
    [
        # The object is the part above the mean that contains the seed. Equal peaks are a tie only
        # if they are in different parts.
        ([1.9, 0.0, 2.0, 1.0, -1.0, 1.5], Cut(), [2, 3], False),
        ([2.0, 2.0, 0.0, -1.0, 1.0], Cut(), [0, 1], False),
        ([2.0, 0.0, 2.0, -1.0, 1.0], Cut(), [0], True),
        ([2.0, 0.0, 0.0, -2.0, 1.0], Cut(), [0], True),
        # If the seed is below the mean, the object is on this side.
        ([1.0, 1.0, 2.0, 1.0, -4.0, 1.0], Cut(), [4], False),
        # The first of equal seeds is used. A stable seed ignores differences due to rounding.
        ([0.0, 3 - 1e-9, 1.0, -3.0, 0.0, 3.0], Cut(), [3, 4], True),
        ([0.0, 3 - 1e-9, 1.0, -3.0, 0.0, 3.0], Cut(stable_seed=True), [1, 2], True),
        # Two pairs of patches meet at a corner.
        ([[1, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 0]], Cut(), [6, 7], False),
        ([[1, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 0]], Cut(connectivity=8), [0, 1, 6, 7], False),
    ],
)
def test_the_object_of_an_eigenvector_equals_a_hand_count(vector, cut, patches, tied):
    rows, cols = np.atleast_2d(vector).shape

    found = object_at_peak(fiedler_vector(vector), PatchGrid(10 * rows, 10 * cols, 10), cut)

    assert np.flatnonzero(found.mask).tolist() == patches
    assert found.degenerate == tied


def test_equal_halves_and_constant_features_are_degenerate_and_refusable():
    halves = torch.eye(2)[torch.arange(8) // 4].expand(6, 8, 2)
    for features in (halves, torch.ones(6, 8, 3)):
        assert discover(features, GRID).degenerate
        refused = discover(features, GRID, Cut(refuse_degenerate=True))
        assert (refused.degenerate, refused.mask.any(), refused.box.any()) == (True, False, False)


def test_the_graph_excludes_masked_padding():
    labels, features = scene((slice(1, 3), slice(1, 4)), (slice(5, 6), slice(0, 8)))
    grid = PatchGrid(59, 80, 10)

    kept = discover(features, grid)
    masked = discover(features, grid, Cut(mask_padding=True))

    assert np.array_equal(kept.mask, labels == OTHER)
    assert np.array_equal(masked.mask, labels == OBJECT)
    assert masked.eigenvector is not None
    assert not masked.eigenvector[5].any()


def test_centred_features_and_weights_change_the_graph():
    labels, features = scene((slice(2, 4), slice(3, 6)))
    hidden = features + 5
    noise = torch.rand(6, 8, 5, generator=torch.Generator().manual_seed(3)) - 0.3

    assert discover(hidden, GRID).degenerate
    assert np.array_equal(discover(hidden, GRID, Cut(centred=True)).mask, labels == OBJECT)
    plain, weighted = discover(noise, GRID), discover(noise, GRID, Cut(weighted=True))
    assert weighted.eigenvalue != pytest.approx(plain.eigenvalue, abs=1e-3)


@pytest.mark.parametrize("mask_padding", [False, True])
def test_images_smaller_than_a_patch_have_a_degenerate_box_inside(mask_padding):
    for height, width, shape in ((1, 1, (1, 1)), (3, 17, (1, 2))):
        cut, grid = Cut(mask_padding=mask_padding), PatchGrid(height, width, 10)
        features = torch.randn(*shape, 4)

        found = discover(features, grid, cut)

        assert found.degenerate
        assert 0 <= found.box[0] < found.box[2] <= width
        assert 0 <= found.box[1] < found.box[3] <= height
        assert discover_with_lost(features, grid, cut) is not None
        assert discover_with_maskcut(features, grid, cut)


@pytest.mark.parametrize(("height", "degenerate"), [(32, True), (35, False)])
def test_an_object_that_is_mostly_padding_is_degenerate(height, degenerate):
    # The object is the last of four rows of patches. The image covers 2 or 5 of its 10 pixels.
    features = torch.rand(4, 5, 8, generator=torch.Generator().manual_seed(1)) / 10
    features[:3, :, 0] += 1
    features[3, :, 1] += 1
    features[3, :, 0] -= 1
    grid, box = PatchGrid(height, 50, 10), [0, 30, 50, height]

    found = [
        discover(features, grid),
        discover_with_lost(features, grid),
        *discover_with_maskcut(features, grid)[:1],
    ]

    assert [(list(one.box), one.degenerate) for one in found] == [(box, degenerate)] * 3
    refused = discover(features, grid, Cut(refuse_degenerate=True))
    assert refused.mask.any() != degenerate


# Masks from https://github.com/facebookresearch/CutLER/tree/cca0a270cf68399efc8fd50df426b6d806e39416
# for the features `mosaic(seed)`, tau 0.15 and N 3, with a positive peak of every eigenvector. Each
# mask is stored as bits, row by row. They were computed with
# `tests.benchmarks.discovery_originals --cutler CutLER --lost LOST --golden` at commit 092fe216.
ORIGINAL_MASKS = {
    0: ["3c1e070381c1e07e3f1f80", "0381c0e030281c00000000"],
    8: ["0000000000000381c0e000", "1f8fc7e100000000000000", "0000000ef3b8fc70381c00"],
    19: ["000c061f8fc763f1f8fc00", "0400000000000000000000", "1b83c1e000000000000000"],
}


def pack(masks):
    return [np.packbits(mask).tobytes().hex() for mask in masks]


@pytest.mark.parametrize(("seed", "masks"), ORIGINAL_MASKS.items())
def test_maskcut_finds_the_masks_of_the_official_code(seed, masks):
    found = discover_with_maskcut(mosaic(seed), SQUARE, PAPER)
    turned = discover_with_maskcut(mosaic(seed).transpose(0, 1), SQUARE, PAPER)

    assert pack(one.mask for one in found) == pack(one.mask.T for one in turned) == masks
    assert all(one.box.tolist() == SQUARE.bounding_box(one.mask).tolist() for one in found)


def test_the_other_side_is_foreground_if_peaks_cover_three_corners():
    vector = np.full((3, 5), 1.0)
    vector[0, 2], vector[1, 1], vector[1, 3] = 4, -2, -3

    foreground, seed, tied = split_away_from_corners(vector)

    assert np.argwhere(foreground).tolist() == [[1, 1], [1, 3]]
    assert seed == (1, 3)
    assert np.argwhere(tied).tolist() == [[1, 3]]
    two = np.array([[1.0, 0.5, 2], [-1, -1, -1]])
    assert np.array_equal(split_away_from_corners(two)[0], two > 0)


@pytest.mark.parametrize(
    ("length", "rounds", "num_masks", "masks", "used"),
    [
        # Four of six patches were found in the first round, so the second mask is left out. The
        # third round finds the same mask and keeps it, because its predecessor was left out.
        (20, [(2, 6), (3, 7)], 3, [[2, 3, 4, 5, 6], [7]], 2),
        (20, [(2, 6), (3, 7)], 2, [[2, 3, 4, 5, 6]], 2),
        # Five of nine patches were found before, which is more than half.
        (20, [(2, 6), (2, 10)], 2, [[2, 3, 4, 5, 6]], 2),
        # Two of four patches were found before. The mask is kept without them.
        (20, [(2, 4), (3, 5)], 2, [[2, 3, 4], [5]], 2),
        # A mask is compared only with the previous one.
        (20, [(2, 6), (10, 14), (3, 7)], 3, [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [7]], 3),
        # A mask that is found twice is reported once, and the search continues.
        (
            20, [(2, 6), (10, 14), (2, 6), (16, 18)], 4,
            [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [16, 17, 18]], 4,
        ),
        # The search ends at a further mask with at most 1 % of the patches.
        (200, [(50, 52), (20, 21), (120, 125)], 3, [[50, 51, 52]], 2),
        (200, [(50, 52), (20, 22), (120, 121)], 3, [[50, 51, 52], [20, 21, 22]], 3),
    ],
)  # fmt: skip
def test_maskcut_keeps_the_expected_masks_in_each_round(length, rounds, num_masks, masks, used):
    # `rounds` has the first and last patch of the object in each round's eigenvector.
    pending = list(rounds)

    def solve(_masked: np.ndarray) -> FiedlerVector:
        vector, (first, last) = np.full(length, -1.0), pending.pop(0)
        vector[first : last + 1] = 2
        return fiedler_vector(vector)

    found = run_maskcut(solve, row_grid(length), PAPER, num_masks)

    assert [np.flatnonzero(one.mask).tolist() for one in found] == masks
    assert len(rounds) - len(pending) == used


def test_maskcut_masks_do_not_overlap_and_equal_peaks_are_degenerate():
    found = discover_with_maskcut(torch.eye(3)[None], row_grid(3), num_masks=5)
    vector = np.full(20, -1.0)
    vector[[2, 3, 4, 10]] = 2
    (tied,) = run_maskcut(lambda _: fiedler_vector(vector), row_grid(20), PAPER, 1)

    assert np.stack([one.mask for one in found]).sum(0).tolist() == [[1, 1, 1]]
    assert tied.degenerate


def test_lost_gives_a_zero_patch_the_lowest_degree():
    _, features = scene((slice(2, 4), slice(3, 6)))
    features[4, 4] = 0
    two = torch.tensor([[[-1.0, 0.0], [0.0, 0.0], [1.0, 0.1], [1.0, 0.0]]])

    assert discover_with_lost(features, GRID).box.tolist() == [40, 40, 50, 50]
    found = discover_with_lost(two, row_grid(4))
    assert found.mask.tolist() == [[True, False, False, False]]
    assert found.degenerate


def test_lost_joins_at_most_the_given_number_of_candidates():
    # Patches 0, 5 and 1 have the lowest degrees. Patch 1 is similar to the seed, but not patch 5.
    features = torch.tensor([[[1.0, 0], [1, 1], [0, 1], [0, 1], [0, 1], [-1, 1]]])
    for num_candidates, size in ((1, 2), (2, 2), (3, 5)):
        found = discover_with_lost(features, row_grid(6), num_candidates=num_candidates)
        assert np.flatnonzero(found.mask).tolist() == list(range(size))


# Boxes from https://github.com/valeoai/LOST/tree/fcedbecb644f18358a660ce58c739cc6374feda8 for the
# features `mosaic(seed)`, patches of 10 pixels and k_patches 20. No patches tie. Computed with
# `tests.benchmarks.discovery_originals --cutler CutLER --lost LOST --golden` at commit 092fe216.
ORIGINAL_BOXES = {4: [0, 0, 40, 30], 23: [0, 20, 60, 80]}


@pytest.mark.parametrize(("seed", "box"), ORIGINAL_BOXES.items())
def test_lost_finds_the_box_of_the_official_code(seed, box):
    found = discover_with_lost(mosaic(seed), SQUARE, num_candidates=20)
    turned = discover_with_lost(mosaic(seed).transpose(0, 1), SQUARE, num_candidates=20)

    assert found.box.tolist() == box
    assert not found.degenerate
    assert not found.tied_cutoff
    assert np.array_equal(turned.mask, found.mask.T)
    for scale in (1e-30, 1e30):
        scaled = discover_with_lost(scale * mosaic(seed), SQUARE, num_candidates=20)
        assert np.array_equal(scaled.mask, found.mask)


# Directions of patches in degrees.
ANGLES = {"seed": 0.0, "left": 80.0, "right": -80.0, "far": 150.0, "farther": 160.0}


@pytest.mark.parametrize(
    ("names", "num_candidates", "degenerate", "tied"),
    [
        # The middle direction has degree 2, and each side 1. The first side becomes the seed.
        ("seed left right", 1, True, True),
        ("seed left right", 2, True, False),
        ("seed left right", 3, True, False),
        # The degrees are 0, 1 and 1. Neither of the last two joins, whichever is a candidate.
        ("right far farther", 2, False, False),
        # All patches are linked with all others, so the order of patches decides on the seed.
        ("left left left", 100, True, False),
        ("left right seed", 1, True, True),
    ],
)
def test_lost_reports_whether_the_order_of_patches_decides(names, num_candidates, degenerate, tied):
    angles = torch.deg2rad(torch.tensor([ANGLES[name] for name in names.split()]))
    features = torch.stack([angles.cos(), angles.sin()], -1)[None]

    found = discover_with_lost(features, row_grid(3), num_candidates=num_candidates)

    assert (found.degenerate, found.tied_cutoff) == (degenerate, tied)
