import numpy as np
import pytest
import torch

from probes.heads.scored_images import ImageCounts, mask_score
from ssl_bench.metrics import class_counts
from ssl_bench.scores import iou_per_class, mean_iou, pixel_accuracy


def _counts(images=7, sources=2, values=3, classes=5):
    """Of random maps, one class of which nobody predicts and one image has no label."""
    generator = torch.Generator().manual_seed(0)
    shape = (images, sources * values, 4, 6)
    predicted = torch.randint(0, classes - 1, shape, generator=generator, dtype=torch.uint8)
    true = torch.randint(0, classes, (images, 4, 6), generator=generator, dtype=torch.uint8)
    true[3] = 255
    predicted[5] = 0
    found = [class_counts(p, t, classes) for p, t in zip(predicted, true, strict=True)]
    return torch.stack(found).unflatten(1, (sources, values))


def _kept(counts, batch_size):
    _, sources, values, _, classes = counts.shape
    kept = ImageCounts(sources, values, classes)
    for some in counts.split(batch_size):
        kept.add(some)
    return kept


@pytest.mark.parametrize(
    ("metric", "score"), [("miou_oracle", mean_iou), ("pixel_accuracy", pixel_accuracy)]
)
def test_scores_of_a_head_are_those_of_its_own_counts(metric, score):
    counts = _counts()
    kept = _kept(counts, 3)
    for source, value in np.ndindex(2, 3):
        own = counts[:, source, value].numpy()
        found = mask_score((4, "key"), metric, kept, (source, value), "abcde", {"more": 1})
        assert (found.layer, found.facet, found.metric) == (4, "key", metric)
        assert found.value == pytest.approx(float(score(own.sum(0))))
        assert np.array_equal(np.asarray(found.per_image), own)
        iou = list(found.details["iou_by_class"].values())
        assert iou == pytest.approx(iou_per_class(own.sum(0)).tolist())
        assert (found.num_images, found.details["more"]) == (7, 1)


def test_pixels_beyond_two_to_the_31_are_summed():
    counts = torch.full((3, 1, 1, 3, 1), 2**30)
    assert _kept(counts, 2).total.tolist() == [[[[3 * 2**30]] * 3]]
