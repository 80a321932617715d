"""Rows of words as text, Markdown or LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.errors import ConfigurationError

STYLES = ("text", "markdown", "latex")


@dataclass(frozen=True)
class Word:
    """One cell of a sheet; the marked ones are set in bold."""

    text: str
    marked: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table that is ready to be set.

    Attributes:
        rows: Each starts with the name of the row, which is never marked.
        note: Where the numbers are from, set below them.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Word, ...], ...]
    note: str


def set_sheet(sheet: Sheet, style: str) -> str:
    """The sheet as text, markdown or latex, ending in a newline.

    Raises:
        ConfigurationError: another style.
    """
    if style == "markdown":
        return _as_markdown(sheet)
    if style == "latex":
        return _as_latex(sheet)
    if style == "text":
        return _as_text(sheet)
    raise ConfigurationError(f"expected a style of {'|'.join(STYLES)}, got {style!r}")


def _as_markdown(sheet: Sheet) -> str:
    lines = [f"**{sheet.title}**", "", _piped([name.replace("|", "\\|") for name in sheet.head])]
    lines.append("|---|" + "---:|" * (len(sheet.head) - 1))
    lines += [_piped(row) for row in _words(sheet, "**{}**")]
    return "\n".join([*lines, "", f"<sub>{sheet.note}</sub>"]) + "\n"


def _piped(words: Sequence[str]) -> str:
    return " | ".join(["", *words, ""]).strip()


def _as_text(sheet: Sheet) -> str:
    rows = [list(sheet.head), *_words(sheet, "*{}*")]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    rule = "-" * len(lines[0])
    return "\n".join([sheet.title, rule, lines[0], rule, *lines[1:], rule, sheet.note]) + "\n"


def _as_latex(sheet: Sheet) -> str:
    body = [" & ".join(map(_latex_words, row)) for row in _words(sheet, r"\textbf{{{}}}")]
    lines = [
        f"% {sheet.note}",
        r"\begin{tabular}{" + "r" * len(sheet.head) + "}",
        r"\toprule",
        " & ".join(map(_latex_name, sheet.head)) + r" \\",
        r"\midrule",
        *(row + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
        f"% {sheet.title}",
    ]
    return "\n".join(lines) + "\n"


def _words(sheet: Sheet, bold: str) -> list[list[str]]:
    return [[bold.format(w.text) if w.marked else w.text for w in row] for row in sheet.rows]


def _latex_words(text: str) -> str:
    return text.replace("±", r"$\pm$").replace("†", r"$\dagger$")


def _latex_name(text: str) -> str:
    return "".join("\\" + c if c in "_%&#${}" else c for c in text)
