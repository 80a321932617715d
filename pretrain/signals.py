"""Signals that ask a run to stop, after a step that is saved or before the first at once.

And the signal of a data worker that died, which must not end a step in its middle.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ssl_bench.errors import Preempted
from ssl_bench.system.endings import STOPPING, handled

_NAMES = (*STOPPING, "SIGINT")


class StopRequest:
    """Which signal came, if any; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._stops_at_once = False

    @property
    def is_interrupt(self) -> bool:
        return self.received is signal.SIGINT

    def receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.is_interrupt and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if self._stops_at_once:
            self._stop()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Stop in the middle of what is done here: it has nothing to save.

        Raises:
            KeyboardInterrupt: at a SIGINT.
            Preempted: at another signal.
        """
        if self.received is not None:
            self._stop()
        self._stops_at_once = True
        try:
            yield
        finally:
            self._stops_at_once = False

    def _stop(self) -> NoReturn:
        if self.is_interrupt:
            raise KeyboardInterrupt
        raise Preempted("asked to stop before the first step; start it again")


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect signals that ask to stop instead of dying of them."""
    request = StopRequest()
    with handled(_NAMES, request.receive):
        yield request


@contextmanager
def deaths_of_workers_wait() -> Iterator[None]:
    """Keep a data worker's death from raising wherever the main thread is, mid-step included.

    torch's own handler does so once a loader has workers. Without it the loader looks whether
    its workers live while it waits for them, every five seconds, and raises there.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def leave_signals_to_the_parent(worker: int) -> None:
    """Keep a data worker alive when the whole process group is asked to stop.

    Only the first SIGTERM is passed over: with a second one the parent ends a worker that hangs.
    """
    del worker
    for name in _NAMES:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_the_next)


def _obey_the_next(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
