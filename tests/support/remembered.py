"""Count the FLOPs of a step once for all runs of one shape; a short run would take most of it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from pretrain import step as steps

OF_EVERY_MODULE = vars(nn.Module()).keys()


def shape(learner: nn.Module) -> str:
    """Layers, their options and the sizes of their weights; no value of a weight."""
    modules = [
        (name, type(module), {k: v for k, v in vars(module).items() if k not in OF_EVERY_MODULE})
        for name, module in learner.named_modules()
    ]
    weights = (*learner.named_parameters(), *learner.named_buffers())
    sizes = [(name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in weights]
    return f"{modules} {sizes}"


def remembered(count: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[Any, Any] = {}

    @wraps(count)
    def once(learner: nn.Module, views: list[Tensor], step: int) -> Any:
        sizes = tuple((view.shape, view.dtype) for view in views)
        is_exact = torch.are_deterministic_algorithms_enabled()
        key = (shape(learner), sizes, step, is_exact)
        if key not in found:
            found[key] = count(learner, views, step)
        return found[key]

    return once


def remember_needs() -> None:
    """For this process and those that it forks."""
    steps.count_training_flops = remembered(steps.count_training_flops)
