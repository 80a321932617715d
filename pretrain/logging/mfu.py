"""How much of the machine a step uses: the model's arithmetic beside that of a plain product."""

import copy
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

_PRODUCTS, _ROUNDS = 4, 3
_SIDE = {"cuda": 8_192}
_SMALL_SIDE = 768

Shape = Sequence[int]


def training_flops(learner: nn.Module, views: Any, step: int) -> float:
    """Floating-point operations of the products in a part of a step, forwards and backwards.

    Counted on a copy without values: no memory, no random number and no time of the device is
    taken. Logits that the loss computes twice count twice (0.3 % of ViT-S/16 with 2 + 8 crops).
    """
    with counting() as counter:
        _hollow_loss(learner, views, step).backward()
    return float(counter.get_total_flops())


def kept_bytes(learner: nn.Module, views: Any, step: int) -> int:
    """Bytes that the forward pass keeps for the backward pass, counted on a copy without values.

    In float32, without what `torch.compile` spares.
    """
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Views of one storage are in memory once.
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _hollow_loss(learner, views, step)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _hollow_loss(learner: nn.Module, views: Any, step: int) -> Tensor:
    tensors = chain(learner.parameters(), learner.buffers())
    hollow: Any = copy.deepcopy(learner, memo={id(tensor): _hollow(tensor) for tensor in tensors})
    with torch.random.fork_rng(devices=[]):
        return hollow.loss(hollow.student, tree_map_only(Tensor, _hollow, views), step)[0]


def counting() -> FlopCounterMode:
    """A counter of products that counts those of depthwise convolutions right.

    torch's own formula for the gradient of filters takes every convolution for a dense one.
    """
    backward: Any = torch.ops.aten.convolution_backward
    return FlopCounterMode(display=False, custom_mapping={backward: _convolution_backward})


def _convolution_backward(
    gradient: Shape, _images: Shape, filters: Shape, *more: Any, **_out: Any
) -> int:
    """Each of the gradients, of images and of filters, costs what the forward pass does."""
    is_asked: Sequence[bool] = more[-1]
    positions = gradient[0] * prod(gradient[2:])
    return 2 * positions * prod(filters) * sum(is_asked[:2])


@cache
def product_rate(
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """FLOP/s of a large matrix product: what this machine can do, not what its data sheet says."""
    side = _SIDE.get(device.type, _SMALL_SIDE)
    generator = torch.Generator(device).manual_seed(0)
    # Not zeros: processors run faster on them.
    left, right = (
        torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    seconds = min(_seconds_of_products(left, right, clock) for _ in range(_ROUNDS))
    return _PRODUCTS * 2 * side**3 / seconds


def _seconds_of_products(left: Tensor, right: Tensor, clock: Callable[[], float]) -> float:
    wait(left.device)
    start = clock()
    for _ in range(_PRODUCTS):
        torch.mm(left, right)
    wait(left.device)
    return clock() - start


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hollow(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
