import pytest
import torch
import torch.nn.functional as F

from probes.features.labels import label_histograms
from probes.heads.losses import HistogramLoss, MajorityLoss, ResampledLoss, UpsampledLoss

CLASSES, HEADS, BATCH, ROWS, COLS = 5, 3, 2, 4, 3
GRID = (ROWS, COLS)


def _logits(dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS, CLASSES, BATCH, ROWS, COLS)
    return scale * torch.randn(shape, generator=generator, dtype=dtype)


def _labels(pixels_per_patch, ignored=0.2, classes=CLASSES):
    generator = torch.Generator().manual_seed(1)
    size = (BATCH, ROWS * pixels_per_patch, COLS * pixels_per_patch)
    labels = torch.randint(0, classes, size, generator=generator)
    labels[torch.rand(size, generator=generator) < ignored] = 255
    return labels.to(torch.uint8)


def _reference(logits, labels, mode):
    """Upsampled logits of each head against every pixel, by autograd."""
    logits = logits.clone().requires_grad_()
    losses = []
    for head in logits:
        upsampled = F.interpolate(head.transpose(0, 1), labels.shape[1:], mode=mode)
        pixels = F.cross_entropy(upsampled, labels.long(), ignore_index=255, reduction="none")
        losses.append(pixels.sum())
    losses = torch.stack(losses)
    losses.sum().backward()
    return losses.detach(), logits.grad


@pytest.mark.parametrize("pixels_per_patch", [1, 3, 4])
def test_histogram_loss_equals_pixel_cross_entropy_of_nearest_upsampling(pixels_per_patch):
    logits, labels = _logits(), _labels(pixels_per_patch)
    loss = HistogramLoss()
    value, gradient = loss.loss_and_gradient(logits, loss.targets(labels, CLASSES, GRID))
    expected, expected_gradient = _reference(logits, labels, "nearest")
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pixels_per_patch", [1, 4, 7, 16])
def test_upsampled_loss_equals_pixel_cross_entropy_of_bilinear_upsampling(pixels_per_patch):
    logits, labels = _logits(), _labels(pixels_per_patch)
    loss = UpsampledLoss(pixels_per_patch)
    value, gradient = loss.loss_and_gradient(logits, loss.targets(labels, CLASSES, GRID))
    expected, expected_gradient = _reference(logits, labels, "bilinear")
    # Label weights are kept in float32.
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


def test_resampled_loss_equals_pixel_cross_entropy_at_any_size():
    logits = _logits()
    labels = F.interpolate(_labels(4)[:, None], size=(10, 10), mode="nearest-exact")[:, 0]
    loss = ResampledLoss(10)
    value, gradient = loss.loss_and_gradient(logits, loss.targets(labels, CLASSES, GRID))
    expected, expected_gradient = _reference(logits, labels, "bilinear")
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [HistogramLoss(), UpsampledLoss(4)])
def test_label_weights_add_up_to_the_pixels_of_each_class(loss):
    labels = _labels(4, classes=171)
    weights = loss.targets(labels, 171, GRID).label_weights
    expected = torch.bincount(labels[labels != 255].long(), minlength=171).float()
    torch.testing.assert_close(weights.sum((1, 2, 3)), expected)


def test_a_patch_histogram_counts_only_the_pixels_under_its_patch():
    labels = torch.tensor([[[1, 1, 2, 255], [1, 0, 2, 2]]], dtype=torch.uint8)
    histograms = label_histograms(labels, 2, 3)
    assert histograms[:, 0, 0].tolist() == [[1, 0], [3, 0], [0, 3]]


def test_a_patch_counts_once_for_its_most_frequent_label():
    rows = [[0, 0, 2, 1, 255, 255, 255, 0], [0, 1, 1, 2, 255, 2, 0, 255]]
    targets = MajorityLoss().targets(torch.tensor([rows], dtype=torch.uint8), 3, (1, 4))
    # Three 0; a tie of 1 and 2; three 255; a tie of 0 and 255.
    expected = [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert targets.label_weights[:, 0, 0].tolist() == expected
    assert targets.counted[0, 0, 0].tolist() == [1, 1, 0, 1]


def test_mode_loss_equals_cross_entropy_of_the_patches_with_their_modes():
    logits, labels = _logits(), _labels(4, ignored=0.4)
    modes = labels.unflatten(2, (-1, 4)).unflatten(1, (-1, 4)).transpose(2, 3)
    modes = modes.flatten(3).mode(3).values
    loss = MajorityLoss()
    value, gradient = loss.loss_and_gradient(logits, loss.targets(labels, CLASSES, GRID))
    expected, expected_gradient = _reference(logits, modes, "nearest")
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [HistogramLoss(), UpsampledLoss(4), UpsampledLoss(8)])
def test_logits_far_apart_keep_loss_and_gradient_finite(loss):
    side = 8 if loss == UpsampledLoss(8) else 4
    targets = loss.targets(_labels(side), CLASSES, GRID)
    value, gradient = loss.loss_and_gradient(_logits(torch.float32, scale=1e4), targets)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
