"""k-NN classification: do images of one class lie together?"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from probes.features.image import ImagePass, asked_facets, is_constant
from probes.features.split import TrainingSplit
from probes.features.stream import batches
from ssl_bench.composition.fields import (
    Count,
    Pixels,
    PositiveOrZero,
    PositiveShare,
    Temperature,
    Threads,
    check_fields,
    require_some,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import Share
from ssl_bench.metrics import LabelledFeatures, knn_ranks
from ssl_bench.neighbours import Engine

_FACETS = ("cls", "patch_mean")
_TOPS = (1, 5)
_NOT_SETTINGS = frozenset(
    {"protocol", "facet", "batch_size", "memory_gib", "num_workers", "engine"}
)

Cell = tuple[int, str]


@dataclass(frozen=True)
class KNN:
    """Images take the class that their nearest training images vote for; nothing is trained.

    Attributes:
        neighbours: How many training images vote, one or several numbers.
        temperature: A neighbour's vote is exp(cosine similarity / temperature).
        facet: What stands for an image, one or several of "cls" and "patch_mean", its mean patch;
            both after the encoder's final norm.
        image_size: Side in pixels; without it the encoder's own.
        crop_share: Side of the central square that is looked at, relative to the shorter side.
        train_images: At most so many vote, drawn with the seed.
        memory_gib: For the features; layers that do not fit wait for another pass.
        engine: What compares the images, "faiss" or "torch"; by default faiss for many images on a
            CPU, and torch else. The neighbours are the same.

    Source: `eval_knn.py` of https://github.com/facebookresearch/dino, which looks at the last
    block alone.
    """

    protocol: Literal["dino"] = "dino"
    neighbours: Sequence[Count] = (10, 20, 100, 200)
    temperature: Temperature = 0.07
    facet: str | Sequence[str] = "cls"
    image_size: Pixels | None = None
    crop_share: PositiveShare = 0.875
    train_images: Count | None = None
    batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4
    engine: Engine = "auto"

    task = "knn"
    role = "classification"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        require_some("probe.neighbours", self.neighbours)
        asked_facets(self.facet, _FACETS)

    @property
    def facets(self) -> tuple[str, ...]:
        return asked_facets(self.facet, _FACETS)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, f"top{top}_k{k}")
            for layer in sorted(layers)
            for facet in self.facets
            for k in self.neighbours
            for top in _TOPS
        ]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers; a pass over the images serves as many as fit into `memory_gib`.

        Top-5 accuracy is NaN where there are fewer than five classes.

        Raises:
            ConfigurationError: more neighbours are asked for than there are training images, or
                the encoder has no [CLS] token.
        """
        train, val = self.training_images(context.dataset), self.split(context.dataset)
        split = TrainingSplit.draw(train, at_most=self.train_images, holdout=0.0, seed=context.seed)
        self._require_enough(len(split.indices), train)
        image_pass = self._image_pass(context)
        at_once = image_pass.layers_at_once(len(split.indices) + len(val), self.memory_gib)
        for layers in batches(sorted(context.layers), at_once):
            bank = image_pass.run(train, split.indices, layers)
            queries = image_pass.run(val, range(len(val)), layers)
            for cell in itertools.product(layers, self.facets):
                vote = _Vote(queries.of(*cell), bank.of(*cell), len(val.class_names))
                yield from self._scores(cell, vote, context)

    def _require_enough(self, num_images: int, train: ImageSet) -> None:
        if max(self.neighbours) > num_images:
            raise ConfigurationError(
                f"probe.neighbours must be at most the {num_images} images of {train.name} "
                f"{train.split}, got {max(self.neighbours)}"
            )

    def _image_pass(self, context: ProbeContext) -> ImagePass:
        return ImagePass(
            context=context,
            facets=self.facets,
            image_size=self.image_size,
            crop_share=self.crop_share,
            batch_size=self.batch_size,
            workers=self.num_workers,
        )

    def _scores(self, cell: Cell, vote: "_Vote", context: ProbeContext) -> Iterator[Score]:
        ranks = vote.ranks(self, context.device)
        hits = torch.stack([ranks < top for top in _TOPS], dim=1).flatten(0, 1)  # k, top
        names = [(k, top) for k in self.neighbours for top in _TOPS]
        details = {
            "num_classes": vote.num_classes,
            "bank": len(vote.bank.labels),
            "constant_features": is_constant(vote.bank.features),
        }
        for share, (k, top) in zip((Share(row.numpy()) for row in hits), names, strict=True):
            has_meaning = vote.num_classes >= top
            yield Score(
                layer=cell[0],
                facet=cell[1],
                metric=f"top{top}_k{k}",
                value=share.value if has_meaning else math.nan,
                ci95=share.ci95() if has_meaning else None,
                num_images=hits.shape[1],
                details=details,
                per_image=share.hits,
            )


@dataclass(frozen=True, eq=False)
class _Vote:
    """What one block says of the images that are asked about and of those that answer."""

    queries: LabelledFeatures
    bank: LabelledFeatures
    num_classes: int

    def ranks(self, probe: KNN, device: torch.device) -> Int64[Tensor, "numbers queries"]:
        return knn_ranks(
            self.queries.to(device),
            self.bank.to(device),
            num_classes=self.num_classes,
            neighbours=probe.neighbours,
            temperature=probe.temperature,
            engine=probe.engine,
        ).cpu()
