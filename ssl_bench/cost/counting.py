"""Counting what work asks of a device, operation by operation, with or without values."""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# They read as much of their source as they write.
_PICKING = frozenset({"index_select", "gather", "index", "embedding", "take"})
# They do not read what they write to.
_FILLING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"})
_MAKING_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh",
     "_unsafe_view", "_reshape_alias", "detach", "device", "size", "stride", "is_same_size",
     "_local_scalar_dense", "is_pinned", "record_stream", "resize_"}
)  # fmt: skip
_PINNING = frozenset({"_pin_memory", "pin_memory"})
# Of n x n matrices, times n^3 (of m x n ones, times m n^2): Golub and Van Loan, "Matrix
# Computations", sections 5.2 (with Q formed) and 8.3.
# Singular values without vectors: `svdvals` asks for these too only while a mode looks on.
_FACTORISATIONS = {"linalg_qr": 8 / 3, "_linalg_eigh": 9.0, "_linalg_svd": 8 / 3}
# What a processor is bound by before its memory is: a function of each value, or a look at each
# that depends on the last.
_FUNCTIONS = frozenset(
    {"_softmax", "_log_softmax", "_softmax_backward_data", "exp", "erf", "gelu", "gelu_backward",
     "log", "log1p", "logsumexp", "pow", "sigmoid", "tanh", "randn", "rand", "randn_like",
     "rand_like", "normal_", "upsample_bilinear2d", "upsample_bicubic2d"}
)  # fmt: skip
_SEARCHES = frozenset(
    {"argmax", "argmin", "bincount", "scatter_add_", "scatter_add", "index_put_",
     "_index_put_impl_", "index", "gather", "nonzero", "masked_fill_", "masked_fill", "cumsum",
     "_unique2"}
)  # fmt: skip
_KINDS = {
    **dict.fromkeys(_FUNCTIONS, "function"),
    **dict.fromkeys(_SEARCHES, "search"),
    **dict.fromkeys(("topk", "sort"), "sort"),
}
Kind = Literal["product", "factorisation", "function", "search", "sort", "other"]


@dataclass(frozen=True)
class Operation:
    """One launch of a device, and what it moves.

    Attributes:
        flops: Of products and factorisations.
        values: Numbers that it reads or writes, whichever are more.
        num_bytes: Read and written in the device's memory.
        link_bytes: Moved between the host and the device.
        dtype: Of what comes in.
    """

    name: str
    flops: float
    num_bytes: float
    kind: Kind = "other"
    values: float = 0.0
    link_bytes: float = 0.0
    dtype: torch.dtype | None = None


@dataclass
class Count:
    """What was asked for.

    Attributes:
        operations: How often each came; differences of counts may be negative.
        peak_bytes: Most that was held at a time of what was made meanwhile.
    """

    operations: Mapping[Operation, int | float] = field(default_factory=dict)
    peak_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return 1.0 * sum(times * one.flops for one, times in self.operations.items())

    @property
    def num_bytes(self) -> float:
        return 1.0 * sum(times * one.num_bytes for one, times in self.operations.items())

    @property
    def launches(self) -> float:
        return 1.0 * sum(self.operations.values())

    def scaled(self, times: float) -> "Count":
        """So many times as much, one after the other."""
        operations = {one: number * times for one, number in self.operations.items()}
        return Count(operations, self.peak_bytes)

    def plus(self, other: "Count") -> "Count":
        """Both, one after the other."""
        operations = dict(self.operations)
        for one, number in other.operations.items():
            operations[one] = operations.get(one, 0) + number
        return Count(operations, max(self.peak_bytes, other.peak_bytes))


class Ledger(TorchDispatchMode):
    """Enters every operation, of forward and backward passes alike.

    Attributes:
        device: Type of the device whose memory is followed.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self._operations: Counter[Operation] = Counter()
        self._live = _LiveBytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if _name(func) in _PINNING:
            # Asks for a real device, and costs none any time.
            return args[0]
        if func._overloadpacket not in flop_registry and func._can_decompose():
            with self:
                whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        given = _tensors((args, kwargs))
        known = {_key(tensor) for tensor in given}
        found = func(*args, **kwargs)
        made = _tensors(found)
        here = (tensor for tensor in made if tensor.device.type == self._device)
        self._live.follow(tensor for tensor in here if _key(tensor) not in known)
        if not _is_bookkeeping(func):
            self._operations[_operation(func, args, kwargs, given, found)] += 1
        return found

    def forget(self) -> None:
        """All but what is held now."""
        self._operations.clear()
        self._live.peak = self._live.now

    def count(self) -> Count:
        """What came since the last `forget`, and the most that was held."""
        return Count(dict(self._operations), float(self._live.peak))


class _LiveBytes:
    """Storages that operations make, until they are freed."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def follow(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            key = _key(tensor)
            if key not in self._live:
                self._add(key, tensor.untyped_storage())
        self.peak = max(self.peak, self.now)

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def forget(_: object) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, forget)
        self.now += size


def _operation(
    func: Any, args: Sequence[Any], kwargs: Any, given: Sequence[Tensor], found: Any
) -> Operation:
    name, made = _name(func), _tensors(found)
    dtype = next((t.dtype for t in given if t.is_floating_point()), None)
    num_bytes, devices = (
        float(_traffic(name, given, made)),
        {t.device.type for t in (*given, *made)},
    )
    if name in ("_to_copy", "copy_") and len(devices) > 1:
        return Operation(name, 0.0, 0.0, link_bytes=num_bytes / 2)
    values = float(max((tensor.numel() for tensor in (*given, *made)), default=0))
    if (formula := _formula(func)) is not None:
        flops = float(formula(*args, **kwargs, out_val=found))
        return Operation(name, flops, num_bytes, "product", values, dtype=dtype)
    if name in _FACTORISATIONS:
        *several, rows, cols = given[0].shape
        size = prod(several) * max(rows, cols) * min(rows, cols) ** 2
        flops = _FACTORISATIONS[name] * size
        return Operation(name, flops, num_bytes, "factorisation", values, dtype=dtype)
    kind: Any = _KINDS.get(name, "other")
    return Operation(name, 0.0, num_bytes, kind, values, dtype=dtype)


def _formula(func: Any) -> Any:
    """Of a product's operations; torch has them under the names of those that are not in place."""
    if func._overloadpacket in flop_registry:
        return flop_registry[func._overloadpacket]
    name = _name(func)
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return flop_registry.get(plain)


def _traffic(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    written = sum(_bytes(tensor) for tensor in made)
    if name in _PICKING:
        return 2 * written + sum(_bytes(tensor) for tensor in given[1:])
    if name in _FILLING:
        return written + sum(_bytes(tensor) for tensor in given[1:])
    if not made:
        # What works in place on lists returns nothing and writes most of what it is given.
        return 2 * sum(_bytes(tensor) for tensor in given)
    return written + sum(_bytes(tensor) for tensor in given)


def _bytes(tensor: Tensor) -> int:
    """What is there, where one value stands for many."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_bookkeeping(func: Any) -> bool:
    return func.is_view or _name(func) in _MAKING_NOTHING


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
