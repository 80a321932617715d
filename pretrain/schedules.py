"""Values that change from step to step, as pure functions of the step; lengths of warm-ups."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ssl_bench.errors import ConfigurationError

# Of a triangle: shares of the run, and share of the top.
_PEAK, _KNEE, _KNEE_VALUE = 0.4, 0.8, 0.05


Schedule = Callable[[int], float]
"""From a step, from 0, to a value."""


@dataclass(frozen=True)
class Timeline:
    """The planned length of a run.

    Attributes:
        total_steps: Optimizer steps; every schedule ends with the last one.
        steps_per_epoch: Whole batches in the training images.
    """

    total_steps: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.steps_per_epoch < 1:
            raise ConfigurationError(
                f"a run needs at least one step, got {self.total_steps} steps of "
                f"{self.steps_per_epoch} an epoch; see train.epochs and train.max_steps"
            )

    def get_epoch(self, step: int) -> int:
        """Epoch, from 0, that the step belongs to."""
        return step // self.steps_per_epoch

    def is_interval_end(self, epochs: int | None, steps: int) -> bool:
        """Whether so many epochs, another time, are over after so many steps."""
        return epochs is not None and steps % (epochs * self.steps_per_epoch) == 0

    def is_due(self, epochs: int | None, steps: int) -> bool:
        """Whether what comes every so many epochs, and after the last step, comes now."""
        is_last = epochs is not None and steps == self.total_steps
        return is_last or self.is_interval_end(epochs, steps)


@dataclass(frozen=True)
class Cosine:
    """Linear from 0 to `start` over the warm-up, then half a cosine towards `end`.

    Source: `cosine_scheduler` of facebookresearch/dino, utils.py: the last step of the warm-up and
    the first after it both give `start`; `end` would be reached one step after the last.
    """

    start: float
    end: float
    num_steps: int
    warmup_steps: int = 0

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.start * step / max(self.warmup_steps - 1, 1)
        progress = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        return self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Triangle:
    """From 0 to `top` over two fifths, down to a twentieth of it by four fifths, then to 0.

    Step i of n has the value at the end of its stretch, (i + 1) / n.

    Source: `lr_schedule` of
    https://github.com/locuslab/convmixer-cifar10/blob/2d3d9b73d3caa6112ecdcea866f1d2805f37cc8e/train.py
    """

    peak: float
    num_steps: int

    def __call__(self, step: int) -> float:
        done = (step + 1) / self.num_steps
        if done <= _PEAK:
            return self.peak * done / _PEAK
        if done <= _KNEE:
            return self.peak * (1 + (_KNEE_VALUE - 1) * (done - _PEAK) / (_KNEE - _PEAK))
        return self.peak * _KNEE_VALUE * (1 - done) / (1 - _KNEE)


@dataclass(frozen=True)
class Linear:
    """Straight from `start` at step 0 to `end` at step `num_steps` - 1, then constant.

    Official DINO climbs in stairs of one epoch; with one epoch a step the two agree.
    """

    start: float
    end: float
    num_steps: int

    def __call__(self, step: int) -> float:
        if step >= self.num_steps - 1:
            return self.end
        return self.start + (self.end - self.start) * step / (self.num_steps - 1)


@dataclass(frozen=True)
class InitialPhase:
    """The first epochs of a recipe, in which something rises or waits.

    A length that was asked for is taken as it is. The default is counted in epochs of ImageNet, and
    a short run on few images would end before it does: it takes no more than a share of the run.

    Attributes:
        key: Of the option that sets its length in epochs, such as "train.warmup_epochs".
        epochs: Length where nothing is asked for.
        share: Of the run, that this takes at most, in (0, 1].
    """

    key: str
    epochs: float
    share: float

    def count_steps(self, asked: float | None, timeline: Timeline) -> int:
        """How long it is; `asked` in epochs, None for the default.

        Raises:
            ConfigurationError: what was asked for is longer than the run.
        """
        if asked is None:
            most = math.ceil(self.share * timeline.total_steps)
            return min(round(self.epochs * timeline.steps_per_epoch), most)
        steps = round(asked * timeline.steps_per_epoch)
        if steps > timeline.total_steps:
            raise ConfigurationError(
                f"{self.key}={asked:g} are {steps} steps and the run has {timeline.total_steps}; "
                f"take fewer epochs, or {self.epochs:g}, at most {100 * self.share:g} % of the run",
                hint=(f"{self.key}=null",),
            )
        return steps


LR_WARMUP = InitialPhase("train.warmup_epochs", epochs=10.0, share=0.1)
LAST_LAYER_FREEZE = InitialPhase("objective.freeze_last_layer_epochs", epochs=1.0, share=0.1)
TEMPERATURE_RISE = InitialPhase("objective.teacher_temperature_epochs", epochs=30.0, share=0.3)
INITIAL_PHASES = (LR_WARMUP, LAST_LAYER_FREEZE, TEMPERATURE_RISE)


def count_phase_steps(description: Mapping[str, Any], timeline: Timeline) -> dict[str, int]:
    """What the warm-ups of a run come to, by the names of their options.

    Args:
        description: What `pretrain.description.describe` makes of the run.
        timeline: Of the run.

    Raises:
        ConfigurationError: one is longer than the run.
    """
    found = {}
    for warmup in INITIAL_PHASES:
        part, name = warmup.key.split(".")
        if name in description.get(part, {}):
            found[name] = warmup.count_steps(description[part][name], timeline)
    return found
