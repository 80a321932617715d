"""How well clusters agree with classes, from how often they meet."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, Real
from scipy.optimize import linear_sum_assignment
from scipy.special import xlogy

from ssl_bench.results import Baseline
from ssl_bench.scores import iou_of, mean_of_known

Met = Int64[np.ndarray, "*some clusters classes"]
"""How many images, or pixels, of each class are in each cluster."""
Scores = Float64[np.ndarray, "*some"]


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
    """Mutual information in percent of the mean of both entropies; NaN where there is one class."""
    of_clusters, of_classes, joint = (
        _entropy(counts) for counts in (met.sum(-1), met.sum(-2), _flat(met))
    )
    shared = of_clusters + of_classes - joint
    several, mean = _has_classes(met), (of_clusters + of_classes) / 2
    return np.where(several, 100.0 * np.maximum(0.0, shared) / np.where(several, mean, 1.0), np.nan)


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


def agreements(met: Met) -> dict[str, Scores]:
    """Every score by its name, with the matching that fits these counts best."""
    matching, majority = Matching.of(met), Matching.of_majority(met)
    return {
        "nmi": nmi(met),
        "ari": ari(met),
        "purity": purity(met),
        "miou_matched": matching.miou(met),
        "accuracy_matched": matching.accuracy(met),
        "miou_majority": majority.miou(met),
    }


def without_a_look(met: Met) -> dict[str, Baseline]:
    """What every score is where all is in one cluster, as far as that is a number."""
    scores = agreements(met.sum(-2, keepdims=True))
    return {
        name: Baseline("one cluster", float(value))
        for name, value in scores.items()
        if not np.isnan(value)
    }


def without_each(
    met: Met,
    clusters: Int64[np.ndarray, " images"],
    classes: Int64[np.ndarray, " images"],
    score: Callable[[Met], Scores],
) -> Float64[np.ndarray, " images"]:
    """A score of all images but each one; clusters stay what they are."""
    found = {}
    for cell in set(zip(clusters.tolist(), classes.tolist(), strict=True)):
        fewer = met.copy()
        fewer[cell] -= 1
        found[cell] = float(score(fewer))
    return np.array([found[cell] for cell in zip(clusters.tolist(), classes.tolist(), strict=True)])


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
