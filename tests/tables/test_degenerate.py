"""Test that tables mark degenerate results. A result is degenerate if it is arbitrary."""

import csv
import io
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import curves_figure
from ssl_bench.tables.layer_selection import choose_block
from ssl_bench.tables.severities import severity_tables
from tests.core.test_results import RECORD
from tests.support.report_cells import add_interval
from tests.tables.test_severities import corrupted_blocks

NUM_IMAGES = 40


def make_records(sha: str, name: str, blocks: dict[int, tuple[int, float]]) -> list[Record]:
    record = replace(RECORD, checkpoint_sha256=sha * 64, model=name)
    return [
        replace(record, layer=layer, details={"degenerate_percent": percent}, **add_interval(
            {"num_images": NUM_IMAGES, "value": 100 * hits / NUM_IMAGES}
        ))
        for layer, (hits, percent) in blocks.items()
    ]  # fmt: skip


# Block 1 has the highest value, but is degenerate on most images.
SKIP = make_records("a", "skip", {0: (20, 10.0), 1: (36, 60.0), 2: (2, 50.0)})
# Every block is degenerate on most images.
SKIPLESS = make_records("d", "skipless", {0: (10, 100.0), 1: (8, 90.0), 2: (30, 55.0)})


@pytest.fixture
def store(tmp_path) -> ResultStore:
    store = ResultStore(tmp_path)
    for record in (*SKIP, *SKIPLESS):
        store.save(record, np.arange(NUM_IMAGES) < round(record.value * NUM_IMAGES / 100))
    return store


def test_tables_mark_the_best_of_the_other_blocks(cli):
    lines = cli("table", "--task", "tokencut").out.splitlines()

    (first, second, third) = (line for line in lines if re.match(r" +\d ", line))
    assert re.search(r"\*50\.0 [^*]*\* †10 ", first)
    assert "*" not in second + third
    assert {"†60", "†90", "†50"} <= {word for line in lines for word in line.split()}
    rows = list(csv.DictReader(io.StringIO(cli("table", "--format=csv").out)))
    shares = [float(row["degenerate_percent"]) for row in rows if row["model"] == "skip"]
    assert shares == [10.0, 60.0, 50.0]
    latex = cli("table", "--format", "latex").out.splitlines()
    (bold,) = (line for line in latex if "textbf" in line)
    assert re.fullmatch(r"0 & \\textbf\{50\.0[^}]*\} \$\\dagger\$10 & [^{]*\\\\", bold)
    (underlined,) = (line for line in latex if "underline" in line)
    assert underlined.startswith(r"2 & \underline{5.0")
    assert any(line.startswith(r"\par{\footnotesize $\dagger$N: N \%") for line in latex)


@pytest.mark.parametrize("choice", ["holdout", "oracle"])
def test_a_degenerate_block_is_never_chosen(cli, cli_json, choice):
    words = ["table", "--pivot", "--best-layer", choice]
    (table,) = cli_json(*words)

    cells = {cell["encoder"]: cell for cell in table["cells"]}
    assert (cells["skip"]["blocks"], cells["skip"]["value"]) == ([0], 50.0)
    assert cells["skipless"]["value"] is None
    assert "\n‡: " in cli(*words).out
    lines = cli("table", "--pivot", "--layer", "1").out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("skip")}
    assert "†60" in rows["skip"]
    assert not set("*_") & set("".join(rows.values()))


def test_a_mean_over_seeds_is_judged_as_a_whole(tmp_path):
    seeds = [
        replace(record, seed=seed, details={"degenerate_percent": percent})
        for seed, percents in ((0, (10.0, 90.0)), (1, (10.0, 20.0)))
        for record, percent in zip(SKIP[:2], percents, strict=True)
    ]

    chosen = choose_block(seeds, ResultStore(tmp_path), "oracle")

    assert chosen is not None
    assert chosen.layers == (0,)


def test_compare_marks_the_values_of_both_encoders_but_no_difference(cli, cli_json):
    both = cli("compare", "skip", "skipless").out
    single = cli("compare", "skip").out

    rows = [line.split() for line in both.splitlines() if re.match(r" +\d ", line)]
    assert [row[1:5] for row in rows] == [
        ["50.0", "†10", "25.0", "†100"],
        ["90.0", "†60", "20.0", "†90"],
        ["5.0", "†50", "75.0", "†55"],
    ]
    # Although every interval excludes 0, no difference is marked as significant.
    assert "*" not in both
    assert "best (" not in both
    assert "no block of skipless is best" in both
    blocks = {line.split()[0]: line for line in single.splitlines() if re.match(r"\d ", line)}
    assert blocks["2"].count("*") == 2
    assert "*" not in blocks["1"]
    assert "held-out choice (0)" in single
    rows = {row["block"]: row for row in cli_json("compare", "skip")[0]["rows"]}
    row, tested = rows["1"], rows["2"]
    assert (row["interval_leaves_out_0"], row["significant_after_holm"]) == (True, False)
    assert (row["first_degenerate_percent"], row["second_degenerate_percent"]) == (60.0, 10.0)
    # Block 2 is the only one that is tested, so its p-value needs no correction.
    assert (row["p_holm"], tested["p_holm"]) == (None, tested["p"])


def test_figures_draw_degenerate_values_hollow():
    figure = curves_figure(depth_tables([*SKIP, *SKIPLESS]))
    plain = curves_figure(depth_tables([SKIP[0], SKIP[2]]))

    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    points = {tuple(xy) for line in hollow for xy in np.asarray(line.get_xydata()).tolist()}
    assert points == {(1, 90.0), (0, 25.0), (1, 20.0), (2, 75.0)}
    texts, none = ([t.get_text() for t in one.legends[0].get_texts()] for one in (figure, plain))
    assert texts == ["skip", "skipless", "more than 50 % degenerate"]
    assert none == ["skip"]
    (*_, last) = curves_figure(depth_tables([SKIP[0], replace(SKIP[1], dataset="voc")])).legends
    assert last.get_texts()[-1].get_text() == texts[-1]


def test_the_report_draws_crosses_at_degenerate_values(store, cli):
    cli("report")
    names = ("index.html", "compare-*.html")
    index, pair = (unescape(next((store.root / "report").glob(n)).read_text()) for n in names)

    summaries = re.findall(r"<li>(TokenCut on toy .*?)</li>", index)
    numbers = re.findall(r"block \d+|[\d.]+\s%", summaries[0], re.IGNORECASE)
    assert numbers[:2] == ["block 0", "50.0 %"]
    assert "Block 1 is degenerate" in summaries[0]
    assert "no best block" in summaries[1]
    marked = re.findall(r'<td[^>]*class="best"[^>]*>.*?</td>', index)
    assert marked
    assert all("50.0" in cell for cell in marked)
    # The overview and the panel of the index have a chart with four crosses each.
    assert (index.count('class="cross"'), pair.count('class="cross"')) == (2 * 4, 3)
    assert "difference best" not in pair
    assert {"†60", "†90", "†55"} <= set(re.findall(r"†\d+", pair))
    assert 'id="summary"' not in pair
    assert "Correct images at the best blocks" not in pair


def test_the_only_block_that_is_not_degenerate_is_the_best():
    records = make_records("a", "skip", {0: (9, 51.0), 1: (3, 0.0)})

    (panel,) = group_into_panels(records, list_checkpoints(records))

    assert [point.layer for point in panel.lines[0].marked_entries] == [1]
    (table,) = depth_tables(records)
    assert table.best_row("skip") == 1
    assert [row[1].is_best for row in table.to_printed_table().rows] == [False, True]


@pytest.mark.parametrize("degenerate", [80.0, 79.0], ids=["clean", "corrupted"])
def test_a_degenerate_block_never_has_the_smallest_drop(degenerate):
    records = corrupted_blocks((80.0, 79.0), (60.0, 50.0), (60.0, 40.0))
    percents = [{"degenerate_percent": 80.0 * (record.value == degenerate)} for record in records]
    pairs = zip(records, percents, strict=True)
    (table,) = severity_tables([replace(record, details=details) for record, details in pairs])

    assert table.compute_drop(0) == pytest.approx(1.25)
    assert table.most_robust_layers == {1}
