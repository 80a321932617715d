"""What brings the channels of features to one scale before a head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Standardization:
    """Shift and scale of each channel that come before a head; zero and one do nothing."""

    mean: Float[Tensor, "sources dim"]
    scale: Float[Tensor, "sources dim"]

    def parts(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.scale

    def identity(self) -> "Standardization":
        """One that leaves the features as they are."""
        return Standardization(torch.zeros_like(self.scale), torch.ones_like(self.scale))

    def constant_channels(self) -> tuple[int, ...]:
        """How many channels of each source do not vary."""
        return tuple((self.scale == 0).sum(1).tolist())
