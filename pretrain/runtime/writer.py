"""Files that are written while the run goes on: copies in host memory, and a thread of its own."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ssl_bench.system.transfers import fetched

Module = TypeVar("Module", bound=nn.Module)


class Writer:
    """Does what it is given one thing after the other, in a thread that lives as long as they last.

    A process that ends waits for it: a thread that is cut off in torch's code aborts the process.
    """

    def __init__(self) -> None:
        # What may change is read and changed while this is held.
        self._changed = threading.Condition()
        self._waiting: dict[str, Callable[[], None]] = {}
        self._is_busy = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def write(self, name: str, work: Callable[[], None]) -> None:
        """Do the work as soon as no other is under way; it takes the place of an older one.

        Args:
            name: Of what is written. Work of this name that still waits is left out.
            work: It must not use what the run changes.
        """
        with self._changed:
            self._waiting.pop(name, None)
            self._waiting[name] = work
            if not self._is_busy:
                self._is_busy = True
                self._thread = threading.Thread(target=self._work, name="writer", daemon=False)
                self._thread.start()

    def check(self) -> None:
        """Raise what has gone wrong since the last time, if anything has."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Return when all is written; raises as `check` does."""
        self._settle()
        self.check()

    def close(self) -> None:
        """Return when all is written, or what is under way where somebody interrupts that."""
        try:
            self._settle()
        except KeyboardInterrupt:
            with self._changed:
                self._waiting.clear()
            self._settle()
            raise

    def _settle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy)
            last = self._thread
        if last is not None:
            # Not until it has left torch's code altogether.
            last.join()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception as error:
                with self._changed:
                    self._error = self._error or error

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            if self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
            self._is_busy = False
            self._changed.notify_all()
            return None


def copied(state: Any) -> Any:
    """A copy that nobody else changes, with all tensors in host memory; the device is waited for.

    Args:
        state: Tensors and plain values in dictionaries, lists and tuples.
    """
    originals = {_region(tensor): tensor for tensor in _tensors(state)}
    return _with(state, dict(zip(originals, _copies(list(originals.values())), strict=True)))


def copied_module(module: Module) -> Module:
    """The same for a module: its parameters and buffers are copied to host memory."""
    originals = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {}
    for original, tensor in zip(originals, _copies(originals), strict=True):
        is_trained = isinstance(original, nn.Parameter)
        memo[id(original)] = nn.Parameter(tensor, original.requires_grad) if is_trained else tensor
    return copy.deepcopy(module, memo)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    detached = [tensor.detach() for tensor in tensors]
    # From a device to pinned memory; what is on the host already must not change with the run.
    found = zip(detached, fetched(detached), strict=True)
    return [there.clone() if there is tensor else there for tensor, there in found]


def _region(tensor: Tensor) -> tuple[Any, ...]:
    """What tells apart where tensors lie: one that occurs twice is copied once."""
    place = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return (*place, tensor.shape, tensor.stride())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _with(value: Any, copies: Mapping[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return copies[_region(value)]
    if isinstance(value, dict):
        # Of the same class: that of a module's state knows the versions of its parts.
        same = copy.copy(value)
        same.update({key: _with(item, copies) for key, item in value.items()})
        return same
    if isinstance(value, list | tuple):
        return type(value)(_with(item, copies) for item in value)
    return value
