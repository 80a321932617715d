"""Schedules of the learning rate and other values, as functions of the optimizer step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ssl_bench.errors import ConfigurationError

# Corners of the triangular schedule: fractions of the run, and a fraction of the peak value.
_PEAK_AT, _KNEE_AT, _KNEE_VALUE = 0.4, 0.8, 0.05


Schedule = Callable[[int], float]
"""Function from the index of an optimizer step, counted from 0, to a value."""


@dataclass(frozen=True)
class Timeline:
    """The planned length of a training run.

    Attributes:
        total_steps: Number of optimizer steps. Every schedule ends with the last step.
        steps_per_epoch: Number of complete batches in an epoch.
    """

    total_steps: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.steps_per_epoch < 1:
            raise ConfigurationError(
                f"the run is too short: {self.total_steps} steps in total and "
                f"{self.steps_per_epoch} steps per epoch. Increase train.epochs or "
                "train.max_steps, or reduce train.batch_size"
            )

    def get_epoch(self, step: int) -> int:
        """Return the epoch to which a step belongs. Epochs and steps are counted from 0."""
        return step // self.steps_per_epoch

    def is_interval_end(self, epochs: int | None, num_steps: int) -> bool:
        """Return whether an interval of `epochs` epochs ends after `num_steps` steps.

        The first interval begins at the start of the run. Return False if `epochs` is None.
        """
        return epochs is not None and num_steps % (epochs * self.steps_per_epoch) == 0

    def is_due(self, epochs: int | None, num_steps: int) -> bool:
        """Return whether a measurement that is repeated every `epochs` epochs is due.

        A measurement is also due after the last step of the run. If `epochs` is None, measurements
        are never due.

        Args:
            epochs: Number of epochs between two measurements.
            num_steps: Number of steps that the run has completed.
        """
        is_last = epochs is not None and num_steps == self.total_steps
        return is_last or self.is_interval_end(epochs, num_steps)


@dataclass(frozen=True)
class CosineSchedule:
    """Cosine schedule: a linear warm-up from 0 to `start`, then half a cosine down or up to `end`.

    The last warm-up step and the first step after the warm-up both have the value `start`. The
    value `end` would be reached one step after the last step of the run.

    Source: `cosine_scheduler` in utils.py of facebookresearch/dino.
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
class TriangularSchedule:
    """Triangular schedule: a linear rise from 0 to `peak`, then a linear fall to 0 in two stages.

    The value reaches `peak` after 2/5 of the run, `peak` / 20 after 4/5, and 0 after the last step.
    Step i of n steps, counted from 0, uses the value after the fraction (i + 1) / n of the run.

    Source: `lr_schedule` of
    https://github.com/locuslab/convmixer-cifar10/blob/2d3d9b73d3caa6112ecdcea866f1d2805f37cc8e/train.py
    """

    peak: float
    num_steps: int

    def __call__(self, step: int) -> float:
        done = (step + 1) / self.num_steps
        if done <= _PEAK_AT:
            return self.peak * done / _PEAK_AT
        if done <= _KNEE_AT:
            return self.peak * (1 + (_KNEE_VALUE - 1) * (done - _PEAK_AT) / (_KNEE_AT - _PEAK_AT))
        return self.peak * _KNEE_VALUE * (1 - done) / (1 - _KNEE_AT)


@dataclass(frozen=True)
class LinearSchedule:
    """Linear schedule: a change from `start` at step 0 to `end` at step `num_steps` - 1.

    Steps after the linear change have the value `end`. DINO uses this schedule for the temperature
    of the teacher. The official DINO changes the teacher's temperature only once per epoch, but
    this schedule changes the temperature in every step.
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
    """Length of a phase at the start of a run, such as the warm-up of the learning rate.

    The default length of a phase is a number of epochs that suits ImageNet, limited to a fraction
    of the run. If the user sets the length of a phase, this length is not limited to a fraction of
    the run.

    Attributes:
        key: Config key of the length in epochs, such as "train.warmup_epochs".
        epochs: Default length in epochs.
        max_fraction: Maximum default length as a fraction of the run, in (0, 1].
    """

    key: str
    epochs: float
    max_fraction: float

    def count_steps(self, epochs: float | None, timeline: Timeline) -> int:
        """Return the length of the phase in optimizer steps.

        Args:
            epochs: Length that the user has set, in epochs, or None for the default length.
            timeline: Planned length of the run.

        Raises:
            ConfigurationError: The length that the user has set exceeds the run.
        """
        if epochs is None:
            max_steps = math.ceil(self.max_fraction * timeline.total_steps)
            return min(round(self.epochs * timeline.steps_per_epoch), max_steps)
        steps = round(epochs * timeline.steps_per_epoch)
        if steps > timeline.total_steps:
            raise ConfigurationError(
                f"{self.key}={epochs:g} means {steps} steps, but the whole run has only "
                f"{timeline.total_steps} steps. Set fewer epochs, or use the default, which is "
                f"{self.epochs:g} epochs or {100 * self.max_fraction:g} % of the run, whichever is "
                "shorter",
                hint=(f"{self.key}=null",),
            )
        return steps


LR_WARMUP = InitialPhase("train.warmup_epochs", 10.0, max_fraction=0.1)
LAST_LAYER_FREEZE = InitialPhase("objective.freeze_last_layer_epochs", 1.0, max_fraction=0.1)
TEMPERATURE_RISE = InitialPhase("objective.teacher_temperature_epochs", 30.0, max_fraction=0.3)
INITIAL_PHASES = (LR_WARMUP, LAST_LAYER_FREEZE, TEMPERATURE_RISE)


def count_phase_steps(description: Mapping[str, Any], timeline: Timeline) -> dict[str, int]:
    """Return the length of each initial phase of a run, such as the warm-up, in optimizer steps.

    Args:
        description: Settings of the run, made by `pretrain.description.describe`.
        timeline: Planned length of the run.

    Returns:
        The lengths by name. A name is the last part of the config key, such as "warmup_epochs".

    Raises:
        ConfigurationError: A phase is longer than the run.
    """
    lengths = {}
    for phase in INITIAL_PHASES:
        group, name = phase.key.split(".")
        if name in description.get(group, {}):
            lengths[name] = phase.count_steps(description[group][name], timeline)
    return lengths
