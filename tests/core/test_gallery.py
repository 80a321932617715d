"""The gallery is what the committed records say, text and pictures."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.page_commands import ROOT

PAGE = ROOT / "docs/gallery.md"


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/_gallery.py"))


def test_its_text_is_of_the_records_that_there_are(gallery):
    assert PAGE.read_text() == gallery["page"](), "run: python docs/_gallery.py"


@pytest.mark.slow
def test_its_pictures_are_drawn_from_these_records(gallery, tmp_path):
    gallery["draw"](tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in gallery["PICTURES"].iterdir()}
    for name in names:
        assert _differ_by(tmp_path / name, gallery["PICTURES"] / name) < 2, (
            "run: python docs/_gallery.py"
        )


@pytest.mark.slow
def test_a_photograph_over_the_blocks_of_an_encoder_that_comes_along(tmp_path, monkeypatch):
    front = runpy.run_path(str(ROOT / "docs/_front.py"))
    drawn = tmp_path / "front.png"
    monkeypatch.setattr("sys.argv", ["_front.py", "--out", str(drawn)])
    front["main"]()
    assert _differ_by(drawn, front["PICTURE"]) < 2, "run: python docs/_front.py"


def _differ_by(*files: Path) -> float:
    """Of a pixel on average; fonts are drawn a little otherwise elsewhere."""
    new, there = (np.asarray(Image.open(file).convert("RGB"), dtype=float) for file in files)
    assert new.shape == there.shape
    return np.abs(new - there).mean()
