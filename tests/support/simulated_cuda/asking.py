"""Functions of torch that speak of a device: they answer, move and make as if there were one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.simulated_cuda.ledger import (
    KIND,
    LEDGER,
    Place,
    SimulatedDeviceError,
    is_on_device,
    is_real,
    names_device,
    place_named,
    place_of,
    put,
    tensors_in,
    where,
)
from tests.support.simulated_cuda.operators import (
    making,
    moved,
    on_host,
    refuse_float64,
    uncounted_checks,
)

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
        has_sources = any(True for _ in tensors_in([*args, options]))
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
    tensor = on_host(args[0])
    # It reads value by value, which is one copy.
    with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
        return func(tensor, *args[1:], **options)


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
    with uncounted_checks():
        return func(*args, **options)


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
