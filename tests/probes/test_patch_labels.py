"""How often clusters of patches meet the classes of the pixels over them, and what follows."""

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.sparse import csr_array

from probes.clustering.agreement import SCORES, ari, patch_intervals
from probes.clustering.probe import PatchLabels, patch_meetings
from probes.features.views import nearest_labels, tensors
from tests.support.colours import ColourDataset

IGNORED = 255


def met_in(*images):
    """Meetings of images, each of them given by cluster and class of every pixel."""
    labels, clusters = [], []
    for image in images:
        cells = np.array(image)
        labels.append(
            PatchLabels(np.arange(len(cells)), cells[:, 1], np.ones(len(cells), np.int64))
        )
        clusters.append(cells[:, 0])
    return patch_meetings(PatchLabels.joined(labels, len(images[0])), np.stack(clusters), 2, 2)


def test_pixels_lie_under_the_patch_over_their_middle():
    mask = np.array([[0, 0, 1], [0, 255, 1], [2, 2, 1]], np.uint8)

    found = PatchLabels.of_mask(mask, 2, 1)

    # The middle of the second of three rows is that of the image, where the lower patch begins.
    cells = zip(found.patches, found.classes, found.pixels, strict=True)
    assert {tuple(map(int, cell)) for cell in cells} == {
        (0, 0, 2), (0, 1, 1), (1, 0, 1), (1, 1, 2), (1, 2, 2),
    }  # fmt: skip


@pytest.mark.parametrize("size", [(24, 40), (7, 33), (3, 2)])
def test_masks_of_any_size_are_counted_as_clusters_grow_to_them(size):
    generator = np.random.default_rng(0)
    mask = generator.choice([0, 1, 2, IGNORED], size).astype(np.uint8)
    clusters = generator.integers(4, size=(5, 6))

    met, _ = patch_meetings(PatchLabels.of_mask(mask, 5, 6), clusters.reshape(1, -1), 4, 3)

    grown = nearest_labels(torch.from_numpy(clusters).to(torch.uint8), *size).numpy()
    expected = [[((grown == k) & (mask == c)).sum() for c in range(3)] for k in range(4)]
    assert met.tolist() == expected


def test_each_image_has_its_row():
    met, by_image = met_in([(0, 0), (1, 0), (1, 1)], [(1, 1), (1, 1), (0, 1)])

    assert met.tolist() == [[1, 1], [1, 3]]
    assert by_image.toarray().tolist() == [[1, 0, 1, 1], [0, 1, 0, 2]]


def test_intervals_equal_a_loop_over_images_in_numpy():
    generator = np.random.default_rng(0)
    images = generator.integers(9, size=(60, 3, 2)) * (generator.random((60, 3, 2)) < 0.5)
    met = images.sum(0)

    found = patch_intervals(met, csr_array(images.reshape(60, -1)))

    assert set(found) == set(SCORES) - {"miou_majority"}
    for name, interval in found.items():
        score = SCORES[name]
        value = float(score(met))
        without = np.array([float(score(met - one)) for one in images])
        bias = 59 * (without.mean() - value)
        margin = scipy.stats.t.ppf(0.975, 59) * np.sqrt(59 * without.var())
        low, high = interval or (0, 0)
        lowest = -100 if name == "ami" else -1 if name == "ari" else 0
        assert low == pytest.approx(max(lowest, value - max(bias, 0) - margin), abs=1e-6), name
        assert high == pytest.approx(min(100, value - min(bias, 0) + margin), abs=1e-6), name


def test_few_images_of_patches_have_no_interval():
    images = np.random.default_rng(0).integers(9, size=(59, 3, 2))
    assert patch_intervals(images.sum(0), csr_array(images.reshape(59, -1))) == {}


def test_pairs_of_very_many_pixels_are_counted():
    assert ari(np.diag([5_000_000_000, 5_000_000_000])) == pytest.approx(1)
    many = np.array([[6, 1], [2, 5]]) * 2_000_000_000
    total = many.sum()
    pairs = [sum(n * n for n in map(int, some)) for some in (many.flat, many.sum(1), many.sum(0))]
    chance = pairs[1] * pairs[2] / int(total) ** 2
    expected = (pairs[0] - chance) / ((pairs[1] + pairs[2]) / 2 - chance)
    assert ari(many) == pytest.approx(expected, abs=1e-8)


def test_true_classes_as_clusters_are_perfect_whatever_their_names():
    images = ColourDataset().val()
    masks = [tensors(images[n])[1] for n in range(len(images))]
    grids = [nearest_labels(mask[2:], 4, 4).numpy() for mask in masks]
    labels = PatchLabels.joined([PatchLabels.of_mask(mask.numpy(), 4, 4) for mask in masks], 16)
    names = np.array([2, 3, 0, 1])

    clusters = np.take(names, np.stack(grids).reshape(len(images), 16))
    met, by_image = patch_meetings(labels, clusters, 4, 4)

    found = {name: float(score(met)) for name, score in SCORES.items()}
    assert {round(value, 9) for value in found.values()} == {1, 100}
    # Where all images are perfect, they do not tell how others might be.
    many = csr_array(np.tile(by_image.toarray(), (60, 1)))
    assert set(patch_intervals(60 * met, many).values()) == {None}
