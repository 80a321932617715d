"""Tables over training steps, from real logs and from logs whose means are counted by hand."""

import csv
import io
import json
import math
import re

import numpy as np
import pyarrow.parquet
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.tables.drawing import curves_figure
from ssl_bench.tables.run_logs import read_run_logs
from ssl_bench.tables.sheets import NO_VALUE
from ssl_bench.tables.steps import format_logged, step_table
from tests.support.faults import expect_error
from tests.support.runs import log_rows, write_log
from tests.support.without_torch import stdout_without_torch


@pytest.fixture
def printed(capsys):
    def run(*words, style="markdown") -> str:
        assert main(["table", "--over-steps", *map(str, words), "--format", style]) == 0
        return capsys.readouterr().out

    return run


def body(text: str) -> dict[str, list[str]]:
    """Return the cells of a Markdown table by its first column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows if row[0] != "---"}


def steps(count: int, **measures) -> list[dict]:
    """Return the rows of a log, whose measures are functions of the step."""
    return [
        {"step": step, "epoch": (step - 1) // 100}
        | {name: value for name, f in measures.items() if (value := f(step)) != "absent"}
        for step in range(1, count + 1)
    ]


def test_formats_for_programs_hold_every_step_of_real_runs(pretrained_runs, tmp_path, capsysbinary):
    texts = {}
    for style in ("csv", "json", "parquet"):
        assert main(["table", "--over-steps", str(pretrained_runs), "--format", style]) == 0
        texts[style] = capsysbinary.readouterr().out
    (tmp_path / "table.parquet").write_bytes(texts["parquet"])

    rows = list(csv.DictReader(io.StringIO(texts["csv"].decode())))
    (table,) = json.loads(texts["json"])
    logged = pyarrow.parquet.read_table(tmp_path / "table.parquet").to_pylist()

    assert [run["run"] for run in table["runs"]] == ["dino", "labels"]
    for run, length in (("dino", 3), ("labels", 2)):
        known = log_rows(pretrained_runs / run, timed=True)
        whole = [row | {"run": run, "epoch": row["step"] / length} for row in known]
        assert next(one["rows"] for one in table["runs"] if one["run"] == run) == [
            {key: pytest.approx(value) for key, value in row.items()} for row in whole
        ]
        filled = [{k: v for k, v in row.items() if v is not None} for row in logged]
        assert [row for row in filled if row["run"] == run] == whole
        own = [row for row in rows if row["run"] == run]
        for name in ("loss", "lr", "knn_top1" if run == "dino" else "val_top1"):
            texts_of_run = [float(row[name]) for row in own if row[name]]
            assert texts_of_run == [row[name] for row in known if name in row]


def test_logged_values_have_four_digits_or_no_decimals():
    values = (2.30711, -0.5, 1234.5, -12345.0)
    assert [format_logged(value, "") for value in values] == [
        "2.307",
        "-0.5000",
        "1,234",
        "-12,345",
    ]


def test_printed_columns_are_measures_and_runs(pretrained_runs, printed):
    one = body(printed(pretrained_runs / "dino"))

    assert body(printed(pretrained_runs))["step"] == [
        *("loss dino", "loss labels", "knn_top1 dino", "val_loss labels", "val_top1 labels"),
    ]
    assert one["step"] == ["loss", "knn_top1"]
    assert body(printed(pretrained_runs, "--metric", "lr"))["step"] == ["dino", "labels"]
    known = log_rows(pretrained_runs / "dino")
    assert [row[1] for row in list(one.values())[1:]] == [
        f"{row['knn_top1']:.1f}" if "knn_top1" in row else "" for row in known
    ]


def test_rows_of_a_long_log_are_means_and_monitored_values_the_latest(tmp_path, printed):
    rows = steps(1000, loss=float, knn_top1=lambda step: step / 20 if step % 20 == 0 else "absent")

    lines = body(printed(write_log(tmp_path / "run", rows)))

    assert list(lines)[1:] == [str(50 * number) for number in range(1, 21)]
    # The mean of 1 to 50, and what was measured at step 40.
    assert lines["50"] == ["25.50", "2.0"]
    assert lines["1000"] == ["975.5", "50.0"]


def test_damaged_repeated_and_missing_rows_are_counted(tmp_path, printed):
    rows: list = steps(10, loss=float)
    again = [{"step": 3, "epoch": 0, "loss": 30.0}, {"step": 4, "epoch": 0, "loss": None}]
    damaged = ["{", "[1]", "null", '{"loss": 1}', '{"step": "5"}', '{"step": 1e400}']
    damaged += ['{"step": -1}', f'{{"step": 9, "loss": 1{"0" * 400}}}']
    damaged += [f'{{"step": 1{"0" * 400}}}', "[" * 100_000]
    folder = write_log(tmp_path / "run", [*rows[:5], *damaged, "", *again, *rows[7:]])

    text = printed(folder)

    assert body(text)["3"] == ["30.00"]
    assert body(text)["4"] == [NO_VALUE]
    assert body(text)["6"] == body(text)["7"] == [NO_VALUE]
    assert re.findall(r"run: (.*)</sub>", text) == [
        "10 damaged lines skipped, 2 repeated rows replaced by later ones, 2 steps missing, "
        "1 loss value not finite"
    ]


def test_drawn_curves_are_short_and_have_gaps(tmp_path, printed):
    rows = steps(2000, loss=lambda step: None if 800 < step <= 1000 else 2.0 + step % 2)
    short = steps(500, loss=float)
    logs = [write_log(tmp_path / name, own) for name, own in (("a", rows), ("b", short))]

    (table,) = step_table(read_run_logs(logs), None, has_all=False).curves_by_measure()
    (axis,) = curves_figure([table]).axes

    first, second = (np.asarray(line.get_ydata(), float) for line in axis.lines)
    assert (len(first), len(second)) == (500, 125)
    assert np.flatnonzero(np.isnan(first)).tolist() == list(range(200, 250))
    assert set(first[:200]) == {2.5}
    # One standard deviation each way of values that are 2 and 3 in turn.
    band = np.asarray(axis.collections[0].get_paths()[0].vertices)[:, 1]
    assert {math.floor(10 * value) for value in band} == {20, 30}
    printed(*logs, "--figure", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["photos"], 3, ""),
        (["empty"], 3, ""),
        (["run", "--metric", "los"], 2, "`--metric loss`"),
        (["run", "--task", "knn"], 2, "`--metric loss`"),
        (["run", "--pivot"], 2, ""),
    ],
)
def test_folders_and_options_without_steps_are_refused(
    tmp_path, monkeypatch, capsys, words, code, hint
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    write_log(tmp_path / "empty", ["damaged"])
    write_log(tmp_path / "run", steps(3, loss=float))

    assert hint in expect_error(capsys, ["table", "--over-steps", *words], code)


def test_a_run_without_a_row_is_left_out_of_several(tmp_path, capsys):
    write_log(tmp_path / "runs/new", [])
    write_log(tmp_path / "runs/old", [{"step": 1, "lr": 0.5}])

    assert main(["table", "--over-steps", str(tmp_path / "runs"), "--format", "markdown"]) == 0

    out, err = capsys.readouterr()
    # Without a loss, everything is shown.
    assert body(out) == {"step": ["lr"], "1": ["0.5000"]}
    assert str(tmp_path / "runs/new") in err


def test_two_folders_of_one_name_are_told_apart(tmp_path, printed):
    places = [write_log(tmp_path / name / "run", steps(2, loss=float)) for name in "ab"]

    assert body(printed(*places))["step"] == [str(place) for place in places]
    text = stdout_without_torch(tmp_path, [["table", "--over-steps", "a/run"]])
    assert "of run: loss" in text
