"""Record signals that ask a run to stop, so that training stops after one or two steps."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ssl_bench.errors import Preempted
from ssl_bench.system.endings import STOP_SIGNALS, handle_signals


class StopSignalHandler:
    """A handler that stores the last signal that asked this process to stop.

    After SIGTERM, SIGHUP, SIGUSR1 or a first Ctrl-C (SIGINT), the training loop stops after one or
    two steps and saves a checkpoint. A second Ctrl-C raises KeyboardInterrupt immediately, so the
    current step is lost. Inside a `with` block of `raise_immediately`, every signal raises an
    exception at once.
    """

    def __init__(self) -> None:
        self.last_signal: signal.Signals | None = None
        self._raises = False

    @property
    def is_interrupt(self) -> bool:
        """Return whether the last signal was Ctrl-C."""
        return self.last_signal is signal.SIGINT

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Store a signal, so that the run stops after one or two steps."""
        del frame
        if self.is_interrupt and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.last_signal = signal.Signals(number)
        if self._raises:
            self._raise()

    @contextmanager
    def raise_immediately(self) -> Generator[None]:
        """Inside a `with` block, raise an exception as soon as a signal to stop arrives.

        Use this method only while a run has no progress to save. If a signal has already arrived
        before the `with` block, the exception is raised at the start of the block.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
            Preempted: SIGTERM, SIGHUP or SIGUSR1 was received.
        """
        if self.last_signal is not None:
            self._raise()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _raise(self) -> NoReturn:
        if self.is_interrupt:
            raise KeyboardInterrupt
        raise Preempted("stopped by a signal before the first step. Start the command again")


@contextmanager
def record_stop_signals() -> Generator[StopSignalHandler]:
    """Inside a `with` block, store signals such as SIGTERM instead of ending the process.

    Yields:
        A `StopSignalHandler`, whose attribute `last_signal` is the last signal, or None if no
        signal has arrived.
    """
    handler = StopSignalHandler()
    with handle_signals((*STOP_SIGNALS, "SIGINT"), handler.handle):
        yield handler
