"""The gallery is what the committed records say, text and pictures."""

import runpy
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


def test_no_curve_is_of_a_handful_of_images(gallery):
    panels = [panel for those in gallery["shown"]().values() for panel in those]
    assert {"voc2012-62 trainval", "class_folders test"} <= {panel.where for panel in panels}
    assert all("coco20k-7" not in panel.where for panel in panels)


@pytest.mark.slow
def test_its_pictures_are_drawn_from_these_records(gallery, tmp_path):
    gallery["draw"](tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in gallery["PICTURES"].iterdir()}
    for name in names:
        new, there = (
            np.asarray(Image.open(folder / name).convert("RGB"), dtype=float)
            for folder in (tmp_path, gallery["PICTURES"])
        )
        assert new.shape == there.shape
        # Fonts are drawn a little otherwise elsewhere.
        assert np.abs(new - there).mean() < 2, "run: python docs/_gallery.py"
