"""Base classes of pretraining objectives: `Objective` has the options, `Learner` computes the loss.

The trainer knows an objective only through these classes. Views of images go in, a loss comes out.
"""

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
"""Images, one tensor for each image size, and other inputs of a loss, such as labels."""
# Separates the random numbers of heads and decoders from those of pretrain/batches.py.
_PART = 3


class Learner(nn.Module, ABC):
    """The trained networks and their loss. The optimizer is not part of a learner.

    Attributes:
        options: The objective that built this learner.
        student: The module whose parameters are trained. Its attribute `backbone` is an encoder.
    """

    student: Any

    def __init__(self, options: "Objective", student: nn.Module) -> None:
        super().__init__()
        self.options: Any = options
        self.student = student

    @property
    def encoder(self) -> EncoderModule:
        """The encoder that is saved and evaluated."""
        return self.student.backbone

    @property
    def encoders(self) -> Sequence[EncoderModule]:
        """All encoders that start from the weights of `init_from`, including `encoder`."""
        return (self.encoder,)

    def compilable(self) -> Iterable[nn.Module]:
        """Return the modules to compile, whose inputs must have the same shapes at each step."""
        return self.encoders

    @abstractmethod
    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Args:
            network: The student. With several devices, it is wrapped in DistributedDataParallel.
            views: Views as returned by `ViewMaker.finish`.
            step: Number of the optimizer step, from 0.

        Returns:
            The loss, and scalar tensors without gradients for the log by name.
        """

    def freeze_gradients(self, step: int) -> None:
        """Remove the gradients of parameters that this optimizer step must not change."""

    def update_teacher(self, step: int, found_inf: Bool[Tensor, ""]) -> None:
        """Update networks that follow the student. The optimizer has already changed the student.

        Args:
            step: Number of the optimizer step, from 0.
            found_inf: Whether a gradient of this step was not finite. The optimizer has then left
                the student unchanged.
        """

    def values(self, step: int) -> dict[str, float]:
        """Return the scheduled values of an optimizer step, such as a momentum, for the log."""
        del step
        return {}

    def diagnose(self, row: Mapping[str, Any]) -> ConfigurationError | None:
        """Return an error if this row of the log is typical of a failed training, or None.

        The log raises the error if `train.collapse_patience` consecutive rows are typical of a
        failed training. The hint of the error names options that may help.
        """
        del row


class Measuring(ABC):
    """Evaluates a learner every few epochs without changing the learner.

    Attributes:
        costs_by: Options that determine how long the evaluation takes, for a message.
    """

    costs_by: str

    @abstractmethod
    def measures(self, step: int) -> Mapping[str, float]:
        """Evaluate the learner if an evaluation is due.

        Args:
            step: Number of optimizer steps taken so far.

        Returns:
            Percentages by name. The mapping is empty if no evaluation is due after this step.
        """


class Objective(ABC):
    """Hyperparameters of an objective. A subclass is a frozen dataclass.

    Attributes:
        crops: The `ViewMaker` that turns samples into views.
        noun: Plural noun for the training samples in messages.
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
        """Build a learner with the weights that it has before the first step.

        Args:
            model: Configuration of the encoder.
            timeline: Length of the run, for schedules.
            seed: Seed of all initial weights. The global random state stays unchanged.
            class_names: Classes of the training images. Empty without labels.

        Raises:
            ConfigurationError: The objective cannot train this encoder or use these classes.
        """


class Generating(Objective, ABC):
    """An objective that generates its training samples, so that a run reads no images."""

    @abstractmethod
    def images(self) -> ImageSet:
        """Return an epoch of samples in place of the training images."""

    @abstractmethod
    def observer(self, learner: Any, timeline: Timeline) -> Measuring:
        """Return the evaluation of the learner. It replaces the monitor."""


def derive_seed(seed: int, part: str) -> int:
    """Derive the seed of a part such as "head" or "decoder" from the seed of the run.

    If the part used the seed of the run, it would start with the random numbers of the encoder.
    """
    name = int.from_bytes(part.encode())
    (state,) = np.random.SeedSequence((_PART, seed, name)).generate_state(1, np.uint64)
    return int(state)


def require_vit(model: EncoderConfig, objective: str, reason: str) -> ViTConfig:
    """Return the configuration of a Vision Transformer unchanged, and refuse other encoders.

    Args:
        model: Configuration of any encoder.
        objective: Name of the objective, for the message.
        reason: Why the objective cannot train other encoders, for the message.

    Raises:
        ConfigurationError: The encoder is not a Vision Transformer.
    """
    if not isinstance(model, ViTConfig):
        raise ConfigurationError(
            f"objective={objective} expects a Vision Transformer because {reason}, got a "
            f"{type(model).__name__.removesuffix('Config')}",
            hint=("model=vit_small_skip", "or", "objective=supervised"),
        )
    return model
