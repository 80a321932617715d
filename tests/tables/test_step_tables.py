"""Test tables of the metrics in a training log."""

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
def print_table(capsys):
    def run(*words, style="markdown") -> str:
        assert main(["table", "--over-steps", *map(str, words), "--format", style]) == 0
        return capsys.readouterr().out

    return run


def parse_markdown(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows if row[0] != "---"}


def make_rows(count: int, **measures) -> list[dict]:
    return [
        {"step": step, "epoch": (step - 1) // 100}
        | {name: value for name, f in measures.items() if (value := f(step)) != "absent"}
        for step in range(1, count + 1)
    ]


def test_machine_readable_formats_contain_every_step(pretrained_runs, tmp_path, capsysbinary):
    texts = {}
    for style in ("csv", "json", "parquet"):
        assert main(["table", "--over-steps", str(pretrained_runs), "--format", style]) == 0
        texts[style] = capsysbinary.readouterr().out
    (tmp_path / "table.parquet").write_bytes(texts["parquet"])

    csv_rows = list(csv.DictReader(io.StringIO(texts["csv"].decode())))
    (table,) = json.loads(texts["json"])
    parquet_rows = pyarrow.parquet.read_table(tmp_path / "table.parquet").to_pylist()

    assert [run["run"] for run in table["runs"]] == ["dino", "labels"]
    for own, length in zip(table["runs"], (3, 2), strict=True):
        run = own["run"]
        logged = log_rows(pretrained_runs / run, timed=True)
        expected = [row | {"run": run, "epoch": row["step"] / length} for row in logged]
        assert own["rows"] == [{k: pytest.approx(v) for k, v in row.items()} for row in expected]
        known = [{k: v for k, v in row.items() if v is not None} for row in parquet_rows]
        assert [row for row in known if row["run"] == run] == expected
        for name in ("loss", "lr", "knn_top1" if run == "dino" else "val_top1"):
            column = [float(row[name]) for row in csv_rows if row["run"] == run and row[name]]
            assert column == [row[name] for row in logged if name in row]


def test_logged_values_have_four_digits_or_no_decimals():
    values = {2.30711: "2.307", -0.5: "-0.5000", 1234.5: "1,234", -12345.0: "-12,345"}
    assert [format_logged(value, "") for value in values] == list(values.values())


def test_percentages_have_one_decimal_and_their_curves_a_unit(tmp_path, print_table):
    percentages = ["knn_top5", "val_top1", "train_top1", "letters_50", "strings_50"]
    percentages += ["data_wait", "mfu"]
    numbers = ["loss", "lr", "val_loss", "images_per_second"]
    measures = dict.fromkeys([*percentages, *numbers], lambda step: 10.0 * step)
    run = write_log(tmp_path / "run", make_rows(3, **measures))

    for names, text, unit in ((percentages, "20.0", "%"), (numbers, "20.00", "")):
        metric = ",".join([*names, names[0]])
        cells = parse_markdown(print_table(run, "--metric", metric))
        assert (cells["step"], cells["2"]) == (names, [text] * len(names))
        curves = step_table(read_run_logs([run]), metric, has_all=False).curves_by_measure()
        assert [curve.unit for curve in curves] == [unit] * len(names)


def test_printed_columns_are_measures_and_runs(pretrained_runs, print_table):
    single = parse_markdown(print_table(pretrained_runs / "dino"))

    assert parse_markdown(print_table(pretrained_runs))["step"] == [
        *("loss dino", "loss labels", "knn_top1 dino", "val_loss labels", "val_top1 labels")
    ]
    assert single["step"] == ["loss", "knn_top1"]
    assert parse_markdown(print_table(pretrained_runs, "--metric", "lr"))["step"] == [
        "dino",
        "labels",
    ]
    assert [row[1] for row in list(single.values())[1:]] == [
        f"{row['knn_top1']:.1f}" if "knn_top1" in row else ""
        for row in log_rows(pretrained_runs / "dino")
    ]


def test_long_logs_show_mean_losses_and_the_latest_monitored_values(tmp_path, print_table):
    rows = make_rows(1000, loss=float, knn_top1=lambda step: "absent" if step % 20 else step / 20)

    lines = parse_markdown(print_table(write_log(tmp_path / "run", rows)))

    assert list(lines)[1:] == [str(50 * number) for number in range(1, 21)]
    # The mean loss of steps 1 to 50, and the k-NN accuracy of step 40.
    assert lines["50"] == ["25.50", "2.0"]
    assert lines["1000"] == ["975.5", "50.0"]


def test_damaged_repeated_and_missing_rows_are_counted(tmp_path, print_table):
    rows: list = make_rows(10, loss=float)
    again = [{"step": 3, "epoch": 0, "loss": 30.0}, {"step": 4, "epoch": 0, "loss": None}]
    damaged = ["{", "[1]", "null", '{"loss": 1}', '{"step": "5"}', '{"step": 1e400}']
    damaged += ['{"step": -1}', f'{{"step": 9, "loss": 1{"0" * 400}}}']
    damaged += [f'{{"step": 1{"0" * 400}}}', "[" * 100_000]
    folder = write_log(tmp_path / "run", [*rows[:5], *damaged, "", *again, *rows[7:]])

    text = print_table(folder)

    cells = parse_markdown(text)
    assert cells["3"] == ["30.00"]
    assert cells["4"] == cells["6"] == cells["7"] == [NO_VALUE]
    assert re.findall(r"run: (.*)</sub>", text) == [
        "10 damaged lines skipped, 2 repeated rows replaced by later ones, 2 steps missing, "
        "1 loss value not finite"
    ]


def test_drawn_curves_are_short_and_have_gaps(tmp_path, print_table):
    rows = make_rows(2000, loss=lambda step: None if 800 < step <= 1000 else 2.0 + step % 2)
    short = make_rows(500, loss=float)
    logs = [write_log(tmp_path / name, own) for name, own in (("a", rows), ("b", short))]

    (table,) = step_table(read_run_logs(logs), None, has_all=False).curves_by_measure()
    (axis,) = curves_figure([table]).axes

    first, second = (np.asarray(line.get_ydata(), float) for line in axis.lines)
    assert (len(first), len(second)) == (500, 125)
    assert np.flatnonzero(np.isnan(first)).tolist() == list(range(200, 250))
    assert set(first[:200]) == {2.5}
    # The losses alternate between 2 and 3, so the band is one standard deviation around 2.5.
    band = np.asarray(axis.collections[0].get_paths()[0].vertices)[:, 1]
    assert {math.floor(10 * value) for value in band} == {20, 30}
    print_table(*logs, "--figure", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_all_charts_over_steps_have_the_same_axis(tmp_path):
    rows = make_rows(100, loss=float, knn_top1=lambda step: 9.0 if step == 20 else "absent")
    logs = read_run_logs([write_log(tmp_path / "run", rows)])

    figure = curves_figure(step_table(logs, None, has_all=False).curves_by_measure())

    assert [axis.get_xlim() for axis in figure.axes] == [(0, 102), (0, 102)]


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["photos"], 3, ""),
        (["empty"], 3, ""),
        (["run", "--metric", "los"], 2, "`--metric loss`"),
        *(
            (["run", flag, "1"], 2, f"Leave out {flag}")
            for flag in ("--task", "--layer", "--dataset", "--facet", "--protocol")
        ),
        (["run", "--pivot"], 2, ""),
    ],
)
def test_folders_without_a_log_and_wrong_options_are_refused(workdir, capsys, words, code, hint):
    write_log(workdir / "empty", ["damaged"])
    write_log(workdir / "run", make_rows(3, loss=float))

    assert hint in expect_error(capsys, ["table", "--over-steps", *words], code)


def test_a_run_in_the_current_folder_has_the_name_of_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(write_log(tmp_path / "mine", [{"step": 1, "loss": 1.0}]))
    assert [log.name for log in read_run_logs(["."])] == ["mine"]


def test_a_run_without_a_row_is_left_out_of_several(tmp_path, capsys):
    write_log(tmp_path / "runs/new", [])
    write_log(tmp_path / "runs/old", [{"step": 1, "lr": 0.5}])

    assert main(["table", "--over-steps", str(tmp_path / "runs"), "--format", "markdown"]) == 0

    out, err = capsys.readouterr()
    # If no run has a loss, all measures are shown.
    assert parse_markdown(out) == {"step": ["lr"], "1": ["0.5000"]}
    assert str(tmp_path / "runs/new") in err


def test_runs_of_the_same_name_are_shown_with_their_paths(tmp_path, print_table):
    runs = [write_log(tmp_path / name / "run", make_rows(2, loss=float)) for name in "ab"]

    assert parse_markdown(print_table(*runs))["step"] == [str(run) for run in runs]
    text = stdout_without_torch(tmp_path, [["table", "--over-steps", "a/run"]])
    assert "of run: loss" in text
