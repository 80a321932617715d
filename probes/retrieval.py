"""Dense retrieval: label the patches of an image by those of the training set most like them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float16, Int64
from torch import Tensor

from probes.features.image import is_constant
from probes.features.split import TrainingSplit, parse_patch_facet
from probes.features.stream import batches, extract, fetch_finite, read_ahead
from probes.features.tiers import TrainingPass
from probes.features.views import ResizedCrops, WholeImage
from probes.heads.losses import label_histograms
from probes.heads.scored_images import ImageCounts, Squashed, mask_score
from ssl_bench.composition.compose import fill_in_guesses
from ssl_bench.composition.fields import (
    Count,
    Engine,
    Pixels,
    PositiveOrZero,
    Temperature,
    Threads,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.intervals import few_images_warning
from ssl_bench.layers import FacetSpec
from ssl_bench.metrics import class_counts, confusion_counts
from ssl_bench.neighbours import faiss_nearest, prefers_faiss, unit_vectors, zero_vectors_warning
from ssl_bench.results import Baseline
from ssl_bench.scores import IGNORED, matched_mean_iou
from ssl_bench.system.device import to_device, to_host

METRICS = ("miou", "pixel_accuracy")
MATCHED = "miou_matched"
# Similarities that are in GPU memory at once.
_SIMILARITIES = 2**28


@dataclass(frozen=True)
class Retrieval(Probe):
    """Patches take the labels of their nearest neighbours; nothing is trained.

    Attributes:
        protocol: The preset these values come from; records carry it.
        neighbours: How many patches of the memory vote for a patch.
        temperature: Of the softmax over their cosine similarities.
        memory_patches: Patches of the training set that are remembered, drawn with the seed.
        facet: What of a patch is compared: token, key, query, value, attn_out, attn_skip,
            mlp_hidden, mlp_out, or a submodule of a block.
        norm: "final": patches after the encoder's last norm. "none": the block's output.
        crops: "whole" or "resized" training images, as in linear segmentation.
        batch_size: Images that pass the encoder together.
        score_size: Masks are reduced to this size before scoring; the original size if None.
        memory_gib: For the memories; layers that do not fit wait for another pass.
        engine: What compares the patches, "faiss" or "torch"; by default faiss for many on a
            CPU, and torch else.

    Source: Balazevic et al., "Towards In-Context Scene Understanding",
    https://arxiv.org/abs/2306.01667. Ignored pixels are left out of the label histograms, where
    https://github.com/vpariza/open-hummingbird-eval counts them as class 0. The protocol "hbird"
    has a further metric, `miou_matched`: the mean IoU of that code, which renames the predicted
    classes one to one before it scores them.
    """

    protocol: str = "ssl_bench"
    neighbours: Count = 30
    temperature: Temperature = 0.02
    memory_patches: Count = 100_000
    image_size: Pixels = 512
    facet: str = "token"
    norm: Literal["none", "final"] = "none"
    crops: Literal["whole", "resized"] = "whole"
    views: Count = 1
    train_images: Count | None = None
    score_size: Pixels | None = None
    batch_size: Count = 16
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4
    engine: Engine = "auto"
    guesses: Sequence[str] = ()

    task = "retrieval"
    role = "segmentation"
    keeps_images = True
    metrics_of_sets = (MATCHED,)
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size", "memory_gib", "engine")

    @property
    def facet_spec(self) -> FacetSpec:
        return parse_patch_facet(self.facet, self.norm)

    @property
    def is_matched(self) -> bool:
        """Whether predicted classes are also scored after they are renamed."""
        return self.protocol == "hbird"

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = (*METRICS, MATCHED) if self.is_matched else METRICS
        return [(layer, self.scored_facet, m) for layer in sorted(layers) for m in metrics]

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers, as many at once as their memories fit into `memory_gib`.

        Raises:
            ConfigurationError: more neighbours are asked for than there are patches.
            DataError: no training patch has a label.
        """
        images = self.split(context.dataset)
        training_pass = self.training_pass(context)
        candidates = labelled_patches(training_pass, context.encoder.patch_size)
        chosen = chosen_patches(self, candidates, context.seed)
        bytes_a_layer = 4 * len(chosen) * training_pass.extractor.width(training_pass.facet)
        at_once = max(1, int(self.memory_gib * 2**30 / bytes_a_layer))
        for layers in batches(training_pass.extractor.layers, at_once):
            features, shares = remembered(training_pass, layers, chosen, len(images.class_names))
            memory = {
                layer: unit_vectors(of_layer.to(context.device).float())
                for layer, of_layer in zip(layers, features, strict=True)
            }
            labels = shares.to(context.device)
            counts, confusions = self._count(memory, labels, training_pass, images)
            for index, (layer, unit) in enumerate(memory.items()):
                details = {
                    "memory_patches": len(unit),
                    "constant_features": is_constant(unit),
                    "warnings": [*few_images_warning(len(images)), *zero_vectors_warning(unit)],
                    "guesses": fill_in_guesses(self, self.guesses),
                }
                cell, names = (layer, self.scored_facet), images.class_names
                for metric in METRICS:
                    yield mask_score(cell, metric, counts, (index, 0), names, details)
                if confusions is not None:
                    yield matched_score(cell, confusions[index], names, len(images), details)

    def training_pass(self, context: ProbeContext) -> TrainingPass:
        """How training images become features and labels."""
        images = self.training_images(context.dataset)
        split = TrainingSplit.draw(
            images, max_images=self.train_images, holdout=0.0, seed=context.seed
        )
        is_whole = self.crops == "whole"
        return TrainingPass(
            context=context,
            extractor=context.extractor(sorted(context.layers), self.scored_facet),
            images=images,
            indices=split.indices,
            image_size=self.image_size,
            views=WholeImage(self.views) if is_whole else ResizedCrops(self.views, context.seed),
            label_size=self.image_size,
            batch_size=self.batch_size,
            workers=self.num_workers,
        )

    def _count(
        self,
        memory: Mapping[int, Float[Tensor, "memory dim"]],
        labels: Float[Tensor, "memory classes"],
        training_pass: TrainingPass,
        images: ImageSet,
    ) -> tuple[ImageCounts, Int64[np.ndarray, "layers classes classes"] | None]:
        """Stream the scored images once through the encoder and the memories of some layers.

        Returns:
            The counts of each image, and the confusion matrices of all images if they are scored.
        """
        classes = labels.shape[1]
        inference = Squashed(self.score_size)
        prepare = partial(inference.prepare, size=self.image_size)
        per_image = ImageCounts(len(memory), 1, classes)
        total = np.zeros((len(memory), classes, classes), np.int64) if self.is_matched else None
        every = range(len(images))
        items = read_ahead(images, every, prepare, workers=self.num_workers)
        shown = training_pass.context.progress(items, "scored images", len(images))
        for batch in batches(shown, self.batch_size):
            windows = torch.cat([item.windows for item in batch])
            ids = [item.image_id for item in batch]
            blocks, sums = extract(training_pass.extractor, windows, ids)
            votes = [patch_votes(self, blocks[i], unit, labels) for i, unit in memory.items()]
            counts, confusions = [], []
            for position, item in enumerate(batch):
                logits = torch.stack([vote[position] for vote in votes])[None]
                predicted = inference.predict(logits, item)
                target = to_device(item.mask, predicted.device)
                counts.append(class_counts(predicted, target, classes))
                if total is not None:
                    confusions.append(confusion_counts(predicted, target, classes))
            found = [torch.stack(counts), *([torch.stack(confusions).sum(0)] if confusions else [])]
            counts, *summed = fetch_finite(training_pass.extractor, sums, ids, found)
            per_image.add(counts[:, :, None])
            if total is not None:
                total += summed[0].numpy()
        return per_image, total


def matched_score(
    cell: tuple[int, str],
    confusion: Int64[np.ndarray, "classes classes"],
    class_names: Sequence[str],
    num_images: int,
    details: Mapping[str, Any],
) -> Score:
    """Score the predictions of all images after their classes are renamed one to one.

    It has no interval and no values of images: which names match best depends on all of them.
    """
    value, names = matched_mean_iou(confusion)
    true, constant = confusion.sum(1), np.zeros_like(confusion)
    named = int(true.argmax())
    constant[:, named] = true
    baseline = Baseline(f"constant class {class_names[named]}", matched_mean_iou(constant)[0])
    renamed = {
        class_names[old]: class_names[new]
        for old, new in enumerate(names)
        if old != new and confusion[new, old]
    }
    more = {
        "renamed_classes": renamed,
        "absent_classes": "absent_from_both_is_0",
        "no_interval": "which names match depends on all images",
        **details,
        "warnings": [],  # They are of intervals.
        **baseline.as_details(),
    }
    return Score(*cell, MATCHED, value, None, num_images, more)


def labelled_patches(training_pass: TrainingPass, patch: int) -> Int64[Tensor, " labelled"]:
    """Patches with a labelled pixel, counted over all entries; from one pass over the labels."""
    side = training_pass.label_size // patch
    entries = len(training_pass.indices) * training_pass.views.count
    found = torch.empty(entries, side, side, dtype=torch.bool)

    for some, labels, *_ in training_pass.read_views():
        labelled = (labels != IGNORED).unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
        found[some] = labelled.any(4).any(2)
    return found.flatten().nonzero()[:, 0]


def chosen_patches(
    probe: Retrieval, candidates: Int64[Tensor, " labelled"], seed: int
) -> Int64[Tensor, " memory"]:
    """Patches that are remembered, of those that have a label."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)[: probe.memory_patches]
    if not len(candidates):
        raise DataError("no training patch has a label; nothing can be retrieved")
    if (most := len(order)) < probe.neighbours:
        raise ConfigurationError(
            f"probe.neighbours must be at most the {most} patches of the memory, got "
            f"{probe.neighbours}",
            hint=(f"probe.neighbours={most}",),
        )
    return candidates[order].sort().values


def remembered(
    training_pass: TrainingPass,
    layers: Sequence[int],
    chosen: Int64[Tensor, " memory"],
    classes: int,
) -> tuple[Float16[Tensor, "layers memory dim"], Float[Tensor, "memory classes"]]:
    """Patches of the training set in the order of the images, in host memory.

    Their features, and the shares of the classes among the labelled pixels of each. Only images
    that have one of them are encoded.

    Raises:
        CheckpointError: a feature is not finite.
    """
    extractor = training_pass.extractor
    patches = (training_pass.image_size // extractor.patch_size) ** 2
    width = extractor.width(training_pass.facet)
    features = torch.empty(len(layers), len(chosen), width, dtype=torch.float16)
    shares = torch.empty(len(chosen), classes)
    # Entries that pass the encoder together, and which patches of theirs are remembered.
    every, counts = (chosen // patches).unique_consecutive(return_counts=True)
    by_entry, size = (chosen % patches).split(counts.tolist()), training_pass.batch_size
    by_batch = []
    for first in range(0, len(every), size):
        within = [n * patches + some for n, some in enumerate(by_entry[first : first + size])]
        by_batch.append((every[first : first + size], torch.cat(within)))
    entries = [entries for entries, _ in by_batch]
    # Only cosines are taken of them.
    read = training_pass.stream(layers, entries, extractor.device, allow_scaled=True)
    shown = training_pass.context.progress(read, "remembered images", len(by_batch))
    start = 0
    for batch, (_, within) in zip(shown, by_batch, strict=True):
        here = slice(start, start := start + len(within))
        where = to_device(within, extractor.device)
        counts = (
            label_histograms(batch.labels, extractor.patch_size, classes).flatten(1)[:, where].T
        )
        found = [batch.features.flatten(1, 3)[:, where], counts]
        features[:, here], counts = to_host(found)
        shares[here] = counts / counts.sum(1, keepdim=True)
    return features, shares


def patch_votes(
    probe: Retrieval,
    features: Float[Tensor, "batch rows cols dim"],
    memory: Float[Tensor, "memory dim"],
    labels: Float[Tensor, "memory classes"],
) -> Float[Tensor, "batch rows cols classes"]:
    """Share of each class among the labels of the nearest patches, the more alike the more."""
    unit = unit_vectors(features.flatten(0, 2).float())
    similarity, index = nearest_patches(unit, memory, probe.neighbours, probe.engine)
    weights = (similarity / probe.temperature).softmax(1)
    pieces = zip(weights.split(1024), index.split(1024), strict=True)
    votes = [torch.bmm(near[:, None], labels[which])[:, 0] for near, which in pieces]
    return torch.cat(votes).view(*features.shape[:3], -1)


def nearest_patches(
    queries: Float[Tensor, "queries dim"],
    memory: Float[Tensor, "memory dim"],
    count: int,
    engine: Engine = "auto",
) -> tuple[Float[Tensor, "queries count"], Int64[Tensor, "queries count"]]:
    """Cosine similarity and index of the nearest of all unit vectors, the nearest first.

    The engines differ in the last bit of a similarity, and so in the order of what is nearer by
    less than that; of equally near vectors either takes any.

    Raises:
        MachineError: faiss is asked for on a GPU and was built without its kernels.
    """
    if prefers_faiss(queries, memory, engine):
        return faiss_nearest(queries, memory, count)
    rows = max(1, _SIMILARITIES // len(memory))
    found = [(some @ memory.T).topk(count) for some in queries.split(rows)]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])
