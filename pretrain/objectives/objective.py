"""What an encoder can be trained for, as the trainer sees it: tensors in, loss out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pretrain.schedules import Timeline
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, EncoderModule, ViTConfig
from ssl_bench.models.encoder import IMAGENET_COLOURS, Colours

Views = Sequence[Tensor]
"""Images of one size or several, and what else a loss needs to know of them, such as labels."""


@runtime_checkable
class Learner(Protocol):
    """Everything that changes while training, apart from the optimizer; an `nn.Module`."""

    @property
    def student(self) -> nn.Module:
        """The network whose parameters are trained."""
        ...

    @property
    def encoder(self) -> EncoderModule:
        """The encoder worth keeping."""
        ...

    @property
    def encoders(self) -> Sequence[EncoderModule]:
        """That one and others like it, which start with the same weights."""
        ...

    def compilable(self) -> Iterable[nn.Module]:
        """The parts that see static shapes only."""
        ...

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of a part of a batch, and what the log should know about it.

        `network` is the student, possibly wrapped for training on several devices.
        """
        ...

    def freeze_gradients(self, step: int) -> None:
        """Drop the gradients of what must not change in this step."""
        ...

    def update_teacher(self, step: int, lost: Bool[Tensor, ""]) -> None:
        """Change what follows the student, after the optimizer has changed the student.

        Where the step was `lost`, for a gradient that is not finite, nothing is learned from it.
        """
        ...

    def values(self, step: int) -> dict[str, float]:
        """Scheduled values of the step, for the log."""
        ...

    def diagnose(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong if steps with such a row of the log do not end, and the remedy."""
        ...


class Independent(nn.Module):
    """What a step of a learner does beside its loss where nothing is held and nothing follows."""

    def freeze_gradients(self, step: int) -> None:
        """Everything is trained from the first step on."""

    def update_teacher(self, step: int, lost: Bool[Tensor, ""]) -> None:
        """Nothing follows the student."""

    def values(self, step: int) -> dict[str, float]:
        """Nothing is scheduled."""
        del step
        return {}


@runtime_checkable
class Classifier(Protocol):
    """A learner that names classes; it can be validated."""

    def classify(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Logits of normalised images."""
        ...


@runtime_checkable
class ViewMaker(Protocol):
    """From samples to the views a learner takes: the part for the CPU, then that for the device.

    What `cut` gives comes through a DataLoader, which makes lists of tuples and pins what has
    `pin_memory`: give tensors, lists of them, or a class such as `LabelledCrops`.
    """

    def sizes(self, image_size: int, patch_size: int) -> tuple[int, ...]: ...

    def cut(
        self,
        samples: Iterable[Sample],
        generators: Iterable[np.random.Generator],
        sizes: Sequence[int],
    ) -> Any: ...

    def join(self, pieces: Iterable[Any], device: torch.device) -> Any:
        """What was cut from some images, then some more, ...: on the device, as if cut at once.

        Each piece is copied as it comes, so that the memory of the worker that cut it is free.
        """
        ...

    def finish(
        self, groups: Any, device: torch.device, colours: Colours = IMAGENET_COLOURS
    ) -> Views: ...


@runtime_checkable
class Measuring(Protocol):
    """Looks at a learner now and then, and changes nothing."""

    @property
    def costs_by(self) -> str:
        """Options that say how long it takes."""
        ...

    def measures(self, step: int) -> Mapping[str, float]:
        """What is due after the step of this number, counted from 1; in percent."""
        ...


@runtime_checkable
class Generating(Protocol):
    """An objective that makes what it learns from, and tests it itself: no image is read."""

    def images(self) -> ImageSet:
        """What stands for the images."""
        ...

    def observer(self, learner: Any, timeline: Timeline) -> Measuring: ...


@runtime_checkable
class Objective(Protocol):
    """Hyperparameters from which a learner is built."""

    @property
    def crops(self) -> ViewMaker: ...

    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> Learner:
        """A learner at its start; `class_names` are those of the training images, if any."""
        ...


def require_vit(model: EncoderConfig, objective: str, reason: str) -> ViTConfig:
    """The model itself, for an objective that trains Vision Transformers alone.

    Raises:
        ConfigurationError: It is another one.
    """
    if not isinstance(model, ViTConfig):
        raise ConfigurationError(
            f"objective={objective} expects a Vision Transformer, since {reason}; got a "
            f"{type(model).__name__.removesuffix('Config')}: take model=vit_small_skip or "
            "objective=supervised"
        )
    return model
