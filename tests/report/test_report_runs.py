"""Test the training curves in the HTML report."""

import re
import shutil
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.report.panels import MAX_LINES
from ssl_bench.report.runs import TrainingCurves, draw_runs
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import read_digests
from ssl_bench.tables.run_logs import read_run_logs
from tests.support.faults import expect_error
from tests.support.report_cells import Elements, build_record
from tests.support.runs import log_rows, write_log

# It contains no slash, because it is the name of a folder.
EVIL = "<script>alert(1)<script>\"'&{{ 7 * 7 }}"
SIDECAR = "last.safetensors.sha256"


def run_record(run: Path) -> Record:
    ((digest, _),) = read_digests(run / SIDECAR)
    return build_record(checkpoint_sha256=digest)


def make_rows(count: int, loss, *, epoch_length: int = 100) -> list[dict]:
    return [
        {"step": step, "epoch": (step - 1) // epoch_length, "loss": loss(step)}
        for step in range(1, count + 1)
    ]


def draw_logs(folder: Path) -> TrainingCurves:
    runs = draw_runs(read_run_logs([folder]))
    assert runs is not None
    return runs


@pytest.fixture(scope="module")
def report(pretrained_runs, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    words = ["--out", str(root / "results"), "--into", str(root / "report")]
    assert main(["report", "--runs", str(pretrained_runs), *words]) == 0
    assert not (root / "results").exists()
    return root / "report"


def test_each_measure_has_a_panel_with_a_curve_per_run(report, pretrained_runs):
    text = (report / "runs.html").read_text()

    cards = re.findall(r'<article class="card" id="metric-(\w+)".*?</article>', text, re.DOTALL)
    logs = (log_rows(pretrained_runs / run, timed=True) for run in ("dino", "labels"))
    assert cards[:4] == ["loss", "knn_top1", "val_loss", "val_top1"]
    assert set(cards) == {name for log in logs for row in log for name in row} - {"step", "epoch"}
    (loss,) = re.findall(r'id="metric-loss".*?</article>', text, re.DOTALL)
    assert loss.count('class="line" d="M') == 2 + 2  # Two curves, and two keys of the legend.
    last = log_rows(pretrained_runs / "dino")[-1]
    # The last step, 6, is the end of epoch 2.
    assert f"<title>dino, epoch 2: {last['loss']:#.4g}</title>" in loss
    assert re.search(r'class="c\d d0s"', loss), "the run without skip connections is dashed"
    assert "finished, 6 steps" in Elements(text).text
    page = Elements((report / "index.html").read_text())
    links = [attrs["href"] for tag, attrs in page.elements if tag == "a"]
    assert links == ["#content", "runs.html"]
    assert {path.name for path in report.iterdir()} >= {"style.css", "records.js", "report.js"}


@pytest.mark.parametrize(
    ("runs", "out", "is_found"),
    [("runs", "../results", True), ("../one", "../one/results", True), ("one", "results", False)],
)
def test_runs_are_drawn_if_their_checkpoints_have_records(
    pretrained_runs, tmp_path, monkeypatch, runs, out, is_found
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path(runs).mkdir()
    for run in ("dino", "labels"):
        (Path(runs) / run).symlink_to(pretrained_runs / run)
    (Path(runs) / "again").symlink_to(pretrained_runs / "dino")
    ResultStore(Path(out)).save(run_record(pretrained_runs / "dino"))

    assert main(["report", "--out", out]) == 0

    assert Path(out, "report/runs.html").is_file() == is_found
    text = Path(out, "report/index.html").read_text()
    assert ("Training curves of 1 run<" in text) == is_found


def test_a_damaged_log_does_not_stop_a_report_without_runs(
    pretrained_runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_log(Path("runs/dino"), ["damaged"])
    shutil.copy(pretrained_runs / "dino" / SIDECAR, "runs/dino")
    ResultStore(Path("results")).save(run_record(Path("runs/dino")))

    assert main(["report"]) == 0

    assert "runs/dino/log.jsonl" in capsys.readouterr().err
    assert not Path("results/report/runs.html").exists()


def test_runs_without_records_are_drawn_only_on_request(pretrained_runs, workdir, capsys):
    (workdir / "runs").symlink_to(pretrained_runs)
    ResultStore(workdir / "results").save(build_record())

    assert main(["report"]) == 0
    assert not Path("results/report/runs.html").exists()
    page = Path("results/report/index.html")
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"1 record of 1 checkpoint: {page}")
    assert main(["report", "--runs", "runs/labels"]) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"1 record of 1 checkpoint, 1 run: {page}")
    assert Path("results/report/runs.html").is_file()
    assert len(list(Path("results/report").glob("checkpoint-*"))) == 1
    expect_error(capsys, ["report", "--runs", "photos"], 3)
    assert Path("results/report/runs.html").is_file()


def test_curves_of_long_logs_have_few_points_gaps_and_bands(tmp_path):
    rows = make_rows(2000, lambda step: None if 800 < step <= 1000 else step % 2)
    write_log(tmp_path / "a", rows)
    write_log(tmp_path / "b", make_rows(20, float, epoch_length=10))

    runs = draw_logs(tmp_path)

    (panel,) = runs.panels
    assert runs.axis == "epoch"
    long, short = panel.chart.curves
    assert (long.line.count("M"), long.line.count("L")) == (2, 450 - 2)
    assert long.band.count("Z") == 2
    assert not long.markers
    assert [tick.label for tick in panel.chart.x_ticks] == ["0", "5", "10", "15", "20"]
    assert short.band == ""
    assert "200 loss values not finite" in runs.lines[0].facts
    # The length of an epoch is unknown until an epoch is complete.
    write_log(tmp_path / "c", make_rows(20, float))
    assert draw_logs(tmp_path).axis == "step"


def test_a_value_between_gaps_is_a_dot(tmp_path):
    write_log(tmp_path / "run", make_rows(60, lambda step: 1.0 if step in (10, 30, 31) else None))

    (curve,) = draw_logs(tmp_path).panels[0].chart.curves

    assert [marker.tooltip for marker in curve.markers] == ["run, step 10: 1.000"]


def test_axes_name_the_measure_and_its_unit(tmp_path):
    rows = [{"step": step, "epoch": 0, "loss": 1.0, "knn_top1": 5.0} for step in (1, 2)]
    write_log(tmp_path / "run", rows)

    drawn = draw_logs(tmp_path)
    labels = {one.measure: one.chart.y_label for one in (*drawn.panels, *drawn.folded)}

    assert labels == {"loss": "loss", "knn_top1": "knn_top1 (%)"}


def test_axes_of_constant_learning_rates_are_close_to_their_value(tmp_path):
    write_log(tmp_path / "run", [{"step": step, "loss": 1.0, "lr": 3e-4} for step in (1, 2)])

    (lr,) = [panel for panel in draw_logs(tmp_path).panels if panel.measure == "lr"]

    labels = [float(tick.label) for tick in lr.chart.y_ticks]
    assert 0 < labels[0] < 3e-4 < labels[-1] < 1e-3


def test_names_of_runs_are_escaped_and_many_runs_are_limited(tmp_path):
    for name in (EVIL, *(f"run{number:02}" for number in range(MAX_LINES))):
        write_log(tmp_path / "runs" / name, make_rows(2, float))
    words = ["--out", str(tmp_path / "none"), "--into", str(tmp_path / "report")]

    assert main(["report", "--runs", str(tmp_path / "runs"), *words]) == 0

    page = Elements((tmp_path / "report/runs.html").read_text())
    assert f"{MAX_LINES} of {MAX_LINES + 1} runs are drawn" in page.text
    assert EVIL in page.text
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert scripts == [{"src": "records.js"}, {"src": "report.js"}]
