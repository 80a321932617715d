"""Define the errors that the command line reports in one line, with exit codes and hints.

An error has a message, which says what is wrong and what was expected. An error may also have a
hint, which says what to type instead. A hint is stored as a tuple of words, so that it can be shown
as flags or as Python keyword arguments.
"""

import ast
import json
import re
import shlex
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

PACKAGES = ("ssl_bench", "probes", "pretrain")
"""Names of the top-level Python packages of this repository."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class SslBenchError(Exception):
    """Base class of all errors that the command line reports without a traceback.

    The text of an error is its message followed by its hint.

    Args:
        message: What is wrong and what was expected, in one line.
        hint: Words to type instead: flags, KEY=VALUE settings, or a whole command that begins with
            "ssl-bench". The word "or" separates alternatives, as in ("--device", "cpu", "or",
            "--device", "cuda"). "{name}" is a placeholder for a value that only the user knows.
            Pass file names and other text that may contain braces through `escape_braces`.

    Attributes:
        exit_code: Exit code of the command.
        is_raised_on_all_ranks: Whether all processes of a distributed run raise this error. Only
            the first process reports such an error.
    """

    exit_code = 1
    is_raised_on_all_ranks = False
    _keyword_names: Mapping[str, str] | None = None

    def __init__(self, message: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._hint = tuple(hint)

    @property
    def hint(self) -> tuple[str, ...]:
        """Return what the user should type instead, as a tuple of words.

        If this error has no hint, the hint of the error that caused it (`__cause__`) is returned.
        """
        cause = self.__cause__
        return self._hint or (cause.hint if isinstance(cause, SslBenchError) else ())

    def __str__(self) -> str:
        return with_hint(super().__str__(), hint=self.hint, keyword_names=self._keyword_names)

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        # Pickle drops `__cause__`, so store its hint in this error.
        return type(self), self.args, {**self.__dict__, "_hint": self.hint}


class ConfigurationError(SslBenchError, ValueError):
    """Raised if a task, block, config key or value is invalid."""

    exit_code = 2


class DataError(SslBenchError, ValueError):
    """Raised if a dataset, image, mask or annotation cannot be used."""

    exit_code = 3


class UnreadableImageError(DataError):
    """Raised if an image file is empty, truncated or in an unknown format.

    Args:
        message: What is wrong with the file, in one line.
        remedy: What makes the file readable: the name of a Python package to install, or a setting
            such as "data.bits=16". The remedy of a damaged file is empty.
        hint: What the user should type instead, as a tuple of words, such as ("--device", "cpu").
    """

    def __init__(self, message: str, remedy: str = "", *, hint: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.remedy = remedy


class CheckpointError(SslBenchError, ValueError):
    """Raised if a model or checkpoint cannot be loaded."""

    exit_code = 4


class UnsupportedEncoderError(ConfigurationError, CheckpointError):
    """Raised if an encoder lacks an output that a probe needs, such as a [CLS] token.

    Other probes may support the encoder.
    """


class MachineError(SslBenchError, OSError):
    """Raised if the disk, the internet connection, the hardware or an installed library fails."""

    exit_code = 5


class BrokenFileError(MachineError):
    """Raised if a Python file cannot be used, for example because it has a syntax error."""


class Preempted(SslBenchError):
    """Raised if a signal stops a pretraining run, for example SIGUSR1 from SLURM.

    Unless the message says otherwise, run the command again with `--resume` to continue the run.
    """

    exit_code = 75


def broken_file_error(error: Exception, packages: Sequence[str] = PACKAGES) -> BrokenFileError:
    """Return an error that states the Python file and the line in which an exception was raised.

    The last call in a traceback is often inside a library. The error therefore states the last call
    in a file of `packages`. If no call is in such a file, the error states the last call of the
    traceback. For a SyntaxError, the error states the invalid line.

    Args:
        error: The exception with its traceback.
        packages: Names of packages, such as "probes". A file belongs to a package if a folder in
            the path of the file has the name of the package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    own = [file for file in files if {*packages} & {*Path(file.filename).parent.parts}]
    last, reason = (own or files)[-1], str(error)
    path, line = last.filename, last.lineno or 0
    if isinstance(error, SyntaxError):
        path, line, reason = error.filename or path, error.lineno or 0, error.msg
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    package = missing.partition(".")[0]
    # If the package is installed and only lacks this module, another version of it is needed.
    if package and find_spec(package) is None:
        reason += f". If {package} is a package, run: pip install {package}"
    return BrokenFileError(f"{path}, line {line}, fails with {type(error).__name__}: {reason}")


_keyword_names = ContextVar[Mapping[str, str] | None]("keyword_names", default=None)
_SWITCHES = ("--overwrite",)
_CONSTANTS = {"null": "None", "true": "True", "false": "False"}
_UNQUOTED = ("{number}", "{value}")


def with_hint(
    message: str, *, hint: Sequence[str], keyword_names: Mapping[str, str] | None = None
) -> str:
    """Append a hint (what the user should type instead) to an error message.

    For example, the hint ("--device", "cpu") becomes "; use `--device cpu`". In the context
    `hints_for_python`, this hint becomes "; use `device="cpu"`".

    Args:
        message: What is wrong.
        hint: Words to type. The word "or" separates alternatives. An alternative that the message
            already contains is left out.
        keyword_names: Argument names for some flags and keys, such as {"--checkpoint": "encoder"}.
            If these names are given, the hint is always shown as Python arguments.
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
    """Show the hints of errors as Python keyword arguments inside this context.

    Outside of this context, hints are shown as command-line flags and KEY=VALUE settings.

    Args:
        keyword_names: Argument names for some flags and keys, such as {"--checkpoint": "encoder"}.
            All other argument names are derived from the flag or key: `--batch-size` becomes
            `batch_size`.
    """
    token = _keyword_names.set(keyword_names)
    try:
        yield
    except SslBenchError as error:
        # Store the names in the error, because the error is printed after this context has ended.
        error._keyword_names = keyword_names
        raise
    finally:
        _keyword_names.reset(token)


def join_alternatives(*ways: Sequence[str]) -> tuple[str, ...]:
    """Join hints, which are tuples of words to type, into one hint with the word "or" between them.

    For example, ("--device", "cpu") and ("--jobs", "1") become ("--device", "cpu", "or", "--jobs",
    "1"). Empty hints are left out.
    """
    return tuple(word for way in filter(None, ways) for word in ("or", *way))[1:]


def split_alternatives(hint: Sequence[str]) -> list[tuple[str, ...]]:
    """Split an error's hint at each word "or" into alternatives, such as ("--device", "cpu")."""
    groups = groupby(hint, key=lambda word: word == "or")
    return [tuple(words) for is_separator, words in groups if not is_separator]


def escape_braces(text: str) -> str:
    """Double the braces in a text, so that {name} is not a placeholder in the hint of an error."""
    return text.replace("{", "{{").replace("}", "}}")


def fill_placeholders(word: str, fill: Callable[[str], str]) -> str:
    """Replace each placeholder in a word, such as {folder}, by the result of `fill("folder")`.

    The double braces that `escape_braces` writes become single braces.
    """
    pattern = r"\{\{|\}\}|\{(\w+)\}"
    return re.sub(pattern, lambda match: fill(match[1]) if match[1] else match[0][0], word)


def format_command(words: Sequence[str]) -> str:
    """Join the words of an error's hint into a shell command.

    Each placeholder becomes a word in capital letters: {folder} becomes FOLDER.
    """
    return " ".join(_quote(fill_placeholders(word, str.upper)) for word in words)


def _quote(word: str) -> str:
    # "probe.facet='3'" in double quotes is easier to read than the output of shlex.quote.
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def format_keywords(words: Sequence[str], names: Mapping[str, str]) -> str:
    """Convert the words of an error's hint to Python keyword arguments.

    `--dtype float32` becomes `dtype="float32"`, and `probe.tau=0.3` becomes `tau=0.3`. All other
    keys that contain a dot become a dictionary, such as `**{"dataset.num_val": 4}`. Complete
    `ssl-bench` commands are not converted.

    Args:
        words: Words of the hint.
        names: Argument names for some flags and keys, such as {"--checkpoint": "encoder"}. All
            other argument names are derived from the flag or key.
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
    text = fill_placeholders(value, str.upper)
    if value in _UNQUOTED or value in _CONSTANTS:
        return _CONSTANTS.get(value, text)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        found = text
    is_text = not isinstance(found, (int, float, list))
    return json.dumps(text, ensure_ascii=False) if is_text else repr(found)
