"""What a pretraining run is made of."""

from dataclasses import dataclass, field, replace

from pretrain.monitor import Monitor
from pretrain.objectives.dino import Dino
from pretrain.objectives.objective import Generating, Learner, Measuring, Objective
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe
from pretrain.options import DataOptions, TrainOptions
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import check_fields
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, StateSpaceConfig, ViTConfig


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
        elif isinstance(self.model, StateSpaceConfig):
            raise ConfigurationError(
                f"model.version={self.model.version} reads tokens and no images; take "
                "objective=copying, or model=vit_small_skip"
            )

    @property
    def encoder(self) -> EncoderConfig:
        """The model at the size of the large crops."""
        if isinstance(self.model, StateSpaceConfig):
            return self.model
        return replace(self.model, image_size=self.data.image_size or self.model.image_size)

    def images(self) -> ImageSet:
        """What is learned from.

        Raises:
            DataError: there are no images.
            ConfigurationError: they cannot be kept or labelled as asked.
        """
        if isinstance(self.objective, Generating):
            return self.objective.images()
        return self.data.open()

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
