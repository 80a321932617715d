"""The price of clustering patches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from probes.clustering.kmeans import Centres
from probes.clustering.passes import unit_vectors
from probes.clustering.probe import Clustering
from probes.costs.encoding import OfSplits, extractor_on, pictures
from ssl_bench.composition.fields import Count
from ssl_bench.cost.places import Place
from ssl_bench.cost.work import Step, Unit
from ssl_bench.models import ViTConfig


@dataclass(frozen=True)
class ClusteringCost(OfSplits):
    """All blocks of one encoder on one dataset with masks.

    Not in it: k-means, which the host does, with clustered patches * clusters * channels
    multiplications in each step.
    """

    classes: Count
    model: ViTConfig = field(default_factory=ViTConfig)
    probe: Clustering = field(
        default_factory=lambda: Clustering(
            protocol="patches", facet="token", image_size=512, batch_size=16
        )
    )

    def units(self, memory: float) -> Sequence[Unit]:
        del memory
        batch = self.probe.batch_size
        chosen = min(self.probe.fit_patches, self.train_images * self._patches)
        # Patches are drawn from all images: an image without any does not pass.
        seen = self.train_images * -math.expm1(-chosen / self.train_images)
        return [
            Unit("clustered images, a batch", math.ceil(seen / batch), self._clustered, waits=1),
            Unit("scored images, a batch", math.ceil(self.val_images / batch), self._near, waits=1),
        ]

    @property
    def _side(self) -> int:
        return self.probe.image_size or self.model.image_size

    @property
    def _patches(self) -> int:
        return (self._side // self.model.patch_size) ** 2

    def _clustered(self, place: Place, _: int) -> Step:
        layers, facets = range(self.model.depth), self.probe.facets
        extractor = extractor_on(place, self.model, layers, facets)
        images = pictures(self.probe.batch_size, (self._side, self._side))
        every = self.train_images * self._patches
        share = min(1.0, self.probe.fit_patches / every)
        few = max(1, round(share * self.probe.batch_size * self._patches))

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            where = place.sent(torch.arange(few))
            units = [unit_vectors(found, (layer, f))[where] for layer in layers for f in facets]
            place.fetched([sums, *(unit.half() for unit in units)])

        return step

    def _near(self, place: Place, _: int) -> Step:
        layers, facets = range(self.model.depth), self.probe.facets
        extractor = extractor_on(place, self.model, layers, facets)
        images = pictures(self.probe.batch_size, (self._side, self._side))
        numbers = tuple(times * self.classes for times in self.probe.numbers)
        vectors = torch.randn(sum(numbers), self.model.dim, device=place.device)
        centres = Centres(vectors, numbers)

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            units = [unit_vectors(found, (layer, f)) for layer in layers for f in facets]
            place.fetched([sums, *(centres.nearest(unit).int() for unit in units)])

        return step
