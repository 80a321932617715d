"""Dense retrieval of one encoder on one dataset: a memory of patches, votes, scores."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from probes.features.neighbours import NeighbourSearch
from probes.features.split import TrainingSplit
from probes.features.stream import batches, check, extract, read_ahead
from probes.features.tiers import TrainingPass
from probes.features.views import ResizedCrops, TrainingViews, WholeImage
from probes.heads.scored_images import SquashedScoring
from probes.heads.scores import HeadScores, ImageCounts
from probes.retrieval.probe import METRICS, Retrieval
from probes.retrieval.remembered import labelled_patches, remembered
from ssl_bench.composition.presets import guesses_of
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.intervals import few_images_warning
from ssl_bench.metrics import class_counts
from ssl_bench.scores import ABSENT_CLASS_POLICY
from ssl_bench.system.transfers import fetched, sent


@dataclass(frozen=True)
class RetrievalRun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: Retrieval
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `Retrieval.run`."""
        probe, context = self.probe, self.context
        val_images = probe.split(context.dataset)
        training_pass = self.training_pass()
        patch, classes = context.encoder.patch_size, len(val_images.class_names)
        chosen = chosen_patches(probe, labelled_patches(training_pass, patch), context.seed)
        bytes_a_layer = 4 * len(chosen) * training_pass.extractor.width(training_pass.facet)
        at_once = max(1, int(probe.memory_gib * 2**30 / bytes_a_layer))
        for layers in batches(training_pass.extractor.layers, at_once):
            patches = remembered(training_pass, layers, chosen, classes)
            memory = {
                layer: NeighbourSearch.of(features.to(context.device), probe.engine)
                for layer, features in zip(layers, patches.features, strict=True)
            }
            labels = patches.shares
            per_image = self._count(memory, labels.to(context.device), training_pass, val_images)
            for index, layer in enumerate(layers):
                scores = HeadScores(per_image, index)
                yield from self._scores(layer, scores, val_images, memory[layer])

    def training_pass(self) -> TrainingPass:
        """How training images become features and labels."""
        probe, context = self.probe, self.context
        images = probe.training_images(context.dataset)
        split = TrainingSplit.draw(
            images, at_most=probe.train_images, holdout=0.0, seed=context.seed
        )
        views: TrainingViews = WholeImage(probe.views)
        if probe.crops == "resized":
            views = ResizedCrops(probe.views, context.seed)
        layers = tuple(sorted(context.layers))
        return TrainingPass(
            extractor=FeatureExtractor(
                context.encoder,
                layers=layers,
                facets=(probe.scored_facet,),
                device=context.device,
                dtype=context.dtype,
            ),
            facet=probe.scored_facet,
            images=images,
            indices=split.indices,
            image_size=probe.image_size,
            views=views,
            label_size=probe.image_size,
            batch_size=probe.batch_size,
            workers=probe.num_workers,
            progress=context.progress,
            say=context.say,
        )

    def _count(
        self,
        memory: Mapping[int, NeighbourSearch],
        labels: Float[Tensor, "memory classes"],
        training_pass: TrainingPass,
        images: ImageSet,
    ) -> ImageCounts:
        """Stream the scored images once through the encoder and the memories of some layers."""
        probe, classes = self.probe, labels.shape[1]
        scoring = SquashedScoring(probe.image_size, probe.score_size)
        per_image = ImageCounts(len(memory), 1, classes)
        every = range(len(images))
        items = read_ahead(images, every, scoring.prepare, workers=probe.num_workers)
        shown = training_pass.progress(items, "scored images", len(images))
        for batch in batches(shown, probe.batch_size):
            windows = torch.cat([item.windows for item in batch])
            ids = [item.image_id for item in batch]
            blocks, sums = extract(training_pass.extractor, probe.scored_facet, windows, ids)
            votes = [patch_votes(probe, blocks[i], search, labels) for i, search in memory.items()]
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
            "guesses": guesses_of(self.probe, self.probe.guesses),
        }
        for metric, value, interval in zip(METRICS, values, intervals, strict=True):
            number = len(images)
            counts = scores.counts(0)
            more = details | scores.baseline(metric, images.class_names).as_details()
            yield Score(
                layer, self.probe.scored_facet, metric, value, interval, number, more, counts
            )


def chosen_patches(
    probe: Retrieval, candidates: Int64[Tensor, " labelled"], seed: int
) -> Int64[Tensor, " memory"]:
    """Patches that are remembered, of those that have a label."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)[: probe.memory_patches]
    if not len(candidates):
        raise DataError("no training patch has a label; nothing can be retrieved")
    if len(order) < probe.neighbours:
        raise ConfigurationError(
            f"probe.neighbours must be at most the {len(order)} patches of the memory, got "
            f"{probe.neighbours}"
        )
    return candidates[order].sort().values


def patch_votes(
    probe: Retrieval,
    features: Float[Tensor, "batch rows cols dim"],
    search: NeighbourSearch,
    labels: Float[Tensor, "memory classes"],
) -> Float[Tensor, "batch rows cols classes"]:
    """Share of each class among the labels of the nearest patches, the more alike the more."""
    similarity, index = search.nearest(features.flatten(0, 2), probe.neighbours)
    weights = (similarity / probe.temperature).softmax(1)
    pieces = zip(weights.split(1024), index.split(1024), strict=True)
    votes = [torch.bmm(near[:, None], labels[which])[:, 0] for near, which in pieces]
    return torch.cat(votes).view(*features.shape[:3], -1)
