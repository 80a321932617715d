"""Errors a user can meet: one line each, and the exit code the command ends with."""

import traceback
from collections.abc import Sequence
from pathlib import Path


class SslBenchError(Exception):
    """Base of everything the command line reports in one line instead of a traceback.

    Attributes:
        hint: The words to type instead, where the message recommends some: flags, keys with their
            values, or a whole command that begins with "ssl-bench". "{name}" stands for what only
            the user knows.
        is_shared: All processes of a run end with it, so that the first alone says it.
    """

    exit_code = 1
    is_shared = False

    def __init__(self, message: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hint = tuple(hint)


class ConfigurationError(SslBenchError, ValueError):
    """A wrong task, layer, key or value."""

    exit_code = 2


class DataError(SslBenchError, ValueError):
    """A dataset, image, mask or annotation that cannot be used."""

    exit_code = 3


class UnreadableImage(DataError):
    """A file is empty, cut short or not one image; `--on-bad-image skip` leaves it out.

    Attributes:
        remedy: What reads files of this kind, which is whole and named HEIC, for example.
    """

    def __init__(self, message: str, remedy: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.remedy = remedy


class CheckpointError(SslBenchError, ValueError):
    """A model or checkpoint that cannot be loaded."""

    exit_code = 4


class UnfitEncoder(ConfigurationError, CheckpointError):
    """An encoder without what is asked of it, such as a [CLS] token; another question may fit."""


class MachineError(SslBenchError, OSError):
    """The disk, the network or a library of this machine failed."""

    exit_code = 5


class BrokenFile(MachineError):
    """A file of Python that cannot be imported, such as a probe with a mistake in it."""


class Preempted(SslBenchError):
    """Asked to stop by the scheduler; everything is saved, start it again."""

    exit_code = 75


INTERRUPTED = 130

PACKAGES = ("ssl_bench", "probes", "pretrain")
"""Those of this suite."""


def broken_file(error: Exception, packages: Sequence[str] = PACKAGES) -> BrokenFile:
    """What was raised while a file was imported, in one line: file, line and what is wrong there.

    Args:
        error: As it was raised.
        packages: Of several files on the way, the last one in their folders is named.
    """
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    own = [one for one in files if {*packages} & {*Path(one.filename).parent.parts}]
    last, what = (own or files)[-1], str(error)
    path, line = last.filename, last.lineno or 0
    if isinstance(error, SyntaxError):
        path, line, what = error.filename or path, error.lineno or 0, error.msg
    return BrokenFile(
        f"{path}, line {line}, cannot be imported: {type(error).__name__}: {what}; mend that file"
    )
