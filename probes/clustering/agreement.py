"""How well clusters agree with classes, from how often they meet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jaxtyping import Float64, Int64, Real
from scipy.optimize import linear_sum_assignment
from scipy.special import xlogy
from scipy.stats import random_table

from probes.clustering.information import expected_information
from ssl_bench.results import Baseline
from ssl_bench.scores import iou_of, mean_of_known

Met = Int64[np.ndarray, "*some clusters classes"]
"""How many images, or pixels, of each class are in each cluster."""
Scores = Float64[np.ndarray, "*some"]

# Nats below which a difference of entropies is rounding.
_NOTHING = 1e-12
_MANY_CELLS = 10_000
# By chance, without a draw.
_KNOWN = ("ami", "ari", "nmi")


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


@dataclass(frozen=True)
class Matching:
    """Which class each cluster stands for.

    Attributes:
        standing: -1 for clusters that stand for none.
    """

    standing: Int64[np.ndarray, "*some clusters"]

    @classmethod
    def of(cls, met: Met) -> "Matching":
        """One cluster for a class at most, so that as much as possible is right (Hungarian)."""
        standing = np.full(met.shape[:-1], -1)
        for where in np.ndindex(met.shape[:-2]):
            clusters, classes = linear_sum_assignment(met[where], maximize=True)
            standing[where][clusters] = classes
        return cls(standing)

    @classmethod
    def of_majority(cls, met: Met) -> "Matching":
        """Each cluster for the class that most of it is of, so that several may share a class.

        Inflated by many clusters: with one for each image all are right.
        """
        return cls(met.argmax(-1))

    def ious(self, met: Met) -> Float64[np.ndarray, "*some classes"]:
        """In percent: 0 for classes without a cluster, NaN for those that do not occur.

        Images of clusters that stand for no class are wrong, and no class of their own, as they
        are in https://github.com/mhamilton723/STEGO/blob/eb4d6b52/src/utils.py.
        """
        stands = self.standing[..., None] == np.arange(met.shape[-1])
        right = (met * stands).sum(-2)
        given = (met.sum(-1, keepdims=True) * stands).sum(-2)
        true = met.sum(-2)
        return np.where(true > 0, iou_of(right, given + true - right), np.nan)

    def miou(self, met: Met) -> Scores:
        """Mean IoU in percent over the classes that occur."""
        return mean_of_known(self.ious(met))

    def accuracy(self, met: Met) -> Scores:
        """Percent that is in a cluster of its class."""
        stands = self.standing[..., None] == np.arange(met.shape[-1])
        return np.asarray(100.0 * (met * stands).sum((-2, -1)) / met.sum((-2, -1)))


SCORES: Mapping[str, Callable[[Met], Scores]] = MappingProxyType(
    {
        "ami": ami,
        "nmi": nmi,
        "ari": ari,
        "purity": purity,
        "miou_matched": lambda met: Matching.of(met).miou(met),
        "accuracy_matched": lambda met: Matching.of(met).accuracy(met),
        "miou_majority": lambda met: Matching.of_majority(met).miou(met),
    }
)
"""By name; the matching is the one that fits the counts best."""


def of_random_clusters(met: Met, metrics: Sequence[str]) -> dict[str, Baseline]:
    """What scores are on average where clusters of the same sizes are given out at random.

    `ami` and `ari` are 0 then, and `nmi` is known too; the others are the mean of 100 such tables,
    of ten where a table is large. What is no number is left out.
    """
    some = met[met.sum(1) > 0][:, met.sum(0) > 0]
    draws = 100 if some.size <= _MANY_CELLS else 10
    # With one row or column there is one table; scipy's has negative counts then.
    tables = some[None]
    if 1 not in some.shape:
        shuffled = random_table(some.sum(1), some.sum(0))
        tables = shuffled.rvs(draws, random_state=np.random.default_rng(0))
    scores = {name: float(SCORES[name](tables).mean()) for name in metrics if name not in _KNOWN}
    if _has_classes(met):
        by_chance, mean = expected_information(some.sum(1), some.sum(0)), _information(some)[1]
        scores |= {"ami": 0.0, "ari": 0.0, "nmi": float(100 * by_chance / mean)}
    return {name: Baseline("random clusters", value) for name, value in scores.items()}


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
