"""From places of the true class to accuracies: the chosen rates, how sure, what to be wary of."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from probes.classification.portions import Portion
from probes.classification.probe import TOPS
from probes.features.shots import over_draws
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Share
from ssl_bench.results import Baseline


@dataclass(frozen=True)
class ClassificationReport:
    """All that is known of the heads of one source.

    Attributes:
        hyperparameter: What the values are of: the learning rate, or another one that is chosen.
        ranks: How many classes each head puts before the true one, over the scored images; all
            where it diverged.
        labels: Of the scored images.
        held_out: As `ranks`, over the images held out of training; None where all were used.
        constant: Share of the channels, from 0 to 1, that are the same for all training images.
        missing: How many classes no training image has.
        shared: Details that are the same for all sources.
    """

    layer: int
    facet: str
    hyperparameter: str
    values: Sequence[float]
    num_classes: int
    ranks: Int64[Tensor, "values images"]
    labels: Int64[Tensor, " images"]
    held_out: Int64[Tensor, "values held_out_images"] | None
    constant: float
    missing: int
    shared: Mapping[str, Any]

    def scores(self) -> Iterator[Score]:
        """Top-1 and top-5 at the rate chosen without and with a look at the scored images.

        Always the best by top-1, of equally good ones the first.
        """
        oracle = _best(self.ranks)
        if self.held_out is not None:
            yield from self._scores("holdout", _best(self.held_out))
        yield from self._scores("oracle", oracle)

    def _scores(self, choice: str, rate: int) -> Iterator[Score]:
        details = {**self._details(rate), **self.shared}
        shown = self.labels.bincount().tolist()
        for top in TOPS:
            share = Share((self.ranks[rate] < top).numpy())
            has_meaning = self.num_classes >= top
            more: dict[str, Any] = {"undefined": f"fewer than {top} classes"}
            if has_meaning:
                more = Baseline.most_frequent(shown, top).as_details()
            yield Score(
                layer=self.layer,
                facet=self.facet,
                metric=f"top{top}_{choice}",
                value=share.value if has_meaning else math.nan,
                ci95=share.ci95() if has_meaning else None,
                num_images=len(share.hits),
                details=details | more,
                per_image=share.hits,
            )

    def _details(self, rate: int) -> dict[str, Any]:
        return {
            self.hyperparameter: self.values[rate],
            f"{self.hyperparameter}s": list(self.values),
            "top1_by_rate": _top1(self.ranks),
            "top1_by_rate_held_out": None if self.held_out is None else _top1(self.held_out),
            "num_classes": self.num_classes,
            "constant_features": self.constant == 1,
            "constant_channels_percent": round(100 * self.constant, 1),
            "warnings": self._warnings(rate),
        }

    def _warnings(self, rate: int) -> list[str]:
        warnings, name = [], self.hyperparameter.replace("_", " ")
        if len(self.values) > 1 and rate in (0, len(self.values) - 1):
            warnings.append(f"the chosen {name} {self.values[rate]:g} is at the edge of its grid")
        diverged = (self.ranks == self.num_classes).any(1).tolist()
        if any(diverged):
            names = (f"{r:g}" for r, gone in zip(self.values, diverged, strict=True) if gone)
            warnings.append(f"heads diverged: {name} {', '.join(names)}")
        if self.missing:
            warnings.append(f"{self.missing} of {self.num_classes} classes have no training image")
        if self.constant == 1:
            warnings.append("degenerate: all training images have the same features")
        return warnings


def scores_of(
    by_shots: Mapping[int, Sequence[Portion]],
    reports: Callable[[Portion], Iterator[ClassificationReport]],
) -> Iterator[Score]:
    """The scores of every source; their means over the draws where images are drawn."""
    for count, portions in by_shots.items():
        if not count:
            yield from (score for report in reports(portions[0]) for score in report.scores())
            continue
        # Heads of one draw at a time; their scores are little.
        by_draw = [[list(one.scores()) for one in reports(portion)] for portion in portions]
        for draws in zip(*by_draw, strict=True):
            yield from over_draws(draws, count)


def _best(ranks: Int64[Tensor, "values images"]) -> int:
    right = (ranks == 0).sum(1).tolist()
    return right.index(max(right))


def _top1(ranks: Int64[Tensor, "values images"]) -> list[float]:
    return (100 * (ranks == 0).double().mean(1)).tolist()
