"""What a pretraining step asks of a device, for `ssl-bench cost`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from pretrain.objectives.dino import Dino
from pretrain.objectives.objective import Objective
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe, Soap
from pretrain.options import TrainOptions
from pretrain.runtime.distributed import TrainingRanks
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.composition.fields import Count, check_fields
from ssl_bench.cost.places import Place
from ssl_bench.cost.work import Step, Unit
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, StateSpaceConfig, ViTConfig

_TIMELINE = Timeline(total_steps=1_000_000, steps_per_epoch=1_000)
# After all that waits for some epochs, such as DINO's last layer.
_LATE = 500_000
# Refreshes that never come, for a step between two.
_NEVER = 1_000_000


@dataclass(frozen=True)
class PretrainingCost:
    """One epoch, step by step: forward and backward pass, clipping, optimizer, teacher.

    Not in it: reading, cutting and changing images, processes that wait for each other, and what
    `torch.compile` joins.

    Attributes:
        batch_size: Images in a step.
        part: Images at once; the batch is accumulated from parts.
        num_images: Of an epoch.
        num_classes: Of objectives that have classes.
        precision: Of the products.
    """

    model: EncoderConfig = field(default_factory=ViTConfig)
    objective: Objective = field(default_factory=Dino)
    optimizer: OptimizerRecipe = field(default_factory=AdamW)
    batch_size: Count = 1024
    part: Count = 128
    num_images: Count = 1_281_167
    num_classes: Count = 1000
    precision: str = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self, "cost")
        if isinstance(self.model, StateSpaceConfig):
            raise ConfigurationError(
                f"cost counts work on images, got {self.model.version}, which reads tokens; take a "
                "model of images"
            )

    @property
    def images(self) -> float:
        return float(self.num_images)

    def units(self, memory: float) -> Sequence[Unit]:
        """A step, between refreshes of SOAP's bases and with one, on any device."""
        del memory
        steps = self.num_images / self.batch_size
        if not isinstance(self.optimizer, Soap):
            return [self._unit("step", steps, self.optimizer)]
        often, never = (replace(self.optimizer, precondition_frequency=n) for n in (1, _NEVER))
        share = 1 / self.optimizer.precondition_frequency
        return [
            self._unit("step between refreshes", steps * (1 - share), never),
            self._unit("step with a refresh", steps * share, often),
        ]

    def _unit(self, name: str, times: float, recipe: OptimizerRecipe) -> Unit:
        def make(place: Place, parts: int) -> Step:
            return self._step(place, parts, recipe)

        return Unit(name, times, make, parts=self.batch_size // self.part, differentiates=True)

    def _step(self, place: Place, parts: int, recipe: OptimizerRecipe) -> Step:
        options = TrainOptions(
            batch_size=self.part * parts, accumulation=parts, compile=False,
            precision="bfloat16" if self.precision == "bfloat16" else "float32",
        )  # fmt: skip

        def make(device: torch.device) -> Trainer:
            names = [str(number) for number in range(self.num_classes)]
            learner = self.objective.build(self.model, _TIMELINE, seed=0, class_names=names)
            trainer = Trainer(learner, recipe, options, _TIMELINE, TrainingRanks(device=device))
            # The first step would count its products, on a device of its own.
            trainer.flops = inf
            return trainer

        trainer = place.built(make, lambda made: [made.learner])  # type: ignore[list-item]
        return _Steps(trainer, [self._views(place.device)] * parts)

    def _views(self, device: torch.device) -> Sequence[Tensor]:
        """Of the sizes and numbers that the objective's crops have; classes where it has them."""
        sizes = self.objective.crops.sizes(self.model.image_size, self.model.patch_size)
        locals_ = getattr(self.objective.crops, "num_locals", 0)
        numbers = (2, locals_) if isinstance(self.objective, Dino) else (1,)
        views = [
            torch.randn(number * self.part, 3, size, size, device=device)
            for number, size in zip(numbers, sizes, strict=False)
        ]
        if isinstance(self.objective, Supervised):
            labels = torch.zeros(self.part, dtype=torch.long, device=device)
            views += [labels, torch.ones((), device=device)]
        return views


class _Steps:
    """Takes one step after the other."""

    def __init__(self, trainer: Trainer, parts: Sequence[Sequence[Tensor]]) -> None:
        self._trainer, self._parts, self._step = trainer, parts, _LATE

    def __call__(self) -> None:
        self._trainer.take_step(self._step, self._parts)
        self._step += 1
