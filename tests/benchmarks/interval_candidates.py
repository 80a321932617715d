"""Intervals of a mean IoU that could be taken, of a sample of images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float
from scipy.stats import norm, t

from ssl_bench.intervals import mean_iou_estimate

Array = Float[np.ndarray, "..."]
Ends = tuple[float, float]


@dataclass(frozen=True)
class Draws:
    """How often each image is drawn: as many as there are, fewer, and drawn again from a draw."""

    whole: Array
    fewer: Array
    again: Array

    @classmethod
    def of(cls, images: int, seed: int = 0) -> "Draws":
        random = np.random.default_rng(seed)
        even = np.full(images, 1 / images)
        whole = random.multinomial(images, even, 400)
        again = [random.multinomial(images, draw / images, 50) for draw in whole[:50]]
        fewer = random.multinomial(round(images**0.8), even, 400)
        return cls(*(np.asarray(a, np.float32) for a in (whole, fewer, again)))


@dataclass(frozen=True, eq=False)
class Sample:
    """Some images, and how their mean IoU varies over draws of them."""

    counts: Float[np.ndarray, "images 3 classes"]
    draws: Draws

    @cached_property
    def right(self) -> Array:
        return self.counts[:, 0]

    @cached_property
    def union(self) -> Array:
        return self.counts[:, 1] + self.counts[:, 2] - self.counts[:, 0]

    def over(self, weights: Array) -> Array:
        """Mean IoU of draws."""
        right, union = weights @ self.right, weights @ self.union
        return 100 * (right / np.maximum(union, 1)).sum(-1) / (union > 0).sum(-1)

    @cached_property
    def value(self) -> float:
        return float(self.over(np.ones(len(self.counts))))

    @cached_property
    def resampled(self) -> Array:
        return self.over(self.draws.whole)

    @cached_property
    def pseudo(self) -> Array:
        """Pseudo-values of the jackknife."""
        estimate, count = mean_iou_estimate(self.counts), len(self.counts)
        return count * estimate.value - (count - 1) * estimate.without

    def errors(self, weights: Array) -> Array:
        """Standard errors of draws, by the infinitesimal jackknife."""
        right, union = weights @ self.right, weights @ self.union
        slope = (union > 0) / np.maximum(union, 1) / (union > 0).sum(-1, keepdims=True)
        shift = slope * right / np.maximum(union, 1)
        influence = (
            slope.astype(np.float32) @ self.right.T - shift.astype(np.float32) @ self.union.T
        )
        return 100 * np.sqrt((weights * influence**2).sum(-1))


def _between(values: Array, low: float = 0.025, high: float = 0.975) -> Ends:
    one, other = np.quantile(values, [low, high])
    return float(one), float(other)


def percentile(of: Sample) -> Ends:
    return _between(of.resampled)


def basic(of: Sample) -> Ends:
    low, high = _between(of.resampled)
    return 2 * of.value - high, 2 * of.value - low


def normal(of: Sample) -> Ends:
    return _around(of.value, 1.96 * of.resampled.std())


def infinitesimal(of: Sample) -> Ends:
    return _around(of.value, 1.96 * float(of.errors(np.ones((1, len(of.counts)), np.float32))[0]))


def less_bias(of: Sample) -> Ends:
    return _around(2 * of.value - of.resampled.mean(), 1.96 * of.resampled.std())


def bias_corrected(of: Sample, *, acceleration: float = 0.0) -> Ends:
    below = np.clip((of.resampled < of.value).mean(), 1 / 400, 399 / 400)
    shift = norm.ppf(below)
    ends = [shift + sign * 1.96 for sign in (-1, 1)]
    levels = [float(norm.cdf(shift + end / (1 - acceleration * end))) for end in ends]
    return _between(of.resampled, *levels)


def accelerated(of: Sample) -> Ends:
    gaps = of.pseudo - of.pseudo.mean()
    skewness = (gaps**3).sum() / (6 * (gaps**2).sum() ** 1.5)
    return bias_corrected(of, acceleration=float(skewness))


def studentised(of: Sample) -> Ends:
    error = of.errors(np.ones((1, len(of.counts)), np.float32))[0]
    errors = of.errors(of.draws.whole)
    low, high = _between(((of.resampled - of.value) / errors)[errors > 0])
    return of.value - high * error, of.value - low * error


def m_out_of_n(of: Sample) -> Ends:
    shrunk = (of.draws.fewer[0].sum() / len(of.counts)) ** 0.5
    low, high = _between(of.over(of.draws.fewer) - of.value)
    return of.value - shrunk * high, of.value - shrunk * low


def double_bootstrap(of: Sample) -> Ends:
    levels = (of.over(of.draws.again) < of.value).mean(-1)
    return _between(of.resampled, *_between(levels))


def plain_jackknife(of: Sample) -> Ends:
    return _around(of.value, _t_margin(of.pseudo))


def jackknife(of: Sample) -> Ends:
    return _around(of.pseudo.mean(), _t_margin(of.pseudo))


def ours(of: Sample) -> Ends:
    return mean_iou_estimate(of.counts).ci95() or (np.nan, np.nan)


def _around(center: float, margin: float) -> Ends:
    return float(center - margin), float(center + margin)


def _t_margin(pseudo: Array) -> float:
    return float(t.ppf(0.975, len(pseudo) - 1) * pseudo.std(ddof=1) / len(pseudo) ** 0.5)


CANDIDATES: dict[str, Callable[[Sample], Ends]] = {
    "percentile": percentile,
    "basic": basic,
    "BC": bias_corrected,
    "BCa": accelerated,
    "normal": normal,
    "infinitesimal": infinitesimal,
    "less bias": less_bias,
    "studentised": studentised,
    "m of n": m_out_of_n,
    "double": double_bootstrap,
    "value ± t": plain_jackknife,
    "jackknife": jackknife,
    "taken": ours,
}
"""By the name in the tables."""
