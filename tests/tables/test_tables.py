"""Test tables with one row per block and one column per encoder."""

import csv
import io
import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from ssl_bench.errors import ConfigurationError
from ssl_bench.report.panels import list_checkpoints
from ssl_bench.results import Baseline
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import curves_figure, draw_curves
from ssl_bench.tables.entries import (
    average_over_seeds,
    baseline_note,
    describe_provenance,
    format_dagger,
    model_names,
    settings_digest,
)
from ssl_bench.tables.sheets import (
    NO_VALUE,
    Cell,
    PrintedTable,
    default_format,
    format_table,
    render_tables,
)
from tests.core.test_results import RECORD
from tests.support.faults import expect_error, limit_file_size
from tests.support.report_cells import build_record, make_encoder_id

SKIPLESS = replace(RECORD, model="skip_less", checkpoint_sha256="d" * 64)
NAMES = tuple(sorted(f"skip {record.encoder_id[:6]}" for record in (RECORD, SKIPLESS)))
RECORDS = [
    replace(RECORD, layer=0, value=10.0, ci95=(8.0, 12.0)),
    replace(RECORD, layer=1, value=30.0, ci95=(29.0, 31.0)),
    replace(SKIPLESS, layer=0, value=25.04, ci95=None),
    replace(SKIPLESS, layer=1, value=20.0, ci95=None),
]


def records_of_blocks(*values):
    return [replace(RECORD, layer=n, value=v, ci95=None) for n, v in enumerate(values)]


def markdown_rows(records) -> list[str]:
    (table,) = depth_tables(records)
    lines = render_tables([table], "markdown").splitlines()
    return [line for line in lines if line.startswith("|")]


def test_rows_are_blocks_columns_are_encoders_best_is_bold():
    assert markdown_rows([*RECORDS, replace(SKIPLESS, layer=2, value=math.nan, ci95=None)]) == [
        "| block | skip | skip_less |",
        "|---|---:|---:|",
        "| 0 | 10.0 ± 2.0 | **25.0** |",
        "| 1 | **30.0 ± 1.0** | 20.0 |",
        # One encoder was not probed at this block, and the other has no defined value.
        f"| 2 |  | {NO_VALUE} |",
    ]
    with pytest.raises(ConfigurationError) as refused:
        render_tables(depth_tables(RECORDS), "xml")
    assert refused.value.hint == ("--format", "text")
    unranked = [replace(record, metric="explained_variance") for record in RECORDS]
    assert depth_tables(unranked)[0].best_row("skip") is None
    assert "**" not in "".join(markdown_rows(unranked))


def test_equal_blocks_are_marked_together_unless_all_are_equal():
    # Scores are equal if they are printed as the same number.
    cases = ((10.0, 30.0, 30.0), [1, 2]), ((7.0, 7.0, 7.0), []), ((7.01, 7.04), []), ((7.0,), [])
    for values, marked in cases:
        rows = markdown_rows(records_of_blocks(*values))[2:]
        assert [n for n, row in enumerate(rows) if "**" in row] == marked


def test_latex_underlines_the_second_best_block():
    latex = render_tables(depth_tables(records_of_blocks(3.0, 1.0, 2.0)), "latex")

    cells = [line.split(" & ")[1] for line in latex.splitlines() if " & " in line]
    assert cells[1:] == [r"\textbf{3.0} \\", r"1.0 \\", r"\underline{2.0} \\"]


def test_checkpoints_with_the_same_name_have_separate_table_columns():
    first, second = RECORDS[0], replace(SKIPLESS, model="skip")

    tables = depth_tables([first, second, replace(first, metric="detection_rate")])

    assert [table.columns for table in tables] == [NAMES, NAMES[:1]]
    # The name of the third encoder is that of the first one with the digits of its id.
    a, b, c, _ = ids = [make_encoder_id(letter) for letter in "abcd"]
    models = ("run", "run", f"run {a[:6]}", "other")
    cells = [
        build_record(model=model, checkpoint_sha256=letter * 64)
        for model, letter in zip(models, "abcd", strict=True)
    ]
    names = (f"run {a[:6]} {a}", f"run {b[:6]}", f"run {a[:6]} {c}", "other")
    assert model_names(cells) == dict(zip(ids, names, strict=True))
    assert {*depth_tables(cells)[0].columns} == {*names}


def test_the_percentage_of_degenerate_images_follows_the_value():
    records = [
        replace(one, details={"degenerate_percent": percent})
        for one, percent in zip(
            records_of_blocks(*[40.0] * 4), (0.0, 0.4, 98.6, 100.0), strict=True
        )
    ]
    records[3] = replace(records[3], ci95=(38.0, 42.0))
    seeds = [replace(records[0], seed=s, details={"degenerate_percent": 2.0 * s}) for s in (0, 1)]

    cells = [row.split(" | ")[1].strip("* |") for row in markdown_rows(records)[2:]]
    assert cells == ["40.0", "40.0 †0.4", "40.0 †99", "40.0 ± 2.0 †100"]
    assert "<br>†N: N % of the images" in render_tables(depth_tables(records), "markdown")
    assert depth_tables(seeds)[0].entries[0, "skip"].degenerate_percent == 1.0
    assert "†" not in render_tables(depth_tables(RECORDS), "text")
    # A value is never the best if more than 50 % is degenerate, so the printed number exceeds 50.
    for percent, suffix in (
        (None, ""), (0.0, ""), (0.4, " †0.4"), (1.0, " †1"), (50.0, " †50"),
        (50.4, " †50.4"), (50.04, " †50.04"), (50.6, " †51"),
    ):  # fmt: skip
        assert format_dagger(percent) == suffix


def test_json_and_csv_contain_the_provenance_of_every_number():
    first = replace(RECORD, value=10.0, git_commit="c" * 40)
    seeds = [first, replace(first, seed=1, value=20.0)]
    undefined = replace(RECORD, layer=4, value=math.nan, ci95=(math.nan, math.nan))

    zero = replace(RECORD, task="pca", ci95=(0.0, 45.5), details={"degenerate_percent": 0.0})

    tables = depth_tables([*seeds, undefined, zero])
    other, table = json.loads(render_tables(tables, "json"))
    rows = list(csv.DictReader(io.StringIO(render_tables(tables, "csv"))))

    assert "seeds 0, 1;" in tables[1].footnote
    assert [(row["task"], row["block"], row["value"]) for row in rows] == [
        ("pca", "3", "40.0"),
        ("tokencut", "3", "15.0"),
        ("tokencut", "4", "nan"),
    ]
    names = ("low_95", "high_95", "degenerate_percent", "num_images", "seeds")
    assert [[row[name] for name in names] for row in rows[:2]] == [
        ["0.0", "45.5", "0.0", "60", "0"],
        ["35.0", "45.5", "", "60", "0 1"],
    ]
    assert (other["task"], table["task"]) == ("pca", "tokencut")
    assert (table["metric"], table["settings"]) == ("corloc", {"tau": 0.2})
    assert table["dataset_fingerprint"] == "b" * 64
    mean, nan = table["cells"]
    assert (mean["layer"], mean["model"], mean["checkpoint_sha256"]) == (3, "skip", "a" * 64)
    assert (mean["value"], mean["ci95"]) == (15.0, [35.0, 45.5])
    first, second = mean["records"]
    assert (first["value"], second["value"], second["seed"]) == (10.0, 20.0, 1)
    assert (first["ci95"], first["num_images"]) == ([35.0, 45.5], 60)
    assert (first["git_commit"], first["device"]) == ("c" * 40, RECORD.device)
    assert first["file"] == seeds[0].key().filename()
    assert (nan["value"], nan["records"][0]["ci95"]) == (None, [None, None])


def test_ends_of_intervals_are_averaged_over_seeds():
    seeds = [replace(RECORD, ci95=(30.0, 45.0)), replace(RECORD, seed=1, ci95=(34.0, 55.0))]
    entry = average_over_seeds(seeds)
    assert (entry.low, entry.high, entry.seeds) == (32.0, 50.0, (0, 1))
    values = ((30.0, 10.0), (60.0, 70.0), (60.0, None))
    entry = average_over_seeds(
        [
            replace(RECORD, value=value, details={"degenerate_percent": share}, seed=seed)
            for seed, (value, share) in enumerate(values)
        ]
    )
    assert (entry.value, entry.degenerate_percent) == (50.0, 40.0)

    # An interval with only one known end is left out.
    for ends in ((math.nan, 50.0), (20.0, math.nan)):
        half = replace(seeds[0], ci95=ends)
        both, single = average_over_seeds([half, seeds[1]]), average_over_seeds([half])
        assert (both.low, both.high) == (34.0, 55.0)
        assert (single.low, single.high) == (None, None)


def test_results_with_other_settings_have_another_table():
    other = replace(RECORDS[0], settings={"tau": 0.3}, changed={"tau": 0.3})

    titles = [table.title.rpartition("protocol ")[2] for table in depth_tables([*RECORDS, other])]

    assert titles == ["reference", "reference, tau=0.3"]


def test_epochs_of_a_run_are_sorted_by_their_numbers():
    runs = [replace(RECORD, model=f"skip@{n}", checkpoint_sha256=f"{n:064}") for n in (100, 50, 10)]

    (table,) = depth_tables(runs)

    assert table.columns == ("skip@10", "skip@50", "skip@100")
    assert [c.name for c in list_checkpoints(runs)] == ["skip@10", "skip@50", "skip@100"]


def draw_axis(records):
    figure = curves_figure(depth_tables(records))
    figure.draw_without_rendering()
    return figure.axes[0]


def band_heights(axis):
    return np.asarray(axis.collections[0].get_paths()[0].vertices)[:, 1]


@pytest.mark.parametrize(("panels", "models"), [(1, 6), (4, 1)])
def test_titles_and_legend_of_a_figure_do_not_overlap(panels, models):
    records = [
        replace(
            RECORD, dataset=f"a_dataset_of_a_rather_long_name_{panel}", layer=layer,
            model=f"an encoder's run of many words {model}", checkpoint_sha256=f"{model}" * 64,
            changed={"image_size": 256, "a_setting_with_a_name": "and a value", "other": 0.25},
        )
        for panel in range(panels) for model in range(models) for layer in (0, 1)
    ]  # fmt: skip

    figure = curves_figure(depth_tables(records))
    figure.draw_without_rendering()

    axes = [axis for axis in figure.axes if axis.axison]
    texts = [axis.title for axis in axes] + [figure.legends[0]]
    boxes = [text.get_window_extent() for text in texts]
    assert len(axes) == panels
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:number])
    # The drawing area keeps most of its height.
    assert all(axis.get_window_extent().height > 0.55 * 3.4 * figure.dpi for axis in axes)


@pytest.mark.parametrize(
    ("unit", "chance", "scale"),
    [("", None, "log"), ("%", None, "linear"), ("", 0.0, "linear"), ("%", 95.0, "linear")],
)
def test_units_determine_scales_and_intervals_are_drawn_as_bands(unit, chance, scale):
    details = {} if chance is None else Baseline("random clusters", chance).as_details()
    fields = {"metric": "spread", "unit": unit, "value": 2.0, "ci95": (1.0, 9.0)}
    record = replace(RECORD, details=details, **fields)

    axis = draw_axis([record, replace(record, layer=4)])

    assert axis.get_yscale() == scale
    assert chance is None or axis.get_ylim()[0] < chance
    # The label of a baseline above all scores is below its line, so it does not touch the title.
    sides = [text.get_verticalalignment() for text in axis.texts]
    assert sides == ([] if chance is None else ["top" if chance else "bottom"])
    assert (band_heights(axis).min(), band_heights(axis).max()) == (1.0, 9.0)


def test_negative_and_infinite_values_are_drawn_unlike_undefined_ones():
    negative = replace(RECORD, metric="uniformity", unit="", value=-2.03, ci95=(-2.1, -1.9))
    undefined = replace(RECORD, metric="cls_patch_cosine", value=math.nan, ci95=None)
    records = [replace(one, layer=layer) for one in (negative, undefined) for layer in (0, 4)]
    axis = draw_axis(records)
    assert np.asarray(axis.lines[0].get_ydata()).tolist() == [-2.03, -2.03]
    assert axis.get_yscale() == "linear"
    assert (band_heights(axis).min(), band_heights(axis).max()) == (-2.1, -1.9)
    assert np.isnan(draw_axis(records[2:]).lines[0].get_ydata()).all()

    infinite = replace(RECORD, metric="spread", unit="", value=2e6, ci95=(1e6, math.inf))
    axis = draw_axis([infinite, replace(infinite, layer=4, value=math.inf)])
    top = axis.get_ylim()[1]
    assert band_heights(axis).max() == np.asarray(axis.lines[0].get_ydata())[1] == top
    assert 1e5 < axis.get_ylim()[0] < 1e6
    assert [text.get_text() for text in axis.texts] == ["∞"]


def test_encoders_of_different_panels_have_different_colours(tmp_path):
    draw_curves(
        depth_tables([RECORD, replace(SKIPLESS, dataset="voc2012")]), tmp_path / "curves.svg"
    )

    drawing = (tmp_path / "curves.svg").read_text()
    bands = re.findall(r'id="FillBetweenPolyCollection.*?fill: (#\w+)', drawing, re.DOTALL)
    assert len(bands) == len(set(bands)) == 2


def test_the_strides_of_blocks_are_shown_if_they_differ():
    swin = {"kind": "timm", "strides": [4, 8]}
    staged = [replace(record, architecture=swin) for record in RECORDS[:2]]
    (table,) = depth_tables([*staged, *RECORDS[2:]])

    rows = markdown_rows([*staged, *RECORDS[2:]])

    assert rows[0] == "| block | stride | skip | skip_less |"
    assert [row.split(" | ")[1] for row in rows[2:]] == ["4", "8"]
    cells = json.loads(render_tables([table], "json"))[0]["cells"]
    assert [one.get("stride") for one in cells] == [4, None, 8, None]
    assert "stride" in render_tables([table], "csv").splitlines()[0]
    wide = [replace(one, architecture={"strides": [8, 16]}) for one in RECORDS[2:]]
    assert [row.split(" | ")[1] for row in markdown_rows([*staged, *wide])[2:]] == ["4/8", "8/16"]
    plain = [replace(record, architecture={"strides": [4, 4]}) for record in staged]
    assert "stride" not in markdown_rows(plain)[0]


def test_metric_names_are_explained(store, cli):
    store.save(replace(RECORD, metric="degenerate"))
    store.save(replace(RECORD, task="segmentation", metric="miou_oracle"))

    for words in ([], ["--pivot", "--metric", "degenerate,miou_oracle"]):
        out = cli("table", *words).out
        assert out.count("\noracle: ") == 1
        assert out.count("\ndegenerate: ") == 1


def test_tables_without_any_value_are_counted_but_not_printed(store, cli):
    store.save(replace(RECORD, task="knn", metric="top1_k20"))
    store.save(replace(RECORD, task="knn", metric="top5_k20", value=math.nan, ci95=None))

    shown = cli("table")

    assert "top1_k20" in shown.out
    assert "top5_k20" not in shown.out
    assert "1 more table of knn" in shown.err


def test_a_name_with_a_comma_selects_its_records(store, cli):
    store.save(replace(RECORD, dataset="cats,dogs"))
    assert "on cats,dogs val" in cli("table", "--dataset", "cats,dogs").out


WARNINGS = [
    ([["few images"], ["few images"]], ["few images", "1 image"]),
    ([[], ["an edge\n", "few images"]], ["block 1: an edge\\n", "block 1: few images", "1 image"]),
    ([[], "not a list"], ["1 image"]),
]


@pytest.mark.parametrize(("by_block", "notes"), WARNINGS)
def test_warnings_of_records_are_printed_below_a_table(store, cli, by_block, notes):
    for layer, warnings in enumerate(by_block):
        store.save(replace(RECORD, layer=layer, num_images=1, details={"warnings": warnings}))

    below = cli("table").out.rpartition("---\n")[2].splitlines()

    shown = [line.partition("; seeds")[0] for line in below if not line.startswith("marked")]
    assert list(filter(None, shown)) == notes


def test_a_block_without_a_value_has_a_single_note():
    reason = {"undefined": "no class has two images"}
    undefined = replace(RECORD, layer=4, value=math.nan, ci95=None, details=reason)

    (table,) = depth_tables([RECORD, undefined])

    assert [note for note in table.notes if "block" in note] == [
        "no value for block 4: no class has two images"
    ]
    # The mean over seeds is undefined if a seed has no value.
    mean = average_over_seeds([RECORD, replace(undefined, layer=3, seed=1)])
    assert (mean.text(), mean.reason) == (NO_VALUE, "no class has two images")


def test_unreadable_images_of_all_splits_are_named():
    first = {"train": ["a.jpg"], "val": ["b.jpg"]}
    left_out = {split: {"count": 1, "first": names} for split, names in first.items()}
    settings, details = {"left_out": "1 of train, 1 of val (3f9a01)"}, {"left_out": left_out}

    line = describe_provenance([replace(RECORD, settings=settings, details=details)])

    assert "without 1 of train, 1 of val that cannot be read: a.jpg, b.jpg;" in line


def test_every_baseline_of_a_table_is_noted():
    baselines = [Baseline("centre box", 31.0), Baseline("whole image", 42.0)]
    records = [
        replace(RECORD, layer=layer, details=baseline.as_details())
        for layer, baseline in enumerate(baselines)
    ]
    assert baseline_note(records) == (
        "image-independent baseline (centre box): 31.0, "
        "image-independent baseline (whole image): 42.0"
    )


def test_the_digest_of_settings_does_not_depend_on_their_order():
    first, same, other = (
        settings_digest(replace(RECORD, settings=settings))
        for settings in ({"tau": 0.2, "eps": 1}, {"eps": 1, "tau": 0.2}, {"tau": 0.2, "eps": 2})
    )

    assert first == same != other
    records = [replace(RECORD, created=f"2026-0{n}-01T00:00:00+00:00") for n in (1, 3, 2)]
    assert describe_provenance(records).endswith("; 2026-03-01")


def test_the_image_size_is_stated_below_a_table():
    def footnotes(*records):
        return [table.footnote.partition("; seeds")[0] for table in depth_tables(records)]

    def resize(record, size, default=64, **settings):
        architecture = {**record.architecture, "image_size": default}
        settings = {**record.settings, "image_size": size, **settings}
        return replace(record, settings=settings, architecture=architecture)

    images = f"{RECORD.num_images} images"
    assert footnotes(RECORD) == [images]
    assert footnotes(resize(RECORD, 512)) == [f"{images}, image_size=512"]
    squashed = resize(RECORD, 224, squash=224)
    assert footnotes(squashed) == [f"{images}, squash=224"]
    # A setting that the title states is not repeated.
    assert footnotes(replace(squashed, changed={"squash": 224})) == [images]
    # Each encoder is evaluated at its own image size.
    assert footnotes(resize(RECORD, None), resize(SKIPLESS, None, 96)) == [
        f"{images}, image_size=64 (tokencut of skip), image_size=96 (tokencut of skip_less)"
    ]
    # Records that state no size are left out.
    mixed = describe_provenance([resize(RECORD, 512), RECORD])
    assert mixed.startswith(f"{images}, image_size=512 (tokencut of skip); ")


def test_figures_on_a_full_disk_give_a_one_line_error(store, cli):
    store.save(RECORD)
    for kind in ("pdf", "png"):
        with limit_file_size(2000):
            err = cli("table", "--figure", str(store.root / f"curves.{kind}"), code=5).err
        assert len(err.splitlines()) == 1
        assert not [*store.root.glob("curves*")]
    cli("table", "--figure", "curves.nothing", code=2)


# Sheets: the text of a table in every format.

TABLE = PrintedTable(
    title="a title",
    header=("encoder", "voc_1", "b|c"),
    rows=(
        (Cell("skip & 100%"), Cell("32.3 ± 1.2 †4", is_best=True), Cell("5.0")),
        (Cell("[x]"), Cell("7.0", is_second=True), Cell("", is_best=True)),
    ),
    notes=("one", "two"),
)


def test_latex_is_escaped_and_uses_booktabs():
    assert format_table(TABLE, "latex").splitlines() == [
        "% a title",
        "% one",
        "% two",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"encoder & voc\_1 & b$\mid$c \\",
        r"\midrule",
        r"skip \& 100\% & \textbf{32.3 $\pm$ 1.2} $\dagger$4 & 5.0 \\",
        r"{[}x] & \underline{7.0} &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    name = r"\~^<{"
    table = PrintedTable("", ("block", name), ((Cell("0"), Cell(name)),), ())
    escaped = r"\textbackslash{}\textasciitilde{}\textasciicircum{}\textless{}\{"
    assert format_table(table, "latex").count(escaped) == 2


def test_markdown_escapes_bars_and_tags():
    lines = format_table(TABLE, "markdown").splitlines()

    assert lines[2] == r"| encoder | voc_1 | b\|c |"
    assert lines[5] == "| [x] | 7.0 |  |"
    assert lines[-1] == "<sub>one<br>two</sub>"
    tagged = PrintedTable("", ("a", "b"), ((Cell("<script>"), Cell("1")),), ())
    assert "<script>" not in format_table(tagged, "markdown")


def test_columns_are_aligned_and_terminal_codes_have_no_width():
    assert format_table(TABLE, "text").splitlines()[2:6] == [
        "encoder                voc_1  b|c",
        "---------------------------------",
        "skip & 100%  *32.3 ± 1.2* †4  5.0",
        "[x]                      7.0",
    ]
    bold = format_table(TABLE, "terminal")
    assert "\033[1m32.3 ± 1.2\033[0m" in bold
    assert re.sub("\033\\[[01]m", "", bold).splitlines()[2:6] == [
        "encoder              voc_1  b|c",
        "-------------------------------",
        "skip & 100%  32.3 ± 1.2 †4  5.0",
        "[x]                    7.0",
    ]
    # Block indices are aligned right.
    table = PrintedTable("", ("block", "a"), ((Cell("9"), Cell("1")), (Cell("10"), Cell("2"))), ())
    assert format_table(table, "text").splitlines()[4:6] == ["    9  1", "   10  2"]


KINDS = ("--pivot", "--paper table2", "--over-epochs", "--over-severity", "--over-steps runs")


@pytest.mark.parametrize(
    "words",
    [
        *(" ".join(pair) for pair in itertools.combinations(KINDS, 2)),
        *(f"--pack {other}" for other in (*KINDS, "--figure a.png", "--format csv")),
    ],
)
def test_only_one_kind_of_table_is_printed_or_packed(capsys, words):
    line = expect_error(capsys, ["table", *words.split()], 2)

    used = [word for word in words.split() if word.startswith("--")]
    assert set(line.partition(", got ")[2].split(" and ")) == set(used)


def test_only_a_terminal_gets_bold_text(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert default_format() == "text"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert default_format() == "terminal"
    monkeypatch.setenv("TERM", "dumb")
    assert default_format() == "text"
    monkeypatch.delenv("TERM")
    assert default_format() == "text"
    monkeypatch.setattr("sys.stdout", None)
    assert default_format() == "text"
