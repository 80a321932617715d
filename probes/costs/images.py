"""The price of probes that take a vector for an image: k-NN and linear classification."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from probes.classification.probe import LinearClassification
from probes.classification.training import LogisticRegression
from probes.costs.encoding import OfSplits, extractor_on, pictures
from probes.features.sources import IMAGE_FACETS
from probes.features.statistics import Standardization
from probes.heads.linear import LinearHeads
from probes.heads.losses import LabelLoss
from probes.knn.probe import KNN
from ssl_bench.composition.fields import Count
from ssl_bench.cost.places import Place
from ssl_bench.cost.work import Step, Unit
from ssl_bench.models import ViTConfig

_FACET = "cls"
# Queries that are compared with the bank at a time.
_SIMILARITIES = 2**26


@dataclass(frozen=True)
class _Pass:
    """Images through the first blocks, as often as the memory for their vectors asks."""

    model: ViTConfig
    batch_size: int
    num_images: int
    memory_gib: float

    def groups(self) -> list[range]:
        """Blocks whose vectors the host can keep together."""
        per_layer = 4 * self.model.dim * self.num_images
        at_once = max(1, int(self.memory_gib * 2**30 / per_layer))
        depth = self.model.depth
        return [range(first, min(depth, first + at_once)) for first in range(0, depth, at_once)]

    def units(self) -> Iterator[Unit]:
        times = math.ceil(self.num_images / self.batch_size)
        for layers in self.groups():
            name = f"images, a batch, blocks {layers[0]} to {layers[-1]}"
            yield Unit(name, times, lambda place, _, some=layers: self._step(place, some), waits=1)

    def _step(self, place: Place, layers: Sequence[int]) -> Step:
        extractor = extractor_on(place, self.model, layers, IMAGE_FACETS[_FACET])
        size = (self.model.image_size, self.model.image_size)
        images = (255 * pictures(self.batch_size, size)).to(torch.uint8)

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images).float() / 255)
            vectors = torch.stack([found[layer][IMAGE_FACETS[_FACET][0]] for layer in layers])
            place.fetched([sums, vectors])

        return step


@dataclass(frozen=True)
class KNNCost(OfSplits):
    """[CLS] of all blocks; classes and the first crop as the probe has them."""

    model: ViTConfig = field(default_factory=ViTConfig)
    probe: KNN = field(default_factory=KNN)

    def units(self, memory: float) -> Sequence[Unit]:
        del memory
        total, probe = self.train_images + self.val_images, self.probe
        passes = _Pass(self.model, probe.batch_size, total, probe.memory_gib)
        votes = math.ceil(self.val_images / self._rows) * self.model.depth
        return [*passes.units(), Unit("votes of some images", votes, self._votes, waits=1)]

    @property
    def _rows(self) -> int:
        return max(1, _SIMILARITIES // self.train_images)

    def _votes(self, place: Place, _: int) -> Step:
        """As `ssl_bench.neighbours.nearest`, but for images that are equally near."""
        bank = torch.randn(self.train_images, self.model.dim, device=place.device)
        queries = torch.randn(self._rows, self.model.dim, device=place.device)
        most = min(max(self.probe.neighbours), self.train_images)

        def step() -> None:
            similarities = queries @ bank.T
            values, index = similarities.topk(most)
            (similarities >= values[:, -1:]).sum(1).gt(most).any()
            index, order = index.sort(dim=1)
            values.gather(1, order).sort(dim=1, descending=True, stable=True)

        return step


@dataclass(frozen=True)
class ClassificationCost(OfSplits):
    """[CLS] of all blocks, logistic regressions for all penalties.

    The few products of L-BFGS itself are left out beside the passes over all images.

    Attributes:
        evaluations: Of the loss in a fit: a guess, for they depend on the data.
    """

    classes: Count
    evaluations: Count = 200
    model: ViTConfig = field(default_factory=ViTConfig)
    probe: LinearClassification = field(default_factory=LinearClassification)

    def units(self, memory: float) -> Sequence[Unit]:
        del memory
        training, probe = self._training, self.probe
        total = self.train_images + self.val_images
        passes = _Pass(self.model, probe.encoder_batch_size, total, probe.memory_gib)
        fitted = self.train_images * ((1 - probe.holdout) + (probe.holdout > 0))
        batches = math.ceil(fitted / training.batch_size) * self.evaluations
        units = list(passes.units())
        for layers in passes.groups():
            name = f"batch of an evaluation, blocks {layers[0]} to {layers[-1]}"
            waits = self.evaluations / batches
            make = lambda place, _, some=layers: self._evaluation(place, len(some))  # noqa: E731
            units.append(Unit(name, batches, make, waits=waits))
        return units

    @property
    def _training(self) -> LogisticRegression:
        assert isinstance(self.probe.training, LogisticRegression)
        return self.probe.training

    def _evaluation(self, place: Place, sources: int) -> Step:
        batch, values = self._training.batch_size, len(self._training.c_values)
        ones = torch.ones(sources, self.model.dim, device=place.device)
        weight = torch.zeros(sources, values, self.classes, self.model.dim, device=place.device)
        heads = LinearHeads(Standardization(ones, ones), weight, weight[..., 0].clone())
        features = torch.randn(sources, batch, 1, 1, self.model.dim, device=place.device)
        labels = torch.zeros(batch, 1, 1, dtype=torch.long, device=place.device)
        targets = LabelLoss().targets(labels, self.classes)

        def step() -> None:
            losses, parts = heads.loss_and_gradients(features, LabelLoss(), targets)
            by_head = torch.cat([parts[0].flatten(2), parts[1]], 2).flatten(0, 1)
            for one in (by_head, losses):
                one.double().mul_(0.5)

        return step
