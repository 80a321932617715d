"""What a step needs of the machine: arithmetic, memory, and the largest batch that fits."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ssl_bench.system.device import free_gpu_memory
from ssl_bench.system.output import format_duration
from ssl_bench.system.process import free_host_memory, local_world_size

_PRODUCTS, _ROUNDS = 4, 3
_SIDE = {"cuda": 8_192}
_SMALL_SIDE = 768
_GIB = 2**30
# Of DINO's recipe.
_MOST = 1024
_STEPS_AN_EPOCH = 4
_SECONDS_A_STEP = 10.0
# FLOP/s that a step of a small ViT reaches on a core: 23 to 29e9 measured. Not measured here, since
# the same command on the same machine shall learn the same.
_CORE_RATE = 20e9
# Of the memory that is free: on the host other programs, images and copies of the state want some.
_SHARE = {"cuda": 0.8}
_HOST_SHARE = 0.5


def training_flops(learner: nn.Module, views: Any, step: int) -> float:
    """Floating-point operations of the products in a part of a step, forwards and backwards.

    Counted on a copy without values: no memory, no random number and no time of the device is
    taken. Logits that the loss computes twice count twice (0.3 % of ViT-S/16 with 2 + 8 crops).
    """
    return flops_and_kept_bytes(learner, views, step)[0]


def flops_and_kept_bytes(learner: nn.Module, views: Any, step: int) -> tuple[float, int]:
    """`training_flops` and `kept_bytes`, counted in one pass."""
    # torch's own formula for the gradient of filters takes every convolution for a dense one.
    backward: Any = torch.ops.aten.convolution_backward
    formula = {backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=formula) as counter:
        loss, kept = _hollow_loss(learner, views, step)
        loss.backward()
    return float(counter.get_total_flops()), kept


def kept_bytes(learner: nn.Module, views: Any, step: int) -> int:
    """Bytes that the forward pass keeps for the backward pass, counted on a copy without values.

    In float32, without what `torch.compile` spares.
    """
    return _hollow_loss(learner, views, step)[1]


def _hollow_loss(learner: nn.Module, views: Any, step: int) -> tuple[Tensor, int]:
    """Loss of a copy without values, and the bytes that are kept for its backward pass."""
    tensors = chain(learner.parameters(), learner.buffers())
    hollow: Any = copy.deepcopy(learner, memo={id(tensor): _hollow(tensor) for tensor in tensors})
    views, kept = tree_map_only(Tensor, _hollow, views), dict[int, Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        # Views of one storage are in memory once.
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with (
        saved_tensors_hooks(keep, lambda tensor: tensor),
        _ResizedShapes(),
        torch.random.fork_rng(devices=[]),
    ):
        loss = hollow.loss(hollow.student, views, step)[0]
    return loss, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class _ResizedShapes(TorchDispatchMode):
    """Resize what has no values to its shape alone; torch would go through every weight."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.upsample_bicubic2d.default:
            images, size = args[:2]
            return images.new_empty((*images.shape[:2], *size))
        return func(*args, **(kwargs or {}))


def _convolution_backward(
    gradient: Sequence[int], _images: Any, filters: Sequence[int], *more: Any, **_out: Any
) -> int:
    """Each of the gradients, of images and of filters, costs what the forward pass does."""
    is_asked: Sequence[bool] = more[-1]
    positions = gradient[0] * prod(gradient[2:])
    return 2 * positions * prod(filters) * sum(is_asked[:2])


@cache
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product: what this machine can do, not what its data sheet says."""
    side = _SIDE.get(device.type, _SMALL_SIDE)
    generator = torch.Generator(device).manual_seed(0)
    # Not zeros: processors run faster on them.
    left, right = (
        torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    seconds = []
    for _ in range(_ROUNDS):
        wait(device)
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(left, right)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return _PRODUCTS * 2 * side**3 / min(seconds)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hollow(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@dataclass(frozen=True)
class Needs:
    """What a step needs.

    Attributes:
        flops: For each image.
        image_bytes: For each image that is computed at once, kept for the backward pass.
        fixed_bytes: Weights, gradients, moments, a teacher, and the copy that is saved.
    """

    flops: float
    image_bytes: int
    fixed_bytes: int

    def gib(self, images: int) -> float:
        """Memory for so many images at once."""
        return (self.fixed_bytes + images * self.image_bytes) / _GIB


def fitted_batch(
    num_images: int, needs: Needs, device: torch.device, *, ranks: int = 1, parts: int = 1
) -> tuple[int, str]:
    """The largest batch, of those doubled from the smallest possible one, that fits; and why.

    It leaves at least four steps an epoch, is at most DINO's, takes half of the free memory (of a
    GPU .8), and on a CPU its step takes some ten seconds at most.

    Args:
        num_images: Of an epoch.
        needs: Of a step.
        device: Of this process.
        ranks: Processes that share a batch.
        parts: That each process computes its share in.
    """
    on_host = device.type != "cuda"
    free = (free_host_memory() / local_world_size() if on_host else free_gpu_memory(device)) / _GIB

    def objection(batch: int) -> str | None:
        memory = needs.gib(batch // (ranks * parts))
        seconds = needs.flops * batch / (ranks * torch.get_num_threads() * _CORE_RATE)
        if num_images // batch < _STEPS_AN_EPOCH:
            return f"{batch} would leave fewer than {_STEPS_AN_EPOCH} steps an epoch"
        if memory > free * _SHARE.get(device.type, _HOST_SHARE):
            return f"{batch} would take {memory:.1f} of {free:.1f} GiB that are free"
        if device.type == "cpu" and seconds > _SECONDS_A_STEP:
            return f"a step of {batch} would take about {format_duration(seconds)} on this CPU"
        return f"{_MOST:,} is the most that is taken unasked" if batch > _MOST else None

    batch = ranks * parts
    while (reason := objection(2 * batch)) is None:
        batch *= 2
    return batch, reason
