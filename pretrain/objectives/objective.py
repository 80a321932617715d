"""What an encoder can be trained for, as the trainer sees it: tensors in, loss out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pretrain.schedules import Timeline
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, EncoderModule, ViTConfig

Views = Sequence[Tensor]
"""Images of one size or several, and what else a loss needs to know of them, such as labels."""
# Keeps the streams of parts apart from those of pretrain/batches.py.
_PART = 3


class Learner(nn.Module, ABC):
    """Everything that changes while training, apart from the optimizer.

    Attributes:
        options: The objective that it was built from.
        student: The module whose parameters are trained; its `backbone` is the encoder.
    """

    student: Any

    def __init__(self, options: "Objective", student: nn.Module) -> None:
        super().__init__()
        self.options: Any = options
        self.student = student

    @property
    def encoder(self) -> EncoderModule:
        """The encoder worth keeping."""
        return self.student.backbone

    @property
    def encoders(self) -> Sequence[EncoderModule]:
        """That one and others like it, which start with the same weights."""
        return (self.encoder,)

    def compilable(self) -> Iterable[nn.Module]:
        """The parts that see static shapes only."""
        return (self.encoder,)

    @abstractmethod
    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of a part of a batch, and what the log should know about it.

        `network` is the student, possibly wrapped for training on several devices.
        """

    def freeze_gradients(self, step: int) -> None:
        """Drop the gradients of what must not change in this step."""

    def update_teacher(self, step: int, lost: Bool[Tensor, ""]) -> None:
        """Change what follows the student, after the optimizer has changed the student.

        Where the step was `lost`, for a gradient that is not finite, nothing is learned from it.
        """

    def values(self, step: int) -> dict[str, float]:
        """Scheduled values of the step, for the log."""
        del step
        return {}

    def diagnose(self, row: Mapping[str, Any]) -> ConfigurationError | None:
        """Return what is wrong if many steps have such a row of the log, with a remedy as hint."""
        del row


class Measuring(ABC):
    """Looks at a learner now and then, and changes nothing.

    Attributes:
        costs_by: Options that say how long it takes.
    """

    costs_by: str

    @abstractmethod
    def measures(self, step: int) -> Mapping[str, float]:
        """What is due after the step of this number, counted from 1; in percent."""


class Objective(ABC):
    """Hyperparameters from which a learner is built, as a frozen dataclass.

    Attributes:
        crops: A `ViewMaker`.
        noun: For what is learned from.
    """

    crops: Any
    noun = "images"

    @abstractmethod
    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> Learner:
        """A learner at its start; `class_names` are those of the training images, if any."""


class Generating(Objective, ABC):
    """An objective that makes what it learns from, and tests it itself: no image is read."""

    @abstractmethod
    def images(self) -> ImageSet:
        """What stands for the images."""

    @abstractmethod
    def observer(self, learner: Any, timeline: Timeline) -> Measuring:
        """What tests the learner now and then."""


def part_seed(seed: int, part: str) -> int:
    """Seed of a "head" or "decoder", whose weights would otherwise repeat the encoder's."""
    name = int.from_bytes(part.encode())
    (state,) = np.random.SeedSequence((_PART, seed, name)).generate_state(1, np.uint64)
    return int(state)


def require_vit(model: EncoderConfig, objective: str, reason: str) -> ViTConfig:
    """The model itself, for an objective that trains Vision Transformers alone.

    Raises:
        ConfigurationError: It is another one.
    """
    if not isinstance(model, ViTConfig):
        raise ConfigurationError(
            f"objective={objective} expects a Vision Transformer, since {reason}; got a "
            f"{type(model).__name__.removesuffix('Config')}",
            hint=("model=vit_small_skip", "or", "objective=supervised"),
        )
    return model
