"""The documentation builds and its Python runs; its commands: test_page_commands.py."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code of a language; "" for that without one."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for found, code in fences if found == language]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_without_the_network(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    lines = [line.split("-", 1)[-1].strip() for line in (done.stdout + done.stderr).splitlines()]
    assert [line.partition(" ")[0] for line in lines] == ["Cleaning", "Building", "Documentation"]
    page = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)', page)
    assert (tmp_path / "site" / "results" / "log.html").is_file()
    assert "**" not in re.sub(r"<(code|pre).*?</\1>", "", page, flags=re.DOTALL)


def test_the_picture_of_the_rooms_shows_the_contracts_of_imports():
    rooms = runpy.run_path(str(ROOT / "docs/_rooms.py"))

    drawn = rooms["picture"]()

    assert (ROOT / "docs/rooms.svg").read_text() == drawn, "run: python docs/_rooms.py"
    assert [drawn.count(f">{room}</text>") for room in ("ssl_bench/cli/", "knn", "mimetic")] == [
        1, 1, 0,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def maker() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/_notebook.py"))


def notebook() -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs/python.ipynb").read_text())["cells"]


def test_the_notebook_is_its_page_with_outputs_and_a_picture(maker):
    cells = notebook()
    shown = [output for cell in cells for output in cell.get("outputs", [])]

    assert [(c["cell_type"], "".join(c["source"])) for c in cells] == maker["cells"]()
    code = blocks(ROOT / "docs/python.md", "python")
    assert [c.rstrip() for c in code] == [t for kind, t in maker["cells"]() if kind == "code"]
    assert [output["output_type"] for output in shown] == [
        "stream", "stream", "stream", "display_data", "stream", "stream",
    ]  # fmt: skip
    assert (ROOT / "docs/python.ipynb").stat().st_size < 300_000
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", str(said(cells)))


@pytest.mark.slow
def test_the_notebook_says_what_its_code_says(maker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    again = maker["notebook"]()["cells"]

    assert said(notebook()) == said(again), "run: python docs/_notebook.py"


def said(cells: list[dict[str, Any]]) -> list[str]:
    """What cells print, without the commit, versions, machine and date that follow a table."""
    texts = ["".join(o["text"]) for c in cells for o in c.get("outputs", []) if "text" in o]
    return [re.sub(r"; ssl-bench [^\n]*?\d{4}-\d\d-\d\d", "", text) for text in texts]
