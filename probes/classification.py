"""Linear classification: which classes can a linear head tell apart in each block?

In this order: how heads are fitted, the probe with linear heads and with attentive ones, what they
are fitted to, and how places of the true class become accuracies.
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
from probes.features.split import (
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
from probes.features.stream import batches, extract_float16, read_ahead, undo_scaling
from probes.features.tiers import StoredFeatures, TrainingPass
from probes.features.views import CentralSquare
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
from ssl_bench.metrics import LabelledFeatures, class_rank
from ssl_bench.system.device import to_device
from ssl_bench.system.paths import cache_folder

ATTENTIVE_FACET = "patch_attentive"
"""As records have it: the patches after the final norm, pooled where a head learned to look."""

_PATCHES = "token_normed"
_MOST_CHOOSING = 4
# Logits that are in memory at once: a quarter of a gibibyte.
_LOGITS = 2**26
_ATTENTIVE_GUESSES = (
    "central squares of the training images instead of a new random crop and flip in every epoch",
    "batches of $batch_size instead of 4,096, with rates by the same rule",
    "$epochs epochs instead of 90, for all of them see the same squares",
    "scored after the last epoch instead of at the best one on the scored images",
)


@dataclass(frozen=True)
class ImageRegression(LogisticRegression):
    """Logistic regressions of images, as far fitted as scikit-learn's are."""

    c_values: Sequence[Positive] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    batch_size: Count = 1024

    # That of scikit-learn's LogisticRegression.
    gradient_tolerance = 1e-4


@dataclass(frozen=True)
class Momentum(StepTraining):
    """Steps of SGD with momentum .9 and rates that fall to zero with a cosine."""

    learning_rates: Sequence[Rate] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
    epochs: Count = 100
    batch_size: Count = 1024

    def settings(self) -> dict[str, Any]:
        return {"optimizer": "sgd", **super().settings()}

    def optimizer_and_schedule(self) -> tuple[HeadOptimizer, Schedule]:
        return SGD(weight_decay=0.0), Schedule("cosine", warmup=0.0)


@dataclass(frozen=True)
class FixedPooling:
    """What `probe.facet` says, the same for all heads; `probe.training` fits these."""


@dataclass(frozen=True)
class LinearClassification(Probe):
    """Linear heads on every block, with every penalty or learning rate, from one pass over images.

    Attributes:
        protocol: The preset these values come from; records carry it.
        facet: What stands for an image, one or several of "cls", "patch_mean", its mean patch, and
            "cls_patch_mean", both concatenated, all after the encoder's final norm, and of
            attn_out, attn_skip, mlp_hidden, mlp_out and submodules of a block, of which the mean
            patch is taken as it is.
        pool: What makes a vector of an image: "fixed", what `facet` says, or "attentive", patches
            after the final norm as each head learns to look at them; a file of
            configs/probe/classification/pool.
        layers_mode: "single": one head a block. "last4": one head on the last four blocks up to the
            last asked one, concatenated.
        training: How heads are fitted, a file of configs/probe/classification/training.
        standardise: Each channel over the training images.
        holdout: Share of the training images that choose C or the rate; once they have chosen, all
            training images are fitted. With 0 only the oracle is scored.
        train_images: At most so many, drawn with the seed.
        shots: Images of each class that heads are fitted to, one or several numbers n. Unless
            `holdout` is 0, min(n, 4) further ones of each class choose.
        draws: How often these are drawn; the scores are means over the draws.
        image_size: Side in pixels; without it the encoder's own.
        crop_share: Side of the central square that is looked at, relative to the shorter side.
        memory_gib: For the features; layers that do not fit wait for another pass.
        guesses: What the protocol's authors left open, and where this preset differs from theirs.
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
    keeps_images = True
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
        usual = LinearClassification.facet, LinearClassification.layers_mode
        is_attentive = isinstance(self.pool, AttentivePooling)
        if is_attentive and (self.facet, self.layers_mode) != usual:
            raise ConfigurationError(
                "probe.pool=attentive looks at the patches of one block after the final norm, got "
                f"the facet {format_value(self.facet)} and the blocks {self.layers_mode}; leave "
                "probe.facet and probe.layers_mode out"
            )

    @property
    def facet_spec(self) -> FacetSpec | None:
        if isinstance(self.pool, AttentivePooling):
            return FacetSpec((ATTENTIVE_FACET,), None)
        return super().facet_spec

    def settings(self) -> dict[str, Any]:
        # Said by the metric, or without a meaning, where images of each class are drawn; where not.
        unsaid = {"shots", *(("draws",) if self.shots is None else ("holdout", "train_images"))}
        fitting = self.training.settings()
        if isinstance(self.pool, AttentivePooling):
            # Its heads normalise, and see patches of a block alone.
            fitting, unsaid = self.pool.settings(), unsaid | {"layers_mode", "standardise"}
        said = super().settings()
        return {name: value for name, value in said.items() if name not in unsaid} | fitting

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        names = metrics(holdout=self.holdout > 0)
        if self.shots is not None:
            names = [
                shot_metric_name(name, count) for count in shot_counts(self.shots) for name in names
            ]
        last = [source[-1] for source in group_layers(layers, self.layers_mode)]
        return list(itertools.product(last, self.facets, names))

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all heads of all layers.

        Top-5 accuracy is NaN where there are fewer than five classes.

        Raises:
            ConfigurationError: the encoder has no [CLS] token, or channels that the queries do not
                divide.
            DataError: the training images, or those of a class, are too few, or of one class.
        """
        if isinstance(self.pool, AttentivePooling):
            yield from self._attentive_scores(self.pool, context)
        else:
            yield from self._linear_scores(context)

    # Linear heads: vectors of images are in memory, of as many layers as fit there.

    def _linear_scores(self, context: ProbeContext) -> Iterator[Score]:
        train_images = self.training_images(context.dataset)
        val_images = self.split(context.dataset)
        portions = self._portions(train_images, context.seed)
        image_pass = ImagePass(self, context, self.encoder_batch_size)
        heads = HeadSpec(
            loss=LabelLoss(),
            standardize=self.standardise,
            classes=len(val_images.class_names),
            seed=context.seed,
            device=context.device,
        )
        every = group_layers(context.layers, self.layers_mode)
        num_images = len(portions.indices) + len(val_images)
        at_once = image_pass.layers_per_pass(num_images, self.memory_gib)
        for sources in batches(every, max(1, at_once // len(every[0]))):
            layers = sorted({layer for source in sources for layer in source})
            train = image_pass.run(train_images, portions.indices, layers)
            portions.require_two_classes(train.labels)
            val = image_pass.run(val_images, range(len(val_images)), layers)
            for facet in self.facets:
                asked = (context, heads, portions, facet, sources, train, val)
                yield from portions.scores(partial(self._linear_heads, *asked))

    def _linear_heads(
        self,
        context: ProbeContext,
        asked: HeadSpec,
        portions: "Portions",
        facet: str,
        sources: Sequence[LayerGroup],
        train: ImageFeatures,
        val: ImageFeatures,
        portion: "Portion",
    ) -> Iterator[list[Score]]:
        """The scores of each source by heads that are fitted to a portion."""
        cached = StoredFeatures(
            train.layers, train.by_facet[facet][:, :, None, None], train.labels[:, None, None]
        )

        def fitted(entries: Int64[Tensor, " chosen"]) -> TrainedHeads:
            return self.training.train(asked, cached, sources, entries, context.progress)

        choosing = None
        if portion.choosing is not None and portion.before is not portion.fitted:
            choosing = fitted(portion.before)
        heads = fitted(portion.fitted)
        details = {
            **portions.details(portion, portion.fitted, heads.seconds),
            "guesses": fill_in_guesses(self, self.guesses),
        }
        for index, source in enumerate(sources):
            features, held_out = val.concatenate(source, facet), None
            if (rows := portion.choosing) is not None:
                all_ = train.concatenate(source, facet)
                some = LabelledFeatures(all_.features[rows], all_.labels[rows])
                held_out = _linear_ranks(choosing or heads, index, some, context.device)
            yield list(
                choice_scores(
                    (source[-1], facet),
                    hyperparameter=self.training.hyperparameter,
                    values=self.training.values,
                    num_classes=asked.classes,
                    ranks=_linear_ranks(heads, index, features, context.device),
                    labels=features.labels,
                    held_out=held_out,
                    constant=heads.constant_channels[index] / features.features.shape[1],
                    missing=asked.classes - len(train.labels[portion.fitted].unique()),
                    shared={**details, **heads.convergence(index), "layers": list(source)},
                )
            )

    # Attentive heads: patches of all layers, in memory or on disk.

    def _attentive_scores(self, pool: AttentivePooling, context: ProbeContext) -> Iterator[Score]:
        train_images = self.training_images(context.dataset)
        val_images = self.split(context.dataset)
        classes, encoder = len(val_images.class_names), context.encoder
        pool.require_divisible(encoder.dim)
        portions = self._portions(train_images, context.seed)
        training_pass = TrainingPass(
            context=context,
            extractor=context.extractor(sorted(context.layers), _PATCHES),
            images=train_images,
            indices=portions.indices,
            image_size=self.resize.square_side(encoder.native_size),
            views=CentralSquare(self.crop_share),
            label_size=1,
            batch_size=self.encoder_batch_size,
            workers=self.num_workers,
        )
        labels = torch.tensor(require_labels(train_images))[list(portions.indices)]
        portions.require_two_classes(labels)
        folder = cache_folder(None) / "features"
        features = training_pass.run(folder, memory_gib=self.memory_gib)

        def of_portion(portion: Portion) -> Iterator[list[Score]]:
            heads = pool.train(
                features,
                labels,
                portion.before,
                classes=classes,
                seed=context.seed,
                device=context.device,
                progress=context.progress,
            )
            held_out = None
            if portion.choosing is not None:
                parts = portion.choosing.split(pool.batch_size)
                read = features.reader(heads.layers, context.device)(parts)
                blocks = (batch.features for batch in read)
                seen = context.progress(blocks, "held-out images", len(parts))
                held_out = _attentive_ranks(heads, seen, labels[portion.choosing])
            seen = self._scored_patches(training_pass, val_images)
            scored_labels = torch.tensor(require_labels(val_images))
            ranks = _attentive_ranks(heads, seen, scored_labels)
            details = {
                **portions.details(portion, portion.before, heads.seconds),
                "feature_tier": features.tier,
                "encoder_passes": features.passes,
                "guesses": fill_in_guesses(self, [*self.guesses, *_ATTENTIVE_GUESSES]),
            }
            for index, layer in enumerate(heads.layers):
                yield list(
                    choice_scores(
                        (layer, ATTENTIVE_FACET),
                        hyperparameter="learning_rate",
                        values=pool.learning_rates,
                        num_classes=classes,
                        ranks=ranks[index],
                        labels=scored_labels,
                        held_out=None if held_out is None else held_out[index],
                        constant=heads.constant_channels[index] / encoder.dim,
                        missing=classes - len(labels[portion.before].unique()),
                        shared={**details, "layers": [layer]},
                    )
                )

        yield from portions.scores(of_portion)

    def _scored_patches(
        self, training_pass: TrainingPass, images: ImageSet
    ) -> Iterator[Float[Tensor, "layers images rows cols dim"]]:
        """Of the scored images, which pass the encoder once."""
        extractor, size, left = training_pass.extractor, training_pass.image_size, iter(images.ids)

        def prepared(sample: Sample) -> UInt8[Tensor, "3 size size"]:
            return central_square(sample.image, size, share=self.crop_share)

        squares = read_ahead(images, range(len(images)), prepared, workers=self.num_workers)
        shown = training_pass.context.progress(squares, f"{images.split} images", len(images))
        for batch in batches(shown, self.encoder_batch_size):
            ids = list(itertools.islice(left, len(batch)))
            pixels = to_device(torch.stack(batch), extractor.device).float() / 255
            halves, scales = extract_float16(extractor, pixels, ids)
            yield undo_scaling(torch.stack(halves), scales)

    def _portions(self, images: ImageSet, seed: int) -> "Portions":
        """What heads are fitted to.

        Raises:
            DataError: the training images, or those of a class, are too few.
        """
        counts = shot_counts(self.shots)
        if not counts:
            split = TrainingSplit.draw(
                images, max_images=self.train_images, holdout=self.holdout, seed=seed
            )
            held_out = torch.tensor(sorted(split.held_out)) if split.held_out else None
            portion = Portion(split.all_entries(1), split.training_entries(1), held_out)
            return Portions(images, split.indices, {0: [portion]})
        # By shots, the images of each class that choose between heads fitted to others.
        choosing = {n: min(n, _MOST_CHOOSING) if self.holdout else 0 for n in counts}
        most = max(count + more for count, more in choosing.items())
        shots = Shots.draw(images, per_class=most, draws=self.draws, seed=seed)
        by_shots: dict[int, list[Portion]] = {count: [] for count in counts}
        for count, draw in itertools.product(counts, range(self.draws)):
            fitted, more = shots.select(draw, count), choosing[count]
            further = shots.select(draw, more, skip=count) if more else None
            by_shots[count].append(Portion(fitted, fitted, further))
        return Portions(images, shots.indices, by_shots)


@dataclass(frozen=True)
class Portion:
    """Positions among the images whose features are there.

    Attributes:
        fitted: What the heads that are scored are fitted to.
        before: What those are fitted to that choose; the same where these are scored themselves.
        choosing: What they are asked about; None where nothing chooses.
    """

    fitted: Int64[Tensor, " fitted"]
    before: Int64[Tensor, " before"]
    choosing: Int64[Tensor, " choosing"] | None


@dataclass(frozen=True)
class Portions:
    """All training images that some head needs, and how they are divided.

    Attributes:
        indices: Of the images, ascending.
        by_shots: The portion of each draw, by the images of a class that it has; by 0 the only one
            where none are drawn.
    """

    images: ImageSet
    indices: tuple[int, ...]
    by_shots: Mapping[int, Sequence[Portion]]

    def scores(self, of_portion: Callable[[Portion], Iterator[list[Score]]]) -> Iterator[Score]:
        """The scores of every source; their means over the draws where images are drawn."""
        for count, portions in self.by_shots.items():
            if not count:
                yield from itertools.chain.from_iterable(of_portion(portions[0]))
                continue
            # Heads of one draw at a time; their scores are little.
            by_draw = [list(of_portion(portion)) for portion in portions]
            for draws in zip(*by_draw, strict=True):
                yield from average_over_draws(draws, count)

    def details(
        self, portion: Portion, fitted: Int64[Tensor, " fitted"], seconds: float
    ) -> dict[str, Any]:
        """What records say of the images that heads are fitted to, and how long that took."""
        ids = [self.images.ids[self.indices[n]] for n in fitted.tolist()]
        return {
            "num_train_images": len(fitted),
            "num_held_out_images": 0 if portion.choosing is None else len(portion.choosing),
            "train_ids_sha256": ids_sha256(ids),
            "train_seconds": round(seconds, 3),
        }

    def require_two_classes(self, labels: Int64[Tensor, " images"]) -> None:
        """Refuse images to fit to that are of one class; `labels` are of all `indices`.

        Raises:
            DataError: they are.
        """
        for portion in itertools.chain(*self.by_shots.values()):
            found, images = labels[portion.before].unique().tolist(), self.images
            if len(found) < 2:
                raise DataError(
                    f"the {len(portion.before)} training images of {images.name} {images.split} "
                    f"that heads are fitted to are all of the class "
                    f"{images.class_names[found[0]]}, expected at least two classes; take more "
                    "with probe.train_images"
                )


def _linear_ranks(
    heads: TrainedHeads, index: int, images: LabelledFeatures, device: torch.device
) -> Int64[Tensor, "values images"]:
    at_once, found = max(1, _LOGITS // heads.bias[index].numel()), []
    rows = zip(images.features.split(at_once), images.labels.split(at_once), strict=True)
    for features, labels in rows:
        logits = heads.logits(index, features.to(device)[:, None])[:, :, 0]
        found.append(class_rank(logits, labels.to(device)).cpu())
    return torch.cat(found, 1)


def _attentive_ranks(
    heads: TrainedAttentiveHeads,
    batches: Iterable[Float[Tensor, "layers some rows cols dim"]],
    labels: Int64[Tensor, " images"],
) -> Int64[Tensor, "layers values images"]:
    found, first = [], 0
    for blocks in batches:
        true = labels[first : first + blocks.shape[1]].to(blocks.device)
        first += blocks.shape[1]
        by_layer = [
            class_rank(heads.heads.logits(index, tokens.flatten(1, 2).float()), true)
            for index, tokens in enumerate(blocks)
        ]
        found.append(torch.stack(by_layer).cpu())
    return torch.cat(found, 2)


def metrics(*, holdout: bool) -> list[str]:
    """Names of what is scored, in the order in which `choice_scores` does it."""
    choices = ["holdout", "oracle"] if holdout else ["oracle"]
    return [f"top{top}_{choice}" for choice in choices for top in TOP_K]


def choice_scores(
    cell: tuple[int, str],
    *,
    hyperparameter: str,
    values: Sequence[float],
    num_classes: int,
    ranks: Int64[Tensor, "values images"],
    labels: Int64[Tensor, " images"],
    held_out: Int64[Tensor, "values held_out_images"] | None,
    constant: float,
    missing: int,
    shared: Mapping[str, Any],
) -> Iterator[Score]:
    """Top-1 and top-5 of one source at the value chosen without and with a look at scored images.

    Always the best by top-1, of equally good ones the first.

    Args:
        cell: Layer and facet.
        hyperparameter: What the values are of: the learning rate, or another one that is chosen.
        values: One for each head.
        num_classes: How many there are.
        ranks: Over the scored images.
        labels: Of the scored images.
        held_out: Over the images held out of training; None where all were used.
        constant: Share of the channels, from 0 to 1, that are the same for all training images.
        missing: How many classes no training image has.
        shared: Details that are the same for all sources.
    """
    by_rate = (100 * (ranks == 0).double().mean(1)).tolist()
    chosen = None if held_out is None else (100 * (held_out == 0).double().mean(1)).tolist()
    details: dict[str, Any] = {
        f"{hyperparameter}s": list(values),
        "top1_by_rate": by_rate,
        "top1_by_rate_held_out": chosen,
        "num_classes": num_classes,
        "constant_features": constant == 1,
        "constant_channels_percent": round(100 * constant, 1),
        **shared,
    }
    name, wary = hyperparameter.replace("_", " "), list[str]()
    diverged = (ranks == num_classes).any(1).tolist()
    if any(diverged):
        names = (f"{value:g}" for value, gone in zip(values, diverged, strict=True) if gone)
        wary.append(f"heads diverged: {name} {', '.join(names)}")
    if missing:
        wary.append(f"{missing} of {num_classes} classes have no training image")
    if constant == 1:
        wary.append("degenerate: all training images have the same features")
    choices = [] if chosen is None else [("holdout", chosen.index(max(chosen)))]
    for choice, best in (*choices, ("oracle", by_rate.index(max(by_rate)))):
        warnings = list(wary)
        if len(values) > 1 and best in (0, len(values) - 1):
            edge = f"the chosen {name} {values[best]:g} is at the edge of its grid"
            warnings.insert(0, edge)
        for top in TOP_K:
            yield top_k_score(
                cell,
                f"top{top}_{choice}",
                ranks[best] < top,
                labels,
                top=top,
                num_classes=num_classes,
                details={**details, hyperparameter: values[best], "warnings": warnings},
            )
