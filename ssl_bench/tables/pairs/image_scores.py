"""A metric over the blocks of one checkpoint, from what each image contributes to it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from ssl_bench.intervals import Estimate
from ssl_bench.results import PerImage, Record, ResultStore
from ssl_bench.results.contributions import adds_up, kind_of

FOLDS = 5


@dataclass(frozen=True)
class ImageCurve:
    """One metric of one checkpoint over its blocks, image by image.

    Attributes:
        per_image: By block.
    """

    metric: str
    per_image: Mapping[int, PerImage]

    def value(self, per_image: PerImage) -> float:
        """The metric, of some of the images."""
        return kind_of(self.metric).value(per_image)

    def estimate(self, per_image: PerImage) -> Estimate:
        """The metric with its interval."""
        return kind_of(self.metric).estimate(per_image)

    def best_layer(self, images: Int64[np.ndarray, " chosen"] | slice = slice(None)) -> int:
        """The block with the largest value on some of the images."""
        values = {layer: self.value(counts[images]) for layer, counts in self.per_image.items()}
        return max(values, key=lambda layer: np.nan_to_num(values[layer], nan=-1.0))

    def held_out(self) -> tuple[PerImage, list[int]]:
        """Every image as the block sees it that the images of the other folds choose.

        Returns:
            The contributions, and the block that each fold was given.
        """
        num_images = len(next(iter(self.per_image.values())))
        order = np.random.default_rng(0).permutation(num_images)
        folds = [fold for fold in np.array_split(order, FOLDS) if len(fold)]
        mixed = np.empty_like(next(iter(self.per_image.values())))
        layers = []
        for fold in folds:
            others = np.setdiff1d(order, fold)
            layers.append(self.best_layer(others if len(others) else fold))
            mixed[fold] = self.per_image[layers[-1]][fold]
        return mixed, layers


@dataclass(frozen=True)
class Scored:
    """The estimates of a curve, each made once however often it is compared.

    Attributes:
        blocks: By layer.
        best: The layer with the largest value.
        held_out: Of every image as the block sees it that other images choose.
        layers_held_out: The blocks that were chosen.
    """

    blocks: Mapping[int, Estimate]
    best: int
    held_out: Estimate
    layers_held_out: tuple[int, ...]

    @classmethod
    def of(cls, curve: ImageCurve) -> "Scored":
        """Of at least one block, all of the same images."""
        mixed, layers = curve.held_out()
        blocks = {layer: curve.estimate(some) for layer, some in curve.per_image.items()}
        return cls(
            blocks=blocks,
            best=curve.best_layer(),
            # A block that all folds choose is that block, and no different from itself.
            held_out=blocks[layers[0]] if len(set(layers)) == 1 else curve.estimate(mixed),
            layers_held_out=tuple(sorted(set(layers))),
        )


def stored_curve(store: ResultStore, records: Sequence[Record]) -> ImageCurve:
    """Of records of one checkpoint and seed; without blocks whose images were not kept.

    Contributions that do not add up to the value of their record join `store.damaged`.
    """
    kept = {}
    for record in records:
        per_image = store.per_image(record)
        if per_image is not None and adds_up(per_image, record):
            kept[record.layer] = per_image
        # Without a meaning, as top-5 of two classes, there is nothing that they add up to.
        elif per_image is not None and not math.isnan(record.value):
            store.damaged.append(store.per_image_path(record))
    return ImageCurve(records[0].metric if records else "", kept)
