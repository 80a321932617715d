"""Measure the peak memory of a function on a GPU or CPU."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MEBIBYTE = 2**20


def peak_mebibytes(work: Callable[[], object], device: torch.device) -> float:
    """Return the peak increase in memory (MiB) while `work` runs."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MEBIBYTE
    with LiveBytes() as bytes_:
        work()
    return bytes_.peak / MEBIBYTE


class LiveBytes(TorchDispatchMode):
    """A `TorchDispatchMode` that tracks the memory of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        # Memory that is allocated and freed within this operation is not counted.
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in (given | self._live.keys()):
                self._follow(leaf)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        size = storage.nbytes()

        def forget(_: object) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
