"""Create scores and figures for the tests of the HTML report."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.report.drawing import Curve, Point
from ssl_bench.report.pairs import PanelComparison, compare_in_panel, load_per_image_scores
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.per_image import ImageCurve
from tests.core.test_results import RECORD

SKIP, SKIPLESS = "a" * 64, "c" * 64


EVIL = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"


MOST_BYTES = 3_000_000


def build_record(**changes) -> Record:
    return replace(RECORD, details={}, **add_interval(changes))


def add_interval(changes: dict) -> dict:
    """Add a 95 % confidence interval to a score that has none."""
    value = changes.get("value")
    if value is None or "ci95" in changes:
        return changes
    own = RECORD.ci95 or (0.0, 0.0)
    low, high = (value + end - RECORD.value for end in own)
    is_percent = changes.get("unit", "%") == "%"
    ends = (max(low, 0.0), min(high, 100.0)) if is_percent else (low, high)
    return {**changes, "ci95": None if value != value else ends}


def skipless(**changes) -> Record:
    return build_record(**{"model": "skipless", "checkpoint_sha256": SKIPLESS, **changes})


def make_encoder_id(letter: str) -> str:
    return build_record(checkpoint_sha256=letter * 64).encoder_id


def get_figures_folder(record: Record) -> str:
    return f"{record.model}-{record.encoder_id[:8]}-{record.dataset_fingerprint[:8]}"


def curve(*values, low=None, high=None):
    spots = tuple(Point(layer, value, low, high, "") for layer, value in enumerate(values))
    return Curve("skip", "c0 d0", 0, spots)


def save(store: ResultStore, record: Record, per_image) -> None:
    """Compute a score from the scores of single images, and save it."""
    value = ImageCurve(record.metric, {}).value(per_image)
    changes = add_interval({"value": value, "num_images": len(per_image), "unit": record.unit})
    store.save(replace(record, **changes), per_image)


def save_pictures(root: Path, *names: str) -> None:
    for name in names:
        path = root / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3)).save(path)


class Elements(HTMLParser):
    """An HTML parser that collects the elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag):
        self._open = "" if tag == self._open else self._open

    def handle_data(self, data):
        self.text += "" if self._open == "script" else data


def plain(**changes) -> Record:
    return build_record(
        **{"task": "conditioning", "metric": "condition_number", "unit": "", **changes}
    )


def counts(*images):
    # The last axis contains the numbers of correct, predicted and true pixels.
    return np.array(images, np.int32)


PERFECT = [[4, 4], [4, 4], [4, 4]]


HALF = [[2, 0], [4, 0], [2, 2]]


WRONG = [[0, 0], [4, 0], [0, 4]]


def compared_pair(store: ResultStore, records: list[Record]) -> PanelComparison:
    """Compare two checkpoints as a report does."""
    one, other = list_checkpoints(records)
    (panel,) = group_into_panels(records, (one, other))
    first, second = (load_per_image_scores(store, panel, checkpoint) for checkpoint in (one, other))
    assert first is not None
    assert second is not None
    compared = compare_in_panel(panel, first, second)
    assert compared is not None
    return compared


def files_of(report: Path) -> set[str]:
    return {path.relative_to(report).as_posix() for path in report.rglob("*") if path.is_file()}


def printed_by(capsys, arguments: list[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().err
