"""Where each storage is supposed to lie."""

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

# The true answer, which the modes cannot reach.
_true_device = torch._C.TensorBase.device.__get__  # pyright: ignore[reportAttributeAccessIssue]


# The type of the device that is simulated.
KIND = ["cuda"]


class SimulatedDeviceError(RuntimeError):
    """What a real device would refuse."""


class Place(Enum):
    """UNDECIDED is what torch makes inside of an operator: it lies with what it first meets."""

    HOST = auto()
    PINNED = auto()
    DEVICE = auto()
    UNDECIDED = auto()


def place_of(tensor: Tensor) -> Place:
    """Of the storage; what no storage in memory stands behind counts as the host's."""
    storage = storage_of(tensor)
    return Place.HOST if storage is None else getattr(storage, "place", Place.HOST)


def put(tensor: Tensor, place: Place) -> Tensor:
    """Say where a tensor, and whatever shares its storage, lies from now on."""
    storage = storage_of(tensor)
    if storage is not None:
        # torch keeps a storage's Python object, with what is written on it, as long as the storage.
        vars(storage)["place"] = place
    return tensor


def storage_of(tensor: Tensor) -> Any:
    """The storage, if it is memory of this process."""
    if _true_device(tensor).type != "cpu" or tensor.layout is not torch.strided:
        return None
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None


def is_on_device(tensor: Tensor) -> bool:
    return place_of(tensor) is Place.DEVICE


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has values; those on "meta" have none and are left alone."""
    return _true_device(tensor).type == "cpu"


def names_device(device: Any) -> bool:
    """Whether what stands for a device in a call of torch is the simulated one."""
    if device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == KIND[0]


def place_named(device: Any) -> Place:
    return Place.DEVICE if names_device(device) else Place.HOST


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results, however they are nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
