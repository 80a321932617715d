"""How text from outside is written, one function a border, so that none of it acts there.

Names of files, fields of records, metadata of checkpoints and messages of errors come from
anywhere: they may hold commands of a terminal, of TeX, of a spreadsheet or of a browser.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
# A bar of a table, tags, code, emphasis, attribute lists and mathematics; underscores at the edge
# of a word, brackets before an address, and addresses that become links by themselves.
_MARKDOWN = re.compile(
    r"[|&<>\\`*{}~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[])|:(?=//)|(?<=\bwww)\.|(?<=\w)@(?=\w)",
    re.IGNORECASE,
)
# Behind a semicolon too: it ends a cell where the comma is the sign of fractions. The last four
# are the wide forms of the signs before.
_FORMULA = re.compile(r"(^|;)(\s*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def escape_unprintable(text: str) -> str:
    r"""The text in one line that is only seen: an escape sequence begins with `\x1b` written out.

    So are line ends, marks that turn the direction of writing, and bytes that are no text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def to_one_line(message: object) -> str:
    """A message for a terminal; its lines become one."""
    return escape_unprintable(" ".join(str(message).split()))


def escape_lines(lines: Iterable[str]) -> str:
    """Lines of our own, one below the other, with whatever in them."""
    return "\n".join(map(escape_unprintable, lines))


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of as many cells each, the cells of a column below each other."""
    cells = [[escape_unprintable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def escape_latex(text: str) -> str:
    """A cell of a LaTeX table."""
    escaped = "".join(_LATEX.get(character, character) for character in escape_unprintable(text))
    # After the \\ of the line above they would be read as its argument or its star.
    return f"{{{escaped[0]}}}{escaped[1:]}" if escaped.startswith(("[", "*")) else escaped


def escape_markdown(text: str) -> str:
    """A line or cell of Markdown, as GitHub and the pages of the project read it."""
    named = {"|": "\\|", "&": "&amp;", "<": "&lt;", ">": "&gt;"}
    return _MARKDOWN.sub(
        lambda sign: named.get(sign[0], f"&#{ord(sign[0])};"), escape_unprintable(text)
    )


def escape_csv(value: Any) -> Any:
    """A field of CSV: a text that a spreadsheet would compute begins with an apostrophe.

    Numbers, also as text and with a sign, stay as they are.
    """
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    return _FORMULA.sub(r"\1\2'", escape_unprintable(value))


def dump_json(
    value: Any, *, indent: int | None = 1, text: Callable[[str], str] | None = None
) -> str:
    """JSON in ASCII that every reader takes: null for what is no number, no half characters.

    Args:
        value: What is to be written.
        indent: Of the lines; None for a single line.
        text: What to do with each text, instead of leaving it whole.
    """
    separators = (",", ":") if indent is None else None
    whole = text or (lambda one: one.encode(errors="backslashreplace").decode())
    plain = to_plain_json(value, text=whole)
    return json.dumps(plain, indent=indent, separators=separators, default=list)


def to_plain_json(
    value: Any, *, infinity: str | None = None, text: Callable[[str], str] = str
) -> Any:
    """Values of which JSON has all: null for what is no number, `infinity` for infinity."""
    if value is None or type(value) in (int, bool):
        # Asked first, because whether something is a mapping takes long to know.
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
    """What a template prints; markup of the templates themselves is no plain `str`."""
    return escape_unprintable(value) if type(value) is str else value


def escape_matplotlib(text: str) -> str:
    """A text in a drawing of matplotlib, which reads mathematics between dollars."""
    return escape_unprintable(text).replace("$", r"\$")


def safe_file_name(name: str) -> str:
    """A name that any file system and address can hold."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80]


def is_file_name(name: str) -> bool:
    """Whether a file may be called so: it names nothing but itself, here and on other systems.

    Bytes that are no text may be in it, and no half characters.
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def quote_command(words: Sequence[str]) -> str:
    """A command that can be shown and typed; bash and zsh read `$'...'` as it was."""
    plain = {*range(32, 127)} - {*b"\\'"}
    typed = []
    for word in words:
        signs = (chr(b) if b in plain else f"\\x{b:02x}" for b in os.fsencode(word))
        typed.append(shlex.quote(word) if word.isprintable() else f"$'{''.join(signs)}'")
    return " ".join(typed)
