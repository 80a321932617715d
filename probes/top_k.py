"""Compute top-k accuracy, and average it over several random samples of training images."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64
from torch import Tensor

from ssl_bench.evaluation import Score
from ssl_bench.intervals import Proportion, mean_estimate
from ssl_bench.results import Baseline

TOP_K = (1, 5)
"""Values of k for the reported top-k accuracies."""


def top_k_score(
    layer: int,
    facet: str,
    metric: str,
    hits: Bool[Tensor, " images"],
    labels: Int64[Tensor, " images"],
    *,
    top: int,
    num_classes: int,
    details: Mapping[str, Any],
) -> Score:
    """Return a score with the top-k accuracy in percent, or NaN if there are fewer than k classes.

    The details of the score contain the accuracy of a baseline that always predicts the k most
    frequent classes.

    Args:
        layer: Layer of the score.
        facet: Facet (kind of feature) of the score.
        metric: Name of the metric.
        hits: Whether the true class of each image is among its first k predictions.
        labels: True class of each image.
        top: Value of k.
        num_classes: Number of classes.
        details: Further details to store with the score.
    """
    proportion, value, ci95 = Proportion(hits.numpy()), math.nan, None
    own_details: dict[str, Any] = {"undefined": f"fewer than {top} classes"}
    if num_classes >= top:
        value, ci95 = proportion.value, proportion.ci95()
        own_details = Baseline.most_frequent(labels.bincount().tolist(), top).as_details()
    details = {**details, **own_details}
    return Score(layer, facet, metric, value, ci95, len(labels), details, per_image=proportion.hits)


def shot_metric_name(metric: str, shots: int) -> str:
    """Append the number of shots to the name of a metric, as in "top1_k1_5shot".

    The number of shots is the number of training images of each class.
    """
    return f"{metric}_{shots}shot"


def average_over_draws(draws: Sequence[Sequence[Score]], shots: int) -> Iterator[Score]:
    """Yield the mean of each score over several draws (random samples) of training images.

    The confidence interval of the mean is Student's t interval over the draws. The interval over
    the scored images is stored as the detail "ci95_over_images". If a detail differs between the
    draws, it becomes a list with one item for each draw, and its name gets the suffix "_by_draw".

    Args:
        draws: Scores of each draw. All draws have the same metrics in the same order.
        shots: Number of training images of each class.
    """
    for scores in zip(*draws, strict=True):
        first, by_draw = scores[0], [score.value for score in scores]
        hits = np.stack([np.asarray(score.per_image) for score in scores], 1)  # images draws
        is_defined = not math.isnan(first.value)
        over_images = mean_estimate(100 * hits.mean(1)).ci95() if is_defined else None
        details = {"shots": shots, "value_by_draw": by_draw, "ci95_over_images": over_images}
        for name, value in first.details.items():
            values = [score.details[name] for score in scores]
            if name == "warnings":
                details[name] = list(dict.fromkeys(line for lines in values for line in lines))
            elif name == "train_seconds":
                details[name] = round(sum(values), 3)
            elif all(other == value for other in values):
                details[name] = value
            else:
                details[f"{name}_by_draw"] = values
        yield replace(
            first,
            metric=shot_metric_name(first.metric, shots),
            value=float(np.mean(by_draw)),
            ci95=mean_estimate(np.array(by_draw)).ci95() if is_defined else None,
            details=details,
            per_image=hits,
            per_image_kind="hits_of_draws",
        )
