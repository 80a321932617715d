"""The page on corrupted images: its numbers, its links, and what stays out of the first table."""

import re
from dataclasses import replace
from pathlib import Path

from ssl_bench.cli.__main__ import main
from ssl_bench.report.pages import build_index_page, build_report
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.report.trends import draw_severities
from ssl_bench.results import Record, ResultStore
from tests.support.report_cells import EVIL, Elements
from tests.tables.test_severities import of_blocks

RECORDS = of_blocks((80.0, 60.0, 20.0), (50.0, 50.0, 40.0))


def written(root: Path, records: list[Record]) -> Path:
    for record in records:
        ResultStore(root / "results").save(record)
    into = root / "report"
    assert main(["report", "--out", str(root / "results"), "--into", str(into)]) == 0
    return into


def test_curves_start_at_the_clean_score():
    ((_, chart),) = draw_severities(RECORDS)

    assert (chart.x_label, chart.y_label, len(chart.curves)) == ("severity", "top1 (%)", 2)
    assert chart.curves[1].marks[2].tooltip == "skip, block 1, severity 2: 40.0"


def test_one_metric_per_task_is_drawn():
    other = [replace(record, metric="top1_k20") for record in RECORDS]

    found = draw_severities([*RECORDS, *other])

    assert [table.record.metric for table, _ in found] == ["top1_k20"]


def test_without_corrupted_images_or_two_epochs_there_is_no_page(tmp_path):
    report = written(tmp_path, [replace(RECORDS[0], details={"epoch": 300.0})])

    for page in ("severities.html", "epochs.html"):
        assert not (report / page).exists()
        assert page not in (report / "index.html").read_text()


def test_the_page_is_linked_once_and_names_are_escaped(tmp_path):
    report = written(tmp_path, [replace(record, model=EVIL) for record in RECORDS])

    index = Elements((report / "index.html").read_text())
    page = Elements((report / "severities.html").read_text())
    links = [attributes.get("href") for tag, attributes in index.elements if tag == "a"]
    assert links.count("severities.html") == 1
    assert not [tag for tag, _ in page.elements if tag == EVIL]
    buttons = {a["data-r"] for tag, a in page.elements if tag == "button" and "data-r" in a}
    assert buttons == {"0", "1", "2", "3", "4", "5"}
    text = (report / "severities.html").read_text()
    assert "Smallest drop: block 1, 10.0 %." in text
    assert re.findall(r'<td data-v="([\d.]+)"(?: class="best")?>[\d.]+</td>', text) == [
        "50.0",
        "10.0",
    ]


def test_the_leaderboard_shows_clean_images(tmp_path):
    store = ResultStore(tmp_path)
    panels = group_into_panels(RECORDS, list_checkpoints(RECORDS))
    assert [panel.is_corrupted for panel in panels] == [False, True, True]

    board = build_index_page(build_report(store, RECORDS, []))["leaderboard"]
    alone = build_index_page(build_report(store, [r for r in RECORDS if r.corrupted], []))[
        "leaderboard"
    ]

    assert [panel.dataset for panel in board.panels] == ["photos"]
    assert len(alone.panels) == 2
