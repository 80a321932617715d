"""Initial filters of depthwise convolutions as pure functions of their sizes and a generator.

Pixels of a filter are counted row by row; everything is float64, so that rounding happens once, at
the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Generator, Tensor, nn

from ssl_bench.models.initialisers.options import (
    CovarianceOptions,
    NoOptions,
    make_initialiser,
)

Filters = Float64[Tensor, "{count} {size} {size}"]
Covariance = Float64[Tensor, "pixels pixels"]


@dataclass(frozen=True)
class UniformFilters(NoOptions):
    """Independent weights between -1 / size and 1 / size, PyTorch's default."""

    def filters(
        self,
        count: int,
        size: int,
        depth: float,  # noqa: ARG002 - the same in every layer
        generator: Generator,
    ) -> Filters:
        """Filters of `size` x `size` pixels; `depth` is 0 in the first layer and 1 in the last."""
        unit = torch.rand(count, size, size, generator=generator, dtype=torch.float64)
        return (2 * unit - 1) / size


@dataclass(frozen=True)
class CovarianceFilters(CovarianceOptions, UniformFilters):
    """Normal filters with the covariance of trained ones: focused at first, wider with depth."""

    def filters(self, count: int, size: int, depth: float, generator: Generator) -> Filters:
        """Cost: an eigendecomposition of size^2 x size^2, once a layer."""
        root = positive_root(filter_covariance(size, self.sigma(depth)))
        normal = torch.randn(count, size**2, generator=generator, dtype=torch.float64)
        return (normal @ root).unflatten(1, (size, size))


FILTER_INITIALISERS: dict[str, type[UniformFilters]] = {
    "uniform": UniformFilters,
    "covariance": CovarianceFilters,
}


def filter_initialiser_of(name: str, options: Mapping[str, Any]) -> UniformFilters:
    """The initialiser of that name."""
    return make_initialiser(FILTER_INITIALISERS, name, options)


def draw_uniform(layer: nn.Module, generator: Generator) -> None:
    """Weights and biases of a convolution or linear layer as PyTorch draws them by default."""
    bound = layer.get_parameter("weight")[0].numel() ** -0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


def draw_filters(
    layers: Sequence[nn.Module], initialiser: UniformFilters, generator: Generator
) -> None:
    """Depthwise filters of all layers of a network, which lie evenly between depths 0 and 1."""
    for layer, convolution in enumerate(layers):
        weight = convolution.get_parameter("weight")
        count, _, size, _ = weight.shape
        depth = layer / max(1, len(layers) - 1)
        filters = initialiser.filters(count, size, depth, generator)
        weight.copy_(filters[:, None])


def centered_gaussian(size: int, sigma: float) -> Float64[Tensor, "{size} {size}"]:
    """exp(-r^2 / (2 sigma)) at the distance r from the middle pixel: equation 3.5.

    Its indices, from 1 on with a center of floor(size / 2), would put the peak one pixel before the
    middle of an odd filter; counted from 0, as in its figure A.3, they put it there.
    """
    squares = (torch.arange(size, dtype=torch.float64) - size // 2) ** 2
    return torch.exp(-(squares[:, None] + squares) / (2 * sigma))


def filter_covariance(size: int, sigma: float) -> Covariance:
    """Covariance of the pixels of a filter, symmetric, but not yet positive semi-definite.

    With z_p the Gaussian about the middle and c_pq the one about pixel p, both at pixel q, it is
    ((z_p + z_q) c_pq - z_p z_q) / 2: equation 3.10, in the order of equation 3.1.

    The Gaussian of equation 3.6 is moved forward until its peak is at p, and what leaves one side
    comes back on the other, as the text and figure A.3 have it. Equation B.1 prints the
    opposite direction, which would put the peak at the mirror image of p. Equation 3.9 lacks
    the factor 1/2 that 3.10 and figure A.3 have.

    Args:
        size: Pixels along a side; odd.
        sigma: Squared width of the Gaussians, in pixels squared.
    """
    still = centered_gaussian(size, sigma)
    middle = size // 2
    moved = torch.stack(
        [
            still.roll((row - middle, col - middle), dims=(0, 1)).flatten()
            for row in range(size)
            for col in range(size)
        ]
    )
    static, mask = still.flatten()[None, :], still.flatten()[:, None]
    return (mask * (moved - static) + static * moved) / 2


def positive_root(covariance: Covariance) -> Covariance:
    """Symmetric root of the nearest positive semi-definite matrix.

    The root is symmetric because that one is unique: eigenvectors of equal eigenvalues, of which
    these matrices have many, are whatever basis the library finds.

    NumPy's `multivariate_normal`, which figure A.4 calls, does not project but flips the sign of
    negative eigenvalues.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
