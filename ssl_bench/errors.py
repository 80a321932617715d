"""Errors a user can meet: one line each, and the exit code the command ends with."""

import re
import shlex
import traceback
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path


class SslBenchError(Exception):
    """Base of everything the command line reports in one line instead of a traceback.

    Its text is the message and, where the message does not name them itself, the words of the hint.

    Args:
        message: What is wrong and what was expected, in one line.
        hint: The words to type instead: flags, keys with their values, or a whole command that
            begins with "ssl-bench". "{name}" stands for what only the user knows; a text that is
            inserted is a `escape_braces`. The word "or" separates alternatives.

    Attributes:
        is_raised_on_all_ranks: All processes of a run end with it, so that the first alone says it.
    """

    exit_code = 1
    is_raised_on_all_ranks = False
    _is_whole = False

    def __init__(self, message: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._hint = tuple(hint)

    @property
    def hint(self) -> tuple[str, ...]:
        """Return the words to type; those of the error that it was raised from, if it has none."""
        cause = self.__cause__
        return self._hint or (cause.hint if isinstance(cause, SslBenchError) else ())

    def reword(self, reworded: Callable[[str], str]) -> None:
        """Replace the whole text; the hint stays as it is and is no longer appended."""
        self.args = (reworded(str(self)),)
        self._is_whole = True

    def __str__(self) -> str:
        message, typed = super().__str__(), map(format_command, split_alternatives(self.hint))
        if self._is_whole:
            return message
        missing = [f"`{words}`" for words in typed if not _names(message, words)]
        return f"{message}; use {' or '.join(missing)}" if missing else message

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        # A pickle has no cause, whose hint it would lose.
        return type(self), self.args, {**self.__dict__, "_hint": self.hint}


def split_alternatives(hint: Sequence[str]) -> list[tuple[str, ...]]:
    """Split a hint into what can be typed one in place of the other."""
    groups = groupby(hint, key=lambda word: word == "or")
    return [tuple(words) for is_separator, words in groups if not is_separator]


def _names(message: str, words: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(words)}(?![\w=-])", message) is not None


def join_alternatives(*ways: Sequence[str]) -> tuple[str, ...]:
    """Return one hint of several ways; those without words are left out."""
    return tuple(word for way in filter(None, ways) for word in ("or", *way))[1:]


def escape_braces(text: str) -> str:
    """Return a text as a part of a hint in which nothing is a placeholder."""
    return text.replace("{", "{{").replace("}", "}}")


def format_command(words: Sequence[str]) -> str:
    """Return words as a shell takes them, "{name}" as NAME."""
    return shlex.join(fill_placeholders(word, str.upper) for word in words)


def fill_placeholders(word: str, fill: Callable[[str], str]) -> str:
    """Replace the placeholders in a word of a hint, given their names, and unescape its braces."""
    parts = r"\{\{|\}\}|\{(\w+)\}"
    return re.sub(parts, lambda one: fill(one[1]) if one[1] else one[0][0], word)


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


def broken_file_error(error: Exception, packages: Sequence[str] = PACKAGES) -> BrokenFile:
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
