"""Errors a user can meet: one line each, and the exit code the command ends with."""

import ast
import json
import re
import shlex
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from pathlib import Path

_keyword_names = ContextVar[Mapping[str, str] | None]("keyword_names", default=None)
_SWITCHES = ("--overwrite",)
_CONSTANTS = {"null": "None", "true": "True", "false": "False"}
_UNQUOTED = ("{number}", "{value}")


class SslBenchError(Exception):
    """Base of everything the command line reports in one line instead of a traceback.

    Its text is the message and, where the message does not name them itself, the words of the hint.

    Args:
        message: What is wrong and what was expected, in one line.
        hint: The words to type instead: flags, keys with their values, or a whole command that
            begins with "ssl-bench". "{name}" stands for what only the user knows; a text that is
            inserted needs `escape_braces`. The word "or" separates alternatives.

    Attributes:
        is_raised_on_all_ranks: All processes of a run end with it, so that the first alone says it.
    """

    exit_code = 1
    is_raised_on_all_ranks = False
    _keyword_names: Mapping[str, str] | None = None

    def __init__(self, message: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._hint = tuple(hint)

    @property
    def hint(self) -> tuple[str, ...]:
        """Return the words to type; those of the error that it was raised from, if it has none."""
        cause = self.__cause__
        return self._hint or (cause.hint if isinstance(cause, SslBenchError) else ())

    def __str__(self) -> str:
        return with_hint(super().__str__(), hint=self.hint, keyword_names=self._keyword_names)

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        # A pickle has no cause, whose hint it would lose.
        return type(self), self.args, {**self.__dict__, "_hint": self.hint}


def split_alternatives(hint: Sequence[str]) -> list[tuple[str, ...]]:
    """Split a hint into what can be typed one in place of the other."""
    groups = groupby(hint, key=lambda word: word == "or")
    return [tuple(words) for is_separator, words in groups if not is_separator]


def with_hint(
    message: str, *, hint: Sequence[str], keyword_names: Mapping[str, str] | None = None
) -> str:
    """Append the words of a hint to a message, except those that the message contains.

    Args:
        message: One sentence.
        hint: Words as in `SslBenchError`.
        keyword_names: Names as in `hints_for_python`, which sets the default.
    """
    names = _keyword_names.get() if keyword_names is None else keyword_names
    ways = dict.fromkeys(
        format_keywords(words, names) if names is not None else format_command(words)
        for words in split_alternatives(hint)
    )
    missing = [f"`{way}`" for way in ways if not _mentions(message, way)]
    return f"{message}; use {' or '.join(missing)}" if missing else message


@contextmanager
def hints_for_python(keyword_names: Mapping[str, str]) -> Generator[None]:
    """Show hints as keyword arguments of a Python function instead of flags and KEY=VALUE.

    Args:
        keyword_names: Argument names of flags and keys that differ from the usual ones, such as
            {"--checkpoint": "encoder"}.
    """
    token = _keyword_names.set(keyword_names)
    try:
        yield
    except SslBenchError as error:
        # The error is printed after this function has ended.
        error._keyword_names = keyword_names
        raise
    finally:
        _keyword_names.reset(token)


def format_keywords(words: Sequence[str], names: Mapping[str, str]) -> str:
    """Return words of a hint as keyword arguments: `--dtype float32` as `dtype="float32"`.

    A key of the probe becomes a keyword without "probe.", and other keys with dots become
    `**{"dataset.num_val": 4}`. Whole commands stay as they are.
    """
    if words[0] == "ssl-bench":
        return format_command(words)
    arguments, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            word, _, value = word.partition("=")
        else:
            value = rest.pop(0) if rest and word not in _SWITCHES else "true"
        last = word.removeprefix("probe.").lstrip("-").replace("-", "_")
        name, shown = names.get(word, word if "." in last else last), _as_python(value)
        arguments.append(f'**{{"{name}": {shown}}}' if "." in name else f"{name}={shown}")
    return ", ".join(arguments)


def _as_python(value: str) -> str:
    """Return the value of a flag or key as a Python literal, or a placeholder in capitals."""
    text = fill_placeholders(value, str.upper)
    if value in _UNQUOTED or value in _CONSTANTS:
        return _CONSTANTS.get(value, text)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        found = text
    is_text = not isinstance(found, (int, float, list))
    return json.dumps(text, ensure_ascii=False) if is_text else repr(found)


def _mentions(message: str, words: str) -> bool:
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
