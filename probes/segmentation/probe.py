"""Linear segmentation: what can a linear head segment with the patches of each block?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from probes.features.sources import LayerGroup, asked_patches, require_one_block_a_head, sources_of
from probes.features.tiers.room import AskedTier
from probes.segmentation.components import (
    Inference,
    Loss,
    PatchHeadFitting,
    SlidingWindows,
    Squashed,
    Steps,
    Upsampled,
)
from probes.segmentation.files import FileNames
from ssl_bench.composition.fields import (
    Count,
    CountOrZero,
    FilePath,
    Pixels,
    PositiveOrZero,
    ShareBelowOne,
    Threads,
    check_fields,
)
from ssl_bench.composition.presets import guesses_of
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import AskedFacets, Facet

if TYPE_CHECKING:
    from probes.segmentation.run import SegmentationRun

_COMPONENTS = ("loss", "training", "inference")
_PLACES = ("tier", "memory_gib", "disk_gib", "cache", "keep_minutes")
# Where, how fast and with what words, not what comes out; protocol and facet have their own place.
_NOT_SETTINGS = frozenset(
    {*_COMPONENTS, *_PLACES, "protocol", "facet", "panels", "num_workers", "guesses"}
)


@dataclass(frozen=True)
class Segmentation(Probe):
    """Linear heads on every block and with every learning rate, from one pass over the images.

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
    loss: Loss = field(default_factory=Upsampled)
    training: PatchHeadFitting = field(default_factory=Steps)
    inference: Inference = field(default_factory=Squashed)
    facet: str = "token"
    norm: Literal["none", "final", "standardize"] = "standardize"
    crops: Literal["whole", "resized", "scaled"] = "whole"
    views: Count = 1
    holdout: ShareBelowOne = 0.1
    train_images: Count | None = None
    panels: CountOrZero = 6
    tier: AskedTier = "auto"
    memory_gib: PositiveOrZero | None = None
    disk_gib: PositiveOrZero | None = None
    cache: FilePath | None = None
    keep_minutes: PositiveOrZero = 10.0
    num_workers: Threads = 4
    guesses: Sequence[str] = ()

    task = "segmentation"
    role = "segmentation"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        require_one_block_a_head(self.asked_facets, self.layers_mode)
        if self.crops == "whole" and self.views > 2:
            raise ConfigurationError(
                f"probe.views must be 1 or 2 for probe.crops=whole, got {self.views}"
            )
        slides = isinstance(self.inference, SlidingWindows)
        if self.holdout and (self.crops != "whole" or slides):
            raise ConfigurationError(
                "probe.holdout must be 0 unless probe.crops=whole and probe.inference is squashed "
                "or by_patch: the held-out images are scored from their cached features, got "
                f"{self.holdout}"
            )
        if self.training.refit and not self.holdout:
            raise ConfigurationError("probe.training.refit must be false unless probe.holdout > 0")

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = ["miou_holdout"] if self.holdout else []
        metrics += ["miou_oracle", "pixel_accuracy"]
        sources = self.sources(layers)
        return [(source[-1], self.scored_facet, metric) for source in sources for metric in metrics]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet:
        return dataset.train()

    def settings(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in _NOT_SETTINGS}
        for name in _COMPONENTS:
            own |= getattr(self, name).settings()
        return own

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        names, shown = self.names(seed), [source[-1] for source in self.sources(layers)]
        panels = [names.panel(image_id) for image_id in sampled(images.ids, self.panels)]
        # The list is left by a run of any block.
        return {**dict.fromkeys(panels, shown), names.training_images: shown[:1]}

    def names(self, seed: int) -> FileNames:
        """What a run with that seed leaves beside its records."""
        shown = [] if self.layers_mode == "single" else [self.layers_mode]
        if not shown or self.facet != "token":
            shown.append(self.scored_facet)
        return FileNames(self.protocol, "-".join(shown), seed)

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all heads of all layers.

        Raises:
            DataError: the labels hold too few classes.
        """
        yield from self.prepared(context).scores(guesses_of(self, self.guesses))

    def prepared(self, context: ProbeContext) -> "SegmentationRun":
        """The run with all its parts; opens the dataset, computes nothing."""
        from probes.segmentation.assembly import prepared

        return prepared(self, context)

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_patches(self.facet, self.norm)

    @property
    def scored_facet(self) -> Facet:
        """As records have it."""
        return self.asked_facets.names[0]

    def sources(self, layers: Sequence[int]) -> list[LayerGroup]:
        """The layers that each head sees."""
        return sources_of(layers, self.layers_mode)
