"""Filters with the covariance of trained ones: equations 3.5 to 3.11, restated."""

import math

import pytest
import torch

from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ConvMixerConfig, build_encoder
from ssl_bench.models.initialisers import (
    FILTER_INITIALISERS,
    CovarianceFilters,
    filter_covariance,
    make_initialiser,
    positive_root,
)

# A step of one pixel halves a Gaussian of this squared width.
HALVING = 1 / (2 * math.log(2))
SIZES = [(3, 0.4), (5, 1.0), (7, 1.9)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def restated(size, sigma):
    """Equation 3.10 entry by entry; pixels and blocks are counted from the middle."""
    half = size // 2
    steps = range(-half, half + 1)

    def gaussian(rows, cols):
        return math.exp(-(rows**2 + cols**2) / (2 * sigma))

    def around(step):
        return min(abs(step), size - abs(step))

    entries = []
    for i in steps:
        for j in steps:
            for row in steps:
                for col in steps:
                    mask, static = gaussian(i, j), gaussian(row, col)
                    moved = gaussian(around(row - i), around(col - j))
                    entries.append(0.5 * (mask * (moved - static) + static * moved))
    return torch.tensor(entries, dtype=torch.float64).view(size**2, size**2)


def test_covariances_of_nine_pixels_counted_by_hand():
    found = filter_covariance(3, HALVING)

    middle, corner, next_corner, side = 4, 0, 2, 1
    assert found[middle, middle].item() == pytest.approx((2 * 1 - 1) / 2)
    assert found[corner, corner].item() == pytest.approx((2 / 4 - 1 / 16) / 2)
    # A corner is one step of each kind from the middle.
    assert found[corner, middle].item() == pytest.approx((5 / 4 * 1 / 4 - 1 / 4) / 2)
    # Around the edge, the next corner is one step away as the side between them is.
    assert found[corner, next_corner].item() == pytest.approx((2 / 4 * 1 / 2 - 1 / 16) / 2)
    assert found[corner, side].item() == pytest.approx((3 / 4 * 1 / 2 - 1 / 8) / 2)


@pytest.mark.parametrize(("size", "sigma"), SIZES)
def test_every_covariance_is_that_of_the_formula(size, sigma):
    torch.testing.assert_close(
        filter_covariance(size, sigma), restated(size, sigma), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize(("size", "sigma"), SIZES)
def test_the_root_is_that_of_the_nearest_positive_semi_definite_matrix(size, sigma):
    covariance = filter_covariance(size, sigma)

    root = positive_root(covariance)

    positive, lost = root @ root, root @ root - covariance
    torch.testing.assert_close(root, root.T)
    assert torch.linalg.eigvalsh(root).min() > -1e-12
    # The nearest point of a cone: what was added lies in the dual cone, at a right angle to it.
    assert torch.linalg.eigvalsh(lost).min() > -1e-12
    assert (positive * lost).sum().abs() < 1e-12
    if size > 3:
        assert lost.abs().max() > 1e-3


def test_many_filters_have_the_covariance_they_were_drawn_with():
    initialiser = CovarianceFilters(sigma_0=0.5, v_sigma=0.5, a_sigma=0.0)

    filters = initialiser.filters(100_000, 5, 1.0, generator()).flatten(1)

    root = positive_root(restated(5, 1.0))
    assert (filters.T @ filters / len(filters) - root @ root).abs().max() < 0.015
    assert filters.mean(0).abs().max() < 0.015


def test_the_first_layer_of_an_encoder_is_the_narrowest_and_the_last_the_widest():
    config = ConvMixerConfig(dim=512, depth=3, kernel_size=7, init="covariance")

    blocks = build_encoder(config, seed=0).blocks

    for block, sigma in zip(blocks, (0.08, 0.6275, 1.9), strict=True):
        filters = block.get_submodule("depthwise").get_parameter("weight").double().flatten(1)
        root = positive_root(restated(7, sigma))
        shares = filters.square().mean(0) / (root @ root).diagonal()
        assert shares[24].item() == pytest.approx(1, abs=0.25)  # the middle pixel
        assert filters.square().sum(1).mean().item() == pytest.approx(
            (root @ root).trace().item(), rel=0.25
        )


def test_an_encoder_of_one_layer_takes_the_first_sigma():
    config = ConvMixerConfig(dim=64, depth=1, kernel_size=5, init="covariance")

    (block,) = build_encoder(config, seed=0).blocks

    filters = block.get_submodule("depthwise").get_parameter("weight").flatten(1)
    assert filters[:, 12].square().sum() > 0.9 * filters.square().sum()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("covariances", {}, "model.init must be one of uniform, covariance, got 'covariances'"),
        ("covariance", {"sigma": 1.0}, "no option 'sigma'; did you mean: .*v_sigma"),
        ("uniform", {"sigma_0": 1.0}, "no option 'sigma_0'; it has none"),
        ("covariance", {"sigma_0": "wide"}, "sigma_0 expects a number in .*, got 'wide'"),
        ("covariance", {"sigma_0": 0.0}, "must stay positive .* got 0 with"),
        ("covariance", {"v_sigma": -2.0}, "raise sigma_0"),
        # Positive in both the first and the last layer, not between them.
        ("covariance", {"v_sigma": -1.4}, "must stay positive .* got -0.2579"),
    ],
)
def test_a_covariance_without_meaning_is_refused_in_one_line(name, options, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        make_initialiser(FILTER_INITIALISERS, name, options)
    assert "\n" not in str(raised.value)
