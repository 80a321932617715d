"""Mutual information of two partitions: by chance, and of many more images than were seen."""

import numpy as np
from jaxtyping import Float64, Int64
from scipy.special import digamma, xlogy

# Of a hypergeometric count: so many deviations from its mean nothing is left of 64 bits.
_DEVIATIONS, _MORE = 10, 30
# From this mean on the terms of a Taylor series that are left out are below 1e-6 of a count.
_LARGE_MEAN = 1000
_TERMS_AT_ONCE = 2_000_000


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
