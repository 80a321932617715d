"""Cache the FLOP counts of training steps, because counting takes most of a short run's time."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from pretrain import step as steps

# Attributes that are the same in all modules.
MODULE_ATTRIBUTES = vars(nn.Module()).keys()


def describe_shapes(learner: nn.Module) -> str:
    """Describe a learner as text: its layers, their options, and the shapes of its weights."""
    modules = [
        (name, type(module), {k: v for k, v in vars(module).items() if k not in MODULE_ATTRIBUTES})
        for name, module in learner.named_modules()
    ]
    weights = (*learner.named_parameters(), *learner.named_buffers())
    sizes = [(name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in weights]
    return f"{modules} {sizes}"


def cached_by_shape(count: Callable[..., Any]) -> Callable[..., Any]:
    flops: dict[Any, Any] = {}

    @wraps(count)
    def once(learner: nn.Module, views: list[Tensor], step: int) -> Any:
        sizes = tuple((view.shape, view.dtype) for view in views)
        is_exact = torch.are_deterministic_algorithms_enabled()
        key = (describe_shapes(learner), sizes, step, is_exact)
        if key not in flops:
            flops[key] = count(learner, views, step)
        return flops[key]

    return once


def cache_flop_counts() -> None:
    """Count the FLOPs of a training step only once for learners with the same layers and shapes.

    The cached counts are also used in processes that are forked from this process.
    """
    steps.count_training_flops = cached_by_shape(steps.count_training_flops)
