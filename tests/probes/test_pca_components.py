"""Principal components: against an SVD, and colours that survive what is arbitrary in them."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from probes.pca import (
    align_maps,
    fit_projection,
    foreground_masks,
    orient_signs,
    to_colours,
    two_means_threshold,
)

ROWS, COLS = 5, 7


def anisotropic(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5])


def maps_of(features: torch.Tensor) -> torch.Tensor:
    """One map of unit variance, as `PCA` makes it before the alignment."""
    projected = fit_projection(features.flatten(0, 1)).apply(features)
    return orient_signs([projected], [everywhere(projected)])[0]


def everywhere(some_map):
    return torch.ones(some_map.shape[:2], dtype=torch.bool)


def colours_of(some_map):
    return to_colours([some_map], [everywhere(some_map)])[0]


def rotation(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dim, dim, generator=generator).double())[0]


def test_components_and_variances_equal_those_of_an_svd_in_float64():
    tokens = anisotropic(200, 5) + 3
    centered = tokens.double().numpy() - tokens.double().numpy().mean(0)
    left, singular, right = np.linalg.svd(centered, full_matrices=False)

    projection = fit_projection(tokens)

    cosines = (projection.components.numpy() * right[:3]).sum(1)
    np.testing.assert_allclose(np.abs(cosines), 1.0, atol=1e-9)
    # Of unit variance and no mean.
    found = projection.apply(tokens[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found * cosines.round(), np.sqrt(200) * left[:, :3], atol=1e-9)
    shares = 100 * singular**2 / (singular**2).sum()
    np.testing.assert_allclose(projection.explained.numpy(), shares[:3], atol=1e-9)
    np.testing.assert_allclose(projection.deviations.numpy(), singular[:3] / np.sqrt(200))
    square = np.square(tokens.double().numpy()).sum()
    assert projection.spread == pytest.approx(100 * (singular**2).sum() / square)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_fewer_dimensions_than_colours_leave_channels_grey_and_no_noise_in_them(dim):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, COLS, min(dim, 2), generator=generator)
    if dim == 4:
        features = features[..., :1] * torch.tensor([1.0, 2.0, -1.0, 0.5])
    filled = 1 if dim == 4 else dim

    projection = fit_projection(features.flatten(0, 1))

    assert projection.components.shape == (3, dim)
    assert float(projection.explained.sum()) == pytest.approx(100)
    assert (projection.explained[filled:] == 0).all()
    assert (projection.apply(features)[..., filled:] == 0).all()
    assert (colours_of(projection.apply(features))[..., filled:] == 128).all()


def test_constant_features_explain_nothing_and_are_grey():
    features = torch.full((2, 3, 5), 0.7)
    features[0, 0] += 1e-8
    projection = fit_projection(features.flatten(0, 1))

    assert projection.is_constant
    assert (projection.explained.sum(), projection.spread) == (0, 0)
    assert (colours_of(projection.apply(features)) == 128).all()


def test_a_sign_is_that_of_the_longer_tail_whatever_the_basis_of_the_features():
    features = anisotropic(ROWS, COLS, 5).pow(2)
    one = maps_of(features)

    np.testing.assert_allclose(maps_of(-features), one, atol=1e-9)
    np.testing.assert_allclose(maps_of(features.double() @ rotation(5)), one, rtol=1e-4, atol=1e-4)
    assert (one.pow(3).sum((0, 1)) > 0).all()


ARBITRARY = {
    "signs": torch.diag(torch.tensor([-1.0, 1.0, -1.0])).double(),
    "order": torch.eye(3).double()[[2, 0, 1]],
    "mixture": rotation(3, seed=4),
}


@pytest.mark.parametrize("name", ARBITRARY)
def test_signs_order_and_mixtures_of_components_change_no_colour(name):
    reference = maps_of(anisotropic(ROWS, COLS, 5))
    block = maps_of(anisotropic(ROWS, COLS, 5) + 0.5 * anisotropic(ROWS, COLS, 5, seed=1))

    first, again = (align_maps([m], [reference])[0] for m in (block, block @ ARBITRARY[name]))

    np.testing.assert_allclose(again, first, atol=1e-9)
    assert (colours_of(again) == colours_of(first)).all()


def test_an_alignment_is_the_turn_nearest_to_the_reference():
    reference = maps_of(anisotropic(ROWS, COLS, 5))
    block = maps_of(anisotropic(ROWS, COLS, 5) + anisotropic(ROWS, COLS, 5, seed=1))

    turned = align_maps([block], [reference])[0]

    np.testing.assert_allclose(turned.norm(dim=-1), block.norm(dim=-1), atol=1e-9)
    best = (turned - reference).square().sum()
    for seed in range(50):
        other = turned @ rotation(3, seed)
        assert (other - reference).square().sum() >= best - 1e-9


def test_maps_of_several_images_are_turned_together_at_any_resolution():
    references = [maps_of(anisotropic(ROWS, COLS, 5, seed=s)) for s in range(2)]
    fine = interpolate(references[1].permute(2, 0, 1)[None], size=(7, 12), mode="bilinear")[0]
    maps = [references[0], fine.permute(1, 2, 0)]

    turned = align_maps([one @ ARBITRARY["mixture"] for one in maps], references)
    alone = align_maps([maps[0] @ ARBITRARY["mixture"], maps[1]], references)

    for found, expected in zip(turned, maps, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)
    assert not torch.allclose(alone[0], references[0])


def test_colours_stretch_each_channel_over_all_maps_from_the_first_to_the_99th_percentile():
    values = torch.arange(101, dtype=torch.float64)[:, None, None].expand(101, 1, 3)
    # Patches outside the mask are black, and do not affect the range.
    outside = torch.full((30, 1, 3), 1000.0, dtype=torch.float64)
    maps = [values[:50], torch.cat([outside, values[50:]])]

    colours = to_colours(maps, [one[..., 0] < 1000 for one in maps])

    low, high = (one[..., 0].flatten() for one in colours)
    assert low[:3].tolist() == [0, 0, round(255 / 98)]
    assert not high[:30].any()
    assert high[-2:].tolist() == [255, 255]
    assert high[30] == round(255 * 49 / 98)


def test_the_threshold_between_two_groups_has_the_least_squared_distances():
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    ordered = values.sort().values.numpy()
    costs = [k * ordered[:k].var() + (40 - k) * ordered[k:].var() for k in range(1, 40)]
    k = int(np.argmin(costs)) + 1
    assert two_means_threshold(values) == pytest.approx((ordered[k - 1] + ordered[k]) / 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_of_two_clusters_the_one_away_from_the_border_is_the_foreground(sign):
    features = 0.01 * torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))
    features[2:4, 3:6] += sign * torch.tensor([4.0, 0.0, 1.0, 0.0])

    (mask,) = foreground_masks([features])
    (whole,) = foreground_masks([torch.full((3, 4, 5), 2.0)])

    assert whole.all(), "constant features have no background"
    expected = torch.zeros(6, 8, dtype=torch.bool)
    expected[2:4, 3:6] = True
    assert (mask == expected).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_cluster_that_fills_the_lower_border_is_the_background(sign):
    features = 0.01 * torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(0))
    features[5:] += sign * torch.tensor([4.0, 0.0, 1.0, 0.0])

    (mask,) = foreground_masks([features])

    # Of the 28 patches on the border 12 are in the cluster, of all 64 patches 24.
    assert mask[:5].all()
    assert not mask[5:].any()
