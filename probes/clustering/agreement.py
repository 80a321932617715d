"""Measure how well clusters agree with classes, with 95 % intervals, from a contingency table.

For each combination of a cluster and a class, a contingency table contains the number of images (or
pixels) that belong to both.
"""

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
from ssl_bench.scores import iou_from_counts, nanmean

Table = Int64[np.ndarray, "*tables clusters classes"]
"""Contingency table: number of images, or pixels, of each pair of a cluster and a class."""
Assignment = Int64[np.ndarray, "*tables clusters"]
"""Class that each cluster predicts, or -1 if the cluster predicts no class."""
Scores = Float64[np.ndarray, "*tables"]

IMAGES_PER_PAIR = 3
"""Minimum ratio of the number of images to the number of pairs of a cluster and a class.

If the ratio is lower, scores have no confidence interval.
"""
# Differences of entropies below this number of nats are rounding errors.
_ROUNDING_NATS = 1e-12
# Tables with more cells are compared with fewer random tables.
_MANY_CELLS = 10_000
# Maximum number of table cells, or terms of a sum, that are in memory at the same time.
_MAX_CELLS = _MAX_TERMS = 2_000_000
# Metrics whose expected value for random clusters has a closed form.
_KNOWN_EXPECTATION = ("ami", "ari", "nmi")
# If a hypergeometric count differs from its mean by more than _DEVIATIONS standard deviations plus
# _MARGIN, its probability is negligible in float64.
_DEVIATIONS, _MARGIN = 10, 30
# For a mean above this value, the omitted terms of the Taylor series are below 1e-6 of a count.
_LARGE_MEAN = 1000


def contingency_table(
    clusters: Int64[np.ndarray, " images"],
    classes: Int64[np.ndarray, " images"],
    num_clusters: int,
    num_classes: int,
) -> Table:
    """Count the images that belong to each pair of a cluster (row) and a class (column).

    `clusters` and `classes` contain the cluster and the class of each image.
    """
    cells = clusters * num_classes + classes
    counts = np.bincount(cells, minlength=num_clusters * num_classes)
    return counts.reshape(num_clusters, num_classes).astype(np.int64)


def nmi(table: Table) -> Scores:
    """Return the normalised mutual information of clusters and classes, in percent.

    The mutual information is divided by the mean of the cluster entropy and the class entropy.
    Random clusters score above 0. The score of random clusters increases with the number of
    clusters and classes, and decreases with the number of images. For example, 1,000 random
    clusters score 44 for 1,000 classes with 50 images each. The score is NaN if there is only one
    class.
    """
    information, mean = _information(table)
    is_defined = _has_classes(table)
    return np.where(
        is_defined, 100.0 * np.maximum(0.0, information) / np.where(is_defined, mean, 1.0), np.nan
    )


def ami(table: Table) -> Scores:
    """Return the adjusted mutual information of clusters and classes, in percent.

    The expected mutual information of random clusters with the same sizes is subtracted. Random
    clusters therefore score 0 on average. For very many images, the score equals `nmi`. The score
    is NaN if there is only one class, or if each image has its own cluster and its own class.

    Source: Vinh, Epps and Bailey, Journal of Machine Learning Research 11, 2010. The normaliser is
    the mean of the cluster entropy and the class entropy.
    """
    information, mean = _information(table)
    expected = expected_information(table.sum(-1), table.sum(-2))
    is_defined = _has_classes(table) & (mean - expected > _ROUNDING_NATS)
    return np.where(
        is_defined,
        100 * (information - expected) / np.where(is_defined, mean - expected, 1),
        np.nan,
    )


def ari(table: Table) -> Scores:
    """Return the adjusted Rand index of clusters and classes.

    The index is 1 if the clusters equal the classes, and 0 on average for random clusters. The
    index is NaN if there is only one class, or if each image has its own cluster and its own class.

    Source: Hubert and Arabie, Journal of Classification 2, 1985.
    """
    pairs, cluster_pairs, class_pairs = (
        _count_pairs(counts).sum(-1)
        for counts in (_flatten_cells(table), table.sum(-1), table.sum(-2))
    )
    expected = cluster_pairs * (class_pairs / np.maximum(_count_pairs(table.sum((-2, -1))), 1.0))
    best = (cluster_pairs + class_pairs) / 2
    is_defined = _has_classes(table) & (best != expected)
    return np.where(
        is_defined, (pairs - expected) / np.where(is_defined, best - expected, 1.0), np.nan
    )


def purity(table: Table) -> Scores:
    """Return the percentage of images whose class is the most frequent class of their cluster.

    The purity is 100 if each image has its own cluster.
    """
    return np.asarray(100.0 * table.max(-1).sum(-1) / np.maximum(table.sum((-2, -1)), 1))


def match_clusters(table: Table) -> Assignment:
    """Match clusters one-to-one to classes, and return the class of each cluster.

    The Hungarian algorithm finds the matching with the highest accuracy. If there are more clusters
    than classes, clusters without a class get -1.
    """
    assignment = np.full(table.shape[:-1], -1)
    for index in np.ndindex(table.shape[:-2]):
        clusters, classes = linear_sum_assignment(table[index], maximize=True)
        assignment[index][clusters] = classes
    return assignment


def majority_classes(table: Table) -> Assignment:
    """Return the most frequent class of each cluster. Several clusters may get the same class.

    If each cluster predicts its most frequent class, scores increase with the number of clusters,
    up to perfect scores for one cluster per image.
    """
    return table.argmax(-1)


def class_ious(table: Table, assignment: Assignment) -> Float64[np.ndarray, "*tables classes"]:
    """Return the IoU of each class in percent, if each cluster predicts its assigned class.

    The IoU is 0 for a class without a cluster, and NaN for a class that does not occur. If a
    cluster has no assigned class, its images (or pixels) count as wrong. The code of STEGO instead
    assigns the pixels of such clusters to an additional class
    (https://github.com/mhamilton723/STEGO/blob/eb4d6b52/src/utils.py).
    """
    is_assigned = assignment[..., None] == np.arange(table.shape[-1])
    correct = (table * is_assigned).sum(-2)
    predicted = (table.sum(-1, keepdims=True) * is_assigned).sum(-2)
    true = table.sum(-2)
    return np.where(true > 0, iou_from_counts(correct, predicted + true - correct), np.nan)


def miou(table: Table, assignment: Assignment) -> Scores:
    """Return the mean IoU in percent over the classes that occur.

    Each cluster predicts the class in `assignment`.
    """
    return nanmean(class_ious(table, assignment))


def accuracy(table: Table, assignment: Assignment) -> Scores:
    """Return the percentage of images (or pixels) whose cluster is assigned to their true class."""
    is_assigned = assignment[..., None] == np.arange(table.shape[-1])
    return np.asarray(100.0 * (table * is_assigned).sum((-2, -1)) / table.sum((-2, -1)))


SCORES: Mapping[str, Callable[[Table], Scores]] = MappingProxyType(
    {
        "ami": ami,
        "nmi": nmi,
        "ari": ari,
        "purity": purity,
        "miou_matched": lambda table: miou(table, match_clusters(table)),
        "accuracy_matched": lambda table: accuracy(table, match_clusters(table)),
        "miou_majority": lambda table: miou(table, majority_classes(table)),
    }
)
"""Functions that compute the metrics from a contingency table, by the names of the metrics."""


def image_independent_baselines(table: Table, metrics: Sequence[str]) -> dict[str, Baseline]:
    """For each metric, return the better of two image-independent baselines.

    The first baseline assigns images to random clusters with the sizes of the actual clusters. The
    expected score of random clusters is 0 for "ami" and "ari". The expected "nmi" of random
    clusters is computed exactly. For all other metrics, the expected score is the mean over 100
    random contingency tables, or over 10 tables if they are large.

    The second baseline puts all images into one cluster. This single cluster has a high score if
    one class is frequent. The second baseline is used for all metrics except "ami", "ari" and
    "nmi". If there is only one class, "ami", "ari" and "nmi" are undefined and left out.
    """
    used = table[table.sum(1) > 0][:, table.sum(0) > 0]
    draws = 100 if used.size <= _MANY_CELLS else 10
    # With a single row or column, only one table is possible, and scipy would return negative
    # counts.
    tables = used[None]
    if 1 not in used.shape:
        distribution = random_table(used.sum(1), used.sum(0))
        tables = distribution.rvs(draws, random_state=np.random.default_rng(0))
    drawn = [name for name in metrics if name not in _KNOWN_EXPECTATION]
    random = {name: float(SCORES[name](tables).mean()) for name in drawn}
    single = {name: float(SCORES[name](table.sum(0, keepdims=True))) for name in drawn}
    if _has_classes(table):
        expected, mean = expected_information(used.sum(1), used.sum(0)), _information(used)[1]
        random |= {"ami": 0.0, "ari": 0.0, "nmi": float(100 * expected / mean)}
    return {
        name: Baseline.best(
            {
                "random clusters": value,
                **({"single cluster": single[name]} if name in single else {}),
            }
        )
        for name, value in random.items()
    }


def _information(table: Table) -> tuple[Scores, Scores]:
    """Return the mutual information of clusters and classes, and the mean of their entropies."""
    cluster_entropy, class_entropy, joint_entropy = (
        _entropy(counts) for counts in (table.sum(-1), table.sum(-2), _flatten_cells(table))
    )
    information = cluster_entropy + class_entropy - joint_entropy
    return np.asarray(information), np.asarray((cluster_entropy + class_entropy) / 2)


def _flatten_cells(table: Table) -> Int64[np.ndarray, "*tables cells"]:
    return table.reshape(*table.shape[:-2], -1)


def _has_classes(table: Table) -> np.ndarray | np.bool_:
    return (table.sum(-2) > 0).sum(-1) > 1


def _entropy(
    counts: Int64[np.ndarray, "*tables cells"],
) -> Real[np.ndarray, "*tables"] | np.float64:
    # A table is empty if its only image is left out.
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return -xlogy(shares, shares).sum(-1)


def _count_pairs(counts: np.ndarray | np.int64) -> np.ndarray | np.float64:
    # Floats are needed, because the pairs of 10^10 pixels exceed an int64.
    return counts * (counts - 1.0) / 2


def expected_information(
    rows: Int64[np.ndarray, "*tables rows"], cols: Int64[np.ndarray, "*tables cols"]
) -> Float64[np.ndarray, "*tables"] | np.float64:
    """Return the expected mutual information (in nats) of two random partitions with given sizes.

    The expected value is the mean over all permutations of the items. `rows` and `cols` may contain
    several pairs of partitions, one for each contingency table.

    Args:
        rows: Sizes of the parts of the first partition, such as clusters.
        cols: Sizes of the parts of the second partition, such as classes.

    Source: Vinh, Epps and Bailey, Journal of Machine Learning Research 11, 2010, equation 24.
    """
    sizes = rows[..., :, None], cols[..., None, :], rows.sum(-1)[..., None, None]
    distinct, places = zip(*(np.unique(part, return_inverse=True) for part in sizes), strict=True)
    num_distinct = np.prod([len(part) for part in distinct])
    if num_distinct > np.prod(np.broadcast_shapes(*map(np.shape, sizes))):
        return _expected_terms(*sizes).sum((-2, -1))
    where = tuple(place.reshape(part.shape) for place, part in zip(places, sizes, strict=True))
    return _expected_terms(*np.ix_(*distinct))[where].sum((-2, -1))


def _expected_terms(*sizes: Int64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """Return the terms whose sum is the expected mutual information of a contingency table.

    There is one term for each cell of the table. `sizes` contains three arrays: for each cell, the
    sums of its row, of its column and of its table.
    """
    row, col, total = (part.astype(float) for part in np.broadcast_arrays(*sizes))
    mean = row * col / np.maximum(total, 1)
    is_large, is_small = mean > _LARGE_MEAN, (mean > 0) & (mean <= _LARGE_MEAN)
    is_small &= (row <= total) & (col <= total)
    terms = np.zeros(mean.shape)
    terms[is_large] = _expand_terms(row[is_large], col[is_large], total[is_large])
    terms[is_small] = _sum_terms(row[is_small], col[is_small], total[is_small])
    return terms


Sizes = Float64[np.ndarray, " pairs"]


def _variance(row: Sizes, col: Sizes, total: Sizes) -> Sizes:
    spread = row / total * (col / total) * (total - row) * (total - col)
    return spread / np.maximum(total - 1, 1)


def _sum_terms(row: Sizes, col: Sizes, total: Sizes) -> Sizes:
    """For each table cell, return the expected value of x / total * log(x * total / (row * col)).

    The value x of a cell is the number of images that belong to both a cluster and a class. The
    cluster has `row` images, the class has `col` images, and the table has `total` images. If the
    cluster is a random subset of the images, x has a hypergeometric distribution. Very unlikely
    values of x are left out.
    """
    mean = row * col / total
    width = _DEVIATIONS * np.sqrt(_variance(row, col, total)) + _MARGIN
    low = np.maximum(np.maximum(row + col - total, 0), np.floor(mean - width))
    high = np.minimum(np.minimum(row, col), np.ceil(mean + width))
    terms, order = np.empty(len(mean)), np.argsort(high - low)
    while len(order):
        # Sums of similar length are computed together, the longest ones first.
        length = int(high[order[-1]] - low[order[-1]]) + 1
        order, now = np.split(order, [max(0, len(order) - max(1, _MAX_TERMS // length))])
        a, b, n, last = (part[now, None] for part in (row, col, total, high))
        x = low[now, None] + np.arange(length)
        # Ratio of each probability to the previous one, which is positive up to the last count.
        ratio = (a - x + 1) * (b - x + 1) / np.maximum(x * (n - a - b + x), 1)
        ratio[:, 0] = 1
        is_valid = x <= last
        logs = np.where(is_valid, np.log(np.where(is_valid, ratio, 1)).cumsum(1), -np.inf)
        probability = np.exp(logs - logs.max(1, keepdims=True))
        terms[now] = (probability * xlogy(x, x * n / (a * b))).sum(1) / probability.sum(1)
    return terms / total


def _expand_terms(row: Sizes, col: Sizes, total: Sizes) -> Sizes:
    """For each cell, approximate the expected value of x / total * log(x * total / (row * col)).

    The approximation is a Taylor series with three terms around the mean of the random count x. The
    approximation is accurate only if the mean of x is large.
    """
    mean, variance = row * col / total, _variance(row, col, total)
    skew = variance * (total - 2 * row) * ((total - 2 * col) / total) / (total - 2)
    return (variance / (2 * mean) - skew / (6 * mean**2) + variance**2 / (4 * mean**3)) / total


def estimate_entropy(
    counts: Int64[np.ndarray, "*tables cells"],
) -> Float64[np.ndarray, "*tables"]:
    """Estimate the entropy in nats of a discrete distribution from the counts of a sample.

    The contribution of values that are missing in the sample is estimated from two counts: how many
    values occur once, and how many values occur twice.

    Source: Chao, Wang and Jost, Methods in Ecology and Evolution 4, 2013.
    """
    total = np.asarray(counts.sum(-1), float)
    terms = counts * (digamma(total)[..., None] - digamma(np.maximum(counts, 1)))
    once, twice = (np.asarray((counts == number).sum(-1), float) for number in (1, 2))
    # If no value occurs twice, one of the values that occur once is treated as if it occurred
    # twice.
    adjusted_once = np.where(twice > 0, once, once - 1)
    adjusted_twice = 2 * np.maximum(twice, 1)
    denominator = (total - 1) * np.maximum(adjusted_once, 0) + adjusted_twice
    share = np.where(once > 0, adjusted_twice / denominator, 1.0)
    return np.asarray(terms.sum(-1) / total + once / total * _sum_tail(share, total))


def _sum_tail(
    share: Float64[np.ndarray, "*tables"], total: Float64[np.ndarray, "*tables"]
) -> Float64[np.ndarray, "*tables"] | np.float64:
    """Compute the sum of (1 - share)^(r - total + 1) / r over all integers r >= total.

    `estimate_entropy` needs this sum for values that are missing in the sample.
    """
    v = np.linspace(-50, 5, 500)
    s, rest = np.exp(v) / total[..., None], 1 - share[..., None]
    terms = rest * s * np.exp(-np.exp(v)) / (share[..., None] - rest * np.expm1(-s))
    return terms.sum(-1) * (v[1] - v[0])


# 95 % confidence intervals for the random choice of the images. The clusters are fixed.
#
# An interval should contain two values: the limit of the score for infinitely many images, and the
# mean score of other image sets of the same size. In the limit, `ami` and `nmi` are equal. With few
# images, most pairs of a cluster and a class do not occur in the sample, and the score is far from
# its limit. Intervals therefore require at least three images per pair, and 60 images in total.
# results/tables/clustering_intervals.md shows how often simulated intervals contain the true value.


def interval_warnings(table: Table, images: int) -> list[str]:
    """If there are too few images for a confidence interval, return a list with a warning.

    Otherwise, the list is empty. `table` is a contingency table for the given number of `images`.
    """
    pairs = int((table.sum(1) > 0).sum() * (table.sum(0) > 0).sum())
    required = max(FEW_IMAGES, IMAGES_PER_PAIR * pairs)
    if images >= required:
        return []
    return [
        f"no interval: {images} images, expected at least {required} for {pairs} pairs of a "
        "cluster and a class"
    ]


def image_intervals(table: Table) -> dict[str, Interval | None]:
    """Return the 95 % confidence intervals of "ami" and "ari" for clustered images.

    Other metrics have no interval, because a small number of images biases them strongly. Their
    intervals would not contain the score of infinitely many images.
    """
    cells = np.argwhere(table)
    repeats = table[tuple(cells.T)]
    if interval_warnings(table, int(repeats.sum())):
        return {}

    def single_images() -> Iterator[Table]:
        for batch in _batch_slices(len(cells), table.size):
            one = np.zeros((len(cells[batch]), *table.shape), np.int64)
            one[np.arange(len(one)), *cells[batch].T] = 1
            yield one

    scores = {"ami": SCORES["ami"], "ari": SCORES["ari"], "limit": _estimate_limit}
    jackknives = {
        name: Jackknife(one.value, np.repeat(one.leave_one_out, repeats))
        for name, one in _leave_one_out(table, single_images(), scores).items()
    }
    limit = jackknives["limit"]
    return {
        "ami": _span_interval("ami", jackknives["ami"], limit.value, limit.margin),
        "ari": _corrected_interval("ari", jackknives["ari"]),
    }


def patch_intervals(table: Table, by_image: csr_array) -> dict[str, Interval | None]:
    """Return the 95 % confidence intervals of all metrics for clustered patches.

    The intervals come from a jackknife over images. The matching of clusters to classes depends on
    the labels of the scored images, so the matching is repeated for each left-out image.
    "miou_majority" has no interval, because one image can change the majority class of a cluster. A
    single image can thus change the score by more than half the width of a jackknife interval.

    Args:
        table: Contingency table of the pixels of all images.
        by_image: Flattened contingency table of each image, one row per image.
    """
    images = len(by_image.indptr) - 1
    if interval_warnings(table, images):
        return {}
    rows: Any = by_image
    tables = (
        rows[batch].toarray().reshape(-1, *table.shape)
        for batch in _batch_slices(images, table.size)
    )
    scores = {name: score for name, score in SCORES.items() if name != "miou_majority"}
    jackknives = _leave_one_out(table, tables, scores)
    return {name: _corrected_interval(name, one) for name, one in jackknives.items()}


def _batch_slices(number: int, cells: int) -> Iterator[slice]:
    step = max(1, _MAX_CELLS // cells)
    return (slice(start, start + step) for start in range(0, number, step))


def _leave_one_out(
    table: Table, images: Iterable[Table], scores: Mapping[str, Callable[[Table], Scores]]
) -> dict[str, Jackknife]:
    """Compute each score for all images, and again with each single image left out.

    `images` yields batches with the contingency table of each single image.
    """
    left_out: dict[str, list[Scores]] = {name: [] for name in scores}
    for batch in images:
        for name, score in scores.items():
            left_out[name].append(score(table - batch))
    return {
        name: Jackknife(float(score(table)), np.concatenate(left_out[name]))
        for name, score in scores.items()
    }


def _estimate_limit(table: Table) -> Scores:
    """Estimate the value that the score `nmi` would have for infinitely many images."""
    cluster_entropy, class_entropy, joint_entropy = (
        estimate_entropy(counts) for counts in (table.sum(-1), table.sum(-2), _flatten_cells(table))
    )
    mean = (cluster_entropy + class_entropy) / 2
    return np.asarray(100 * (2 * mean - joint_entropy) / np.where(mean > 0, mean, np.nan))


def _corrected_interval(name: str, jackknife: Jackknife) -> Interval | None:
    """Return a confidence interval that contains a score and its bias-corrected value.

    The interval extends from `jackknife.margin` below the smaller value to `jackknife.margin` above
    the larger value. The interval is clipped to the range of the metric `name`.
    """
    center = jackknife.value + jackknife.correction
    return _span_interval(name, jackknife, center, jackknife.margin)


def _span_interval(
    name: str, jackknife: Jackknife, center: float, margin: float
) -> Interval | None:
    """Return the smallest interval that covers two intervals.

    The first interval is the score of `jackknife` plus or minus its margin. The second interval is
    `center` plus or minus `margin`. The result is clipped to the range of the metric `name`.
    """
    low = min(jackknife.value - jackknife.margin, center - margin)
    high = max(jackknife.value + jackknife.margin, center + margin)
    if np.isnan(low + high):
        return None
    most = 1.0 if name == "ari" else 100.0
    least = -most if name in ("ami", "ari") else 0.0
    return max(low, least), min(high, most)
