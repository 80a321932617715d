"""95 % intervals of agreements over images, of clusters that stay what they are.

They hold the score of very many images in these clusters, in which `ami` and `nmi` are one, and
what other sets of as many images have on average. A score of few images lies far from the former:
none sees most of the pairs of clusters and classes that there are. So there is an interval only of
three images or more for each pair, and of 60 in all; how often they hold
the truth in simulations is in results/tables/clustering_intervals.md.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from probes.clustering.agreement import SCORES, Met, Scores
from probes.clustering.information import entropy_of_more
from ssl_bench.intervals import FEW_IMAGES, Interval, Jackknife

IMAGES_A_PAIR = 3

_CELLS_AT_ONCE = 2_000_000


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
        name: Jackknife(one.value, np.repeat(one.without, times))
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
        entropy_of_more(counts)
        for counts in (met.sum(-1), met.sum(-2), met.reshape(*met.shape[:-2], -1))
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
