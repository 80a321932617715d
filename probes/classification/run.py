"""Linear classification of one encoder on one dataset: features, heads, scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from probes.classification.portions import Portion, Portions
from probes.classification.probe import LinearClassification
from probes.classification.report import ClassificationReport, scores_of
from probes.features.image import ImageFeatures, ImagePass
from probes.features.sources import LayerGroup
from probes.features.stream import batches
from probes.features.tiers import FeaturesInMemory
from probes.heads.losses import LabelLoss
from probes.heads.sgd import Heads, TrainedHeads, Training
from ssl_bench.composition.presets import guesses_of
from ssl_bench.data.samples import ImageSet
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.metrics import LabelledFeatures, class_rank

# Logits that are in memory at once: a quarter of a gibibyte.
_LOGITS = 2**26


def prepared(probe: LinearClassification, context: ProbeContext) -> "ClassificationRun":
    """What `probe` describes, on the encoder and the dataset of `context`; nothing is computed."""
    train_images = probe.training_images(context.dataset)
    val_images = probe.split(context.dataset)
    return ClassificationRun(
        image_pass=ImagePass(
            context=context,
            facets=probe.facets,
            image_size=probe.image_size,
            crop_share=probe.crop_share,
            batch_size=probe.encoder_batch_size,
            workers=probe.num_workers,
        ),
        training=probe.training.of_heads(_heads(probe, context, len(val_images.class_names))),
        portions=Portions.of(probe, train_images, seed=context.seed),
        val_images=val_images,
        sources=probe.sources(context.layers),
        memory_gib=probe.memory_gib,
        guesses=guesses_of(probe, probe.guesses),
    )


def _heads(probe: LinearClassification, context: ProbeContext, classes: int) -> Heads:
    return Heads(
        loss=LabelLoss(),
        standardize=probe.standardise,
        classes=classes,
        seed=context.seed,
        device=context.device,
    )


@dataclass(frozen=True)
class ClassificationRun:
    """All parts of a run, put together by the probe.

    Attributes:
        memory_gib: For the features; layers that do not fit wait for another pass.
        guesses: Where the protocol's authors do it otherwise.
    """

    image_pass: ImagePass
    training: Training
    portions: Portions
    val_images: ImageSet
    sources: Sequence[LayerGroup]
    memory_gib: float
    guesses: Sequence[str]

    def scores(self) -> Iterator[Score]:
        """Score all heads of all sources; a pass over the images serves as many as fit.

        Raises:
            DataError: the training images are of one class.
        """
        portions = self.portions
        num_images = len(portions.indices) + len(self.val_images)
        at_once = self.image_pass.layers_at_once(num_images, self.memory_gib)
        for sources in batches(self.sources, max(1, at_once // len(self.sources[0]))):
            layers = sorted({layer for source in sources for layer in source})
            train = self.image_pass.run(portions.images, portions.indices, layers)
            portions.require_two_classes(train.labels)
            val = self.image_pass.run(self.val_images, range(len(self.val_images)), layers)
            for facet in self.image_pass.facets:
                asked = (facet, sources, train, val)
                yield from scores_of(portions.by_shots, partial(self._reports, *asked))

    def _reports(
        self,
        facet: str,
        sources: Sequence[LayerGroup],
        train: ImageFeatures,
        val: ImageFeatures,
        portion: Portion,
    ) -> Iterator[ClassificationReport]:
        cached = FeaturesInMemory(
            train.layers, train.by_facet[facet][:, :, None, None], train.labels[:, None, None]
        )
        before = self._fit(cached, sources, portion.before) if portion.fits_twice else None
        held_out = before and self._held_out_ranks(before, facet, train, portion)
        heads = self._fit(cached, sources, portion.fitted)
        if not portion.fits_twice:
            held_out = self._held_out_ranks(heads, facet, train, portion)
        classes = self.training.classes
        for index, source in enumerate(sources):
            features = val.joined(source, facet)
            yield ClassificationReport(
                layer=source[-1],
                facet=facet,
                hyperparameter=self.training.hyperparameter,
                values=self.training.values,
                num_classes=classes,
                ranks=self._ranks(heads, index, features),
                labels=features.labels,
                held_out=None if held_out is None else held_out[index],
                constant=heads.constant_channels[index] / features.features.shape[1],
                missing=classes - len(train.labels[portion.fitted].unique()),
                shared={**self._details(heads, portion), "layers": list(source)},
            )

    def _held_out_ranks(
        self, heads: TrainedHeads, facet: str, train: ImageFeatures, portion: Portion
    ) -> list[Int64[Tensor, "values held_out_images"]] | None:
        """By source; None where nothing chooses."""
        if portion.choosing is None:
            return None
        rows = portion.choosing
        vectors = [train.joined(source, facet) for source in heads.sources]
        some = [LabelledFeatures(all_.features[rows], all_.labels[rows]) for all_ in vectors]
        return [self._ranks(heads, index, features) for index, features in enumerate(some)]

    def _fit(
        self,
        cached: FeaturesInMemory,
        sources: Sequence[LayerGroup],
        entries: Int64[Tensor, " chosen"],
    ) -> TrainedHeads:
        return self.training.train(cached, sources, entries, self.image_pass.context.progress)

    def _ranks(
        self, heads: TrainedHeads, index: int, images: LabelledFeatures
    ) -> Int64[Tensor, "values images"]:
        """How many classes the heads of one source put before the true one."""
        device, found = self.training.device, []
        at_once = max(1, _LOGITS // heads.bias[index].numel())
        rows = zip(images.features.split(at_once), images.labels.split(at_once), strict=True)
        for features, labels in rows:
            logits = heads.logits(index, features.to(device)[:, None])[:, :, 0]
            found.append(class_rank(logits, labels.to(device)).cpu())
        return torch.cat(found, 1)

    def _details(self, heads: TrainedHeads, portion: Portion) -> dict[str, Any]:
        """What records say of the training, the same for all sources."""
        return {
            "num_train_images": len(portion.fitted),
            "num_held_out_images": 0 if portion.choosing is None else len(portion.choosing),
            "train_ids_sha256": self.portions.ids_sha256(portion.fitted),
            "train_seconds": round(heads.seconds, 3),
            "unconverged_heads": heads.unfinished,
            "stalled_heads": heads.stalled,
            "guesses": list(self.guesses),
        }
