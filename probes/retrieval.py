"""Dense retrieval: label the patches of an image by those of the training set most like them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.features.cache import TrainingPass, check, extract
from probes.features.neighbours import NeighbourSearch
from probes.features.split import TrainingSplit
from probes.features.stream import batches, read_ahead
from probes.features.training import TrainingFeatures
from probes.features.views import ResizedCrops, TrainingViews, WholeImage
from probes.heads.image_counts import ImageCounts
from probes.heads.losses import label_histograms
from probes.heads.scored_images import SquashedScoring
from probes.heads.scores import HeadScores
from ssl_bench.composition.fields import (
    Count,
    FilePath,
    Pixels,
    PositiveOrZero,
    Temperature,
    Threads,
    check_fields,
)
from ssl_bench.data.locations import cache_folder
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import Facet, FeatureExtractor
from ssl_bench.intervals import few_images_warning
from ssl_bench.metrics import class_counts
from ssl_bench.neighbours import Engine
from ssl_bench.scores import ABSENT_CLASS_POLICY, IGNORED
from ssl_bench.system.transfers import fetched, sent

_METRICS = ("miou", "pixel_accuracy")
_NOT_SETTINGS = frozenset({"protocol", "memory_gib", "cache", "num_workers", "engine", "guesses"})


@dataclass(frozen=True)
class Retrieval:
    """Patches take the labels of their nearest neighbours; nothing is trained.

    Attributes:
        protocol: The preset these values come from; records carry it.
        neighbours: How many patches of the memory vote for a patch.
        temperature: Of the softmax over their cosine similarities.
        memory_patches: Patches of the training set that are remembered, drawn with the seed.
        norm: "final": patches after the encoder's last norm. "none": the block's output.
        crops: "whole" or "resized" training images, as in linear segmentation.
        batch_size: Images that pass the encoder together.
        score_size: Masks are reduced to this size before scoring; the original size if None.
        engine: What compares the patches, "faiss" or "torch"; by default faiss for many on a
            CPU, and torch else.

    Source: Balazevic et al., "Towards In-Context Scene Understanding",
    https://arxiv.org/abs/2306.01667. Ignored pixels are left out of the label histograms, where
    https://github.com/vpariza/open-hummingbird-eval counts them as class 0.
    """

    protocol: str = "ssl_bench"
    neighbours: Count = 30
    temperature: Temperature = 0.02
    memory_patches: Count = 100_000
    image_size: Pixels = 512
    norm: Literal["none", "final"] = "none"
    crops: Literal["whole", "resized"] = "whole"
    views: Count = 1
    train_images: Count | None = None
    score_size: Pixels | None = None
    batch_size: Count = 16
    memory_gib: PositiveOrZero = 8.0
    cache: FilePath | None = None
    num_workers: Threads = 4
    engine: Engine = "auto"
    guesses: Sequence[str] = ()

    task = "retrieval"
    role = "segmentation"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, self.facet, m) for layer in sorted(layers) for m in _METRICS]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}

    @property
    def facet(self) -> Facet:
        return "token_normed" if self.norm == "final" else "token"

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers, as many at once as their memories fit into `memory_gib`.

        Raises:
            ConfigurationError: more neighbours are asked for than there are patches.
            DataError: no training patch has a label.
        """
        val_images = self.split(context.dataset)
        training_pass = self._training_pass(context)
        features = training_pass.run(
            memory_gib=self.memory_gib, folder=cache_folder(self.cache) / "features"
        )
        patch = context.encoder.patch_size
        chosen = self._chosen(features.labels, patch, context.seed)
        labels = _label_shares(features.labels, patch, len(val_images.class_names), chosen)
        bytes_a_layer = 4 * len(chosen) * context.encoder.dim
        at_once = max(1, int(self.memory_gib * 2**30 / bytes_a_layer))
        for layers in batches(training_pass.extractor.layers, at_once):
            memory = {i: self._search(features, i, chosen, context.device) for i in layers}
            per_image = self._count(memory, labels.to(context.device), training_pass, val_images)
            for index, layer in enumerate(layers):
                scores = HeadScores(per_image, index)
                yield from self._scores(layer, scores, val_images, memory[layer])

    def _training_pass(self, context: ProbeContext) -> TrainingPass:
        images = self.training_images(context.dataset)
        split = TrainingSplit.draw(
            images, at_most=self.train_images, holdout=0.0, seed=context.seed
        )
        views: TrainingViews = WholeImage(self.views)
        if self.crops == "resized":
            views = ResizedCrops(self.views, context.seed)
        return TrainingPass(
            extractor=FeatureExtractor(
                context.encoder,
                layers=sorted(context.layers),
                facets=(self.facet,),
                device=context.device,
                dtype=context.dtype,
            ),
            facet=self.facet,
            images=images,
            indices=split.indices,
            image_size=self.image_size,
            views=views,
            label_size=self.image_size,
            batch_size=self.batch_size,
            workers=self.num_workers,
            progress=context.progress,
            say=context.say,
        )

    def _chosen(
        self, labels: UInt8[Tensor, "entries height width"], patch: int, seed: int
    ) -> Int64[Tensor, " memory"]:
        """Patches that are remembered, counted over all entries; each has a labelled pixel."""
        labelled = (labels != IGNORED).unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
        candidates = labelled.any(4).any(2).flatten().nonzero()[:, 0]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(candidates), generator=generator)[: self.memory_patches]
        if not len(candidates):
            raise DataError("no training patch has a label; nothing can be retrieved")
        if len(order) < self.neighbours:
            raise ConfigurationError(
                f"probe.neighbours must be at most the {len(order)} patches of the memory, got "
                f"{self.neighbours}"
            )
        return candidates[order].sort().values

    def _search(
        self,
        features: TrainingFeatures,
        layer: int,
        chosen: Int64[Tensor, " memory"],
        device: torch.device,
    ) -> NeighbourSearch:
        return NeighbourSearch.of(features.of_patches(layer, chosen).to(device), self.engine)

    def _count(
        self,
        memory: Mapping[int, NeighbourSearch],
        labels: Float[Tensor, "memory classes"],
        training_pass: TrainingPass,
        images: ImageSet,
    ) -> ImageCounts:
        """Stream the scored images once through the encoder and the memories of some layers."""
        scoring, classes = SquashedScoring(self.image_size, self.score_size), labels.shape[1]
        per_image = ImageCounts(len(memory), 1, classes)
        items = read_ahead(images, range(len(images)), scoring.prepare, workers=self.num_workers)
        shown = training_pass.progress(items, "scored images", len(images))
        for batch in batches(shown, self.batch_size):
            windows = torch.cat([item.windows for item in batch])
            ids = [item.image_id for item in batch]
            blocks, sums = extract(training_pass.extractor, self.facet, windows, ids)
            votes = [self.votes(blocks[layer], search, labels) for layer, search in memory.items()]
            counts = []
            for position, item in enumerate(batch):
                logits = torch.stack([vote[position] for vote in votes])[None]
                predicted = scoring.predict(logits, item)
                target = sent(item.mask, predicted.device)
                counts.append(class_counts(predicted, target, classes))
            # Together, because the host waits for each fetching.
            sums, counts = fetched([sums, torch.stack(counts)])
            check(training_pass.extractor, sums, ids)
            per_image.add(counts[:, :, None])
        return per_image

    def votes(
        self,
        features: Float[Tensor, "batch rows cols dim"],
        search: NeighbourSearch,
        labels: Float[Tensor, "memory classes"],
    ) -> Float[Tensor, "batch rows cols classes"]:
        """Share of each class among the labels of the nearest patches, the more alike the more."""
        similarity, index = search.nearest(features.flatten(0, 2), self.neighbours)
        weights = (similarity / self.temperature).softmax(1)
        pieces = zip(weights.split(1024), index.split(1024), strict=True)
        votes = [torch.bmm(near[:, None], labels[which])[:, 0] for near, which in pieces]
        return torch.cat(votes).view(*features.shape[:3], -1)

    def _scores(
        self, layer: int, scores: HeadScores, images: ImageSet, search: NeighbourSearch
    ) -> Iterator[Score]:
        values = (scores.miou()[0], scores.accuracy(0))
        intervals = (scores.miou_ci95(0), scores.accuracy_ci95(0))
        iou = [None if value != value else value for value in scores.iou(0)]
        details = {
            "iou_by_class": dict(zip(images.class_names, iou, strict=True)),
            "absent_classes": ABSENT_CLASS_POLICY,
            "memory_patches": len(search.memory),
            "constant_features": search.is_constant(),
            "warnings": few_images_warning(len(images)),
            "guesses": list(self.guesses),
        }
        for metric, value, interval in zip(_METRICS, values, intervals, strict=True):
            number = len(images)
            counts = scores.counts(0)
            yield Score(layer, self.facet, metric, value, interval, number, details, counts)


def _label_shares(
    labels: UInt8[Tensor, "entries height width"],
    patch: int,
    classes: int,
    chosen: Int64[Tensor, " memory"],
) -> Float[Tensor, "memory classes"]:
    """Share of each class among the labelled pixels of the remembered patches."""
    shares = torch.empty(len(chosen), classes)
    patches, filled = (labels.shape[1] // patch) * (labels.shape[2] // patch), 0
    for start in range(0, len(labels), 16):
        histograms = label_histograms(labels[start : start + 16], patch, classes).flatten(1)
        inside = (chosen >= start * patches) & (chosen < (start + 16) * patches)
        counts = histograms[:, chosen[inside] - start * patches].T
        shares[filled : filled + len(counts)] = counts / counts.sum(1, keepdim=True)
        filled += len(counts)
    return shares
