"""Every operator that is executed: may it run, does the host wait, where is the result."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.simulated_cuda.ledger import (
    KIND,
    LEDGER,
    Place,
    SimulatedDeviceError,
    is_on_device,
    place_named,
    place_of,
    put,
    storage_of,
    tensors_in,
    where,
)

# Operators that read a value or a number of values back, and how often. Of torch 2.15,
# aten/src/ATen/native/cuda; the linear algebra reads whether it converged.
WAITS = {
    "aten::_local_scalar_dense": 1,
    "aten::equal": 1,
    "aten::nonzero": 1,
    "aten::argwhere": 1,
    "aten::masked_select": 1,
    # The smallest and the largest value.
    "aten::bincount": 2,
    "aten::histc": 1,
    "aten::_unique2": 1,
    "aten::unique_dim": 1,
    "aten::unique_consecutive": 1,
    "aten::repeat_interleave": 1,
    "aten::_linalg_check_errors": 1,
    "aten::_linalg_svd": 1,
    "aten::_linalg_eigh": 1,
    "aten::linalg_eig": 1,
    "aten::linalg_lstsq": 1,
    # How often each matrix is squared.
    "aten::linalg_matrix_exp": 1,
}
INDEXING = frozenset(
    f"aten::{name}"
    for name in (
        "index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_",
        "_unsafe_index_put",
    )
)  # fmt: skip
# A scalar of the host may stand beside tensors of the device here too.
_TAKES_SCALARS = INDEXING | frozenset(
    f"aten::{name}"
    for name in (
        "fill_", "fill", "masked_fill", "masked_fill_", "where", "index_fill_", "lerp",
        "_foreach_mul", "_foreach_mul_", "_foreach_add_", "_foreach_div", "_foreach_div_",
    )
)  # fmt: skip
# Neither compute nor copy anything.
BOOKKEEPING = frozenset(
    f"aten::{name}"
    for name in ("detach", "detach_", "alias", "lift_fresh", "is_pinned", "_pin_memory", "set_")
)


@cache
def written_by(function: Any) -> tuple[bool, ...]:
    """Whether an operator writes to each of its arguments."""
    infos = (argument.alias_info for argument in function._schema.arguments)
    return tuple(info is not None and info.is_write for info in infos)


@cache
def has_kernel(function: Any) -> bool:
    """For CUDA, in this build of torch."""
    ask: Any = torch._C
    schema, overload = function._schema, function._overloadname
    name = schema.name if overload == "default" else f"{schema.name}.{overload}"
    return (
        "_for_cpu" in name
        or ask._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        or ask._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")
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
            name = func._schema.name
            if name == "aten::copy_":
                if _is_on_its_way(args, options):
                    return args[0]
            elif name not in BOOKKEEPING:
                _check(func, args, options, given)
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
    function: Any, args: Sequence[Any], options: dict[str, Any], given: Sequence[Tensor]
) -> None:
    name = function._schema.name
    for tensor in given:
        if place_of(tensor) is Place.UNDECIDED:
            put(tensor, Place.DEVICE)
    if KIND[0] == "cuda" and not has_kernel(function):
        raise SimulatedDeviceError(f"{name} has no CUDA kernel, at {where()}")
    is_own_check = _thread.checks_itself and name == "aten::_local_scalar_dense"
    knows_size = name == "aten::repeat_interleave" and options.get("output_size") is not None
    if name in WAITS and not (is_own_check or knows_size):
        LEDGER.wait(name.removeprefix("aten::"), WAITS[name])
    indices = [i for i in args[1] if i is not None] if name in INDEXING else []
    _check_indices(args, indices)
    strangers = _strangers(function, args, given, {id(index) for index in indices})
    if strangers:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strangers)
        raise SimulatedDeviceError(
            f"{name}: expected all tensors to be on the same device, found {KIND[0]}:0 "
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
    function: Any, args: Sequence[Any], given: Sequence[Tensor], indices: set[int]
) -> list[Tensor]:
    """Tensors of the host that may not stand beside those of the device."""
    # Beside tensors of the device those without axes may lie on the host in these.
    takes_scalars = torch.Tag.pointwise in function.tags or function._schema.name in _TAKES_SCALARS
    written = {
        id(tensor)
        for argument, writes in zip(args, written_by(function), strict=False)
        if writes
        for tensor in tensors_in(argument)
    }
    return [
        tensor
        for tensor in given
        if place_of(tensor) not in _HERE
        and id(tensor) not in indices
        and (id(tensor) in written or tensor.ndim > 0 or not takes_scalars)
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
