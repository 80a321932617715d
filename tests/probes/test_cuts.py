"""TokenCut, MaskCut and LOST: counted by hand, and beside what the authors' code finds."""

import numpy as np
import pytest
import torch

from probes.tokencut.cuts import (
    Cut,
    PatchGrid,
    discover,
    lost,
    maskcut,
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
    """Labels of patches, and features that equal one of a few orthogonal directions in each."""
    labels = np.zeros((6, 8), int)
    for label, (rows, cols) in enumerate(rectangles, start=1):
        labels[rows, cols] = label
    return labels, torch.eye(4)[torch.from_numpy(labels)]


def mosaic(seed: int) -> torch.Tensor:
    """Nine tiles of nine patches, each around a direction of its own."""
    generator = np.random.default_rng(seed)
    tiles = generator.standard_normal((3, 3, 6)).repeat(3, 0).repeat(3, 1)
    return torch.from_numpy(tiles + 0.5 * generator.standard_normal((9, 9, 6))).float()


def spectrum(vector) -> FiedlerVector:
    return FiedlerVector(np.ravel(vector).astype(float), 0.1, 0.5, 0.0, degenerate=False)


def row_of(count: int) -> PatchGrid:
    return PatchGrid(10, 10 * count, 10)


@pytest.mark.parametrize(("height", "width"), [(60, 80), (51, 71), (55, 80)])
def test_an_object_and_its_clipped_box_are_counted_by_hand(height, width):
    labels, features = scene((slice(4, 6), slice(5, 8)))

    found = discover(features, PatchGrid(height, width, 10))

    assert np.array_equal(found.mask, labels == OBJECT)
    assert found.box.tolist() == [50, 40, width, height]
    degrees = 6 + 42e-5, 42 + 6e-5
    assert found.eigenvalue == pytest.approx(42e-5 / degrees[0] + 6e-5 / degrees[1])
    assert not found.degenerate


@pytest.mark.parametrize(
    ("vector", "cut", "patches", "tied"),
    [
        # The part above the mean that holds the seed; equal peaks are a tie in two parts alone.
        ([1.9, 0.0, 2.0, 1.0, -1.0, 1.5], Cut(), [2, 3], False),
        ([2.0, 2.0, 0.0, -1.0, 1.0], Cut(), [0, 1], False),
        ([2.0, 0.0, 2.0, -1.0, 1.0], Cut(), [0], True),
        ([2.0, 0.0, 0.0, -2.0, 1.0], Cut(), [0], True),
        # A seed below the mean takes the other side.
        ([1.0, 1.0, 2.0, 1.0, -4.0, 1.0], Cut(), [4], False),
        # Of equal seeds the first; the stable one forgives rounding.
        ([0.0, 3 - 1e-9, 1.0, -3.0, 0.0, 3.0], Cut(), [3, 4], True),
        ([0.0, 3 - 1e-9, 1.0, -3.0, 0.0, 3.0], Cut(stable_seed=True), [1, 2], True),
        # Patches that meet at a corner.
        ([[1, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 0]], Cut(), [6, 7], False),
        ([[1, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 0]], Cut(connectivity=8), [0, 1, 6, 7], False),
    ],
)
def test_the_object_of_an_eigenvector_is_counted_by_hand(vector, cut, patches, tied):
    rows, cols = np.atleast_2d(vector).shape

    found = object_at_peak(spectrum(vector), PatchGrid(10 * rows, 10 * cols, 10), cut)

    assert np.flatnonzero(found.mask).tolist() == patches
    assert found.degenerate == tied


def test_two_equal_halves_and_constant_features_are_degenerate_and_can_be_refused():
    halves = torch.eye(2)[torch.arange(8) // 4].expand(6, 8, 2)
    for features in (halves, torch.ones(6, 8, 3)):
        assert discover(features, GRID).degenerate
        refused = discover(features, GRID, Cut(refuse_degenerate=True))
        assert (refused.degenerate, refused.mask.any(), refused.box.any()) == (True, False, False)


def test_masked_padding_is_left_out_of_the_graph():
    labels, features = scene((slice(1, 3), slice(1, 4)), (slice(5, 6), slice(0, 8)))
    grid = PatchGrid(59, 80, 10)

    kept = discover(features, grid)
    masked = discover(features, grid, Cut(mask_padding=True))

    assert np.array_equal(kept.mask, labels == OTHER)
    assert np.array_equal(masked.mask, labels == OBJECT)
    assert masked.eigenvector is not None
    assert not masked.eigenvector[5].any()


def test_centring_and_weights_change_the_graph():
    labels, features = scene((slice(2, 4), slice(3, 6)))
    hidden = features + 5
    noise = torch.rand(6, 8, 5, generator=torch.Generator().manual_seed(3)) - 0.3

    assert discover(hidden, GRID).degenerate
    assert np.array_equal(discover(hidden, GRID, Cut(centred=True)).mask, labels == OBJECT)
    plain, weighted = discover(noise, GRID), discover(noise, GRID, Cut(weighted=True))
    assert weighted.eigenvalue != pytest.approx(plain.eigenvalue, abs=1e-3)


@pytest.mark.parametrize("mask_padding", [False, True])
@pytest.mark.parametrize(("height", "width", "shape"), [(1, 1, (1, 1)), (3, 17, (1, 2))])
def test_images_smaller_than_a_patch_give_a_flagged_box_inside(height, width, shape, mask_padding):
    cut, grid = Cut(mask_padding=mask_padding), PatchGrid(height, width, 10)
    features = torch.randn(*shape, 4)

    found = discover(features, grid, cut)

    assert found.degenerate
    assert 0 <= found.box[0] < found.box[2] <= width
    assert 0 <= found.box[1] < found.box[3] <= height
    assert lost(features, grid, cut) is not None
    assert maskcut(features, grid, cut)


@pytest.mark.parametrize(("height", "degenerate"), [(32, True), (35, False)])
def test_an_object_in_padding_alone_is_degenerate(height, degenerate):
    # The last of four rows stands out, and holds 2 or 5 of 10 pixels of the image.
    features = torch.rand(4, 5, 8, generator=torch.Generator().manual_seed(1)) / 10
    features[:3, :, 0] += 1
    features[3, :, 1] += 1
    features[3, :, 0] -= 1
    grid, box = PatchGrid(height, 50, 10), [0, 30, 50, height]

    found = [discover(features, grid), lost(features, grid), *maskcut(features, grid)[:1]]

    assert [(list(one.box), one.degenerate) for one in found] == [(box, degenerate)] * 3
    refused = discover(features, grid, Cut(refuse_degenerate=True))
    assert refused.mask.any() != degenerate


# Of https://github.com/facebookresearch/CutLER/tree/cca0a270cf68399efc8fd50df426b6d806e39416,
# features `mosaic(seed)`, tau .15, N 3, the peak of every eigenvector made positive; the bits of
# the masks that hold a patch, row by row:
# `tests.benchmarks.discovery_originals --cutler CutLER --lost LOST --golden` at commit 092fe216
ORIGINAL_MASKS = {
    0: ["3c1e070381c1e07e3f1f80", "0381c0e030281c00000000"],
    8: ["0000000000000381c0e000", "1f8fc7e100000000000000", "0000000ef3b8fc70381c00"],
    19: ["000c061f8fc763f1f8fc00", "0400000000000000000000", "1b83c1e000000000000000"],
}


def words(masks):
    return [np.packbits(mask).tobytes().hex() for mask in masks]


@pytest.mark.parametrize(("seed", "masks"), ORIGINAL_MASKS.items())
def test_maskcut_finds_the_masks_of_the_authors_code(seed, masks):
    found = maskcut(mosaic(seed), SQUARE, PAPER)
    turned = maskcut(mosaic(seed).transpose(0, 1), SQUARE, PAPER)

    assert words(one.mask for one in found) == words(one.mask.T for one in turned) == masks
    assert all(one.box.tolist() == SQUARE.bounding_box(one.mask).tolist() for one in found)


def test_the_side_of_the_peak_yields_for_three_corners():
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
        # Four of six patches were just found: left out once. The third round sees what the second
        # saw, compares with nothing, keeps; in the last round it stays out.
        (20, [(2, 6), (3, 7)], 3, [[2, 3, 4, 5, 6], [7]], 2),
        (20, [(2, 6), (3, 7)], 2, [[2, 3, 4, 5, 6]], 2),
        # Five of nine are more than half.
        (20, [(2, 6), (2, 10)], 2, [[2, 3, 4, 5, 6]], 2),
        # One half, two of four patches, is kept without it.
        (20, [(2, 4), (3, 5)], 2, [[2, 3, 4], [5]], 2),
        # A mask is compared with the one before alone.
        (20, [(2, 6), (10, 14), (3, 7)], 3, [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [7]], 3),
        # What was found twice is not reported twice, and the search goes on.
        (
            20, [(2, 6), (10, 14), (2, 6), (16, 18)], 4,
            [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [16, 17, 18]], 4,
        ),
        # A further mask of a hundredth of the patches ends the search.
        (200, [(50, 52), (20, 21), (120, 125)], 3, [[50, 51, 52]], 2),
        (200, [(50, 52), (20, 22), (120, 121)], 3, [[50, 51, 52], [20, 21, 22]], 3),
    ],
)  # fmt: skip
def test_the_rounds_of_maskcut(length, rounds, num_masks, masks, used):
    """Each with an eigenvector whose object are the patches of a row from the first to the last."""
    left = list(rounds)

    def next_one(_masked: np.ndarray) -> FiedlerVector:
        vector, (first, last) = np.full(length, -1.0), left.pop(0)
        vector[first : last + 1] = 2
        return spectrum(vector)

    found = run_maskcut(next_one, row_of(length), PAPER, num_masks)

    assert [np.flatnonzero(one.mask).tolist() for one in found] == masks
    assert len(rounds) - len(left) == used


def test_masks_of_maskcut_do_not_overlap_and_equal_peaks_are_degenerate():
    found = maskcut(torch.eye(3)[None], row_of(3), num_masks=5)
    vector = np.full(20, -1.0)
    vector[[2, 3, 4, 10]] = 2
    (tied,) = run_maskcut(lambda _: spectrum(vector), row_of(20), PAPER, 1)

    assert np.stack([one.mask for one in found]).sum(0).tolist() == [[1, 1, 1]]
    assert tied.degenerate


def test_a_zero_patch_is_an_object_of_its_own_and_has_the_degree_of_one_that_resembles_none():
    _, features = scene((slice(2, 4), slice(3, 6)))
    features[4, 4] = 0
    two = torch.tensor([[[-1.0, 0.0], [0.0, 0.0], [1.0, 0.1], [1.0, 0.0]]])

    assert lost(features, GRID).box.tolist() == [40, 40, 50, 50]
    found = lost(two, row_of(4))
    assert found.mask.tolist() == [[True, False, False, False]]
    assert found.degenerate


# By degree: 0, 5, 1, ...; patch 5 disagrees with the seed, patch 1 joins it.
@pytest.mark.parametrize(("num_candidates", "size"), [(1, 2), (2, 2), (3, 5)])
def test_lost_joins_no_more_candidates_than_asked(num_candidates, size):
    features = torch.tensor([[[1.0, 0], [1, 1], [0, 1], [0, 1], [0, 1], [-1, 1]]])

    found = lost(features, row_of(6), num_candidates=num_candidates)

    assert np.flatnonzero(found.mask).tolist() == list(range(size))


# Of https://github.com/valeoai/LOST/tree/fcedbecb644f18358a660ce58c739cc6374feda8, features
# `mosaic(seed)`, patches of 10 pixels, k_patches 20; no two patches tie for the seed or a place:
# `tests.benchmarks.discovery_originals --cutler CutLER --lost LOST --golden` at commit 092fe216
ORIGINAL_BOXES = {
    4: [0, 0, 40, 30],
    23: [0, 20, 60, 80],
}


@pytest.mark.parametrize(("seed", "box"), ORIGINAL_BOXES.items())
def test_lost_finds_the_box_of_the_authors_code(seed, box):
    found = lost(mosaic(seed), SQUARE, num_candidates=20)
    turned = lost(mosaic(seed).transpose(0, 1), SQUARE, num_candidates=20)

    assert found.box.tolist() == box
    assert not found.degenerate
    assert not found.tied_cutoff
    assert np.array_equal(turned.mask, found.mask.T)


# A line of patches; who agrees in sign with the patch itself counts for no degree.
ANGLES = {"seed": 0.0, "left": 80.0, "right": -80.0, "far": 150.0, "farther": 160.0}


@pytest.mark.parametrize(
    ("names", "num_candidates", "degenerate", "tied"),
    [
        # Degrees: 2 of the seed's direction, 1 of either side; the first of the sides is the seed.
        ("seed left right", 1, True, True),
        ("seed left right", 2, True, False),
        ("seed left right", 3, True, False),
        # Degrees 0, 1 and 1: neither of the last two may join, whoever is a candidate.
        ("right far farther", 2, False, False),
        # All patches are linked with all; another seed of this degree grows another object.
        ("left left left", 100, True, False),
        ("left right seed", 1, True, True),
    ],
)
def test_lost_knows_where_the_order_of_patches_decides(names, num_candidates, degenerate, tied):
    angles = torch.deg2rad(torch.tensor([ANGLES[name] for name in names.split()]))
    features = torch.stack([angles.cos(), angles.sin()], -1)[None]

    found = lost(features, row_of(3), num_candidates=num_candidates)

    assert (found.degenerate, found.tied_cutoff) == (degenerate, tied)
