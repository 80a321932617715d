"""From counts to scores: the chosen rates, how sure they are, and what to be wary of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from probes.heads.scores import HeadScores, best_rate
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Interval, few_images_warning
from ssl_bench.scores import ABSENT_CLASS_POLICY, mean_iou


@dataclass(frozen=True)
class SourceReport:
    """All that is known of the heads of one source.

    Attributes:
        hyperparameter: What the values are of: the learning rate, or another one that is chosen.
        constant: Share of the channels, from 0 to 1, that are the same in all training patches.
        held_out: Summed counts over the images held out of training; None where all were used.
        shared: Details that are the same for all sources.
    """

    layer: int
    facet: str
    hyperparameter: str
    values: Sequence[float]
    class_names: Sequence[str]
    val: HeadScores
    held_out: Int64[np.ndarray, "values 3 classes"] | None
    constant: float
    shared: Mapping[str, Any]

    @property
    def chosen(self) -> int:
        """Index of the rate that the held-out images choose; without any, the scored ones do."""
        return self.val.best() if self.held_out is None else best_rate(self.held_out)

    def scores(self) -> list[Score]:
        """Mean IoU at the rate chosen without and with a look at the scored images, accuracy."""
        chosen, oracle = self.chosen, self.val.best()
        ways = [] if self.held_out is None else [("miou_holdout", chosen)]
        scores = [
            self._score(metric, rate, self.val.miou()[rate], self.val.miou_ci95(rate))
            for metric, rate in [*ways, ("miou_oracle", oracle)]
        ]
        accuracy, interval = self.val.accuracy(chosen), self.val.accuracy_ci95(chosen)
        return [*scores, self._score("pixel_accuracy", chosen, accuracy, interval)]

    def _score(self, metric: str, rate: int, value: float, ci95: Interval | None) -> Score:
        num_images = self.val.num_images
        baseline = self.val.baseline(metric, self.class_names).as_details()
        details = {**self._details(rate), **self.shared, **baseline}
        counts = self.val.counts(rate)
        return Score(self.layer, self.facet, metric, value, ci95, num_images, details, counts)

    def _details(self, rate: int) -> dict[str, Any]:
        iou = dict(zip(self.class_names, _plain(self.val.iou(rate)), strict=True))
        held_out = None if self.held_out is None else _plain(mean_iou(self.held_out).tolist())
        return {
            self.hyperparameter: self.values[rate],
            f"{self.hyperparameter}s": list(self.values),
            "miou_by_rate": _plain(self.val.miou()),
            "miou_by_rate_held_out": held_out,
            "constant_features": self.constant == 1,
            "constant_channels_percent": round(100 * self.constant, 1),
            "warnings": self._warnings(rate),
            "iou_by_class": iou,
            "absent_classes": ABSENT_CLASS_POLICY,
        }

    def _warnings(self, rate: int) -> list[str]:
        warnings = []
        if len(self.values) > 1 and rate in (0, len(self.values) - 1):
            name = self.hyperparameter.replace("_", " ")
            warnings.append(f"the chosen {name} {self.values[rate]:g} is at the edge of its grid")
        if self.constant == 1:
            warnings.append("degenerate: all training patches have the same features")
        return [*warnings, *few_images_warning(self.val.num_images)]


def _plain(values: Sequence[float]) -> list[float | None]:
    # JSON has no NaN: the IoU of an absent class is null.
    return [None if math.isnan(value) else value for value in values]
