"""Rank the images of a database for each query, and score the rankings.

Average precision is the area under the precision-recall curve. The area is computed with
trapezoids, as in python/evaluate.py of https://github.com/filipradenovic/revisitop.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Float64, Int8, Int64
from torch import Tensor

from ssl_bench.neighbours import nearest_vectors

# Maximum number of similarities in memory at the same time. They take 0.25 GiB.
_MAX_SIMILARITIES = 2**26
_WRONG, _RIGHT, _LEFT_OUT = 0, 1, -1

Indices = Int64[np.ndarray, " _images"]


@dataclass(frozen=True, eq=False)
class Query:
    """A query image, and the images that the search should find.

    Each image is given by its row in the matrix of descriptors. Matches and ignored images that are
    not in the database have no effect.

    Attributes:
        row: The query image. It is left out when its own ranking is scored.
        matches: Correct images.
        hard_matches: Correct images that are difficult to find.
        ignored: Images that are left out when the ranking is scored.
    """

    row: int
    matches: Indices
    hard_matches: Indices
    ignored: Indices

    def label_images(
        self, num_rows: int, *, hard_only: bool = False
    ) -> Int8[np.ndarray, " {num_rows}"]:
        """Return a label for each image: 1 if correct, 0 if wrong, and -1 if left out of the score.

        If `hard_only` is true, only the hard matches are correct, and the other matches are left
        out of the score. `num_rows` is the number of images.
        """
        labels = np.full(num_rows, _WRONG, np.int8)
        labels[self.matches] = _LEFT_OUT if hard_only else _RIGHT
        labels[self.hard_matches] = _RIGHT
        labels[self.ignored] = _LEFT_OUT
        labels[self.row] = _LEFT_OUT
        return labels

    @property
    def max_left_out(self) -> int:
        """Return an upper bound of the number of images that are left out of the score."""
        return 1 + len(self.ignored) + len(self.matches)


@dataclass(frozen=True, eq=False)
class QueryScore:
    """The average precision of one query, and its precision at several cutoffs, in [0, 1].

    Attributes:
        values: Average precision, followed by the precision among the first k images for each k.
        by_chance: Expected values of these scores for a random ranking.
    """

    values: Float64[np.ndarray, " metrics"]
    by_chance: Float64[np.ndarray, " metrics"]


def rank_database(
    unit: Float[Tensor, "rows dim"],
    queries: Sequence[Query],
    database: Indices,
    top: int | None = None,
) -> Iterator[Indices]:
    """Rank the images of the database for each query, by descending cosine similarity.

    Each image is given by its row in `unit`. Among images with equal similarities, the image that
    comes first in the database ranks first. If a query image is in the database, the ranking
    contains the query image itself.

    Args:
        unit: Unit vectors of all images, in float32.
        queries: The queries.
        database: Rows of the images in the database, in ascending order.
        top: Number of nearest images that will be scored. The returned rankings are longer, because
            some images will be left out of the score. None for complete rankings.
    """
    memory = unit[torch.from_numpy(database).to(unit.device)]
    rows = torch.tensor([query.row for query in queries], device=unit.device)
    count = len(database)
    if top is not None:
        count = min(count, top + max(query.max_left_out for query in queries))
    for some in rows.split(max(1, _MAX_SIMILARITIES // len(database))):
        if count < len(database):
            _, index = nearest_vectors(unit[some], memory, count)
        else:
            similarities = unit[some] @ memory.T
            index = similarities.sort(dim=1, descending=True, stable=True).indices
        yield from database[index.cpu().numpy()]


def score_ranking(
    ranked: Indices,
    labels: Int8[np.ndarray, " rows"],
    database: Indices,
    *,
    cutoffs: Sequence[int],
    top: int | None = None,
) -> QueryScore | None:
    """Score a ranking of the database. Return None if the database contains no correct image.

    Each image is given by its row in the matrix of descriptors.

    Args:
        ranked: Images of the database in the order of their ranks.
        labels: Label of each image, from `Query.label_images`.
        database: Images of the database.
        cutoffs: Values of k for the precision among the first k images. They must not exceed `top`.
        top: Number of ranked images that are scored. None for all.
    """
    candidates = labels[database]
    num_right = int((candidates == _RIGHT).sum())
    if not num_right:
        return None
    num_images = int((candidates != _LEFT_OUT).sum())
    found = labels[ranked]
    ranks = np.flatnonzero(found[found != _LEFT_OUT][:top] == _RIGHT)
    values = [average_precision(ranks, num_right)]
    values += [precision_at(ranks, num_right, k) for k in cutoffs]
    by_chance = [expected_average_precision(num_images, num_right, top)]
    by_chance += [expected_precision(num_images, num_right, k) for k in cutoffs]
    return QueryScore(np.array(values), np.array(by_chance))


def average_precision(ranks: Indices, num_right: int) -> float:
    """Return the average precision, the area under the precision-recall curve.

    Args:
        ranks: Ranks of the correct images that were found, counted from 0, in ascending order.
        num_right: Number of correct images in the database.
    """
    before = np.arange(len(ranks), dtype=np.float64)
    # The precision before the first image is 1.
    left = np.divide(before, ranks, out=np.ones_like(before), where=ranks > 0)
    right = (before + 1) / (ranks + 1)
    return float((left + right).sum() / (2 * num_right))


def precision_at(ranks: Indices, num_right: int, k: int) -> float:
    """Return the fraction of correct images among the first k images of a ranking.

    Images after the last correct image do not count, as in the code of the benchmark revisitop.

    Args:
        ranks: Ranks of the correct images that were found, counted from 0, in ascending order.
        num_right: Number of correct images in the database.
        k: Number of images.
    """
    is_complete = len(ranks) == num_right
    images = min(k, int(ranks[-1]) + 1) if is_complete else k
    return float((ranks < images).sum() / images)


@cache
def expected_average_precision(num_images: int, num_right: int, top: int | None = None) -> float:
    """Return the expected average precision of a random ranking.

    The expected value is the mean over all orders of N images, of which R images are correct. The
    image at rank r (counted from 0) is correct with probability R / N. If the image at rank r is
    correct, each of the r images before it is correct with probability (R - 1) / (N - 1). `top` is
    the number of ranked images that are scored, or None for all.
    """
    ranks = np.arange(num_images if top is None else min(top, num_images))
    share_before = (num_right - 1) / max(1, num_images - 1)
    left = np.where(ranks > 0, share_before, 1.0)
    right = (1 + ranks * share_before) / (ranks + 1)
    return float((left + right).sum() / (2 * num_images))


@cache
def expected_precision(num_images: int, num_right: int, k: int) -> float:
    """Return the expected precision among the first k images of a random ranking.

    If R of the N images are correct, the expected fraction of correct images among the first k is R
    / N. However, if the last correct image has a rank L < k (counted from 1), the precision is R /
    L instead of R / k. The last correct image has the rank L with probability C(L - 1, R - 1) /
    C(N, R).
    """
    expected = num_right / num_images
    for last in range(num_right, min(k, num_images + 1)):
        probability = math.comb(last - 1, num_right - 1) / math.comb(num_images, num_right)
        expected += probability * (num_right / last - num_right / k)
    return expected
