"""How a command begins and ends: streams that can be used, errors that say what to do."""

import io
import os
import sys
from collections.abc import Sequence

from ssl_bench.errors import MachineError, SslBenchError
from ssl_bench.system.escaping import one_line
from ssl_bench.system.imports import broken_file
from ssl_bench.system.memory import is_out_of_memory, memory_error
from ssl_bench.system.progress import is_heard

_LONGEST = 1000


def open_streams() -> None:
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


def reported(error: Exception, arguments: Sequence[str]) -> int | None:
    """Say an error in one line; its exit code, or None for a fault of this program.

    Not in `main`, whose frame the error's traceback holds: the two would keep each other, and with
    them data workers and memory.
    """
    known = _known(error, arguments)
    if known is None:
        return None
    if known is not error:
        # What is still to be written there would only fail again.
        sys.stdout = None
    if known.is_shared and not is_heard():
        return known.exit_code
    line = one_line(known)
    # Somebody's text may be of any length.
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
    print(f"ssl-bench: {line}", file=sys.stderr)
    return known.exit_code


def _known(error: Exception, arguments: Sequence[str]) -> SslBenchError | None:
    """An error as one that says what to do."""
    if isinstance(error, SslBenchError):
        return error
    if is_out_of_memory(error):
        return memory_error(error, next(iter(arguments), ""))
    if isinstance(error, ImportError | SyntaxError):
        return broken_file(error)
    if isinstance(error, OSError):
        return MachineError(f"{error}; look at the disk and its rights (--debug)")
    return None


def failure(error: Exception, command: str) -> tuple[int, str]:
    """Exit code and one line for what ended a part of a command while other parts go on."""
    if is_out_of_memory(error):
        error = memory_error(error, command)
    if isinstance(error, ImportError | SyntaxError):
        error = broken_file(error)
    line = one_line(error)
    known = isinstance(error, SslBenchError)
    return (error.exit_code, line) if known else (1, f"{type(error).__name__}: {line}")
