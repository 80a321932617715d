"""What a pretraining run is made of."""

from dataclasses import dataclass, field, replace

from pretrain.monitor import Monitor
from pretrain.objectives.dino import Dino
from pretrain.objectives.objective import Objective
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe
from pretrain.options import DataOptions, TrainOptions
from ssl_bench.composition.fields import check_fields
from ssl_bench.models import EncoderConfig, ViTConfig


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

    @property
    def encoder(self) -> EncoderConfig:
        """The model at the size of the large crops."""
        return replace(self.model, image_size=self.data.image_size or self.model.image_size)
