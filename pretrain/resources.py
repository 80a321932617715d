"""Count the FLOPs of a training step, and measure how fast the device multiplies matrices."""

import copy
import time
from collections.abc import Sequence
from functools import cache
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

_PRODUCTS, _ROUNDS = 4, 3
_LARGE_SIDE, _SMALL_SIDE = 8_192, 768


def count_training_flops(learner: nn.Module, views: Any, step: int) -> float:
    """Count the floating-point operations of a micro-batch's forward and backward pass.

    Only matrix products and convolutions are counted. The learner is copied to the device "meta",
    whose tensors have no values, so that counting is fast and draws no random numbers. The logits
    of DINO's prototypes are counted twice, because the loss computes them twice. For ViT-S/16 with
    two global and eight local crops, computing DINO's logits a second time adds 0.3 % to the number
    of operations.

    Args:
        learner: The networks and their loss (a `Learner`), which are not changed.
        views: Views of the images of a micro-batch, in the form that `Learner.loss` accepts.
        step: Number of the step, from 0.
    """
    tensors = chain(learner.parameters(), learner.buffers())
    memo: dict[int, Any] = {id(tensor): _without_values(tensor) for tensor in tensors}
    learner_copy: Any = copy.deepcopy(learner, memo)
    views = tree_map_only(Tensor, _without_values, views)
    # The formula of torch is wrong for grouped convolutions, because it treats every convolution as
    # dense.
    backward: Any = torch.ops.aten.convolution_backward
    formulas = {backward: _count_convolution_backward}
    with (
        FlopCounterMode(display=False, custom_mapping=formulas) as counter,
        _ShapeOnlyResize(),
        torch.random.fork_rng(devices=[]),
    ):
        learner_copy.loss(learner_copy.student, views, step)[0].backward()
    return float(counter.get_total_flops())


def _without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype on the device "meta", which stores no values."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _ShapeOnlyResize(TorchDispatchMode):
    """A torch dispatch mode in which a bicubic resize computes only the shape of its result.

    Without this mode, torch computes all weights of the interpolation, even on the device "meta".
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.upsample_bicubic2d.default:
            images, size = args[:2]
            return images.new_empty((*images.shape[:2], *size))
        return func(*args, **(kwargs or {}))


def _count_convolution_backward(
    gradient: Sequence[int], _images: Any, filters: Sequence[int], *more: Any, **_out: Any
) -> int:
    """Count the FLOPs of a convolution's backward pass, given the shapes of its arguments.

    The gradient with respect to the images and the gradient with respect to the filters each need
    as many FLOPs as the forward pass. The last value in `more` states which of the two gradients
    are required.
    """
    is_required: Sequence[bool] = more[-1]
    positions = gradient[0] * prod(gradient[2:])
    return 2 * positions * prod(filters) * sum(is_required[:2])


@cache
def measure_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure how fast this device computes a large matrix product, in FLOP/s.

    The product is timed in three rounds, and the speed of the fastest round is returned.
    """
    side = _LARGE_SIDE if device.type == "cuda" else _SMALL_SIDE
    generator = torch.Generator(device).manual_seed(0)
    # The matrices contain random numbers, because processors multiply zeros faster.
    left, right = (
        torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    seconds = []
    for _ in range(_ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(left, right)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return _PRODUCTS * 2 * side**3 / min(seconds)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work. On a CPU, do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
