"""Base classes of objectives: `Objective` contains the options, `Learner` computes the loss.

The trainer passes views of images (such as crops) to a learner, which returns the loss.
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
"""One tensor of images for each image size, and other inputs of a loss, such as labels."""
# First number of each seed for heads and decoders. pretrain/batches.py uses other first numbers.
_PART = 3


class Learner(nn.Module, ABC):
    """Base class of learners: the networks to train and their loss, without the optimizer.

    Attributes:
        options: The objective that built this learner.
        student: The module whose parameters are trained. The attribute `backbone` of this module is
            an encoder.
    """

    student: Any

    def __init__(self, options: "Objective", student: nn.Module) -> None:
        super().__init__()
        self.options: Any = options
        self.student = student

    @property
    def encoder(self) -> EncoderModule:
        """Return the encoder that is saved and evaluated."""
        return self.student.backbone

    @property
    def encoders(self) -> Sequence[EncoderModule]:
        """Return all encoders into which the weights of the checkpoint `init_from` are loaded.

        By default, only the encoder that is saved and evaluated is returned.
        """
        return (self.encoder,)

    def compilable(self) -> Iterable[nn.Module]:
        """Return the modules that `torch.compile` may compile, which are all encoders by default.

        The inputs of a compiled module must have the same shapes in all steps.
        """
        return self.encoders

    @abstractmethod
    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Args:
            network: The student network. With several processes, the network is wrapped in
                DistributedDataParallel.
            views: Views that `ViewMaker.augment_on_device` returned.
            step: Number of the optimizer step, from 0.

        Returns:
            The loss, and a dictionary of scalar tensors without gradients for the log.
        """

    def freeze_gradients(self, step: int) -> None:
        """Remove the gradients of those parameters that this optimizer step must not change.

        The default implementation removes no gradient.
        """

    def update_teacher(self, step: int, found_inf: Bool[Tensor, ""]) -> None:
        """Update the networks that follow the student, such as DINO's teacher.

        The trainer calls this method after the optimizer has updated the student. The default
        implementation does nothing.

        Args:
            step: Number of the optimizer step, from 0.
            found_inf: Whether a gradient of this step was not finite, so that the optimizer has not
                changed the student.
        """

    def scheduled_values(self, step: int) -> dict[str, float]:
        """Return the scheduled values of an optimizer step for the log, such as a momentum."""
        del step
        return {}

    def diagnose(self, row: Mapping[str, Any]) -> ConfigurationError | None:
        """Return an error if this row of the log is typical of a run that does not learn.

        The run ends with the returned error if this method returns an error for
        `train.collapse_patience` consecutive rows. The hint of the returned error recommends
        options that may help.
        """
        del row


class PeriodicEvaluation(ABC):
    """Base class of evaluations that a run repeats every few epochs without changing the learner.

    Attributes:
        cost_options: Names of the options that determine how long an evaluation takes. A message
            about a slow evaluation lists these options.
    """

    cost_options: str

    @abstractmethod
    def measure_if_due(self, step: int) -> Mapping[str, float]:
        """Evaluate the learner if an evaluation is due after this step.

        Args:
            step: Number of optimizer steps that the run has completed.

        Returns:
            Metrics by name. The mapping is empty if no evaluation is due after this step.
        """


class Objective(ABC):
    """Base class of objectives. A subclass is a frozen dataclass whose fields are hyperparameters.

    Attributes:
        crops: The `ViewMaker` that turns samples into views.
        noun: Plural noun for training samples in messages, such as "images".
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
        """Build a learner with its initial weights.

        Args:
            model: Configuration of the encoder.
            timeline: Planned length of the run, from which schedules are computed.
            seed: Seed of all initial weights. The global random state of PyTorch stays unchanged.
            class_names: Class names of the training images, or an empty sequence without labels.

        Raises:
            ConfigurationError: The objective cannot train this encoder or use these classes.
        """


class GeneratingObjective(Objective, ABC):
    """An objective that generates its training samples, so that a run reads no images."""

    @abstractmethod
    def images(self) -> ImageSet:
        """Return an image set with one placeholder image for each sample of an epoch.

        The image set supplies only the ids of the samples, which the objective generates itself.
        """

    @abstractmethod
    def build_evaluator(self, learner: Any, timeline: Timeline) -> PeriodicEvaluation:
        """Return an object that evaluates the learner during training.

        The returned object replaces the monitor, which evaluates encoders on labelled images.
        """


def derive_seed(seed: int, part: str) -> int:
    """Derive the seed of a network part, such as "head" or "decoder", from the seed of the run.

    If a part used the seed of the run itself, it would get the same random numbers as the encoder.
    """
    name = int.from_bytes(part.encode())
    (state,) = np.random.SeedSequence((_PART, seed, name)).generate_state(1, np.uint64)
    return int(state)


def require_vit(model: EncoderConfig, objective: str, reason: str) -> ViTConfig:
    """Check that an encoder is a Vision Transformer, and return its configuration.

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
