"""Test the scores that describe the distribution of features."""

import math

import numpy as np
import pytest
import sklearn.linear_model
import torch

from probes.features.moments import Moments
from probes.geometry import (
    PENALTIES,
    PositionRegression,
    alignment,
    centred_positions,
    outlier_share,
    patch_cosine,
    uniformity,
)
from probes.spectra import SHARE_EPS, alpha_req, centred_effective_rank, lidar, rankme
from tests.support.matrices import normal

CROSS = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()


def moments(vectors):
    return Moments().add(vectors)


def moments_with_variances(variances):
    axes = torch.diag(torch.tensor(variances).double().sqrt())
    return moments(torch.cat([axes, -axes]))


def test_ranks_of_two_singular_values_equal_hand_computations():
    # The shares are 3/4 and 1/4. Without their mean, the vectors lie on a line.
    vectors = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    assert rankme(moments(vectors)) == pytest.approx(4 / 3**0.75, abs=1e-5)
    assert centred_effective_rank(moments(vectors)) == pytest.approx(1)
    assert centred_effective_rank(moments_with_variances([9.0, 1.0])) == pytest.approx(4 / 3**0.75)


def entropy_rank(values, raised=0.0):
    shares = values / values.sum() + raised
    return float((-shares * shares.log()).sum().exp())


def test_rounding_does_not_raise_the_rank_of_few_images():
    # Without a threshold, the 92 zero eigenvalues would have singular values near 1e-8.
    few = normal(8, 100).float()

    expected = entropy_rank(torch.linalg.svdvals(few.double()), SHARE_EPS)
    assert rankme(moments(few)) == pytest.approx(expected)
    assert 6 < centred_effective_rank(moments(few)) <= 7
    low = (normal(300, 3) @ normal(3, 100, seed=1)).float()
    assert rankme(moments(low)) < 3.001


def test_a_power_law_has_its_exponent_over_any_range():
    law = moments_with_variances([rank**-1.5 for rank in range(1, 21)])
    for ranks in ((1, 20), (3, 20), (2, 9)):
        assert alpha_req(law, ranks) == (pytest.approx(1.5), ranks)
    # The range ends at the last positive variance. A slope needs two of them.
    law = moments_with_variances([*(rank**-1.0 for rank in range(1, 7)), 0.0, 0.0])
    assert alpha_req(law, (3, 100)) == (pytest.approx(1.0), (3, 6))
    for first in (6, 11):
        assert math.isnan(alpha_req(law, (first, 100))[0])


def test_the_slope_is_weighted_by_one_over_the_rank():
    variances, ranks = [5.0, 2.0, 1.0, 0.1, 0.07, 0.01], np.arange(2, 6)
    line = sklearn.linear_model.LinearRegression()
    line.fit(-np.log(ranks)[:, None], np.log(variances[1:5]), sample_weight=1 / ranks)

    assert alpha_req(moments_with_variances(variances), (2, 5))[0] == pytest.approx(line.coef_[0])


def test_lidar_equals_a_computation_by_hand():
    assert lidar(CROSS[:, None] + CROSS, delta=1e-12) == pytest.approx(2)
    # Along one axis, the ratio of the variances between images and views is a ninth of that along
    # the other axis. The shares are 0.9 and 0.1.
    tripled = CROSS * torch.tensor([1.0, 3.0])
    by_hand = math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert lidar(CROSS[:, None] + tripled, delta=1e-12) == pytest.approx(by_hand)


def radio_rank(values, eps=1e-7):
    values = values[values > 0]
    shares = values / (values.sum() + eps)
    return float((-shares * shares.log()).sum().exp())


def compute_lidar_eigenvalues(views, *, delta, divisor, delta_of_product):
    """Compute the eigenvalues of the LiDAR metric from a matrix square root."""
    means = views.mean(1)
    away = means - means.mean(0)
    between = away.T @ away / (len(views) - 1)
    around = (views - means[:, None]).flatten(0, 1)
    within = around.T @ around / divisor + delta * torch.eye(views.shape[-1]).double()
    sizes, axes = torch.linalg.eigh(within)
    root = axes @ torch.diag(sizes**-0.5) @ axes.T
    product = root @ between @ root + delta_of_product * torch.eye(len(root)).double()
    return torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0)


@pytest.mark.parametrize(("images", "dim"), [(50, 12), (9, 24)])
def test_ranks_agree_with_radio_and_stable_pretraining_on_one_matrix(images, dim):
    means = normal(images, dim) * torch.linspace(3, 0.1, dim)
    views = means[:, None] + 0.3 * normal(10, dim)
    views = views + 0.2 * normal(images, 10, dim, seed=2) @ normal(dim, dim, seed=3)

    # https://github.com/galilai-group/stable-pretraining/tree/d15ec96d/stable_pretraining/callbacks
    # Its constant is 100 times larger than ours.
    theirs = entropy_rank(torch.linalg.svdvals(views[:, 0]), 1e-5)
    assert rankme(moments(views[:, 0])) == pytest.approx(theirs, rel=5e-3)
    values = compute_lidar_eigenvalues(views, delta=1e-4, divisor=images * 9, delta_of_product=0)
    # The paper adds a constant to the shares, and stable-pretraining to the eigenvalues.
    expected = entropy_rank(values, SHARE_EPS)
    assert lidar(views, delta=1e-4) == pytest.approx(expected, rel=1e-9)
    assert lidar(views, delta=1e-4) == pytest.approx(entropy_rank(values + 1e-8), rel=1e-4)

    # https://github.com/NVlabs/RADIO/blob/25a833de/examples/ssl_metrics.py
    theirs = radio_rank(torch.linalg.svdvals(views[:, 0]))
    assert rankme(moments(views[:, 0])) == pytest.approx(theirs, abs=1e-3)
    values = compute_lidar_eigenvalues(
        views, delta=1e-8, divisor=images * 10 - 1, delta_of_product=1e-8
    )
    # RADIO adds no constant to the shares. With 24 dimensions, 16 eigenvalues are 0.
    assert lidar(views, delta=1e-8) == pytest.approx(radio_rank(values), rel=5e-5)


def test_alignment_and_uniformity_equal_values_computed_by_hand():
    assert uniformity(CROSS).value == pytest.approx(math.log((4 * math.e**-4 + 2 * math.e**-8) / 6))
    assert uniformity(CROSS).value == pytest.approx(-4.396, abs=5e-4)
    assert uniformity(5 * CROSS[:2]).value == pytest.approx(-8)
    # Two of three views are equal, and the third is their opposite: (0 + 4 + 4) / 3.
    views = torch.stack([CROSS[[0, 0, 1]], 3 * CROSS[[2, 2, 2]], CROSS[[0, 2, 2]]])
    np.testing.assert_allclose(alignment(views), [8 / 3, 0, 4 / 3], atol=1e-12)
    np.testing.assert_allclose(alignment(views[:, 1:]), [4, 0, 0], atol=1e-12)


def test_leave_one_out_uniformity_equals_that_of_the_other_images():
    # With so many vectors, the distances are computed in several pieces.
    vectors = normal(1030, 3)
    left = uniformity(vectors).leave_one_out

    others = torch.cat([vectors[:6], vectors[7:]])
    assert left[6] == pytest.approx(uniformity(others).value)


def test_constant_or_zero_vectors_have_undefined_estimates():
    one, same = torch.ones(1, 3), torch.full((5, 3), 0.1)
    zero = torch.zeros(5, 3)
    assert [rankme(moments(some)) for some in (one, same)] == pytest.approx([1, 1], abs=1e-4)
    assert math.isnan(rankme(moments(zero)))
    for some in (one, same, zero):
        assert math.isnan(centred_effective_rank(moments(some)))
        assert math.isnan(alpha_req(moments(some), (1, 3))[0])
        assert math.isnan(lidar(some[:, None].expand(-1, 4, -1).double(), delta=1e-4))
    assert math.isnan(uniformity(one.double()).value)
    assert math.isnan(uniformity(zero.double()).value)
    assert np.isnan(alignment(zero[None].double())).all()
    assert uniformity(same.double()).value == pytest.approx(0)


def test_outliers_equal_a_count_by_hand():
    lengths = torch.tensor([[1.0, 1.0, 1.0, 9.0], [1.0, 3.0, 5.0, 5.0], [2.0, 2.0, 2.0, 8.0]])
    patches = torch.stack([lengths, torch.zeros_like(lengths)], -1).view(3, 2, 2, 2)

    assert outlier_share(patches, 4.0).tolist() == [25, 0, 0]
    assert outlier_share(100 * patches, 4.0).tolist() == [25, 0, 0]
    # The median of the second image is 4, the mean of its two middle lengths.
    assert outlier_share(patches, 1.4).tolist() == [25, 0, 25]


def test_cosines_of_tokens_with_patches_equal_hand_computations():
    patches = torch.tensor([[3.0, 0.0], [0.0, 2.0]]).view(1, 1, 2, 2)
    assert patch_cosine(torch.tensor([[[5.0, 0.0]]]), patches).tolist() == [0.5]
    two = torch.tensor([[[5.0, 0.0], [0.0, -1.0]]])
    assert patch_cosine(two, patches).item() == pytest.approx(0)
    assert patch_cosine(torch.ones(1, 1, 2), patches).item() == pytest.approx(0.5**0.5)


def position_r2(fitted, choosing, held_out):
    regression = PositionRegression()
    for part, images in (("train", fitted), ("selection", choosing)):
        for batch in images.split(2):
            regression.add(batch, part)
    regression.add(held_out, "test")
    assert regression.model is not None
    return regression.model, torch.cat(regression.r2)


def test_only_tokens_that_encode_their_position_predict_it():
    names = torch.eye(6).view(1, 2, 3, 6).expand(4, -1, -1, -1)
    fit, share = position_r2(names, names, names)
    assert (fit.penalty, share.tolist()) == (1e-6, pytest.approx([1] * 4, abs=1e-4))

    same = torch.full((4, 2, 3, 5), 0.1)
    assert position_r2(same, same, same)[1].tolist() == pytest.approx([0] * 4, abs=1e-9)
    alone = normal(4, 1, 1, 5)
    assert position_r2(alone, alone, alone)[1].isnan().all()
    # A single row or column of patches has only one coordinate to predict.
    for shape in ((1, 3, 3), (3, 1, 3)):
        line = torch.eye(3).view(1, *shape).expand(4, -1, -1, -1)
        assert position_r2(line, line, line)[1].tolist() == pytest.approx([1] * 4, abs=1e-4)


def test_rows_and_columns_have_the_same_weight():
    # Tokens that encode only their row explain half of the variance for any shape.
    down = torch.arange(3.0).view(1, 3, 1, 1).expand(4, 3, 5, 1)
    assert position_r2(down, down, down)[1].tolist() == pytest.approx([0.5] * 4, abs=1e-4)
    places = centred_positions(3, 2, torch.device("cpu"))
    np.testing.assert_allclose(places[:3] + 0.5, [[1 / 6, 0.25], [1 / 6, 0.75], [0.5, 0.25]])


def test_positions_equal_those_of_a_plain_ridge_regression():
    places = centred_positions(3, 4, torch.device("cpu"))
    tokens = places @ normal(2, 7) + 0.4 * normal(20, 12, 7, seed=1) * torch.linspace(0.1, 9, 7)
    tokens = tokens + 5
    # The images that select the penalty are shifted, so that a large penalty is better.
    tokens[9:14] += normal(5, 1, 7, seed=4).mean(0)
    parts = tokens[:9], tokens[9:14], tokens[14:]
    fit, share = position_r2(*(part.unflatten(1, (3, 4)) for part in parts))

    def ridge(images, penalty):
        flat = images.flatten(0, 1).numpy()
        mean, scale = flat.mean(0), flat.std(0)
        model = sklearn.linear_model.Ridge(alpha=penalty * len(flat))
        model.fit((flat - mean) / scale, places.repeat(len(images), 1).numpy())
        return lambda some: model.predict((some.flatten(0, 1).numpy() - mean) / scale)

    def error(predict, images):
        truth = places.repeat(len(images), 1).numpy()
        return ((predict(images) - truth) ** 2).reshape(len(images), -1, 2).sum(1)

    penalty = min(PENALTIES, key=lambda one: error(ridge(parts[0], one), parts[1]).sum())
    predict = ridge(torch.cat(parts[:2]), penalty)
    spread = places.square().sum(0).numpy()
    assert fit.penalty == penalty
    np.testing.assert_allclose(share, 1 - (error(predict, parts[2]) / spread).mean(1), rtol=1e-8)
