"""Handle signals and errors that end a command early, and print each error in one line."""

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

from ssl_bench.errors import (
    INTERRUPTED,
    MachineError,
    Preempted,
    SslBenchError,
    broken_file_error,
)
from ssl_bench.system.output import format_duration, to_one_line
from ssl_bench.system.process import is_main_process, is_out_of_memory, out_of_memory_error

STOP_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1")
"""Signals that stop a command. Schedulers, shutdowns and closed terminals send them."""
_MAX_CHARACTERS = 1000


class StopSignal(KeyboardInterrupt):
    """Error that is raised if the process receives a stop signal such as SIGTERM.

    Commands handle this error like the KeyboardInterrupt that Ctrl-C raises.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


@contextmanager
def handle_signals(
    names: Sequence[str], handler: Callable[[int, FrameType | None], None]
) -> Generator[None]:
    """Use `handler` for the named signals in this context, then restore the previous handlers.

    Outside of the main thread, this function has no effect, because Python only allows signal
    handlers in the main thread. A SIGHUP that is already ignored stays ignored, as `nohup` expects.
    Otherwise, if SIGHUP arrives because the terminal was closed, output to the terminal is
    redirected to /dev/null before `handler` is called.

    Args:
        names: Names of signals, such as "SIGTERM". Signals that the system lacks are left out.
        handler: Function that is called with the signal number and the current stack frame.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}
    sighup = getattr(signal, "SIGHUP", None)
    if previous.get(sighup) == signal.SIG_IGN:
        del previous[sighup]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == sighup:
            _discard_lost_output()
        handler(number, frame)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _discard_lost_output() -> None:
    """Redirect stdout and stderr to /dev/null if their terminal or pipe is closed.

    This keeps a failed print from ending the command before its results are saved.
    """
    # A program at the other end of a pipe gets the same signal. Wait until it has ended.
    time.sleep(0.1)
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, descriptor)
            os.close(devnull)


def raise_stop_signal(number: int, frame: FrameType | None) -> None:
    """Raise `StopSignal`, as the signal handler of commands that save nothing when they stop."""
    del frame
    raise StopSignal(number)


def repair_standard_streams() -> None:
    """Open each standard stream that is closed, and make stdout accept any character.

    If a standard stream stayed closed, the next opened file would get the descriptor of this
    stream, and messages would be written to the file. Characters that the terminal cannot encode
    are printed as escapes.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def report_interruption(reason: KeyboardInterrupt, arguments: Sequence[str]) -> int:
    """Print why the command was stopped and how to continue it, and return the exit code.

    Args:
        reason: The interruption: a `StopSignal`, or KeyboardInterrupt for Ctrl-C.
        arguments: Arguments of the command line. The first one is the name of the command.
    """
    name = next(iter(reason.args), "") if isinstance(reason, StopSignal) else ""
    if is_main_process():
        event = f"stopped by {name}" if name else "interrupted"
        # Without this flag, `pretrain` refuses to write to the folder of an existing run.
        resume = " with --resume" if "pretrain" in arguments[:1] else ""
        print(
            f"ssl-bench: {event}. Saved work is kept. Run the same command again{resume} to "
            "continue",
            file=sys.stderr,
        )
    return Preempted.exit_code if name else INTERRUPTED


def report_error(error: Exception, arguments: Sequence[str]) -> int | None:
    """Print an error on one line and return its exit code.

    If the error is a bug in this program, print nothing and return None.

    This function is separate from `main` to avoid a reference cycle. The traceback of the error
    refers to the stack frame of `main`. If a local variable of `main` also referred to the error,
    neither would be freed, and data workers and memory would stay in use.

    Args:
        error: The error that ended the command.
        arguments: Arguments of the command line. The first one is the name of the command.
    """
    reported = _convert_error(error, next(iter(arguments), ""))
    if reported is None:
        return None
    if reported is not error:
        # The disk or a library has failed, so another attempt to flush stdout would fail too.
        sys.stdout = None
    if reported.is_raised_on_all_ranks and not is_main_process():
        return reported.exit_code
    line = to_one_line(reported)
    line = line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]} ..."
    print(f"ssl-bench: {line}", file=sys.stderr)
    return reported.exit_code


def _convert_error(error: Exception, command: str) -> SslBenchError | None:
    """Return the error to report to the user, or None if the error is a bug in this program.

    `command` is the name of the command, which determines what an out-of-memory error suggests.
    """
    if isinstance(error, SslBenchError):
        return error
    if is_out_of_memory(error):
        return out_of_memory_error(error, command)
    if isinstance(error, ImportError | SyntaxError):
        return broken_file_error(error)
    if isinstance(error, OSError):
        return MachineError(
            f"{error}. Check the disk and its permissions, or add `--debug` to see a traceback",
            hint=("--debug",),
        )
    return None


@dataclass(frozen=True)
class Outcome:
    """Duration and exit code of one part of a command, such as a job of a sweep.

    Attributes:
        seconds: Duration of the part.
        exit_code: Exit code of the part, as if it were a separate command. It is 0 on success.
        error: Error message in one line. It is empty on success.
        ran_out_of_memory: Whether memory ran out in a job of `sweep` that has its own process. Such
            a job can be retried. It is False for all other parts.
    """

    seconds: float
    exit_code: int = 0
    error: str = ""
    ran_out_of_memory: bool = False

    @property
    def state(self) -> Literal["finished", "failed"]:
        return "failed" if self.exit_code else "finished"

    def line(self, count: str, title: str) -> str:
        """Return a message such as "finished 2 of 9 in 40 s, pca on voc2012 val, vit_small".

        Args:
            count: Position of the part, such as "2 of 9".
            title: Description of the part, such as "pca on voc2012 val, vit_small".
        """
        error = f": {self.error}" if self.error else ""
        return f"{self.state} {count} in {format_duration(self.seconds)}, {title}{error}"


def run_and_catch(work: Callable[[], int | None], command: str, *, debug: bool) -> Outcome:
    """Run one part of a command and return its outcome, so that other parts can continue.

    KeyboardInterrupt and `Preempted` are not caught, because they end the whole command.

    Args:
        work: Function that runs the part and returns its exit code, or None for 0.
        command: Name of the command. It determines the hint of an out-of-memory error.
        debug: Whether to raise errors instead of catching them.
    """
    start, message = time.monotonic(), ""
    try:
        code = work() or 0
    except Preempted:
        raise
    except Exception as error:
        if debug:
            raise
        reported = _convert_error(error, command)
        code = reported.exit_code if reported else 1
        message = to_one_line(reported or f"{type(error).__name__}: {error}")
    return Outcome(time.monotonic() - start, code, message)
