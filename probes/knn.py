"""k-NN classification: do images of one class lie together?"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.image_stream import batches, read_ahead
from probes.training_split import TrainingSplit
from ssl_bench.data.central_square import central_square
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import Facet, FeatureExtractor
from ssl_bench.metrics import LabelledFeatures, bootstrap_sums, interval95, knn_ranks

FACETS: dict[str, Facet] = {"cls": "cls_normed", "patch_mean": "token_normed"}
_TOPS = (1, 5)
_NOT_SETTINGS = frozenset({"protocol", "facet", "batch_size", "memory_gib", "num_workers"})
# Unit vectors closer than this to each other tell nothing apart.
_CONSTANT = 1e-6

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

    Source: `eval_knn.py` of https://github.com/facebookresearch/dino, which looks at the last
    block alone.
    """

    protocol: str = "dino"
    neighbours: Sequence[int] = (10, 20, 100, 200)
    temperature: float = 0.07
    facet: str | Sequence[str] = "cls"
    image_size: int | None = None
    crop_share: float = 0.875
    train_images: int | None = None
    batch_size: int = 64
    memory_gib: float = 8.0
    num_workers: int = 4

    task = "knn"
    role = "classification"

    def __post_init__(self) -> None:
        if self.protocol != "dino":
            raise ConfigurationError(f"probe.protocol must be dino, got {self.protocol}")
        if not self.neighbours or min(self.neighbours) < 1:
            raise ConfigurationError(
                f"probe.neighbours expects numbers >= 1, got {list(self.neighbours)}"
            )
        unknown = set(self._asked_facets()).difference(FACETS)
        if unknown or not self._asked_facets():
            raise ConfigurationError(
                f"probe.facet must be among {', '.join(FACETS)}, got {self.facet}"
            )
        if self.temperature <= 0 or not 0 < self.crop_share <= 1:
            raise ConfigurationError(
                "probe.temperature must be > 0 and probe.crop_share in (0, 1], got "
                f"{self.temperature} and {self.crop_share}"
            )

    @property
    def facets(self) -> tuple[str, ...]:
        return tuple(facet for facet in FACETS if facet in self._asked_facets())

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

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers; a pass over the images serves as many as fit into `memory_gib`.

        Top-5 accuracy is NaN where there are fewer than five classes.

        Raises:
            ConfigurationError: more neighbours are asked for than there are training images, or
                the encoder has no [CLS] token.
        """
        train, val = context.dataset.train(), self.split(context.dataset)
        split = TrainingSplit.draw(train, at_most=self.train_images, holdout=0.0, seed=context.seed)
        self._require_enough(len(split.indices), train)
        self._require_cls(context)
        bytes_a_layer = 4 * len(self.facets) * (len(split.indices) + len(val)) * context.encoder.dim
        at_once = max(1, int(self.memory_gib * 2**30 / bytes_a_layer))
        for layers in batches(sorted(context.layers), at_once):
            bank = self._describe(train, split.indices, layers, context)
            queries = self._describe(val, range(len(val)), layers, context)
            for cell in bank:
                vote = _Vote(queries[cell], bank[cell], len(val.class_names))
                yield from self._scores(cell, vote, context)

    def _asked_facets(self) -> list[str]:
        return [self.facet] if isinstance(self.facet, str) else list(self.facet)

    def _require_enough(self, num_images: int, train: ImageSet) -> None:
        if max(self.neighbours) > num_images:
            raise ConfigurationError(
                f"probe.neighbours must be at most the {num_images} images of {train.name} "
                f"{train.split}, got {max(self.neighbours)}"
            )

    def _require_cls(self, context: ProbeContext) -> None:
        if "cls" in self.facets and not context.encoder.has_cls:
            raise ConfigurationError(
                f"{context.encoder.name} has no [CLS] token; take probe.facet=patch_mean"
            )

    def _describe(
        self,
        images: ImageSet,
        indices: Sequence[int],
        layers: Sequence[int],
        context: ProbeContext,
    ) -> dict[Cell, LabelledFeatures]:
        """Features of images by layer and facet, in host memory."""
        extractor = FeatureExtractor(
            context.encoder,
            layers=layers,
            facets=[FACETS[facet] for facet in self.facets],
            device=context.device,
            dtype=context.dtype,
        )
        shape = (len(indices), extractor.dim)
        features = {(la, facet): torch.empty(shape) for la in layers for facet in self.facets}
        prepared = read_ahead(images, indices, self._preparer(context), workers=self.num_workers)
        shown = context.progress(prepared, f"{images.split} images", len(indices))
        labels: list[int] = []
        for batch in batches(shown, self.batch_size):
            pixels = torch.stack([pixels for pixels, _ in batch]).to(context.device)
            rows = slice(len(labels), len(labels) + len(batch))
            ids = [images.ids[index] for index in indices[rows]]
            for layer, found in extractor(pixels.float() / 255, ids).items():
                for facet in self.facets:
                    features[layer, facet][rows] = _as_vectors(found[FACETS[facet]]).cpu()
            labels += [label for _, label in batch]
        classes = torch.tensor(labels)
        return {cell: LabelledFeatures(values, classes) for cell, values in features.items()}

    def _preparer(
        self, context: ProbeContext
    ) -> Callable[[Sample], tuple[UInt8[Tensor, "3 size size"], int]]:
        size = self.image_size or min(context.encoder.native_size)

        def prepare(sample: Sample) -> tuple[UInt8[Tensor, "3 size size"], int]:
            assert sample.label is not None
            return central_square(sample.image, size, share=self.crop_share), sample.label

        return prepare

    def _scores(self, cell: Cell, vote: "_Vote", context: ProbeContext) -> Iterator[Score]:
        ranks = vote.ranks(self, context.device)
        hits = torch.stack([ranks < top for top in _TOPS], dim=1).flatten(0, 1)  # k, top
        shares = 100 * hits.double().mean(1)
        resamples = 100 * bootstrap_sums(hits.T.long(), seed=context.seed) / hits.shape[1]
        names = [(k, top) for k in self.neighbours for top in _TOPS]
        details = {
            "num_classes": vote.num_classes,
            "bank": len(vote.bank.labels),
            "constant_features": vote.is_constant(),
        }
        for column, (k, top) in enumerate(names):
            has_meaning = vote.num_classes >= top
            yield Score(
                layer=cell[0],
                facet=cell[1],
                metric=f"top{top}_k{k}",
                value=float(shares[column]) if has_meaning else math.nan,
                ci95=interval95(resamples[:, column]) if has_meaning else None,
                num_images=hits.shape[1],
                details=details,
                per_image=hits[column].numpy(),
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
        ).cpu()

    def is_constant(self) -> bool:
        """Whether all images of the bank look the same to the block."""
        unit = F.normalize(self.bank.features, dim=1)
        return bool((unit - unit[0]).abs().max() < _CONSTANT)


def _as_vectors(
    features: Float[Tensor, "batch dim"] | Float[Tensor, "batch rows cols dim"],
) -> Float[Tensor, "batch dim"]:
    return features if features.ndim == 2 else features.flatten(1, 2).mean(1)
