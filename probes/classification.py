"""Linear classification: how well can linear heads predict image classes from a block's features?

`LinearClassification` trains linear or attentive heads on the features of a frozen encoder.
`TrainingDraws` contains one or several random samples ("draws") of the training images. In each
draw, some images are for training the heads, and others are held out to select the best head.
`score_selected_heads` selects the best head and computes its accuracy.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.features.image import IMAGE_FACETS, ImageFeatures, ImagePass
from probes.features.stream import batched, extract_float16, read_ahead, undo_scaling
from probes.features.tiers import StoredFeatures, TrainingFeatures, TrainingPass
from probes.features.training_images import (
    CentralSquare,
    LayerGroup,
    ShotCounts,
    Shots,
    TrainingSplit,
    group_layers,
    ids_sha256,
    reject_single_block,
    reject_train_images_with_shots,
    require_labels,
    shot_counts,
)
from probes.heads.attentive import AttentivePooling, TrainedAttentiveHeads
from probes.heads.logistic import LogisticRegression
from probes.heads.losses import LabelLoss
from probes.heads.sgd import (
    SGD,
    HeadOptimizer,
    HeadSpec,
    Schedule,
    StepTraining,
    TrainedHeads,
    Training,
)
from probes.top_k import TOP_K, average_over_draws, shot_metric_name, top_k_score
from ssl_bench.composition.compose import fill_in_guesses
from ssl_bench.composition.fields import (
    Count,
    FractionBelowOne,
    Pixels,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    Rate,
    Threads,
    format_value,
)
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import central_square
from ssl_bench.layers import INNER_FACETS, FacetSpec
from ssl_bench.neighbours import LabelledFeatures, class_rank
from ssl_bench.system.device import to_device
from ssl_bench.system.files import cache_folder

ATTENTIVE_FACET = "patch_attentive"
"""Name of the kind of feature (facet) in the scores of attentive heads.

Attentive heads pool the patch tokens after the encoder's final norm.
"""

_MAX_SELECTION_SHOTS = 4
# Maximum number of logits that are in memory at the same time. They take 0.25 GiB.
_MAX_LOGITS = 2**26
_ATTENTIVE_GUESSES = (
    "central squares of the training images instead of a new random crop and flip in every epoch",
    "batches of $batch_size instead of 4,096 images, with the learning rate selected from a list",
    "$epochs epochs instead of 90, because the squares are the same in every epoch",
    "scored after the last epoch instead of after the epoch with the best score",
)


@dataclass(frozen=True)
class ImageRegression(LogisticRegression):
    """Logistic regression on one feature vector per image.

    The training stops at a gradient tolerance of 1e-4, the default of scikit-learn.
    """

    c_values: Sequence[Positive] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    batch_size: Count = 1024

    # The default `tol` of scikit-learn's LogisticRegression.
    gradient_tolerance = 1e-4


@dataclass(frozen=True)
class Momentum(StepTraining):
    """Training of linear heads by SGD with momentum 0.9 and a cosine learning rate schedule.

    The learning rate decreases to zero. There is no warm-up and no weight decay.
    """

    learning_rates: Sequence[Rate] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
    epochs: Count = 100
    batch_size: Count = 1024

    def settings(self) -> dict[str, Any]:
        return {"optimizer": "sgd", **super().settings()}

    def optimizer_and_schedule(self) -> tuple[HeadOptimizer, Schedule]:
        return SGD(weight_decay=0.0), Schedule("cosine", warmup=0.0)


@dataclass(frozen=True)
class FixedPooling:
    """The setting `probe.pool=fixed`: the pooling of patches is fixed, not learned by the heads.

    Each head receives one feature vector of the image. The setting `probe.facet` selects this
    vector, for example the [CLS] token.
    """


@dataclass(frozen=True)
class LinearClassification(Probe):
    """A probe that trains linear heads on frozen features of each block and scores their accuracy.

    There is one head for each combination of a block and a learning rate. With logistic regression,
    heads differ in C, the inverse strength of the penalty, instead of the learning rate. All heads
    are trained at the same time.

    Attributes:
        protocol: Name of the preset that sets the default values.
        facet: Feature that represents an image, or a list of such features. "cls" is the [CLS]
            token, and "patch_mean" is the mean of the patches. "cls_patch_mean" concatenates the
            two. All three features are taken after the encoder's final norm. For attn_out,
            attn_skip, mlp_hidden, mlp_out and submodules of a block, the feature is the mean of the
            patches, without a norm.
        pool: Pooling of the patches, a file name in configs/probe/classification/pool. With
            "fixed", heads receive the vector that `facet` selects. With "attentive", each head
            learns to pool the patches. The patches are taken after the encoder's final norm.
        layers_mode: Blocks whose features each head receives. "single" is one block. "last4"
            concatenates the last requested block and the three blocks before it.
        training: Method that trains the heads, a file name in
            configs/probe/classification/training.
        standardise: Whether each channel is standardised over the training images.
        holdout: Fraction of the training images that are held out to select C or the learning rate.
            After the selection, linear heads are trained again on all training images, unless
            `shots` is set. If the fraction is 0, C or the learning rate is selected only on the
            scored images.
        train_images: Maximum number of training images, drawn at random. By default, all training
            images are used.
        shots: Number n of training images of each class, or a list of such numbers. Unless
            `holdout` is 0, min(n, 4) further images of each class are held out to select C or the
            learning rate.
        draws: Number of times that the training images are drawn at random if `shots` is set.
            Scores are means over the draws.
        image_size: Side of the square input in pixels (default: the encoder's native size).
        crop_share: Side of the central square crop, relative to the shorter side of the image.
        memory_gib: Memory limit for the features in GiB. If the vectors of all layers exceed it,
            the encoder processes the images several times. If the patches for attentive heads
            exceed it, they are stored on disk.
        guesses: Notes that are stored with the results, on settings that the protocol's authors do
            not specify and on differences from their code.
    """

    protocol: str = "ssl_bench"
    facet: str | Sequence[str] = "cls"
    pool: FixedPooling | AttentivePooling = field(default_factory=FixedPooling)
    layers_mode: Literal["single", "last4"] = "single"
    training: Training = field(default_factory=ImageRegression)
    standardise: bool = True
    holdout: FractionBelowOne = 0.1
    train_images: Count | None = None
    shots: ShotCounts = None
    draws: Count = 5
    image_size: Pixels | None = None
    crop_share: PositiveFraction = 0.875
    encoder_batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4
    guesses: Sequence[str] = ()

    task = "classification"
    role = "classification"
    known_facets = (*IMAGE_FACETS, *INNER_FACETS)
    has_per_image_values = True
    excluded_from_identity = (
        *Probe.excluded_from_identity,
        "training",
        "pool",
        "encoder_batch_size",
        "memory_gib",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_single_block(self.facet_spec, self.layers_mode)
        reject_train_images_with_shots(self.shots, self.train_images)
        defaults = LinearClassification.facet, LinearClassification.layers_mode
        is_attentive = isinstance(self.pool, AttentivePooling)
        if is_attentive and (self.facet, self.layers_mode) != defaults:
            raise ConfigurationError(
                "probe.pool=attentive always pools the patches of one block after the final norm, "
                f"but probe.facet is {format_value(self.facet)} and probe.layers_mode is "
                f"{self.layers_mode}. Leave out probe.facet and probe.layers_mode"
            )

    @property
    def facet_spec(self) -> FacetSpec | None:
        if isinstance(self.pool, AttentivePooling):
            return FacetSpec((ATTENTIVE_FACET,), None)
        return super().facet_spec

    def settings(self) -> dict[str, Any]:
        # The number n of shots is part of the metric's name, so it need not be a setting. With
        # shots, n also determines the number of held-out images, so the fraction `holdout` is left
        # out.
        unused = {"shots", *(("draws",) if self.shots is None else ("holdout", "train_images"))}
        training = self.training.settings()
        if isinstance(self.pool, AttentivePooling):
            # Attentive heads receive one block, and have their own normalisation.
            training, unused = self.pool.settings(), unused | {"layers_mode", "standardise"}
        settings = super().settings()
        return {name: value for name, value in settings.items() if name not in unused} | training

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        selections = ["holdout", "oracle"] if self.holdout else ["oracle"]
        metrics = [f"top{top}_{selection}" for selection in selections for top in TOP_K]
        if self.shots is not None:
            counts = shot_counts(self.shots)
            metrics = [shot_metric_name(metric, shots) for shots in counts for metric in metrics]
        last = [group[-1] for group in group_layers(layers, self.layers_mode)]
        return list(itertools.product(last, self.facets, metrics))

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Train classification heads on the features of each layer, and yield their accuracies.

        The top-5 accuracy is NaN if there are fewer than five classes.

        Raises:
            ConfigurationError: The encoder has no [CLS] token, or its width is not divisible by the
                number of attentive queries.
            DataError: There are too few training images in total or of one class, or all training
                images have the same class.
        """
        if isinstance(self.pool, AttentivePooling):
            yield from self._score_attentive_heads(self.pool, context)
        else:
            yield from self._score_linear_heads(context)

    # Linear heads. They receive one vector per image, in memory.

    def _score_linear_heads(self, context: ProbeContext) -> Iterator[Score]:
        train_images = self.training_images(context.dataset)
        val_images = self.scored_images(context.dataset)
        draws = self._draw_training_images(train_images, context.seed)
        classes = len(val_images.class_names)
        spec = HeadSpec(LabelLoss(), self.standardise, classes, context.seed, context.device)
        groups = group_layers(context.layers, self.layers_mode)
        image_pass = ImagePass(self, context, self.encoder_batch_size)
        num_images = len(draws.indices) + len(val_images)
        layers_per_pass = image_pass.layers_per_pass(num_images, self.memory_gib)
        for some_groups in batched(groups, max(1, layers_per_pass // len(groups[0]))):
            layers = sorted({*itertools.chain(*some_groups)})
            train = image_pass.run(train_images, draws.indices, layers)
            draws.require_two_classes(train.labels)
            val = image_pass.run(val_images, range(len(val_images)), layers)
            for facet in self.facets:
                train_and_score = partial(
                    self._train_linear_heads, context, spec, draws, facet, some_groups, train, val
                )
                yield from draws.average(train_and_score)

    def _train_linear_heads(
        self,
        context: ProbeContext,
        spec: HeadSpec,
        draws: "TrainingDraws",
        facet: str,
        groups: Sequence[LayerGroup],
        train: ImageFeatures,
        val: ImageFeatures,
        draw: "TrainingDraw",
    ) -> Iterator[Score]:
        """Train linear heads on one random sample of training images, and yield their scores.

        `draw` is one of the random samples in `draws`. All heads of a group in `groups` receive the
        concatenated features of its layers. `facet` is the kind of feature.
        """
        stored = StoredFeatures(
            train.layers, train.by_facet[facet][:, :, None, None], train.labels[:, None, None]
        )
        heads = selection_heads = self.training.train(
            spec, stored, groups, draw.train_positions, context.progress
        )
        if draw.refit_positions is not None:
            heads = self.training.train(
                spec, stored, groups, draw.refit_positions, context.progress
            )
        details = {
            **draws.details(draw, heads.seconds),
            "guesses": fill_in_guesses(self, self.guesses),
        }
        for index, group in enumerate(groups):
            features, held_out_ranks = val.concatenate(group, facet), None
            if draw.held_out is not None:
                held_out = train.concatenate(group, facet).take(draw.held_out)
                held_out_ranks = _linear_ranks(selection_heads, index, held_out, context.device)
            yield from score_selected_heads(
                group[-1],
                facet,
                hyperparameter=self.training.hyperparameter,
                values=self.training.values,
                num_classes=spec.classes,
                ranks=_linear_ranks(heads, index, features, context.device),
                labels=features.labels,
                held_out_ranks=held_out_ranks,
                constant_share=heads.constant_channels[index] / features.features.shape[1],
                missing_classes=spec.classes - len(train.labels[draw.final_images].unique()),
                details={**details, **heads.convergence(index), "layers": list(group)},
            )

    # Attentive heads. They receive the patches of all layers, which are stored or recomputed.

    def _score_attentive_heads(
        self, pool: AttentivePooling, context: ProbeContext
    ) -> Iterator[Score]:
        train_images = self.training_images(context.dataset)
        pool.require_divisible(context.encoder.dim)
        draws = self._draw_training_images(train_images, context.seed)
        training_pass = TrainingPass(
            context=context,
            extractor=context.extractor(sorted(context.layers), "token_normed"),
            images=train_images,
            indices=draws.indices,
            image_size=self.resize.square_side(context.encoder.native_size),
            views=CentralSquare(self.crop_share),
            label_size=1,
            batch_size=self.encoder_batch_size,
            num_workers=self.num_workers,
        )
        labels = torch.tensor(require_labels(train_images))[list(draws.indices)]
        draws.require_two_classes(labels)
        folder = cache_folder(None) / "features"
        features = training_pass.run(folder, memory_gib=self.memory_gib)
        train_and_score = partial(
            self._train_attentive_heads, pool, training_pass, features, labels, draws
        )
        yield from draws.average(train_and_score)

    def _train_attentive_heads(
        self,
        pool: AttentivePooling,
        training_pass: TrainingPass,
        features: TrainingFeatures,
        labels: Int64[Tensor, " images"],
        draws: "TrainingDraws",
        draw: "TrainingDraw",
    ) -> Iterator[Score]:
        """Train attentive heads on one random sample of training images, and yield their scores.

        Each layer has its own heads, which learn to pool the patches of an image. `features` are
        the patch features of the training images, and `draw` is one of the random samples in
        `draws`.
        """
        context = training_pass.context
        val_images = self.scored_images(context.dataset)
        num_classes = len(val_images.class_names)
        heads = pool.train(
            features,
            labels,
            draw.train_positions,
            classes=num_classes,
            seed=context.seed,
            device=context.device,
            progress=context.progress,
        )
        held_out_ranks = None
        if draw.held_out is not None:
            parts = draw.held_out.split(pool.batch_size)
            stored = features.reader(heads.layers, context.device)(parts)
            patches = (batch.features for batch in stored)
            patches = context.progress(patches, "held-out images", len(parts))
            held_out_ranks = _attentive_ranks(heads, patches, labels[draw.held_out])
        val_labels = torch.tensor(require_labels(val_images))
        ranks = _attentive_ranks(
            heads, self._extract_patches(training_pass, val_images), val_labels
        )
        details = {
            **draws.details(draw, heads.seconds),
            "feature_tier": features.tier,
            "encoder_passes": features.passes,
            "guesses": fill_in_guesses(self, [*self.guesses, *_ATTENTIVE_GUESSES]),
        }
        for index, layer in enumerate(heads.layers):
            yield from score_selected_heads(
                layer,
                ATTENTIVE_FACET,
                hyperparameter="learning_rate",
                values=pool.learning_rates,
                num_classes=num_classes,
                ranks=ranks[index],
                labels=val_labels,
                held_out_ranks=None if held_out_ranks is None else held_out_ranks[index],
                constant_share=heads.constant_channels[index] / context.encoder.dim,
                missing_classes=num_classes - len(labels[draw.final_images].unique()),
                details={**details, "layers": [layer]},
            )

    def _extract_patches(
        self, training_pass: TrainingPass, images: ImageSet
    ) -> Iterator[Float[Tensor, "layers images rows cols dim"]]:
        """Yield batches of the scored images' patch features, rounded to float16 precision."""
        extractor, size = training_pass.extractor, training_pass.image_size

        def crop(sample: Sample) -> UInt8[Tensor, "3 size size"]:
            return central_square(sample.image, size, crop_share=self.crop_share)

        squares = read_ahead(images, range(len(images)), crop, num_workers=self.num_workers)
        squares = training_pass.context.progress(squares, f"{images.split} images", len(images))
        ids = iter(images.ids)
        for batch in batched(squares, self.encoder_batch_size):
            pixels = to_device(torch.stack(batch), extractor.device).float() / 255
            batch_ids = list(itertools.islice(ids, len(batch)))
            halves, scales = extract_float16(extractor, pixels, batch_ids)
            yield undo_scaling(torch.stack(halves), scales)

    def _draw_training_images(self, images: ImageSet, seed: int) -> "TrainingDraws":
        """Draw random images for training the heads, and others for selecting the best head.

        Raises:
            DataError: There are too few training images in total or of one class.
        """
        counts = shot_counts(self.shots)
        if not counts:
            split = TrainingSplit.draw(
                images, max_images=self.train_images, holdout=self.holdout, seed=seed
            )
            held_out = torch.tensor(sorted(split.held_out)) if split.held_out else None
            is_refit = split.held_out and not isinstance(self.pool, AttentivePooling)
            refit_positions = split.all_view_indices(1) if is_refit else None
            whole = TrainingDraw(split.train_view_indices(1), held_out, refit_positions)
            return TrainingDraws(images, split.indices, {None: [whole]})
        most = max(counts)
        per_class = most + min(most, _MAX_SELECTION_SHOTS) if self.holdout else most
        shots = Shots.draw(images, per_class=per_class, draws=self.draws, seed=seed)
        by_shots: dict[int | None, list[TrainingDraw]] = {n: [] for n in counts}
        for n, draw in itertools.product(counts, range(self.draws)):
            held_out = None
            if self.holdout:
                held_out = shots.select(draw, min(n, _MAX_SELECTION_SHOTS), skip=n)
            by_shots[n].append(TrainingDraw(shots.select(draw, n), held_out, None))
        return TrainingDraws(images, shots.indices, by_shots)


@dataclass(frozen=True)
class TrainingDraw:
    """One random sample (draw) of training images.

    Images are given by their position in the list `TrainingDraws.indices`, not by their index in
    the training set.

    Attributes:
        train_positions: Images that the heads are trained on.
        held_out: Images that are used to select the best head. None if the scored images are used.
        refit_positions: Images that the heads are trained on again after the selection. None if the
            heads are not trained again.
    """

    train_positions: Int64[Tensor, " train"]
    held_out: Int64[Tensor, " held_out"] | None
    refit_positions: Int64[Tensor, " refit"] | None

    @property
    def final_images(self) -> Int64[Tensor, " images"]:
        """Return the images that the scored heads were trained on.

        The result is `refit_positions` if this attribute is set, and otherwise `train_positions`.
        """
        return self.train_positions if self.refit_positions is None else self.refit_positions


@dataclass(frozen=True)
class TrainingDraws:
    """The random samples (draws) of training images for one evaluation.

    Attributes:
        images: The training set.
        indices: Sorted indices of all training images that occur in at least one draw.
        by_shots: Dictionary from the number of training images per class to the draws. If the
            setting `probe.shots` is not set, there is a single draw under the key None.
    """

    images: ImageSet
    indices: tuple[int, ...]
    by_shots: Mapping[int | None, Sequence[TrainingDraw]]

    def average(
        self, train_and_score: Callable[[TrainingDraw], Iterator[Score]]
    ) -> Iterator[Score]:
        """Yield scores that are averaged over random draws (samples) of training images.

        Each number of shots (training images of each class) has its own scores. If the setting
        `probe.shots` is not set, yield the scores of the only draw.

        Args:
            train_and_score: Function that trains heads on one draw and yields their scores.
        """
        for shots, draws in self.by_shots.items():
            if shots is None:
                yield from train_and_score(draws[0])
            else:
                # Only the scores of a draw stay in memory, not its heads.
                yield from average_over_draws([list(train_and_score(d)) for d in draws], shots)

    def details(self, draw: TrainingDraw, seconds: float) -> dict[str, Any]:
        """Describe the training on one draw (random sample of training images), as a dictionary.

        The dictionary contains the numbers of training and held-out images, a SHA-256 of the
        training images' ids, and the training time (`seconds`). The dictionary is stored with the
        scores of the draw.
        """
        ids = [self.images.ids[self.indices[n]] for n in draw.final_images.tolist()]
        return {
            "num_train_images": len(ids),
            "num_held_out_images": 0 if draw.held_out is None else len(draw.held_out),
            "train_ids_sha256": ids_sha256(ids),
            "train_seconds": round(seconds, 3),
        }

    def require_two_classes(self, labels: Int64[Tensor, " images"]) -> None:
        """Raise a DataError if all training images of a random draw have the same class.

        Args:
            labels: Class of each image in `self.indices`.
        """
        for draw in itertools.chain(*self.by_shots.values()):
            classes, images = labels[draw.train_positions].unique().tolist(), self.images
            if len(classes) < 2:
                raise DataError(
                    f"the heads would be trained on {len(draw.train_positions)} images of "
                    f"{images.name} {images.split}, which are all of class "
                    f"{images.class_names[classes[0]]}, expected at least two classes",
                    hint=("probe.train_images={larger}",),
                )


def _linear_ranks(
    heads: TrainedHeads, index: int, images: LabelledFeatures, device: torch.device
) -> Int64[Tensor, "values images"]:
    """Return the rank of each image's true class among the logits of each linear head.

    Rank 0 means that the true class has the largest logit. Only the heads of one group of layers
    are used. `index` is the index of the layer group, and `images` contains the group's features of
    each image.
    """
    batch_size, ranks = max(1, _MAX_LOGITS // heads.bias[index].numel()), []
    parts = zip(images.features.split(batch_size), images.labels.split(batch_size), strict=True)
    for features, labels in parts:
        logits = heads.logits(index, features.to(device)[:, None])[:, :, 0]
        ranks.append(class_rank(logits, labels.to(device)).cpu())
    return torch.cat(ranks, 1)


def _attentive_ranks(
    heads: TrainedAttentiveHeads,
    batches: Iterable[Float[Tensor, "layers batch rows cols dim"]],
    labels: Int64[Tensor, " images"],
) -> Int64[Tensor, "layers values images"]:
    """Return the rank of each image's true class among the logits of each attentive head.

    Rank 0 means that the true class has the largest logit. `batches` contains the patch features of
    the images, in the order of `labels`.
    """
    ranks, start = [], 0
    for patches in batches:
        batch_labels = labels[start : start + patches.shape[1]].to(patches.device)
        start += patches.shape[1]
        by_layer = [
            class_rank(heads.heads.logits(index, tokens.flatten(1, 2).float()), batch_labels)
            for index, tokens in enumerate(patches)
        ]
        ranks.append(torch.stack(by_layer).cpu())
    return torch.cat(ranks, 2)


def score_selected_heads(
    layer: int,
    facet: str,
    *,
    hyperparameter: str,
    values: Sequence[float],
    num_classes: int,
    ranks: Int64[Tensor, "values images"],
    labels: Int64[Tensor, " images"],
    held_out_ranks: Int64[Tensor, "values held_out_images"] | None,
    constant_share: float,
    missing_classes: int,
    details: Mapping[str, Any],
) -> Iterator[Score]:
    """Select the best of several heads, and yield its top-1 and top-5 accuracy in percent.

    The heads differ in one hyperparameter, such as the learning rate. The metrics "top1_holdout"
    and "top5_holdout" score the head with the highest top-1 accuracy on held-out images.
    "top1_oracle" and "top5_oracle" score the head with the highest top-1 accuracy on the scored
    images. If several heads are equally accurate, the first of them is selected.

    Args:
        layer: Layer whose features the heads receive. For heads that receive several layers, this
            is the last one.
        facet: Facet (kind of feature) that the heads receive.
        hyperparameter: Name of the setting that differs between the heads, such as "learning_rate".
        values: Value of the hyperparameter for each head.
        num_classes: Number of classes. A rank with this value means that the logits are not finite,
            because the head has diverged.
        ranks: Rank that each head gives to the true class of each scored image, counted from 0.
        labels: True class of each scored image.
        held_out_ranks: Rank that each head gives to the true class of each held-out image. None if
            there are no held-out images.
        constant_share: Fraction of the channels that do not vary over the training images.
        missing_classes: Number of classes without a training image.
        details: Further details to store with the scores.
    """
    top1 = (100 * (ranks == 0).double().mean(1)).tolist()
    held_out_top1 = None
    selected = {"oracle": top1.index(max(top1))}
    if held_out_ranks is not None:
        held_out_top1 = (100 * (held_out_ranks == 0).double().mean(1)).tolist()
        selected = {"holdout": held_out_top1.index(max(held_out_top1)), **selected}
    details = {
        f"{hyperparameter}s": list(values),
        "top1_by_rate": top1,
        "top1_by_rate_held_out": held_out_top1,
        "num_classes": num_classes,
        "constant_features": constant_share == 1,
        "constant_channels_percent": round(100 * constant_share, 1),
        **details,
    }
    name, warnings = hyperparameter.replace("_", " "), list[str]()
    has_diverged = (ranks == num_classes).any(1).tolist()
    if any(has_diverged):
        diverged = (f"{value:g}" for value in itertools.compress(values, has_diverged))
        warnings.append(f"heads diverged: {name} {', '.join(diverged)}")
    if missing_classes:
        warnings.append(f"{missing_classes} of {num_classes} classes have no training image")
    if constant_share == 1:
        warnings.append("degenerate: all training images have the same features")
    for selection, best in selected.items():
        edge = f"the chosen {name} {values[best]:g} is at the edge of its grid"
        is_at_edge = len(values) > 1 and best in (0, len(values) - 1)
        own_details = {
            hyperparameter: values[best],
            "warnings": [edge, *warnings] if is_at_edge else warnings,
        }
        for top in TOP_K:
            yield top_k_score(
                layer,
                facet,
                f"top{top}_{selection}",
                ranks[best] < top,
                labels,
                top=top,
                num_classes=num_classes,
                details={**details, **own_details},
            )
