import numpy as np
import pytest
import torch

from probes.tokencut.cuts import discover
from probes.tokencut.maskcut import (
    MaskCutSearch,
    maskcut,
    search_together,
    split_off_the_corners,
)
from probes.tokencut.options import Cut, PatchGrid
from probes.tokencut.spectral.eigensolver import FiedlerVector, second_eigenvector
from probes.tokencut.spectral.eigensolver_batched import solve_batch
from probes.tokencut.spectral.graph import similarity_graph
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


def search_of(num_patches: int, num_masks: int) -> MaskCutSearch:
    """A search in one row of patches."""
    grid = PatchGrid(10, 10 * num_patches, 10)
    return MaskCutSearch(torch.eye(num_patches)[None], grid, PAPER, num_masks)


def strip(first: int, last: int, length: int = 20) -> FiedlerVector:
    """An eigenvector whose object is these patches of a row, the end included."""
    vector = np.full(length, -1.0)
    vector[first : last + 1] = 2
    return FiedlerVector(vector, 0.1, 0.5, 0.0, degenerate=False)


def spans(search: MaskCutSearch) -> list[list[int]]:
    return [np.flatnonzero(one.mask).tolist() for one in search.found]


def test_a_mask_of_which_more_than_half_was_just_found_is_left_out_once():
    search = search_of(20, num_masks=3)

    search.take(strip(2, 6))
    # Four of six patches.
    search.take(strip(3, 7))

    # The third round sees what the second saw, compares with nothing and keeps it.
    assert spans(search) == [[2, 3, 4, 5, 6], [7]]
    assert search.finished


def test_a_mask_that_is_left_out_in_the_last_round_stays_out():
    search = search_of(20, num_masks=2)

    search.take(strip(2, 6))
    search.take(strip(3, 7))

    assert spans(search) == [[2, 3, 4, 5, 6]]
    assert search.finished


def test_a_mask_of_which_one_half_was_just_found_is_kept_without_it():
    search = search_of(20, num_masks=2)

    search.take(strip(2, 4))
    # Two of four patches.
    search.take(strip(3, 5))

    assert spans(search) == [[2, 3, 4], [5]]


def test_a_mask_is_compared_with_the_one_before_alone():
    search = search_of(20, num_masks=4)

    for span in ((2, 6), (10, 14), (3, 7)):
        search.take(strip(*span))

    assert spans(search) == [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14], [7]]
    assert not search.finished


def test_a_mask_that_was_found_twice_is_not_reported_twice():
    search = search_of(20, num_masks=5)

    for span in ((2, 6), (10, 14), (2, 6)):
        search.take(strip(*span))

    assert spans(search) == [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14]]
    assert not search.finished


@pytest.mark.parametrize(("last", "kept"), [(21, False), (22, True)])
def test_a_further_mask_of_a_hundredth_ends_the_search(last, kept):
    search = search_of(200, num_masks=5)

    search.take(strip(50, 90, length=200))
    search.take(strip(20, last, length=200))

    assert len(search.found) == 1 + kept
    assert search.finished != kept


def test_patches_of_masks_are_linked_to_nothing_and_count_for_the_degrees():
    search = search_of(4, num_masks=3)
    search.take(strip(1, 2, length=4))

    tokens = search.tokens().numpy()
    graph = similarity_graph(tokens, tau=0.15, eps=0.01)

    assert tokens.any(1).tolist() == [True, False, False, True]
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
    search = search_of(20, num_masks=1)

    search.take(FiedlerVector(vector, 0.1, 0.5, 0.0, degenerate=False))

    assert search.found[0].degenerate


def test_images_that_are_searched_together_keep_their_own_masks():
    searches = [MaskCutSearch(mosaic(seed), SQUARE, PAPER, 3) for seed in ORIGINAL_MASKS]
    sizes = []

    def solver(graphs, taus):
        sizes.append(len(graphs))
        return solve_batch(torch.stack([*graphs]), tau=torch.tensor(taus), eps=PAPER.eps)

    search_together(searches, solver)

    assert [words(one.mask for one in s.found) for s in searches] == [*ORIGINAL_MASKS.values()]
    assert sizes[0] == len(searches) >= sizes[1] >= sizes[2] > 0
    assert len(sizes) == 3


def test_masks_of_maskcut_do_not_overlap_even_down_to_the_last_patch():
    found = maskcut(torch.eye(3)[None], PatchGrid(10, 30, 10), num_masks=5)

    assert np.stack([one.mask for one in found]).sum(0).tolist() == [[1, 1, 1]]
