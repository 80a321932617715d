"""Check each torch operator on a simulated device.

The class `Ledger` counts kernel launches, copies and synchronisations. The class `Operators` checks
each operator. The class `TorchFunctions` intercepts functions such as `Tensor.to`.
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

# Function that returns the real device of a tensor. The modes do not intercept it.
_true_device = torch._C.TensorBase.device.__get__


# The type of the simulated device: "cuda" or "mps".
KIND = ["cuda"]


class SimulatedDeviceError(RuntimeError):
    """An error for an operation that a real device would refuse."""


class Place(Enum):
    """The kind of memory that a tensor would use on a machine with a GPU."""

    HOST = auto()
    PINNED = auto()
    DEVICE = auto()
    UNDECIDED = auto()  # becomes DEVICE when it is combined with a DEVICE tensor


def place_of(tensor: Tensor) -> Place:
    return _place_of_storage(storage_of(tensor))


def _place_of_storage(storage: Any) -> Place:
    return Place.HOST if storage is None else getattr(storage, "place", Place.HOST)


def record_place(tensor: Tensor, place: Place) -> Tensor:
    """Record whether a tensor is stored on the CPU or on the simulated GPU."""
    storage = storage_of(tensor)
    if storage is not None:
        # The Python object of a storage, including its attributes, lives as long as the storage.
        vars(storage)["place"] = place
    return tensor


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of a dense CPU tensor, or None for other tensors."""
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
    """Return whether a tensor has values, in contrast to a "meta" tensor."""
    return _true_device(tensor).type == "cpu"


def names_device(device: Any) -> bool:
    """Return whether a `device` argument means the simulated GPU."""
    if device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == KIND[0]


def place_for(device: Any) -> Place:
    return Place.DEVICE if names_device(device) else Place.HOST


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


_ROOT = str(Path(__file__).parents[3])
_ITSELF = str(Path(__file__).parent)
# Copies are attributed to the callers of this file.
_TRANSFERS = f"{_ROOT}/ssl_bench/system/device.py"
_PACKAGES = tuple(f"{_ROOT}/{name}/" for name in ("ssl_bench", "pretrain", "probes"))


@dataclass
class Ledger:
    """Counts of the kernel launches, copies and synchronisations of a simulated GPU."""

    # Operators by name. A real device may launch several kernels for one, and torch.compile may
    # fuse operators.
    launches: Counter[str] = field(default_factory=Counter)
    # Waits of the host until the device has finished all its work, by "FILE:LINE operation".
    waits: Counter[str] = field(default_factory=Counter)
    # Copies to the device that are blocking or come from unpinned memory. On a real device, all but
    # the smallest also make the host wait.
    uploads: Counter[str] = field(default_factory=Counter)
    # Non-blocking copies to the device from pinned memory.
    pinned_uploads: Counter[str] = field(default_factory=Counter)
    # Copies to the device in another stream than that of the computations.
    early_uploads: Counter[str] = field(default_factory=Counter)
    # Unfinished copies of this kind, as pairs (target, values).
    pending_uploads: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)
    is_uploading_early: bool = False
    upload_stream: Any = None
    # Unfinished copies to pinned memory, as pairs (target, values).
    pending_copies: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def count_wait(self, what: str, times: int = 1) -> None:
        """Record that the CPU waits for the GPU, and complete all pending copies."""
        self.waits[f"{call_site()} {what}"] += times
        self.complete_copies()

    def copy_later(self, target: Tensor, source: Tensor) -> None:
        """Start an asynchronous copy. `target` has wrong values until the next wait."""
        self.pending_copies.append((target, source.detach().clone()))
        target.copy_(_corrupt(source))

    def complete_copies(self) -> None:
        for target, source in self.pending_copies:
            target.copy_(source)
        self.pending_copies.clear()

    @contextmanager
    def uploading_early(self, stream: Any) -> Iterator[None]:
        """Delay copies to the device inside a `with` block until another stream waits for them."""
        self.is_uploading_early, self.upload_stream = True, stream
        try:
            yield
        finally:
            self.is_uploading_early = False

    def upload_early(self, target: Tensor) -> None:
        """Delay a copy. `target` has wrong values until a stream waits for the copy."""
        self.early_uploads[call_site()] += 1
        self.pending_uploads.append((target, target.clone()))
        target.copy_(_corrupt(target))

    def complete_early_uploads(self, stream: Any) -> None:
        """Complete the copies of a stream for which another stream waits."""
        if stream is not self.upload_stream:
            return
        # The copies were counted when they started.
        with torch._C._DisableTorchDispatch():
            for target, values in self.pending_uploads:
                target.copy_(values)
        self.pending_uploads.clear()

    def count_upload(self, what: str, *, pinned: bool, waits: bool) -> None:
        """Count a copy from the CPU to the simulated GPU."""
        uploads = self.pinned_uploads if pinned and not waits else self.uploads
        uploads[f"{call_site()} {what}"] += 1

    @contextmanager
    def counting(self) -> Iterator["Ledger"]:
        """Count only the operations inside a `with` block."""
        names = ("launches", "waits", "uploads", "pinned_uploads", "early_uploads")
        counts = Ledger()
        before = {name: getattr(self, name).copy() for name in names}
        yield counts
        for name in names:
            getattr(counts, name).update(getattr(self, name) - before[name])


def _corrupt(values: Tensor) -> Tensor:
    """Return a tensor with wrong values, which imitates uninitialised memory."""
    if values.dtype == torch.bool:
        return ~values
    return values + 1 if not values.is_floating_point() else torch.full_like(values, torch.nan)


def call_site() -> str:
    """Return the file name and line number of the caller as "FILE:LINE"."""
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


# Operators that read values back to the host, and how often. Source: torch 2.15,
# aten/src/ATen/native/cuda. Linear algebra reads whether it converged.
WAITS = {
    "aten::_local_scalar_dense": 1,
    "aten::equal": 1,
    "aten::nonzero": 1,
    "aten::argwhere": 1,
    "aten::masked_select": 1,
    # Reads the smallest and the largest value.
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
    # Reads how often each matrix is squared.
    "aten::linalg_matrix_exp": 1,
}
INDEXING = frozenset(
    f"aten::{name}"
    for name in (
        "index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_",
        "_unsafe_index_put",
    )
)  # fmt: skip
# These operators accept a host scalar among device tensors, as pointwise operators do.
_TAKES_SCALARS = INDEXING | frozenset(
    f"aten::{name}"
    for name in (
        "fill_", "fill", "masked_fill", "masked_fill_", "where", "index_fill_", "lerp",
        "_foreach_mul", "_foreach_mul_", "_foreach_add_", "_foreach_div", "_foreach_div_",
    )
)  # fmt: skip
# These operators neither compute nor copy anything.
BOOKKEEPING = frozenset(
    f"aten::{name}"
    for name in ("detach", "detach_", "alias", "lift_fresh", "is_pinned", "_pin_memory", "set_")
)


@cache
def written_by(function: Any) -> tuple[bool, ...]:
    """Return which arguments of an operator are modified in place."""
    infos = (argument.alias_info for argument in function._schema.arguments)
    return tuple(info is not None and info.is_write for info in infos)


@cache
def has_kernel(function: Any) -> bool:
    """Return whether an operator has a CUDA kernel in this build of torch."""
    registry: Any = torch._C
    schema, overload = function._schema, function._overloadname
    name = schema.name if overload == "default" else f"{schema.name}.{overload}"
    return (
        "_for_cpu" in name
        or registry._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        or registry._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")
    )


def count_transfer(source: Place, target: Place, *, non_blocking: bool) -> None:
    """Count a copy between CPU and GPU. Raise an error if an asynchronous copy is unsafe."""
    if source is Place.DEVICE and target is not Place.DEVICE:
        if not non_blocking:
            LEDGER.count_wait("copy to the host")
        elif target is not Place.PINNED:
            raise SimulatedDeviceError(
                f"non_blocking copy to memory that is not pinned, at {call_site()}; it may be read "
                "before it is written, so pin it or wait"
            )
    elif source is not Place.DEVICE and target is Place.DEVICE:
        pinned = source is Place.PINNED
        LEDGER.count_upload("copy to the device", pinned=pinned, waits=not non_blocking)


def refuse_float64(tensor: Tensor, dtype: torch.dtype | None, place: Place) -> None:
    """Raise `TypeError` for a float64 tensor on a simulated MPS device."""
    after = dtype or tensor.dtype
    if KIND[0] == "mps" and place is Place.DEVICE and after is torch.float64:
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            f"float64. Please use float32 instead. At {call_site()}"
        )


def move(
    tensor: Tensor,
    device: Any,
    dtype: torch.dtype | None = None,
    *,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Move a tensor to a device, dtype or memory format, as `Tensor.to` does."""
    options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
    before = place_of(tensor)
    after = before if device is None else place_for(device)
    refuse_float64(tensor, dtype, after)
    crosses = (before is Place.DEVICE) != (after is Place.DEVICE)
    if crosses:
        count_transfer(before, after, non_blocking=non_blocking)
    result = tensor.to(dtype=dtype or tensor.dtype, copy=copy or crosses, **options)
    if not crosses:
        return result
    if LEDGER.is_uploading_early:
        LEDGER.upload_early(result)
    if result.requires_grad:
        # The gradient must be in the place of the original tensor.
        result.register_hook(lambda gradient: record_place(gradient.clone(), before))
    return record_place(result, after)


_ON_DEVICE = (Place.DEVICE, Place.UNDECIDED)


class _Thread(threading.local):
    """The state of the simulated device that each thread stores separately."""

    # Memory for the results of operations without tensor arguments. None means UNDECIDED.
    creates_on: Place | None = None


_thread = _Thread()


@contextmanager
def create_on(place: Place) -> Iterator[None]:
    """Choose the device of all tensors that are created inside a `with` block."""
    before, _thread.creates_on = _thread.creates_on, place
    try:
        yield
    finally:
        _thread.creates_on = before


class Operators(TorchDispatchMode):
    """A `TorchDispatchMode` that checks every operator of the forward and backward pass."""

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
            if name not in BOOKKEEPING and not func.is_view:
                LEDGER.launches[name] += 1
            if name == "aten::copy_":
                if _copy_later(args, options):
                    return args[0]
            elif name not in BOOKKEEPING:
                _check(func, args, options, given, places)
        if func is torch.ops.aten.mm.dtype:  # this overload exists only for CUDA
            func, args = torch.ops.aten.mm.default, [x.to(args[2]) for x in args[:2]]
        result = func(*args, **options)
        _place_results(result, storages, places)
        return result


def _copy_later(args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Delay an asynchronous copy from GPU to pinned memory. Return whether it was delayed."""
    target, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else options.get("non_blocking", False))
    places = place_of(source), place_of(target)
    count_transfer(*places, non_blocking=non_blocking)
    if places != (Place.DEVICE, Place.PINNED) or not non_blocking:
        return False
    LEDGER.copy_later(target, source)
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
            record_place(tensor, Place.DEVICE)
    if KIND[0] == "cuda" and not has_kernel(function):
        raise SimulatedDeviceError(f"{name} has no CUDA kernel, at {call_site()}")
    knows_size = name == "aten::repeat_interleave" and options.get("output_size") is not None
    if name in WAITS and not knows_size:
        LEDGER.count_wait(name.removeprefix("aten::"), WAITS[name])
    indices = [i for i in args[1] if i is not None] if name in INDEXING else []
    _check_indices(args, indices)
    if all(place in _ON_DEVICE for place in places):
        return
    misplaced = _misplaced_tensors(function, args, given, {id(index) for index in indices})
    if misplaced:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in misplaced)
        raise SimulatedDeviceError(
            f"{name}: expected all tensors to be on the same device, found {KIND[0]}:0 "
            f"and cpu (of shape {shapes}) at {call_site()}"
        )


def _check_indices(args: Sequence[Any], indices: Sequence[Tensor]) -> None:
    """Count the copies and synchronisations that an indexing operation causes."""
    for index in indices:
        is_here, target = place_of(index) in _ON_DEVICE, place_of(args[0])
        if target not in _ON_DEVICE:
            if is_here:
                raise SimulatedDeviceError(
                    "indices should be either on cpu or on the same device as the indexed tensor "
                    f"(cpu), at {call_site()}"
                )
        elif not is_here:
            LEDGER.count_upload("an index of the host", pinned=False, waits=True)
        elif index.dtype in (torch.bool, torch.uint8) and not _fills_one_value(args):
            # The host needs the number of selected elements.
            LEDGER.count_wait("index with a mask")


def _fills_one_value(args: Sequence[Any]) -> bool:
    """Return whether a masked assignment writes a single value."""
    return len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1


def _misplaced_tensors(
    function: Any, args: Sequence[Any], given: Sequence[Tensor], ids_of_indices: set[int]
) -> list[Tensor]:
    """Return the CPU tensors that an operator cannot combine with GPU tensors."""
    # These operators accept host tensors without axes.
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
        if place_of(tensor) not in _ON_DEVICE
        and id(tensor) not in ids_of_indices
        and (id(tensor) in written or tensor.ndim > 0 or not takes_scalars)
    ]


def _place_results(result: Any, storages: Sequence[Any], places: Sequence[Place]) -> None:
    """Record whether the results of an operator are on the CPU or on the simulated GPU."""
    known = {id(storage) for storage in storages}
    for tensor in tensors_in(result):
        storage = storage_of(tensor)
        if storage is None or id(storage) in known:
            continue
        place = _place_of_new(places)
        refuse_float64(tensor, None, place)
        record_place(tensor, place)


def _place_of_new(sources: Sequence[Place]) -> Place:
    if Place.DEVICE in sources:
        return Place.DEVICE
    if not sources and _thread.creates_on is not None:
        return _thread.creates_on
    return Place.UNDECIDED if all(one is Place.UNDECIDED for one in sources) else Place.HOST


Arguments = Sequence[Any]
Options = dict[str, Any]
# The index of the current device, which `torch.cuda.set_device` sets.
CURRENT = [0]
# These functions receive values of Python or of the host, which must be uploaded.
_CARRY_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)


class TorchFunctions(TorchFunctionMode):
    """A `TorchFunctionMode` that intercepts torch functions and tensor methods."""

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
        return _call(func, args, options)


def _call(func: Callable, args: Arguments, options: Options) -> Any:
    """Call a torch function. Replace the GPU in the `device` argument by the CPU."""
    device = options.get("device")
    if device is None:
        has_sources = bool(tensors_in((*args, options)))
        return func(*args, **options) if has_sources else _create(func, args, options, Place.HOST)
    if not names_device(device) and torch.device(device).type != "cpu":
        return func(*args, **options)
    if names_device(device):
        options["device"] = "cpu"
    return _create(func, args, options, place_for(device))


def _create(func: Callable, args: Arguments, options: Options, place: Place) -> Any:
    """Call a function that creates a tensor, and record where the tensor is stored."""
    _check_generator(func, options, place)
    pinned = options.pop("pin_memory", False)
    if func in _CARRY_VALUES and (result := _upload_values(args, options, place)) is not None:
        return result
    with create_on(place):
        result = func(*args, **options)
    if isinstance(result, Tensor):
        refuse_float64(result, None, place)
    if isinstance(result, Tensor) and (pinned or options.get("device") is not None):
        record_place(result, Place.PINNED if pinned else place)
    return result


def _upload_values(args: Arguments, options: Options, place: Place) -> Any:
    if args and isinstance(args[0], Tensor):
        return move(args[0], KIND[0] if place is Place.DEVICE else "cpu", options.get("dtype"))
    if place is Place.DEVICE:
        LEDGER.count_upload("values of Python", pinned=False, waits=True)
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
            f"'{generator.device.type}', at {call_site()}"
        )


def _device(func: Callable, args: Arguments, options: Options) -> torch.device:
    real = func(*args, **options)
    return torch.device(KIND[0], CURRENT[0]) if is_on_device(args[0]) else real


def _to(func: Callable, args: Arguments, options: Options) -> Tensor:
    del func
    tensor, *rest = args
    copy, other = options.pop("copy", False), options.pop("other", None)
    if rest and isinstance(rest[0], Tensor):
        other, *rest = rest
    if other is not None:
        non_blocking = options.get("non_blocking", rest[0] if rest else False)
        # A tensor without values, on "meta", reports its device itself.
        device = KIND[0] if is_on_device(other) else other.device
        return move(tensor, device, other.dtype, non_blocking=non_blocking, copy=copy)
    parse: Any = torch._C
    device, dtype, non_blocking, layout = parse._nn._parse_to(*rest, **options)
    if device is not None and device.type not in ("cpu", KIND[0]):
        return tensor.to(*rest, **options)
    return move(tensor, device, dtype, non_blocking=non_blocking, copy=copy, memory_format=layout)


def _numpy(func: Callable, args: Arguments, options: Options) -> Any:
    if is_on_device(args[0]):
        raise TypeError(
            f"can't convert {KIND[0]}:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
            f"tensor to host memory first; at {call_site()}"
        )
    return func(*args, **options)


def _tolist(func: Callable, args: Arguments, options: Options) -> Any:
    if is_on_device(args[0]):
        LEDGER.count_wait("values read one by one")
    # The operator would be counted once per value, but a device makes a single copy.
    return _without_dispatch(func, args, options)


def _without_dispatch(func: Callable, args: Arguments, options: Options) -> Any:
    with torch._C._DisableTorchDispatch():
        return func(*args, **options)


def _pin(func: Callable, args: Arguments, options: Options) -> Tensor:
    del func, options
    if is_on_device(args[0]):
        raise RuntimeError(
            "cannot pin a tensor of the device, only dense CPU tensors can be pinned"
        )
    return (
        args[0]
        if place_of(args[0]) is Place.PINNED
        else record_place(args[0].clone(), Place.PINNED)
    )


def _deepcopy(func: Callable, args: Arguments, options: Options) -> Tensor:
    return record_place(func(*args, **options), place_of(args[0]))


def _draw(func: Callable, args: Arguments, options: Options) -> Tensor:
    _check_generator(func, options, place_of(args[0]))
    return func(*args, **options)


def _one_hot(func: Callable, args: Arguments, options: Options) -> Tensor:
    classes = args[1] if len(args) > 1 else options.get("num_classes", -1)
    if classes < 0:
        return func(*args, **options)
    # On the host, the function also reads values, but not on a device.
    return record_place(_without_dispatch(func, args, options), place_of(args[0]))


def _backward(func: Callable, args: Arguments, options: Options) -> None:
    """Run the backward pass with `TorchFunctions` enabled."""
    del func
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args[1:], strict=False)) | options
    create_graph = given.get("create_graph", False)
    with TorchFunctions():
        torch.autograd.backward(
            args[0], given.get("gradient"), given.get("retain_graph"), create_graph,
            inputs=given.get("inputs"),
        )  # fmt: skip


def _getter(name: str) -> Any:
    """Return the function that reads an attribute of a tensor."""
    return getattr(Tensor, name).__get__


_SPECIAL: dict[Any, Callable[[Callable, Arguments, Options], Any]] = {
    _getter("device"): _device,
    _getter("is_cuda"): lambda _f, args, _o: KIND[0] == "cuda" and is_on_device(args[0]),
    _getter("is_mps"): lambda _f, args, _o: KIND[0] == "mps" and is_on_device(args[0]),
    _getter("is_cpu"): lambda _f, args, _o: not is_on_device(args[0]),
    Tensor.get_device: lambda _f, args, _o: CURRENT[0] if is_on_device(args[0]) else -1,
    Tensor.is_pinned: lambda _f, args, _o: place_of(args[0]) is Place.PINNED,
    Tensor.to: _to,
    Tensor.cpu: lambda _f, args, o: move(args[0], "cpu", **o),
    Tensor.cuda: lambda _f, args, o: move(args[0], "cuda", **o),
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.tolist: _tolist,
    Tensor.pin_memory: _pin,
    Tensor.__deepcopy__: _deepcopy,
    Tensor.backward: _backward,
    Tensor.normal_: _draw,
    Tensor.uniform_: _draw,
    Tensor.random_: _draw,
    Tensor.bernoulli_: _draw,
    Tensor.exponential_: _draw,
    torch.nn.functional.one_hot: _one_hot,
}  # fmt: skip
