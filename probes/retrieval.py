"""Dense retrieval: how well do the patches of each block find patches of the same class?

The features of training patches, and the classes of their pixels, are stored in a memory. For each
patch of a scored image, its nearest neighbours in this memory vote for classes. The predicted masks
are scored by mean IoU and pixel accuracy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float16, Int64
from torch import Tensor

from probes.features.image import is_constant
from probes.features.stream import batched, extract, fetch_and_check, read_ahead
from probes.features.tiers import TrainingPass
from probes.features.training_images import (
    TrainingSplit,
    make_views,
    parse_patch_facet,
    reject_identical_views,
)
from probes.heads.losses import label_histograms
from probes.heads.scored_images import (
    ImageCounts,
    Squashed,
    class_counts,
    confusion_counts,
    mask_score,
)
from ssl_bench.composition.compose import fill_in_guesses
from ssl_bench.composition.fields import Count, Engine, Pixels, PositiveOrZero, Temperature, Threads
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.intervals import few_images_warning
from ssl_bench.layers import FacetSpec
from ssl_bench.neighbours import faiss_nearest, prefers_faiss, unit_vectors, zero_vectors_warning
from ssl_bench.results import Baseline
from ssl_bench.scores import IGNORE_INDEX, matched_mean_iou
from ssl_bench.system.device import to_device, to_host

METRICS = ("miou", "pixel_accuracy")
MATCHED = "miou_matched"
# Maximum number of similarities that are in memory at the same time.
_MAX_SIMILARITIES = 2**28


@dataclass(frozen=True)
class Retrieval(Probe):
    """A probe that labels each patch of an image by its nearest neighbours among training patches.

    The features of the training patches are stored in a memory. Nothing is trained.

    Attributes:
        protocol: Name of the preset that sets the default values.
        neighbours: Number of nearest patches in the memory that vote for the class of a patch.
        temperature: Temperature of the softmax that turns cosine similarities into vote weights.
        memory_patches: Maximum number of training patches in the memory. They are drawn at random
            from the patches with a labelled pixel.
        image_size: Side in pixels of the square images that the encoder receives.
        facet: Features of a patch: token, key, query, value, attn_out, attn_skip, mlp_hidden,
            mlp_out, or a submodule of a block.
        norm: Normalisation of the features. "final" applies the encoder's final norm, and "none"
            uses the output of the block.
        crops: Crops of the training images. "whole" resizes whole images to squares, and "resized"
            resizes random crops of at least 80 % of the area.
        views: Number of crops of each training image. If `crops` is "whole", the second crop is the
            mirror image.
        train_images: Maximum number of training images, drawn at random. None for all images.
        score_size: Masks are resized to this height and width in pixels before scoring. None for
            the original size of each mask.
        batch_size: Number of images in a forward pass of the encoder.
        memory_gib: Maximum size of the memories in GiB. If the memories of all layers exceed it,
            the layers are split into groups, and the encoder processes the images once for each
            group.
        num_workers: Number of threads that decode images.
        engine: Library that finds neighbours, "faiss" or "torch". "auto" selects faiss for large
            searches on a CPU. The similarities that faiss and torch compute may differ in the last
            bit.
        guesses: Notes that are stored with the results, on settings that the protocol's authors do
            not specify and on differences from their settings.

    The protocol "hbird" adds the metric "miou_matched" of
    https://github.com/vpariza/open-hummingbird-eval: mean IoU after matching the predicted classes
    one-to-one to the true classes. The code of open-hummingbird-eval counts ignored pixels as class
    0. This probe instead leaves ignored pixels out of the label histograms.

    Source: Balazevic et al., "Towards In-Context Scene Understanding",
    https://arxiv.org/abs/2306.01667.
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
    has_per_image_values = True
    shares_features = True
    metrics_of_sets = (MATCHED,)
    excluded_from_identity = (*Probe.excluded_from_identity, "batch_size", "memory_gib", "engine")

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_identical_views(self.crops, self.views)

    @property
    def facet_spec(self) -> FacetSpec:
        return parse_patch_facet(self.facet, self.norm)

    @property
    def has_matched_metric(self) -> bool:
        """Return whether the probe scores the metric "miou_matched".

        This metric is the mean IoU after matching the predicted classes to the true classes. The
        metric is scored only if `protocol` is "hbird".
        """
        return self.protocol == "hbird"

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = (*METRICS, MATCHED) if self.has_matched_metric else METRICS
        return [(layer, self.scored_facet, m) for layer in sorted(layers) for m in metrics]

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Predict masks by nearest neighbours in each layer, and yield the scores of all layers.

        Raises:
            ConfigurationError: The memory of training patches has fewer patches than `neighbours`.
            DataError: No training patch has a labelled pixel.
        """
        images = self.scored_images(context.dataset)
        training_pass = self._training_pass(context)
        patches = self._draw_patches(training_pass, context.seed)
        bytes_per_layer = 4 * len(patches) * training_pass.extractor.width(training_pass.facet)
        max_layers = max(1, int(self.memory_gib * 2**30 / bytes_per_layer))
        for layers in batched(training_pass.extractor.layers, max_layers):
            features, shares = encode_patches(
                training_pass, layers, patches, len(images.class_names)
            )
            memory = {
                layer: unit_vectors(layer_features.to(context.device).float())
                for layer, layer_features in zip(layers, features, strict=True)
            }
            shares = shares.to(context.device)
            counts, confusions = self._count(memory, shares, training_pass, images)
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
                if self.has_matched_metric:
                    yield matched_score(cell, confusions[index], names, len(images), details)

    def _training_pass(self, context: ProbeContext) -> TrainingPass:
        images = self.training_images(context.dataset)
        split = TrainingSplit.draw(
            images, max_images=self.train_images, holdout=0.0, seed=context.seed
        )
        return TrainingPass(
            context=context,
            extractor=context.extractor(sorted(context.layers), self.scored_facet),
            images=images,
            indices=split.indices,
            image_size=self.image_size,
            views=make_views(self.crops, self.views, context.seed),
            label_size=self.image_size,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )

    def _draw_patches(self, training_pass: TrainingPass, seed: int) -> Int64[Tensor, " memory"]:
        """Draw random training patches whose features are stored in the memory.

        Return the indices of the drawn patches in ascending order. The patches of all training
        images are numbered consecutively.
        """
        labelled = find_labelled_patches(training_pass)
        if not len(labelled):
            images = training_pass.images
            raise DataError(
                f"the training masks of {images.name} {images.split} have no labelled pixel at the "
                "encoder's input size. Check the masks"
            )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labelled), generator=generator)[: self.memory_patches]
        if (count := len(order)) < self.neighbours:
            raise ConfigurationError(
                f"probe.neighbours must be at most {count}, the number of patches in the memory, "
                f"got {self.neighbours}",
                hint=(f"probe.neighbours={count}",),
            )
        return labelled[order].sort().values

    def _count(
        self,
        memory: Mapping[int, Float[Tensor, "memory dim"]],
        shares: Float[Tensor, "memory classes"],
        training_pass: TrainingPass,
        images: ImageSet,
    ) -> tuple[ImageCounts, Int64[np.ndarray, "layers classes classes"]]:
        """For each layer, predict the masks of all scored images with the memory, and count pixels.

        Args:
            memory: L2-normalised features of the training patches in the memory, by layer.
            shares: For each of these patches, the fraction of its labelled pixels in each class.
            training_pass: Pass over the training images, which provides the feature extractor.
            images: The scored images.

        Returns:
            The pixel counts of each image, and the confusion matrix of each layer over all images.
            The confusion matrices are zero if the metric "miou_matched" is not scored, because only
            this metric needs them.
        """
        extractor, context = training_pass.extractor, training_pass.context
        classes = shares.shape[1]
        inference = Squashed(self.score_size)
        prepare = partial(inference.prepare, size=self.image_size)
        per_image = ImageCounts(len(memory), 1, classes)
        confusions = shares.new_zeros(len(memory), classes, classes, dtype=torch.int64)
        items = read_ahead(images, range(len(images)), prepare, num_workers=self.num_workers)
        items = context.progress(items, "scored images", len(images))
        for batch in batched(items, self.batch_size):
            windows = torch.cat([image.windows for image in batch])
            ids = [image.image_id for image in batch]
            blocks, sums = extract(extractor, windows, ids)
            votes = [self._vote(blocks[layer], unit, shares) for layer, unit in memory.items()]
            counts = []
            for position, image in enumerate(batch):
                logits = torch.stack([vote[position] for vote in votes])[None]
                predicted = inference.predict(logits, image)
                target = to_device(image.mask, predicted.device)
                counts.append(class_counts(predicted, target, classes))
                if self.has_matched_metric:
                    confusions += confusion_counts(predicted, target, classes)
            (counts,) = fetch_and_check(extractor, sums, ids, [torch.stack(counts)])
            per_image.add(counts[:, :, None])
        return per_image, confusions.cpu().numpy()

    def _vote(
        self,
        features: Float[Tensor, "batch rows cols dim"],
        memory: Float[Tensor, "memory dim"],
        shares: Float[Tensor, "memory classes"],
    ) -> Float[Tensor, "batch rows cols classes"]:
        """For each patch in `features`, return the share of the votes that each class gets.

        The voters of a patch are its nearest training patches in the memory. Votes are weighted by
        similarity. A voter divides its vote among the classes of its labelled pixels, whose shares
        are in `shares`.
        """
        unit = unit_vectors(features.flatten(0, 2).float())
        if prefers_faiss(unit, memory, self.engine):
            similarity, index = faiss_nearest(unit, memory, self.neighbours)
        else:
            rows = max(1, _MAX_SIMILARITIES // len(memory))
            nearest = [(part @ memory.T).topk(self.neighbours) for part in unit.split(rows)]
            similarity, index = map(torch.cat, zip(*nearest, strict=True))
        weights = (similarity / self.temperature).softmax(1)
        pieces = zip(weights.split(1024), index.split(1024), strict=True)
        votes = [torch.bmm(weight[:, None], shares[near])[:, 0] for weight, near in pieces]
        return torch.cat(votes).view(*features.shape[:3], -1)


def find_labelled_patches(training_pass: TrainingPass) -> Int64[Tensor, " labelled"]:
    """Read all training masks, and return the indices of the patches with a labelled pixel.

    The patches of all views (crops) of all training images are numbered consecutively.
    """
    patch = training_pass.extractor.patch_size
    side = training_pass.label_size // patch
    entries = len(training_pass.indices) * training_pass.views.count
    is_labelled = torch.empty(entries, side, side, dtype=torch.bool)

    for batch_entries, labels, *_ in training_pass.read_views():
        pixels = (labels != IGNORE_INDEX).unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
        is_labelled[batch_entries] = pixels.any(4).any(2)
    return is_labelled.flatten().nonzero()[:, 0]


def encode_patches(
    training_pass: TrainingPass,
    layers: Sequence[int],
    patches: Int64[Tensor, " memory"],
    classes: int,
) -> tuple[Float16[Tensor, "layers memory dim"], Float[Tensor, "memory classes"]]:
    """For training patches, compute the features and the class shares of the labelled pixels.

    Crops without any of the requested patches are not encoded. The results are in CPU memory.

    Args:
        training_pass: Pass over the training images.
        layers: Layers of the features.
        patches: Indices of the patches in ascending order. The patches of all views (crops) of all
            training images are numbered consecutively.
        classes: Number of classes.

    Raises:
        CheckpointError: A feature is not finite.
    """
    extractor, batch_size = training_pass.extractor, training_pass.batch_size
    features = torch.empty(
        len(layers), len(patches), extractor.width(training_pass.facet), dtype=torch.float16
    )
    shares = torch.empty(len(patches), classes)
    per_entry = (training_pass.image_size // extractor.patch_size) ** 2
    entries, counts = (patches // per_entry).unique_consecutive(return_counts=True)
    # Index of the view (crop) of each patch in its batch.
    position = (torch.arange(len(entries)) % batch_size).repeat_interleave(counts)
    in_batch = position * per_entry + patches % per_entry
    by_batch = in_batch.split([int(some.sum()) for some in counts.split(batch_size)])
    # The features become unit vectors, so their scale is not needed.
    read = training_pass.stream(
        layers, entries.split(batch_size), extractor.device, allow_scaled=True
    )
    read = training_pass.context.progress(read, "memory images", len(by_batch))
    start = 0
    for batch, numbers in zip(read, by_batch, strict=True):
        rows = slice(start, start := start + len(numbers))
        numbers = to_device(numbers, extractor.device)
        histograms = label_histograms(batch.labels, extractor.patch_size, classes).flatten(1)
        features[:, rows], pixels = to_host(
            [batch.features.flatten(1, 3)[:, numbers], histograms[:, numbers].T]
        )
        shares[rows] = pixels / pixels.sum(1, keepdim=True)
    return features, shares


def matched_score(
    cell: tuple[int, str],
    confusion: Int64[np.ndarray, "classes classes"],
    class_names: Sequence[str],
    num_images: int,
    details: Mapping[str, Any],
) -> Score:
    """Return the mean IoU after matching the predicted classes one-to-one to the true classes.

    The score has no confidence interval and no values of single images, because the matching
    depends on all images. `cell` is the layer and the facet (kind of feature). `confusion` contains
    pixel counts, with true classes as rows.
    """
    value, matched = matched_mean_iou(confusion)
    true, constant = confusion.sum(1), np.zeros_like(confusion)
    most_frequent = int(true.argmax())
    constant[:, most_frequent] = true
    name = f"constant class {class_names[most_frequent]}"
    baseline = Baseline(name, matched_mean_iou(constant)[0])
    renamed = {
        class_names[old]: class_names[new]
        for old, new in enumerate(matched)
        if old != new and confusion[new, old]
    }
    own_details = {
        "renamed_classes": renamed,
        "absent_classes": "absent_from_both_is_0",
        "no_interval": "the matching of predicted and true classes depends on all images",
        **details,
        # The warnings are about confidence intervals, which this score does not have.
        "warnings": [],
        **baseline.as_details(),
    }
    return Score(*cell, MATCHED, value, None, num_images, own_details)
