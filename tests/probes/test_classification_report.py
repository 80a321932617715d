"""What linear classification says of its heads: choice, intervals, warnings."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from probes.classification.scores import choice_scores
from ssl_bench.evaluation import Score
from ssl_bench.metrics import class_rank


def scores(**changes: Any) -> list[Score]:
    """Three heads and four images: 1, 2 and 2 are right; of the two held out 2, 1 and 0."""
    values: dict[str, Any] = {
        "hyperparameter": "c_value", "values": (0.1, 1.0, 10.0),
        "num_classes": 7,
        "ranks": torch.tensor([[0, 4, 5, 6], [0, 0, 5, 4], [0, 0, 2, 1]]),
        "held_out": torch.tensor([[0, 0], [0, 3], [1, 1]]),
        "constant": 0.25, "missing": 0, "shared": {"more": 1},
    }  # fmt: skip
    given = {**values, **changes}
    # Three of four images are of one class.
    labels = torch.arange(given["ranks"].shape[1]) // 3
    return list(choice_scores((4, "cls"), **given, labels=labels))


def test_held_out_images_choose_the_rate_and_beside_it_stands_the_best_of_the_scored_ones():
    found = {score.metric: score for score in scores()}

    values = {metric: (score.value, score.details["c_value"]) for metric, score in found.items()}
    assert [s.details["baseline"]["value"] for s in found.values()] == [75.0, 100.0] * 2
    # The first of equally good ones is the oracle's; top-5 does not choose.
    assert values == {
        "top1_holdout": (25.0, 0.1), "top5_holdout": (50.0, 0.1),
        "top1_oracle": (50.0, 1.0), "top5_oracle": (75.0, 1.0),
    }  # fmt: skip
    assert found["top5_holdout"].per_image is not None
    assert found["top5_holdout"].per_image.tolist() == [True, True, False, False]
    details = found["top1_oracle"].details
    assert details["top1_by_rate"] == [25.0, 50.0, 50.0]
    assert details["top1_by_rate_held_out"] == [100.0, 50.0, 0.0]
    assert (details["constant_channels_percent"], details["more"]) == (25.0, 1)


def test_without_held_out_images_there_is_the_oracle_alone():
    assert [s.metric for s in scores(held_out=None)] == ["top1_oracle", "top5_oracle"]


def test_an_interval_is_that_of_a_share_of_the_scored_images():
    hits = np.random.default_rng(0).integers(0, 2, 301)
    ranks = torch.from_numpy(1 - hits)[None]
    score = scores(values=(1.0,), ranks=ranks, held_out=None)[0]

    exact = binomtest(int(hits.sum()), 301).proportion_ci()
    assert score.ci95 == pytest.approx((100 * exact.low, 100 * exact.high))
    assert score.num_images == 301


def test_what_to_be_wary_of_is_said():
    warnings = [score.details["warnings"] for score in scores()]
    assert warnings[0] == ["the chosen c value 0.1 is at the edge of its grid"]
    assert warnings[2] == []
    last = scores(held_out=torch.tensor([[1], [1], [0]]))
    (edge,) = last[0].details["warnings"]
    assert edge == "the chosen c value 10 is at the edge of its grid"

    ranks = torch.tensor([[0, 1], [0, 0], [7, 7]])
    spoilt = scores(
        ranks=ranks, held_out=None, missing=2, constant=1.0, hyperparameter="learning_rate"
    )
    assert spoilt[0].details["warnings"] == [
        "heads diverged: learning rate 10",
        "2 of 7 classes have no training image",
        "degenerate: all training images have the same features",
    ]


def test_the_lower_of_equal_classes_counts_and_nothing_is_right_that_is_no_number():
    logits = torch.tensor([[3.0, 1.0, 3.0], [3.0, 1.0, 3.0], [1.0, 2.0, 3.0], [math.nan, 2.0, 3.0],
                           [math.inf, 0.0, 0.0]])  # fmt: skip

    ranks = class_rank(torch.stack([logits, -logits]), torch.tensor([0, 2, 0, 2, 0]))

    assert ranks.tolist() == [[0, 1, 2, 3, 3], [1, 2, 0, 3, 3]]
