"""How well clusters agree with classes, from how often they meet."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64
from scipy.optimize import linear_sum_assignment
from scipy.special import xlogy

from ssl_bench.scores import iou_of, mean_of_known

Met = Int64[np.ndarray, "clusters classes"]
"""How many images of each class are in each cluster."""


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


def nmi(met: Met) -> float:
    """Mutual information in percent of the mean of both entropies; NaN where there is one class."""
    total = met.sum()
    if (met.sum(0) > 0).sum() < 2:
        return float("nan")
    of_clusters, of_classes, joint = (
        _entropy(counts / total) for counts in (met.sum(1), met.sum(0), met)
    )
    shared = of_clusters + of_classes - joint
    return 100.0 * max(0.0, shared) / ((of_clusters + of_classes) / 2)


def ari(met: Met) -> float:
    """Adjusted Rand index: 1 for equal partitions, 0 by chance, and below 0 for less than that.

    NaN where there is one class.

    Source: Hubert and Arabie, Journal of Classification 2, 1985.
    """
    if (met.sum(0) > 0).sum() < 2:
        return float("nan")
    pairs, of_clusters, of_classes, every = (
        float((counts * (counts - 1) // 2).sum())
        for counts in (met, met.sum(1), met.sum(0), met.sum(keepdims=True))
    )
    by_chance = of_clusters * of_classes / every
    most = (of_clusters + of_classes) / 2
    return (pairs - by_chance) / (most - by_chance) if most != by_chance else float("nan")


def purity(met: Met) -> float:
    """Percent of the images that are of their cluster's most frequent class; 100 with one each."""
    return 100.0 * float(met.max(1).sum() / met.sum())


@dataclass(frozen=True)
class Matching:
    """Which cluster stands for which class, at most one for each.

    Attributes:
        clusters: Beside `classes`, in their order; other clusters stand for none.
    """

    clusters: Int64[np.ndarray, " pairs"]
    classes: Int64[np.ndarray, " pairs"]

    @classmethod
    def of(cls, met: Met) -> "Matching":
        """So that as many images as possible are in the cluster of their class (Hungarian)."""
        return cls(*linear_sum_assignment(met, maximize=True))

    def miou(self, met: Met) -> float:
        """Mean IoU in percent over the classes that occur; those without a cluster have 0.

        Images of clusters that stand for no class are wrong, and no class of their own, as they
        are in https://github.com/mhamilton723/STEGO/blob/eb4d6b52/src/utils.py.
        """
        right = np.zeros(met.shape[1], np.int64)
        right[self.classes] = met[self.clusters, self.classes]
        given = np.zeros(met.shape[1], np.int64)
        given[self.classes] = met[self.clusters].sum(1)
        true = met.sum(0)
        ious = iou_of(right, given + true - right)
        return float(mean_of_known(np.where(true > 0, ious, np.nan)))


def without_each(
    met: Met,
    clusters: Int64[np.ndarray, " images"],
    classes: Int64[np.ndarray, " images"],
    score: Callable[[Met], float],
) -> Float64[np.ndarray, " images"]:
    """A score of all images but each one; clusters stay what they are."""
    found = {}
    for cell in set(zip(clusters.tolist(), classes.tolist(), strict=True)):
        fewer = met.copy()
        fewer[cell] -= 1
        found[cell] = score(fewer)
    return np.array([found[cell] for cell in zip(clusters.tolist(), classes.tolist(), strict=True)])


def _entropy(shares: Float64[np.ndarray, "*some"]) -> float:
    return -float(xlogy(shares, shares).sum())
