"""A block most of whose images are degenerate is marked everywhere and best nowhere."""

import csv
import io
import json
import re
from dataclasses import replace
from html import unescape
from typing import Any

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.results import ResultStore
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import curves_figure
from ssl_bench.tables.layer_selection import choose_block
from ssl_bench.tables.severities import severity_tables
from tests.core.test_results import RECORD
from tests.support.report_cells import around
from tests.tables.test_severities import of_blocks

NUM_IMAGES = 40
SKIP = {0: (20, 10.0), 1: (36, 60.0), 2: (2, 50.0)}
"""Hits and percent of degenerate images by block: the highest value is degenerate."""
SKIPLESS = {0: (10, 100.0), 1: (8, 90.0), 2: (30, 55.0)}


def make(sha: str, name: str, blocks: dict[int, tuple[int, float]]) -> list[tuple[Any, np.ndarray]]:
    found = []
    for layer, (right, degenerate) in blocks.items():
        hits = np.arange(NUM_IMAGES) < right
        record = replace(RECORD, checkpoint_sha256=sha * 64, model=name, layer=layer)
        changes = around({"num_images": NUM_IMAGES, "value": 100 * right / NUM_IMAGES})
        details = {"degenerate_percent": degenerate}
        found.append((replace(record, details=details, **changes), hits))
    return found


@pytest.fixture
def out(tmp_path):
    """A folder of results of two encoders, one of which is degenerate at every block."""
    for record, hits in (*make("a", "skip", SKIP), *make("d", "skipless", SKIPLESS)):
        ResultStore(tmp_path).save(record, hits)
    return str(tmp_path)


def printed(capsys, *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


def test_tables_mark_the_best_of_the_other_blocks(out, capsys):
    lines = printed(capsys, "table", "--out", out, "--task", "tokencut").splitlines()

    (first, second, third) = (line for line in lines if re.match(r" +\d ", line))
    assert re.search(r"\*50\.0 [^*]*\* †10 ", first)
    assert "*" not in second + third
    assert {"†60", "†90", "†50"} <= {word for line in lines for word in line.split()}
    (note,) = (line for line in lines if line.startswith("†"))
    assert "†50" in note
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "table", "--out", out, "--format=csv"))))
    assert [float(row["degenerate_percent"]) for row in rows if row["model"] == "skip"] == [
        10.0, 60.0, 50.0,
    ]  # fmt: skip


def test_latex_prints_what_a_dagger_means_and_sets_no_degenerate_value_in_bold(out, capsys):
    lines = printed(capsys, "table", "--out", out, "--format", "latex").splitlines()

    (bold,) = (line for line in lines if "textbf" in line)
    assert re.fullmatch(r"0 & \\textbf\{50\.0[^}]*\} \$\\dagger\$10 & [^{]*\\\\", bold)
    (underlined,) = (line for line in lines if "underline" in line)
    assert underlined.startswith(r"2 & \underline{5.0")
    visible = [line for line in lines if not line.startswith("%")]
    (printed_note,) = (line for line in visible if "degenerate" in line)
    assert printed_note.startswith(r"\par{\footnotesize $\dagger$N: N \% of the images")


@pytest.mark.parametrize("choice", ["holdout", "oracle"])
def test_no_choice_of_a_block_takes_one(out, capsys, choice):
    words = ["table", "--pivot", "--out", out, "--best-layer", choice]
    text = printed(capsys, *words)
    (table,) = json.loads(printed(capsys, *words, "--format", "json"))

    cells = {cell["encoder"]: cell for cell in table["cells"]}
    assert (cells["skip"]["blocks"], cells["skip"]["value"]) == ([0], 50.0)
    assert cells["skipless"]["value"] is None
    assert "every block" in next(line for line in text.splitlines() if line.startswith("‡"))


def test_one_degenerate_block_beside_another_encoder_is_not_best(out, capsys):
    text = printed(capsys, "table", "--pivot", "--out", out, "--layer", "1")

    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("skip")}
    assert "†60" in rows["skip"]
    assert not set("*_") & set("".join(rows.values()))


def test_a_mean_over_seeds_is_judged_as_a_whole(tmp_path):
    store = ResultStore(tmp_path)
    seeds = [
        replace(record, seed=seed, details={"degenerate_percent": percent})
        for seed, percents in ((0, (10.0, 90.0)), (1, (10.0, 20.0)))
        for (record, _), percent in zip(make("a", "skip", SKIP), percents, strict=False)
    ]

    chosen = choose_block(seeds, store, "oracle")

    assert chosen is not None
    assert chosen.layers == (0,)


def test_compare_marks_both_sides_and_stars_no_difference_from_one(out, capsys):
    both = printed(capsys, "compare", "skip", "skipless", "--out", out)
    alone = printed(capsys, "compare", "skip", "--out", out)

    rows = [line.split() for line in both.splitlines() if re.match(r" +\d ", line)]
    assert [row[1:5] for row in rows] == [
        ["50.0", "†10", "25.0", "†100"],
        ["90.0", "†60", "20.0", "†90"],
        ["5.0", "†50", "75.0", "†55"],
    ]
    # The interval of each leaves out 0.
    assert "*" not in both
    assert "best (" not in both
    assert "no block of skipless is best" in both
    blocks = {line.split()[0]: line for line in alone.splitlines() if re.match(r"\d ", line)}
    assert blocks["2"].count("*") == 2
    assert "*" not in blocks["1"]
    assert "+40.0" in blocks["1"]
    assert "held-out choice (0)" in alone
    rows = json.loads(printed(capsys, "compare", "skip", "--out", out, "--format", "json"))[0]
    (row,) = (row for row in rows["rows"] if row["block"] == "1")
    assert (row["interval_leaves_out_0"], row["significant_after_holm"]) == (True, False)
    assert (row["first_degenerate_percent"], row["second_degenerate_percent"]) == (60.0, 10.0)


def test_figures_draw_them_hollow_and_the_legend_says_so():
    records = [record for record, _ in (*make("a", "skip", SKIP), *make("d", "skipless", SKIPLESS))]

    figure = curves_figure(depth_tables(records))
    sound = curves_figure(depth_tables([r for r in records if r.details["degenerate_percent"] < 60]
                                       [:2]))  # fmt: skip

    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    points = {tuple(xy) for line in hollow for xy in np.asarray(line.get_xydata()).tolist()}
    assert points == {(1, 90.0), (0, 25.0), (1, 20.0), (2, 75.0)}
    texts, none = (
        [text.get_text() for text in one.legends[0].get_texts()] for one in (figure, sound)
    )
    assert texts == ["skip", "skipless", "more than 50 % degenerate"]
    assert none == ["skip"]


def test_pages_of_the_report_rank_none_and_cross_it_out(out, tmp_path, capsys):
    assert main(["report", "--out", out]) == 0
    capsys.readouterr()
    index, pair = (
        unescape(next((tmp_path / "report").glob(name)).read_text())
        for name in ("index.html", "compare-*.html")
    )

    summaries = re.findall(r"<li>(tokencut, toy: .*?)</li>", index)
    assert "highest at block 0 (50.0)" in summaries[0]
    assert "Block 1 is degenerate" in summaries[0]
    assert "No block is best" in summaries[1]
    marked = re.findall(r'<td[^>]*class="best"[^>]*>.*?</td>', index)
    assert marked
    assert all("50.0" in cell for cell in marked)
    assert index.count('class="cross"') == 4
    assert pair.count('class="cross"') == 3
    assert "difference best" not in pair
    assert {"†60", "†90", "†55"} <= set(re.findall(r"†\d+", pair))
    assert "A cross marks a difference with a degenerate side." in pair
    assert 'id="summary"' not in pair
    assert "Correct images at the best blocks" not in pair


def test_lines_of_a_panel_with_one_sound_block_have_it_as_best():
    records = [record for record, _ in make("a", "skip", {0: (9, 51.0), 1: (3, 0.0)})]

    (panel,) = group_into_panels(records, list_checkpoints(records))

    assert [point.layer for point in panel.lines[0].marked_entries] == [1]
    (table,) = depth_tables(records)
    assert table.best_row("skip") == 1
    assert [row[1].is_best for row in table.sheet().rows] == [False, True]


def test_the_smallest_drop_is_not_that_of_a_degenerate_block():
    records = of_blocks((80.0, 79.0), (60.0, 50.0), (60.0, 40.0))
    (table,) = severity_tables(
        [
            replace(one, details={"degenerate_percent": 80.0 if one.value == 79.0 else 0.0})
            for one in records
        ]
    )

    assert table.drop(0) == pytest.approx(1.25)
    assert table.most_robust_layers == {1}
