"""95 % intervals of scores over images: where the score of very many such images lies.

How often they hold it in simulations, and how often other intervals would, is in
results/tables/intervals.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float64, Integer, Shaped

from ssl_bench.scores import iou_of, mean_of_known, pixel_accuracy

Interval = tuple[float, float]
_PerImage = Shaped[np.ndarray, "images *values"]
_Score = Callable[[Shaped[np.ndarray, "..."]], Float64[np.ndarray, "*some"]]

FEW_IMAGES = 60
"""Below it the intervals of mean IoU may hold the truth in less than 90 % of all cases."""

_TAIL = 0.025

SIGNIFICANT = 2 * _TAIL
"""Below it the p of a difference goes with a 95 % interval that leaves out 0."""

_DRAWS, _DRAWS_AT_ONCE = 1000, 50
# Scores are percent; what images change less is rounding.
_NO_CHANGE = 1e-9


@runtime_checkable
class Estimate(Protocol):
    """A score in percent of some images, which knows what each of them does to it."""

    @property
    def value(self) -> float: ...

    def ci95(self) -> Interval | None:
        """None where the images do not tell: a single one, or none that makes a difference."""
        ...

    def difference_ci95(self, first: Any) -> Interval | None:
        """Of this score minus another one of the same kind and images."""
        ...

    def difference_p(self, first: Any) -> float:
        """Return the two-sided p that belongs to `difference_ci95`; NaN if the images do not tell.

        It is the smallest share for which the interval that misses as often leaves out 0.
        """
        ...


@dataclass(frozen=True, eq=False)
class Share:
    """Percent of the images that are hits."""

    hits: Bool[np.ndarray, " images"]

    @property
    def value(self) -> float:
        return 100.0 * float(self.hits.mean())

    def ci95(self) -> Interval:
        """Holds the truth in at least 95 % of all cases, whatever it is.

        Source: Clopper and Pearson, Biometrika 26, 1934.
        """
        # Here and below, because a table without intervals need not wait for scipy.
        from scipy.special import betaincinv

        right, wrong = int(self.hits.sum()), int((~self.hits).sum())
        low = betaincinv(right, wrong + 1, _TAIL) if right else 0.0
        high = betaincinv(right + 1, wrong, 1 - _TAIL) if wrong else 1.0
        return 100.0 * float(low), 100.0 * float(high)

    def difference_ci95(self, first: "Share") -> Interval:
        """As if two more images had been seen, one right in each score alone.

        Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37, 2012.
        """
        from scipy.special import ndtri

        difference, error = self._difference(first)
        center, margin = 100.0 * difference, -100.0 * float(ndtri(_TAIL) * error)
        return max(center - margin, -100.0), min(center + margin, 100.0)

    def difference_p(self, first: "Share") -> float:
        from scipy.special import ndtr

        difference, error = self._difference(first)
        return 2 * float(ndtr(-abs(difference) / error))

    def _difference(self, first: "Share") -> tuple[float, float]:
        """Return the share gained minus the one lost, and its standard error."""
        total = len(self.hits) + 2
        gained = (int((self.hits & ~first.hits).sum()) + 1) / total
        lost = (int((~self.hits & first.hits).sum()) + 1) / total
        return gained - lost, np.sqrt((gained + lost - (gained - lost) ** 2) / total)


@dataclass(frozen=True, eq=False)
class Jackknife:
    """A score in percent of all images, and of all images but one.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11.
    """

    value: float
    without: Float64[np.ndarray, " images"]

    @property
    def correction(self) -> float:
        """What the value lacks because there are so few images, to the first order."""
        return (len(self.without) - 1) * (self.value - float(self.without.mean()))

    @property
    def margin(self) -> float:
        """Half the width of an interval of Student's t; NaN where the images do not tell."""
        from scipy.special import stdtrit

        others = len(self.without) - 1
        if not others or not np.ptp(self.without) > _NO_CHANGE:
            return np.nan
        return -float(stdtrit(others, _TAIL) * np.sqrt(others * self.without.var()))

    def ci95(self) -> Interval | None:
        return _within(self.value - self.margin, self.value + self.margin, least=0.0)

    def difference_ci95(self, first: "Jackknife") -> Interval | None:
        """Without a correction: most of the bias is that of both scores."""
        both = self._minus(first)
        return _within(both.value - both.margin, both.value + both.margin, least=-100.0)

    def difference_p(self, first: "Jackknife") -> float:
        both = self._minus(first)
        return _p_of_student(both.value, both.margin, len(both.without) - 1)

    def _minus(self, first: "Jackknife") -> "Jackknife":
        return Jackknife(self.value - first.value, self.without - first.without)


@dataclass(frozen=True, eq=False)
class MeanIoU(Jackknife):
    """Mean IoU of a dataset, which few images of many classes make too small.

    Attributes:
        of_true: Mean over the classes that are true in some image. The value has a class that is
            only predicted as 0, though nobody knows how it does where it is true.
    """

    of_true: float

    def ci95(self) -> Interval | None:
        """From the value up to what it may become with images of all classes, and the margin.

        Holds the mean IoU of very many images, and what other sets of as many images give.
        """
        low = self.value + min(self.correction, 0.0) - self.margin
        high = self.of_true + max(self.correction, 0.0) + self.margin
        return _within(low, high, least=0.0)


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """A score in percent of some images, and of as many that were drawn from them with replacement.

    Equal numbers of images give equal draws, so that the draws of two scores are pairs.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """

    value: float
    drawn: Float64[np.ndarray, " draws"]
    num_images: int

    @property
    def margin(self) -> float:
        """Student's t times the deviation of draws, which is too small by (n - 1) / n; or NaN."""
        from scipy.special import stdtrit

        known, others = self.drawn[~np.isnan(self.drawn)], self.num_images - 1
        if not others or not len(known) or not np.ptp(known) > _NO_CHANGE:
            return np.nan
        return -float(stdtrit(others, _TAIL) * known.std() * np.sqrt(self.num_images / others))

    def ci95(self) -> Interval | None:
        """Symmetric in the logarithm of the odds: small scores vary less than larger ones."""
        from scipy.special import expit, logit

        share = self.value / 100
        if np.isnan(self.margin) or not 0 < share < 1:
            return None
        margin = self.margin / 100 / (share * (1 - share))
        low, high = 100 * expit(logit(share) + margin * np.array([-1, 1]))
        return float(low), float(high)

    def difference_ci95(self, first: "Bootstrap") -> Interval | None:
        both = self._minus(first)
        return _within(both.value - both.margin, both.value + both.margin, least=-100.0)

    def difference_p(self, first: "Bootstrap") -> float:
        both = self._minus(first)
        return _p_of_student(both.value, both.margin, both.num_images - 1)

    def _minus(self, first: "Bootstrap") -> "Bootstrap":
        return Bootstrap(self.value - first.value, self.drawn - first.drawn, self.num_images)


def bootstrap_estimate(per_image: _PerImage, score: _Score) -> Bootstrap:
    """Of a score of counts that are summed over images.

    For scores that jump where a single image is left out, so that `Jackknife` says nothing.

    Args:
        per_image: Counts.
        score: Of summed counts, whose first axes it keeps.
    """
    images, generator = len(per_image), np.random.default_rng(0)
    counts, drawn = per_image.reshape(images, -1).astype(np.float64), []
    for _ in range(_DRAWS // _DRAWS_AT_ONCE):
        chosen = generator.integers(images, size=(_DRAWS_AT_ONCE, images))
        times = np.stack([np.bincount(one, minlength=images) for one in chosen])
        drawn.append(score((times @ counts).reshape(len(times), *per_image.shape[1:])))
    value = score(per_image.sum(0, dtype=np.int64))
    return Bootstrap(float(value), np.concatenate(drawn), images)


def mean_iou_estimate(per_image: Integer[np.ndarray, "images 3 classes"]) -> MeanIoU:
    """From `class_counts` of each image."""
    right, predicted, true = per_image.astype(np.int64).swapaxes(0, 1)
    union = predicted + true - right
    iou = iou_of(right.sum(0), union.sum(0))
    without = iou_of(right.sum(0) - right, union.sum(0) - union)
    return MeanIoU(
        value=float(mean_of_known(iou)),
        without=mean_of_known(without),
        of_true=float(mean_of_known(iou[true.sum(0) > 0])),
    )


def pixel_accuracy_estimate(per_image: Integer[np.ndarray, "images 3 classes"]) -> Jackknife:
    """From `class_counts` of each image."""
    summed = per_image.sum(-1, keepdims=True, dtype=np.int64)
    total = summed.sum(0)
    return Jackknife(float(pixel_accuracy(total)), pixel_accuracy(total - summed))


def mean_estimate(values: Float[np.ndarray, " images"]) -> Jackknife:
    """Mean of what is known of each image alone, in percent."""
    exact = values.astype(np.float64)
    others = max(1, len(exact) - 1)
    return Jackknife(float(exact.mean()), (exact.sum() - exact) / others)


def few_images_warning(num_images: int) -> list[str]:
    """What a record of a mean IoU says of its interval, if anything."""
    if num_images >= FEW_IMAGES:
        return []
    rarely = "may hold the truth in less than 90 % of all cases"
    return [f"fewer than {FEW_IMAGES} images: the interval of a mean IoU {rarely}"]


def holds(ci95: Interval | None, value: float) -> bool:
    """Whether a value lies in its interval, but for rounding; an end that is NaN bounds nothing."""
    if ci95 is None:
        return True
    ascending = ((ci95[0], value), (value, ci95[1]), ci95)
    return not any(
        one > other and not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
        for one, other in ascending
    )


def holm(ps: Sequence[float]) -> list[float]:
    """Correct some p for their number; each is significant where its corrected one is.

    NaN stays NaN and does not count: there was no test. An error of the first kind in any of the
    tests is as rare as it was in one, however they depend on each other.

    Source: Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order = sorted((p, n) for n, p in enumerate(ps) if not math.isnan(p))
    corrected, least = [math.nan] * len(ps), 0.0
    for rank, (p, n) in enumerate(order):
        corrected[n] = least = max(least, min(1.0, (len(order) - rank) * p))
    return corrected


def _p_of_student(value: float, margin: float, others: int) -> float:
    """Return the two-sided p of a value whose 95 % interval has this margin; NaN without one."""
    from scipy.special import stdtr, stdtrit

    if math.isnan(margin):
        return math.nan
    return 2 * float(stdtr(others, stdtrit(others, _TAIL) * abs(value) / margin))


def _within(low: float, high: float, *, least: float) -> Interval | None:
    return None if np.isnan(low + high) else (max(low, least), min(high, 100.0))
