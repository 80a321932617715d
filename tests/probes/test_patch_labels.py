"""How often clusters of patches meet the classes of the pixels over them, and what follows."""

import numpy as np
import pytest
import torch

from probes.clustering.agreement import ari, without_a_look
from probes.clustering.patch_labels import Meetings, PatchLabels
from probes.clustering.patches import around
from probes.features.views import nearest_labels, tensors
from ssl_bench.intervals import Bootstrap
from tests.support.colours import ColourDataset

MET = np.array([[4, 0], [0, 3], [1, 2]])
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
    return Meetings.of(PatchLabels.joined(labels, len(images[0])), np.stack(clusters), 2, 2)


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

    found = Meetings.of(PatchLabels.of_mask(mask, 5, 6), clusters.reshape(1, -1), 4, 3)

    grown = nearest_labels(torch.from_numpy(clusters).to(torch.uint8), *size).numpy()
    expected = [[((grown == k) & (mask == c)).sum() for c in range(3)] for k in range(4)]
    assert found.met.tolist() == expected


def test_each_image_has_its_row():
    found = met_in([(0, 0), (1, 0), (1, 1)], [(1, 1), (1, 1), (0, 1)])

    assert found.met.tolist() == [[1, 1], [1, 3]]
    assert found.by_image.toarray().tolist() == [[1, 0, 1, 1], [0, 1, 0, 2]]


def test_a_draw_of_images_has_a_matching_of_its_own():
    # Either image alone is perfect, each with names of its own; together half is right.
    found = met_in([(0, 0), (1, 1)], [(0, 1), (1, 0)]).estimates()

    assert found["accuracy_matched"].value == 50
    assert found["accuracy_matched"].ci95() == (50, 100)
    assert found["miou_matched"].ci95() == (pytest.approx(100 / 3), 100)


def test_draws_of_images_without_a_label_say_nothing():
    blank = PatchLabels(*(np.zeros(0, np.int64),) * 3)
    one = PatchLabels(*(np.array([0, 1]), np.array([0, 1]), np.array([3, 3])))
    labels = PatchLabels.joined([one, blank], 2)

    found = Meetings.of(labels, np.array([[0, 1], [0, 0]]), 2, 2).estimates()

    assert found["purity"].value == 100
    assert len(found["purity"].drawn) < 1000
    assert not np.isnan(found["purity"].drawn).any()


def test_an_interval_holds_its_value_though_draws_agree_better():
    drawn = np.linspace(30, 40, 1000)

    assert around(Bootstrap(25.0, drawn)) == (25, pytest.approx(39.75))
    assert around(Bootstrap(42.0, drawn)) == (pytest.approx(30.25), 42)
    assert around(Bootstrap(35.0, np.full(1000, 35.0))) is None


def test_one_cluster_is_what_needs_no_look():
    found = {name: baseline.value for name, baseline in without_a_look(MET).items()}

    # 5 and 5 of 10; its class has an IoU of 1/2, the other none.
    assert found == {
        "nmi": pytest.approx(0), "ari": pytest.approx(0), "purity": 50, "miou_matched": 25,
        "accuracy_matched": 50, "miou_majority": 25,
    }  # fmt: skip
    assert set(without_a_look(MET[:, :1])).isdisjoint({"nmi", "ari"})


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

    met = Meetings.of(labels, np.take(names, np.stack(grids).reshape(len(images), 16)), 4, 4)

    found = met.estimates()
    assert {round(estimate.value, 9) for estimate in found.values()} == {1, 100}
    # Where all images are perfect, they do not tell how others might be.
    assert all(estimate.ci95() is None for estimate in found.values())
