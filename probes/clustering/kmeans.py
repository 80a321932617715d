"""K-means of scikit-learn, and which of its clusters is the nearest."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

if TYPE_CHECKING:
    from sklearn.cluster import KMeans


def clustered(
    unit: Float[np.ndarray, "vectors dim"], count: int, *, restarts: int, seed: int
) -> "KMeans":
    """The tightest of several k-means; as many clusters may be empty as vectors are equal.

    Costs vectors * dim * count for each step.
    """
    # Here, because a plan need not wait for scikit-learn.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    kmeans = KMeans(count, n_init=restarts, random_state=seed)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # Fewer clusters than asked for, of features that are the same: the details say so.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return kmeans.fit(unit)


@dataclass(frozen=True, eq=False)
class Centres:
    """Those of several k-means of the same vectors, behind each other.

    Attributes:
        numbers: How many of each.
    """

    vectors: Float[Tensor, "centres dim"]
    numbers: Sequence[int]

    @classmethod
    def of(cls, fitted: Sequence["KMeans"], device: torch.device) -> "Centres":
        centres = [torch.from_numpy(one.cluster_centers_).float() for one in fitted]
        return cls(torch.cat(centres).to(device), tuple(len(some) for some in centres))

    def nearest(self, unit: Float[Tensor, "patches dim"]) -> Int64[Tensor, "kmeans patches"]:
        """The cluster of each vector in each k-means; of equally near ones the first."""
        # |x - c|^2 without what is the same for all centres.
        nearness = unit @ self.vectors.T - self.vectors.square().sum(1) / 2
        return torch.stack([some.argmax(1) for some in nearness.split(list(self.numbers), 1)])
