"""Test the mean IoU and similar metrics."""

import itertools

import numpy as np
import pytest
import sklearn.metrics
import torch

from probes.heads.scored_images import class_counts, confusion_counts
from ssl_bench.scores import (
    iou_from_counts,
    iou_per_class,
    is_hit,
    matched_mean_iou,
    mean_iou,
    object_accuracy,
    object_f_beta,
    object_iou,
    pixel_accuracy,
)
from ssl_bench.system.device import scatter_value_counts


def masks(*rows):
    return torch.tensor(rows, dtype=torch.uint8)


def random_masks(images, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (images, 7, 9)
    target = torch.randint(0, classes, shape, generator=generator).to(torch.uint8)
    predicted = torch.randint(0, classes, shape, generator=generator).to(torch.uint8)
    predicted = torch.where(torch.rand(shape, generator=generator) < 0.5, target, predicted)
    target[torch.rand(shape, generator=generator) < 0.2] = 255
    return predicted, target


def test_class_counts_equal_cases_counted_by_hand():
    target = masks([0, 0, 1], [1, 255, 2])
    heads = torch.stack([masks([0, 1, 1], [1, 2, 0]), target.clamp(max=2)])
    one, other = class_counts(heads, target, 3)
    assert one.tolist() == [[1, 2, 0], [2, 3, 0], [2, 2, 1]]
    assert other.tolist() == [[2, 2, 1]] * 3
    assert iou_per_class(one.numpy()).tolist() == pytest.approx([100 / 3, 200 / 3, 0])
    assert float(mean_iou(one.numpy())) == pytest.approx(100 / 3)
    assert float(pixel_accuracy(one.numpy())) == pytest.approx(60)
    # The last class below the ignored label.
    counts = class_counts(masks([254, 0])[None], masks([254, 255]), 255)[0]
    assert counts[:, 254].tolist() == [1, 1, 1]


def test_iou_is_undefined_for_absent_classes():
    counts = class_counts(masks([2, 0])[None], masks([0, 0]), 4)[0].numpy()
    nan = float("nan")
    assert iou_per_class(counts).tolist() == pytest.approx([50, nan, 0, nan], nan_ok=True)
    assert float(mean_iou(counts)) == pytest.approx(25)


def test_mean_iou_of_a_dataset_equals_torchmetrics():
    # torchmetrics takes a second to import.
    from torchmetrics.classification import MulticlassJaccardIndex

    predicted, target = random_masks(8, 5)
    reference = MulticlassJaccardIndex(5, average="macro", ignore_index=255)
    reference.update(predicted.long(), target.long())
    pairs = zip(predicted, target, strict=True)
    counts = torch.cat([class_counts(p[None], t, 5) for p, t in pairs])
    expected = 100 * float(reference.compute())
    assert float(mean_iou(counts.sum(0).numpy())) == pytest.approx(expected, abs=1e-4)


def test_scores_of_single_pixels_are_defined_unlike_no_pixels():
    one, none = np.array([[0, 1], [0, 1], [0, 1]]), np.zeros((3, 2), int)
    both = np.stack([one, none])
    nan = float("nan")
    assert pixel_accuracy(both).tolist() == pytest.approx([100, nan], nan_ok=True)
    assert mean_iou(both).tolist() == pytest.approx([100, nan], nan_ok=True)
    found = iou_from_counts(np.array([1, 0, 0]), np.array([1, 1, 0])).tolist()
    assert found == pytest.approx([100, 0, nan], nan_ok=True)


@pytest.mark.parametrize(
    ("counts", "f_beta", "iou", "accuracy"),
    [
        # Correct, predicted, true and scored pixels of the object.
        ((1, 1, 1, 1), 100, 100, 100),
        ((0, 1, 1, 2), 0, 0, 0),
        # Precision 1 and recall 0, and the reverse.
        ((0, 0, 1, 4), 0, 0, 75),
        ((0, 1, 0, 4), 0, 0, 75),
        ((0, 0, 0, 4), 100, 100, 100),
        ((0, 0, 0, 0), 100, 100, 100),
        # Precision 1/2 and recall 1: 1.3 * 0.5 / (0.3 * 0.5 + 1). Then the reverse.
        ((1, 2, 1, 8), 65 / 1.15, 50, 87.5),
        ((1, 1, 2, 8), 65 / 0.8, 50, 87.5),
    ],
)
def test_scores_of_object_masks_equal_values_computed_by_hand(counts, f_beta, iou, accuracy):
    scores = [
        float(score(np.array([counts]))[0])
        for score in (object_f_beta, object_iou, object_accuracy)
    ]
    assert scores == pytest.approx([f_beta, iou, accuracy])


@pytest.mark.parametrize(("width", "hit"), [(2, True), (1.99, False)])
def test_boxes_with_an_iou_of_one_half_are_hits(width, hit):
    ground_truth = np.array([[20.0, 20, 24, 24], [0, 0, 4, 4]])
    assert is_hit(np.array([0.0, 0, width, 4]), ground_truth) == hit
    # Intersection over union 4 / 12 and 0 / 9.
    assert not is_hit(np.array([0.0, 0, 4, 2]), np.array([[2.0, 0, 4, 4], [10, 10, 11, 11]]))
    assert not is_hit(np.array([0.0, 0, width, 4]), np.zeros((0, 4)))


def test_scattered_counts_equal_bincount():
    values = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(0))
    # Sums of these weights are exact in any order.
    weights = torch.arange(200) / 8

    assert torch.equal(scatter_value_counts(values, 11), torch.bincount(values, minlength=11))
    assert torch.equal(
        scatter_value_counts(values.to(torch.uint8), 11, weights),
        torch.bincount(values, weights.double(), 11),
    )


def restated_matched_iou(confusion):
    """Return the highest mean IoU (%) over all assignments of predicted classes to true classes."""
    classes = range(len(confusion))
    best = 0.0
    for names in itertools.permutations(classes):
        total = 0.0
        for old, new in enumerate(names):
            right = confusion[new][old]
            union = sum(confusion[new]) + sum(row[old] for row in confusion) - right
            total += right / union if union else 0.0
        best = max(best, total / len(confusion))
    return 100 * best


def test_classes_are_matched_by_iou_and_not_by_pixels():
    confusion = np.array([[19, 53, 15], [13, 42, 37], [2, 5, 22]])
    assert matched_mean_iou(confusion)[0] == pytest.approx(restated_matched_iou(confusion))


@pytest.mark.parametrize(
    ("confusion", "by_hand"),
    [
        # Two classes are exchanged. The third is absent and counts as 0.
        ([[1, 7, 0], [6, 2, 0], [0, 0, 0]], 100 * (7 / 10 + 6 / 9) / 3),
        ([[5, 0], [0, 5]], 100),
        # Predicting 0 for every pixel is correct for the larger class.
        ([[2, 0, 0], [8, 0, 0], [0, 0, 0]], 100 * 0.8 / 3),
    ],
)
def test_predicted_classes_are_matched_one_to_one_with_true_classes(confusion, by_hand):
    value, names = matched_mean_iou(np.array(confusion))

    assert value == pytest.approx(by_hand)
    assert value == pytest.approx(restated_matched_iou(confusion))
    assert sorted(names) == list(range(len(confusion)))


@pytest.mark.parametrize("seed", range(2))
def test_the_confusion_of_all_pixels_gives_the_best_matched_iou(seed):
    predicted, target = random_masks(4, 5, seed)
    heads = torch.stack([predicted, (predicted + 2) % 5])
    counts = confusion_counts(heads, target, 6).numpy()
    known = (target != 255).numpy()
    for found, given in zip(counts, heads.numpy(), strict=True):
        expected = sklearn.metrics.confusion_matrix(
            target.numpy()[known], given[known], labels=range(6)
        )
        assert np.array_equal(found, expected)
        value, _ = matched_mean_iou(found)
        assert value == pytest.approx(restated_matched_iou(expected.tolist()))
    # The second head is a cyclic permutation of the first, so its matched mIoU is the same.
    one, other = (matched_mean_iou(found)[0] for found in counts)
    assert one == pytest.approx(other)
