"""Every operator that is executed: may it run, does the host wait, where is the result."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.simulated_cuda.ledger import LEDGER, where
from tests.support.simulated_cuda.places import (
    KIND,
    Place,
    SimulatedDeviceError,
    place_of,
    put,
    storage_of,
    tensors_in,
)
from tests.support.simulated_cuda.rules import BOOKKEEPING, Operator, operator_of
from tests.support.simulated_cuda.transfers import count_transfer, refuse_float64

_HERE = (Place.DEVICE, Place.UNDECIDED)


class _Thread(threading.local):
    """What this thread is in the middle of.

    Attributes:
        making: Where a function of torch that is given no tensor is to put its result.
        checks_itself: The function looks at values on the host which a device is not asked for.
    """

    making: Place | None = None
    checks_itself: bool = False


_thread = _Thread()


@contextmanager
def making(place: Place) -> Iterator[None]:
    """Tensors that come from none are put there."""
    before, _thread.making = _thread.making, place
    try:
        yield
    finally:
        _thread.making = before


@contextmanager
def uncounted_checks() -> Iterator[None]:
    """Values that are read inside are read on the host alone, not on a device."""
    before, _thread.checks_itself = _thread.checks_itself, True
    try:
        yield
    finally:
        _thread.checks_itself = before


class Operators(TorchDispatchMode):
    """Sees forward and backward passes alike."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        options = kwargs or {}
        given = list(tensors_in([*args, options]))
        places = [place_of(tensor) for tensor in given]
        if Place.DEVICE in places:
            operator = operator_of(func)
            if operator.name == "aten::copy_":
                if _is_on_its_way(args, options):
                    return args[0]
            elif operator.name not in BOOKKEEPING:
                _check(operator, args, options, given)
        if func is torch.ops.aten.mm.dtype:  # no other device has it
            func, args = torch.ops.aten.mm.default, [x.to(args[2]) for x in args[:2]]
        found = func(*args, **options)
        _place_results(found, given, places)
        return found


def _is_on_its_way(args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Enter a copy; whether it arrives with the next wait, and not now."""
    target, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else options.get("non_blocking", False))
    places = place_of(source), place_of(target)
    count_transfer(*places, non_blocking=non_blocking)
    if places != (Place.DEVICE, Place.PINNED) or not non_blocking:
        return False
    LEDGER.send_back(target, source)
    return True


def _check(
    operator: Operator, args: Sequence[Any], options: dict[str, Any], given: Sequence[Tensor]
) -> None:
    LEDGER.num_operators += 1
    for tensor in given:
        if place_of(tensor) is Place.UNDECIDED:
            put(tensor, Place.DEVICE)
    if KIND[0] == "cuda" and not operator.has_kernel:
        raise SimulatedDeviceError(f"{operator.name} has no CUDA kernel, at {where()}")
    is_own_check = _thread.checks_itself and operator.name == "aten::_local_scalar_dense"
    if (times := operator.waits(options)) and not is_own_check:
        LEDGER.wait(operator.name.removeprefix("aten::"), times)
    indices = [i for i in args[1] if i is not None] if operator.is_indexing else []
    _check_indices(args, indices)
    strangers = _strangers(operator, args, given, {id(index) for index in indices})
    if strangers:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strangers)
        raise SimulatedDeviceError(
            f"{operator.name}: expected all tensors to be on the same device, found {KIND[0]}:0 "
            f"and cpu (of shape {shapes}) at {where()}"
        )


def _check_indices(args: Sequence[Any], indices: Sequence[Tensor]) -> None:
    """Indices of the host are uploaded, masks must be counted first.

    Raises:
        SimulatedDeviceError: a tensor of the host is indexed by one of the device.
    """
    for index in indices:
        is_here, target = place_of(index) in _HERE, place_of(args[0])
        if target not in _HERE:
            if is_here:
                raise SimulatedDeviceError(
                    "indices should be either on cpu or on the same device as the indexed tensor "
                    f"(cpu), at {where()}"
                )
        elif not is_here:
            LEDGER.upload("an index of the host", pinned=False, waits=True)
        elif index.dtype in (torch.bool, torch.uint8) and not _fills(args):
            LEDGER.wait("index with a mask")


def _fills(args: Sequence[Any]) -> bool:
    """Whether one value is written wherever a mask says so, which needs no count."""
    return len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1


def _strangers(
    operator: Operator, args: Sequence[Any], given: Sequence[Tensor], indices: set[int]
) -> list[Tensor]:
    """Tensors of the host that may not stand beside those of the device."""
    written = {
        id(tensor)
        for argument, writes in zip(args, operator.writes, strict=False)
        if writes
        for tensor in tensors_in(argument)
    }
    return [
        tensor
        for tensor in given
        if place_of(tensor) not in _HERE
        and id(tensor) not in indices
        and (id(tensor) in written or tensor.ndim > 0 or not operator.takes_scalars)
    ]


def _place_results(found: Any, given: Sequence[Tensor], places: Sequence[Place]) -> None:
    """What is new lies where its sources do; what shares memory lies there already."""
    known = {id(storage) for storage in map(storage_of, given) if storage is not None}
    for tensor in tensors_in(found):
        storage = storage_of(tensor)
        if storage is None or id(storage) in known:
            continue
        place = _place_of_new(places)
        refuse_float64(tensor, None, place)
        put(tensor, place)


def _place_of_new(sources: Sequence[Place]) -> Place:
    if Place.DEVICE in sources:
        return Place.DEVICE
    if not sources and _thread.making is not None:
        return _thread.making
    return Place.UNDECIDED if all(one is Place.UNDECIDED for one in sources) else Place.HOST
