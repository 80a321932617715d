"""Escapes for terminals, LaTeX, Markdown, CSV, JSON, figures, file names and shells."""

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
    ("text", "seen"),
    [
        ("é 北京 ± voc_1", "é 北京 ± voc_1"),
        ("\x1b[2J\x9b\x07\x7f\r\n\t", r"\x1b[2J\x9b\x07\x7f\r\n\t"),
        ("\u202e\u2066\u2028\udce9", r"\u202e\u2066\u2028\udce9"),
    ],
)
def test_unprintable_characters_become_escapes(text, seen):
    assert escape_unprintable(text) == seen


def test_lines_of_a_message_are_joined():
    assert to_one_line(ValueError("a\n  b\x1b")) == r"a b\x1b"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("*", "{*}"), ("[x]", "{[}x]"), ("a[*", "a[*"), ("", ""),
        ("a\n%b", r"a\textbackslash{}n\%b"), ("#$&_{}", r"\#\$\&\_\{\}"),
    ],
)  # fmt: skip
def test_latex_commands_and_arguments_are_escaped(text, escaped):
    assert escape_latex(text) == escaped


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("voc_1, tau=0.2 @3 [-1.0, +2.0]", "voc_1, tau=0.2 @3 [-1.0, +2.0]"),
        ("_a_ a__b", "&#95;a&#95; a&#95;&#95;b"),
        ("a|b\\|", r"a\|b&#92;\|"),
        ("[a](b) ![a][b]", "[a&#93;(b) ![a&#93;[b]"),
        ("https://e www.e a@e", "https&#58;//e www&#46;e a&#64;e"),
        ("<b>&lt;`*~$", "&lt;b&gt;&amp;lt;&#96;&#42;&#126;&#36;"),
    ],
)
def test_markdown_is_escaped_and_plain_names_stay(text, escaped):
    assert escape_markdown(text) == escaped


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *[(number, number) for number in (-1.5, 3, None, "-1.5", "+2", "-1e-05", "0 1", "40.0")],
        ("=1+1", "'=1+1"), ("-1+1", "'-1+1"), (" @x", " '@x"), ("\uff1dx", "'\uff1dx"),
        ("\t=x", r"\t=x"), ("a;=x; +y", "a;'=x; '+y"), ("a=b, -1", "a=b, -1"),
    ],
)  # fmt: skip
def test_formulas_get_an_apostrophe_and_numbers_stay(value, written):
    assert escape_csv(value) == written


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
    came = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert came.stdout.decode(errors="surrogateescape").split("\0")[:-1] == words


def test_dollar_signs_are_escaped_in_figures():
    assert escape_matplotlib("$\\frac$\n") == r"\$\frac\$\n"


def test_file_names_contain_no_folders():
    assert all(map(is_file_name, ["toy", "a b\x1b", "\udce9"]))
    assert not any(map(is_file_name, ["..", ".", "", "a/b", "a\\b", "\0", "\ud800"]))
