"""The nearest of remembered vectors by cosine similarity."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_bench.composition.fields import Engine
from ssl_bench.neighbours import faiss_nearest, takes_faiss

# Similarities that are in GPU memory at once.
_SIMILARITIES = 2**28
_CONSTANT = 1e-6


@dataclass(frozen=True, eq=False)
class NeighbourSearch:
    """A memory of unit vectors, all of which a query is compared with: nothing is approximate.

    The engines differ in the last bit of a similarity, and so in the order of what is nearer by
    less than that; of equally near vectors either takes any.
    """

    memory: Float[Tensor, "memory dim"]
    engine: Engine = "auto"

    @classmethod
    def of(
        cls, features: Float[Tensor, "memory dim"], engine: Engine = "auto"
    ) -> "NeighbourSearch":
        return cls(F.normalize(features.float(), dim=1), engine)

    def is_constant(self) -> bool:
        """Whether all vectors are the same, so that any of them may be called the nearest."""
        return bool((self.memory - self.memory[0]).abs().max() < _CONSTANT)

    def nearest(
        self, queries: Float[Tensor, "queries dim"], count: int
    ) -> tuple[Float[Tensor, "queries count"], Int64[Tensor, "queries count"]]:
        """Cosine similarity and index of the nearest vectors, the nearest first.

        Raises:
            MachineError: faiss is asked for on a GPU and was built without its kernels.
        """
        unit = F.normalize(queries.float(), dim=1)
        if takes_faiss(unit, self.memory, self.engine):
            return faiss_nearest(unit, self.memory, count)
        rows = max(1, _SIMILARITIES // len(self.memory))
        found = [(some @ self.memory.T).topk(count) for some in unit.split(rows)]
        return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])
