"""What brings the channels of features to one scale before a head."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Standardisation:
    """Shift and scale of each channel that come before a head; zero and one do nothing."""

    mean: Float[Tensor, "sources dim"]
    scale: Float[Tensor, "sources dim"]

    def parts(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.scale
