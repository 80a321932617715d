import math

import pytest
import torch

from probes.heads.upsampled_logsumexp import (
    PIECE_BYTES,
    by_exponentials,
    by_powers,
    corner_weights,
    summed_logsumexp,
)

HEADS, CLASSES = 3, 5


def cells(side: int, scale: float = 3.0, dtype: torch.dtype = torch.float64, number: int = 7):
    generator = torch.Generator().manual_seed(side)
    corners = scale * torch.randn(4, HEADS, CLASSES, number, generator=generator, dtype=dtype)
    counted = torch.randint(0, 2, (side**2, number), generator=generator).to(dtype)
    return corners, counted


def plain(corners, counted):
    """Every upsampled logit, and autograd."""
    corners = corners.double().requires_grad_()
    weights = corner_weights(math.isqrt(len(counted)))
    logits = torch.einsum("pk,khcn->phcn", weights, corners)
    total = (logits.logsumexp(2) * counted.double()[:, None]).sum((0, 2))
    (gradient,) = torch.autograd.grad(total.sum(), corners)
    return total.detach(), gradient


@pytest.mark.parametrize("form", [by_exponentials, by_powers, summed_logsumexp])
@pytest.mark.parametrize("side", [1, 2, 5, 8, 14, 16])
def test_either_form_equals_the_sum_over_all_upsampled_logits(form, side):
    corners, counted = cells(side)

    found, expected = form(corners, counted), plain(corners, counted)

    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("side", [4, 8])
def test_pieces_cover_every_head_and_cell_once(monkeypatch, side):
    corners, counted = cells(side, number=150)
    # One head and 64 cells a piece, the fewest there are.
    monkeypatch.setitem(PIECE_BYTES, "cpu", 1)

    found, expected = summed_logsumexp(corners, counted), plain(corners, counted)

    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_cell_of_equal_corners_counted_by_hand():
    corners = torch.zeros(4, 1, 2, 1)
    corners[:, 0, 1] = math.log(3)
    counted = torch.zeros(64, 1)
    counted[:6] = 1

    total, gradient = summed_logsumexp(corners, counted)

    # Six pixels with a sum of exponentials of 1 + 3; a quarter of the gradient is the first's.
    assert total.item() == pytest.approx(6 * math.log(4))
    assert gradient.sum((0, 1, 3)).tolist() == pytest.approx([1.5, 4.5])


def test_powers_keep_the_accuracy_of_float32_up_to_the_largest_step():
    corners, counted = cells(16, scale=5, dtype=torch.float32)
    assert (corners.amax(0) - corners.amin(0)).max() < 30

    total, gradient = by_powers(corners, counted)

    expected, expected_gradient = plain(corners, counted)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-4)


def test_a_class_that_vanishes_at_one_patch_still_wins_at_the_next():
    corners = torch.zeros(4, 1, 2, 1)
    # From left to right one class falls from 0 to -59, the other rises from -110 to -51.
    corners[1::2, 0, 0] = -59
    corners[:, 0, 1, 0] = torch.tensor([-110.0, -51.0, -110.0, -51.0])
    counted = torch.ones(64, 1)

    total, gradient = summed_logsumexp(corners, counted)

    expected, expected_gradient = plain(corners, counted)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=0, atol=1e-4)


def test_heads_whose_logits_jump_or_are_nan_spoil_no_other_and_stay_exact():
    corners, counted = cells(8, dtype=torch.float32)
    corners[:, 1] *= 1e3
    corners[0, 2, 3, 4] = math.nan

    total, gradient = summed_logsumexp(corners, counted)

    expected, expected_gradient = plain(corners, counted)
    torch.testing.assert_close(total[:2].double(), expected[:2], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradient[:, :2].double(), expected_gradient[:, :2], atol=1e-4, rtol=0
    )
    assert total[2].isnan()
