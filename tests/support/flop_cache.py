"""Cache the FLOP count of a training step to speed up tests."""

from typing import Any

from torch import nn

from pretrain import step as steps


def cache_flop_counts() -> None:
    """Count the FLOPs only once for models with the same types of layers."""
    # Their sizes may differ, so a run may print the count of another one.
    count, flops = steps.count_training_flops, dict[frozenset[type], float]()

    def count_once(learner: nn.Module, views: Any, step: int) -> float:
        classes = frozenset(map(type, learner.modules()))
        if classes not in flops:
            flops[classes] = count(learner, views, step)
        return flops[classes]

    steps.count_training_flops = count_once
