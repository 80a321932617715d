import numpy as np
import pytest
import torch

from probes.features.views import resized
from probes.heads.scored_images import PatchScoring, SlidingScoring, SquashedScoring
from ssl_bench.data.samples import Sample


def _scene(height=24, width=36):
    """A sample whose red is its column, green its row, and whose mask is left or right."""
    rows, cols = np.mgrid[:height, :width]
    image = np.stack([cols * 255 // width, rows * 255 // height, 0 * rows], -1).astype(np.uint8)
    return Sample("scene", image, (cols >= width // 2).astype(np.uint8))


def test_a_single_window_that_covers_the_image_scores_as_the_squashed_image_does():
    scene = Sample("square", _scene(32, 32).image, _scene(32, 32).mask)
    slide, squash = SlidingScoring(16, (0.5, 0.5, 0.5)), SquashedScoring(16)
    one, other = slide.prepare(scene), squash.prepare(scene)
    torch.testing.assert_close(one.windows, other.windows)
    logits = torch.randn(1, 3, 4, 4, 5, generator=torch.Generator().manual_seed(0))
    assert one.corners == ((0, 0),)
    same = slide.predict(logits, one) == squash.predict(logits, other)
    # Upsampling in one step or in two differs at the borders between classes.
    assert same.float().mean() > 0.9


@pytest.mark.parametrize(
    ("width", "starts"), [(32, [0]), (40, [0, 8]), (53, [0, 21]), (60, [0, 21, 28])]
)
def test_windows_cover_the_image_and_the_last_one_ends_with_it(width, starts):
    scene = _scene(64, 2 * width)
    image = SlidingScoring(32, (0.5, 0.5, 0.5)).prepare(scene)
    assert image.size == (32, width)
    assert image.corners == tuple((0, start) for start in starts)
    whole = resized(torch.from_numpy(scene.image).movedim(-1, 0) / 255, 32, width)
    for window, (_, left) in zip(image.windows, image.corners, strict=True):
        torch.testing.assert_close(window, whole[:, :, left : left + 32])


def test_every_pixel_takes_the_class_of_the_patch_over_its_center():
    image = PatchScoring(16, mask_size=5).prepare(_scene())
    logits = torch.zeros(1, 1, 2, 2, 3)
    for number, (row, col) in enumerate([(0, 1), (1, 0)], 1):
        logits[0, 0, row, col, number] = 1
    (predicted,) = PatchScoring(16, mask_size=5).predict(logits, image)
    upper, lower = [0, 0, 1, 1, 1], [2, 2, 0, 0, 0]
    assert predicted.tolist() == [upper, upper, lower, lower, lower]


def test_overlapping_windows_are_averaged():
    image = SlidingScoring(32, (0.5, 0.5, 0.5)).prepare(_scene(32, 48))
    assert image.corners == ((0, 0), (0, 16))
    logits = torch.zeros(2, 1, 4, 4, 2)
    logits[0, ..., 1], logits[1, ..., 0] = 1.0, 3.0
    predicted = SlidingScoring(32, (0.5, 0.5, 0.5)).predict(logits, image)[0]
    assert (predicted[:, :16] == 1).all()
    assert (predicted[:, 16:] == 0).all()


def test_windows_weigh_the_same_where_they_overlap_and_where_they_do_not():
    image = SlidingScoring(32, (0.5, 0.5, 0.5)).prepare(_scene(64, 98))
    assert image.corners == ((0, 0), (0, 17))
    logits = torch.zeros(2, 1, 4, 4, 2)
    logits[0, ..., 1], logits[1, ..., 1] = 1.0, -1.5
    predicted = SlidingScoring(32, (0.5, 0.5, 0.5)).predict(logits, image)[0]
    # Column 34 lies at 16.75: 0.25 * 1 + 0.75 * (1 - 1.5) / 2 is just above zero.
    assert (predicted[:, :35] == 1).all()
    assert (predicted[:, 35:] == 0).all()


def test_a_very_long_image_is_filled_up_with_the_mean_colour():
    image = SlidingScoring(16, (0.25, 0.5, 0.75)).prepare(_scene(16, 160))
    assert image.size == (6, 64)
    below = image.windows[:, :, 6:]
    torch.testing.assert_close(
        below, torch.tensor([0.25, 0.5, 0.75]).view(3, 1, 1).expand_as(below)
    )


def test_a_score_size_reduces_the_mask_and_the_prediction():
    scoring = SquashedScoring(16, mask_size=10)
    image = scoring.prepare(_scene())
    assert image.mask.tolist() == [[0] * 5 + [1] * 5] * 10
    assert scoring.predict(torch.zeros(1, 2, 4, 4, 3), image).shape == (2, 10, 10)
