"""What linear segmentation is put together from: a loss, a way to train, a way to infer.

Each is chosen by the name of a file, such as `probe.loss=histogram`; its `settings` are what
records say of it. What computes is imported when it is asked for it: a plan needs no torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from probes.heads.fitting import HeadFitting, LogisticRegression, floats
from ssl_bench.composition.fields import (
    Count,
    Pixels,
    Positive,
    PositiveOrZero,
    Rate,
    ShareBelowOne,
    check_fields,
    require_some,
)
from ssl_bench.models import Encoder

if TYPE_CHECKING:
    from probes.heads.losses import (
        HistogramLoss,
        ModeLoss,
        PixelLoss,
        ResampledLoss,
        UpsampledLoss,
    )
    from probes.heads.scored_images import Scoring
    from probes.heads.sgd import Heads, HeadTraining

HALF_DECADES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_OF_CAPI = (1e-6, 3.727594e-5, 1.389495e-3, 5.179475e-2, 1.930698, 71.96857, 2682.696, 1e5)


@runtime_checkable
class Loss(Protocol):
    """What the logits of the patches are held against."""

    def settings(self) -> dict[str, Any]: ...

    def of_pixels(self, image_size: int, patch: int) -> "PixelLoss":
        """The loss for square images of so many pixels a side."""
        ...


@runtime_checkable
class PatchHeadFitting(HeadFitting, Protocol):
    """How heads of patches are fitted.

    Attributes:
        batch_size: Images that are looked at together.
        refit: Fit to all training images once the held-out ones have chosen.
    """

    @property
    def batch_size(self) -> int: ...

    @property
    def refit(self) -> bool: ...


@runtime_checkable
class Inference(Protocol):
    """How a whole image is segmented."""

    def settings(self) -> dict[str, Any]: ...

    def of_images(self, image_size: int, encoder: Encoder) -> "Scoring": ...


@dataclass(frozen=True)
class Upsampled:
    """Bilinear logits against labels.

    Attributes:
        factor: The labels have so many times the side of the token grid; that of the image if None.
    """

    factor: Count | None = 4

    def __post_init__(self) -> None:
        check_fields(self, "probe.loss")

    def settings(self) -> dict[str, Any]:
        return {"loss": f"upsample{self.factor}" if self.factor else "full_resolution"}

    def of_pixels(self, image_size: int, patch: int) -> "UpsampledLoss":
        from probes.heads.losses import UpsampledLoss

        del image_size
        return UpsampledLoss(self.factor or patch)


@dataclass(frozen=True)
class Resampled:
    """Bilinear logits against labels of a size of their own.

    Attributes:
        size: Their side in pixels.
    """

    size: Pixels = 100

    def __post_init__(self) -> None:
        check_fields(self, "probe.loss")

    def settings(self) -> dict[str, Any]:
        return {"loss": str(self.size)}

    def of_pixels(self, image_size: int, patch: int) -> "ResampledLoss":
        from probes.heads.losses import ResampledLoss

        return ResampledLoss(image_size // patch, image_size // patch, self.size)


@dataclass(frozen=True)
class Histogram:
    """Patch logits against the histogram of the labels under the patch."""

    def settings(self) -> dict[str, Any]:
        return {"loss": "histogram"}

    def of_pixels(self, image_size: int, patch: int) -> "HistogramLoss":
        from probes.heads.losses import HistogramLoss

        del image_size
        return HistogramLoss(patch)


@dataclass(frozen=True)
class Majority:
    """Patch logits against the most frequent label under the patch."""

    def settings(self) -> dict[str, Any]:
        return {"loss": "majority"}

    def of_pixels(self, image_size: int, patch: int) -> "ModeLoss":
        from probes.heads.losses import ModeLoss

        del image_size
        return ModeLoss(patch)


@dataclass(frozen=True)
class Steps:
    """A number of optimizer steps.

    Attributes:
        learning_rates: All are trained; which one counts is chosen afterwards.
        batch_size: Images of a step.
        warmup: Share of the steps in which the learning rate rises.
    """

    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rates: Sequence[Rate] = HALF_DECADES
    epochs: Count = 30
    batch_size: Count = 16
    schedule: Literal["cosine", "linear", "constant", "drop"] = "cosine"
    warmup: ShareBelowOne = 0.05
    weight_decay: PositiveOrZero = 1e-4

    refit = False

    def __post_init__(self) -> None:
        check_fields(self, "probe.training")
        require_some("probe.training.learning_rates", self.learning_rates)

    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"learning_rates": floats(self.learning_rates)}

    def of_heads(self, heads: "Heads") -> "HeadTraining":
        from probes.heads.optimizers import SGD, HeadAdamW, Schedule
        from probes.heads.sgd import HeadTraining

        optimizer = {"adamw": HeadAdamW, "sgd": SGD}[self.optimizer]
        return HeadTraining(
            values=tuple(floats(self.learning_rates)),
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=optimizer(weight_decay=self.weight_decay),
            schedule=Schedule(self.schedule, self.warmup),
            **vars(heads),
        )


@dataclass(frozen=True)
class PatchRegression(LogisticRegression):
    """Logistic regressions of patches.

    Attributes:
        refit: Fit to all training images once the held-out ones have chosen.
    """

    c_values: Sequence[Positive] = _OF_CAPI
    refit: bool = False

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "refit": self.refit}


@dataclass(frozen=True)
class Squashed:
    """Images are squashed to squares, logits upsampled bilinearly.

    Attributes:
        score_size: Masks are reduced to this size before scoring; the original size if None.
    """

    score_size: Pixels | None = None

    def __post_init__(self) -> None:
        check_fields(self, "probe.inference")

    def settings(self) -> dict[str, Any]:
        return {"scoring": "squash", "score_size": self.score_size}

    def of_images(self, image_size: int, encoder: Encoder) -> "Scoring":
        from probes.heads.scored_images import SquashedScoring

        del encoder
        return SquashedScoring(image_size, self.score_size)


@dataclass(frozen=True)
class ByPatch(Squashed):
    """Images are squashed to squares, and each pixel takes the class of its patch."""

    def settings(self) -> dict[str, Any]:
        return {"scoring": "patch", "score_size": self.score_size}

    def of_images(self, image_size: int, encoder: Encoder) -> "Scoring":
        from probes.heads.scored_images import PatchScoring

        del encoder
        return PatchScoring(image_size, self.score_size)


@dataclass(frozen=True)
class SlidingWindows:
    """Windows slide over the image at its own shape."""

    def settings(self) -> dict[str, Any]:
        return {"scoring": "slide", "score_size": None}

    def of_images(self, image_size: int, encoder: Encoder) -> "Scoring":
        from probes.heads.scored_images import SlidingScoring

        return SlidingScoring(image_size, encoder.mean)
