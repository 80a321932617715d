"""Test how texts are escaped for LaTeX, JSON and other formats."""

import json
import subprocess

import pytest

from ssl_bench.system.output import (
    dump_json,
    escape_csv,
    escape_latex,
    escape_markdown,
    escape_matplotlib,
    escape_unprintable,
    is_file_name,
    quote_command,
    to_one_line,
)
from tests.support.hostile import HOSTILE


@pytest.mark.parametrize(
    ("escape", "text", "escaped"),
    [
        (escape_unprintable, "é 北京 ± voc_1", "é 北京 ± voc_1"),
        (escape_unprintable, "\x1b[2J\x9b\x07\x7f\r\n\t", r"\x1b[2J\x9b\x07\x7f\r\n\t"),
        (escape_unprintable, "\u202e\u2066\u2028\udce9", r"\u202e\u2066\u2028\udce9"),
        (to_one_line, ValueError("a\n  b\x1b"), r"a b\x1b"),
        (escape_matplotlib, "$\\frac$\n", r"\$\frac\$\n"),
        (escape_latex, "*", "{*}"),
        (escape_latex, "[x]", "{[}x]"),
        (escape_latex, "a[*", "a[*"),
        (escape_latex, "a\n%b", r"a\textbackslash{}n\%b"),
        (escape_latex, "#$&_{}", r"\#\$\&\_\{\}"),
        (escape_markdown, "voc_1, tau=0.2 @3 [-1.0, +2.0]", "voc_1, tau=0.2 @3 [-1.0, +2.0]"),
        (escape_markdown, "_a_ a__b", "&#95;a&#95; a&#95;&#95;b"),
        (escape_markdown, "a|b\\|", r"a\|b&#92;\|"),
        (escape_markdown, "[a](b) ![a][b]", "[a&#93;(b) ![a&#93;[b]"),
        (escape_markdown, "https://e www.e a@e", "https&#58;//e www&#46;e a&#64;e"),
        (escape_markdown, "<b>&lt;`*~$", "&lt;b&gt;&amp;lt;&#96;&#42;&#126;&#36;"),
        # Numbers are unchanged, and formulas get an apostrophe.
        *((escape_csv, n, n) for n in (-1.5, 3, None, "-1.5", "+2", "-1e-05", "0 1", "40.0")),
        (escape_csv, "=1+1", "'=1+1"),
        (escape_csv, "-1+1", "'-1+1"),
        (escape_csv, " @x", " '@x"),
        (escape_csv, "\uff1dx", "'\uff1dx"),
        (escape_csv, "\t=x", r"\t=x"),
        (escape_csv, "a;=x; +y", "a;'=x; '+y"),
        (escape_csv, "a=b, -1", "a=b, -1"),
    ],
)
def test_texts_are_escaped_for_their_format(escape, text, escaped):
    assert escape(text) == escaped


def test_file_names_contain_no_folders():
    assert all(map(is_file_name, ["toy", "a b\x1b", "\udce9"]))
    assert not any(map(is_file_name, ["..", ".", "", "a/b", "a\\b", "\0", "\ud800"]))


def test_json_has_neither_surrogates_nor_nan():
    content = {"a\ud800": (float("nan"), float("inf"), 1.5, "\udce9\n"), "b": {"c": True}}

    text = dump_json(content, indent=None)

    assert json.loads(text) == {"a\\ud800": [None, None, 1.5, "\\udce9\n"], "b": {"c": True}}
    assert json.loads(dump_json(content, text=escape_unprintable))["a\\ud800"][3] == "\\udce9\\n"


def test_a_quoted_command_is_printable_and_keeps_its_words():
    words = ["probe", "it's", "a\\b'\x1bc\n", "\udce9 é", HOSTILE, ""]

    line = quote_command(words)

    assert line.isprintable()
    assert line.startswith("probe ")
    run = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert run.stdout.decode(errors="surrogateescape").split("\0")[:-1] == words
