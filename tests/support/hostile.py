"""Check that tables and web pages escape malicious texts."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import markdown as site_markdown
import numpy as np
from markdown_it import MarkdownIt

from ssl_bench.results import Record, ResultStore
from tests.support.report_cells import SKIP, SKIPLESS, Elements, build_record, save

# Attacks on terminals, TeX, spreadsheets, Markdown and HTML.
HOSTILE = (
    "=cmd|' /C calc'!A0\n\\input{/etc/passwd}\r\n%\\write18{id}$x$#1_a_^b~&{c}"
    "\x1b]0;t\x07\x1b[2J\x9b1m\b\x7f\u202e\u2066\u2028\x85;=1+1</script><script>alert(1)</script>"
    '<img src="x" onerror="f()">" onmouseover="alert(1)" \'[x](javascript:alert(1))|`c` **b** _e_ '
    "\\| https://e.example www.e.example a@e.example { onclick=alert(1) }{: onclick=alert(1) } "
    "{{ 7 * 7 }} $\\frac$ \udce9"
)
# These become file names, so they are short and contain no slash.
_NAMES = {
    "dataset": "=1+1|\n%{x}\x1b[2J<img src=x onerror=f()>`c` [x](y) \u202e\udce9",
    "facet": '[x](y:z)"onclick=f()\x9b\x07{: onclick=f() }',
    "metric": "@SUM(1)\r\n<script>$#^_&~{",
}
TAGS = {"p", "strong", "table", "thead", "tbody", "tr", "th", "td", "ins", "sub", "br"}
FREE = ("split", "protocol", "model", "version", "git_commit", "torch", "device", "created")


def hostile(**changes) -> Record:
    texts = dict.fromkeys(FREE, HOSTILE) | _NAMES
    nested = {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}], "__proto__": HOSTILE, "left_out": HOSTILE}
    details = {HOSTILE: HOSTILE, "degenerate_percent": 7.0, "__proto__": {"x": HOSTILE}}
    return replace(build_record(), **{**texts, "settings": nested, "details": details, **changes})


def hostile_store(root: Path) -> ResultStore:
    """Save results in which every text contains malicious code."""
    store = ResultStore(root)
    for layer in (0, 1):
        for sha in (SKIP, SKIPLESS):
            record = hostile(layer=layer, checkpoint_sha256=sha)
            save(store, record, np.arange(6) < 3 + layer)
            save(store, replace(record, metric="corloc"), np.arange(6) < 2 + layer)
    ids = [HOSTILE, *map(str, range(5))]
    store.save_image_ids(build_record().dataset_fingerprint, ids)
    return store


def check_terminal(text: str) -> None:
    for code in ("\033[0m", "\033[1m", "\033[4m"):
        text = text.replace(code, "")
    assert all(line.isprintable() for line in text.split("\n"))


def check_latex(text: str) -> None:
    """Check that a LaTeX table contains only expected commands."""
    assert all(line.isprintable() for line in text.split("\n"))
    body = [line for line in text.split("\n") if not line.startswith("%")]
    commands = re.findall(r"\\([A-Za-z]+|.)", "\n".join(body))
    allowed = "begin end toprule midrule bottomrule textbf underline textbackslash textasciitilde"
    allowed += " textasciicircum textless textgreater mid pm dagger ddagger S par footnotesize"
    assert set(commands) <= {*allowed.split(), *"\\_%&#${}"}
    plain = re.sub(r"\\([A-Za-z]+|.)", "", "\n".join(body))
    assert not set(plain) & set("%#^_~\\")
    in_maths = ("mid", "pm", "dagger", "ddagger")
    assert plain.count("$") == 2 * sum(command in in_maths for command in commands)
    assert plain.count("{") == plain.count("}")
    rows = [line for line in body if line.endswith(r"\\")]
    assert len({re.sub(r"\\\\|\\&", "", row).count("&") for row in rows}) == 1


def check_markdown(text: str) -> None:
    """Check that a Markdown text renders only the elements that our tables use."""
    assert all(line.isprintable() for line in text.split("\n"))
    pages = (
        MarkdownIt("commonmark").enable("table").render(text),
        site_markdown.markdown(text, extensions=["tables", "attr_list", "sane_lists"]),
    )
    for page in pages:
        elements = Elements(page).elements
        tags = {tag for tag, _ in elements}
        assert tags <= TAGS
        assert {name for _, attributes in elements for name in attributes} <= {"style"}
        heads = [tag for tag, _ in elements].count("th")
        cells = [tag for tag, _ in elements].count("td")
        rows = [tag for tag, _ in elements].count("tr")
        tables = [tag for tag, _ in elements].count("table")
        assert cells * tables == heads * (rows - tables)


def check_csv(text: str) -> None:
    """Check that a CSV file contains no spreadsheet formula."""
    rows = list(csv.reader(io.StringIO(text)))
    assert len({len(row) for row in rows}) == 1
    for field in (piece for row in rows for whole in row for piece in whole.split(";")):
        assert field.isprintable()
        assert not re.match(r"\s*[=+@\-\uff1d]", field) or float(field)


def check_json(text: str) -> None:
    def refuse(constant):
        raise ValueError(constant)

    assert text.isascii()
    content = json.loads(text, parse_constant=refuse)
    # A lone surrogate cannot be encoded.
    json.dumps(content, ensure_ascii=False).encode()


CHECKS = {
    "text": check_terminal,
    "terminal": check_terminal,
    "latex": check_latex,
    "markdown": check_markdown,
    "csv": check_csv,
    "json": check_json,
}


def check_page(text: str) -> None:
    """Check that an HTML page cannot run code or load external files."""
    page = Elements(text)
    assert all(line.isprintable() for line in text.replace("?", "").split("\n"))
    for tag, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on")}
        assert tag != "script" or set(attributes) <= {"src", "type"}
        for address in (attributes.get("href"), attributes.get("src")):
            assert address is None or re.match(r"(?![\w.+-]+:)[^/\\]", address)
    assert not {tag for tag, _ in page.elements} & {"iframe", "object", "embed", "base", "style"}
