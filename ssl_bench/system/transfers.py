"""Copies between host and device that keep the host from waiting."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without a wait for what the device was given before.

    What comes from memory that is not pinned would wait; a pinned copy costs the host less.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in host memory, with one wait for all of them; those that are there stay."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    found = [on_its_way(tensor) for tensor in tensors]
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return found


def on_its_way(tensor: Tensor) -> Tensor:
    """The tensor in host memory, after the next wait for its device: not to be read before."""
    if not tensor.is_cuda:
        return tensor.cpu()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
