"""The documentation builds, its commands parse and its Python runs."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_bench.cli.parser import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code of a language; "" for that without one."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for found, code in fences if found == language]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_without_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)', page)
    assert (tmp_path / "site" / "results" / "log.html").is_file()
    assert "**" not in re.sub(r"<(code|pre).*?</\1>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_parses(page):
    text = "\n".join(blocks(page, "")).replace("\\\n", " ")
    for line in re.findall(r"^ssl-bench (.+?)(?:\s+[#>].*)?$", text, re.MULTILINE):
        words = [word for word in shlex.split(line) if word != "..."]
        _, rest = build_parser().parse_known_args(words)
        assert all("=" in word and not word.startswith("-") for word in rest), line


def test_the_picture_of_the_rooms_shows_the_contracts_of_imports():
    rooms = runpy.run_path(str(ROOT / "docs/_rooms.py"))

    drawn = rooms["picture"]()

    assert (ROOT / "docs/rooms.svg").read_text() == drawn, "run: python docs/_rooms.py"
    assert [drawn.count(f">{room}</text>") for room in ("ssl_bench/cli/", "knn", "mimetic")] == [
        1, 1, 0,
    ]  # fmt: skip


def test_the_first_page_is_short_and_begins_with_three_commands():
    page = ROOT / "README.md"
    assert len(page.read_text().split()) <= 800
    first = [line.partition("#")[0].split()[:2] for line in blocks(page, "")[0].splitlines()]
    assert first == [["pip", "install"], ["ssl-bench", "probe"], ["ssl-bench", "report"]]


def test_the_tutorial_has_commands():
    assert "ssl-bench pretrain" in "\n".join(blocks(ROOT / "docs" / "tutorial.md", ""))


def test_the_notebook_shows_what_its_page_shows_and_runs(tmp_path, monkeypatch, capsys):
    notebook = json.loads((ROOT / "docs" / "python.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert cells == [code.rstrip("\n") for code in blocks(ROOT / "docs" / "python.md", "python")]

    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile(cell, "python.ipynb", "exec"), names)

    printed = capsys.readouterr().out
    assert "tokencut: corloc" in printed
    assert "torch.Size([2, 14, 14, 192])" in printed
