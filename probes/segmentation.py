"""Linear segmentation: how well can a linear head segment images with the features of a block?

The frozen encoder computes patch features of the training images. For each block and each learning
rate, one head is trained on these features. Some training images are held out to select the
learning rate. The heads then predict the class of each pixel of the scored images. The scores are
mean IoU and pixel accuracy.

The source of a head is the block whose features the head receives. A source may also be a group of
blocks whose features are concatenated.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from probes.features.journal import Journal
from probes.features.stream import batched, extract, fetch_and_check, read_ahead
from probes.features.tiers import RequestedTier, TrainingFeatures, TrainingPass
from probes.features.training_images import (
    LayerGroup,
    TrainingSplit,
    group_layers,
    ids_sha256,
    make_views,
    parse_patch_facet,
    reject_identical_views,
    reject_single_block,
    resize_mask,
)
from probes.heads.logistic import LogisticRegression
from probes.heads.losses import PixelLoss, UpsampledLoss
from probes.heads.scored_images import (
    ImageCounts,
    ScoredImage,
    SlidingWindows,
    Squashed,
    class_counts,
    mask_score,
    nan_to_none,
)
from probes.heads.sgd import (
    SGD,
    HeadAdamW,
    HeadOptimizer,
    HeadSpec,
    Schedule,
    StepTraining,
    TrainedHeads,
)
from probes.pictures import draw_tile, save_sheet
from ssl_bench.composition.compose import fill_in_guesses
from ssl_bench.composition.fields import (
    Count,
    CountOrZero,
    FilePath,
    FractionBelowOne,
    Pixels,
    Positive,
    PositiveOrZero,
    Rate,
    Threads,
)
from ssl_bench.data.files.images import voc_colours
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.data.splits import sample_ids, sample_indices
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.intervals import few_images_warning
from ssl_bench.layers import FacetSpec
from ssl_bench.scores import IGNORE_INDEX, mean_iou
from ssl_bench.system.device import to_device
from ssl_bench.system.files import (
    cache_folder,
    figure_file_name,
    remove_orphans,
    write_text_atomically,
)

_HALF_DECADES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_CAPI_C_VALUES = (1e-6, 3.727594e-5, 1.389495e-3, 5.179475e-2, 1.930698, 71.96857, 2682.696, 1e5)
_COMPONENTS = ("loss", "training", "inference")
_COLOURS = voc_colours()
_TILES_PER_ROW = 5
_LEGEND_LINES = 24
_LINE_HEIGHT = 16


@dataclass(frozen=True)
class Steps(StepTraining):
    """Training of heads with an optimizer and a learning rate schedule.

    Attributes:
        optimizer: AdamW, or SGD with momentum.
        schedule: Shape of the learning rate schedule after the warm-up. "cosine" and "linear"
            decrease to zero. "drop" divides the rate by ten after 80 % of the remaining steps.
        warmup: Fraction of the steps for the warm-up of the learning rate.
        weight_decay: Weight decay of the optimizer.
    """

    learning_rates: Sequence[Rate] = _HALF_DECADES
    epochs: Count = 30
    batch_size: Count = 16
    optimizer: Literal["adamw", "sgd"] = "adamw"
    schedule: Literal["cosine", "linear", "constant", "drop"] = "cosine"
    warmup: FractionBelowOne = 0.05
    weight_decay: PositiveOrZero = 1e-4

    refit: ClassVar[bool] = False

    def optimizer_and_schedule(self) -> tuple[HeadOptimizer, Schedule]:
        optimizer = {"adamw": HeadAdamW, "sgd": SGD}[self.optimizer]
        return optimizer(weight_decay=self.weight_decay), Schedule(self.schedule, self.warmup)


@dataclass(frozen=True)
class PatchRegression(LogisticRegression):
    """Training of segmentation heads by logistic regression on patches.

    Attributes:
        c_values: Values of C, the inverse strength of the penalty on the weights. One head is
            trained for each value.
        refit: Whether heads are trained again on all training images after C was selected on the
            held-out images.
    """

    c_values: Sequence[Positive] = _CAPI_C_VALUES
    refit: bool = False

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "refit": self.refit}


@dataclass(frozen=True)
class Segmentation(Probe):
    """A probe that segments images with linear heads on the patch features of each block.

    The heads of all blocks and all learning rates are trained together, so the encoder processes
    each image only once. If no images are held out, the learning rate is selected at the end, and
    the few images in figures are then processed again.

    Attributes:
        protocol: Name of the preset that sets the default values.
        layers_mode: Blocks whose features each head receives. "single" trains a head on each block.
            "multi" trains one head on four evenly spaced blocks up to the last requested layer.
            "last4" trains one head on that layer and the three blocks before it.
        image_size: Side in pixels of the square images that the encoder receives. The default is
            rounded to a multiple of the patch size.
        loss: Training loss, the name of a file in configs/probe/segmentation/loss.
        training: Training method, the name of a file in configs/probe/segmentation/training.
        inference: Prediction method, the name of a file in configs/probe/segmentation/inference.
        facet: Features of a patch: token, key, query, value, attn_out, attn_skip, mlp_hidden,
            mlp_out, or a submodule of a block.
        norm: Normalisation of the features. "standardize" scales each channel to zero mean and unit
            variance on the training set. "final" applies the encoder's final norm. "none" uses the
            output of the block.
        crops: Crops of the training images. "whole" resizes whole images to squares. "resized"
            resizes random crops of at least 80 % of the area to squares. "scaled" resizes the image
            so that its shorter side is 0.5 to 2 times `image_size`, and crops a random square of
            side `image_size`.
        views: Number of crops of each training image. They are drawn once. With "whole", the second
            crop is the mirror image.
        holdout: Fraction of the training images that are held out to select the learning rate or C.
            Held-out images are not used for training, unless `training.refit` is true.
        train_images: Maximum number of training images, drawn at random. None for all images.
        panels: Number of scored images to show in figures, spread over the whole set.
        tier: Storage of the training features: "memory", "disk", or "stream", which recomputes them
            in every epoch. "auto" selects the first of these that has enough space.
        memory_gib: Maximum size of features in memory in GiB, by default half of the free memory.
        disk_gib: Maximum size of features on the disk in GiB, by default half of the free space.
        cache: Folder for features and unfinished work, by default the user's cache folder.
        keep_minutes: Minimum time in minutes between two writes of unfinished work. A killed run
            continues from the last write.
        num_workers: Number of threads that decode images.
        guesses: Notes that are stored with the results, on settings that the protocol's authors do
            not specify and on differences from the published protocol. $NAME is replaced by the
            value of the setting NAME.
    """

    protocol: str = "ssl_bench"
    layers_mode: Literal["single", "multi", "last4"] = "single"
    image_size: Pixels = 512
    loss: PixelLoss = field(default_factory=UpsampledLoss)
    training: Steps | PatchRegression = field(default_factory=Steps)
    inference: Squashed | SlidingWindows = field(default_factory=Squashed)
    facet: str = "token"
    norm: Literal["none", "final", "standardize"] = "standardize"
    crops: Literal["whole", "resized", "scaled"] = "whole"
    views: Count = 1
    holdout: FractionBelowOne = 0.1
    train_images: Count | None = None
    panels: CountOrZero = 6
    tier: RequestedTier = "auto"
    memory_gib: PositiveOrZero | None = None
    disk_gib: PositiveOrZero | None = None
    cache: FilePath | None = None
    keep_minutes: PositiveOrZero = 10.0
    num_workers: Threads = 4
    guesses: Sequence[str] = ()

    task = "segmentation"
    role = "segmentation"
    has_per_image_values = True
    shares_features = True
    # The components are excluded, because `settings` includes their own settings.
    excluded_from_identity = (
        *Probe.excluded_from_identity,
        *_COMPONENTS,
        *("panels", "tier", "memory_gib", "disk_gib", "cache", "keep_minutes"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_single_block(self.facet_spec, self.layers_mode)
        reject_identical_views(self.crops, self.views)
        slides = isinstance(self.inference, SlidingWindows)
        if self.holdout and (self.crops != "whole" or slides):
            raise ConfigurationError(
                "probe.holdout must be 0 with random crops or sliding windows, because held-out "
                f"images are scored with stored features of whole images, got {self.holdout}",
                hint=("probe.holdout=0.0", "or", "probe.crops=whole", "probe.inference=squash"),
            )
        if self.training.refit and not self.holdout:
            raise ConfigurationError(
                "probe.training.refit=true needs held-out images, got probe.holdout=0.0",
                hint=("probe.training.refit=false", "or", "probe.holdout=0.1"),
            )

    @property
    def facet_spec(self) -> FacetSpec:
        return parse_patch_facet(self.facet, self.norm)

    def sources(self, layers: Sequence[int]) -> list[LayerGroup]:
        """Return the groups of layers whose features the heads receive.

        A group consists of one layer, or of several layers whose features are concatenated. Each
        group is called a source of features.
        """
        return group_layers(layers, self.layers_mode)

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = ["miou_holdout"] if self.holdout else []
        metrics += ["miou_oracle", "pixel_accuracy"]
        sources = self.sources(layers)
        return [(source[-1], self.scored_facet, metric) for source in sources for metric in metrics]

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        for name in _COMPONENTS:
            settings |= getattr(self, name).settings()
        return settings

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        shown = [source[-1] for source in self.sources(layers)]
        panels = [self.panel_name(image_id) for image_id in sample_ids(images.ids, self.panels)]
        # Every run writes the list of training images, whichever layers are requested.
        return {**dict.fromkeys(panels, shown), self.list_name(seed): shown[:1]}

    def panel_name(self, image_id: str) -> str:
        """Return the file name of a scored image's figure, given the id of the image."""
        return figure_file_name(image_id, prefix=f"{self._file_prefix}-")

    def list_name(self, seed: int) -> str:
        """Return the name of the file that lists the ids of the training images."""
        return f"{self._file_prefix}-seed{seed}-train.txt"

    @property
    def _file_prefix(self) -> str:
        features: list[str] = [] if self.layers_mode == "single" else [self.layers_mode]
        if not features or self.scored_facet != "token":
            features.append(self.scored_facet)
        return "-".join([self.protocol, *features])

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Train segmentation heads on the features of each layer, and yield their scores.

        Raises:
            DataError: There are too few training images, too few classes, or no labelled pixel.
        """
        yield from SegmentationRun(self, context).train_and_score()


class SegmentationRun:
    """Linear segmentation with one encoder on one dataset. The constructor computes no features.

    Attributes:
        sources: Groups of layers whose features the heads receive. There is one head for each group
            and each learning rate or value of C.
        split: The training images. Some of them are held out to select the learning rate or C.
        training_pass: Pass over the training images that computes their features and labels.
        head_spec: Loss, normalisation, number of classes and seed of the heads.
        scored_images: Images for scoring the heads.
    """

    def __init__(self, probe: Segmentation, context: ProbeContext) -> None:
        self.probe, self.context, encoder = probe, context, context.encoder
        images = probe.training_images(context.dataset)
        self.split = TrainingSplit.draw(
            images, max_images=probe.train_images, holdout=probe.holdout, seed=context.seed
        )
        self.scored_images = probe.scored_images(context.dataset)
        self.sources = probe.sources(context.layers)
        layers = sorted({layer for source in self.sources for layer in source})
        patch = encoder.patch_size
        self.training_pass = TrainingPass(
            context=context,
            extractor=context.extractor(layers, probe.scored_facet),
            images=images,
            indices=self.split.indices,
            image_size=probe.image_size,
            views=make_views(probe.crops, probe.views, context.seed, encoder.mean),
            label_size=probe.loss.label_size(probe.image_size // patch, patch),
            batch_size=probe.training.batch_size,
            num_workers=probe.num_workers,
        )
        self.head_spec = HeadSpec(
            loss=probe.loss,
            standardize=probe.norm == "standardize",
            classes=len(self.scored_images.class_names),
            seed=context.seed,
            device=context.device,
        )
        self.cache = cache_folder(probe.cache)
        self._unfinished_files: list[Path] = []
        # Predicted classes of the pixels of images in figures, by image id.
        self._maps: dict[str, UInt8[Tensor, "sources _height _width"]] = {}

    def train_and_score(self) -> Iterator[Score]:
        """Train and score the heads, draw figures, and yield the scores of all layers.

        Raises:
            DataError: The training masks have fewer than two classes, or the scored images have no
                labelled pixel.
        """
        features = self.features()
        heads = self.train(features)
        held_out = self.count_held_out(heads, features)
        if self.probe.training.refit:
            heads = self._train_on(features, self.split.all_view_indices(self.probe.views))
        # The learning rate or C of each source is selected on held-out images. If there are none,
        # it is selected on the scored images.
        head_indices = None if held_out is None else _best_indices(held_out)
        counts = self.count_scored(heads, head_indices)
        head_indices = head_indices or _best_indices(counts.total)
        shared = self._shared_details(heads, features)
        scores = list[Score]()
        for index, choice in enumerate(head_indices):
            miou_held_out = None if held_out is None else mean_iou(held_out[index])
            scores += self._source_scores(index, heads, counts, choice, miou_held_out, shared)

        # Save the figures before any score is recorded.
        self._draw_panels(heads, head_indices)
        ids = "".join(f"{image_id}\n" for image_id in self.split.ids(self.training_pass.images))
        write_text_atomically(self.context.artifacts / self.probe.list_name(self.context.seed), ids)
        yield from scores
        for path in self._unfinished_files:
            path.unlink(missing_ok=True)
        remove_orphans(self.cache / "heads")

    # Training

    def features(self) -> TrainingFeatures:
        """Compute the features of the training images, or load them from the cache.

        If the setting `probe.tier` is "stream", the features are not stored, but computed each time
        they are read.
        """
        probe = self.probe
        return self.training_pass.run(
            self.cache / "features", probe.tier, probe.memory_gib, probe.disk_gib
        )

    def train(self, features: TrainingFeatures) -> TrainedHeads:
        """Train the heads of all layers on the images that are not held out.

        Raises:
            DataError: The masks of these training images have fewer than two classes.
        """
        entries = self.split.train_view_indices(self.probe.views)
        classes = features.has_label[entries].any(0)[:IGNORE_INDEX].nonzero()[:, 0].tolist()
        if len(classes) < 2:
            names = [self.scored_images.class_names[number] for number in classes]
            raise DataError(
                f"the training masks of {self.training_pass.images.name} contain "
                f"{'only ' + names[0] if names else 'no class'}, expected at least two classes. "
                "Check the masks"
            )
        return self._train_on(features, entries)

    def _train_on(
        self, features: TrainingFeatures, entries: Int64[Tensor, " chosen"]
    ) -> TrainedHeads:
        """Train heads on some views (crops) of the training images.

        If a killed run has already trained these heads, load them instead. `entries` contains the
        indices of the views. View v of the training image number n has the index n * views + v.
        """
        context, journal = self.context, self._open_journal("heads", entries=entries.tolist())
        if journal.entries and "trained" in journal.entries[-1]:
            trained = journal.entries[-1]["trained"] | {"sources": tuple(self.sources)}
            return TrainedHeads(**trained).to(context.device)
        heads = self.probe.training.train(
            self.head_spec, features, self.sources, entries, context.progress, journal
        )
        if heads.seconds >= 60 * self.probe.keep_minutes:
            journal.replace({"trained": vars(heads)})
        return heads

    # Prediction

    def count_held_out(
        self, heads: TrainedHeads, features: TrainingFeatures
    ) -> Int64[np.ndarray, "sources values 3 classes"] | None:
        """Predict the held-out images with all heads, and count the pixels of each class.

        The predictions are computed from the stored features of the first view of each image.

        Returns:
            The numbers of correct, predicted and true pixels of each class, summed over the images.
            There is one head for each source (layer or group of layers) and each value (learning
            rate or C). The result is None if no images are held out.
        """
        if not self.split.held_out:
            return None
        positions = torch.tensor(sorted(self.split.held_out))
        entries = (positions * self.probe.views).split(self.probe.training.batch_size)
        read = features.reader(features.layers, self.context.device)
        remaining = iter(positions.tolist())
        total = torch.zeros(1, dtype=torch.int64, device=self.context.device)
        for batch in self.context.progress(read(entries), "held-out images", len(entries)):
            for blocks in batch.features.split(1, 1):
                index = self.split.indices[next(remaining)]
                image = self.prepare(self.training_pass.images[index])
                by_layer = dict(zip(features.layers, blocks, strict=True))
                total = total + self._predict(heads, by_layer, image)[1]
        return total.cpu().numpy()

    def count_scored(
        self, heads: TrainedHeads, head_indices: Sequence[int] | None = None
    ) -> ImageCounts:
        """Predict all scored images with all heads. Return pixel counts of each image and class.

        Images are skipped if a killed run has saved their counts.

        Args:
            heads: Heads from `train`.
            head_indices: For each source (layer or group of layers), the index of the selected
                learning rate or C. The predictions of this head are kept for the images in figures.
                If None, no predictions are kept.

        Raises:
            DataError: No scored image has a labelled pixel.
        """
        images = self.scored_images
        journal = self._open_journal(
            "counts",
            split=(self.split.indices, sorted(self.split.held_out), self.probe.training.refit),
            images=(images.fingerprint(), *images.ids),
            inference=repr(self.probe.inference),
        )
        counts = ImageCounts(*heads.bias.shape)
        for entry in journal.entries:
            counts.extend(entry)
        num_written = len(counts)
        returned_ids = (
            set(sample_ids(images.ids, self.probe.panels)) if head_indices else set[str]()
        )
        items = self._read_scored(range(len(images))[num_written:], "scored images")
        for batch in batched(items, self.probe.training.batch_size):
            counted, maps = self._predict_batch(heads, batch, returned_ids)
            counts.add(counted)
            self._maps |= {
                name: _select_maps(by_head, head_indices or ()) for name, by_head in maps.items()
            }
            if journal.is_due():
                journal.append(counts.entry(num_written))
                num_written = len(counts)
        if not counts.total[:, :, 2].any():
            raise DataError(
                f"the masks of {images.name} {images.split} have no labelled pixel. Check the masks"
            )
        return counts

    def predict(
        self, heads: TrainedHeads, images: Iterable[ScoredImage]
    ) -> list[UInt8[Tensor, "sources values _height _width"]]:
        """Return the predicted class of each pixel of each image, for all heads.

        Args:
            heads: Heads from `train`: one for each source (layer or group of layers) and each
                learning rate or C.
            images: Images from `prepare`.
        """
        predicted = []
        for batch in batched(images, self.probe.training.batch_size):
            maps = self._predict_batch(heads, batch, {image.image_id for image in batch})[1]
            predicted += [maps[image.image_id] for image in batch]
        return predicted

    def prepare(self, sample: Sample) -> ScoredImage:
        """Resize an image and its mask for the encoder, and return the input of `predict`."""
        probe = self.probe
        return probe.inference.prepare(sample, probe.image_size, self.context.encoder.mean)

    def _read_scored(self, indices: Sequence[int], label: str) -> Iterable[ScoredImage]:
        num_workers = self.probe.num_workers
        items = read_ahead(self.scored_images, indices, self.prepare, num_workers=num_workers)
        return self.context.progress(items, label, len(indices))

    def _predict_batch(
        self, heads: TrainedHeads, batch: Sequence[ScoredImage], returned_ids: Container[str]
    ) -> tuple[
        Int64[Tensor, "images sources values 3 classes"],
        dict[str, UInt8[Tensor, "sources values _height _width"]],
    ]:
        """Predict the pixels of a batch of images with all heads.

        Returns:
            Two results in CPU memory. The first contains, for each image and head, the numbers of
            correct, predicted and true pixels of each class. The second contains the predicted
            classes of the images whose ids are in `returned_ids`.
        """
        extractor = self.training_pass.extractor
        windows = torch.cat([image.windows for image in batch])
        ids = [image.image_id for image in batch for _ in image.windows]
        blocks, sums = extract(extractor, windows, ids)
        counts, maps, first = [], dict[str, Tensor](), 0
        for image in batch:
            own = slice(first, first := first + len(image.windows))
            by_layer = {layer: features[own] for layer, features in blocks.items()}
            predicted, counted = self._predict(heads, by_layer, image)
            counts.append(counted)
            if image.image_id in returned_ids:
                maps[image.image_id] = predicted
        fetched = fetch_and_check(extractor, sums, ids, [torch.stack(counts), *maps.values()])
        return fetched[0], dict(zip(maps, fetched[1:], strict=True))

    def _predict(
        self,
        heads: TrainedHeads,
        features: Mapping[int, Float[Tensor, "windows rows cols dim"]],
        image: ScoredImage,
    ) -> tuple[
        UInt8[Tensor, "sources values height width"], Int64[Tensor, "sources values 3 classes"]
    ]:
        """Predict the class of each pixel of one image with all heads.

        Also return the numbers of correct, predicted and true pixels of each class. `features`
        maps each layer to the features of the sliding windows of this image.
        """
        by_source = []
        for index, source in enumerate(heads.sources):
            windows = torch.cat([features[layer].float() for layer in source], -1)
            logits = torch.stack([heads.logits(index, window) for window in windows])
            by_source.append(self.probe.inference.predict(logits, image))
        predicted = torch.stack(by_source)
        target = to_device(image.mask, predicted.device)
        counts = class_counts(predicted.flatten(0, 1), target, self.head_spec.classes)
        return predicted, counts.unflatten(0, predicted.shape[:2])

    # Scores

    def _source_scores(
        self,
        index: int,
        heads: TrainedHeads,
        counts: ImageCounts,
        head_index: int,
        miou_held_out: Float64[np.ndarray, " values"] | None,
        shared_details: Mapping[str, Any],
    ) -> Iterator[Score]:
        """Yield the scores of the heads that receive the features of one source.

        A source is a layer or a group of layers. The heads of a source differ in their learning
        rate or C. The metric "miou_oracle" scores the head with the highest mean IoU on the scored
        images. If images are held out, the other metrics score the head that was selected on the
        held-out images.

        `index` is the index of the source, and `head_index` is the index of the selected head.
        `counts` contains the pixel counts of all scored images.
        """
        training, source = self.probe.training, self.sources[index]
        values, hyperparameter = training.values, training.hyperparameter
        miou = mean_iou(counts.total[index])
        choices = {"miou_oracle": _best_index(miou), "pixel_accuracy": head_index}
        if miou_held_out is not None:
            choices = {"miou_holdout": head_index, **choices}
        width = self.training_pass.extractor.width(self.probe.scored_facet)
        constant_share = heads.constant_channels[index] / width / len(source)
        for metric, choice in choices.items():
            warnings = []
            if len(values) > 1 and choice in (0, len(values) - 1):
                name = hyperparameter.replace("_", " ")
                warnings.append(f"the chosen {name} {values[choice]:g} is at the edge of its grid")
            if constant_share == 1:
                warnings.append("degenerate: all training patches have the same features")
            details = {
                hyperparameter: values[choice],
                f"{hyperparameter}s": list(values),
                "miou_by_rate": nan_to_none(miou),
                "miou_by_rate_held_out": (
                    None if miou_held_out is None else nan_to_none(miou_held_out)
                ),
                "constant_features": constant_share == 1,
                "constant_channels_percent": round(100 * constant_share, 1),
                "warnings": [*warnings, *few_images_warning(len(counts))],
                **shared_details,
                **heads.convergence(index),
                "layers": list(source),
            }
            cell, names = (source[-1], self.probe.scored_facet), self.scored_images.class_names
            yield mask_score(cell, metric, counts, (index, choice), names, details)

    def _shared_details(self, heads: TrainedHeads, features: TrainingFeatures) -> dict[str, Any]:
        num_held_out = len(self.split.held_out)
        is_ignored = ~features.has_label[:: self.probe.views, :IGNORE_INDEX].any(1)
        num_trained = len(self.split.indices) - (0 if self.probe.training.refit else num_held_out)
        return {
            "num_train_images": num_trained,
            "num_held_out_images": num_held_out,
            "train_ids_sha256": ids_sha256(self.split.ids(self.training_pass.images)),
            "all_ignored_train_images": int(is_ignored.sum()),
            "train_seconds": round(heads.seconds, 3),
            "feature_tier": features.tier,
            "encoder_passes": features.passes,
            "guesses": fill_in_guesses(self.probe, self.probe.guesses),
        }

    # Files

    def _draw_panels(self, heads: TrainedHeads, head_indices: Sequence[int]) -> None:
        """Save a figure of some images: photograph, ground truth, predictions and a legend.

        The predictions of an image are computed again if a killed run has scored the image, or if
        the image was scored before the learning rate or C was selected.

        For each source (layer or group of layers), `head_indices` contains the index of the
        selected learning rate or C.
        """
        ids = self.scored_images.ids
        indices = sample_indices(ids, self.probe.panels)
        if new := [index for index in indices if ids[index] not in self._maps]:
            predicted = self.predict(heads, self._read_scored(new, "images to draw"))
            for index, by_head in zip(new, predicted, strict=True):
                self._maps[ids[index]] = _select_maps(by_head, head_indices)
        for index in indices:
            sample = self.scored_images[index]
            masks = {"ground truth": self.prepare(sample).mask}
            for source, mask in zip(self.sources, self._maps[ids[index]], strict=True):
                masks[f"block{'s' * (len(source) > 1)} {', '.join(map(str, source))}"] = mask
            size = sample.image.shape[:2]
            full = {title: resize_mask(mask, *size).numpy() for title, mask in masks.items()}
            tiles = [draw_tile(sample.image, "photograph")]
            tiles += [
                draw_tile(overlay_classes(sample.image, mask), title)
                for title, mask in full.items()
            ]
            tiles.append(_draw_legend(full.values(), self.scored_images.class_names))
            rows = [tiles[i : i + _TILES_PER_ROW] for i in range(0, len(tiles), _TILES_PER_ROW)]
            save_sheet(rows, self.context.artifacts / self.probe.panel_name(sample.image_id))

    def _open_journal(self, name: str, **dependencies: Any) -> Journal:
        """Open a file that stores unfinished work, so that the next run can continue a killed run.

        Args:
            name: Beginning of the file name.
            dependencies: Values that the unfinished work depends on, in addition to the features
                and the training. A run with other values uses another file.
        """
        header = {
            "training": repr((self.head_spec, self.probe.training)),
            "features": self.training_pass.header(),
            "sources": self.sources,
            **dependencies,
        }
        journal = Journal(
            self.cache / "heads",
            name,
            header,
            say=self.context.say,
            minutes=self.probe.keep_minutes,
            is_cache=True,
        )
        self._unfinished_files.append(journal.path)
        return journal


def _best_indices(counts: Int64[np.ndarray, "sources values 3 classes"]) -> list[int]:
    """For each source, return the index of the learning rate or C with the highest mean IoU.

    A source is a layer or a group of layers. `counts` contains the numbers of correct, predicted
    and true pixels of each class, for each source and each learning rate or C.
    """
    return [_best_index(mean_iou(by_value)) for by_value in counts]


def _select_maps(
    predicted: UInt8[Tensor, "sources values height width"], head_indices: Sequence[int]
) -> UInt8[Tensor, "sources height width"]:
    """Return the class maps that were predicted with the selected learning rate or C.

    There is one class map for each source (layer or group of layers). For each source,
    `head_indices` contains the index of the selected learning rate or C.
    """
    return torch.stack(
        [by_value[value] for by_value, value in zip(predicted, head_indices, strict=True)]
    )


def _best_index(by_value: Float64[np.ndarray, " values"]) -> int:
    """Return the index of the first head with the highest mean IoU."""
    return int(np.nan_to_num(by_value, nan=-1.0).argmax())


def overlay_classes(
    image: UInt8[np.ndarray, "height width 3"], mask: UInt8[np.ndarray, "height width"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Blend an image with the colour of each pixel's class. Ignored pixels keep their colour."""
    blended = (0.4 * image + 0.6 * _COLOURS[mask]).astype(np.uint8)
    return np.where((mask == IGNORE_INDEX)[..., None], image, blended)


def _draw_legend(
    masks: Iterable[UInt8[np.ndarray, "height width"]], class_names: Sequence[str]
) -> Image.Image:
    """Draw a legend with the colours and names of the most frequent classes in the masks."""
    pixels = np.asarray(sum(np.bincount(mask.ravel(), minlength=256) for mask in masks))
    order = np.argsort(-pixels[: len(class_names)], kind="stable")
    classes = [int(number) for number in order if pixels[number] > 0][:_LEGEND_LINES]
    font = ImageFont.load_default(12)
    width = 24 + max((int(font.getlength(class_names[number])) for number in classes), default=0)
    legend = Image.new("RGB", (width, _LINE_HEIGHT * max(1, len(classes))), "white")
    draw = ImageDraw.Draw(legend)
    for line, number in enumerate(classes):
        top = line * _LINE_HEIGHT
        draw.rectangle((2, top + 2, 16, top + 13), fill=tuple(_COLOURS[number].tolist()))
        draw.text((20, top), class_names[number], fill="black", font=font)
    return legend
