"""Exact nearest neighbours by cosine similarity."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

# Similarities that are in GPU memory at once.
_SIMILARITIES = 2**28
_CONSTANT = 1e-6


@dataclass(frozen=True, eq=False)
class NeighbourSearch:
    """A memory of unit vectors; faiss searches it on the CPU, a matrix product on a GPU.

    Both compare with every vector, so that nothing is approximate.
    """

    memory: Float[Tensor, "memory dim"]

    @classmethod
    def of(cls, features: Float[Tensor, "memory dim"]) -> "NeighbourSearch":
        return cls(F.normalize(features.float(), dim=1))

    def is_constant(self) -> bool:
        """Whether all vectors are the same, so that any of them may be called the nearest."""
        return bool((self.memory - self.memory[0]).abs().max() < _CONSTANT)

    def nearest(
        self, queries: Float[Tensor, "queries dim"], count: int
    ) -> tuple[Float[Tensor, "queries count"], Int64[Tensor, "queries count"]]:
        """Cosine similarity and index of the nearest vectors, the nearest first."""
        unit = F.normalize(queries.float(), dim=1)
        if self.memory.device.type == "cpu":
            similarity, index = self._faiss.search(unit.numpy(), count)
            return torch.from_numpy(similarity), torch.from_numpy(index)
        rows = max(1, _SIMILARITIES // len(self.memory))
        found = [(some @ self.memory.T).topk(count) for some in unit.split(rows)]
        return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])

    @cached_property
    def _faiss(self) -> Any:
        # Imported late, and after torch: the other way round their OpenMP libraries clash.
        import faiss

        index = faiss.IndexFlatIP(self.memory.shape[1])
        index.add(self.memory.numpy())
        return index
