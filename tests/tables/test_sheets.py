"""Sheets in every style, with characters that are special in that style."""

import re

from ssl_bench.tables.sheets import Cell, Sheet, default_format, format_sheet

SHEET = Sheet(
    title="a title",
    head=("encoder", "voc_1", "b|c"),
    rows=(
        (Cell("skip & 100%"), Cell("32.3 ± 1.2 †4", is_best=True), Cell("5.0")),
        (Cell("[x]"), Cell("7.0", is_second=True), Cell("", is_best=True)),
    ),
    notes=("one", "two"),
)


def test_latex_is_escaped_and_uses_booktabs():
    assert format_sheet(SHEET, "latex").splitlines() == [
        "% a title",
        "% one",
        "% two",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"encoder & voc\_1 & b$\mid$c \\",
        r"\midrule",
        r"skip \& 100\% & \textbf{32.3 $\pm$ 1.2} $\dagger$4 & 5.0 \\",
        r"{[}x] & \underline{7.0} &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    name = r"\~^<{"
    sheet = Sheet("", ("block", name), ((Cell("0"), Cell(name)),), ())
    escaped = r"\textbackslash{}\textasciitilde{}\textasciicircum{}\textless{}\{"
    assert format_sheet(sheet, "latex").count(escaped) == 2


def test_markdown_escapes_bars_and_tags():
    lines = format_sheet(SHEET, "markdown").splitlines()

    assert lines[2] == r"| encoder | voc_1 | b\|c |"
    assert lines[5] == "| [x] | 7.0 |  |"
    assert lines[-1] == "<sub>one<br>two</sub>"
    tagged = Sheet("", ("a", "b"), ((Cell("<script>"), Cell("1")),), ())
    assert "<script>" not in format_sheet(tagged, "markdown")


def test_columns_are_aligned_and_terminal_codes_have_no_width():
    assert format_sheet(SHEET, "text").splitlines()[2:6] == [
        "encoder                voc_1  b|c",
        "---------------------------------",
        "skip & 100%  *32.3 ± 1.2* †4  5.0",
        "[x]                      7.0",
    ]
    bold = format_sheet(SHEET, "terminal")
    assert "\033[1m32.3 ± 1.2\033[0m" in bold
    assert re.sub("\033\\[[01]m", "", bold).splitlines()[2:6] == [
        "encoder              voc_1  b|c",
        "-------------------------------",
        "skip & 100%  32.3 ± 1.2 †4  5.0",
        "[x]                    7.0",
    ]
    # Block indices are aligned right.
    sheet = Sheet("", ("block", "a"), ((Cell("9"), Cell("1")), (Cell("10"), Cell("2"))), ())
    assert format_sheet(sheet, "text").splitlines()[4:6] == ["    9  1", "   10  2"]


def test_only_a_terminal_gets_bold_text(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert default_format() == "text"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert default_format() == "terminal"
    monkeypatch.setenv("TERM", "dumb")
    assert default_format() == "text"
