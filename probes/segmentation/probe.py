"""Linear segmentation: what can a linear head segment with the patches of each block?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from probes.features.cache import TrainingPass
from probes.features.split import TrainingSplit
from probes.features.views import ResizedCrops, ScaledCrops, TrainingViews, WholeImage
from probes.heads.logistic import LogisticTraining
from probes.heads.losses import HistogramLoss, ModeLoss, PixelLoss, ResampledLoss, UpsampledLoss
from probes.heads.optimizers import SGD, HeadAdamW, Schedule
from probes.heads.scored_images import PatchScoring, Scoring, SlidingScoring, SquashedScoring
from probes.heads.sgd import HeadTraining, LayerGroup, Training, settings_without, sources_of
from probes.segmentation.run import FileNames, SegmentationRun
from ssl_bench.composition.fields import (
    Count,
    CountOrZero,
    FilePath,
    Pixels,
    Positive,
    PositiveOrZero,
    Rate,
    ShareBelowOne,
    Threads,
    check_fields,
    require_some,
)
from ssl_bench.data.locations import cache_folder
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import Facet, FeatureExtractor
from ssl_bench.models import Encoder

HALF_DECADES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_LOSSES = ("upsample4", "histogram", "full_resolution", "majority")
# Where, how fast and with what words, not what comes out; protocol and facet have their own place.
_NOT_SETTINGS = frozenset({"protocol", "panels", "memory_gib", "cache", "num_workers", "guesses"})
_OF_STEPS = frozenset(
    {"learning_rates", "epochs", "batch_size", "schedule", "warmup", "weight_decay"}
)
_OF_LBFGS = frozenset({"c_values", "max_iterations", "refit"})


@dataclass(frozen=True)
class Segmentation:
    """Linear heads on every block and with every learning rate, from one pass over the images.

    Attributes:
        protocol: The preset these values come from; records carry it.
        layers_mode: "single": one head a block. "multi": one head on the blocks at 1/4, 1/2, 3/4
            and all of the depth up to the last asked layer. "last4": on the last four up to it.
        learning_rates: All are trained; which one counts is chosen afterwards.
        image_size: Side of the squares that the encoder sees; a multiple of the patch.
        loss: "upsample4": bilinear logits against labels at four times the token grid.
            "histogram": patch logits against the histogram of labels under the patch. "majority":
            patch logits against the most frequent of them. "full_resolution": bilinear logits
            against labels at `image_size`. A number: bilinear logits against labels of that size.
        norm: Before the head. "standardize": each channel over the training set. "final": the
            encoder's last norm. "none": the block's output.
        crops: "whole": training images are squashed. "resized": random parts of at least 80 % of
            the area are squashed. "scaled": random squares of the image at half to twice the size.
        views: How many crops of each image are drawn, once; with "whole", 2 adds its mirror image.
        optimizer: "lbfgs" fits logistic regressions to the end, one for each of `c_values`, in
            place of a number of steps with each of the learning rates.
        warmup: Share of the steps in which the learning rate rises.
        c_values: C of scikit-learn's logistic regression: weight of the loss against the penalty.
        holdout: Share of the training images that choose the rate or C and train nothing.
        refit: With "lbfgs", fit to all training images once the held-out ones have chosen.
        train_images: At most so many, drawn with the seed.
        scoring: "squash": scored images are squashed, logits upsampled bilinearly. "patch":
            squashed, but each pixel takes the class of its patch. "slide": windows slide over them.
        score_size: Masks are reduced to this size before scoring; the original size if None.
        panels: How many of the first scored images are drawn.
        memory_gib: What the features may take in memory; beyond it they go to disk.
        cache: Folder for these; the user's cache if None.
        num_workers: Threads that decode images.
        guesses: What the protocol's authors left open, and where this preset differs from theirs.
    """

    protocol: str = "ssl_bench"
    layers_mode: Literal["single", "multi", "last4"] = "single"
    learning_rates: Sequence[Rate] = HALF_DECADES
    epochs: Count = 30
    batch_size: Count = 16
    image_size: Pixels = 512
    loss: str = "upsample4"
    norm: Literal["none", "final", "standardize"] = "standardize"
    crops: Literal["whole", "resized", "scaled"] = "whole"
    views: Count = 1
    optimizer: Literal["adamw", "sgd", "lbfgs"] = "adamw"
    schedule: Literal["cosine", "linear", "constant", "drop"] = "cosine"
    warmup: ShareBelowOne = 0.05
    weight_decay: PositiveOrZero = 1e-4
    c_values: Sequence[Positive] = ()
    max_iterations: Count = 1000
    refit: bool = False
    holdout: ShareBelowOne = 0.1
    train_images: Count | None = None
    scoring: Literal["squash", "patch", "slide"] = "squash"
    score_size: Pixels | None = None
    panels: CountOrZero = 6
    memory_gib: PositiveOrZero = 8.0
    cache: FilePath | None = None
    num_workers: Threads = 4
    guesses: Sequence[str] = ()

    task = "segmentation"
    role = "segmentation"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        if self.loss not in _LOSSES and not self.loss.isdecimal():
            raise ConfigurationError(
                f"probe.loss must be one of {_LOSSES} or a number, got {self.loss!r}"
            )
        grid = "c_values" if self.optimizer == "lbfgs" else "learning_rates"
        require_some(f"probe.{grid}", getattr(self, grid))
        self._check_together()

    def _check_together(self) -> None:
        if self.crops == "whole" and self.views > 2:
            raise ConfigurationError(
                f"probe.views must be 1 or 2 for probe.crops=whole, got {self.views}"
            )
        if self.holdout and (self.crops != "whole" or self.scoring == "slide"):
            raise ConfigurationError(
                "probe.holdout must be 0 unless probe.crops=whole and probe.scoring=squash or "
                "patch: the held-out images are scored from their cached features, got "
                f"{self.holdout}"
            )
        if self.refit and not (self.holdout and self.optimizer == "lbfgs"):
            raise ConfigurationError(
                "probe.refit must be false unless probe.optimizer=lbfgs and probe.holdout > 0"
            )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = ["miou_holdout"] if self.holdout else []
        metrics += ["miou_oracle", "pixel_accuracy"]
        sources = self.sources(layers)
        return [(source[-1], self.facet, metric) for source in sources for metric in metrics]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        unused = _OF_STEPS if self.optimizer == "lbfgs" else _OF_LBFGS
        return settings_without(_NOT_SETTINGS | unused, asdict(self))

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        names, shown = self._names(seed), [source[-1] for source in self.sources(layers)]
        panels = [names.panel(image_id) for image_id in images.ids[: self.panels]]
        return dict.fromkeys([*panels, names.training_images], shown)

    def _names(self, seed: int) -> FileNames:
        shown = self.facet if self.layers_mode == "single" else self.layers_mode
        return FileNames(self.protocol, shown, seed)

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all heads of all layers.

        Raises:
            ConfigurationError: the patch does not divide `image_size`.
            DataError: the labels hold too few classes.
        """
        yield from self.prepared(context).scores(self.guesses)

    def prepared(self, context: ProbeContext) -> SegmentationRun:
        """The run with all its parts; opens the dataset, computes nothing."""
        train_images = self.training_images(context.dataset)
        split = TrainingSplit.draw(
            train_images, at_most=self.train_images, holdout=self.holdout, seed=context.seed
        )
        training_pass = self._training_pass(context, train_images, split.indices)
        val_images = self.split(context.dataset)
        return SegmentationRun(
            training_pass=training_pass,
            training=self._training(context, len(val_images.class_names)),
            scoring=self._scoring(context.encoder),
            split=split,
            val_images=val_images,
            sources=self.sources(context.layers),
            refit=self.refit,
            memory_gib=self.memory_gib,
            cache=cache_folder(self.cache) / "features",
            facet=self.facet,
            folder=context.artifacts,
            names=self._names(context.seed),
            panels=self.panels,
        )

    @property
    def facet(self) -> Facet:
        """What of a block the heads see."""
        return "token_normed" if self.norm == "final" else "token"

    def sources(self, layers: Sequence[int]) -> list[LayerGroup]:
        """The layers that each head sees."""
        return sources_of(layers, self.layers_mode)

    def _training_pass(
        self, context: ProbeContext, images: ImageSet, indices: Sequence[int]
    ) -> TrainingPass:
        patch = context.encoder.patch_size
        layers = sorted({layer for source in self.sources(context.layers) for layer in source})
        return TrainingPass(
            extractor=FeatureExtractor(
                context.encoder,
                layers=layers,
                facets=(self.facet,),
                device=context.device,
                dtype=context.dtype,
            ),
            facet=self.facet,
            images=images,
            indices=indices,
            image_size=self.image_size,
            views=self._views(context),
            label_size=self._loss(patch).label_size(self.image_size // patch),
            batch_size=self.batch_size,
            workers=self.num_workers,
            progress=context.progress,
            say=context.say,
        )

    def _training(self, context: ProbeContext, classes: int) -> Training:
        if self.optimizer == "lbfgs":
            return self._logistic_training(context, classes)
        optimizers = {"adamw": HeadAdamW, "sgd": SGD}
        return HeadTraining(
            values=tuple(float(rate) for rate in self.learning_rates),
            epochs=self.epochs,
            batch_size=self.batch_size,
            loss=self._loss(context.encoder.patch_size),
            optimizer=optimizers[self.optimizer](weight_decay=self.weight_decay),
            schedule=Schedule(self.schedule, self.warmup),
            standardize=self.norm == "standardize",
            classes=classes,
            seed=context.seed,
            device=context.device,
        )

    def _logistic_training(self, context: ProbeContext, classes: int) -> LogisticTraining:
        return LogisticTraining(
            values=tuple(float(c) for c in self.c_values),
            max_iterations=self.max_iterations,
            batch_size=self.batch_size,
            loss=self._loss(context.encoder.patch_size),
            standardize=self.norm == "standardize",
            classes=classes,
            seed=context.seed,
            device=context.device,
        )

    def _loss(self, patch: int) -> PixelLoss:
        if self.loss.isdecimal():
            return ResampledLoss(self.image_size // patch, self.image_size // patch, int(self.loss))
        of_patches = {"histogram": HistogramLoss(patch), "majority": ModeLoss(patch)}
        return of_patches.get(self.loss, UpsampledLoss(4 if self.loss == "upsample4" else patch))

    def _views(self, context: ProbeContext) -> TrainingViews:
        if self.crops == "resized":
            return ResizedCrops(self.views, context.seed)
        if self.crops == "scaled":
            return ScaledCrops(self.views, context.seed, context.encoder.mean)
        return WholeImage(self.views)

    def _scoring(self, encoder: Encoder) -> Scoring:
        if self.scoring == "slide":
            return SlidingScoring(self.image_size, encoder.mean)
        if self.scoring == "patch":
            return PatchScoring(self.image_size, self.score_size)
        return SquashedScoring(self.image_size, self.score_size)
