"""Open the pages of an HTML report in a browser."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.results import Record, ResultStore
from tests.support.report_cells import build_record, counts, get_figures_folder, save, skipless

NAME = "skipless <script>alert(1)</script>"
PAGES = ("index.html", "checkpoint-*.html", "compare-*.html")

SHEET_WIDTH = 900
"""Width in pixels of a figure of all blocks."""


def browsed_report(root: Path) -> Path:
    """Write a report that compares two checkpoints."""
    store, random = ResultStore(root), np.random.default_rng(0)
    for layer, num_hits in enumerate((9, 0, 10)):
        for record, hits in (
            (build_record(layer=layer), num_hits),
            (skipless(layer=layer, model=NAME), 10 - num_hits),
        ):
            save(store, record, np.arange(12) < hits)
            right = random.integers(0, 9, (4, 1, 2))
            pixels = counts(
                *np.concatenate([right, np.add(right, [2, 1]), np.add(right, [1, 2])], 1)
            )
            names = {"task": "segmentation", "dataset": "scenes", "metric": "miou_oracle"}
            save(store, replace(record, **names, details={"iou_by_class": {NAME: 50.0}}), pixels)
            draw(root, record)
            value = (3.0, math.inf, 2e4)[layer]
            names = {"task": "conditioning", "metric": "condition_number", "unit": ""}
            for facet in ("attention", "mlp", "mlp_skip"):
                changes = {**names, "facet": facet, "ci95": (value / 2, math.inf)}
                store.save(replace(record, value=value, **changes))
    assert main(["report", "--out", str(root)]) == 0
    return root / "report"


def draw(root: Path, record: Record) -> None:
    folder = get_figures_folder(record).replace("/", "_")
    path = root / f"pictures/tokencut/toy/{folder}/reference/block0{record.layer}_key"
    path.mkdir(parents=True)
    for number, image in enumerate(("dog", "cat")):
        colour = (80 * record.layer, 200 * number, 99)
        Image.new("RGB", (60, 20), colour).save(path / f"{image}.png")
    Image.new("RGB", (SHEET_WIDTH, 60)).save(path.with_name("all.png"))


def open_page(
    browser: Any, report: Path, pattern: str, *, width: int = 1280, dark: bool = False
) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(next(iter(sorted(report.glob(pattern)))).as_uri())
