"""Sheets in every style, with characters that mean something there."""

import pytest

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


def test_latex_is_escaped_and_set_with_booktabs():
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


@pytest.mark.parametrize(
    ("name", "escaped"),
    [(r"a\b{c}", r"a\textbackslash{}b\{c\}"), ("~^<", r"\textasciitilde{}\textasciicircum{}"
      r"\textless{}")],
)  # fmt: skip
def test_no_name_breaks_latex(name, escaped):
    sheet = Sheet("", ("block", name), ((Cell("0"), Cell(name)),), ())

    assert format_sheet(sheet, "latex").count(escaped) == 2


def test_markdown_keeps_bars_and_tags_of_names_from_being_read():
    lines = format_sheet(SHEET, "markdown").splitlines()

    assert lines[2] == r"| encoder | voc_1 | b\|c |"
    assert lines[5] == "| [x] | 7.0 |  |"
    assert lines[-1] == "<sub>one<br>two</sub>"
    tagged = Sheet("", ("a", "b"), ((Cell("<script>"), Cell("1")),), ())
    assert "<script>" not in format_sheet(tagged, "markdown")


def test_columns_of_text_end_at_the_same_place_and_names_begin_at_it():
    lines = format_sheet(SHEET, "text").splitlines()[2:6]

    assert lines == [
        "encoder                voc_1  b|c",
        "---------------------------------",
        "skip & 100%  *32.3 ± 1.2* †4  5.0",
        "[x]                      7.0",
    ]
    # Numbers of blocks are read from the right.
    sheet = Sheet("", ("block", "a"), ((Cell("9"), Cell("1")), (Cell("10"), Cell("2"))), ())
    assert format_sheet(sheet, "text").splitlines()[4:6] == ["    9  1", "   10  2"]


def test_codes_of_a_terminal_take_no_room():
    plain = [
        line.replace("*", "").replace("_", "")
        for line in format_sheet(
            Sheet("", ("a", "b"), ((Cell("1"), Cell("22")),), ()), "text"
        ).splitlines()
    ]
    marked = Sheet("", ("a", "b"), ((Cell("1"), Cell("22", is_best=True)),), ())

    lines = format_sheet(marked, "terminal").splitlines()

    assert "\033[1m22\033[0m" in lines[4]
    assert [line.replace("\033[1m", "").replace("\033[0m", "") for line in lines] == plain


def test_a_pipe_gets_plain_text_and_a_terminal_gets_bold(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert default_format() == "text"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert default_format() == "terminal"
    monkeypatch.setenv("TERM", "dumb")
    assert default_format() == "text"
