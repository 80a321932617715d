"""What happened on the device, by file and line of the project."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

_ROOT = str(Path(__file__).parents[3])
_ITSELF = str(Path(__file__).parent)
# Who asks for a copy is of interest, not what makes it.
_TRANSFERS = f"{_ROOT}/ssl_bench/system/transfers.py"
_PACKAGES = tuple(f"{_ROOT}/{name}/" for name in ("ssl_bench", "pretrain", "probes"))


@dataclass(frozen=True)
class Event:
    """One kind of happening at one place.

    Attributes:
        what: The operator, or what it is about.
        where: File and line of the innermost frame of the project's packages, of its tests where
            there is none.
    """

    what: str
    where: str


@dataclass
class Ledger:
    """Counts since the last `reset`.

    Attributes:
        waits: The host waits until the device has done all it was given.
        uploads: Copies to the device from memory that is not pinned; all but the smallest of them
            wait as well.
        pinned_uploads: Copies to the device from pinned memory that do not wait.
        downloads: Copies to pinned memory that do not wait.
        on_their_way: Those that are not there yet, and what they will hold.
        event_waits: The host waits until the device has come so far.
        compiled: Modules that would have been compiled.
        forbids_waits: As `torch.cuda.set_sync_debug_mode("error")`.
    """

    waits: Counter[Event] = field(default_factory=Counter)
    uploads: Counter[Event] = field(default_factory=Counter)
    pinned_uploads: Counter[Event] = field(default_factory=Counter)
    downloads: Counter[Event] = field(default_factory=Counter)
    event_waits: Counter[Event] = field(default_factory=Counter)
    compiled: Counter[str] = field(default_factory=Counter)
    num_operators: int = 0
    forbids_waits: bool = False
    on_their_way: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def reset(self) -> None:
        for counter in (self.waits, self.uploads, self.pinned_uploads, self.downloads):
            counter.clear()
        self.event_waits.clear()
        self.compiled.clear()
        self.num_operators = 0

    def wait(self, what: str, times: int = 1) -> None:
        """The host waits.

        Raises:
            RuntimeError: that is forbidden.
        """
        event = Event(what, where())
        if self.forbids_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what} at {event.where}")
        self.waits[event] += times
        self.arrive()

    def wait_for_event(self) -> None:
        """The host waits until the device has come so far."""
        self.event_waits[Event("Event.synchronize", where())] += 1
        self.arrive()

    def send_back(self, target: Tensor, source: Tensor) -> None:
        """Copy to pinned memory, which holds something else until the next wait."""
        self.downloads[Event("copy to pinned memory", where())] += 1
        self.on_their_way.append((target, source.detach().clone()))
        target.copy_(_wrong(source))

    def arrive(self) -> None:
        """What is on its way to pinned memory is there."""
        for target, source in self.on_their_way:
            target.copy_(source)
        self.on_their_way.clear()

    def upload(self, what: str, *, pinned: bool, waits: bool) -> None:
        """Something is copied to the device."""
        event = Event(what, where())
        if waits and self.forbids_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what} at {event.where}")
        (self.pinned_uploads if pinned and not waits else self.uploads)[event] += 1

    @contextmanager
    def counting(self) -> Iterator["Ledger"]:
        """Counts of what happens inside alone; complete once the block has ended."""
        before = {name: Counter(value) for name, value in self._counters().items()}
        found = Ledger()
        yield found
        for name, value in self._counters().items():
            getattr(found, name).update(value - before[name])

    def _counters(self) -> dict[str, Counter[Event]]:
        names = ("waits", "uploads", "pinned_uploads", "downloads", "event_waits")
        return {name: getattr(self, name) for name in names}


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
