"""Test the prediction of pixel labels from upsampled logits."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from probes.heads.pixels import (
    predict_pixels,
    predict_pixels_exactly,
    predict_pixels_upsampled,
)


def make_logits(kind, classes, heads=3, rows=6, cols=5):
    generator = torch.Generator().manual_seed(classes)
    noise = torch.randn(heads, rows, cols, classes, generator=generator)
    return {
        "noisy": noise,
        "smooth": F.avg_pool2d(noise.movedim(-1, 1), 3, 1, 1).movedim(1, -1).contiguous(),
        "whole numbers": noise.round(),
        "far from zero": 1000 + noise.mul(1e-3),
        "of two sizes": noise * torch.tensor([1e-6, 1.0, 1e6])[:, None, None, None],
        "doubled": torch.cat([noise, noise], -1)[..., :classes],
        "all equal": torch.zeros_like(noise),
    }[kind]


def predict_plainly(logits, height, width):
    """Upsample the logits bilinearly and return the class of each pixel."""
    corners = []
    for size, patches in zip((height, width), logits.shape[1:3], strict=True):
        position = (torch.arange(size) + 0.5) * (patches / size) - 0.5
        before = position.floor().int().numpy()
        after = (position - position.floor()).numpy()
        ends = np.clip(before, 0, None), np.clip(before + 1, None, patches - 1)
        corners.append(((ends[0], 1 - after), (ends[1], after)))
    total, highest = np.float32(0), np.float32(-np.inf)
    for above, weight in corners[0]:
        for left, share in corners[1]:
            corner = logits.numpy()[:, above][:, :, left]
            total = total + corner * (weight[:, None] * share)[:, :, None]
            highest = np.maximum(highest, corner)
    # Equal sums are ordered by their highest corner, and then by class.
    best = total == total.max(-1, keepdims=True)
    return np.where(best, highest, -np.inf).argmax(-1)


KINDS = [
    "noisy", "smooth", "whole numbers", "far from zero", "of two sizes", "doubled", "all equal",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_labels_equal_the_definition_exactly(kind):
    for classes, size in ((2, (66, 150)), (21, (5, 3)), (255, (37, 53))):
        logits = make_logits(kind, classes)
        assert np.array_equal(predict_pixels(logits, *size).numpy(), predict_plainly(logits, *size))


@pytest.mark.parametrize("size", [(37, 53), (5, 3)])
@pytest.mark.parametrize("predict", [predict_pixels_exactly, predict_pixels_upsampled])
def test_pixels_have_the_largest_interpolated_logit(predict, size):
    logits = make_logits("noisy", 255)
    upsampled = F.interpolate(logits.movedim(-1, 1), size, mode="bilinear")
    predicted = predict(logits, *size).long()
    largest = upsampled.gather(1, predicted[:, None])[:, 0]
    torch.testing.assert_close(largest, upsampled.amax(1))


def test_labels_do_not_depend_on_the_size_of_pieces(monkeypatch):
    logits = make_logits("noisy", 21)
    monkeypatch.setattr("probes.heads.pixels._NODE_LOGITS", 1)
    monkeypatch.setattr("probes.heads.pixels._PIECE_PIXELS", 1)
    in_pieces = predict_pixels(logits, 40, 70)
    monkeypatch.undo()

    assert torch.equal(predict_pixels(logits, 40, 70), in_pieces)


def test_two_threads_give_the_same_labels_and_keep_thread_counts():
    logits = make_logits("noisy", 21).requires_grad_()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(predict_pixels(logits, 40, 70))
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("factor", [torch.nan, torch.inf, 1e38])
def test_huge_logits_of_a_head_do_not_change_other_heads(factor):
    logits = make_logits("noisy", 21)
    expected = predict_pixels(logits, 40, 70)
    assert torch.equal(predict_pixels(logits * 2.0**126, 40, 70), expected)
    logits[1] *= factor
    predicted = predict_pixels(logits, 40, 70)

    assert torch.equal(predicted[[0, 2]], expected[[0, 2]])
    assert predicted[1].max() < 21
