"""The page of training curves: real runs, and logs whose curves are counted by hand."""

import re
import shutil
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.report.panels import MAX_LINES
from ssl_bench.report.runs import draw_runs
from ssl_bench.results import ResultStore
from ssl_bench.system.files import read_digests
from ssl_bench.tables.run_logs import read_run_logs
from tests.support.faults import fails
from tests.support.report_cells import Elements, cell
from tests.support.runs import log_rows, write_log

EVIL = "<script>alert(1)<script>\"'&{{ 7 * 7 }}"


def rows_of(count: int, loss, *, length: int = 100) -> list[dict]:
    return [
        {"step": step, "epoch": (step - 1) // length, "loss": loss(step)}
        for step in range(1, count + 1)
    ]


@pytest.fixture(scope="module")
def report(pretrained_runs, tmp_path_factory) -> Path:
    """A report of runs without any record."""
    root = tmp_path_factory.mktemp("runs")
    words = ["--out", str(root / "results"), "--into", str(root / "report")]
    assert main(["report", "--runs", str(pretrained_runs), *words]) == 0
    assert not (root / "results").exists()
    return root / "report"


def test_each_measure_of_real_runs_has_a_panel_with_a_curve_per_run(report, pretrained_runs):
    text = (report / "runs.html").read_text()

    cards = re.findall(r'<article class="card" id="metric-(\w+)".*?</article>', text, re.DOTALL)
    logged = {
        name
        for run in ("dino", "labels")
        for row in log_rows(pretrained_runs / run, timed=True)
        for name in row
    }
    assert cards[:4] == ["loss", "knn_top1", "val_loss", "val_top1"]
    assert set(cards) == logged - {"step", "epoch"}
    (loss,) = re.findall(r'id="metric-loss".*?</article>', text, re.DOTALL)
    assert loss.count('class="line" d="M') == 2 + 2  # Two curves, and two keys of the legend.
    last = log_rows(pretrained_runs / "dino")[-1]
    # The epochs of the runs have three and two steps.
    assert f"<title>dino, epoch 2: {last['loss']:#.4g}</title>" in loss
    assert re.search(r'class="c1 d0s"', loss), "the run without skip connections is dashed"
    assert "finished, 6 steps" in Elements(text).text


def test_the_overview_without_records_links_the_curves_alone(report):
    page = Elements((report / "index.html").read_text())

    assert [given["href"] for tag, given in page.elements if tag == "a"] == [
        "#content",
        "runs.html",
    ]
    assert {path.name for path in report.iterdir()} >= {"runs.html", "style.css", "report.js"}


@pytest.mark.parametrize(
    ("runs", "out", "is_found"),
    [("runs", "../results", True), ("../one", "../one/results", True), ("one", "results", False)],
)
def test_runs_whose_checkpoints_have_records_are_found(
    pretrained_runs, tmp_path, monkeypatch, runs, out, is_found
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path(runs).mkdir()
    for run in ("dino", "labels"):
        (Path(runs) / run).symlink_to(pretrained_runs / run)
    ((digest, _),) = read_digests(pretrained_runs / "dino/last.safetensors.sha256")
    ResultStore(Path(out)).save(cell(checkpoint_sha256=digest))

    assert main(["report", "--out", out]) == 0

    assert Path(out, "report/runs.html").is_file() == is_found
    text = Path(out, "report/index.html").read_text()
    assert ("Training curves of 1 run<" in text) == is_found


def test_a_damaged_log_does_not_stop_a_report_that_did_not_ask_for_it(
    pretrained_runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_log(Path("runs/dino"), ["damaged"])
    sidecar = "last.safetensors.sha256"
    shutil.copy(pretrained_runs / "dino" / sidecar, Path("runs/dino"))
    ((digest, _),) = read_digests(Path("runs/dino", sidecar))
    ResultStore(Path("results")).save(cell(checkpoint_sha256=digest))

    assert main(["report"]) == 0

    assert "runs/dino/log.jsonl" in capsys.readouterr().err
    assert not Path("results/report/runs.html").exists()


def test_runs_without_records_are_not_drawn_unless_named(pretrained_runs, tmp_path, monkeypatch):
    (tmp_path / "runs").symlink_to(pretrained_runs)
    monkeypatch.chdir(tmp_path)
    ResultStore(tmp_path / "results").save(cell())

    assert main(["report"]) == 0
    assert not Path("results/report/runs.html").exists()
    assert main(["report", "--runs", "runs/labels"]) == 0
    assert Path("results/report/runs.html").is_file()
    assert len(list(Path("results/report").glob("checkpoint-*"))) == 1


def test_long_curves_are_short_lines_with_gaps_and_bands(tmp_path):
    write_log(tmp_path / "a", rows_of(2000, lambda step: None if 800 < step <= 1000 else step % 2))
    write_log(tmp_path / "b", rows_of(20, float, length=10))

    runs = draw_runs(read_run_logs([tmp_path]))

    assert runs is not None
    ((panel,), axis) = runs.panels, runs.axis
    assert axis == "epoch"
    long, short = panel.chart.curves
    assert (long.line.count("M"), long.line.count("L")) == (2, 450 - 2)
    assert long.band.count("Z") == 2
    assert not long.marks
    assert [tick.label for tick in panel.chart.x_ticks] == ["0", "5", "10", "15", "20"]
    assert short.band == ""
    assert "200 loss values not finite" in runs.lines[0].facts


def test_a_value_between_gaps_is_a_dot(tmp_path):
    write_log(tmp_path / "run", rows_of(60, lambda step: 1.0 if step in (10, 30, 31) else None))

    runs = draw_runs(read_run_logs([tmp_path]))

    assert runs is not None
    (curve,) = runs.panels[0].chart.curves
    assert [mark.tooltip for mark in curve.marks] == ["run, step 10: 1.000"]


def test_a_constant_learning_rate_has_an_axis_of_its_size(tmp_path):
    rows = [{"step": step, "loss": 1.0, "lr": 3e-4} for step in (1, 2)]

    runs = draw_runs(read_run_logs([write_log(tmp_path / "run", rows)]))

    assert runs is not None
    (lr,) = [panel for panel in runs.panels if panel.measure == "lr"]
    labels = [float(tick.label) for tick in lr.chart.y_ticks]
    assert 0 < labels[0] < 3e-4 < labels[-1] < 1e-3


def test_names_of_runs_are_escaped_and_many_runs_are_limited(tmp_path):
    for name in (EVIL, *(f"run{number:02}" for number in range(MAX_LINES))):
        write_log(tmp_path / "runs" / name, rows_of(2, float))
    words = ["--out", str(tmp_path / "none"), "--into", str(tmp_path / "report")]

    assert main(["report", "--runs", str(tmp_path / "runs"), *words]) == 0

    page = Elements((tmp_path / "report/runs.html").read_text())
    assert f"{MAX_LINES} of {MAX_LINES + 1} runs are drawn" in page.text
    assert EVIL in page.text
    assert [given for tag, given in page.elements if tag == "script"] == [
        {"src": "records.js"},
        {"src": "report.js"},
    ]


def test_a_folder_without_runs_is_one_line_and_keeps_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ResultStore(tmp_path / "results").save(cell())
    assert main(["report"]) == 0

    assert "photos contains no log.jsonl" in fails(capsys, ["report", "--runs", "photos"], 3)
    assert Path("results/report/index.html").is_file()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_hides_the_curves_of_a_run(browser, report, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((report / "runs.html").as_uri())

    def shown() -> int:
        found = browser.find_elements("css selector", "#metric-loss .chart .line")
        return sum(element.is_displayed() for element in found)

    assert shown() == 2
    browser.find_element("css selector", "input[data-model='1']").click()
    assert shown() == 1
    assert browser.get_log("browser") == []
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") == 0
