import numpy as np
import pytest
import torch

from probes.tokencut.cuts import PatchGrid, lost
from tests.support.scenes import mosaic, scene

GRID = PatchGrid(height=60, width=80, patch_size=10)
BACKGROUND, OBJECT = 0, 1


def test_lost_grows_from_the_patch_that_resembles_the_fewest():
    labels, _ = scene((slice(2, 4), slice(3, 6)), (slice(0, 1), slice(0, 1)))
    labels[5, 7] = OBJECT
    directions = torch.tensor([[1.0, 0, -0.4], [-0.2, 1, 0], [1, 0.1, 0.1]])

    found = lost(directions[torch.from_numpy(labels)], GRID)

    # Degrees: 41 in the background and at the first patch, which agrees with it; 7 in the object.
    labels[5, 7] = BACKGROUND
    assert np.array_equal(found.mask, labels == OBJECT)
    assert found.box.tolist() == [30, 20, 60, 40]


def test_lost_takes_a_zero_patch_for_an_object_of_its_own():
    _, features = scene((slice(2, 4), slice(3, 6)))
    features[4, 4] = 0

    assert lost(features, GRID).box.tolist() == [40, 40, 50, 50]


def test_lost_joins_no_more_candidates_than_asked():
    features = torch.tensor([[[1.0, 0], [1, 1], [0, 1], [0, 1], [0, 1], [-1, 1]]])
    grid = PatchGrid(10, 60, 10)

    assert lost(features, grid, num_candidates=1).mask.tolist() == [[True] * 2 + [False] * 4]
    # By degree: 0, 5, 1, ...; patch 5 disagrees with the seed, patch 1 joins it.
    assert lost(features, grid, num_candidates=2).mask.tolist() == [[True] * 2 + [False] * 4]
    assert lost(features, grid, num_candidates=3).mask.tolist() == [[True] * 5 + [False]]


# Of https://github.com/valeoai/LOST/tree/fcedbecb644f18358a660ce58c739cc6374feda8, features
# `mosaic(seed)`, patches of 10 pixels, k_patches 20; no two patches tie for the seed or a place:
# `tests.benchmarks.discovery_originals --cutler CutLER --lost LOST --golden` at commit 092fe216
ORIGINAL_BOXES = {
    4: [0, 0, 40, 30],
    5: [0, 0, 70, 30],
    16: [0, 0, 70, 60],
    23: [0, 20, 60, 80],
}


@pytest.mark.parametrize(("seed", "box"), ORIGINAL_BOXES.items())
def test_lost_finds_the_box_of_the_authors_code(seed, box):
    found = lost(mosaic(seed), PatchGrid(90, 90, 10), num_candidates=20)

    assert found.box.tolist() == box
    assert not found.degenerate
    assert not found.tied_cutoff


def test_lost_is_the_same_for_a_transposed_image_without_ties():
    (seed, *_), grid = ORIGINAL_BOXES, PatchGrid(90, 90, 10)

    found = lost(mosaic(seed), grid, num_candidates=20)
    turned = lost(mosaic(seed).transpose(0, 1), grid, num_candidates=20)

    assert np.array_equal(turned.mask, found.mask.T)


# A line of patches; who agrees in sign with the patch itself counts for no degree.
ANGLES = {"seed": 0.0, "left": 80.0, "right": -80.0, "far": 150.0, "farther": 160.0}


def line(*names):
    angles = torch.deg2rad(torch.tensor([ANGLES[name] for name in names]))
    return torch.stack([angles.cos(), angles.sin()], -1)[None]


def test_lost_flags_patches_that_tie_for_the_last_place_beside_the_seed():
    features, grid = line("seed", "left", "right"), PatchGrid(10, 30, 10)

    # Degrees: 2 of the seed's direction, 1 of either side; the first of the sides is the seed.
    assert lost(features, grid, num_candidates=1).tied_cutoff
    assert not lost(features, grid, num_candidates=2).tied_cutoff
    assert not lost(features, grid, num_candidates=3).tied_cutoff


def test_a_tie_of_patches_that_disagree_with_the_seed_is_no_tie():
    # Degrees 0, 1 and 1: neither of the last two may join, whoever is a candidate.
    features = line("right", "far", "farther")

    found = lost(features, PatchGrid(10, 30, 10), num_candidates=2)

    assert found.mask.tolist() == [[True, False, False]]
    assert not found.tied_cutoff


def test_lost_is_degenerate_where_another_seed_of_its_degree_grows_another_object():
    same = line("left", "left", "left", "seed", "seed")
    other = line("left", "right", "seed")

    # Of one that is the whole graph every patch is linked with every other.
    assert lost(same[:, :3], PatchGrid(10, 30, 10)).degenerate
    assert lost(other, PatchGrid(10, 30, 10), num_candidates=1).degenerate


def test_a_zero_patch_and_one_that_resembles_no_other_have_the_same_degree():
    features = torch.tensor([[[-1.0, 0.0], [0.0, 0.0], [1.0, 0.1], [1.0, 0.0]]])

    found = lost(features, PatchGrid(10, 40, 10))

    assert found.mask.tolist() == [[True, False, False, False]]
    assert found.degenerate
