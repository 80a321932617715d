"""The price of linear segmentation: features, heads, scored images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from probes.costs.encoding import OfSplits, extractor_on, pictures
from probes.features.statistics import Standardization
from probes.heads.linear import ParallelHeads
from probes.heads.losses import PixelLoss
from probes.heads.optimizers import Schedule
from probes.heads.scored_images import ScoredImage
from probes.heads.scores import ScoredStream
from probes.heads.sgd import Heads, HeadTraining, TrainedHeads
from probes.segmentation.probe import Segmentation
from ssl_bench.composition.fields import Count
from ssl_bench.cost.places import Place
from ssl_bench.cost.work import Step, Unit
from ssl_bench.models import Encoder, ViTConfig

_HALF = 2


@dataclass(frozen=True)
class SegmentationCost(OfSplits):
    """All blocks of one encoder on one dataset, heads trained step by step.

    Not in it: decoding, and reading features from the disk where the host's memory is too small.

    Attributes:
        classes: That are told apart.
        height: Of a scored image in pixels, as `width`: the usual one of the dataset.
    """

    classes: Count
    height: Count
    width: Count
    model: ViTConfig = field(default_factory=ViTConfig)
    probe: Segmentation = field(default_factory=Segmentation)

    def units(self, memory: float) -> Sequence[Unit]:
        batch, held_out = self.probe.training.batch_size, self.train_images * self.probe.holdout
        passes = math.ceil(self.train_images / batch) * self.probe.views
        if self.probe.tier == "stream":
            # Mean and deviation of the channels, and every epoch.
            passes *= 1 + self._training.epochs
        steps = math.ceil((self.train_images - held_out) / batch) * self._training.epochs
        where = "near" if self._is_near(memory) else "sent"
        scored = math.ceil(self.val_images / batch)
        return [
            Unit("training images, a batch", passes, self._features, waits=1),
            Unit(f"heads' step, features {where}", steps, self._stepping(memory)),
            Unit("held-out image", held_out, self._held_out),
            Unit("scored images, a batch", scored, self._scored, waits=1),
        ]

    @property
    def _training(self) -> HeadTraining:
        heads = Heads(self._loss, self._standardizes, self.classes, 0, torch.device("cpu"))
        training = self.probe.training.of_heads(heads)
        assert isinstance(training, HeadTraining)
        return training

    @property
    def _standardizes(self) -> bool:
        return self.probe.norm == "standardize"

    @property
    def _loss(self) -> PixelLoss:
        return self.probe.loss.of_pixels(self.probe.image_size, self.model.patch_size)

    @property
    def _side(self) -> int:
        return self.probe.image_size // self.model.patch_size

    @property
    def _layer_bytes(self) -> int:
        entries = self.train_images * self.probe.views
        return _HALF * entries * self._side**2 * self.model.dim

    def _features(self, place: Place, _: int) -> Step:
        batch, layers = self.probe.training.batch_size, range(self.model.depth)
        extractor = extractor_on(place, self.model, layers, [self.probe.scored_facet])
        images = pictures(batch, (self.probe.image_size, self.probe.image_size))

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            halves = [found[layer][self.probe.scored_facet].half() for layer in layers]
            finite = torch.stack([half.isfinite().flatten(1).all(1) for half in halves])
            place.fetched([sums, finite, *halves])

        return step

    def _is_near(self, memory: float) -> bool:
        """Whether the features are kept on the device; see `FeaturesInMemory`."""
        return self.probe.tier != "stream" and 2 * self.model.depth * self._layer_bytes <= memory

    def _stepping(self, memory: float) -> Callable[[Place, int], Step]:
        return lambda place, _: self._heads_step(place, is_near=self._is_near(memory))

    def _heads_step(self, place: Place, *, is_near: bool) -> Step:
        training, loss, side = self._training, self._loss, self._side
        entries = self.train_images if is_near else training.batch_size
        shape = (self.model.depth, entries, side, side, self.model.dim)
        ones = torch.ones(self.model.depth, self.model.dim, device=place.device)
        bank = ParallelHeads(
            Standardization(torch.zeros_like(ones), ones), classes=self.classes,
            rates=training.values, optimizer=training.optimizer, seed=0,
        )  # fmt: skip
        blocks = torch.zeros(shape, dtype=torch.float16, device=place.device if is_near else "cpu")
        chosen = torch.arange(training.batch_size, device=blocks.device) % entries
        label_side = loss.label_size(side)
        labels = torch.zeros(training.batch_size, label_side, label_side, dtype=torch.uint8)
        rate = Schedule("constant", 0.0).factor(1, 2)

        def step() -> None:
            targets = loss.targets(place.sent(labels), self.classes)
            bank.step(place.sent(blocks.index_select(1, chosen)), loss, targets, rate_factor=rate)

        return step

    def _stream(self, place: Place, encoder: Encoder) -> ScoredStream:
        weight = torch.randn(
            self.model.depth, len(self._training.values), self.classes, self.model.dim,
            device=place.device,
        )  # fmt: skip
        sources = tuple((layer,) for layer in range(self.model.depth))
        heads = TrainedHeads(sources, weight, weight[..., 0].clone(), (0,) * len(sources), 0.0)
        scoring = self.probe.inference.of_images(self.probe.image_size, encoder)
        return ScoredStream(heads, scoring, self.classes, self.probe.training.batch_size, 0)

    def _image(self, place: Place) -> ScoredImage:
        """Without pixels: those of a batch are made together."""
        side = self.probe.image_size
        mask = place.sent(torch.zeros(self.height, self.width, dtype=torch.uint8))
        nothing = torch.zeros(0, 3, side, side)
        return ScoredImage("", nothing, ((0, 0),), (side, side), mask)

    def _held_out(self, place: Place, _: int) -> Step:
        extractor = extractor_on(place, self.model, [0], [self.probe.scored_facet])
        stream, image = self._stream(place, extractor.encoder), self._image(place)
        entry = torch.zeros(1, self._side, self._side, self.model.dim, dtype=torch.float16)

        def step() -> None:
            blocks = {layer: place.sent(entry) for layer in range(self.model.depth)}
            stream.count_one(stream.predict(blocks, image), image.mask)

        return step

    def _scored(self, place: Place, _: int) -> Step:
        layers, size = range(self.model.depth), (self.probe.image_size, self.probe.image_size)
        extractor = extractor_on(place, self.model, layers, [self.probe.scored_facet])
        stream, image = self._stream(place, extractor.encoder), self._image(place)
        images = pictures(self.probe.training.batch_size, size)

        def step() -> None:
            found, sums = extractor.unchecked(place.sent(images))
            counts = []
            for number in range(len(images)):
                some = slice(number, number + 1)
                blocks = {layer: found[layer][self.probe.scored_facet][some] for layer in layers}
                counts.append(stream.count_one(stream.predict(blocks, image), image.mask))
            place.fetched([sums, torch.stack(counts)])

        return step
