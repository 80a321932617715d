"""Fault 67: texts with commands of a terminal, TeX, a spreadsheet or a browser."""

import json
import re

import pytest
import safetensors.torch
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from ssl_bench.system.output import show_progress
from ssl_bench.tables.published import load_published_table
from tests.support.faults import DINO_LIKE, encoder_file, fails
from tests.support.hostile import (
    CHECKS,
    HOSTILE,
    check_page,
    check_terminal,
    hostile,
    hostile_store,
)
from tests.support.report_cells import SKIP, SKIPLESS, Elements, counts, printed_by, save

POLICY = (
    "default-src 'none'; img-src 'self' file:; style-src 'self' file:; "
    "script-src 'self' file:; base-uri 'none'; form-action 'none'"
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> ResultStore:
    return hostile_store(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("style", CHECKS)
@pytest.mark.parametrize("command", ["depth", "pivot", "oracle", "paper", "compare", "blocks"])
def test_fault_67_texts_of_a_record_are_escaped_in_tables(kept, capsys, command, style):
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
    code = main([*words, "--out", str(kept.root), "--format", style])

    out, err = capsys.readouterr()
    assert code == 0, err
    CHECKS[style](out)
    check_terminal(err)
    assert "input" in out or command == "paper"


def test_fault_67_texts_of_a_record_are_escaped_in_reports(tmp_path, capsys):
    store = hostile_store(tmp_path)
    save(store, hostile(task="segmentation", metric="miou_oracle"), counts([[4, 4]] * 3))

    said = printed_by(capsys, ["report", "--out", str(tmp_path)])

    check_terminal(said)
    pages = list((tmp_path / "report").glob("*.html"))
    assert len(pages) == 4
    for page in pages:
        check_page(page.read_text())
        policies = [
            given["content"]
            for tag, given in Elements(page.read_text()).elements
            if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policies == [POLICY]
    script = (tmp_path / "report/records.js").read_text()
    assert script.isascii()
    assert script.count("\n") == 1
    found = re.fullmatch(r"const RECORDS = JSON\.parse\((\".*\")\);\n", script)
    assert found is not None
    texts = json.loads(json.loads(found[1]))["values"]
    assert all(word.isprintable() for word in texts if isinstance(word, str))


def test_fault_67_texts_of_a_record_are_escaped_in_figures(kept, tmp_path, capsys):
    figure = tmp_path / "curves.svg"

    main(["table", "--out", str(kept.root), "--format", "markdown", "--figure", str(figure)])

    printed, said = capsys.readouterr()
    CHECKS["markdown"](printed)
    assert figure.stat().st_size
    check_terminal(said)


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "--out", f"no{HOSTILE}"],
        ["table", "--format", HOSTILE],
        ["table", f"--{HOSTILE}"],
        ["table", "--paper", HOSTILE],
        ["reproduce", HOSTILE],
        ["reproduce", "mnist", "--row", HOSTILE],
        ["reproduce", "mnist", "--data-root", HOSTILE],
        [HOSTILE],
        ["models", HOSTILE],
        ["models", "--json", HOSTILE],
        ["data", "list", HOSTILE],
        ["data", "check", "folder", "--data-root", HOSTILE],
        ["data", "verify", HOSTILE],
        ["probe", "--task", HOSTILE],
        ["probe", "--task", "pca", f"{HOSTILE}=1"],
        ["probe", "--task", "pca", "--checkpoint", HOSTILE],
        ["pretrain", f"model={HOSTILE}"],
        ["sweep", "--checkpoint", HOSTILE],
        ["report", "--into", __file__ + "\x1b[2J"],
        ["completion", HOSTILE],
    ],
    ids=lambda words: " ".join(words)[:20].encode("unicode_escape").decode(),
)
def test_fault_67_typed_texts_are_escaped_in_one_line_errors(
    tmp_path, monkeypatch, capsys, arguments
):
    monkeypatch.chdir(tmp_path)

    code = main(arguments)

    out, err = capsys.readouterr()
    check_terminal(out)
    check_terminal(err)
    assert code in (2, 3, 4, 5)
    assert err.startswith("ssl-bench: ")
    assert err.count("\n") == 1


def test_fault_67_tensor_names_of_a_checkpoint_are_escaped(place, capsys):
    path = encoder_file(place / "wide.safetensors", config=DINO_LIKE)
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, HOSTILE[:150]: torch.zeros(3)}, "more.safetensors")

    said = fails(capsys, ["models", "more.safetensors"], 4)

    check_terminal(said)
    assert r"\x1b]0;t\x07" in said


def test_fault_67_paths_are_escaped_by_doctor(capsys):
    assert main(["doctor", "--data-root", f"/nowhere{HOSTILE[:80]}".replace("=", "")]) in (0, 5)

    out = capsys.readouterr().out
    check_terminal(out)
    assert r"\ninput" in out or r"\n" in out


def test_fault_67_the_description_of_a_progress_bar_is_escaped(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    assert list(show_progress([1], HOSTILE)) == [1]

    said = capsys.readouterr().err
    assert "\\x1b]0;t\\x07" in said
    assert not [sign for sign in ("\x1b]", "\x07", "\u202e") if sign in said]
