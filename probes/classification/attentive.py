"""What stands for an image, `probe.pool=fixed` or `attentive`: heads that learn where to look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.features.labels import class_labels
from probes.features.stream import batches, read_ahead
from probes.features.tiers import HalfFeatures, TrainingFeatures, TrainingPass
from probes.heads.attentive import AttentiveTraining, TrainedAttentiveHeads
from probes.heads.optimizers import LARS, Schedule
from probes.heads.sgd import floats
from ssl_bench.composition.fields import Count, Rate, check_fields, require_some
from ssl_bench.data.central_square import central_square
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext
from ssl_bench.metrics import class_rank
from ssl_bench.system.transfers import sent

ATTENTIVE_FACET = "patch_attentive"
"""As records have it: the patches after the final norm, pooled where a head learned to look."""

Ranked = Int64[Tensor, "layers values ranked"]
"""How many classes the heads put before the true one."""


@dataclass(frozen=True)
class FixedPooling:
    """What `probe.facet` says, the same for all heads; `probe.training` fits these."""

    def settings(self) -> dict[str, Any]:
        """Nothing that the facet and the training do not say."""
        return {}


@dataclass(frozen=True)
class AttentivePooling:
    """Every head pools the patches by queries that it learns, with steps of LARS.

    Attributes:
        queries: Each gives its slice of the channels, so they divide the width of the encoder.
        learning_rates: All are trained; which one counts is chosen afterwards.
        batch_size: Images of a step, over which pooled channels are normalised.

    Source: Efficient probing, https://github.com/billpsomas/efficient-probing (b8f4fb84), whose
    rates are .1 to 1.5 at this batch size, for 90 epochs of new crops.
    """

    queries: Count = 32
    learning_rates: Sequence[Rate] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    epochs: Count = 20
    batch_size: Count = 256

    def __post_init__(self) -> None:
        check_fields(self, "probe.pool")
        require_some("probe.pool.learning_rates", self.learning_rates)

    def settings(self) -> dict[str, Any]:
        return {
            "pool": "attentive",
            "queries": self.queries,
            "optimizer": "lars",
            "learning_rates": floats(self.learning_rates),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
        }

    def training(self, context: ProbeContext, classes: int) -> AttentiveTraining:
        """How the heads of all blocks are trained.

        Raises:
            ConfigurationError: the queries do not divide the channels.
        """
        dim = context.encoder.dim
        if dim % self.queries:
            fitting = [count for count in range(1, dim + 1) if dim % count == 0]
            nearest = min(fitting, key=lambda count: abs(count - self.queries))
            raise ConfigurationError(
                f"probe.pool.queries must divide the {dim} channels of this encoder, got "
                f"{self.queries}; add probe.pool.queries={nearest}"
            )
        return AttentiveTraining(
            values=tuple(floats(self.learning_rates)),
            queries=self.queries,
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=LARS(),
            # As theirs: ten epochs of ninety.
            schedule=Schedule("cosine", warmup=1 / 9),
            classes=classes,
            seed=context.seed,
            device=context.device,
        )


def held_out_ranks(
    heads: TrainedAttentiveHeads,
    features: TrainingFeatures,
    labels: Int64[Tensor, " images"],
    chosen: Int64[Tensor, " ranked"],
    *,
    training: AttentiveTraining,
    context: ProbeContext,
) -> Ranked:
    """Of training images that no head is fitted to."""
    parts = chosen.split(training.batch_size)
    read = features.of_layers(heads.layers, training.device)
    shown = context.progress(read(parts), "held-out images", len(parts))
    pairs = zip(shown, parts, strict=True)
    return torch.cat([_ranked(heads, b.features, labels[some]) for b, some in pairs], 2)


def scored_ranks(
    heads: TrainedAttentiveHeads, training_pass: TrainingPass, images: ImageSet, crop_share: float
) -> Ranked:
    """Of the scored images, which pass the encoder once."""
    extractor, size = training_pass.extractor, training_pass.image_size
    encoder = HalfFeatures(extractor, training_pass.facet)

    def prepared(sample: Sample) -> UInt8[Tensor, "3 size size"]:
        return central_square(sample.image, size, share=crop_share)

    squares = read_ahead(images, range(len(images)), prepared, workers=training_pass.workers)
    shown = training_pass.progress(squares, f"{images.split} images", len(images))
    labels, found, first = torch.tensor(class_labels(images)), [], 0
    for batch in batches(shown, training_pass.batch_size):
        rows = slice(first, first + len(batch))
        pixels = sent(torch.stack(batch), extractor.device).float() / 255
        blocks = torch.stack(encoder.left(pixels, images.ids[rows]))
        found.append(_ranked(heads, blocks, labels[rows]))
        first = rows.stop
    return torch.cat(found, 2)


def _ranked(
    heads: TrainedAttentiveHeads,
    blocks: Float[Tensor, "layers images rows cols dim"],
    labels: Int64[Tensor, " images"],
) -> Ranked:
    device = blocks.device
    found = [
        class_rank(heads.heads.logits(index, tokens.flatten(1, 2).float()), labels.to(device))
        for index, tokens in enumerate(blocks)
    ]
    return torch.stack(found).cpu()
