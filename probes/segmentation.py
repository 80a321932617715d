"""Linear segmentation: what can a linear head segment with the patches of each block?

In this order: steps and regressions (`probe.training`; losses are in `heads/losses.py`, what
`probe.inference` takes in `heads/scored_images.py`), the probe, and a run of it: features, heads,
held-out images, scored images, scores, pictures.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from probes.features.journal import Journal
from probes.features.split import (
    LayerGroup,
    TrainingSplit,
    group_layers,
    ids_sha256,
    parse_patch_facet,
    reject_single_block,
)
from probes.features.stream import batches, extract, fetch_finite, read_ahead
from probes.features.tiers import RequestedTier, TrainingFeatures, TrainingPass
from probes.features.views import ResizedCrops, ScaledCrops, WholeImage, resize_mask
from probes.heads.logistic import LogisticRegression
from probes.heads.losses import PixelLoss, UpsampledLoss
from probes.heads.scored_images import (
    ImageCounts,
    ScoredImage,
    SlidingWindows,
    Squashed,
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
from probes.pictures import sheet, titled
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
from ssl_bench.data.splits import sampled, sampled_numbers
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.intervals import few_images_warning
from ssl_bench.layers import FacetSpec
from ssl_bench.metrics import class_counts
from ssl_bench.scores import IGNORED, mean_iou
from ssl_bench.system.device import to_device
from ssl_bench.system.files import remove_orphans, write_text_atomically
from ssl_bench.system.paths import cache_folder, figure_file_name

HALF_DECADES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_OF_CAPI = (1e-6, 3.727594e-5, 1.389495e-3, 5.179475e-2, 1.930698, 71.96857, 2682.696, 1e5)
_COMPONENTS = ("loss", "training", "inference")
_COLOURS = voc_colours()
_TILES_PER_ROW = 5
_LEGEND_LINES = 24
_LINE_HEIGHT = 16


@dataclass(frozen=True)
class Steps(StepTraining):
    """A number of optimizer steps.

    Attributes:
        warmup: Share of the steps in which the learning rate rises.
    """

    learning_rates: Sequence[Rate] = HALF_DECADES
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
    """Logistic regressions of patches.

    Attributes:
        refit: Fit to all training images once the held-out ones have chosen.
    """

    c_values: Sequence[Positive] = _OF_CAPI
    refit: bool = False

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "refit": self.refit}


@dataclass(frozen=True)
class Segmentation(Probe):
    """Linear heads on every block and with every learning rate; an image passes the encoder once.

    Those that are drawn pass again.

    Attributes:
        protocol: The preset these values come from; records carry it.
        layers_mode: "single": one head a block. "multi": one head on the blocks at 1/4, 1/2, 3/4
            and all of the depth up to the last asked layer. "last4": on the last four up to it.
        image_size: Side of the squares that the encoder sees; without a choice the nearest multiple
            of the patch.
        loss: What the heads are trained to, a file of configs/probe/segmentation/loss.
        training: How, a file of configs/probe/segmentation/training.
        inference: How images are scored, a file of configs/probe/segmentation/inference.
        facet: What of a patch the heads see: token, key, query, value, attn_out, attn_skip,
            mlp_hidden, mlp_out, or a submodule of a block.
        norm: Before the head. "standardize": each channel over the training set. "final": the
            encoder's last norm. "none": the block's output.
        crops: "whole": training images are squashed. "resized": random parts of at least 80 % of
            the area are squashed. "scaled": random squares of the image at half to twice the size.
        views: How many crops of each image are drawn, once; with "whole", 2 adds its mirror image.
        holdout: Share of the training images that choose the rate or C and train nothing.
        train_images: At most so many, drawn with the seed.
        panels: How many of the scored images are drawn, from all over the set.
        tier: Where features are until the heads are trained: in "memory", on "disk", or nowhere:
            "stream" computes them in every epoch. "auto": the first that has the room.
        memory_gib: What features may take in memory; half of what is free if None.
        disk_gib: What they may take on the disk of `cache`; half of what is free if None.
        cache: Folder for features and for heads that are not finished; the user's cache if None.
        keep_minutes: Between two writings of unfinished heads, from which a killed run goes on.
        num_workers: Threads that decode images.
        guesses: What the protocol's authors left open, and where this preset differs from theirs;
            $NAME stands for the setting NAME.
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
    keeps_images = True
    # Where, how fast and with what words, not what comes out; the components say what is theirs.
    excluded_from_identity = (
        *(*Probe.excluded_from_identity, *_COMPONENTS, "panels"),
        *("tier", "memory_gib", "disk_gib", "cache", "keep_minutes"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_single_block(self.facet_spec, self.layers_mode)
        if self.crops == "whole" and self.views > 2:
            raise ConfigurationError(
                f"whole images have one view or two, got {self.views}",
                hint=("probe.views=1", "or", "probe.views=2"),
            )
        slides = isinstance(self.inference, SlidingWindows)
        if self.holdout and (self.crops != "whole" or slides):
            raise ConfigurationError(
                "held-out images are scored from their cached features, which whole images have "
                f"that are squashed or scored by patch, got probe.holdout={self.holdout}",
                hint=("probe.holdout=0.0", "or", "probe.crops=whole", "probe.inference=squash"),
            )
        if self.training.refit and not self.holdout:
            raise ConfigurationError(
                "a head is fitted again to all images only where some were held out",
                hint=("probe.training.refit=false", "or", "probe.holdout=0.1"),
            )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = ["miou_holdout"] if self.holdout else []
        metrics += ["miou_oracle", "pixel_accuracy"]
        sources = self.sources(layers)
        return [(source[-1], self.scored_facet, metric) for source in sources for metric in metrics]

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in self.excluded_from_identity
        }
        for name in _COMPONENTS:
            own |= getattr(self, name).settings()
        return own

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        shown = [source[-1] for source in self.sources(layers)]
        panels = [self._panel_name(image_id) for image_id in sampled(images.ids, self.panels)]
        # The list is left by a run of any block.
        return {**dict.fromkeys(panels, shown), self._list_name(seed): shown[:1]}

    def _panel_name(self, image_id: str) -> str:
        return figure_file_name(image_id, before=f"{self._beginning}-")

    def _list_name(self, seed: int) -> str:
        return f"{self._beginning}-seed{seed}-train.txt"

    @property
    def _beginning(self) -> str:
        """Of the names of all files that are left beside the records."""
        features: list[str] = [] if self.layers_mode == "single" else [self.layers_mode]
        if not features or self.facet != "token":
            features.append(self.scored_facet)
        return "-".join([self.protocol, *features])

    @property
    def facet_spec(self) -> FacetSpec:
        return parse_patch_facet(self.facet, self.norm)

    def sources(self, layers: Sequence[int]) -> list[LayerGroup]:
        """The layers that each head sees."""
        return group_layers(layers, self.layers_mode)

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all heads of all layers.

        Raises:
            DataError: the labels hold too few classes.
        """
        yield from SegmentationRun(self, context).scores()


class SegmentationRun:
    """Linear segmentation of one encoder on one dataset; making it computes nothing.

    Attributes:
        split: Which training images are used, and which of them choose the rate.
        training_pass: How these images become features and labels.
        heads: What is to be fitted for each source and learning rate, or C.
    """

    def __init__(self, probe: Segmentation, context: ProbeContext) -> None:
        self.probe, self.context, encoder = probe, context, context.encoder
        images = probe.training_images(context.dataset)
        self.split = TrainingSplit.draw(
            images, max_images=probe.train_images, holdout=probe.holdout, seed=context.seed
        )
        self.val_images = probe.split(context.dataset)
        self.sources = probe.sources(context.layers)
        views = WholeImage(probe.views)
        if probe.crops == "resized":
            views = ResizedCrops(probe.views, context.seed)
        elif probe.crops == "scaled":
            views = ScaledCrops(probe.views, context.seed, encoder.mean)
        layers = sorted({layer for source in self.sources for layer in source})
        patch = encoder.patch_size
        self.training_pass = TrainingPass(
            context=context,
            extractor=context.extractor(layers, probe.scored_facet),
            images=images,
            indices=self.split.indices,
            image_size=probe.image_size,
            views=views,
            label_size=probe.loss.label_size(probe.image_size // patch, patch),
            batch_size=probe.training.batch_size,
            workers=probe.num_workers,
        )
        self.heads = HeadSpec(
            loss=probe.loss,
            standardize=probe.norm == "standardize",
            classes=len(self.val_images.class_names),
            seed=context.seed,
            device=context.device,
        )
        self.cache = cache_folder(probe.cache)

    def scores(self) -> Iterator[Score]:
        """Train all heads on passes over the training images, score them on one over the others.

        Raises:
            DataError: the labels hold too few classes.
        """
        features = self.features()
        heads = self.train(features)
        held_out = self.count_held_out(heads, features)
        if self.probe.training.refit:
            heads = self._fit(features, self.split.all_entries(self.probe.views))
        found, drawn = self.score(heads, held_out, self._details(heads, features))
        # Before the scores, so that no record stands there without them.
        self._draw(drawn, [chosen for chosen, _ in found])
        ids = self.split.ids(self.training_pass.images)
        write_text_atomically(
            self.context.artifacts / self.probe._list_name(self.context.seed),
            "".join(f"{image_id}\n" for image_id in ids),
        )
        for _, scores in found:
            yield from scores
        views = self.probe.views
        trained = (self.split.training_entries(views), self.split.all_entries(views))
        for journal in (*map(self._heads_journal, trained), self._counts_journal()):
            journal.remove()
        remove_orphans(self.cache / "heads")

    def features(self) -> TrainingFeatures:
        """Of all training images, in memory, on disk, or computed whenever they are asked for."""
        probe = self.probe
        return self.training_pass.run(
            self.cache / "features", probe.tier, probe.memory_gib, probe.disk_gib
        )

    def train(self, features: TrainingFeatures) -> TrainedHeads:
        """Train the heads of all sources on the images that are not held out."""
        entries = self.split.training_entries(self.probe.views)
        seen = features.present[entries].any(0)[:IGNORED].nonzero()[:, 0].tolist()
        if len(seen) < 2:
            names = [self.val_images.class_names[number] for number in seen]
            raise DataError(
                f"the training labels of {self.training_pass.images.name} hold "
                f"{names or 'no class'}, expected at least two classes"
            )
        return self._fit(features, entries)

    def _fit(self, features: TrainingFeatures, entries: Int64[Tensor, " chosen"]) -> TrainedHeads:
        """Train the heads of all sources, or load those that an interrupted run had finished."""
        context, journal = self.context, self._heads_journal(entries)
        if journal.entries and "trained" in journal.entries[-1]:
            trained = journal.entries[-1]["trained"] | {"sources": tuple(self.sources)}
            return TrainedHeads(**trained).to(context.device)
        heads = self.probe.training.train(
            self.heads, features, self.sources, entries, context.progress, journal
        )
        if heads.seconds >= 60 * self.probe.keep_minutes:
            journal.replace({"trained": vars(heads)})
        return heads

    def count_held_out(
        self, heads: TrainedHeads, features: TrainingFeatures
    ) -> Int64[np.ndarray, "sources values 3 classes"] | None:
        """Counts summed over the held-out images, from their cached features."""
        if not self.split.held_out:
            return None
        total = torch.zeros(1, dtype=torch.int64, device=self.context.device)
        positions = torch.tensor(sorted(self.split.held_out))
        chosen = (positions * self.probe.views).split(self.probe.training.batch_size)
        read = features.reader(features.layers, self.context.device)
        shown = self.context.progress(read(chosen), "held-out images", len(chosen))
        left = iter(positions.tolist())
        for batch in shown:
            for number in range(batch.features.shape[1]):
                one = batch.features[:, number : number + 1]
                image = self.prepare(self.training_pass.images[self.split.indices[next(left)]])
                blocks = dict(zip(features.layers, one, strict=True))
                total = total + self._predict(heads, blocks, image)[1]
        return total.cpu().numpy()

    def score(
        self,
        heads: TrainedHeads,
        held_out: Int64[np.ndarray, "sources values 3 classes"] | None,
        details: Mapping[str, Any],
    ) -> tuple[list[tuple[int, list[Score]]], list[Tensor]]:
        """The chosen value and the scores of each source, and what is predicted of drawn images.

        The scored images stream once through encoder and heads; what a killed run had counted
        passes no more.
        """
        images, journal = self.val_images, self._counts_journal()
        counts = ImageCounts(*heads.bias.shape)
        for entry in journal.entries:
            counts.extend(entry)
        self.count(heads, self._scored(range(len(images))[len(counts) :]), counts, journal)
        if not counts.total[:, :, 2].any():
            raise DataError(f"{images.name} {images.split} has no labelled pixel")
        # Once more, since a killed run may have counted them long ago.
        indices = sampled_numbers(images.ids, self.probe.panels)
        drawn = self.predict(heads, self._scored(indices)) if indices else []
        chosen = [None] * len(self.sources) if held_out is None else held_out
        found = [self._scores(heads, n, counts, one, details) for n, one in enumerate(chosen)]
        return found, drawn

    def prepare(self, sample: Sample) -> ScoredImage:
        """An image as the encoder is shown it to be scored."""
        probe = self.probe
        return probe.inference.prepare(sample, probe.image_size, self.context.encoder.mean)

    def predict(
        self, heads: TrainedHeads, images: Iterable[ScoredImage]
    ) -> list[UInt8[Tensor, "sources values _height _width"]]:
        """Classes of the pixels of each image, by source and by learning rate or C."""
        return self.count(heads, images, ImageCounts(*heads.bias.shape))

    def _scored(self, indices: Sequence[int]) -> Iterable[ScoredImage]:
        workers = self.probe.num_workers
        items = read_ahead(self.val_images, indices, self.prepare, workers=workers)
        return self.context.progress(items, "scored images", len(indices))

    def count(
        self,
        heads: TrainedHeads,
        images: Iterable[ScoredImage],
        counts: ImageCounts,
        journal: Journal | None = None,
    ) -> list[UInt8[Tensor, "sources values _height _width"]]:
        """Add the predictions of all heads for each image to `counts`, and these to a journal.

        Without a journal, the predicted maps are returned. They are needed for the few figures.
        """
        extractor, found, num_written = self.training_pass.extractor, [], len(counts)
        for batch in batches(images, self.probe.training.batch_size):
            windows = torch.cat([image.windows for image in batch])
            ids = [image.image_id for image in batch for _ in image.windows]
            by_layer, sums = extract(extractor, windows, ids)
            parts, drawn, first = [], [], 0
            for image in batch:
                some = slice(first, first := first + len(image.windows))
                blocks = {layer: features[some] for layer, features in by_layer.items()}
                predicted, counted = self._predict(heads, blocks, image)
                parts.append(counted)
                drawn += [predicted] if journal is None else []
            parts, *drawn = fetch_finite(extractor, sums, ids, [torch.stack(parts), *drawn])
            counts.add(parts)
            found += drawn
            if journal and journal.is_due():
                journal.append(counts.entry(num_written))
                num_written = len(counts)
        return found

    def _predict(
        self,
        heads: TrainedHeads,
        features: Mapping[int, Float[Tensor, "windows rows cols dim"]],
        image: ScoredImage,
    ) -> tuple[
        UInt8[Tensor, "sources values height width"], Int64[Tensor, "sources values 3 classes"]
    ]:
        """Classes of every pixel of one image by all heads; right, predicted and true by class."""
        found = []
        for index, source in enumerate(heads.sources):
            windows = torch.cat([features[layer].float() for layer in source], -1)
            logits = torch.stack([heads.logits(index, one) for one in windows])
            # Here the logits of patches become classes of pixels.
            found.append(self.probe.inference.predict(logits, image))
        predicted, target = torch.stack(found), to_device(image.mask, found[0].device)
        counts = class_counts(predicted.flatten(0, 1), target, self.heads.classes)
        return predicted, counts.unflatten(0, predicted.shape[:2])

    def _scores(
        self,
        heads: TrainedHeads,
        index: int,
        counts: ImageCounts,
        held_out: Int64[np.ndarray, "values 3 classes"] | None,
        shared: Mapping[str, Any],
    ) -> tuple[int, list[Score]]:
        """Of one source; first the index of the value that counts.

        The held-out images choose it; without any, the scored ones do. Mean IoU is given at the
        one chosen without a look at the scored images and at the best one, accuracy at the former.
        """
        training, source = self.probe.training, self.sources[index]
        values, hyperparameter = training.values, training.hyperparameter
        names = self.val_images.class_names
        width = self.training_pass.extractor.width(self.probe.scored_facet)
        # Share of the channels that are the same in all training patches.
        constant = heads.constant_channels[index] / width / len(source)
        by_value, choosing = mean_iou(counts.total[index]), None
        chosen, ways = _best(by_value), [("miou_oracle", _best(by_value))]
        if held_out is not None:
            choosing = mean_iou(held_out)
            chosen = _best(choosing)
            ways.insert(0, ("miou_holdout", chosen))
        scores = []
        for metric, rate in [*ways, ("pixel_accuracy", chosen)]:
            warnings = []
            if len(values) > 1 and rate in (0, len(values) - 1):
                name = hyperparameter.replace("_", " ")
                warnings.append(f"the chosen {name} {values[rate]:g} is at the edge of its grid")
            if constant == 1:
                warnings.append("degenerate: all training patches have the same features")
            details = {
                hyperparameter: values[rate],
                f"{hyperparameter}s": list(values),
                "miou_by_rate": nan_to_none(by_value),
                "miou_by_rate_held_out": None if choosing is None else nan_to_none(choosing),
                "constant_features": constant == 1,
                "constant_channels_percent": round(100 * constant, 1),
                "warnings": [*warnings, *few_images_warning(len(counts))],
                **shared,
                **heads.convergence(index),
                "layers": list(source),
            }
            cell = source[-1], self.probe.scored_facet
            scores.append(mask_score(cell, metric, counts, (index, rate), names, details))
        return chosen, scores

    def _details(self, heads: TrainedHeads, features: TrainingFeatures) -> dict[str, Any]:
        """What records say of the training, the same for all sources."""
        held_out = len(self.split.held_out)
        ignored = ~features.present[:: self.probe.views, :IGNORED].any(1)
        trained = len(self.split.indices) - (0 if self.probe.training.refit else held_out)
        return {
            "num_train_images": trained,
            "num_held_out_images": held_out,
            "train_ids_sha256": ids_sha256(self.split.ids(self.training_pass.images)),
            "all_ignored_train_images": int(ignored.sum()),
            "train_seconds": round(heads.seconds, 3),
            "feature_tier": features.tier,
            "encoder_passes": features.passes,
            "guesses": fill_in_guesses(self.probe, self.probe.guesses),
        }

    def _draw(self, drawn: Sequence[Tensor], rates: Sequence[int]) -> None:
        """The photograph, the truth and each source's classes laid over it, and a legend."""
        indices = sampled_numbers(self.val_images.ids, self.probe.panels)
        for index, predicted in zip(indices, drawn, strict=True):
            sample = self.val_images[index]
            masks = {"ground truth": self.prepare(sample).mask}
            for source, rate, by_rate in zip(self.sources, rates, predicted, strict=True):
                title = f"block{'s' * (len(source) > 1)} {', '.join(map(str, source))}"
                masks[title] = by_rate[rate]
            size = sample.image.shape[:2]
            full = {title: resize_mask(mask, *size).numpy() for title, mask in masks.items()}
            tiles = [titled(sample.image, "photograph")]
            tiles += [titled(overlaid(sample.image, mask), title) for title, mask in full.items()]
            tiles.append(_legend(full.values(), self.val_images.class_names))
            rows = [tiles[i : i + _TILES_PER_ROW] for i in range(0, len(tiles), _TILES_PER_ROW)]
            sheet(rows, self.context.artifacts / self.probe._panel_name(sample.image_id))

    # Files from which an interrupted run continues.

    def _heads_journal(self, entries: Int64[Tensor, " chosen"]) -> Journal:
        return self._journal("heads", entries=entries.tolist())

    def _counts_journal(self) -> Journal:
        return self._journal(
            "counts",
            split=(self.split.indices, sorted(self.split.held_out), self.probe.training.refit),
            images=(self.val_images.fingerprint(), *self.val_images.ids),
            inference=repr(self.probe.inference),
        )

    def _journal(self, name: str, **dependencies: Any) -> Journal:
        header = {
            "training": repr((self.heads, self.probe.training)),
            "features": self.training_pass.header(),
            "sources": self.sources,
            **dependencies,
        }
        return Journal(
            self.cache / "heads",
            name,
            header,
            say=self.context.say,
            minutes=self.probe.keep_minutes,
            is_cache=True,
        )


def _best(by_value: Float64[np.ndarray, " values"]) -> int:
    """Index of the largest mean IoU; of equal ones the first."""
    return int(np.nan_to_num(by_value, nan=-1.0).argmax())


def overlaid(
    image: UInt8[np.ndarray, "height width 3"], mask: UInt8[np.ndarray, "height width"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Blend the colours of the classes into a photograph, except where the mask holds 255."""
    blended = (0.4 * image + 0.6 * _COLOURS[mask]).astype(np.uint8)
    return np.where((mask == IGNORED)[..., None], image, blended)


def _legend(
    masks: Iterable[UInt8[np.ndarray, "height width"]], class_names: Sequence[str]
) -> Image.Image:
    """Names of the most frequent classes beside their colours."""
    pixels = sum(np.bincount(mask.ravel(), minlength=256) for mask in masks)
    order = np.argsort(-np.asarray(pixels)[: len(class_names)], kind="stable")
    shown = [int(c) for c in order if np.asarray(pixels)[c] > 0][:_LEGEND_LINES]
    font = ImageFont.load_default(12)
    width = 24 + max((int(font.getlength(class_names[c])) for c in shown), default=0)
    legend = Image.new("RGB", (width, _LINE_HEIGHT * max(1, len(shown))), "white")
    draw = ImageDraw.Draw(legend)
    for line, number in enumerate(shown):
        top = line * _LINE_HEIGHT
        draw.rectangle((2, top + 2, 16, top + 13), fill=tuple(_COLOURS[number].tolist()))
        draw.text((20, top), class_names[number], fill="black", font=font)
    return legend
