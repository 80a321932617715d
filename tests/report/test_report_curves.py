"""Test the line charts of the HTML report."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from ssl_bench.report.drawing import (
    MAX_END_LABELS,
    SMALL,
    choose_log_ticks,
    choose_ticks,
    draw_chart,
    spread_labels,
)
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.tables.styles import choose_styles
from tests.support.report_cells import build_record, curve, plain, skipless


def test_unitless_values_have_no_best_block_but_interval_ends():
    records = [
        plain(value=12345.0, ci95=(9e3, math.inf), layer=0),
        plain(value=math.inf, ci95=None, layer=1),
        build_record(task="pca", metric="explained_variance", layer=0),
        build_record(layer=0),
    ]

    panels = group_into_panels(records, list_checkpoints(records))

    lines = {panel.metric: panel.lines[0] for panel in panels}
    entries = lines["condition_number"].entries
    assert [entry.text() for entry in entries] == ["1.23e+04 [9e+03, ∞]", "∞"]
    assert [entry.sort_key for entry in entries] == ["12345.0", "Infinity"]
    best = {metric: line.best_entry is not None for metric, line in lines.items()}
    assert best == {"condition_number": False, "explained_variance": False, "corloc": True}


def test_results_with_other_settings_or_data_have_another_panel():
    same = {"settings": {"tau": 0.2, "eps": 1}, "changed": {"eps": 1}}
    other = {key: {"tau": 0.3, "eps": 1} for key in ("settings", "changed")}
    records = [build_record(**same), skipless(**same), build_record(**other)]
    records.append(build_record(**same, dataset_fingerprint="d" * 64))

    panels = group_into_panels(records, list_checkpoints(records))

    assert [panel.settings_text for panel in panels] == [
        ", eps=1 [tau=0.2, data bbbbbb]",
        ", eps=1, tau=0.3 [data bbbbbb]",
        ", eps=1 [tau=0.2, data dddddd]",
    ]
    assert [line.checkpoint.name for line in panels[0].lines] == ["skip", "skipless"]


def test_a_checkpoint_without_skips_is_dashed():
    names = ["skip_soap", "vit", "skipless_soap", "skip_adamw", "z", "net"]
    records = [build_record(model=m, checkpoint_sha256=f"{i}" * 64) for i, m in enumerate(names)]
    # The architecture has priority over the name. For a user's module it is unknown.
    records[4] = replace(records[4], architecture={"kind": "vit", "skip_attention": False})
    records[5] = replace(records[5], architecture={"kind": "module", "name": "Net"})

    checkpoints = list_checkpoints(records)

    styles = choose_styles({one.name: one.is_skipless for one in checkpoints})
    assert [styles[one.name].css for one in checkpoints] == [one.style for one in checkpoints]
    dashes = [(one.label, one.style[2:], dict(one.facts).get("skips")) for one in checkpoints]
    assert dashes == [
        ("net", " d0", None),
        ("skip_adamw", " d0", "yes"),
        ("skip_soap", " d0", "yes"),
        ("skipless_soap", " d0s", "yes"),
        ("vit", " d0", "yes"),
        ("z", " d0s", "mlp"),
    ]
    (long,) = list_checkpoints([build_record(model="a_run_of_a_small_vit_skipless")])
    assert long.label == "a_run_of_…t_skipless"


def test_no_two_of_many_checkpoints_look_the_same():
    shas = [hashlib.sha256(bytes([i])).hexdigest() for i in range(22)]
    records = [build_record(checkpoint_sha256=s, model=f"vit{i % 11}") for i, s in enumerate(shas)]

    checkpoints = list_checkpoints(records)

    for field in ("name", "style", "page"):
        assert len({getattr(checkpoint, field) for checkpoint in checkpoints}) == 22


def test_labels_take_drawing_space_and_many_curves_have_none():
    def draw(count):
        return draw_chart([replace(curve(1.0, 2.0), label="skipless") for _ in range(count)])

    few, many = draw(MAX_END_LABELS), draw(MAX_END_LABELS + 1)

    assert [one.label.label for one in few.curves if one.label] == ["skipless"] * MAX_END_LABELS
    assert few.right < few.curves[0].markers[-1].x + 20 < many.right
    assert [one.label for one in many.curves] == [None] * (MAX_END_LABELS + 1)
    (single,) = draw(1).curves
    assert single.label
    assert single.label.position == single.markers[-1].y < single.markers[0].y
    assert spread_labels([50.0, 51.0, 90.0], 10.0, 0.0, 100.0) == (50.0, 60.0, 90.0)
    assert spread_labels([99.0, 98.0], 10.0, 0.0, 100.0) == (100.0, 90.0)
    assert spread_labels([3.0, 2.0, 1.0], 10.0, 0.0, 20.0) == (20.0, 10.0, 0.0)


TICKS = [
    (0.0, 10.0, (0, 2, 4, 6, 8, 10)),
    (21.4, 33.0, (20, 25, 30, 35)),
    (-3.1, 0.9, (-4, -3, -2, -1, 0, 1)),
    (97.0, 97.0, (96.5, 97.0, 97.5)),
    (100 / 3, 100 / 3 + 1e-14, (32.5, 33.0, 33.5, 34.0)),
    (1e18, 1e18, (0.999e18, 0.9995e18, 1e18, 1.0005e18, 1.001e18)),
    (0.001, 0.0042, (0.001, 0.002, 0.003, 0.004, 0.005)),
]


def test_ticks_are_round_and_cover_all_values():
    for low, high, expected in TICKS:
        ticks = choose_ticks(low, high)
        assert ticks[0] <= low <= high <= ticks[-1]
        assert ticks == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "powers"),
    [
        (1.0, 1000.0, [0, 1, 2, 3]),
        (1.0, 1e5, [0, 1, 2, 3, 4, 5]),
        (2.0, 2e5, [0, 2, 4, 6]),
        (0.02, 3e9, [-2, 1, 4, 7, 10]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_few_powers_of_ten(low, high, powers):
    assert choose_log_ticks(low, high) == pytest.approx([10.0**power for power in powers])


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 250_000.0, ["0", "50000", "1e5", "1.5e5", "2e5", "2.5e5"]),
        (-0.0002, 0.0, ["-2e-4", "-1.5e-4", "-1e-4", "-5e-5", "0"]),
        (99_998.0, 100_001.0, ["99998", "99999", "1e5", "1e5"]),
    ],
)
def test_labels_of_ticks_are_short(low, high, labels):
    assert [tick.label for tick in draw_chart([curve(low, high)]).y_ticks] == labels


def test_curves_fill_the_drawing_and_missing_values_interrupt_them():
    # A published value far away from the curve does not change its scale.
    values = curve(0.0, 10.0, math.nan, 5.0)
    published = [("near", 7.0), ("far", 70.0), ("negative", -1.0), ("edge", 10.0)]
    baselines = [("centre box", 5.0), ("constant", 0.1)]
    chart = draw_chart([values], published, baselines=baselines)

    assert [level.label for level in chart.published] == ["near", "edge"]
    (drawn,) = chart.curves
    assert [marker.x for marker in drawn.markers] == pytest.approx([66, 170.7, 380], abs=0.1)
    assert [marker.y for marker in drawn.markers] == [chart.bottom, chart.top, 108.0]
    assert drawn.line.count("M") == 2
    assert drawn.band == ""
    # 0.1 is 1 % of the height of 196 above the axis. Its label is above the line for lack of space.
    assert chart.baselines == [(108.0, "centre box"), (204.0, "constant")]
    assert chart.baseline_labels == [(119.0, "centre box"), (200.0, "constant")]
    assert (chart.zero, chart.y_label) == (None, "%")
    ticks = draw_chart([curve(50.0, 60.0)], baselines=[("constant", 5.0)]).y_ticks
    assert float(ticks[0].label) <= 5 < 60 <= float(ticks[-1].label)


def test_only_whole_epochs_have_ticks():
    points = [point._replace(x=point.x / 2) for point in curve(1.0, 2.0, 3.0).points]

    chart = draw_chart([replace(curve(), points=points)], x_label="epoch")

    assert [tick.label for tick in chart.x_ticks] == ["0", "1"]


def test_zero_is_marked_and_small_charts_have_no_axis_label():
    values = replace(curve(-5.0, math.nan, 5.0, 0.0), has_markers=False)
    chart = draw_chart([values], size=SMALL, y_label="difference")

    # The ticks are -5, 0 and 5, so 0 is in the middle between 10 and 130.
    assert (chart.zero, chart.y_label, chart.bottom) == (70.0, "", 130)
    # Only the first point has no neighbour to which a line could be drawn.
    assert [(marker.x, marker.y) for marker in chart.curves[0].markers] == [(42.0, 130.0)]


def test_a_band_shows_the_intervals():
    percent = draw_chart([curve(5.0, 5.0, low=0.0, high=10.0)])
    unitless = draw_chart([curve(10.0, 10.0, low=1.0, high=math.inf), curve(1000.0)], unit="")

    for chart in (percent, unitless):
        left, right = chart.left + 10, chart.right - 10
        assert chart.curves[0].band == f"M{left} 10L{right} 10L{right} 206L{left} 206Z"


def test_unitless_values_that_span_magnitudes_have_logarithmic_axes():
    chart = draw_chart([curve(1.0, 10.0, math.inf, 1000.0)], unit="")

    (drawn,) = chart.curves
    assert [tick.label for tick in chart.y_ticks] == ["1", "10", "100", "1000"]
    assert [tick.label for tick in draw_chart([curve(0.0, 3e5)], unit="").y_ticks][-1] == "3e5"
    heights = [chart.bottom, chart.bottom - 196 / 3, chart.top, chart.top]
    assert [marker.y for marker in drawn.markers] == pytest.approx(heights, abs=0.1)
    assert [marker.is_infinite for marker in drawn.markers] == [False, False, True, False]
    assert drawn.line.count("M") == 1


def test_other_values_have_a_linear_axis():
    for values, unit in (((1.0, 100.0), ""), ((0.0, 1000.0), ""), ((0.1, 99.0), "%")):
        ticks = [float(tick.label) for tick in draw_chart([curve(*values)], unit=unit).y_ticks]
        assert np.diff(ticks, 2) == pytest.approx(0)
