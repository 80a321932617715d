"""What a pretraining run is made of."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_convert

from pretrain.logging.mfu import kept_bytes, training_flops
from pretrain.monitor import Monitor
from pretrain.objectives.dino import Dino
from pretrain.objectives.objective import Generating, Learner, Measuring, Objective, Views
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe, Soap
from pretrain.options import DataOptions, TrainOptions
from pretrain.runtime.distributed import TrainingRanks
from pretrain.runtime.fitting import Needs, fitted_batch
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import check_fields
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, StateSpaceConfig, ViTConfig

# Weights' worth of moments, and of SOAP's statistics and bases in a ViT, that an optimizer holds.
_ADAMW_HOLDS, _SOAP_HOLDS = 2, 10


@dataclass(frozen=True)
class Plan:
    """An encoder, what it learns for, with which optimizer, from which images, for how long.

    Attributes:
        init_from: Address of a checkpoint, as `load_encoder` takes it, whose weights the encoder
            starts with; random ones without.
    """

    model: EncoderConfig = field(default_factory=ViTConfig)
    objective: Objective = field(default_factory=Dino)
    optimizer: OptimizerRecipe = field(default_factory=AdamW)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    monitor: Monitor = field(default_factory=Monitor)
    init_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")
        if isinstance(self.objective, Generating):
            for name, options in (("data", self.data), ("monitor", self.monitor)):
                if options != type(options)():
                    raise ConfigurationError(
                        f"{name}.* expects images, and this objective has none: it makes what it "
                        f"learns from; leave {name}.* out, and --data-root"
                    )
            return
        if isinstance(self.model, StateSpaceConfig):
            raise ConfigurationError(
                f"model.version={self.model.version} reads tokens and no images; take "
                "objective=copying, or model=vit_small_skip"
            )
        if self.data.labels is None:
            labelled = replace(self.data, labels=isinstance(self.objective, Supervised))
            object.__setattr__(self, "data", labelled)

    @property
    def encoder(self) -> EncoderConfig:
        """The model at the size of the large crops."""
        if isinstance(self.model, StateSpaceConfig):
            return self.model
        return replace(self.model, image_size=self.data.image_size or self.model.image_size)

    @property
    def noun(self) -> str:
        """For what is learned from."""
        return "strings" if isinstance(self.objective, Generating) else "images"

    def images(self) -> ImageSet:
        """What is learned from.

        Raises:
            DataError: there are no images.
            ConfigurationError: they cannot be kept or labelled as asked.
        """
        if isinstance(self.objective, Generating):
            return self.objective.images()
        return self.data.open()

    def with_batch(
        self, images: ImageSet, ranks: TrainingRanks
    ) -> tuple["Plan", str, Needs | None]:
        """The plan with a batch that fits, why it is that, and its needs, where none was typed."""
        train, count = self.train, len(images)
        if train.batch_size is not None:
            return self, "", None

        def fitted() -> tuple[int, str, Needs]:
            # No batch is larger, and so no schedule shorter.
            timeline = replace(train, batch_size=max(1, count // 4)).timeline(count)
            learner = self.objective.build(
                self.encoder, timeline, seed=train.seed, class_names=images.class_names
            )
            needs, parts = self.needs(learner), train.accumulation
            batch = fitted_batch(count, needs, ranks.device, ranks=ranks.count, parts=parts)
            return *batch, needs

        batch, why, needs = ranks.from_first(fitted)
        return replace(self, train=replace(train, batch_size=batch)), why, needs

    def needs(self, learner: Learner) -> Needs:
        """What a step needs, counted on blank images without computing anything."""
        assert isinstance(learner, nn.Module)
        one = self._blank_views()
        two, three = ([_repeated(view, number) for view in one] for number in (2, 3))
        kept = kept_bytes(learner, two, 0)
        image_bytes = kept_bytes(learner, three, 0) - kept
        # Of prototypes the forward pass keeps the gradient, of other weights what is there anyway.
        weights = sum(weight.nbytes for weight in learner.student.parameters())
        whole = sum(tensor.nbytes for tensor in (*learner.parameters(), *learner.buffers()))
        holds = _SOAP_HOLDS if isinstance(self.optimizer, Soap) else _ADAMW_HOLDS
        saved = whole + holds * weights
        return Needs(training_flops(learner, two, 0) / 2, image_bytes, 2 * saved + weights)

    def _blank_views(self) -> Views:
        crops = self.objective.crops
        sizes = crops.sizes(self.encoder.image_size, self.encoder.patch_size)
        blank = Sample("blank", np.zeros((8, 8, 3), np.uint8), label=0)
        cut = default_convert(crops.cut([blank], [np.random.default_rng(0)], sizes))
        with torch.random.fork_rng(devices=[]):
            return crops.finish(cut, torch.device("cpu"), self.data.colours)

    def observer(self, learner: Learner, timeline: Timeline, images: ImageSet) -> Measuring | None:
        """What looks at the learner of `images` now and then; errors as `Monitor.open`."""
        if isinstance(self.objective, Generating):
            return self.objective.observer(learner, timeline)
        return self.monitor.open(
            learner,
            timeline,
            data_root=self.data.root,
            class_names=images.class_names,
            colours=self.data.colours,
            fitted=images if self.data.labels else None,
            allow_overlap=self.data.allow_overlap,
        )


def _repeated(view: Tensor, images: int) -> Tensor:
    """What a view of one image would be of several, without values; a scalar as it is."""
    if not view.ndim:
        return view
    return view.new_empty((images * len(view), *view.shape[1:]), device="meta")
