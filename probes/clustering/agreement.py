"""How well clusters agree with classes, from how often they meet, and how sure that is."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Real
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.special import digamma, xlogy
from scipy.stats import random_table

from ssl_bench.intervals import FEW_IMAGES, Interval, Jackknife
from ssl_bench.results import Baseline
from ssl_bench.scores import iou_from_counts, mean_without_nan

Met = Int64[np.ndarray, "*some clusters classes"]
"""How many images, or pixels, of each class are in each cluster."""
Standing = Int64[np.ndarray, "*some clusters"]
Scores = Float64[np.ndarray, "*some"]

IMAGES_A_PAIR = 3
# Nats below which a difference of entropies is rounding.
_NOTHING = 1e-12
_MANY_CELLS = 10_000
_CELLS_AT_ONCE = 2_000_000
# By chance, without a draw.
_KNOWN = ("ami", "ari", "nmi")
# Of a hypergeometric count: so many deviations from its mean nothing is left of 64 bits.
_DEVIATIONS, _MORE = 10, 30
# From this mean on the terms of a Taylor series that are left out are below 1e-6 of a count.
_LARGE_MEAN = 1000
_TERMS_AT_ONCE = 2_000_000


def meetings(
    clusters: Int64[np.ndarray, " images"],
    classes: Int64[np.ndarray, " images"],
    num_clusters: int,
    num_classes: int,
) -> Met:
    """Count the images of each cluster and class."""
    cells = clusters * num_classes + classes
    counts = np.bincount(cells, minlength=num_clusters * num_classes)
    return counts.reshape(num_clusters, num_classes).astype(np.int64)


def nmi(met: Met) -> Scores:
    """Mutual information in percent of the mean of both entropies; NaN where there is one class.

    Grows with the number of clusters and of classes, the more so the fewer images there are: 44 for
    random clusters of 1,000 classes of 50 images.
    """
    shared, mean = _information(met)
    several = _has_classes(met)
    return np.where(several, 100.0 * np.maximum(0.0, shared) / np.where(several, mean, 1.0), np.nan)


def ami(met: Met) -> Scores:
    """Mutual information beyond chance, in percent of the most there could be beyond chance.

    Chance is the mean over all ways to give out the same sizes of clusters: random clusters have 0
    on average, and single ones less. Of very many images it is `nmi`. NaN where there is one class,
    or where chance leaves nothing to gain, as where each image has a class of its own.

    Source: Vinh, Epps and Bailey, Journal of Machine Learning Research 11, 2010, with the mean of
    both entropies.
    """
    shared, mean = _information(met)
    by_chance = expected_information(met.sum(-1), met.sum(-2))
    known = _has_classes(met) & (mean - by_chance > _NOTHING)
    return np.where(
        known, 100 * (shared - by_chance) / np.where(known, mean - by_chance, 1), np.nan
    )


def ari(met: Met) -> Scores:
    """Adjusted Rand index: 1 for equal partitions, 0 by chance, and below 0 for less than that.

    NaN where there is one class.

    Source: Hubert and Arabie, Journal of Classification 2, 1985.
    """
    pairs, of_clusters, of_classes = (
        _pairs(counts).sum(-1) for counts in (_flat(met), met.sum(-1), met.sum(-2))
    )
    by_chance = of_clusters * (of_classes / np.maximum(_pairs(met.sum((-2, -1))), 1.0))
    best = (of_clusters + of_classes) / 2
    known = _has_classes(met) & (best != by_chance)
    return np.where(known, (pairs - by_chance) / np.where(known, best - by_chance, 1.0), np.nan)


def purity(met: Met) -> Scores:
    """Percent that is of the most frequent class of its cluster; 100 with one cluster each."""
    return np.asarray(100.0 * met.max(-1).sum(-1) / np.maximum(met.sum((-2, -1)), 1))


def matched(met: Met) -> Standing:
    """Which class each cluster stands for, one cluster a class at most; -1 for those left over.

    So that as much as possible is right (Hungarian).
    """
    standing = np.full(met.shape[:-1], -1)
    for where in np.ndindex(met.shape[:-2]):
        clusters, classes = linear_sum_assignment(met[where], maximize=True)
        standing[where][clusters] = classes
    return standing


def majority(met: Met) -> Standing:
    """The class that most of each cluster is of, so that several may share a class.

    Inflated by many clusters: with one for each image all are right.
    """
    return met.argmax(-1)


def ious(met: Met, standing: Standing) -> Float64[np.ndarray, "*some classes"]:
    """In percent: 0 for classes without a cluster, NaN for those that do not occur.

    Images of clusters that stand for no class are wrong, and no class of their own, as they
    are in https://github.com/mhamilton723/STEGO/blob/eb4d6b52/src/utils.py.
    """
    stands = standing[..., None] == np.arange(met.shape[-1])
    right = (met * stands).sum(-2)
    given = (met.sum(-1, keepdims=True) * stands).sum(-2)
    true = met.sum(-2)
    return np.where(true > 0, iou_from_counts(right, given + true - right), np.nan)


def miou(met: Met, standing: Standing) -> Scores:
    """Mean IoU in percent over the classes that occur."""
    return mean_without_nan(ious(met, standing))


def accuracy(met: Met, standing: Standing) -> Scores:
    """Percent that is in a cluster of its class."""
    stands = standing[..., None] == np.arange(met.shape[-1])
    return np.asarray(100.0 * (met * stands).sum((-2, -1)) / met.sum((-2, -1)))


SCORES: Mapping[str, Callable[[Met], Scores]] = MappingProxyType(
    {
        "ami": ami,
        "nmi": nmi,
        "ari": ari,
        "purity": purity,
        "miou_matched": lambda met: miou(met, matched(met)),
        "accuracy_matched": lambda met: accuracy(met, matched(met)),
        "miou_majority": lambda met: miou(met, majority(met)),
    }
)
"""By name; the matching is the one that fits the counts best."""


def image_independent(met: Met, metrics: Sequence[str]) -> dict[str, Baseline]:
    """Return by metric the better one of two answers without a look at the images.

    One gives out clusters of the same sizes at random. On average `ami` and `ari` are 0 then, and
    `nmi` is known too; the others are the mean of 100 such tables, of ten where a table is large.
    The other one puts all into a single cluster, which agrees more where one class is frequent and
    each cluster stands for another class. What is no number is left out.
    """
    some = met[met.sum(1) > 0][:, met.sum(0) > 0]
    draws = 100 if some.size <= _MANY_CELLS else 10
    # With one row or column there is one table; scipy's has negative counts then.
    tables = some[None]
    if 1 not in some.shape:
        shuffled = random_table(some.sum(1), some.sum(0))
        tables = shuffled.rvs(draws, random_state=np.random.default_rng(0))
    asked = [name for name in metrics if name not in _KNOWN]
    scores = {name: float(SCORES[name](tables).mean()) for name in asked}
    single = {name: float(SCORES[name](met.sum(0, keepdims=True))) for name in asked}
    if _has_classes(met):
        by_chance, mean = expected_information(some.sum(1), some.sum(0)), _information(some)[1]
        scores |= {"ami": 0.0, "ari": 0.0, "nmi": float(100 * by_chance / mean)}
    of_one = {name: {"single cluster": value} for name, value in single.items()}
    return {
        name: Baseline.best({"random clusters": value} | of_one.get(name, {}))
        for name, value in scores.items()
    }


def _information(met: Met) -> tuple[Scores, Scores]:
    """Mutual information of clusters and classes, and the mean of both entropies."""
    of_clusters, of_classes, joint = (
        _entropy(counts) for counts in (met.sum(-1), met.sum(-2), _flat(met))
    )
    shared = of_clusters + of_classes - joint
    return np.asarray(shared), np.asarray((of_clusters + of_classes) / 2)


def _flat(met: Met) -> Int64[np.ndarray, "*some cells"]:
    return met.reshape(*met.shape[:-2], -1)


def _has_classes(met: Met) -> np.ndarray | np.bool_:
    """Whether there are two classes or more."""
    return (met.sum(-2) > 0).sum(-1) > 1


def _entropy(counts: Int64[np.ndarray, "*some cells"]) -> Real[np.ndarray, "*some"] | np.float64:
    # Where one image is left out of one, nothing is left.
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return -xlogy(shares, shares).sum(-1)


def _pairs(counts: np.ndarray | np.int64) -> np.ndarray | np.float64:
    # As floats: the pairs of 10^10 pixels are more than an int64 holds.
    return counts * (counts - 1.0) / 2


def expected_information(
    rows: Int64[np.ndarray, "*some rows"], cols: Int64[np.ndarray, "*some cols"]
) -> Float64[np.ndarray, "*some"] | np.float64:
    """Mean mutual information in nats of two partitions with parts of these sizes, by chance.

    Over all permutations. Of many tables that share sizes each pair of sizes is computed once.

    Source: Vinh, Epps and Bailey, Journal of Machine Learning Research 11, 2010, equation 24.
    """
    sizes = rows[..., :, None], cols[..., None, :], rows.sum(-1)[..., None, None]
    known, places = zip(*(np.unique(one, return_inverse=True) for one in sizes), strict=True)
    if np.prod([len(one) for one in known]) > np.prod(np.broadcast_shapes(*map(np.shape, sizes))):
        return _shared(*sizes).sum((-2, -1))
    where = tuple(place.reshape(one.shape) for place, one in zip(places, sizes, strict=True))
    return _shared(*np.ix_(*known))[where].sum((-2, -1))


def _shared(*sizes: Int64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """What a row and a column of a table contribute on average, by their sizes and the whole's."""
    row, col, total = (one.astype(float) for one in np.broadcast_arrays(*sizes))
    mean = row * col / np.maximum(total, 1)
    large, small = mean > _LARGE_MEAN, (mean > 0) & (mean <= _LARGE_MEAN)
    small &= (row <= total) & (col <= total)
    shared = np.zeros(mean.shape)
    shared[large] = _by_series(row[large], col[large], total[large])
    shared[small] = _by_terms(row[small], col[small], total[small])
    return shared


Sizes = Float64[np.ndarray, " pairs"]


def _variance(row: Sizes, col: Sizes, total: Sizes) -> Sizes:
    spread = row / total * (col / total) * (total - row) * (total - col)
    return spread / np.maximum(total - 1, 1)


def _by_terms(row: Sizes, col: Sizes, total: Sizes) -> Sizes:
    """Mean of x / total * log(x * total / (row * col)), x the size of what two parts share."""
    mean = row * col / total
    wide = _DEVIATIONS * np.sqrt(_variance(row, col, total)) + _MORE
    low = np.maximum(np.maximum(row + col - total, 0), np.floor(mean - wide))
    high = np.minimum(np.minimum(row, col), np.ceil(mean + wide))
    found, order = np.empty(len(mean)), np.argsort(high - low)
    while len(order):
        # Those that are nearly as long as the longest that is left.
        length = int(high[order[-1]] - low[order[-1]]) + 1
        order, now = np.split(order, [max(0, len(order) - max(1, _TERMS_AT_ONCE // length))])
        a, b, n, last = (one[now, None] for one in (row, col, total, high))
        x = low[now, None] + np.arange(length)
        # Of one probability to the one before; none is 0 up to the last.
        ratio = (a - x + 1) * (b - x + 1) / np.maximum(x * (n - a - b + x), 1)
        ratio[:, 0] = 1
        inside = x <= last
        logs = np.where(inside, np.log(np.where(inside, ratio, 1)).cumsum(1), -np.inf)
        chance = np.exp(logs - logs.max(1, keepdims=True))
        found[now] = (chance * xlogy(x, x * n / (a * b))).sum(1) / chance.sum(1)
    return found / total


def _by_series(row: Sizes, col: Sizes, total: Sizes) -> Sizes:
    """The same from three moments, where x varies little beside its mean."""
    mean, variance = row * col / total, _variance(row, col, total)
    skew = variance * (total - 2 * row) * ((total - 2 * col) / total) / (total - 2)
    return (variance / (2 * mean) - skew / (6 * mean**2) + variance**2 / (4 * mean**3)) / total


def entropy_of_more(
    counts: Int64[np.ndarray, "*some cells"],
) -> Float64[np.ndarray, "*some"]:
    """Entropy in nats of what counts were drawn from, with cells that were not seen.

    How many those are is told by the cells that were seen once and twice.

    Source: Chao, Wang and Jost, Methods in Ecology and Evolution 4, 2013.
    """
    total = np.asarray(counts.sum(-1), float)
    terms = counts * (digamma(total)[..., None] - digamma(np.maximum(counts, 1)))
    once, twice = (np.asarray((counts == number).sum(-1), float) for number in (1, 2))
    # Without a cell that was seen twice, as if one of those that were seen once had been.
    once_of, twice_of = np.where(twice > 0, once, once - 1), 2 * np.maximum(twice, 1)
    share = np.where(once > 0, twice_of / ((total - 1) * np.maximum(once_of, 0) + twice_of), 1.0)
    return np.asarray(terms.sum(-1) / total + once / total * _beyond(share, total))


def _beyond(
    share: Float64[np.ndarray, "*some"], total: Float64[np.ndarray, "*some"]
) -> Float64[np.ndarray, "*some"] | np.float64:
    """Sum over r >= total of (1 - share)^(r - total + 1) / r, as an integral over exp(v)."""
    v = np.linspace(-50, 5, 500)
    s, left = np.exp(v) / total[..., None], 1 - share[..., None]
    terms = left * s * np.exp(-np.exp(v)) / (share[..., None] - left * np.expm1(-s))
    return terms.sum(-1) * (v[1] - v[0])


# 95 % intervals of agreements over images, of clusters that stay what they are. They hold the score
# of very many images in these clusters, in which `ami` and `nmi` are one, and what other sets of as
# many images have on average. A score of few images lies far from the former: none sees most of
# the pairs of clusters and classes that there are. So there is an interval only of three images or
# more for each pair, and of 60 in all; how often they hold the truth in simulations is in
# results/tables/clustering_intervals.md.


def few_images_warning(met: Met, images: int) -> list[str]:
    """Why there is no interval, where these are too few images for one."""
    pairs = int((met.sum(1) > 0).sum() * (met.sum(0) > 0).sum())
    least = max(FEW_IMAGES, IMAGES_A_PAIR * pairs)
    if images >= least:
        return []
    return [f"no interval: {images} images, and {least} are needed of {pairs} pairs of a cluster "
            "and a class"]  # fmt: skip


def image_intervals(met: Met) -> dict[str, Interval | None]:
    """Of `ami` and `ari`, from images of one class each.

    `nmi`, `purity` and the matched mean IoU have none: of few images they are so much too large
    that intervals around them would not hold what they tell of very many.
    """
    cells = np.argwhere(met)
    times = met[tuple(cells.T)]
    if few_images_warning(met, int(times.sum())):
        return {}

    def each() -> Iterator[Met]:
        for some in _at_once(len(cells), met.size):
            one = np.zeros((len(cells[some]), *met.shape), np.int64)
            one[np.arange(len(one)), *cells[some].T] = 1
            yield one

    scores = {"ami": SCORES["ami"], "ari": SCORES["ari"], "of many": _information_of_many}
    found = {
        name: Jackknife(one.value, np.repeat(one.leave_one_out, times))
        for name, one in _without_each(met, each(), scores).items()
    }
    many = found["of many"]
    return {
        "ami": _spanned("ami", found["ami"], many.value, many.margin),
        "ari": _corrected("ari", found["ari"]),
    }


def patch_intervals(met: Met, by_image: csr_array) -> dict[str, Interval | None]:
    """Of all scores but `miou_majority`, from pixels by cluster and class, a row for each image.

    Each set of all images but one has a matching of its own, because a matching is fitted to the
    labels that are scored. A single image may turn the majority of a cluster, which changes that
    score more than the margin of its interval says.
    """
    images = len(by_image.indptr) - 1
    if few_images_warning(met, images):
        return {}
    indexed: Any = by_image
    rows = (indexed[some].toarray().reshape(-1, *met.shape) for some in _at_once(images, met.size))
    scores = {name: score for name, score in SCORES.items() if name != "miou_majority"}
    found = _without_each(met, rows, scores)
    return {name: _corrected(name, one) for name, one in found.items()}


def _at_once(number: int, cells: int) -> Iterator[slice]:
    step = max(1, _CELLS_AT_ONCE // cells)
    return (slice(start, start + step) for start in range(0, number, step))


def _without_each(
    met: Met, images: Iterable[Met], scores: Mapping[str, Callable[[Met], Scores]]
) -> dict[str, Jackknife]:
    """Scores of all, and of all but each of the images."""
    without: dict[str, list[Scores]] = {name: [] for name in scores}
    for some in images:
        for name, score in scores.items():
            without[name].append(score(met - some))
    return {
        name: Jackknife(float(score(met)), np.concatenate(without[name]))
        for name, score in scores.items()
    }


def _information_of_many(met: Met) -> Scores:
    """What `nmi` would be of very many images."""
    of_clusters, of_classes, joint = (
        entropy_of_more(counts) for counts in (met.sum(-1), met.sum(-2), _flat(met))
    )
    mean = (of_clusters + of_classes) / 2
    return np.asarray(100 * (2 * mean - joint) / np.where(mean > 0, mean, np.nan))


def _corrected(name: str, found: Jackknife) -> Interval | None:
    """From the value to what it would be without its bias, and the margin of both."""
    return _spanned(name, found, found.value + found.correction, found.margin)


def _spanned(name: str, found: Jackknife, center: float, margin: float) -> Interval | None:
    """From the value to another estimate, with the margins of both, within what a score can be."""
    low = min(found.value - found.margin, center - margin)
    high = max(found.value + found.margin, center + margin)
    if np.isnan(low + high):
        return None
    most = 1.0 if name == "ari" else 100.0
    least = -most if name in ("ami", "ari") else 0.0
    return max(low, least), min(high, most)
