"""Test that code in names and texts is never executed."""

import json
import re

import pytest
import safetensors.torch
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from ssl_bench.system.output import show_progress
from ssl_bench.tables.published import load_published_table
from tests.support.faults import DINO_LIKE, encoder_file, expect_error
from tests.support.hostile import (
    CHECKS,
    HOSTILE,
    check_page,
    check_terminal,
    hostile,
    hostile_store,
)
from tests.support.report_cells import SKIP, SKIPLESS, Elements, counts, printed_by, save
from tests.support.report_pages import PAGES, open_page

pytestmark = pytest.mark.slow

POLICY = (
    "default-src 'none'; img-src 'self' file:; style-src 'self' file:; "
    "script-src 'self' file:; base-uri 'none'; form-action 'none'"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ResultStore:
    return hostile_store(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("style", CHECKS)
@pytest.mark.parametrize("command", ["depth", "pivot", "oracle", "paper", "compare", "blocks"])
def test_texts_of_a_record_are_escaped_in_tables(store, capsys, command, style):
    encoders = (hostile(checkpoint_sha256=digits).encoder_id for digits in (SKIP, SKIPLESS))
    name, other = (f"{HOSTILE} {encoder[:6]}" for encoder in encoders)
    row = load_published_table("mnist").rows[0]
    words = {
        "depth": ["table"],
        "pivot": ["table", "--pivot"],
        "oracle": ["table", "--pivot", "--best-layer", "oracle"],
        "paper": ["table", "--paper", "mnist", "--as", f"{row}={name}"],
        "compare": ["compare", name, other],
        "blocks": ["compare", name],
    }[command]
    code = main([*words, "--out", str(store.root), "--format", style])

    out, err = capsys.readouterr()
    assert code == 0, err
    CHECKS[style](out)
    check_terminal(err)
    assert "input" in out or command == "paper"


def test_texts_of_a_record_are_escaped_in_reports(tmp_path, capsys):
    store = hostile_store(tmp_path)
    save(store, hostile(task="segmentation", metric="miou_oracle"), counts([[4, 4]] * 3))

    check_terminal(printed_by(capsys, ["report", "--out", str(tmp_path)]))

    pages = list((tmp_path / "report").glob("*.html"))
    assert len(pages) == 4
    for page in pages:
        check_page(page.read_text())
        policies = [
            attributes["content"]
            for tag, attributes in Elements(page.read_text()).elements
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policies == [POLICY]
    script = (tmp_path / "report/records.js").read_text()
    assert script.isascii()
    assert script.count("\n") == 1
    found = re.fullmatch(r"const RECORDS = JSON\.parse\((\".*\")\);\n", script)
    assert found is not None
    texts = json.loads(json.loads(found[1]))["values"]
    assert all(word.isprintable() for word in texts if isinstance(word, str))


def test_texts_of_a_record_are_escaped_in_figures(store, tmp_path, capsys):
    figure = tmp_path / "curves.svg"

    main(["table", "--out", str(store.root), "--format", "markdown", "--figure", str(figure)])

    out, err = capsys.readouterr()
    CHECKS["markdown"](out)
    assert figure.stat().st_size
    check_terminal(err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "--out", f"no{HOSTILE}"],
        ["table", f"--{HOSTILE}"],
        ["table", "--paper", HOSTILE],
        ["reproduce", HOSTILE],
        ["reproduce", "mnist", "--row", HOSTILE],
        [HOSTILE],
        ["models", "--json", HOSTILE],
        ["data", "list", HOSTILE],
        ["data", "check", "folder", "--data-root", HOSTILE],
        ["probe", "--task", HOSTILE],
        ["probe", "--task", "pca", f"{HOSTILE}=1"],
        ["probe", "--task", "pca", "--checkpoint", HOSTILE],
        ["sweep", "--checkpoint", HOSTILE],
        ["report", "--into", __file__ + "\x1b[2J"],
    ],
    ids=lambda words: " ".join(words)[:20].encode("unicode_escape").decode(),
)
def test_typed_texts_are_escaped_in_errors_of_one_line(workdir, capsys, arguments):
    code = main(arguments)

    out, err = capsys.readouterr()
    check_terminal(out)
    check_terminal(err)
    assert code in (2, 3, 4, 5)
    assert err.startswith("ssl-bench: ")
    assert err.count("\n") == 1


def test_names_of_tensors_paths_and_progress_bars_are_escaped(workdir, capsys, monkeypatch):
    path = encoder_file(workdir / "wide.safetensors", config=DINO_LIKE)
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, HOSTILE[:150]: torch.zeros(3)}, "more.safetensors")
    message = expect_error(capsys, ["models", "more.safetensors"], 4)
    check_terminal(message)
    assert r"\x1b]0;t\x07" in message

    assert main(["doctor", "--data-root", f"/nowhere{HOSTILE[:80]}".replace("=", "")]) in (0, 5)
    out = capsys.readouterr().out
    check_terminal(out)
    assert r"\n" in out

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(show_progress([1], HOSTILE)) == [1]
    err = capsys.readouterr().err
    assert "\\x1b]0;t\\x07" in err
    assert not [sign for sign in ("\x1b]", "\x07", "\u202e") if sign in err]


# A script that adds elements as an attacker could. It ends when all of them had time to act.
INTRUDERS = """
const [address, done] = arguments;
const add = (tag, given) => document.body.append(Object.assign(document.createElement(tag), given));
add("img", { src: address + ".png" });
add("script", { src: address + ".js" });
add("script", { textContent: "window.ran = 1" });
add("div", { innerHTML: "<img src=nowhere.png onerror='window.ran = 1'>" });
add("link", { rel: "stylesheet", href: address + ".css" });
add("iframe", { src: address });
add("object", { data: address });
add("video", { src: address });
const form = Object.assign(document.createElement("form"), { action: address, method: "get" });
document.body.append(form);
form.submit();
navigator.sendBeacon(address);
const late = () => setTimeout(done, 400);
fetch(address).then(late, late);
"""


@pytest.mark.browser
def test_a_page_loads_nothing_from_elsewhere(browser, tmp_path, server):
    assert main(["report", "--out", str(hostile_store(tmp_path).root)]) == 0
    server.content = b"window.ran = 1"
    open_page(browser, tmp_path / "report", "index.html")

    browser.execute_async_script(INTRUDERS, f"http://127.0.0.1:{server.server_port}/x")

    assert server.ranges == []
    assert browser.execute_script("return window.ran") is None
    messages = " ".join(entry["message"] for entry in browser.get_log("browser"))
    for directive in ("img-src", "script-src", "style-src", "default-src", "form-action"):
        assert directive in messages


@pytest.mark.browser
def test_hostile_records_run_nothing_and_hide_nothing(browser, tmp_path):
    from selenium.webdriver.common.keys import Keys

    from tests.report.test_report_browser import find

    store = hostile_store(tmp_path)
    assert main(["report", "--out", str(store.root)]) == 0

    for pattern in PAGES:
        open_page(browser, tmp_path / "report", pattern)
        assert browser.get_log("browser") == []
        assert browser.execute_script("return document.querySelectorAll('iframe, style')") == []
    open_page(browser, tmp_path / "report", "index.html")
    find(browser, "#leaderboard button.from").send_keys(Keys.ENTER)
    opened = find(browser, "#provenance").text
    # If records were JavaScript literals, this key would set the prototype and not be listed.
    assert "settings: __proto__" in opened
    assert all(line.isprintable() for line in opened.splitlines())
