"""Mean and deviation of each channel over a training set, batch by batch."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ssl_bench.system.device import float64_device, in_float64

_AT_ONCE = 16


@dataclass(frozen=True)
class Standardization:
    """Shift and scale of each channel that come before a head; zero and one do nothing."""

    mean: Float[Tensor, "sources dim"]
    scale: Float[Tensor, "sources dim"]

    def parts(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.scale

    def on(self, device: torch.device) -> "Standardization":
        return Standardization(self.mean.to(device), self.scale.to(device))

    def identity(self) -> "Standardization":
        """One that leaves the features as they are."""
        return Standardization(torch.zeros_like(self.scale), torch.ones_like(self.scale))

    def constant_channels(self) -> tuple[int, ...]:
        """How many channels of each source do not vary."""
        return tuple((self.scale == 0).sum(1).tolist())


@dataclass
class RunningStatistics:
    """What is known of the channels of each layer so far, in float64.

    Images have equally many patches, so the variance of a channel is the mean of those within the
    images plus that between their means. Those between are gathered as by Chan, Golub and LeVeque,
    "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).

    Attributes:
        mean: Of the means of the images.
        between: Sum of the squared distances of these from it.
        within: Sum of the variances within the images.
    """

    images: int
    mean: Float64[Tensor, "layers dim"]
    between: Float64[Tensor, "layers dim"]
    within: Float64[Tensor, "layers dim"]

    @classmethod
    def none(cls, device: torch.device) -> "RunningStatistics":
        zero = torch.zeros(1, 1, dtype=torch.float64, device=float64_device(device))
        return cls(0, zero, zero, zero)

    def add(self, features: Float[Tensor, "layers some rows cols dim"]) -> None:
        for part in features.split(_AT_ONCE, 1):
            variance, mean = torch.var_mean(part.float().flatten(2, 3), 2, correction=0)
            self._join(in_float64(mean), in_float64(variance))

    def _join(
        self,
        means: Float64[Tensor, "layers some dim"],
        variances: Float64[Tensor, "layers some dim"],
    ) -> None:
        some, mean = means.shape[1], means.mean(1)
        total, distance = self.images + some, mean - self.mean
        around = (means - mean[:, None]).square().sum(1)
        self.between = self.between + around + distance.square() * (self.images * some / total)
        self.mean = self.mean + distance * (some / total)
        self.within = self.within + variances.sum(1)
        self.images = total

    def standardization(self, sources: int) -> Standardization:
        """What brings the channels of the sources, whose layers follow each other, to one scale."""
        deviation = ((self.within + self.between) / self.images).sqrt()
        # A channel that does not vary in float16 says nothing; dividing would blow up its rounding.
        varies = deviation > 1e-4 * self.mean.abs()
        scale = torch.where(varies, 1 / deviation.clamp(min=1e-12), 0)
        mean, scale = (part.float().reshape(sources, -1) for part in (self.mean, scale))
        return Standardization(mean, scale)

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def on(self, device: torch.device) -> "RunningStatistics":
        parts = (self.mean, self.between, self.within)
        return RunningStatistics(self.images, *(part.to(float64_device(device)) for part in parts))
