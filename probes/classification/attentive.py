"""Attentive classification of one encoder on one dataset: patches, heads that pool them, scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.classification.pooling import ATTENTIVE_FACET, AttentivePooling
from probes.classification.portions import Portion, Portions
from probes.classification.probe import LinearClassification
from probes.classification.report import ClassificationReport, scores_of
from probes.features.labels import class_labels
from probes.features.stream import batches, read_ahead
from probes.features.tiers import HalfFeatures, Room, TrainingFeatures, TrainingPass
from probes.features.views import CentralSquare
from probes.heads.attentive import AttentiveTraining, TrainedAttentiveHeads
from ssl_bench.composition.presets import guesses_of
from ssl_bench.data.central_square import central_square
from ssl_bench.data.locations import cache_folder
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.metrics import class_rank
from ssl_bench.system.transfers import sent

_PATCHES = "token_normed"
_GUESSES = (
    "central squares of the training images instead of a new random crop and flip in every epoch",
    "batches of $batch_size instead of 4,096, with rates by the same rule",
    "$epochs epochs instead of 90, for all of them see the same squares",
    "scored after the last epoch instead of at the best one on the scored images",
)
Ranked = Int64[Tensor, "layers values ranked"]


@dataclass(frozen=True)
class AttentiveRun:
    """All parts of a run."""

    probe: LinearClassification
    context: ProbeContext
    training: AttentiveTraining
    training_pass: TrainingPass
    portions: Portions
    val_images: ImageSet

    @classmethod
    def prepared(
        cls, probe: LinearClassification, pool: AttentivePooling, context: ProbeContext
    ) -> "AttentiveRun":
        """What `probe` describes; nothing is computed.

        Raises:
            ConfigurationError: the queries do not divide the channels.
        """
        _require_slices(pool.queries, context.encoder.dim)
        images, val_images = probe.training_images(context.dataset), probe.split(context.dataset)
        portions = Portions.of(probe, images, seed=context.seed)
        classes = len(val_images.class_names)
        return cls(
            probe=probe,
            context=context,
            training=pool.training(classes=classes, seed=context.seed, device=context.device),
            training_pass=_training_pass(probe, context, portions),
            portions=portions,
            val_images=val_images,
        )

    def scores(self) -> Iterator[Score]:
        """Fit all heads to patches that passed the encoder once, and score them.

        Raises:
            DataError: the training images are of one class.
        """
        labels = torch.tensor(class_labels(self.portions.images))[list(self.portions.indices)]
        self.portions.require_two_classes(labels)
        folder = cache_folder(None) / "features"
        room = Room("auto", self.probe.memory_gib, None, folder)
        features = self.training_pass.run(room)
        yield from scores_of(
            self.portions.by_shots, lambda portion: self._reports(features, labels, portion)
        )

    def _reports(
        self, features: TrainingFeatures, labels: Int64[Tensor, " images"], portion: Portion
    ) -> Iterator[ClassificationReport]:
        heads = self.training.train(
            features, labels, features.layers, portion.before, self.context.progress
        )
        held_out = self._held_out(heads, features, labels, portion)
        ranks = self._ranks(heads)
        for index, layer in enumerate(heads.layers):
            width = self.context.encoder.dim
            yield ClassificationReport(
                layer=layer,
                facet=ATTENTIVE_FACET,
                hyperparameter=self.training.hyperparameter,
                values=self.training.values,
                num_classes=self.training.classes,
                ranks=ranks[index],
                labels=torch.tensor(class_labels(self.val_images)),
                held_out=None if held_out is None else held_out[index],
                constant=heads.constant_channels[index] / width,
                missing=self.training.classes - len(labels[portion.before].unique()),
                shared={**self._details(heads, features, portion), "layers": [layer]},
            )

    def _held_out(
        self,
        heads: TrainedAttentiveHeads,
        features: TrainingFeatures,
        labels: Int64[Tensor, " images"],
        portion: Portion,
    ) -> Ranked | None:
        if portion.choosing is None:
            return None
        chosen = portion.choosing.split(self.training.batch_size)
        read = features.of_layers(heads.layers, self.training.device)
        shown = self.context.progress(read(chosen), "held-out images", len(chosen))
        pairs = zip(shown, chosen, strict=True)
        return torch.cat([_ranked(heads, b.features, labels[some]) for b, some in pairs], 2)

    def _ranks(self, heads: TrainedAttentiveHeads) -> Ranked:
        """Of the scored images, which pass the encoder once."""
        images = self.val_images
        encoder = HalfFeatures(self.training_pass.extractor, _PATCHES)
        found = torch.empty(
            len(heads.layers), len(self.training.values), len(images), dtype=torch.int64
        )
        every = range(len(images))
        prepared = read_ahead(images, every, self._prepared, workers=self.probe.num_workers)
        shown = self.context.progress(prepared, f"{images.split} images", len(images))
        labels, first = torch.tensor(class_labels(images)), 0
        for batch in batches(shown, self.probe.encoder_batch_size):
            rows = slice(first, first + len(batch))
            pixels = sent(torch.stack(batch), self.context.device).float() / 255
            blocks = torch.stack(encoder.left(pixels, images.ids[rows]))
            found[:, :, rows] = _ranked(heads, blocks, labels[rows])
            first = rows.stop
        return found

    def _prepared(self, sample: Sample) -> UInt8[Tensor, "3 size size"]:
        size, share = self.training_pass.image_size, self.probe.crop_share
        return central_square(sample.image, size, share=share)

    def _details(
        self, heads: TrainedAttentiveHeads, features: TrainingFeatures, portion: Portion
    ) -> dict[str, Any]:
        return {
            "num_train_images": len(portion.before),
            "num_held_out_images": 0 if portion.choosing is None else len(portion.choosing),
            "train_ids_sha256": self.portions.ids_sha256(portion.before),
            "train_seconds": round(heads.seconds, 3),
            "feature_tier": features.tier,
            "encoder_passes": features.passes,
            "guesses": guesses_of(self.probe, [*self.probe.guesses, *_GUESSES]),
        }


def _ranked(
    heads: TrainedAttentiveHeads,
    blocks: Float[Tensor, "layers images rows cols dim"],
    labels: Int64[Tensor, " images"],
) -> Ranked:
    """How many classes the heads put before the true one; layers are those of the heads."""
    device = blocks.device
    found = [
        class_rank(heads.heads.logits(index, tokens.flatten(1, 2).float()), labels.to(device))
        for index, tokens in enumerate(blocks)
    ]
    return torch.stack(found).cpu()


def _training_pass(
    probe: LinearClassification, context: ProbeContext, portions: Portions
) -> TrainingPass:
    layers, encoder = tuple(sorted(context.layers)), context.encoder
    return TrainingPass(
        extractor=FeatureExtractor(
            encoder, layers=layers, facets=(_PATCHES,), device=context.device, dtype=context.dtype
        ),
        facet=_PATCHES,
        images=portions.images,
        indices=portions.indices,
        image_size=probe.image_size or min(encoder.native_size),
        views=CentralSquare(probe.crop_share),
        label_size=1,
        batch_size=probe.encoder_batch_size,
        workers=probe.num_workers,
        progress=context.progress,
        say=context.say,
    )


def _require_slices(queries: int, dim: int) -> None:
    if dim % queries:
        fitting = [count for count in range(1, dim + 1) if dim % count == 0]
        nearest = min(fitting, key=lambda count: abs(count - queries))
        raise ConfigurationError(
            f"probe.pool.queries must divide the {dim} channels of this encoder, got {queries}; "
            f"add probe.pool.queries={nearest}"
        )
