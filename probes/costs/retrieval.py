"""The price of dense retrieval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from probes.costs.encoding import OfSplits, extractor_on, pictures
from probes.features.neighbours import NeighbourSearch
from probes.heads.scored_images import ScoredImage, SquashedScoring
from probes.retrieval.probe import Retrieval
from probes.retrieval.run import patch_votes
from ssl_bench.composition.fields import Count
from ssl_bench.cost.places import Place
from ssl_bench.cost.work import Step, Unit
from ssl_bench.metrics import class_counts
from ssl_bench.models import ViTConfig


@dataclass(frozen=True)
class RetrievalCost(OfSplits):
    """All blocks of one encoder on one dataset; see `SegmentationCost`."""

    classes: Count
    height: Count
    width: Count
    model: ViTConfig = field(default_factory=ViTConfig)
    probe: Retrieval = field(default_factory=Retrieval)

    def units(self, memory: float) -> Sequence[Unit]:
        del memory
        batch = self.probe.batch_size
        passes = math.ceil(self.train_images / batch) * self.probe.views
        scored = math.ceil(self.val_images / batch)
        return [
            Unit("training images, a batch", passes, self._features, waits=1),
            Unit("scored images, a batch", scored, self._scored, waits=1),
        ]

    def _features(self, place: Place, _: int) -> Step:
        layers, size = range(self.model.depth), (self.probe.image_size, self.probe.image_size)
        extractor = extractor_on(place, self.model, layers, [self.probe.scored_facet])
        images = pictures(self.probe.batch_size, size)

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            place.fetched([sums, *(found[i][self.probe.scored_facet].half() for i in layers)])

        return step

    def _scored(self, place: Place, _: int) -> Step:
        layers, side = range(self.model.depth), self.probe.image_size
        extractor = extractor_on(place, self.model, layers, [self.probe.scored_facet])
        images = pictures(self.probe.batch_size, (side, side))
        shape = (self.probe.memory_patches, self.model.dim)
        memories = [NeighbourSearch.of(torch.randn(shape, device=place.device)) for _ in layers]
        labels = torch.rand(self.probe.memory_patches, self.classes, device=place.device)
        scoring = SquashedScoring(side, self.probe.score_size)
        mask = place.sent(torch.zeros(self.height, self.width, dtype=torch.uint8))
        item = ScoredImage("", torch.zeros(0, 3, side, side), ((0, 0),), (side, side), mask)

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            votes = [
                patch_votes(
                    self.probe, found[layer][self.probe.scored_facet], memories[layer], labels
                )
                for layer in layers
            ]
            counts = []
            for number in range(len(images)):
                logits = torch.stack([vote[number] for vote in votes])[None]
                counts.append(class_counts(scoring.predict(logits, item), mask, self.classes))
            place.fetched([sums, torch.stack(counts)])

        return step
