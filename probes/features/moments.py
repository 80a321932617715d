"""Compute the mean and covariance of more vectors than fit into memory."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ssl_bench.system.device import to_float64


class Moments:
    """Running mean and covariance of vectors, computed batch by batch in float64.

    For numerical precision, the mean of the first batch is subtracted from all vectors before they
    are summed. Subtracting this mean does not change the results.
    """

    def __init__(self) -> None:
        self.count = 0
        self._shift: Float64[Tensor, " dim"] = torch.empty(0)
        self._sum: Float64[Tensor, " dim"] = torch.empty(0)
        self._products: Float64[Tensor, "dim dim"] = torch.empty(0)

    def add(self, vectors: Float[Tensor, "vectors dim"]) -> "Moments":
        """Update the mean and covariance with a batch of vectors, and return this object."""
        vectors = to_float64(vectors)
        if not self.count:
            # With a shift near the mean, the covariance is not a small difference between large
            # numbers.
            self._shift = vectors.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._products = self._shift.new_zeros(len(self._shift), len(self._shift))
        shifted = vectors - self._shift
        self.count += len(vectors)
        self._sum += shifted.sum(0)
        self._products += shifted.T @ shifted
        return self

    @property
    def mean(self) -> Float64[Tensor, " dim"]:
        return self._shift + self._sum / self.count

    @property
    def covariance(self) -> Float64[Tensor, "dim dim"]:
        """Return the mean outer product of the vectors after subtracting their mean."""
        offset = self._sum / self.count
        return self._products / self.count - torch.outer(offset, offset)

    @property
    def second_moment(self) -> Float64[Tensor, "dim dim"]:
        """Return the mean outer product of the vectors, without subtracting their mean."""
        return self.covariance + torch.outer(self.mean, self.mean)
