"""Compute 95 % confidence intervals of scores, and p-values of differences between scores.

The images are treated as a random sample, so an interval estimates the score on infinitely many
images of the same kind. results/tables/intervals.md compares the coverage of these intervals with
the coverage of alternative intervals in simulations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float64, Integer, Shaped

from ssl_bench.scores import iou_from_counts, nanmean, pixel_accuracy

Interval = tuple[float, float]
_PerImage = Shaped[np.ndarray, "images *values"]
_Score = Callable[[Shaped[np.ndarray, "..."]], Float64[np.ndarray, "*some"]]

FEW_IMAGES = 60
"""Intervals of mean IoU from fewer images may cover the true value in less than 90 % of cases."""

_TAIL = 0.025

SIGNIFICANCE_LEVEL = 2 * _TAIL
"""Significance level. Differences with a lower p-value have a 95 % interval that excludes 0."""

_DRAWS, _DRAWS_AT_ONCE = 1000, 50
# Score differences below this number of percentage points are rounding errors.
_NO_CHANGE = 1e-9


@runtime_checkable
class Estimate(Protocol):
    """A score in percent, with the data from which its confidence interval is computed."""

    @property
    def value(self) -> float: ...

    def ci95(self) -> Interval | None:
        """Return the 95 % confidence interval, or None if it cannot be computed.

        For example, the interval of a mean is None if all images have the same value.
        """
        ...

    def difference_ci95(self, other: Any) -> Interval | None:
        """Return the 95 % confidence interval of the difference `self` minus `other`.

        Both scores must be computed on the same images. The result is None if the interval cannot
        be computed.
        """
        ...

    def difference_p(self, other: Any) -> float:
        """Return the two-sided p-value of the difference `self` minus `other`.

        The p-value is the smallest significance level at which the confidence interval of the
        difference excludes 0. The p-value is NaN if the difference has no interval.
        """
        ...


@dataclass(frozen=True, eq=False)
class Proportion:
    """A metric that is the percentage of images with a correct result (hits)."""

    hits: Bool[np.ndarray, " images"]

    @property
    def value(self) -> float:
        return 100.0 * float(self.hits.mean())

    def ci95(self) -> Interval:
        """Return the exact 95 % confidence interval, in percent.

        The interval contains the true percentage in at least 95 % of all samples of images.

        Source: Clopper and Pearson, Biometrika 26, 1934.
        """
        # scipy is imported in functions, because tables without intervals do not need it.
        from scipy.special import betaincinv

        hits, misses = int(self.hits.sum()), int((~self.hits).sum())
        low = betaincinv(hits, misses + 1, _TAIL) if hits else 0.0
        high = betaincinv(hits + 1, misses, 1 - _TAIL) if misses else 1.0
        return 100.0 * float(low), 100.0 * float(high)

    def difference_ci95(self, other: "Proportion") -> Interval:
        """Return the adjusted Wald interval of the difference `self` minus `other`, in percent.

        Both percentages must be computed on the same images, so the two proportions are paired.

        Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37, 2012.
        """
        from scipy.special import ndtri

        difference, error = self._difference(other)
        center, margin = 100.0 * difference, -100.0 * float(ndtri(_TAIL) * error)
        return max(center - margin, -100.0), min(center + margin, 100.0)

    def difference_p(self, other: "Proportion") -> float:
        from scipy.special import ndtr

        difference, error = self._difference(other)
        return 2 * float(ndtr(-abs(difference) / error))

    def _difference(self, other: "Proportion") -> tuple[float, float]:
        """Return the difference of the proportions `self` minus `other`, and its standard error.

        The adjusted Wald interval requires that two artificial images are added to the sample. The
        first artificial image is correct only for `self`, and the second only for `other`.
        """
        total = len(self.hits) + 2
        gained = (int((self.hits & ~other.hits).sum()) + 1) / total
        lost = (int((~self.hits & other.hits).sum()) + 1) / total
        return gained - lost, np.sqrt((gained + lost - (gained - lost) ** 2) / total)


class _StudentT:
    """Base class of score estimates whose differences are tested by Student's t distribution.

    Subclasses define `value` (percent), `num_images`, `_subtract` (difference of two estimates) and
    `margin`. The margin is half of the width of the confidence interval, or NaN without one.
    """

    def difference_ci95(self: Any, other: Any) -> Interval | None:
        """Return the 95 % confidence interval of the difference `self` minus `other`.

        Both scores must be computed on the same images. If both scores are biased in the same
        direction, most of the bias cancels in their difference.
        """
        difference = self._subtract(other)
        return _clip_interval(
            difference.value - difference.margin, difference.value + difference.margin, least=-100.0
        )

    def difference_p(self: Any, other: Any) -> float:
        from scipy.special import stdtr, stdtrit

        difference, others = self._subtract(other), self.num_images - 1
        if math.isnan(difference.margin):
            return math.nan
        t = stdtrit(others, _TAIL) * abs(difference.value) / difference.margin
        return 2 * float(stdtr(others, t))


@dataclass(frozen=True, eq=False)
class Jackknife(_StudentT):
    """Jackknife estimate of a score in percent.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11.

    Attributes:
        value: The score on all images.
        leave_one_out: For each image, the score on all images except this one.
    """

    value: float
    leave_one_out: Float64[np.ndarray, " images"]

    @property
    def correction(self) -> float:
        """Return the jackknife's bias correction, which reduces the bias if added to `value`."""
        return (len(self.leave_one_out) - 1) * (self.value - float(self.leave_one_out.mean()))

    @property
    def margin(self) -> float:
        from scipy.special import stdtrit

        others = len(self.leave_one_out) - 1
        if not others or not np.ptp(self.leave_one_out) > _NO_CHANGE:
            return np.nan
        return -float(stdtrit(others, _TAIL) * np.sqrt(others * self.leave_one_out.var()))

    def ci95(self) -> Interval | None:
        return _clip_interval(self.value - self.margin, self.value + self.margin, least=0.0)

    @property
    def num_images(self) -> int:
        return len(self.leave_one_out)

    def _subtract(self, other: "Jackknife") -> "Jackknife":
        return Jackknife(self.value - other.value, self.leave_one_out - other.leave_one_out)


@dataclass(frozen=True, eq=False)
class MeanIoU(Jackknife):
    """Jackknife estimate of a dataset's mean IoU.

    Mean IoU is biased downwards if there are few images and many classes.

    Attributes:
        over_true_classes: Mean IoU over the classes that occur in the ground truth. `value` also
            includes classes that occur only in the prediction, with an IoU of 0.
    """

    over_true_classes: float

    def ci95(self) -> Interval | None:
        """Return a 95 % confidence interval, widened by the bias correction.

        A class that occurs only in the predictions has an IoU of 0, but might have a higher IoU on
        more images. The lower end of the interval is therefore computed from `value`, which
        includes such predicted classes. The upper end is computed from `over_true_classes`, which
        leaves out classes that occur only in the predictions. The interval covers the mean IoU on
        infinitely many images, and also on other image sets of the same size.
        """
        low = self.value + min(self.correction, 0.0) - self.margin
        high = self.over_true_classes + max(self.correction, 0.0) + self.margin
        return _clip_interval(low, high, least=0.0)


@dataclass(frozen=True, eq=False)
class Bootstrap(_StudentT):
    """Bootstrap estimate of a score in percent.

    The bootstrap samples depend only on the number of images. Two scores of the same images
    therefore use the same bootstrap samples.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.

    Attributes:
        value: The score of all images.
        sample_scores: The score of each bootstrap sample.
        num_images: Number of images.
    """

    value: float
    sample_scores: Float64[np.ndarray, " samples"]
    num_images: int

    @property
    def margin(self) -> float:
        """Return half of the width of the 95 % interval, or NaN if there is no interval.

        Half of the interval's width is the standard error times a quantile of Student's t
        distribution.
        """
        from scipy.special import stdtrit

        scores, others = self.sample_scores, self.num_images - 1
        known = scores[~np.isnan(scores)]
        if not others or not len(known) or not np.ptp(known) > _NO_CHANGE:
            return np.nan
        return -float(stdtrit(others, _TAIL) * known.std() * np.sqrt(self.num_images / others))

    def ci95(self) -> Interval | None:
        """Return a 95 % confidence interval that is symmetric on the logit scale.

        The interval therefore never leaves the range from 0 to 100 %. The result is None for a
        score of 0 or 100 %, or if the interval cannot be computed.
        """
        from scipy.special import expit, logit

        share = self.value / 100
        if np.isnan(self.margin) or not 0 < share < 1:
            return None
        margin = self.margin / 100 / (share * (1 - share))
        low, high = 100 * expit(logit(share) + margin * np.array([-1, 1]))
        return float(low), float(high)

    def _subtract(self, other: "Bootstrap") -> "Bootstrap":
        scores = self.sample_scores - other.sample_scores
        return Bootstrap(self.value - other.value, scores, self.num_images)


def bootstrap_estimate(per_image: _PerImage, score: _Score) -> Bootstrap:
    """Return the bootstrap estimate of a score that is computed from counts, such as AP.

    Use this function instead of `Jackknife` if the score is not a smooth function of the counts of
    each image.

    Args:
        per_image: Counts of each image, such as its numbers of correct boxes, with images as the
            first axis.
        score: Function that computes the score in percent from counts summed over images. If the
            summed counts have an additional first axis of bootstrap samples, the function must
            return one score for each sample.
    """
    images, generator = len(per_image), np.random.default_rng(0)
    counts, sample_scores = per_image.reshape(images, -1).astype(np.float64), []
    for _ in range(_DRAWS // _DRAWS_AT_ONCE):
        samples = generator.integers(images, size=(_DRAWS_AT_ONCE, images))
        times = np.stack([np.bincount(sample, minlength=images) for sample in samples])
        sample_scores.append(score((times @ counts).reshape(len(times), *per_image.shape[1:])))
    value = score(per_image.sum(0, dtype=np.int64))
    return Bootstrap(float(value), np.concatenate(sample_scores), images)


def mean_iou_estimate(per_image: Integer[np.ndarray, "images 3 classes"]) -> MeanIoU:
    """Return the jackknife estimate of mean IoU, from which its confidence interval is computed.

    Args:
        per_image: Numbers of correct, predicted and ground-truth pixels of each class in each
            image.
    """
    correct, predicted, true = per_image.astype(np.int64).swapaxes(0, 1)
    union = predicted + true - correct
    iou = iou_from_counts(correct.sum(0), union.sum(0))
    leave_one_out = iou_from_counts(correct.sum(0) - correct, union.sum(0) - union)
    return MeanIoU(
        value=float(nanmean(iou)),
        leave_one_out=nanmean(leave_one_out),
        over_true_classes=float(nanmean(iou[true.sum(0) > 0])),
    )


def pixel_accuracy_estimate(per_image: Integer[np.ndarray, "images 3 classes"]) -> Jackknife:
    """Return the jackknife estimate of pixel accuracy, from which its interval is computed.

    Args:
        per_image: Numbers of correct, predicted and ground-truth pixels of each class in each
            image.
    """
    summed = per_image.sum(-1, keepdims=True, dtype=np.int64)
    total = summed.sum(0)
    return Jackknife(float(pixel_accuracy(total)), pixel_accuracy(total - summed))


def mean_estimate(values: Float[np.ndarray, " images"]) -> Jackknife:
    """Return the jackknife estimate of the mean of per-image values in percent."""
    exact = values.astype(np.float64)
    others = max(1, len(exact) - 1)
    return Jackknife(float(exact.mean()), (exact.sum() - exact) / others)


def few_images_warning(num_images: int) -> list[str]:
    """Return a list with a warning if `num_images` is too small for reliable intervals of mean IoU.

    The list is empty if `num_images` is large enough.
    """
    if num_images >= FEW_IMAGES:
        return []
    coverage = "may contain the true value in less than 90 % of all cases"
    return [f"fewer than {FEW_IMAGES} images: the interval of a mean IoU {coverage}"]


def interval_contains(ci95: Interval | None, value: float) -> bool:
    """Return whether a value lies in its confidence interval, up to rounding errors.

    If there is no interval (None), the result is True. An end of the interval that is NaN is not
    checked. The result is False if the low end of the interval exceeds its high end.
    """
    if ci95 is None:
        return True
    ascending = ((ci95[0], value), (value, ci95[1]), ci95)
    return not any(
        low > high and not math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-9)
        for low, high in ascending
    )


def holm(ps: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests by Holm's method, and return them in the same order.

    If each corrected p-value below 0.05 counts as significant, the probability of one or more false
    positives is at most 5 %. The tests need not be independent. A p-value of NaN stays NaN and does
    not count as a test.

    Source: Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order = sorted((p, n) for n, p in enumerate(ps) if not math.isnan(p))
    corrected, least = [math.nan] * len(ps), 0.0
    for rank, (p, n) in enumerate(order):
        corrected[n] = least = max(least, min(1.0, (len(order) - rank) * p))
    return corrected


def _clip_interval(low: float, high: float, *, least: float) -> Interval | None:
    """Clip an interval to [least, 100]. Return None if an end of the interval is NaN."""
    return None if np.isnan(low + high) else (max(low, least), min(high, 100.0))
