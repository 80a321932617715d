"""Scoring many heads at once: every image streams through all of them at its original size."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.features.sources import LayerGroup
from probes.features.stream import batches, check, extract
from probes.heads.image_counts import ImageCounts
from probes.heads.scored_images import ScoredImage, Scoring
from probes.heads.sgd import TrainedHeads
from ssl_bench.features import FeatureExtractor
from ssl_bench.intervals import Interval, mean_iou_estimate, pixel_accuracy_estimate
from ssl_bench.layers import Facet
from ssl_bench.metrics import class_counts
from ssl_bench.results import Baseline, PerImage
from ssl_bench.scores import (
    iou_per_class,
    mean_iou,
    of_constant_class,
    pixel_accuracy,
)
from ssl_bench.system.transfers import fetched, sent


@dataclass(frozen=True)
class ScoredStream:
    """Heads, and how they are scored.

    Attributes:
        batch_size: Images that pass the encoder together.
        keep: Whether predictions are given back, to be drawn.
    """

    heads: TrainedHeads
    scoring: Scoring
    classes: int
    batch_size: int
    keep: bool = False

    def count(
        self,
        extractor: FeatureExtractor,
        facet: Facet,
        items: Iterable[ScoredImage],
        per_image: ImageCounts,
        written: Callable[[ImageCounts], None] = lambda _: None,
    ) -> list[Tensor]:
        """Add counts of every image to `per_image`; give what all heads predict, if it is kept.

        The images pass the encoder once; nothing of them is kept. `written` is told of the counts
        after every batch.
        """
        kept = list[Tensor]()
        for batch in batches(items, self.batch_size):
            windows = torch.cat([item.windows for item in batch])
            ids = [item.image_id for item in batch]
            by_layer, sums = extract(extractor, facet, windows, ids)
            counts, first = [], 0
            drawn: list[Tensor] = []
            for item in batch:
                some = slice(first, first + len(item.windows))
                features = {layer: blocks[some] for layer, blocks in by_layer.items()}
                predicted = self.predict(features, item)
                counts.append(self.count_one(predicted, item.mask))
                if self.keep:
                    drawn.append(predicted)
                first = some.stop
            # Together, because the host waits for each fetching.
            sums, counts, *drawn = fetched([sums, torch.stack(counts), *drawn])
            check(extractor, sums, ids)
            per_image.add(counts)
            kept += drawn
            written(per_image)
        return kept

    def predict(
        self, features: Mapping[int, Float[Tensor, "windows rows cols dim"]], image: ScoredImage
    ) -> UInt8[Tensor, "sources values height width"]:
        """Classes of every pixel of one image by the heads of all sources."""
        predicted = []
        for index, source in enumerate(self.heads.sources):
            logits = [self.heads.logits(index, x) for x in source_features(features, source)]
            predicted.append(self.scoring.predict(torch.stack(logits), image))
        return torch.stack(predicted)

    def count_one(
        self,
        predicted: UInt8[Tensor, "sources values height width"],
        mask: UInt8[Tensor, "height width"],
    ) -> Int64[Tensor, "sources values 3 classes"]:
        """Right, predicted and true pixels by class, for the heads of all sources."""
        target = sent(mask, predicted.device)
        counts = class_counts(predicted.flatten(0, 1), target, self.classes)
        return counts.unflatten(0, predicted.shape[:2])

    def nothing(self) -> ImageCounts:
        """Counts of no image yet."""
        sources, values = self.heads.bias.shape[:2]
        return ImageCounts(sources, values, self.classes)


def source_features(
    features: Mapping[int, Float[Tensor, "windows rows cols dim"]], source: LayerGroup
) -> Float[Tensor, "windows rows cols joined_dim"]:
    """The layers of a source, concatenated."""
    return torch.cat([features[layer].float() for layer in source], -1)


@dataclass(frozen=True)
class HeadScores:
    """Scores of the heads of one source by learning rate, over a whole dataset."""

    per_image: ImageCounts
    source: int

    @property
    def num_images(self) -> int:
        return len(self.per_image)

    def total(self) -> Int64[np.ndarray, "values 3 classes"]:
        return self.per_image.total[self.source]

    def miou(self) -> list[float]:
        """Mean IoU of each rate over the classes that occur, in percent."""
        return mean_iou(self.total()).tolist()

    def best(self) -> int:
        return best_rate(self.total())

    def miou_ci95(self, rate: int) -> Interval | None:
        return mean_iou_estimate(self.counts(rate)).ci95()

    def accuracy(self, rate: int) -> float:
        return float(pixel_accuracy(self.total()[rate]))

    def accuracy_ci95(self, rate: int) -> Interval | None:
        return pixel_accuracy_estimate(self.counts(rate)).ci95()

    def counts(self, rate: int) -> PerImage:
        """Pixels that are right, predicted and true by class, for each image."""
        return self.per_image.of(self.source, rate)

    def baseline(self, metric: str, class_names: Sequence[str]) -> Baseline:
        """Naming one class at all pixels, whatever the image."""
        named, counts = of_constant_class(self.total()[0])
        score = pixel_accuracy if metric == "pixel_accuracy" else mean_iou
        return Baseline(f"constant class {class_names[named]}", float(score(counts)))

    def iou(self, rate: int) -> list[float]:
        """IoU of each class in percent, NaN where it is neither true nor predicted."""
        return iou_per_class(self.total()[rate]).tolist()


def best_rate(counts: Int64[np.ndarray, "values 3 classes"]) -> int:
    """Index of the rate with the largest mean IoU."""
    return int(np.nan_to_num(mean_iou(counts), nan=-1.0).argmax())
