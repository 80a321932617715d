"""Print messages and progress on stderr, and escape untrusted text for each output format.

Progress is a bar on a terminal and a list of lines in a log. Untrusted text is text that anybody
may have written: file names, fields of result records, metadata of checkpoints and error messages.
A terminal, TeX, a spreadsheet or a browser could run parts of such a text as a command.
"""

import json
import math
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from functools import cache
from typing import Any, TypeVar

from ssl_bench.system.process import is_main_process

T = TypeVar("T")
_FIRST_LINE_SECONDS, _MAX_SECONDS_BETWEEN_LINES = 20.0, 600.0


def print_message(line: str) -> None:
    """Print a message on stderr without breaking progress bars that are shown at the same time.

    Unprintable characters are escaped. In a distributed run, only the process of rank 0 prints.
    """
    if not is_main_process():
        return
    with bar_class().external_write_mode(file=sys.stderr):
        print(escape_unprintable(line), file=sys.stderr, flush=True)


@cache
def print_message_once(line: str) -> None:
    """Print a message on stderr unless this process has already printed it."""
    print_message(line)


def show_progress(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Return the items as an iterable that shows on stderr how many are finished.

    The remaining time is shown too. A terminal shows a bar. A log gets a line after 20 seconds,
    then each time the elapsed time has doubled, and at least every ten minutes. Only the process of
    rank 0 shows its progress.

    `total` is the number of items. By default, it is `len(items)`, or unknown if items have no
    length.
    """
    if not is_main_process():
        return items
    if total is None and isinstance(items, Sized):
        total = len(items)
    return (_show_bar if sys.stderr.isatty() else _log_progress)(items, description, total)


def _show_bar(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    text = escape_unprintable(description)
    with bar_class()(desc=text, total=total, dynamic_ncols=True, leave=False) as bar:
        for item in items:
            yield item
            bar.update()


@cache
def bar_class() -> Any:
    """Return a subclass of tqdm's progress bar.

    The remaining time is computed without the first item, which takes longer because data and
    models must be loaded. Each process has its own lock, because tqdm's processes share a lock
    after a fork. If a process were killed while it holds a shared lock, all others would wait
    forever.
    """
    # Import tqdm here, because the import takes as long as everything else that `--help` does.
    from tqdm import tqdm

    class Bar(tqdm):  # pyrefly: ignore[implicit-any-type-argument]
        first_seconds: float | None = None

        def update(self, n: float | None = 1) -> bool | None:
            if self.first_seconds is None:
                self.first_seconds = super().format_dict["elapsed"]
            return super().update(n)

        @property
        def format_dict(self) -> MutableMapping[str, Any]:
            values = super().format_dict
            if self.first_seconds is not None and not self.disable:
                seconds = values["elapsed"] - self.first_seconds
                later_items = self.n - self.initial - 1
                if later_items > 0 and seconds > 0:
                    values["rate"] = later_items / seconds
            return values

    # The thread that holds the lock during a fork does not exist in the child.
    os.register_at_fork(after_in_child=lambda: Bar.set_lock(threading.RLock()))
    return Bar


def _log_progress(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    start = time.monotonic()
    next_line, first_seconds = _FIRST_LINE_SECONDS, 0.0
    for count, item in enumerate(items, 1):
        yield item
        elapsed = time.monotonic() - start
        if count == 1:
            first_seconds = elapsed
        if elapsed >= next_line:
            next_line = elapsed + min(elapsed, _MAX_SECONDS_BETWEEN_LINES)
            print_message(
                f"{description}: {_format_progress(count, total, elapsed, first_seconds)}"
            )


def _format_progress(count: int, total: int | None, elapsed: float, first_seconds: float) -> str:
    if not total:
        return f"{count} in {format_duration(elapsed)}"
    if count == 1 < total:
        return f"{count} of {total} in {format_duration(elapsed)}"
    seconds_left = (total - count) * (elapsed - first_seconds) / max(count - 1, 1)
    left = f"about {format_duration(seconds_left)}" if seconds_left >= 1 else "less than a second"
    return f"{count} of {total}, {left} left"


def format_duration(seconds: float) -> str:
    """Format a duration as "40 s", "12 min" or "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(size: int) -> str:
    """Format a number of bytes as "12.3 MB" or "1.2 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):.1f} MB"


def format_memory(num_bytes: int) -> str:
    """Format an amount of memory as "35 MiB", "1.2 GiB" or "12 GiB"."""
    gib = num_bytes / 2**30
    if gib < 0.1:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.2g} GiB"


def format_rate(num_images: int, seconds: float) -> str:
    """Format a number of images per second as "0.25", "12.3" or "1,234"."""
    rate = num_images / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


# Escape untrusted text.

_LATEX = {
    **{character: "\\" + character for character in "_%&#${}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"$\mid$",
    "\N{EN DASH}": "--",
    "±": r"$\pm$",
    "∞": r"$\infty$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "§": r"\S{}",
}
# Characters with a meaning in Markdown. They start tables, tags, code, emphasis, attribute lists or
# mathematics. Others are underscores at the edge of a word, brackets of links, and parts of web and
# e-mail addresses, which Markdown would turn into links.
_MARKDOWN = re.compile(
    r"[|&<>\\`*{}~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[])|:(?=//)|(?<=\bwww)\.|(?<=\w)@(?=\w)",
    re.IGNORECASE,
)
# Beginning of a formula in a spreadsheet. In languages with a decimal comma, a semicolon starts a
# new cell. The last four characters are the full-width forms of "=+-@".
_FORMULA = re.compile(r"(^|;)(\s*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def escape_unprintable(text: str) -> str:
    r"""Replace unprintable characters by Python escapes, so that the text stays on one line.

    For example, the ESC character becomes the visible text `\x1b`. Line ends, characters that
    change the writing direction, and undecodable bytes of file names are also replaced.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def to_one_line(message: object) -> str:
    """Join the lines of a message with spaces, and replace unprintable characters by escapes."""
    return escape_unprintable(" ".join(str(message).split()))


def escape_lines(lines: Iterable[str]) -> str:
    """Replace unprintable characters in each line by escapes, and join the lines with newlines."""
    return "\n".join(map(escape_unprintable, lines))


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of texts as a table with aligned columns. Replace unprintable characters."""
    cells = [[escape_unprintable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def escape_latex(text: str) -> str:
    """Escape a text for a cell of a LaTeX table."""
    escaped = "".join(_LATEX.get(character, character) for character in escape_unprintable(text))
    # Braces protect a leading bracket or star. LaTeX would read it as an argument of the \\ that
    # ends the previous row.
    return f"{{{escaped[0]}}}{escaped[1:]}" if escaped.startswith(("[", "*")) else escaped


def escape_markdown(text: str) -> str:
    """Escape a line or a table cell for Markdown on GitHub and in MkDocs."""
    entities = {"|": "\\|", "&": "&amp;", "<": "&lt;", ">": "&gt;"}
    return _MARKDOWN.sub(
        lambda match: entities.get(match[0], f"&#{ord(match[0])};"), escape_unprintable(text)
    )


def escape_csv(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would compute as a formula, such as =A1.

    Values that are not strings, and numbers in strings such as "-1", are not changed.
    """
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    return _FORMULA.sub(r"\1\2'", escape_unprintable(value))


def escape_undecodable(text: str) -> str:
    """Escape the bytes of a file name that are not UTF-8, which most formats cannot store."""
    return text.encode(errors="backslashreplace").decode()


def dump_json(
    value: Any, *, indent: int | None = 1, text: Callable[[str], str] | None = None
) -> str:
    """Convert a nested value to ASCII JSON that every parser accepts.

    NaN and infinity become null, because JSON has no such numbers.

    Args:
        value: Mappings, sequences, numbers and texts.
        indent: Number of spaces for each level, or None to write a single line.
        text: Function that converts each text. By default it escapes undecodable bytes.
    """
    separators = (",", ":") if indent is None else None
    plain = to_plain_json(value, text=text or escape_undecodable)
    return json.dumps(plain, indent=indent, separators=separators, default=list)


def to_plain_json(
    value: Any, *, infinity: str | None = None, text: Callable[[str], str] = str
) -> Any:
    """Convert a nested value to JSON types, with null for NaN and infinity.

    Args:
        value: Mappings, sequences, numbers and texts. Values of other types are not changed.
        infinity: Text that replaces positive infinity. By default, it becomes null.
        text: Function that converts each text and each key.
    """
    # The frequent types come first, because the check for a mapping is slow.
    if value is None or type(value) in (int, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return infinity if value == math.inf else None
    if type(value) is float:
        return value
    if isinstance(value, Mapping):
        return {
            text(str(name)): to_plain_json(item, infinity=infinity, text=text)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [to_plain_json(item, infinity=infinity, text=text) for item in value]
    return value


def escape_in_template(value: Any) -> Any:
    """Replace unprintable characters in a text before it is inserted into an HTML template.

    The template engine escapes HTML itself. Values other than plain strings, such as its `Markup`
    objects, are returned unchanged.
    """
    return escape_unprintable(value) if type(value) is str else value


def escape_matplotlib(text: str) -> str:
    """Escape a text for a figure, because matplotlib renders text between dollar signs as math."""
    return escape_unprintable(text).replace("$", r"\$")


def safe_file_name(name: str) -> str:
    """Convert a name to at most 80 characters that are valid in any file system and URL.

    Each sequence of invalid characters becomes "_".
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80]


def is_file_name(name: str) -> bool:
    """Return whether a text is a file name that contains no folder on any operating system.

    Surrogate characters are only allowed if they represent undecodable bytes of a file name, as in
    `os.fsdecode`.
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def quote_command(words: Sequence[str]) -> str:
    """Quote the words of a command, so that bash and zsh read exactly these words.

    Unprintable characters are escaped.
    """
    plain = {*range(32, 127)} - {*b"\\'"}
    quoted = []
    for word in words:
        characters = (chr(b) if b in plain else f"\\x{b:02x}" for b in os.fsencode(word))
        quoted.append(shlex.quote(word) if word.isprintable() else f"$'{''.join(characters)}'")
    return " ".join(quoted)
