import numpy as np
import pytest
import torch

from probes.tokencut.cuts import (
    Cut,
    PatchGrid,
    cut_repeatedly,
    discover,
    maskcut,
    split_off_the_corners,
)
from probes.tokencut.eigensolver import FiedlerVector, second_eigenvector, similarity_graph
from tests.support.scenes import mosaic, scene

GRID = PatchGrid(height=60, width=80, patch_size=10)
SQUARE = PatchGrid(height=90, width=90, patch_size=10)
BACKGROUND, OBJECT, OTHER = 0, 1, 2
PAPER = Cut(tau=0.15)

# Of https://github.com/facebookresearch/CutLER/tree/cca0a270cf68399efc8fd50df426b6d806e39416,
# features `mosaic(seed)`, tau .15, N 3, the peak of every eigenvector made positive; the bits of
# the masks that hold a patch, row by row:
# `tests.benchmarks.discovery_originals --cutler CutLER --lost LOST --golden` at commit 092fe216
ORIGINAL_MASKS = {
    0: ["3c1e070381c1e07e3f1f80", "0381c0e030281c00000000"],
    1: ["e07c381806070000000000", "000000000000000e070780", "0000008070381c30180000"],
    3: ["fc7e3f1f7eff7c30000000"],
    8: ["0000000000000381c0e000", "1f8fc7e100000000000000", "0000000ef3b8fc70381c00"],
    15: ["0000001fffdfff83c0e000", "1f8fc7e000000000000000"],
    19: ["000c061f8fc763f1f8fc00", "0400000000000000000000", "1b83c1e000000000000000"],
}


def words(masks):
    return [np.packbits(mask).tobytes().hex() for mask in masks]


@pytest.mark.parametrize(("seed", "masks"), ORIGINAL_MASKS.items())
def test_maskcut_finds_the_masks_of_the_authors_code(seed, masks):
    found = maskcut(mosaic(seed), SQUARE, PAPER)

    assert words(one.mask for one in found) == masks
    assert all(one.box.tolist() == SQUARE.box(one.mask).tolist() for one in found)


@pytest.mark.parametrize("seed", ORIGINAL_MASKS)
def test_a_transposed_image_gives_the_transposed_masks(seed):
    found = maskcut(mosaic(seed), SQUARE, PAPER)

    turned = maskcut(mosaic(seed).transpose(0, 1), SQUARE, PAPER)

    assert words(one.mask.T for one in turned) == words(one.mask for one in found)


def test_maskcut_finds_two_objects_one_after_the_other():
    labels, features = scene((slice(0, 3), slice(1, 4)), (slice(4, 6), slice(6, 8)))

    found = maskcut(features, GRID, num_masks=2)

    # The larger one is cut more cheaply: 9 * 39 weak links for 9 patches, not 4 * 44 for 4.
    assert [one.box.tolist() for one in found] == [[10, 0, 40, 30], [60, 40, 80, 60]]
    assert np.array_equal(found[0].mask, labels == OBJECT)
    assert np.array_equal(found[1].mask, labels == OTHER)


def test_maskcut_takes_the_side_that_leaves_the_corners():
    labels, features = scene((slice(1, 6), slice(1, 7)))

    plain, (found,) = discover(features, GRID), maskcut(features, GRID, num_masks=1)

    assert np.array_equal(plain.mask, labels == BACKGROUND)
    assert np.array_equal(found.mask, labels == OBJECT)


def test_the_side_of_the_peak_yields_for_its_corners_whatever_the_sign():
    vector = np.full((3, 5), 1.0)
    vector[0, 2], vector[1, 1], vector[1, 3] = 4, -2, -3

    one, other = split_off_the_corners(vector), split_off_the_corners(-vector)

    assert np.argwhere(one.foreground).tolist() == [[1, 1], [1, 3]]
    assert one.seed == other.seed == (1, 3)
    assert np.array_equal(one.foreground, other.foreground)
    assert np.array_equal(one.tied, other.tied)


def test_the_side_of_the_peak_stays_with_two_corners():
    vector = np.array([[1.0, 0.5, 2], [-1, -1, -1]])

    assert np.array_equal(split_off_the_corners(vector).foreground, vector > 0)


def strip(first: int, last: int, length: int = 20) -> FiedlerVector:
    """An eigenvector whose object is these patches of a row, the end included."""
    vector = np.full(length, -1.0)
    vector[first : last + 1] = 2
    return FiedlerVector(vector, 0.1, 0.5, 0.0, degenerate=False)


def rounds_of(*rounds: FiedlerVector, num_masks: int) -> tuple[list[list[int]], int]:
    """Patches of the masks that are found with these eigenvectors, and how many were used."""
    given, left = iter(rounds), list(rounds)

    def next_one(_masked: np.ndarray) -> FiedlerVector:
        left.pop()
        return next(given)

    grid = PatchGrid(10, 10 * len(rounds[0].vector), 10)
    found = cut_repeatedly(next_one, grid, PAPER, num_masks)
    return [np.flatnonzero(one.mask).tolist() for one in found], len(rounds) - len(left)


def test_a_mask_of_which_more_than_half_was_just_found_is_left_out_once():
    # Four of six patches. The third round sees what the second saw, compares with nothing, keeps.
    assert rounds_of(strip(2, 6), strip(3, 7), num_masks=3) == ([[2, 3, 4, 5, 6], [7]], 2)


def test_a_mask_that_is_left_out_in_the_last_round_stays_out():
    assert rounds_of(strip(2, 6), strip(3, 7), num_masks=2) == ([[2, 3, 4, 5, 6]], 2)


def test_a_mask_of_which_one_half_was_just_found_is_kept_without_it():
    # Two of four patches.
    assert rounds_of(strip(2, 4), strip(3, 5), num_masks=2)[0] == [[2, 3, 4], [5]]


def test_a_mask_is_compared_with_the_one_before_alone():
    rounds = [strip(2, 6), strip(10, 14), strip(3, 7)]

    assert rounds_of(*rounds, num_masks=3)[0] == [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [7]]


def test_a_mask_that_was_found_twice_is_not_reported_twice():
    rounds = [strip(2, 6), strip(10, 14), strip(2, 6), strip(16, 18)]
    masks = [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [16, 17, 18]]

    assert rounds_of(*rounds[:3], num_masks=3) == (masks[:2], 3)
    # The search goes on.
    assert rounds_of(*rounds, num_masks=4) == (masks, 4)


@pytest.mark.parametrize(("last", "used"), [(21, 2), (22, 3)])
def test_a_further_mask_of_a_hundredth_ends_the_search(last, used):
    rounds = [strip(50, 90, 200), strip(20, last, 200), strip(120, 125, 200)]

    masks, given = rounds_of(*rounds, num_masks=3)

    assert given == used
    assert len(masks) == (3 if used == 3 else 1)


def test_patches_of_masks_are_linked_to_nothing_and_count_for_the_degrees():
    whole = similarity_graph(np.eye(4, dtype=np.float32), tau=0.15, eps=0.01)

    graph = whole.isolated(np.array([False, True, True, False]))

    assert graph.links.tolist() == [[1, 0, 0, 0], [0] * 4, [0] * 4, [0, 0, 0, 1]]
    assert graph.degrees == pytest.approx([1.03, 0.04, 0.04, 1.03])


def test_links_that_are_taken_away_are_those_of_zero_features():
    features = mosaic(0).flatten(0, 1).numpy()
    painted = np.arange(81) % 4 == 0
    for weighted in (False, True):
        graph = similarity_graph(features, tau=0.15, eps=1e-5, weighted=weighted)

        isolated = graph.isolated(painted)

        zeroed = np.where(painted[:, None], np.float32(0), features)
        expected = similarity_graph(zeroed, tau=0.15, eps=1e-5, weighted=weighted)
        assert isolated.links == pytest.approx(expected.links, abs=1e-6)
        assert isolated.degrees == pytest.approx(expected.degrees, abs=1e-5)


def test_the_eigenvector_at_zero_features_is_its_mean_over_one_minus_the_eigenvalue():
    features = mosaic(0).flatten(0, 1).numpy()
    features[::5] = 0

    found = second_eigenvector(features, tau=0.15, eps=1e-5)

    expected = found.vector.mean() / (1 - found.eigenvalue)
    assert found.vector[::5] == pytest.approx(expected, rel=1e-6)


def test_equal_peaks_in_two_places_are_flagged():
    vector = strip(2, 4).vector
    vector[10] = vector[3]
    peaks = FiedlerVector(vector, 0.1, 0.5, 0.0, degenerate=False)

    (found,) = cut_repeatedly(lambda _: peaks, PatchGrid(10, 200, 10), PAPER, 1)

    assert found.degenerate


def test_masks_of_maskcut_do_not_overlap_even_down_to_the_last_patch():
    found = maskcut(torch.eye(3)[None], PatchGrid(10, 30, 10), num_masks=5)

    assert np.stack([one.mask for one in found]).sum(0).tolist() == [[1, 1, 1]]
