"""Where each storage is supposed to lie, and what happened on the device, by file and line."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
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


_ROOT = str(Path(__file__).parents[3])
_ITSELF = str(Path(__file__).parent)
# Who asks for a copy is of interest, not what makes it.
_TRANSFERS = f"{_ROOT}/ssl_bench/system/device.py"
_PACKAGES = tuple(f"{_ROOT}/{name}/" for name in ("ssl_bench", "pretrain", "probes"))


@dataclass
class Ledger:
    """Counts since the beginning, by "FILE:LINE what".

    Attributes:
        waits: The host waits until the device has done all it was given.
        uploads: Copies to the device from memory that is not pinned; all but the smallest of them
            wait as well.
        pinned_uploads: Copies to the device from pinned memory that do not wait.
        compiled: Modules that would have been compiled.
        forbids_waits: As `torch.cuda.set_sync_debug_mode("error")`.
        on_their_way: Copies to pinned memory that are not there yet, and what they will hold.
    """

    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    pinned_uploads: Counter[str] = field(default_factory=Counter)
    compiled: Counter[str] = field(default_factory=Counter)
    forbids_waits: bool = False
    on_their_way: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def wait(self, what: str, times: int = 1) -> None:
        """The host waits.

        Raises:
            RuntimeError: that is forbidden.
        """
        self._refuse_to_wait(what)
        self.waits[f"{where()} {what}"] += times
        self.arrive()

    def send_back(self, target: Tensor, source: Tensor) -> None:
        """Copy to pinned memory, which holds something else until the next wait."""
        self.on_their_way.append((target, source.detach().clone()))
        target.copy_(_wrong(source))

    def arrive(self) -> None:
        """What is on its way to pinned memory is there."""
        for target, source in self.on_their_way:
            target.copy_(source)
        self.on_their_way.clear()

    def upload(self, what: str, *, pinned: bool, waits: bool) -> None:
        """Something is copied to the device."""
        if waits:
            self._refuse_to_wait(what)
        (self.pinned_uploads if pinned and not waits else self.uploads)[f"{where()} {what}"] += 1

    def _refuse_to_wait(self, what: str) -> None:
        if self.forbids_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what} at {where()}")

    @contextmanager
    def counting(self) -> Iterator["Ledger"]:
        """Counts of what happens inside alone; complete once the block has ended."""
        names, found = ("waits", "uploads", "pinned_uploads", "compiled"), Ledger()
        before = {name: getattr(self, name).copy() for name in names}
        yield found
        for name in names:
            getattr(found, name).update(getattr(self, name) - before[name])


def _wrong(values: Tensor) -> Tensor:
    """Not one value is right."""
    if values.dtype == torch.bool:
        return ~values
    return values + 1 if not values.is_floating_point() else torch.full_like(values, torch.nan)


def where() -> str:
    """File and line of the project that is being executed."""
    frame, fallback = sys._getframe(1), "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGES) and name != _TRANSFERS:
            return f"{name[len(_ROOT) + 1 :]}:{frame.f_lineno}"
        if fallback == "?" and name.startswith(f"{_ROOT}/tests/") and not name.startswith(_ITSELF):
            fallback = f"{name[len(_ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback


LEDGER = Ledger()
