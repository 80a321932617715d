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
        ResultStore(root).save(record)
    assert main(["report", "--out", str(root)]) == 0
    return root / "report"


def test_one_metric_per_task_is_drawn_from_the_clean_score_on():
    other = [replace(record, metric="top1_k20") for record in RECORDS]

    ((_, chart),) = draw_severities(RECORDS)
    (found,) = draw_severities([*RECORDS, *other])

    assert (chart.x_label, chart.y_label, len(chart.curves)) == ("severity", "top1 (%)", 2)
    assert chart.curves[1].marks[2].tooltip == "skip, block 1, severity 2: 40.0"
    assert found[0].record.metric == "top1_k20"


def test_without_corrupted_images_or_two_epochs_there_is_no_page(tmp_path):
    report = written(tmp_path, [replace(RECORDS[0], details={"epoch": 300.0})])

    for page in ("severities.html", "epochs.html"):
        assert not (report / page).exists()
        assert page not in (report / "index.html").read_text()


def test_the_page_is_linked_once_and_names_are_escaped(tmp_path):
    report = written(tmp_path, [replace(record, model=EVIL) for record in RECORDS])

    index = Elements((report / "index.html").read_text())
    text = (report / "severities.html").read_text()
    page = Elements(text)
    links = [attributes.get("href") for tag, attributes in index.elements if tag == "a"]
    assert links.count("severities.html") == 1
    assert EVIL in page.text
    assert not [given for _, given in page.elements if EVIL in given.values()]
    buttons = {a["data-r"] for tag, a in page.elements if tag == "button" and "data-r" in a}
    assert buttons == set("012345")
    assert "Smallest drop: block 1, 10.0 %." in text
    drops = re.findall(r'<td data-v="([\d.]+)"(?: class="best")?>[\d.]+</td>', text)
    assert drops == ["50.0", "10.0"]


def test_the_leaderboard_shows_clean_images(tmp_path):
    panels = group_into_panels(RECORDS, list_checkpoints(RECORDS))
    assert [panel.is_corrupted for panel in panels] == [False, True, True]

    board, alone = (
        build_index_page(build_report(ResultStore(tmp_path), records, []))["leaderboard"]
        for records in (RECORDS, [record for record in RECORDS if record.corrupted])
    )

    assert [panel.dataset for panel in board.panels] == ["photos"]
    assert len(alone.panels) == 2
