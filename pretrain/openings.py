"""The first epochs of a run, in which something is different: warm-ups, and what waits or rises."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.schedules import Timeline
from ssl_bench.errors import ConfigurationError


@dataclass(frozen=True)
class Opening:
    """An opening of a recipe.

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

    def steps(self, asked: float | None, timeline: Timeline) -> int:
        """How long it is; `asked` in epochs, None for the default.

        Raises:
            ConfigurationError: what was asked for is longer than the run.
        """
        if asked is None:
            return self.shortened(self.epochs, timeline)
        steps = round(asked * timeline.steps_per_epoch)
        if steps > timeline.total_steps:
            raise ConfigurationError(
                f"{self.key}={asked:g} are {steps} steps and the run has {timeline.total_steps}; "
                f"take fewer epochs, or {self.key}=null: {self.epochs:g}, at most "
                f"{100 * self.share:g} % of the run"
            )
        return steps

    def shortened(self, epochs: float, timeline: Timeline) -> int:
        """So many epochs in steps, but no more than the share of the run."""
        most = math.ceil(self.share * timeline.total_steps)
        return min(round(epochs * timeline.steps_per_epoch), most)


WARMUP = Opening("train.warmup_epochs", epochs=10.0, share=0.1)
FREEZE = Opening("objective.freeze_last_layer_epochs", epochs=1.0, share=0.1)
TEMPERATURE = Opening("objective.teacher_temperature_epochs", epochs=30.0, share=0.3)
_ALL = (WARMUP, FREEZE, TEMPERATURE)

# In the state of a run.
OPENINGS = "opening_steps"
KEYS = tuple(opening.key for opening in _ALL)


def opening_steps(description: Mapping[str, Any], timeline: Timeline) -> dict[str, int]:
    """What the openings of a run come to, by the names of their options.

    `description` is what `pretrain.options.describe` makes of the run.

    Raises:
        ConfigurationError: one is longer than the run.
    """
    return {
        name: opening.steps(asked, timeline) for name, opening, asked in _asked_for(description)
    }


def former_opening_steps(description: Mapping[str, Any], timeline: Timeline) -> dict[str, int]:
    """What they came to in a run whose state does not say it: all were shortened then."""
    return {
        name: opening.shortened(opening.epochs if asked is None else asked, timeline)
        for name, opening, asked in _asked_for(description)
    }


def _asked_for(description: Mapping[str, Any]) -> list[tuple[str, Opening, float | None]]:
    """Name, opening and its length, of those whose part of a run has such an option."""
    split = [(*opening.key.split("."), opening) for opening in _ALL]
    return [
        (name, opening, description[part][name])
        for part, name, opening in split
        if name in description.get(part, {})
    ]
