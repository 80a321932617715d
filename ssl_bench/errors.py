"""Errors that the command line reports in one line, their exit codes, and their hints.

An error has a message (what is wrong and what was expected) and a hint (the words to type instead).
The hint is a tuple of words, so that it can be shown as flags or as Python keywords, and tested.
"""

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

PACKAGES = ("ssl_bench", "probes", "pretrain")
"""Top-level packages of this suite."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class SslBenchError(Exception):
    """Base class of all errors that the command line reports without a traceback.

    The text of an error is its message followed by its hint.

    Args:
        message: What is wrong and what was expected, in one line.
        hint: Words to type instead: flags, KEY=VALUE settings, or a whole command that begins with
            "ssl-bench". "{name}" is a placeholder for something that only the user knows. The word
            "or" separates alternatives. Text from outside must pass through `escape_braces`.

    Attributes:
        exit_code: Exit code of the command.
        is_raised_on_all_ranks: Whether all processes of a distributed run raise this error. Then
            only the first process reports it.
    """

    exit_code = 1
    is_raised_on_all_ranks = False
    _keyword_names: Mapping[str, str] | None = None

    def __init__(self, message: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._hint = tuple(hint)

    @property
    def hint(self) -> tuple[str, ...]:
        """Return the words to type. An error without a hint has that of its cause."""
        cause = self.__cause__
        return self._hint or (cause.hint if isinstance(cause, SslBenchError) else ())

    def __str__(self) -> str:
        return with_hint(super().__str__(), hint=self.hint, keyword_names=self._keyword_names)

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        # Pickle drops the cause, so the hint of the cause is stored.
        return type(self), self.args, {**self.__dict__, "_hint": self.hint}


class ConfigurationError(SslBenchError, ValueError):
    """A wrong task, block, key or value."""

    exit_code = 2


class DataError(SslBenchError, ValueError):
    """A dataset, image, mask or annotation that cannot be used."""

    exit_code = 3


class UnreadableImage(DataError):
    """An image file that is empty, truncated or in an unknown format.

    Args:
        message: What is wrong and what was expected, in one line.
        remedy: What would make an intact file readable: a Python package such as one for HEIC, or
            a setting. Empty if the file is damaged.
        hint: Words to type, as in `SslBenchError`.
    """

    def __init__(self, message: str, remedy: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.remedy = remedy


class CheckpointError(SslBenchError, ValueError):
    """A model or checkpoint that cannot be loaded."""

    exit_code = 4


class UnfitEncoder(ConfigurationError, CheckpointError):
    """An encoder that lacks what a probe needs, such as a [CLS] token. Another probe may fit it."""


class MachineError(SslBenchError, OSError):
    """A failure of the disk, the network or an installed library."""

    exit_code = 5


class BrokenFile(MachineError):
    """A Python file that cannot be imported, such as a probe with a syntax error."""


class Preempted(SslBenchError):
    """The scheduler stopped the run. Its state is saved, and the same command continues it."""

    exit_code = 75


def broken_file_error(error: Exception, packages: Sequence[str] = PACKAGES) -> BrokenFile:
    """Return the error for a Python file that cannot be imported, with its path and line.

    Args:
        error: The exception that the import raised.
        packages: Names of folders. The innermost file of the traceback that lies in one of them is
            named, or the innermost file of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    own = [file for file in files if {*packages} & {*Path(file.filename).parent.parts}]
    last, reason = (own or files)[-1], str(error)
    path, line = last.filename, last.lineno or 0
    if isinstance(error, SyntaxError):
        path, line, reason = error.filename or path, error.lineno or 0, error.msg
    return BrokenFile(f"{path}, line {line}, cannot be imported: {type(error).__name__}: {reason}")


_keyword_names = ContextVar[Mapping[str, str] | None]("keyword_names", default=None)
_SWITCHES = ("--overwrite",)
_CONSTANTS = {"null": "None", "true": "True", "false": "False"}
_UNQUOTED = ("{number}", "{value}")


def with_hint(
    message: str, *, hint: Sequence[str], keyword_names: Mapping[str, str] | None = None
) -> str:
    """Return a message followed by the alternatives of a hint that it does not contain.

    Args:
        message: One sentence.
        hint: Words to type, as in `SslBenchError`.
        keyword_names: Names of keyword arguments, as in `hints_for_python`, which sets the default.
    """
    names = _keyword_names.get() if keyword_names is None else keyword_names
    ways = dict.fromkeys(
        format_keywords(words, names) if names is not None else format_command(words)
        for words in split_alternatives(hint)
    )
    missing = [f"`{way}`" for way in ways if not _mentions(message, way)]
    return f"{message}; use {' or '.join(missing)}" if missing else message


def _mentions(message: str, words: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(words)}(?![\w=-])", message) is not None


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


def join_alternatives(*ways: Sequence[str]) -> tuple[str, ...]:
    """Return one hint with several alternatives. Empty ones are left out."""
    return tuple(word for way in filter(None, ways) for word in ("or", *way))[1:]


def split_alternatives(hint: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the alternatives of a hint. Only one of them is typed."""
    groups = groupby(hint, key=lambda word: word == "or")
    return [tuple(words) for is_separator, words in groups if not is_separator]


def escape_braces(text: str) -> str:
    """Return a text that contains no placeholder when it is inserted into a hint."""
    return text.replace("{", "{{").replace("}", "}}")


def fill_placeholders(word: str, fill: Callable[[str], str]) -> str:
    """Return a word of a hint with its placeholders filled and its braces unescaped.

    Args:
        word: Word of a hint, such as "--out" or "train.epochs={value}".
        fill: Function from the name of a placeholder to its text.
    """
    pattern = r"\{\{|\}\}|\{(\w+)\}"
    return re.sub(pattern, lambda match: fill(match[1]) if match[1] else match[0][0], word)


def format_command(words: Sequence[str]) -> str:
    """Return words of a hint as shell text, with placeholders in capitals."""
    return " ".join(_quote(fill_placeholders(word, str.upper)) for word in words)


def _quote(word: str) -> str:
    # probe.facet='3' is easier to read in double quotes than as shlex quotes it.
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


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
