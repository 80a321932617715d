"""Optimizers of a bank of heads: one step moves all of them, each at a rate of its own.

`update` moves a parameter in place; `rates` broadcasts over it, steps count from one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_DROP_AT, _DROP_TO = 0.8, 0.1


@dataclass(frozen=True)
class HeadAdamW:
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, in the order of operations of
    `torch.optim.AdamW`.
    """

    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        rates: Tensor,
        step: int,
    ) -> None:
        beta1, beta2 = self.betas
        first = state.setdefault("first", torch.zeros_like(parameter))
        second = state.setdefault("second", torch.zeros_like(parameter))
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (second / (1 - beta2**step)).sqrt_().add_(self.epsilon)
        parameter.mul_(1 - rates * self.weight_decay)
        parameter.sub_(rates / (1 - beta1**step) * first / deviation)


@dataclass(frozen=True)
class SGD:
    """Momentum without dampening, as `torch.optim.SGD`."""

    weight_decay: float = 1e-4
    momentum: float = 0.9

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        rates: Tensor,
        step: int,
    ) -> None:
        del step
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(self.momentum).add_(gradient).add_(parameter, alpha=self.weight_decay)
        parameter.sub_(rates * velocity)


@dataclass(frozen=True)
class LARS:
    """Momentum on gradients that are brought to a share of the length of what they move.

    For parameters whose first two axes are sources and rates: each head has lengths of its own. A
    vector of a head, such as its bias, moves by its gradient as it is.

    Source: You et al., https://arxiv.org/abs/1708.03888, as `util/lars.py` of
    https://github.com/billpsomas/efficient-probing (b8f4fb84) has it, without weight decay.
    """

    momentum: float = 0.9
    trust: float = 0.001

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        rates: Tensor,
        step: int,
    ) -> None:
        del step
        if parameter.ndim > 3:
            axes = tuple(range(2, parameter.ndim))
            length, change = (one.square().sum(axes, True).sqrt() for one in (parameter, gradient))
            known = (length > 0) & (change > 0)
            gradient = gradient * torch.where(known, self.trust * length / change, 1.0)
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(self.momentum).add_(gradient)
        parameter.sub_(rates * velocity)


HeadOptimizer = HeadAdamW | SGD | LARS


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a share of its peak: linear warm-up, then one of four shapes.

    Attributes:
        shape: "cosine" and "linear" fall to zero, "constant" stays, "drop" stays until four fifths
            of the steps behind the warm-up are done, and is a tenth then.
        warmup: Share of the steps.
    """

    shape: str = "cosine"
    warmup: float = 0.05

    def factor(self, step: int, num_steps: int) -> float:
        warmup_steps = self.warmup * num_steps
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / (num_steps - warmup_steps)
        shapes = {
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "drop": 1.0 if done < _DROP_AT else _DROP_TO,
        }
        return shapes.get(self.shape, 1.0)
