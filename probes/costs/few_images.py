"""The price of TokenCut, and of probes that look at a few images: PCA and conditioning."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from probes.conditioning.probe import Conditioning
from probes.costs.encoding import extractor_on, pictures
from probes.pca.probe import PCA
from probes.tokencut.probe import TokenCut
from probes.tokencut.run import TOKENS_A_BATCH
from probes.tokencut.spectral.eigensolver_batched import krylov_space
from probes.tokencut.spectral.otsu import otsu_thresholds
from ssl_bench.composition.fields import Count, check_fields
from ssl_bench.cost.places import Place
from ssl_bench.cost.work import Step, Unit
from ssl_bench.models import ViTConfig, build_vit


@dataclass(frozen=True)
class TokenCutCost:
    """All blocks, keys.

    Not in it: the host's part, eigenvectors of 48 x 48 matrices and boxes, and graphs that are not
    certified, which the host solves.

    Attributes:
        height: Of an image in pixels, as `width`: the usual one of the dataset.
    """

    num_images: Count
    height: Count
    width: Count
    model: ViTConfig = field(default_factory=ViTConfig)
    probe: TokenCut = field(default_factory=TokenCut)

    def __post_init__(self) -> None:
        check_fields(self, "cost")

    @property
    def images(self) -> float:
        return float(self.num_images)

    def units(self, memory: float) -> Sequence[Unit]:
        del memory
        return [Unit("images, a batch", self.num_images / self._batch, self._cuts, waits=2)]

    @property
    def _size(self) -> tuple[int, int]:
        patch = self.model.patch_size
        return tuple(math.ceil(side / patch) * patch for side in (self.height, self.width))  # type: ignore[return-value]

    @property
    def _batch(self) -> int:
        return max(1, TOKENS_A_BATCH * self.model.patch_size**2 // math.prod(self._size))

    def _cuts(self, place: Place, _: int) -> Step:
        layers = range(self.model.depth)
        extractor = extractor_on(place, self.model, layers, self.probe.facets)
        images = pictures(self._batch, self._size)

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            tokens = [values.flatten(1, 2) for of in found.values() for values in of.values()]
            together = torch.cat(tokens)
            valid = torch.ones(together.shape[:2], dtype=torch.bool, device=together.device)
            own = self.probe.tau == "otsu"
            tau = otsu_thresholds(together) if own else float(self.probe.tau)
            space = krylov_space(together, valid, tau=tau, eps=self.probe.eps)
            place.fetched([sums, space.projection, space.are_finite])
            weights = torch.ones_like(space.basis[:, 0, : space.projection.shape[-1]])
            vectors = torch.einsum("gtk,gk->gt", space.basis[..., : weights.shape[-1]], weights)
            place.fetched([space.inverse_roots * vectors])

        return step


@dataclass(frozen=True)
class PCACost:
    """All blocks of the drawn images; components are the host's and not in it."""

    model: ViTConfig = field(default_factory=ViTConfig)
    probe: PCA = field(default_factory=PCA)

    def __post_init__(self) -> None:
        check_fields(self, "cost")

    @property
    def images(self) -> float:
        return float(self.probe.num_images)

    def units(self, memory: float) -> Sequence[Unit]:
        del memory
        return [Unit("image", self.images, self._features, waits=1)]

    def _features(self, place: Place, _: int) -> Step:
        layers, own = range(self.model.depth), self.model.image_size
        side = self.probe.longer_side_of((own, own))
        extractor = extractor_on(place, self.model, layers, [self.probe.scored_facet])
        images = pictures(1, (side, side))

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            place.fetched([sums, *(of[self.probe.scored_facet] for of in found.values())])

        return step


@dataclass(frozen=True)
class ConditioningCost:
    """Spectra of all blocks in float64: of each head's matrix, and of four outputs of each block.

    Not in it: their means, CKA and the figure.
    """

    model: ViTConfig = field(default_factory=ViTConfig)
    probe: Conditioning = field(default_factory=Conditioning)

    def __post_init__(self) -> None:
        check_fields(self, "cost")

    @property
    def images(self) -> float:
        return float(self.probe.num_images)

    def units(self, memory: float) -> Sequence[Unit]:
        del memory
        blocks = self.images * self.model.depth
        return [
            Unit("image", self.images, self._features, waits=1),
            Unit("spectra of a block and an image", blocks, self._spectra, waits=1),
        ]

    def _features(self, place: Place, _: int) -> Step:
        side = self.probe.image_size
        module = place.built(lambda _: build_vit(self.model, seed=0).double(), lambda one: [one])
        images = pictures(1, (side, side)).double()

        def step() -> None:
            with torch.no_grad():
                module(place.sent(images))

        return step

    def _spectra(self, place: Place, _: int) -> Step:
        tokens = (self.probe.image_size // self.model.patch_size) ** 2 + 1
        double = {"dtype": torch.float64, "device": place.device}
        heads = torch.randn(self.model.num_heads, tokens, tokens, **double)
        outputs = torch.randn(4, tokens, self.model.dim, **double)

        def step() -> None:
            values = [torch.linalg.svdvals(matrices) for matrices in (heads, outputs)]
            place.fetched(values)

        return step
