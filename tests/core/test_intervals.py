"""Test the confidence intervals of scores."""

import numpy as np
import pytest
import scipy.stats
from scipy.special import expit

from ssl_bench.intervals import (
    FEW_IMAGES,
    Bootstrap,
    Proportion,
    bootstrap_estimate,
    few_images_warning,
    mean_estimate,
    mean_iou_estimate,
    pixel_accuracy_estimate,
)
from ssl_bench.scores import average_precision

RANDOM = np.random.default_rng(0)


def hits(right, wrong):
    return np.arange(right + wrong) < right


def some_counts(images=12, classes=5):
    true = RANDOM.integers(1, 90, (images, classes)) * (RANDOM.random((images, classes)) < 0.6)
    # The last two classes occur only in the first image.
    true[1:, -2:] = 0
    right = (true * RANDOM.random(true.shape)).astype(int)
    predicted = right + RANDOM.integers(0, 20, true.shape)
    return np.stack([right, predicted, true], 1).astype(np.int32)


def miou(counts, classes=slice(None)):
    found = []
    for right, predicted, true in counts.sum(0, dtype=np.float64)[:, classes].T:
        union = predicted + true - right
        found += [100 * right / union] if union else []
    return float(np.mean(found))


def test_intervals_of_shares_are_those_of_clopper_and_pearson():
    # If the true share is 0.025^(1 / 10), ten of ten hits have a probability of 0.025.
    assert Proportion(hits(10, 0)).ci95() == pytest.approx((69.1503, 100))
    assert Proportion(hits(0, 3)).ci95() == pytest.approx((0, 70.7598))
    exact = scipy.stats.binomtest(7, 26).proportion_ci()
    assert Proportion(hits(7, 19)).ci95() == pytest.approx((100 * exact.low, 100 * exact.high))


def test_the_mean_iou_of_two_images_equals_the_hand_count():
    # The IoUs of the images are 1 / 2 and 3 / 4. Both images together have 4 / 6.
    found = mean_iou_estimate(np.array([[[1], [1], [2]], [[3], [4], [3]]], np.int32))

    assert found.value == pytest.approx(200 / 3)
    assert found.leave_one_out.tolist() == [75, 50]
    assert found.correction == pytest.approx(200 / 3 - 62.5)
    assert found.margin == pytest.approx(12.5 * 12.7062, rel=1e-5)
    assert found.ci95() == (0, 100)


def test_the_interval_equals_a_loop_over_images_in_numpy():
    counts = np.concatenate([some_counts(40), some_counts(40)])
    total = len(counts)

    def jackknife(score):
        without = np.array([score(np.delete(counts, image, 0)) for image in range(total)])
        pseudo = total * score(counts) - (total - 1) * without
        spread = scipy.stats.t.ppf(0.975, total - 1) * pseudo.std(ddof=1) / total**0.5
        return score(counts), pseudo.mean() - score(counts), spread

    value, correction, spread = jackknife(miou)
    of_true = miou(counts, counts[:, 2].sum(0) > 0)
    ends = (value + min(0, correction) - spread, of_true + max(0, correction) + spread)
    assert mean_iou_estimate(counts).ci95() == pytest.approx(ends, rel=1e-12)
    value, _, spread = jackknife(lambda of: 100 * of[:, 0].sum() / of[:, 2].sum())
    ends = (value - spread, value + spread)
    assert pixel_accuracy_estimate(counts).ci95() == pytest.approx(ends)


def test_intervals_include_mean_iou_without_a_falsely_predicted_class():
    counts = some_counts(80)
    wrong = counts.copy()
    wrong[0] += np.array([[0], [5], [0]]) * (np.arange(5) == 4)
    wrong[:, [0, 2], 4] = counts[:, [0, 2], 4] = counts[:, 1, 4] = 0

    before, after = mean_iou_estimate(counts), mean_iou_estimate(wrong)

    assert after.value == pytest.approx(0.8 * before.value)
    assert after.over_true_classes == pytest.approx(before.value)
    low, high = after.ci95() or (0, 0)
    assert low == pytest.approx(after.value + min(0, after.correction) - after.margin)
    assert high >= before.value + after.margin


@pytest.mark.filterwarnings("error")
def test_single_or_identical_images_have_no_interval():
    counts = some_counts()

    assert mean_iou_estimate(counts[:1]).ci95() is None
    assert mean_iou_estimate(np.repeat(counts[:1], 9, 0)).ci95() is None
    assert mean_iou_estimate(np.zeros_like(counts)).ci95() is None
    assert mean_estimate(np.array([7.0])).ci95() is None
    assert mean_estimate(np.full(5, 0.1)).ci95() is None
    assert mean_iou_estimate(counts).difference_ci95(mean_iou_estimate(counts)) is None


def population(classes, images=1500):
    random = np.random.default_rng(classes)
    shown = random.random((images, classes)) < 0.6 / np.arange(1, classes + 1)
    shown[:, 0] |= ~shown.any(1)
    area = shown * np.exp(1.5 * random.normal(size=shown.shape))
    area = np.rint(10_000 * area / area.sum(1, keepdims=True))
    skill = random.normal(size=classes) + random.normal(size=(images, 1))
    right = np.rint(area * expit(skill + random.normal(size=shown.shape)))
    # Missed pixels of a class are predicted as the next class, even if the image has none.
    predicted = right + np.roll(area - right, 1, axis=1)
    return np.stack([right, predicted, area], 1).astype(np.int32)


# Percentile bootstrap intervals would contain the true value in 47 and 8 of these 60 cases.
@pytest.mark.parametrize("classes", [21, pytest.param(150, marks=pytest.mark.slow)])
def test_nine_of_ten_intervals_contain_the_true_mean_iou(classes):
    whole = population(classes)
    random = np.random.default_rng(0)

    samples = [whole[random.integers(len(whole), size=60)] for _ in range(60)]
    ends = [mean_iou_estimate(sample).ci95() or (0, 0) for sample in samples]

    assert sum(low <= miou(whole) <= high for low, high in ends) >= 54


def test_a_bootstrap_interval_is_symmetric_in_the_log_odds():
    sample_scores = np.array([10.0, 20.0, 30.0])
    margin = scipy.stats.t.ppf(0.975, 8) * sample_scores.std() * np.sqrt(9 / 8)
    odds, around = np.log(0.2 / 0.8), margin / 100 / (0.2 * 0.8)
    ends = [100 / (1 + np.exp(-(odds + sign * around))) for sign in (-1, 1)]

    found = Bootstrap(20.0, sample_scores, 9)

    assert found.ci95() == pytest.approx(ends)
    other = Bootstrap(15.0, np.zeros(3), 9)
    assert found.difference_ci95(other) == pytest.approx((5 - margin, 5 + margin))
    assert Bootstrap(20.0, np.full(3, 20.0), 9).ci95() is None
    assert Bootstrap(0.0, sample_scores, 9).ci95() is None
    assert Bootstrap(20.0, sample_scores, 1).ci95() is None


def boxes(images=2000):
    random = np.random.default_rng(1)
    counts = np.zeros((images, 4, 2), np.int64)
    # Row 0 counts the true boxes. Rows 1 to 3 count a predicted box, and if it is correct.
    counts[:, 0, 0] = left = 1 + random.poisson(1.4, images)
    skill, found = expit(random.normal(-2, 1.3, images)), random.integers(1, 4, images)
    for rank, chance in enumerate((1, 0.6, 0.4)):
        right = (rank < found) & (left > 0) & (random.random(images) < chance * skill)
        counts[:, 1 + rank] = np.stack([rank < found, right], 1)
        left = left - right
    return counts


def test_bootstraps_of_equally_many_images_draw_the_same_samples():
    counts = RANDOM.integers(0, 50, (9, 1))

    one, other = (
        bootstrap_estimate(some, lambda summed: 1.0 * summed[..., 0])
        for some in (counts, counts + 3)
    )

    assert (other.sample_scores - one.sample_scores).tolist() == [27.0] * len(one.sample_scores)
    assert np.ptp(one.sample_scores) > 0


# Percentile intervals of the same samples would contain the true value 37 times.
def test_intervals_of_average_precision_contain_the_true_value():
    whole = boxes()
    truth, random = float(average_precision(whole.sum(0))), np.random.default_rng(0)

    samples = [whole[random.integers(len(whole), size=26)] for _ in range(40)]
    ends = [bootstrap_estimate(one, average_precision).ci95() or (0, 0) for one in samples]

    assert sum(low <= truth <= high for low, high in ends) >= 39


def test_intervals_and_p_values_of_means_use_students_t():
    one, other = RANDOM.normal(50, 9, (2, 25))
    ends = scipy.stats.t.interval(0.95, 24, one.mean(), one.std(ddof=1) / 5)
    assert mean_estimate(one).ci95() == pytest.approx(ends)

    found = mean_estimate(one).difference_p(mean_estimate(other))

    assert found == pytest.approx(scipy.stats.ttest_rel(one, other).pvalue)
    assert np.isnan(mean_estimate(one[:1]).difference_p(mean_estimate(other[:1])))
    assert np.isnan(mean_estimate(one).difference_p(mean_estimate(one)))
    assert few_images_warning(FEW_IMAGES) == []
    assert len(few_images_warning(FEW_IMAGES - 1)) == 1


def test_p_is_below_5_percent_exactly_if_intervals_exclude_0():
    sides = set()
    for shift in np.linspace(0, 0.6, 20):
        hits = RANDOM.random((2, 30)) < np.array([[0.2 + shift], [0.2]])
        boxes = np.zeros((2, 12, 2, 2), np.int64)
        boxes[:, :, 0, 0], boxes[:, :, 1, 0] = 2, 1
        boxes[:, :, 1, 1] = RANDOM.random((2, 12)) < np.array([[0.3 + shift], [0.3]])
        pairs = [
            tuple(map(Proportion, hits)),
            tuple(mean_estimate(50.0 + 40 * some) for some in hits),
            tuple(bootstrap_estimate(some, average_precision) for some in boxes),
        ]
        for kind, (one, other) in enumerate(pairs):
            interval, p = one.difference_ci95(other), one.difference_p(other)
            if interval is None:
                assert np.isnan(p)
                continue
            is_significant = interval[0] > 0 or interval[1] < 0
            assert is_significant == (p < 0.05)
            assert p == pytest.approx(other.difference_p(one))
            sides.add((kind, is_significant))
    assert len(sides) == 6
