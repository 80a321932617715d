"""Points, curves, axes and styles of the charts of a report."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from ssl_bench.report.drawing import MAX_END_LABELS, choose_ticks, draw_chart, spread
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.tables.sheets import NO_VALUE
from ssl_bench.tables.styles import choose_styles
from tests.support.report_cells import cell, curve, plain, skipless


def test_a_point_is_the_mean_of_its_seeds_with_the_interval_of_one():
    records = [
        cell(value=50.0, ci95=(46.0, 56.0), seed=1),
        cell(value=40.0, ci95=(35.0, 45.0)),
        cell(value=math.nan, ci95=None, layer=4),
        cell(value=9.0, ci95=None, layer=5),
    ]

    (line,) = group_into_panels(records, list_checkpoints(records))[0].lines

    texts = [point.text() for point in line.entries]
    assert texts == ["45.0 [40.5, 50.5] (2 seeds)", NO_VALUE, "9.0 (1 seed)"]
    assert (line.entries[0].low, line.entries[0].high) == (40.5, 50.5)
    # In the order of the seeds.
    assert line.entries[0].records == (records[1], records[0])
    assert line.best_entry == line.entries[0]


def test_plain_numbers_have_no_best_block_and_show_interval_ends():
    records = [
        plain(value=12345.0, ci95=(9e3, math.inf), layer=0),
        plain(value=math.inf, ci95=None, layer=1),
        cell(task="pca", metric="explained_variance", layer=0),
        cell(layer=0),
    ]

    panels = group_into_panels(records, list_checkpoints(records))

    lines = {panel.metric: panel.lines[0] for panel in panels}
    entries = lines["condition_number"].entries
    assert [entry.text() for entry in entries] == ["1.23e+04 [9e+03, ∞]", "∞"]
    assert [entry.sort_key for entry in entries] == ["12345.0", "Infinity"]
    best = {metric: line.best_entry is not None for metric, line in lines.items()}
    assert best == {"condition_number": False, "explained_variance": False, "corloc": True}


def test_other_settings_or_data_give_another_panel():
    same = {"settings": {"tau": 0.2, "eps": 1}, "changed": {"eps": 1}}
    all_of_it = {"tau": 0.3, "eps": 1}
    other = {"settings": all_of_it, "changed": all_of_it}
    records = [cell(**same), skipless(**same), cell(**other)]
    records.append(cell(**same, dataset_fingerprint="d" * 64))

    panels = group_into_panels(records, list_checkpoints(records))

    assert [panel.settings_text for panel in panels] == [
        ", eps=1 [tau=0.2, data bbbbbb]",
        ", eps=1, tau=0.3 [data bbbbbb]",
        ", eps=1 [tau=0.2, data dddddd]",
    ]
    assert [line.checkpoint.name for line in panels[0].lines] == ["skip", "skipless"]


def test_a_checkpoint_without_skips_is_dashed():
    names = ["skip_soap", "vit", "skipless_soap", "skip_adamw", "z", "net"]
    records = [cell(model=m, checkpoint_sha256=f"{i}" * 64) for i, m in enumerate(names)]
    # The architecture has priority over the name. It is unknown for a user's module.
    records[4] = replace(records[4], architecture={"kind": "vit", "skip_attention": False})
    records[5] = replace(records[5], architecture={"kind": "module", "name": "Net"})

    found = list_checkpoints(records)

    styles = choose_styles({one.name: one.is_skipless for one in found})
    assert [styles[one.name].css for one in found] == [one.style for one in found]
    dashes = [(one.label, one.style[2:], dict(one.facts).get("skips")) for one in found]
    assert dashes == [
        ("net", " d0", None),
        ("skip_adamw", " d0", "yes"),
        ("skip_soap", " d0", "yes"),
        ("skipless_soap", " d0s", "yes"),
        ("vit", " d0", "yes"),
        ("z", " d0s", "mlp"),
    ]
    (long,) = list_checkpoints([cell(model="a_run_of_a_small_vit_skipless")])
    assert long.label == "a_run_of_…t_skipless"


def test_no_two_of_many_checkpoints_look_the_same():
    shas = [hashlib.sha256(bytes([i])).hexdigest() for i in range(22)]
    records = [cell(checkpoint_sha256=s, model=f"vit{i % 11}") for i, s in enumerate(shas)]

    checkpoints = list_checkpoints(records)

    for field in ("name", "style", "page"):
        assert len({getattr(checkpoint, field) for checkpoint in checkpoints}) == 22


def test_labels_take_room_from_the_drawing_and_many_curves_have_none():
    def labelled(count):
        return draw_chart([replace(curve(1.0, 2.0), label="skipless") for _ in range(count)])

    few, many = labelled(MAX_END_LABELS), labelled(MAX_END_LABELS + 1)

    assert [one.label.label for one in few.curves if one.label] == ["skipless"] * MAX_END_LABELS
    assert few.right < few.curves[0].marks[-1].x + 20 < many.right
    assert [one.label for one in many.curves] == [None] * (MAX_END_LABELS + 1)
    assert spread([50.0, 51.0, 90.0], 10.0, 0.0, 100.0) == (50.0, 60.0, 90.0)
    assert spread([99.0, 98.0], 10.0, 0.0, 100.0) == (100.0, 90.0)
    assert spread([3.0, 2.0, 1.0], 10.0, 0.0, 20.0) == (20.0, 10.0, 0.0)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, (0, 2, 4, 6, 8, 10)),
        (21.4, 33.0, (20, 25, 30, 35)),
        (-3.1, 0.9, (-4, -3, -2, -1, 0, 1)),
        (97.0, 97.0, (96.5, 97.0, 97.5)),
        (100 / 3, 100 / 3 + 1e-14, (32.5, 33.0, 33.5, 34.0)),
        (1e18, 1e18, (0.999e18, 0.9995e18, 1e18, 1.0005e18, 1.001e18)),
        (0.001, 0.0042, (0.001, 0.002, 0.003, 0.004, 0.005)),
    ],
)
def test_ticks_are_round_and_cover_all_values(low, high, ticks):
    found = choose_ticks(low, high)

    assert found[0] <= low <= high <= found[-1]
    assert found == pytest.approx(ticks)


def test_a_curve_spans_the_drawing_and_a_missing_value_breaks_it():
    # A published value far away does not flatten it.
    values = curve(0.0, 10.0, math.nan, 5.0)
    chart = draw_chart([values], [("near", 7.0), ("far", 70.0)], baselines=[("constant", 0.1)])

    assert [level.label for level in chart.published] == ["near"]
    (drawn,) = chart.curves
    assert [mark.x for mark in drawn.marks] == pytest.approx([66, 170.7, 380], abs=0.1)
    assert [mark.y for mark in drawn.marks] == [chart.bottom, chart.top, 108.0]
    assert drawn.line.count("M") == 2
    assert drawn.band == ""
    # 1 % of the height of 196 above the axis; without room below, its name is above it.
    assert chart.baselines[0].position == pytest.approx(chart.bottom - 1.96, abs=0.1)
    assert chart.baseline_labels[0].position < chart.baselines[0].position


def test_a_band_surrounds_the_intervals():
    percent = draw_chart([curve(5.0, 5.0, low=0.0, high=10.0)])
    plain = draw_chart([curve(10.0, 10.0, low=1.0, high=math.inf), curve(1000.0)], unit="")

    for chart in (percent, plain):
        left, right = chart.left + 10, chart.right - 10
        assert chart.curves[0].band == f"M{left} 10L{right} 10L{right} 206L{left} 206Z"


def test_plain_numbers_that_span_magnitudes_are_on_powers_of_ten():
    chart = draw_chart([curve(1.0, 10.0, math.inf, 1000.0)], unit="")

    (drawn,) = chart.curves
    assert [tick.label for tick in chart.y_ticks] == ["1", "10", "100", "1000"]
    assert [tick.label for tick in draw_chart([curve(0.0, 3e5)], unit="").y_ticks][-1] == "3e5"
    heights = [chart.bottom, chart.bottom - 196 / 3, chart.top, chart.top]
    assert [mark.y for mark in drawn.marks] == pytest.approx(heights, abs=0.1)
    assert [mark.is_infinite for mark in drawn.marks] == [False, False, True, False]
    assert drawn.line.count("M") == 1


@pytest.mark.parametrize(
    ("values", "unit"), [((1.0, 100.0), ""), ((0.0, 1000.0), ""), ((0.1, 99.0), "%")]
)
def test_other_numbers_are_on_even_steps(values, unit):
    steps = [float(tick.label) for tick in draw_chart([curve(*values)], unit=unit).y_ticks]

    assert np.diff(steps, 2) == pytest.approx(0)
