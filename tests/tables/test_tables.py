"""Tables of blocks by encoders: their cells, footnotes and curves."""

import csv
import io
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
from ssl_bench.tables.entries import dagger, mean_entry, provenance, settings_digest
from ssl_bench.tables.sheets import NO_VALUE, render_tables
from tests.core.test_results import RECORD
from tests.support.faults import small_files

SKIPLESS = replace(RECORD, model="skip_less", checkpoint_sha256="d" * 64)
NAMES = tuple(sorted(f"skip {record.encoder_id[:6]}" for record in (RECORD, SKIPLESS)))
RECORDS = [
    replace(RECORD, layer=0, value=10.0, ci95=(8.0, 12.0)),
    replace(RECORD, layer=1, value=30.0, ci95=(29.0, 31.0)),
    replace(SKIPLESS, layer=0, value=25.04, ci95=None),
    replace(SKIPLESS, layer=1, value=20.0, ci95=None),
]


def of_blocks(*values, **changes):
    return [replace(RECORD, layer=n, value=v, ci95=None, **changes) for n, v in enumerate(values)]


def markdown_rows(records) -> list[str]:
    (table,) = depth_tables(records)
    lines = render_tables([table], "markdown").splitlines()
    return [line for line in lines if line.startswith("|")]


def test_rows_are_blocks_columns_are_models_and_the_best_block_is_bold():
    assert markdown_rows([*RECORDS, replace(SKIPLESS, layer=2, value=math.nan, ci95=None)]) == [
        "| block | skip | skip_less |",
        "|---|---:|---:|",
        "| 0 | 10.0 ± 2.0 | **25.0** |",
        "| 1 | **30.0 ± 1.0** | 20.0 |",
        # A block that was not probed, and what is no number.
        f"| 2 |  | {NO_VALUE} |",
    ]
    with pytest.raises(ConfigurationError) as refused:
        render_tables(depth_tables(RECORDS), "xml")
    assert refused.value.hint == ("--format", "text")
    unranked = [replace(record, metric="explained_variance") for record in RECORDS]
    assert depth_tables(unranked)[0].best_row("skip") is None
    assert "**" not in "".join(markdown_rows(unranked))


@pytest.mark.parametrize(
    ("values", "marked"), [((10.0, 30.0, 30.0), [1, 2]), ((7.0, 7.0, 7.0), []), ((7.0,), [])]
)
def test_equal_blocks_are_marked_together_and_none_where_all_are(values, marked):
    rows = markdown_rows(of_blocks(*values))[2:]

    assert [n for n, row in enumerate(rows) if "**" in row] == marked


def test_latex_underlines_the_second_best_block():
    records = [replace(RECORD, layer=i, value=v, ci95=None) for i, v in enumerate([3.0, 1.0, 2.0])]

    latex = render_tables(depth_tables(records), "latex")

    cells = [line.split(" & ")[1] for line in latex.splitlines() if " & " in line]
    assert cells[1:] == [r"\textbf{3.0} \\", r"1.0 \\", r"\underline{2.0} \\"]


def test_checkpoints_of_one_name_are_told_apart_in_every_table():
    one, other = RECORDS[0], replace(SKIPLESS, model="skip")
    alone = replace(one, metric="detection_rate")

    tables = depth_tables([one, other, alone])

    assert [table.columns for table in tables] == [NAMES, NAMES[:1]]


def test_the_share_of_degenerate_images_stands_beside_the_number():
    shares = [0.0, 0.4, 98.6, 100.0]
    records = [
        replace(RECORD, layer=i, ci95=None, details={"degenerate_percent": share})
        for i, share in enumerate(shares)
    ]
    records[3] = replace(records[3], ci95=(RECORD.value - 2, RECORD.value + 2))
    same = [replace(records[0], seed=s, details={"degenerate_percent": 2.0 * s}) for s in (0, 1)]

    value = f"{RECORD.value:.1f}"
    assert [row.split(" | ")[1].strip("* |") for row in markdown_rows(records)[2:]] == [
        value,
        f"{value} †0.4",
        f"{value} †99",
        f"{value} ± 2.0 †100",
    ]
    assert "<br>†N: N % of the images" in render_tables(depth_tables(records), "markdown")
    (averaged,) = depth_tables(same)
    assert averaged.entries[0, "skip"].degenerate_percent == 1.0
    assert "†" not in render_tables(depth_tables(RECORDS), "text")


@pytest.mark.parametrize(
    ("percent", "suffix"),
    [
        (None, ""), (0.0, ""), (0.4, " †0.4"), (1.0, " †1"), (50.0, " †50"),
        # Above 50 a value is never the best, and its dagger shows it.
        (50.4, " †50.4"), (50.04, " †50.04"), (50.6, " †51"),
    ],
)  # fmt: skip
def test_the_dagger_of_a_degenerate_value_is_above_50(percent, suffix):
    assert dagger(percent) == suffix


def test_json_and_csv_hold_the_provenance_of_every_number():
    seeds = [
        replace(RECORD, seed=s, value=v, git_commit="c" * 40) for s, v in ((0, 10.0), (1, 20.0))
    ]
    lost = replace(RECORD, layer=4, value=math.nan, ci95=(math.nan, math.nan))

    tables = depth_tables([*seeds, lost, replace(RECORD, task="pca")])
    other, table = json.loads(render_tables(tables, "json"))
    rows = list(csv.DictReader(io.StringIO(render_tables(tables, "csv"))))

    assert "seeds 0, 1;" in tables[1].footnote
    assert [(row["task"], row["block"], row["value"]) for row in rows] == [
        ("pca", "3", "40.0"),
        ("tokencut", "3", "15.0"),
        ("tokencut", "4", "nan"),
    ]
    assert (other["task"], table["task"]) == ("pca", "tokencut")
    assert (table["metric"], table["settings"]) == ("corloc", {"tau": 0.2})
    assert table["dataset_fingerprint"] == "b" * 64
    mean, unknown = table["cells"]
    assert (mean["layer"], mean["model"], mean["checkpoint_sha256"]) == (3, "skip", "a" * 64)
    assert (mean["value"], mean["ci95"]) == (15.0, [35.0, 45.5])
    first, second = mean["records"]
    assert (first["value"], second["value"], second["seed"]) == (10.0, 20.0, 1)
    assert (first["ci95"], first["num_images"]) == ([35.0, 45.5], 60)
    assert (first["git_commit"], first["device"]) == ("c" * 40, RECORD.device)
    assert first["file"] == seeds[0].key().filename()
    assert (unknown["value"], unknown["records"][0]["ci95"]) == (None, [None, None])


@pytest.mark.parametrize("half", [(math.nan, 50.0), (20.0, math.nan)])
def test_ends_of_intervals_are_averaged_over_seeds(half):
    whole = [replace(RECORD, ci95=(30.0, 45.0)), replace(RECORD, seed=1, ci95=(34.0, 55.0))]
    seeds = [replace(whole[0], ci95=half), whole[1]]

    entry, left_out, alone = (mean_entry(some) for some in (whole, seeds, seeds[:1]))

    assert (entry.low, entry.high, entry.seeds) == (32.0, 50.0, (0, 1))
    # An interval with only one known end is left out.
    assert (left_out.low, left_out.high) == (34.0, 55.0)
    assert (alone.low, alone.high) == (None, None)


def test_numbers_that_cannot_be_compared_stand_in_tables_of_their_own():
    other = replace(RECORDS[0], settings={"tau": 0.3}, changed={"tau": 0.3})

    titles = [table.title for table in depth_tables([*RECORDS, other])]

    assert len(titles) == 2
    assert titles[0].endswith("protocol reference")
    assert titles[1].endswith("protocol reference, tau=0.3")


def test_epochs_of_a_run_are_sorted_by_their_numbers():
    runs = [replace(RECORD, model=f"skip@{n}", checkpoint_sha256=f"{n:064}") for n in (100, 50, 10)]

    (table,) = depth_tables(runs)

    assert table.columns == ("skip@10", "skip@50", "skip@100")
    assert [c.name for c in list_checkpoints(runs)] == ["skip@10", "skip@50", "skip@100"]


def drawn_figure(tmp_path, records):
    figure = curves_figure(depth_tables(records))
    figure.savefig(tmp_path / "curves.svg")
    return figure


def band_heights(axis):
    return np.asarray(axis.collections[0].get_paths()[0].vertices)[:, 1]


@pytest.mark.parametrize(("panels", "models"), [(1, 6), (4, 1)])
def test_titles_and_legend_of_a_drawing_do_not_overlap(tmp_path, panels, models):
    records = [
        replace(
            RECORD, dataset=f"a_dataset_of_a_rather_long_name_{panel}", layer=layer,
            model=f"an encoder's run of many words {model}", checkpoint_sha256=f"{model}" * 64,
            changed={"image_size": 256, "a_setting_with_a_name": "and a value", "other": 0.25},
        )
        for panel in range(panels) for model in range(models) for layer in (0, 1)
    ]  # fmt: skip

    figure = drawn_figure(tmp_path, records)

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
    ("unit", "chance", "scale"), [("", None, "log"), ("%", None, "linear"), ("", 0.0, "linear")]
)
def test_the_unit_chooses_the_axis_and_the_band_is_the_interval(tmp_path, unit, chance, scale):
    told = {} if chance is None else Baseline("random clusters", chance).as_details()
    record = replace(RECORD, metric="spread", unit=unit, value=2.0, ci95=(1.0, 9.0), details=told)

    (axis,) = drawn_figure(tmp_path, [record, replace(record, layer=4)]).axes

    assert axis.get_yscale() == scale
    assert chance is None or axis.get_ylim()[0] < chance
    assert (band_heights(axis).min(), band_heights(axis).max()) == (1.0, 9.0)


def test_negative_and_infinite_values_are_drawn_and_undefined_ones_are_not(tmp_path):
    known = replace(RECORD, metric="uniformity", unit="", value=-2.03, ci95=(-2.1, -1.9))
    unknown = replace(RECORD, metric="cls_patch_cosine", value=math.nan, ci95=None)
    records = [replace(one, layer=layer) for one in (known, unknown) for layer in (0, 4)]
    (axis,) = drawn_figure(tmp_path, records).axes
    assert np.asarray(axis.lines[0].get_ydata()).tolist() == [-2.03, -2.03]
    assert axis.get_yscale() == "linear"
    assert (band_heights(axis).min(), band_heights(axis).max()) == (-2.1, -1.9)

    endless = replace(RECORD, metric="spread", unit="", value=2e6, ci95=(1e6, math.inf))
    (axis,) = drawn_figure(tmp_path, [endless, replace(endless, layer=4, value=math.inf)]).axes
    top = axis.get_ylim()[1]
    assert band_heights(axis).max() == np.asarray(axis.lines[0].get_ydata())[1] == top
    assert 1e5 < axis.get_ylim()[0] < 1e6
    assert [text.get_text() for text in axis.texts] == ["∞"]


def test_a_model_has_its_colour_in_every_panel(tmp_path):
    other = replace(SKIPLESS, dataset="voc2012")

    draw_curves(depth_tables([RECORD, other]), tmp_path / "curves.svg")

    drawing = (tmp_path / "curves.svg").read_text()
    bands = re.findall(r'id="FillBetweenPolyCollection.*?fill: (#\w+)', drawing, re.DOTALL)
    assert len(bands) == len(set(bands)) == 2


def test_blocks_of_other_grids_have_their_stride_beside_them():
    swin = {"kind": "timm", "strides": [4, 8]}
    staged = [replace(record, architecture=swin) for record in RECORDS[:2]]
    (table,) = depth_tables([*staged, *RECORDS[2:]])

    rows = markdown_rows([*staged, *RECORDS[2:]])

    assert rows[0] == "| block | stride | skip | skip_less |"
    assert [row.split(" | ")[1] for row in rows[2:]] == ["4", "8"]
    cells = json.loads(render_tables([table], "json"))[0]["cells"]
    assert [one.get("stride") for one in cells] == [4, None, 8, None]
    assert "stride" in render_tables([table], "csv").splitlines()[0]
    plain = [replace(record, architecture={"strides": [4, 4]}) for record in staged]
    assert "stride" not in markdown_rows(plain)[0]


def test_metric_names_are_explained(store, printed):
    store.save(replace(RECORD, metric="degenerate"))
    store.save(replace(RECORD, task="segmentation", metric="miou_oracle"))

    for words in ([], ["--pivot", "--metric", "degenerate,miou_oracle"]):
        out = printed("table", *words).out
        assert out.count("\noracle: ") == 1
        assert out.count("\ndegenerate: ") == 1


@pytest.mark.parametrize(
    ("by_block", "notes"),
    [
        ([["few images"], ["few images"]], ["few images", "1 image"]),
        (
            [[], ["an edge\n", "few images"]],
            ["block 1: an edge\\n", "block 1: few images", "1 image"],
        ),
        ([[], "not a list"], ["1 image"]),
    ],
)
def test_warnings_of_records_are_printed_below_a_table(store, printed, by_block, notes):
    for layer, warnings in enumerate(by_block):
        store.save(replace(RECORD, layer=layer, num_images=1, details={"warnings": warnings}))

    lines = printed("table").out.splitlines()

    below = lines[max(n for n, line in enumerate(lines) if line.startswith("---")) + 1 :]
    shown = [line.partition("; seeds")[0] for line in below if not line.startswith("marked")]
    assert list(filter(None, shown)) == notes


def test_the_digest_of_settings_does_not_depend_on_their_order():
    one, same, other = (
        settings_digest(replace(RECORD, settings=settings))
        for settings in ({"tau": 0.2, "eps": 1}, {"eps": 1, "tau": 0.2}, {"tau": 0.2, "eps": 2})
    )

    assert one == same != other
    records = [replace(RECORD, created=f"2026-0{n}-01T00:00:00+00:00") for n in (1, 3, 2)]
    assert provenance(records).endswith("; 2026-03-01")


def test_the_size_of_the_images_stands_below_a_table():
    def note(*records):
        tables = depth_tables(records)
        return [table.footnote.partition("; seeds")[0] for table in tables]

    def sized(record, size, own=64, **more):
        architecture = {**record.architecture, "image_size": own}
        settings = {**record.settings, "image_size": size, **more}
        return replace(record, settings=settings, architecture=architecture)

    images = f"{RECORD.num_images} images"
    assert note(RECORD) == [images]
    assert note(sized(RECORD, 512)) == [f"{images}, image_size=512"]
    squashed = sized(RECORD, 224, squash=224)
    assert note(squashed) == [f"{images}, squash=224"]
    # A setting that the title states is not repeated.
    assert note(replace(squashed, changed={"squash": 224})) == [images]
    # Each encoder is evaluated at its own image size.
    task, other = RECORD.task, sized(SKIPLESS, None, 96)
    assert note(sized(RECORD, None), other) == [
        f"{images}, image_size=64 ({task} of skip), image_size=96 ({task} of skip_less)"
    ]
    # Records that state no size are left out.
    together = provenance([sized(RECORD, 512), replace(RECORD, task="tokencut")])
    assert together.startswith(f"{images}, image_size=512 ({task} of skip); ")


def test_a_figure_on_a_full_disk_is_one_line(store, printed):
    store.save(RECORD)
    for kind in ("pdf", "png"):
        with small_files(2000):
            said = printed("table", "--figure", str(store.root / f"curves.{kind}"), code=5).err
        assert len(said.splitlines()) == 1
        assert not [*store.root.glob("curves*")]
    printed("table", "--figure", "curves.nothing", code=2)
