"""Test the report pages about training epochs and image corruptions."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.report.drawing import Curve, Point, draw_chart
from ssl_bench.report.pages import build_epochs_page, build_index_page, build_report
from ssl_bench.report.panels import MAX_LINES, group_into_panels, list_checkpoints
from ssl_bench.report.trends import draw_severities, find_epoch_trends, style_block
from ssl_bench.results import Record, ResultStore
from tests.report.test_report import write_report
from tests.support.report_cells import EVIL, Elements, build_record, plain
from tests.tables.test_severities import corrupted_blocks

ENCODERS = [("skip", 100.0), ("skip", 300.0), ("skipless", 100.0), ("single", 300.0)]


def make_record(run: str, epoch: float, layer: int, value: float, **changes) -> Record:
    model = run if epoch == 300 else f"{run}@{epoch:g}"
    sha, ends = "acde"[ENCODERS.index((run, epoch))] * 64, (value - 5, value + 5)
    record = build_record(model=model, checkpoint_sha256=sha, layer=layer, value=value, ci95=ends)
    return replace(record, details={"epoch": epoch}, **changes)


TREND = [
    make_record("skip", 100.0, 0, 20.0),
    make_record("skip", 300.0, 0, 15.0),
    make_record("skip", 100.0, 11, 30.0),
    make_record("skip", 300.0, 11, 55.0),
]
SINGLE = make_record("single", 300.0, 0, 90.0)
CORRUPTED = corrupted_blocks((80.0, 60.0, 20.0), (50.0, 50.0, 40.0))


def find_trends(records):
    return find_epoch_trends(group_into_panels(records, list_checkpoints(records)))


def test_a_run_with_two_epochs_has_scores_by_block():
    unknown = replace(TREND[1], details={})
    assert find_trends([TREND[0], TREND[2], SINGLE, unknown]) == ()
    # One score has another seed, and two have other settings.
    seed = make_record("skip", 100.0, 0, 40.0, seed=1)
    other_settings = [replace(record, settings={"tau": 0.3}) for record in TREND[:2]]

    one, other = find_trends([SINGLE, *TREND, seed, *other_settings])

    (trend,) = one.trends
    assert trend.name == "skip"
    assert {at: (entry.text(), entry.records) for at, entry in trend.table.entries.items()} == {
        (100.0, "block 0"): ("30.0 ± 5.0 (2 seeds)", (TREND[0], seed)),
        (300.0, "block 0"): ("15.0 ± 5.0 (1 seed)", (TREND[1],)),
        (100.0, "block 11"): ("30.0 ± 5.0 (1 seed)", (TREND[2],)),
        (300.0, "block 11"): ("55.0 ± 5.0 (1 seed)", (TREND[3],)),
    }
    assert [len(entry.records) for entry in other.trends[0].table.entries.values()] == [1, 1]


def test_the_charts_of_all_runs_have_the_same_axes():
    other = [make_record("skipless", 100.0, 0, 70.0), replace(SINGLE, model="skipless", value=86.0)]
    middle = replace(TREND[1], model="skip@150", checkpoint_sha256="b" * 64)
    records = [*TREND, *other, replace(middle, details={"epoch": 150.0})]

    ((_, skip), (_, skipless)) = find_trends(records)[0].draw_charts()

    assert (skip.x_ticks, skip.y_ticks) == (skipless.x_ticks, skipless.y_ticks)
    assert skip.x_label == "epoch"
    places = {tick.label: tick.position for tick in skip.x_ticks}
    assert list(places) == ["100", "150", "300"]
    assert places["150"] - places["100"] == pytest.approx((places["300"] - places["100"]) / 4)
    assert [tick.label for tick in skip.y_ticks] == ["0", "20", "40", "60", "80", "100"]
    assert [curve.name for curve in skip.curves] == ["block 0", "block 11"]
    # Tick labels that would overlap are left out.
    points = [Point(epoch, 1.0, None, None, "") for epoch in (1.0, 2.0, 100.0, 200.0, 201.0)]
    chart = draw_chart([Curve("block 0", "", 0, points)], x_label="epoch")
    assert [tick.label for tick in chart.x_ticks] == ["1", "100", "200"]
    assert len(chart.curves[0].markers) == 5


@pytest.mark.parametrize("depth", [1, 3, 12, 24, 32])
def test_no_two_blocks_look_the_same(depth):
    styles = [style_block(layer, depth) for layer in range(depth)]

    assert len(set(styles)) == depth
    shades = [int(re.findall(r"b(\d+)", style)[0]) for style in styles]
    assert shades == sorted(shades)
    assert (shades[0], shades[-1]) == (0, 11 if depth > 1 else 0)


def test_the_legend_shows_the_styles_of_blocks_in_the_deepest_encoder():
    other = build_record(model="short@100", checkpoint_sha256="f" * 64, layer=1, depth=2)
    short = [
        replace(other, details={"epoch": 100.0}),
        replace(other, model="short", checkpoint_sha256="9" * 64, details={"epoch": 300.0}),
    ]
    second = [make_record("skip", epoch, 1, 20.0) for epoch in (100.0, 300.0)]

    page = build_epochs_page(find_trends([*TREND, *second, *short]))

    styles = {curve.name: curve.style for curve in page["blocks"]}
    assert styles == {f"block {layer}": style_block(layer, 12) for layer in (0, 1, 11)}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    records = [*TREND, SINGLE, plain(model="skip@100", layer=0)]
    records = [replace(record, protocol=EVIL) for record in records]
    return write_report(tmp_path_factory.mktemp("epochs"), *records)


def test_the_page_shows_curves_intervals_legend_and_numbers(report):
    text = (report / "epochs.html").read_text()
    page = Elements(text)

    (chart,) = re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL)
    assert chart.count('class="line"') == 2
    assert len(re.findall(r'class="band" d="M[^"]+Z"', chart)) == 2
    assert "<title>skip, block 11, epoch 300: 55.0 ± 5.0</title>" in chart
    legend = re.findall(r'<ul class="legend".*?</ul>', text, re.DOTALL)[0]
    assert Elements(legend).text.split() == ["block", "0", "block", "11"]
    (table,) = re.findall(r"<tbody>.*?</tbody>", text, re.DOTALL)
    rows = Elements(table.replace("</t", " </t")).text.split("\n")
    words = [" ".join(row.split()) for row in rows if row.strip()]
    assert words == ["100 20.0 ± 5.0 30.0 ± 5.0", "300 15.0 ± 5.0 55.0 ± 5.0"]
    best = re.findall(r'class="best">.*?</td>', table, re.DOTALL)
    assert [Elements(f"<td {one}").text.strip() for one in best] == ["20.0 ± 5.0", "55.0 ± 5.0"]
    assert "single" not in page.text
    assert "condition_number" not in page.text
    assert EVIL in page.text
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert scripts == [{"src": "records.js"}, {"src": "report.js"}]


def test_the_overview_links_the_page_and_shows_every_encoder(report):
    page = Elements((report / "index.html").read_text())

    links = [attrs["href"] or "" for tag, attrs in page.elements if tag == "a"]
    epoch_links = [link for link in links if link.startswith("epochs.html")]
    assert epoch_links == ["epochs.html", "epochs.html#panel1"]
    sections = Elements((report / "epochs.html").read_text()).elements
    assert ("section", {"id": "panel1", "data-group": None}) in sections
    assert len(list(report.glob("checkpoint-*.html"))) == 3


def test_runs_with_the_same_name_are_reported_and_not_drawn(tmp_path):
    report = write_report(tmp_path, *TREND, replace(TREND[0], checkpoint_sha256="f" * 64))

    page = (report / "epochs.html").read_text()
    assert "Not drawn: there are results of two encoders" in Elements(page).text
    assert "<svg" not in page[page.index("Not drawn") :]
    # A section with this attribute would be hidden, because it has no card.
    assert "data-group" not in page


def test_runs_that_cannot_be_drawn_do_not_hide_later_runs():
    later = [make_record("skipless", 100.0, 0, 70.0), replace(SINGLE, model="skipless", value=86.0)]
    twin = replace(TREND[0], checkpoint_sha256="f" * 64)

    (one,) = find_trends([*TREND, twin, *later])

    assert [trend.name for trend in one.trends] == ["skipless"]
    assert len(one.problems) == 1


def test_the_highest_of_many_runs_are_drawn():
    lowest = 3
    records = [
        replace(
            TREND[0], model=f"run{number:02}@{epoch}", value=20.0 + (number != lowest),
            checkpoint_sha256=f"{number:032x}{epoch:032x}", details={"epoch": float(epoch)},
        )
        for number in range(MAX_LINES + 1) for epoch in (100, 200)
    ]  # fmt: skip

    (one,) = find_trends(records)

    assert len(one.trends) == MAX_LINES + 1
    runs = [trend.name for trend, _ in one.draw_charts()]
    assert runs == [trend.name for trend in one.trends if trend.name != f"run{lowest:02}"]


# Corrupted images.


def test_one_metric_per_task_is_drawn_from_the_clean_score():
    other = [replace(record, metric="top1_k20") for record in CORRUPTED]

    ((_, chart),) = draw_severities(CORRUPTED)
    ((table, _),) = draw_severities([*CORRUPTED, *other])

    assert (chart.x_label, chart.y_label, len(chart.curves)) == ("severity", "top1 (%)", 2)
    assert chart.curves[1].markers[2].tooltip == "skip, block 1, severity 2: 40.0"
    assert table.record.metric == "top1_k20"


def test_without_corrupted_images_or_two_epochs_there_is_no_page(tmp_path):
    report = write_report(tmp_path, replace(CORRUPTED[0], details={"epoch": 300.0}))

    for page in ("severities.html", "epochs.html"):
        assert not (report / page).exists()
        assert page not in (report / "index.html").read_text()


def test_the_severity_page_is_linked_once_and_escapes_names(tmp_path):
    report = write_report(tmp_path, *(replace(record, model=EVIL) for record in CORRUPTED))

    index = Elements((report / "index.html").read_text())
    text = (report / "severities.html").read_text()
    page = Elements(text)
    links = [attrs.get("href") for tag, attrs in index.elements if tag == "a"]
    assert links.count("severities.html") == 1
    assert EVIL in page.text
    assert not [attrs for _, attrs in page.elements if EVIL in attrs.values()]
    buttons = {a["data-r"] for tag, a in page.elements if tag == "button" and "data-r" in a}
    assert buttons == set("012345")
    assert "Smallest drop: block 1, 10.0 %." in text
    drops = re.findall(r'<td data-v="([\d.]+)"(?: class="best")?>[\d.]+</td>', text)
    assert drops == ["50.0", "10.0"]


def test_the_leaderboard_shows_clean_images(tmp_path):
    panels = group_into_panels(CORRUPTED, list_checkpoints(CORRUPTED))
    assert [panel.is_corrupted for panel in panels] == [False, True, True]

    board, corrupted = (
        build_index_page(build_report(ResultStore(tmp_path), records, []))["leaderboard"]
        for records in (CORRUPTED, [record for record in CORRUPTED if record.corruption])
    )

    assert [panel.dataset for panel in board.panels] == ["photos"]
    assert len(corrupted.panels) == 2
