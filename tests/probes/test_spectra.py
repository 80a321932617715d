"""Test condition numbers, effective ranks and CKA."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from probes.conditioning.scores import (
    linear_cka,
    linear_cka_ci95,
    mean_cosine,
    median_with_ci95,
)
from probes.spectra import condition_number
from ssl_bench.intervals import interval_contains
from tests.support.matrices import condition, normal, rank


def test_condition_numbers_and_effective_ranks_equal_hand_computations():
    for matrix, number, effective in (
        # A^T A = [[25, 20], [20, 25]]: singular values sqrt(45) and sqrt(5), shares 3/4 and 1/4.
        ([[3.0, 0.0], [4.0, 5.0]], 3, 4 / 3**0.75),
        ([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], 2, 2**1.5),
        # The shorter side of a rectangular matrix determines the number of singular values.
        ([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]], 3, 4 / 3**0.75),
        ([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]], 3, 4 / 3**0.75),
        # This matrix would be singular in float32.
        ([[1.0, 0.0], [0.0, 1e-12]], 1e12, 1),
    ):
        values = torch.tensor(matrix).double()
        assert condition(values) == pytest.approx(number)
        assert rank(values) == pytest.approx(effective)


@pytest.mark.parametrize("rows", [3, 200])
def test_a_singular_matrix_has_an_infinite_condition_number(rows):
    one = torch.outer(torch.arange(1.0, rows + 1), torch.tensor([1.0, -2.0, 0.5]))
    assert (condition(one), rank(one)) == (math.inf, pytest.approx(1))
    zero = torch.zeros(rows, 3)
    assert (condition(zero), rank(zero)) == (math.inf, 0)
    two = one.clone()
    two[0] = torch.tensor([0.0, 1.0, 7.0])
    assert condition(two) == math.inf
    assert 1 < rank(two) < 2


def test_the_threshold_of_a_singular_matrix_grows_with_its_size():
    # 1e-14 is 45.04 times the epsilon of float64.
    values = torch.tensor([3.0, 3e-14], dtype=torch.float64)
    for size, number in ((2, 1e14), (45, 1e14), (46, math.inf)):
        assert float(condition_number(values, size)) == pytest.approx(number)


def test_mean_cosine_equals_a_computation_by_hand():
    tokens = torch.tensor([[2.0, 0.0], [0.0, 5.0], [3.0, 3.0]])
    assert mean_cosine(tokens) == pytest.approx(2 * 0.5**0.5 / 3)
    assert mean_cosine(torch.full((4, 3), 2.0)) == pytest.approx(1)
    assert mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0]])) == 0
    assert math.isnan(mean_cosine(torch.ones(1, 3)))


def test_the_median_and_its_interval_equal_hand_computations():
    numbers = np.array([[1.0, 2.0], [3.0, np.inf], [4.0, 5.0]])
    assert median_with_ci95(numbers) == (3.5, (1.5, math.inf))
    assert median_with_ci95(np.full((2, 1), np.inf)) == (math.inf, (math.inf, math.inf))
    assert median_with_ci95(np.array([[7.0]])) == (7, None)
    assert math.isnan(median_with_ci95(np.array([[1.0], [np.nan]]))[0])
    # P(at most one of eight images lies below the median) = 9 / 256 > 0.025 > 1 / 256.
    (_, eight), (_, nine) = (median_with_ci95(np.arange(float(n))[:, None]) for n in (8, 9))
    assert (eight, nine) == ((0, 7), (1, 7))


def gram_cka(x, y):
    """Compute CKA directly from the centred Gram matrices."""
    one, other = (a.reshape(-1, a.shape[-1]).double().numpy() for a in (x, y))
    centring = np.eye(len(one)) - 1 / len(one)
    k, m = (centring @ a @ a.T @ centring for a in (one, other))
    return np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m))


def test_cka_equals_that_of_centred_gram_matrices():
    x, y = normal(3, 5, 4) + 7, normal(3, 5, 6, seed=1) - 2
    y[..., :2] += 3 * x[..., :2]
    assert linear_cka(x, y) == pytest.approx(gram_cka(x, y), rel=1e-12)
    assert 0.1 < linear_cka(x, y) < 0.99


def test_cka_is_1_for_equal_and_undefined_for_constant_tokens():
    x, constant = normal(2, 5, 3), torch.full((2, 5, 3), 0.1)
    assert linear_cka(x, x) == pytest.approx(1)
    assert math.isnan(linear_cka(constant, x))
    assert linear_cka_ci95(constant, x) is None


def test_the_interval_of_cka_is_the_jackknife_of_its_logit():
    x, y = normal(4, 6, 3) + normal(4, 1, 3, seed=5), normal(4, 6, 2, seed=1)
    y[..., 0] += 2 * x[..., 0]
    logit, images = scipy.special.logit, np.arange(4)
    without = [logit(gram_cka(x[images != i], y[images != i])) for i in images]
    pseudo = 4 * logit(gram_cka(x, y)) - 3 * np.array(without)
    ends = scipy.stats.t.interval(0.95, 3, pseudo.mean(), pseudo.std(ddof=1) / 2)
    assert linear_cka_ci95(x, y) == pytest.approx(scipy.special.expit(ends), rel=1e-9)
    assert linear_cka_ci95(x, x) is None


@pytest.mark.parametrize(("dim", "has_any"), [(64, False), (16, True)])
def test_cka_of_too_few_tokens_has_no_interval(dim, has_any):
    def draw(images, seed):
        x, noise = (
            normal(images, 16, dim, seed=s) + normal(images, 1, dim, seed=s + 1)
            for s in (seed, seed + 2)
        )
        return x, 2 * x + noise

    truth, pairs = linear_cka(*draw(2000, 0)), [draw(8, 4 * seed) for seed in range(100, 140)]
    found = [(linear_cka(*pair), linear_cka_ci95(*pair)) for pair in pairs]
    ends = [one for _, one in found if one is not None]

    # In 64 dimensions, the value is 0.94 although the true CKA is 0.80.
    assert bool(ends) == has_any
    assert all(interval_contains(one, value) for value, one in found)
    assert sum(low <= truth <= high for low, high in ends) >= 0.9 * len(ends)
