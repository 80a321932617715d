"""Note the signals that ask a run to stop. The training loop stops after the current step."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ssl_bench.errors import Preempted
from ssl_bench.system.endings import STOP_SIGNALS, handle_signals


class StopRequest:
    """The last signal that asked this process to stop.

    The first Ctrl-C (SIGINT) is only noted, like SIGTERM, SIGHUP and SIGUSR1. The training loop
    finishes its step, saves and ends. A second Ctrl-C raises KeyboardInterrupt in the middle of the
    step, which is then lost.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._raises = False

    @property
    def is_interrupt(self) -> bool:
        """Return whether the last signal was Ctrl-C."""
        return self.received is signal.SIGINT

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        del frame
        if self.is_interrupt and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if self._raises:
            self._raise()

    @contextmanager
    def raise_immediately(self) -> Generator[None]:
        """Raise an exception as soon as a signal arrives, while there is nothing to save yet.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed before or in this context.
            Preempted: Another signal was received.
        """
        if self.received is not None:
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
def stop_requests() -> Generator[StopRequest]:
    """Note signals that ask to stop, instead of ending the process."""
    request = StopRequest()
    with handle_signals((*STOP_SIGNALS, "SIGINT"), request.receive):
        yield request
