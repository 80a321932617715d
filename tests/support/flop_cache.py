"""Cache the FLOP counts of training steps, because counting takes most of a short run's time."""

from typing import Any

from torch import nn

from pretrain import step as steps


def cache_flop_counts() -> None:
    """Count the FLOPs of a training step only once for learners with the same classes of layers.

    Other runs print the count of the first one, even if their sizes differ. The cached counts are
    also used in processes that are forked from this process.
    """
    count, flops = steps.count_training_flops, dict[frozenset[type], float]()

    def count_once(learner: nn.Module, views: Any, step: int) -> float:
        classes = frozenset(map(type, learner.modules()))
        if classes not in flops:
            flops[classes] = count(learner, views, step)
        return flops[classes]

    steps.count_training_flops = count_once
