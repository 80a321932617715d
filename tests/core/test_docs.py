"""Test the pages of the documentation."""

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

from ssl_bench.composition.choices import choices
from tests.benchmarks.cost import read_measurements
from tests.support.faults import unchecked_types
from tests.support.page_commands import ROOT

# Attributes whose files a browser loads with the page, unlike links.
LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_complete_and_loads_nothing_from_the_network(site):
    pages = {page: page.read_text() for page in site.rglob("*.html")}

    for page, text in pages.items():
        addresses = ["".join(found) for found in LOADED.findall(text)]
        assert not [one for one in addresses if re.match(r"(?:https?:)?//", one)], page.name
        # Pictures without a size would move the text while they load.
        images = re.findall(r"<img[^>]*>", text)
        assert not [one for one in images if "height=" not in one], page.name
        assert "<!-- generated:" not in text
        assert "<!-- cost:" not in text
    assert not re.search(r"url\((?:https?:)?//", (site / "assets/site.css").read_text())
    assert "<code>probe.tau</code>" in pages[site / "reference/keys.html"]
    assert "<code>--data-root DIR</code>" in pages[site / "reference/commands.html"]
    assert (site / "search/search_index.js").is_file()


def test_the_cost_of_each_probe_is_measured():
    assert read_measurements()["tasks"].keys() == set(choices("probe"))


def test_the_pages_have_short_commands_and_few_words():
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    generated = re.compile(r"^## (Cost|On one CPU core)\n.*", re.DOTALL | re.MULTILINE)
    words = 0
    for page in ROOT.glob("docs/**/*.md"):
        text = page.read_text()
        commands = [code for language, code in fence.findall(text) if not language]
        assert max(map(len, "".join(commands).splitlines()), default=0) <= 100, page
        if page.name != "gallery.md":
            written = generated.sub("", fence.sub("", text)).split()
            words += sum(bool(re.search(r"\w", word)) for word in written)
    assert words <= 30_000


@pytest.mark.parametrize(
    ("page", "script", "make"),
    [
        ("packages.svg", "_packages.py", "picture"),
        ("gallery.md", "_gallery.py", "page"),
    ],
)
def test_a_generated_page_is_up_to_date(page, script, make):
    expected = runpy.run_path(str(ROOT / "docs" / script))[make]()

    assert (ROOT / "docs" / page).read_text() == expected, f"run: python docs/{script}"


def notebook() -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs/python.ipynb").read_text())["cells"]


def test_the_notebook_has_the_cells_of_its_page():
    expected = runpy.run_path(str(ROOT / "docs/_notebook.py"))["cells"]()

    assert [(c["cell_type"], "".join(c["source"])) for c in notebook()] == expected
    kinds = [output["output_type"] for cell in notebook() for output in cell.get("outputs", [])]
    assert set(kinds) == {"stream", "display_data"}


@pytest.mark.slow
def test_the_notebook_prints_what_its_code_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with unchecked_types():
        again = runpy.run_path(str(ROOT / "docs/_notebook.py"))["notebook"]()["cells"]

    assert printed_texts(notebook()) == printed_texts(again), "run: python docs/_notebook.py"


def printed_texts(cells: list[dict[str, Any]]) -> list[str]:
    texts = ["".join(o["text"]) for c in cells for o in c.get("outputs", []) if "text" in o]
    # The version, commit, machine and date may differ.
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
    # Drawings of the same figure differ slightly, because fonts depend on the machine.
    new, kept = (np.asarray(Image.open(file).convert("RGB"), dtype=float) for file in files)
    assert new.shape == kept.shape
    return np.abs(new - kept).mean()
