"""Where a tensor is supposed to lie, what each operator may do there, and what happened, by line.

A `Ledger` counts what makes the host wait and what is copied. `Operators` sees every operator that
is executed, forwards and backwards: may it run, does the host wait, where is the result. `Asking`
stands before functions of torch that speak of a device: they answer, move and make as if there were
one.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# The true answer, which the modes cannot reach.
_true_device = torch._C.TensorBase.device.__get__


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
    return _place_of_storage(storage_of(tensor))


def _place_of_storage(storage: Any) -> Place:
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


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in arguments or results, however they are nested."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


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
        on_their_way: Copies to pinned memory that are not there yet, and what they will hold.
    """

    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    pinned_uploads: Counter[str] = field(default_factory=Counter)
    on_their_way: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def wait(self, what: str, times: int = 1) -> None:
        """The host waits."""
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
        (self.pinned_uploads if pinned and not waits else self.uploads)[f"{where()} {what}"] += 1

    @contextmanager
    def counting(self) -> Iterator["Ledger"]:
        """Counts of what happens inside alone; complete once the block has ended."""
        names, found = ("waits", "uploads", "pinned_uploads"), Ledger()
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


_HERE = (Place.DEVICE, Place.UNDECIDED)


class _Thread(threading.local):
    """What this thread is in the middle of.

    Attributes:
        making: Where a function of torch that is given no tensor is to put its result.
    """

    making: Place | None = None


_thread = _Thread()


@contextmanager
def making(place: Place) -> Iterator[None]:
    """Tensors that come from none are put there."""
    before, _thread.making = _thread.making, place
    try:
        yield
    finally:
        _thread.making = before


class Operators(TorchDispatchMode):
    """Sees forward and backward passes alike."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        options = kwargs or {}
        given = tensors_in((*args, options))
        storages = [storage_of(tensor) for tensor in given]
        places = [_place_of_storage(storage) for storage in storages]
        if Place.DEVICE in places:
            name = func._schema.name
            if name == "aten::copy_":
                if _is_on_its_way(args, options):
                    return args[0]
            elif name not in BOOKKEEPING:
                _check(func, args, options, given, places)
        if func is torch.ops.aten.mm.dtype:  # no other device has it
            func, args = torch.ops.aten.mm.default, [x.to(args[2]) for x in args[:2]]
        found = func(*args, **options)
        _place_results(found, storages, places)
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
    function: Any,
    args: Sequence[Any],
    options: dict[str, Any],
    given: Sequence[Tensor],
    places: Sequence[Place],
) -> None:
    name = function._schema.name
    for tensor, place in zip(given, places, strict=True):
        if place is Place.UNDECIDED:
            put(tensor, Place.DEVICE)
    if KIND[0] == "cuda" and not has_kernel(function):
        raise SimulatedDeviceError(f"{name} has no CUDA kernel, at {where()}")
    knows_size = name == "aten::repeat_interleave" and options.get("output_size") is not None
    if name in WAITS and not knows_size:
        LEDGER.wait(name.removeprefix("aten::"), WAITS[name])
    indices = [i for i in args[1] if i is not None] if name in INDEXING else []
    _check_indices(args, indices)
    if all(place in _HERE for place in places):
        return
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


def _place_results(found: Any, sources: Sequence[Any], places: Sequence[Place]) -> None:
    """What is new lies where its sources do; what shares their storages lies there already."""
    known = {id(storage) for storage in sources}
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


Arguments = Sequence[Any]
Options = dict[str, Any]
# The index of the current device, which `torch.cuda.set_device` sets.
CURRENT = [0]
# These are given values of Python or of the host, which a device must be sent.
_CARRY_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)


class Asking(TorchFunctionMode):
    """Stands before torch's functions and its tensors' methods and attributes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        del types
        options = dict(kwargs or {})
        special = _SPECIAL.get(func)
        if special is not None and (
            not args or not isinstance(args[0], Tensor) or is_real(args[0])
        ):
            return special(func, args, options)
        return _called(func, args, options)


def _called(func: Callable, args: Arguments, options: Options) -> Any:
    """Any other function; where it names the device, its result lies there."""
    device = options.get("device")
    if device is None:
        has_sources = bool(tensors_in((*args, options)))
        return func(*args, **options) if has_sources else _made(func, args, options, Place.HOST)
    if not names_device(device) and torch.device(device).type != "cpu":
        return func(*args, **options)
    if names_device(device):
        options["device"] = "cpu"
    return _made(func, args, options, place_named(device))


def _made(func: Callable, args: Arguments, options: Options, place: Place) -> Any:
    """The result of a function that makes tensors, put where it was asked for."""
    _check_generator(func, options, place)
    pinned = options.pop("pin_memory", False)
    if func in _CARRY_VALUES and (moves := _carried(args, options, place)) is not None:
        return moves
    with making(place):
        found = func(*args, **options)
    if isinstance(found, Tensor):
        refuse_float64(found, None, place)
    if isinstance(found, Tensor) and (pinned or options.get("device") is not None):
        put(found, Place.PINNED if pinned else place)
    return found


def _carried(args: Arguments, options: Options, place: Place) -> Any:
    """Enter what values must be sent; a tensor that is given is moved as by `to`."""
    if args and isinstance(args[0], Tensor):
        return moved(args[0], KIND[0] if place is Place.DEVICE else "cpu", options.get("dtype"))
    if place is Place.DEVICE:
        LEDGER.upload("values of Python", pinned=False, waits=True)
    return None


def _check_generator(func: Callable, options: Mapping[str, Any], place: Place) -> None:
    generator = options.get("generator")
    if generator is None:
        return
    wanted = KIND[0] if place is Place.DEVICE else "cpu"
    if generator.device.type != wanted:
        name = getattr(func, "__name__", func)
        raise SimulatedDeviceError(
            f"torch.{name}: expected a '{wanted}' device type for generator but found "
            f"'{generator.device.type}', at {where()}"
        )


def _device(func: Callable, args: Arguments, options: Options) -> torch.device:
    true = func(*args, **options)
    return torch.device(KIND[0], CURRENT[0]) if is_on_device(args[0]) else true


def _to(func: Callable, args: Arguments, options: Options) -> Tensor:
    del func
    tensor, *rest = args
    copy, other = options.pop("copy", False), options.pop("other", None)
    if rest and isinstance(rest[0], Tensor):
        other, *rest = rest
    if other is not None:
        non_blocking = options.get("non_blocking", rest[0] if rest else False)
        # A tensor without values is asked for its own device.
        device = KIND[0] if is_on_device(other) else other.device
        return moved(tensor, device, other.dtype, non_blocking=non_blocking, copy=copy)
    parse: Any = torch._C
    device, dtype, non_blocking, layout = parse._nn._parse_to(*rest, **options)
    if device is not None and device.type not in ("cpu", KIND[0]):
        return tensor.to(*rest, **options)
    return moved(tensor, device, dtype, non_blocking=non_blocking, copy=copy, memory_format=layout)


def _numpy(func: Callable, args: Arguments, options: Options) -> Any:
    if is_on_device(args[0]):
        raise TypeError(
            f"can't convert {KIND[0]}:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
            f"tensor to host memory first; at {where()}"
        )
    return func(*args, **options)


def _tolist(func: Callable, args: Arguments, options: Options) -> Any:
    if is_on_device(args[0]):
        LEDGER.wait("values read one by one")
    # It reads value by value, which is one copy.
    return _unseen(func, args, options)


def _unseen(func: Callable, args: Arguments, options: Options) -> Any:
    with torch._C._DisableTorchDispatch():
        return func(*args, **options)


def _pin(func: Callable, args: Arguments, options: Options) -> Tensor:
    del func, options
    if is_on_device(args[0]):
        raise RuntimeError(
            "cannot pin a tensor of the device, only dense CPU tensors can be pinned"
        )
    return args[0] if place_of(args[0]) is Place.PINNED else put(args[0].clone(), Place.PINNED)


def _deepcopy(func: Callable, args: Arguments, options: Options) -> Tensor:
    return put(func(*args, **options), place_of(args[0]))


def _drawn(func: Callable, args: Arguments, options: Options) -> Tensor:
    """A tensor filled with random numbers in place."""
    _check_generator(func, options, place_of(args[0]))
    return func(*args, **options)


def _one_hot(func: Callable, args: Arguments, options: Options) -> Tensor:
    classes = args[1] if len(args) > 1 else options.get("num_classes", -1)
    if classes < 0:
        return func(*args, **options)
    # It looks at values on the host which a device is not asked for.
    return put(_unseen(func, args, options), place_of(args[0]))


def _backward(func: Callable, args: Arguments, options: Options) -> None:
    """What `Tensor.backward` calls, with the mode left on for Python code on its way."""
    del func
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args[1:], strict=False)) | options
    create_graph = given.get("create_graph", False)
    with Asking():
        torch.autograd.backward(
            args[0], given.get("gradient"), given.get("retain_graph"), create_graph,
            inputs=given.get("inputs"),
        )  # fmt: skip


def _getter(name: str) -> Any:
    """How torch calls the reading of an attribute."""
    return getattr(Tensor, name).__get__


_SPECIAL: dict[Any, Callable[[Callable, Arguments, Options], Any]] = {
    _getter("device"): _device,
    _getter("is_cuda"): lambda _f, args, _o: KIND[0] == "cuda" and is_on_device(args[0]),
    _getter("is_mps"): lambda _f, args, _o: KIND[0] == "mps" and is_on_device(args[0]),
    _getter("is_cpu"): lambda _f, args, _o: not is_on_device(args[0]),
    Tensor.get_device: lambda _f, args, _o: CURRENT[0] if is_on_device(args[0]) else -1,
    Tensor.is_pinned: lambda _f, args, _o: place_of(args[0]) is Place.PINNED,
    Tensor.to: _to,
    Tensor.cpu: lambda _f, args, o: moved(args[0], "cpu", **o),
    Tensor.cuda: lambda _f, args, o: moved(args[0], "cuda", **o),
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.tolist: _tolist,
    Tensor.pin_memory: _pin,
    Tensor.__deepcopy__: _deepcopy,
    Tensor.backward: _backward,
    Tensor.normal_: _drawn,
    Tensor.uniform_: _drawn,
    Tensor.random_: _drawn,
    Tensor.bernoulli_: _drawn,
    Tensor.exponential_: _drawn,
    torch.nn.functional.one_hot: _one_hot,
}  # fmt: skip
