"""How a command begins and ends: streams that can be used, errors that say what to do."""

import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from ssl_bench.errors import INTERRUPTED, MachineError, Preempted, SslBenchError, broken_file_error
from ssl_bench.system.escaping import to_one_line
from ssl_bench.system.process import is_main_process, is_out_of_memory, out_of_memory_error
from ssl_bench.system.progress import format_duration

_LONGEST = 1000
# What schedulers, shutdowns and terminals that are closed send.
STOP_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1")


class StopSignal(KeyboardInterrupt):
    """One of `STOP_SIGNALS` came. It ends what Ctrl-C ends, in the same way."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


@contextmanager
def handle_signals(
    names: Sequence[str], handler: Callable[[int, FrameType | None], None]
) -> Generator[None]:
    """Let the main thread handle signals, but for a SIGHUP that is ignored, as under nohup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    hang_up = getattr(signal, "SIGHUP", None)
    if before.get(hang_up) == signal.SIG_IGN:
        del before[hang_up]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == hang_up:
            _leave_terminal()
        handler(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def raise_stop_signal(number: int, frame: FrameType | None) -> None:
    """The handler of a command that has nothing to save first."""
    del frame
    raise StopSignal(number)


def report_interruption(reason: KeyboardInterrupt, arguments: Sequence[str]) -> int:
    """Say in a line that somebody ended the command; its exit code."""
    name = next(iter(reason.args), "") if isinstance(reason, StopSignal) else ""
    if is_main_process():
        what = f"asked to stop ({name})" if name else "interrupted"
        # A folder that holds a run takes no other one.
        resume = " with --resume" if "pretrain" in arguments[:1] else ""
        print(
            f"ssl-bench: {what}; what was finished is saved; the same command{resume} goes on "
            "with the rest",
            file=sys.stderr,
        )
    return Preempted.exit_code if name else INTERRUPTED


def _leave_terminal() -> None:
    """Write into nothing from now on what went to a terminal that was closed, or to its programs.

    What cannot be said must not end what still has to be saved.
    """
    # The programs behind a pipe get the same signal, and end.
    time.sleep(0.1)
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0)):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)


def repair_standard_streams() -> None:
    """Make standard streams usable, whichever of them the caller closed."""
    # Otherwise the next file to be opened would get the number of the output or of errors.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that knows only ASCII, or a file's name that is no text, ends no command.
        sys.stdout.reconfigure(errors="backslashreplace")


def report_error(error: Exception, arguments: Sequence[str]) -> int | None:
    """Say an error in one line; its exit code, or None for a fault of this program.

    Not in `main`, whose frame the error's traceback holds: the two would keep each other, and with
    them data workers and memory.
    """
    known = _known(error, next(iter(arguments), ""))
    if known is None:
        return None
    if known is not error:
        # What is still to be written there would only fail again.
        sys.stdout = None
    if known.is_raised_on_all_ranks and not is_main_process():
        return known.exit_code
    line = to_one_line(known)
    # Somebody's text may be of any length.
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
    print(f"ssl-bench: {line}", file=sys.stderr)
    return known.exit_code


def _known(error: Exception, command: str) -> SslBenchError | None:
    """An error as one that says what to do; None for a fault of this program."""
    if isinstance(error, SslBenchError):
        return error
    if is_out_of_memory(error):
        return out_of_memory_error(error, command)
    if isinstance(error, ImportError | SyntaxError):
        return broken_file_error(error)
    if isinstance(error, OSError):
        return MachineError(f"{error}; look at the disk and its rights", hint=("--debug",))
    return None


@dataclass(frozen=True)
class Outcome:
    """What became of a part of a command, such as a job of a sweep, while other parts go on.

    Attributes:
        exit_code: As a command of its own would end.
        error: One line, empty where it finished.
        wants_memory: Whether it ended because memory did not suffice.
    """

    seconds: float
    exit_code: int = 0
    error: str = ""
    wants_memory: bool = False

    @property
    def state(self) -> Literal["finished", "failed"]:
        return "failed" if self.exit_code else "finished"

    def line(self, count: str, title: str) -> str:
        """Such as "finished 2 of 9 in 40 s, pca on toy val, skip"."""
        said = f": {self.error}" if self.error else ""
        return f"{self.state} {count} in {format_duration(self.seconds)}, {title}{said}"


def run_and_catch(work: Callable[[], int | None], command: str, *, debug: bool) -> Outcome:
    """Do a part of a command, whose errors end that part alone; `debug` raises them.

    Raises:
        Preempted, KeyboardInterrupt: somebody asked to stop, and everything is saved.
    """
    start = time.monotonic()
    code, text = 0, ""
    try:
        code = work() or 0
    except Preempted:
        raise
    # Whatever it is, memory that does not suffice included: the other parts may fare better.
    except Exception as error:
        if debug:
            raise
        known = _known(error, command)
        code = 1 if known is None else known.exit_code
        text = to_one_line(known or f"{type(error).__name__}: {error}")
    return Outcome(time.monotonic() - start, code, text)
