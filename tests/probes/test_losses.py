"""Test the loss functions of segmentation heads."""

import math

import pytest
import torch
import torch.nn.functional as F

from probes.heads.losses import (
    PIECE_BYTES,
    HistogramLoss,
    MajorityLoss,
    ResampledLoss,
    UpsampledLoss,
    summed_logsumexp,
)

CLASSES, HEADS, BATCH, ROWS, COLS = 5, 3, 2, 4, 3
GRID = (ROWS, COLS)


def make_logits():
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS, CLASSES, BATCH, ROWS, COLS)
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64)


def make_labels(pixels_per_patch, ignored=0.2):
    generator = torch.Generator().manual_seed(1)
    size = (BATCH, ROWS * pixels_per_patch, COLS * pixels_per_patch)
    labels = torch.randint(0, CLASSES, size, generator=generator)
    labels[torch.rand(size, generator=generator) < ignored] = 255
    return labels.to(torch.uint8)


def compute_with_autograd(logits, labels, mode):
    """Compute the loss and gradient of each head with autograd."""
    logits = logits.clone().requires_grad_()
    losses = []
    for head in logits:
        upsampled = F.interpolate(head.transpose(0, 1), labels.shape[1:], mode=mode)
        pixels = F.cross_entropy(upsampled, labels.long(), ignore_index=255, reduction="none")
        losses.append(pixels.sum())
    losses = torch.stack(losses)
    losses.sum().backward()
    return losses.detach(), logits.grad


def most_frequent_labels(labels):
    patches = labels.unflatten(2, (-1, 4)).unflatten(1, (-1, 4)).transpose(2, 3)
    return patches.flatten(3).mode(3).values


@pytest.mark.parametrize(
    ("loss", "labels", "mode", "close"),
    [
        *((HistogramLoss(), make_labels(side), "nearest", 1e-12) for side in (1, 4)),
        # Weights of labels have the precision of float32.
        *((UpsampledLoss(side), make_labels(side), "bilinear", 1e-6) for side in (1, 4, 7)),
        (
            ResampledLoss(10),
            F.interpolate(make_labels(4)[:, None], size=(10, 10), mode="nearest-exact")[:, 0],
            "bilinear",
            1e-6,
        ),
        (MajorityLoss(), make_labels(4, ignored=0.4), "nearest", 1e-12),
    ],
)
def test_losses_equal_the_cross_entropy_of_upsampled_logits(loss, labels, mode, close):
    logits = make_logits()
    value, gradient = loss.loss_and_gradient(logits, loss.targets(labels, CLASSES, GRID))
    labels = most_frequent_labels(labels) if isinstance(loss, MajorityLoss) else labels
    expected, expected_gradient = compute_with_autograd(logits, labels, mode)
    torch.testing.assert_close(value, expected, rtol=close, atol=close)
    torch.testing.assert_close(gradient, expected_gradient, rtol=close, atol=close)


def test_a_patch_counts_once_for_its_most_frequent_label():
    rows = [[0, 0, 2, 1, 255, 255, 255, 0], [0, 1, 1, 2, 255, 2, 0, 255]]
    targets = MajorityLoss().targets(torch.tensor([rows], dtype=torch.uint8), 3, (1, 4))
    # In the four patches, label 0 wins, 1 ties with 2, 255 wins, and 0 ties with 255.
    expected = [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert targets.label_weights[:, 0, 0].tolist() == expected
    assert targets.pixel_weights[0, 0, 0].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("loss", [HistogramLoss(), UpsampledLoss(4)])
def test_loss_and_gradient_of_large_logits_are_finite(loss):
    targets = loss.targets(make_labels(4), CLASSES, GRID)
    for found in loss.loss_and_gradient((1e4 * make_logits()).float(), targets):
        assert found.isfinite().all()


def random_pieces(side, dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(side)
    shape = (HEADS, CLASSES, BATCH, ROWS, COLS)
    logits = scale * torch.randn(shape, generator=generator, dtype=dtype)
    pixel_weights = torch.randint(0, 2, (side**2, BATCH, ROWS + 1, COLS + 1), generator=generator)
    return logits - logits.amax(1, keepdim=True), pixel_weights.to(dtype)


def sum_with_autograd(logits, pixel_weights):
    """Compute a weighted sum of log-sum-exp values and its gradient."""
    # `pixel_weights` has the shape [pixels of a cell, images, rows of cells, columns of cells].
    # A cell is the square between the centres of four neighbouring patches.
    logits = logits.double().clone().requires_grad_()
    side = math.isqrt(len(pixel_weights))
    flat = F.pad(logits.flatten(0, 1), (1, 1, 1, 1), mode="replicate")
    size = (side * flat.shape[-2], side * flat.shape[-1])
    upsampled = F.interpolate(flat, size, mode="bilinear")
    # A cell begins at the centre of a patch. The first cell is outside the image.
    start, ends = side // 2, [n - (side - side // 2) for n in size]
    upsampled = upsampled[..., start : ends[0], start : ends[1]]
    by_pixel = upsampled.unflatten(-1, (-1, side)).unflatten(-3, (-1, side))
    by_pixel = by_pixel.unflatten(0, logits.shape[:2]).permute(4, 6, 0, 1, 2, 3, 5)
    normaliser = by_pixel.flatten(0, 1).logsumexp(2)
    total = (normaliser * pixel_weights.double()[:, None]).transpose(0, 1).flatten(1).sum(1)
    (gradient,) = torch.autograd.grad(total.sum(), logits)
    return total.detach(), gradient


@pytest.mark.parametrize("side", [1, 2, 4, 5, 16])
def test_normalisers_equal_those_of_all_upsampled_logits(monkeypatch, side):
    logits, pixel_weights = random_pieces(side)
    expected = sum_with_autograd(logits, pixel_weights)
    for piece_bytes in (1, 20_000, 2**21):
        monkeypatch.setitem(PIECE_BYTES, "cpu", piece_bytes)
        found = summed_logsumexp(logits, pixel_weights)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("side", [4, 14, 16, 32])
def test_normalisers_are_precise_in_float32(side):
    for scale in (3, 20, 30, 1000):
        logits, pixel_weights = random_pieces(side, torch.float32, scale)
        total, gradient = summed_logsumexp(logits, pixel_weights)
        expected, expected_gradient = sum_with_autograd(logits, pixel_weights)
        torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=2e-6)
        worst = expected_gradient.abs().max().item()
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=2e-6 * worst, rtol=0)


def test_sums_of_a_head_do_not_depend_on_others():
    logits, pixel_weights = random_pieces(8, torch.float32)
    logits[1] *= 1e3
    together = summed_logsumexp(logits, pixel_weights)
    for head in range(HEADS):
        single = summed_logsumexp(logits[head, None], pixel_weights)
        for one, other in zip(single, together, strict=True):
            assert torch.equal(one[0], other[head])
    logits[2, 3, 1, 2, 0] = math.nan
    with_nan = summed_logsumexp(logits, pixel_weights)
    for one, other in zip(with_nan, together, strict=True):
        torch.testing.assert_close(one[:2], other[:2])
    assert with_nan[0][2].isnan()
