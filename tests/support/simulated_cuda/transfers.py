"""Copies between host and device, and what each of them costs the host."""

from typing import Any

import torch
from torch import Tensor

from tests.support.simulated_cuda.ledger import LEDGER, where
from tests.support.simulated_cuda.places import (
    KIND,
    Place,
    SimulatedDeviceError,
    is_on_device,
    place_named,
    place_of,
    put,
)


def count_transfer(source: Place, target: Place, *, non_blocking: bool) -> None:
    """Enter one copy into the ledger.

    Raises:
        SimulatedDeviceError: the host goes on, and reads memory that is not written yet.
    """
    if source is Place.DEVICE and target is not Place.DEVICE:
        if not non_blocking:
            LEDGER.wait("copy to the host")
        elif target is not Place.PINNED:
            raise SimulatedDeviceError(
                f"non_blocking copy to memory that is not pinned, read before it is there, at "
                f"{where()}"
            )
    elif source is not Place.DEVICE and target is Place.DEVICE:
        pinned = source is Place.PINNED
        LEDGER.upload("copy to the device", pinned=pinned, waits=not non_blocking)


def refuse_float64(tensor: Tensor, dtype: torch.dtype | None, place: Place) -> None:
    """What Metal has not.

    Raises:
        TypeError: as torch does.
    """
    after = dtype or tensor.dtype
    if KIND[0] == "mps" and place is Place.DEVICE and after is torch.float64:
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            f"float64. Please use float32 instead. At {where()}"
        )


def moved(
    tensor: Tensor,
    device: Any,
    dtype: torch.dtype | None = None,
    *,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """`Tensor.to` between places; a tensor that is there already stays the same one."""
    options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
    before = place_of(tensor)
    after = before if device is None else place_named(device)
    refuse_float64(tensor, dtype, after)
    crosses = (before is Place.DEVICE) != (after is Place.DEVICE)
    if crosses:
        count_transfer(before, after, non_blocking=non_blocking)
    found = tensor.to(dtype=dtype or tensor.dtype, copy=copy or crosses, **options)
    if not crosses:
        return found
    if found.requires_grad:
        # A gradient goes back to where its value came from.
        found.register_hook(lambda gradient: put(gradient.clone(), before))
    return put(found, after)


def on_host(tensor: Tensor) -> Tensor:
    """For what reads values one by one: the tensor, with the wait for them entered."""
    if is_on_device(tensor):
        LEDGER.wait("values read one by one")
    return tensor
