"""Linear classification: which classes can a linear head tell apart in each block?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from probes.classification.pooling import ATTENTIVE_FACET, AttentivePooling, FixedPooling
from probes.classification.training import ImageRegression
from probes.features.shots import AskedShots, require_one_way_to_draw, shot_metric, shots_of
from probes.features.sources import IMAGE_FACETS, LayerGroup, require_one_block_a_head, sources_of
from probes.heads.sgd import HeadFitting
from ssl_bench.composition.fields import (
    Count,
    Pixels,
    PositiveOrZero,
    PositiveShare,
    ShareBelowOne,
    Threads,
    check_fields,
    shown,
)
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets

TOPS = (1, 5)
_FACETS: tuple[Facet, ...] = (*IMAGE_FACETS, *INNER_FACETS)
# Where, how fast and with what words, not what comes out; protocol and facet have their own place.
_NOT_SETTINGS = frozenset(
    {
        "protocol",
        "facet",
        "training",
        "pool",
        "encoder_batch_size",
        "memory_gib",
        "num_workers",
        "guesses",
    }
)
# Said by the metric, or without a meaning, where images of each class are drawn; and where not.
_NOT_OF_SHOTS = frozenset({"shots", "holdout", "train_images"})
_ONLY_OF_SHOTS = frozenset({"shots", "draws"})
# What is not asked where heads pool: they normalise, and see patches of a block alone.
_NOT_OF_ATTENTIVE = frozenset({"layers_mode", "standardise"})
_MOST_CHOOSING = 4


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
    training: HeadFitting = field(default_factory=ImageRegression)
    standardise: bool = True
    holdout: ShareBelowOne = 0.1
    train_images: Count | None = None
    shots: AskedShots = None
    draws: Count = 5
    image_size: Pixels | None = None
    crop_share: PositiveShare = 0.875
    encoder_batch_size: Count = 64
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4
    guesses: Sequence[str] = ()

    task = "classification"
    role = "classification"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        require_one_block_a_head(self.asked_facets, self.layers_mode)
        require_one_way_to_draw(self.shots, self.train_images)
        self._require_patches()

    def _require_patches(self) -> None:
        usual = LinearClassification.facet, LinearClassification.layers_mode
        if self._is_attentive and (self.facet, self.layers_mode) != usual:
            raise ConfigurationError(
                "probe.pool=attentive looks at the patches of one block after the final norm, got "
                f"probe.facet={shown(self.facet)} probe.layers_mode={self.layers_mode}; leave "
                "these keys out"
            )

    @property
    def _is_attentive(self) -> bool:
        return isinstance(self.pool, AttentivePooling)

    @property
    def asked_facets(self) -> AskedFacets:
        if self._is_attentive:
            return AskedFacets((ATTENTIVE_FACET,), None)
        return asked_facets(self.facet, _FACETS)

    @property
    def facets(self) -> tuple[str, ...]:
        return self.asked_facets.names

    def sources(self, layers: Sequence[int]) -> list[LayerGroup]:
        """The layers that each head sees."""
        return sources_of(layers, self.layers_mode)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (source[-1], facet, metric)
            for source in self.sources(layers)
            for facet in self.facets
            for metric in self._metrics()
        ]

    def _metrics(self) -> list[str]:
        names = metrics(holdout=self.holdout > 0)
        if self.shots is None:
            return names
        return [shot_metric(name, count) for count in shots_of(self.shots) for name in names]

    def choosing(self, shots: int) -> int:
        """Images of each class that choose between heads fitted to so many others of each."""
        return min(shots, _MOST_CHOOSING) if self.holdout else 0

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        unsaid = _NOT_SETTINGS | (_ONLY_OF_SHOTS if self.shots is None else _NOT_OF_SHOTS)
        if isinstance(self.pool, AttentivePooling):
            fitting, unsaid = self.pool.settings(), unsaid | _NOT_OF_ATTENTIVE
        else:
            fitting = self.training.settings()
        return {name: value for name, value in vars(self).items() if name not in unsaid} | fitting

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all heads of all layers.

        Top-5 accuracy is NaN where there are fewer than five classes.

        Raises:
            ConfigurationError: the encoder has no [CLS] token, or channels that the queries do not
                divide.
            DataError: the training images, or those of a class, are too few, or of one class.
        """
        if isinstance(self.pool, AttentivePooling):
            from probes.classification.attentive import AttentiveRun

            yield from AttentiveRun.prepared(self, self.pool, context).scores()
            return
        from probes.classification.run import prepared

        yield from prepared(self, context).scores()


def metrics(*, holdout: bool) -> list[str]:
    """Names of what is scored, in the order in which `ClassificationReport` does it."""
    choices = ["holdout", "oracle"] if holdout else ["oracle"]
    return [f"top{top}_{choice}" for choice in choices for top in TOPS]
