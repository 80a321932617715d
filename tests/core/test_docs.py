"""The documentation builds without broken links, and its generated pages are up to date.

Its commands: test_page_commands.py and test_page_runs.py.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.faults import unchecked_types
from tests.support.page_commands import ROOT


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_without_the_network(tmp_path):
    # A broken link or anchor is a warning.
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)', page)


@pytest.mark.parametrize(
    ("page", "script", "make"),
    [
        ("rooms.svg", "_rooms.py", "picture"),
        ("gallery.md", "_gallery.py", "page"),
    ],
)
def test_a_generated_page_is_up_to_date(page, script, make):
    made = runpy.run_path(str(ROOT / "docs" / script))[make]()

    assert (ROOT / "docs" / page).read_text() == made, f"run: python docs/{script}"


def notebook() -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs/python.ipynb").read_text())["cells"]


def test_the_notebook_has_the_cells_of_its_page():
    made = runpy.run_path(str(ROOT / "docs/_notebook.py"))["cells"]()

    assert [(c["cell_type"], "".join(c["source"])) for c in notebook()] == made
    kinds = [output["output_type"] for cell in notebook() for output in cell.get("outputs", [])]
    assert set(kinds) == {"stream", "display_data"}


@pytest.mark.slow
def test_the_notebook_prints_what_its_code_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with unchecked_types():
        again = runpy.run_path(str(ROOT / "docs/_notebook.py"))["notebook"]()["cells"]

    assert printed(notebook()) == printed(again), "run: python docs/_notebook.py"


def printed(cells: list[dict[str, Any]]) -> list[str]:
    """What cells print, without the commit, versions, machine and date that follow a table."""
    texts = ["".join(o["text"]) for c in cells for o in c.get("outputs", []) if "text" in o]
    return [re.sub(r"; ssl-bench [^\n]*?\d{4}-\d\d-\d\d", "", text) for text in texts]


@pytest.mark.slow
def test_the_figures_of_pages_are_up_to_date(tmp_path, monkeypatch):
    gallery = runpy.run_path(str(ROOT / "docs/_gallery.py"))
    gallery["draw"](tmp_path)
    kept = {path.name: path for path in gallery["PICTURES"].iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == kept.keys()
    front = runpy.run_path(str(ROOT / "docs/_front.py"))
    monkeypatch.setattr("sys.argv", ["_front.py", "--out", str(tmp_path / "front.png")])
    front["main"]()

    for name, path in {**kept, "front.png": front["PICTURE"]}.items():
        assert mean_difference(tmp_path / name, path) < 2, f"draw {path} again"


def mean_difference(*files: Path) -> float:
    """Mean difference of two images; fonts look slightly different on other machines."""
    new, kept = (np.asarray(Image.open(file).convert("RGB"), dtype=float) for file in files)
    assert new.shape == kept.shape
    return np.abs(new - kept).mean()
