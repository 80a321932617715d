"""Features of a batch as every tier has them: float16, and refused where they are not finite."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float16
from torch import Tensor

from probes.features.stream import check, extract
from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.system.transfers import fetched

Half = Float16[Tensor, "batch rows cols dim"]


@dataclass(frozen=True)
class HalfFeatures:
    """What rounds the features of all layers of an extractor."""

    extractor: FeatureExtractor
    facet: Facet

    def fetched(
        self, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str]
    ) -> list[Half]:
        """By layer in host memory, which waits for them once.

        Raises:
            CheckpointError: a feature is not finite in float16.
        """
        halves, finite, sums = self._computed(images, ids)
        sums, finite, *halves = fetched([sums, finite, *halves])
        self._require_finite(sums, finite, ids)
        return halves

    def left(self, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str]) -> list[Half]:
        """As `fetched`, left on the device."""
        halves, finite, sums = self._computed(images, ids)
        sums, finite = fetched([sums, finite])
        self._require_finite(sums, finite, ids)
        return halves

    def _computed(
        self, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str]
    ) -> tuple[list[Half], Bool[Tensor, "layers batch"], Float[Tensor, "layers batch"]]:
        """Features by layer, which of them are finite in float16, and what `check` takes."""
        layers = self.extractor.layers
        features, sums = extract(self.extractor, self.facet, images, ids)
        halves = [features[layer].half() for layer in layers]
        return halves, torch.stack([half.isfinite().flatten(1).all(1) for half in halves]), sums

    def _require_finite(
        self,
        sums: Float[Tensor, "layers batch"],
        finite: Bool[Tensor, "layers batch"],
        ids: Sequence[str],
    ) -> None:
        check(self.extractor, sums, ids)
        for index, image in finite.logical_not().nonzero().tolist():
            raise CheckpointError(
                f"layer {self.extractor.layers[index]} of {self.extractor.encoder.name} gives "
                f"features beyond float16 (65504) for image {ids[image]}; try probe.norm=final"
            )
