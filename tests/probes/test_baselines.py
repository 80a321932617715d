"""Test the image-independent baselines, such as the most frequent class."""

from dataclasses import replace

import numpy as np
import pytest

from probes.clustering.agreement import image_independent_baselines
from probes.discovery import constant_baselines, score_block
from probes.tokencut.log import ImageResult
from probes.tokencut.scores import corloc_score
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import DataError
from ssl_bench.report.drawing import draw_chart
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.results import Baseline, ResultStore
from ssl_bench.scores import centre_box, mean_iou, pixel_accuracy, predict_constant_class
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.entries import baseline_note
from ssl_bench.tables.sheets import render_tables
from tests.support.coloured_classes import coloured_classes
from tests.support.faults import make_probe_args, records, voc
from tests.support.report_cells import build_record, curve
from tests.support.spair import PAIRS, spair, write_annotation

CELL = {"0/key": {"box": [0, 0, 1, 1], "hit": False, "degenerate": False}}


def image_result(true: list[list[float]], size: tuple[int, int] = (100, 200)) -> ImageResult:
    return ImageResult(len(true), 1.0, (1, 1), CELL, size, true)


def block_baselines(images: list[ImageResult]) -> dict[str, Baseline]:
    scores = score_block(0, "key", images, 1, constant_baselines(images))
    found = [corloc_score(0, "key", images), *scores]
    return {s.metric: b for s in found if (b := Baseline.from_details(s.details))}


def test_the_centre_box_has_half_the_area_of_the_image():
    x0, y0, x1, y1 = centre_box((100, 200))

    assert (x1 - x0) * (y1 - y0) == pytest.approx(100 * 200 / 2)
    assert (x1 - x0) / (y1 - y0) == pytest.approx(2)
    assert ((x0 + x1) / 2, (y0 + y1) / 2) == pytest.approx((100, 50))


def test_the_baseline_is_the_better_of_two_fixed_boxes():
    # The centre box is a square with sides of 70.7 pixels. Its IoU with the whole image is 50 %,
    # and its IoU with a strip at the edge is 0.
    whole, strip = [[0.0, 0.0, 100.0, 100.0]], [[0.0, 0.0, 10.0, 100.0]]
    images = [image_result(true, (100, 100)) for true in (whole, strip, strip, strip)]
    found = block_baselines(images)
    assert found["corloc"] == Baseline("centre box", 25.0)
    # One of four boxes with equal confidence is correct: precision 1/4 up to a recall of 1/4.
    assert found["ap50"].value == pytest.approx(100 * 26 / 101 / 4)

    # The object is the upper 60 % of the image. The IoU of the centre box is 41 %.
    found = block_baselines([image_result([[0.0, 0.0, 100.0, 60.0]], (100, 100))])
    assert found["corloc"] == found["ap50"] == Baseline("whole image", 100.0)
    # An IoU of 0.6 is enough for three of the ten thresholds: 0.5, 0.55 and 0.6.
    for metric in ("ar100", "ap", "ap_coco"):
        assert found[metric].answer == "whole image"
        assert found[metric].value == pytest.approx(30.0)


def test_single_clusters_are_the_baseline_if_one_class_is_frequent():
    # If two random halves are assigned to different classes, only about half of the images are
    # correct.
    table = np.array([[48, 2], [42, 8]])
    metrics = ["accuracy_matched", "miou_matched", "purity", "ami"]

    found = image_independent_baselines(table, metrics)

    assert found["accuracy_matched"] == Baseline("single cluster", 90.0)
    assert found["miou_matched"] == Baseline("single cluster", 45.0)
    assert (found["purity"].answer, found["ami"].answer) == ("random clusters", "random clusters")


def test_best_and_most_frequent_answers_equal_a_hand_count():
    assert Baseline.best({"a": 1.0, "b": 2.0, "c": 2.0}) == Baseline("b", 2.0)
    assert Baseline.best({"a": float("nan"), "b": -5.0}) == Baseline("b", -5.0)
    named, counts = predict_constant_class(np.array([[0, 0, 0, 0], [0, 5, 5, 0], [3, 6, 1, 0]]))
    assert named == 1
    assert mean_iou(counts) == pytest.approx(60 / 3)
    assert pixel_accuracy(counts) == pytest.approx(60)
    assert Baseline.most_frequent([5, 3, 2], 1) == Baseline("most frequent class", 50.0)
    assert Baseline.most_frequent([2, 3, 5], 2) == Baseline("2 most frequent classes", 80.0)


def run_baselines(words: list[str]) -> dict[str, Baseline]:
    assert main(words) == 0
    found = {r.metric: Baseline.from_details(r.details) for r in records()}
    assert found
    assert all(found.values())
    return {metric: baseline for metric, baseline in found.items() if baseline}


def test_the_middle_is_the_baseline_if_all_points_move_there(workdir):
    base = spair(workdir / "spair", PAIRS[:1])
    ends = {"src_kps": [[4, 4], [40, 4], [40, 28]], "trg_kps": [[20, 30], [21, 29], [19, 31]]}
    write_annotation(base, PAIRS[0], **ends)
    words = make_probe_args("correspondence", "spair71k", workdir / "spair", "probe.protocol=spair")

    assert run_baselines([*words, "probe.image_size=64"])["pck_0.1"] == Baseline("middle", 100.0)


@pytest.mark.parametrize("task", ["segmentation", "retrieval"])
def test_the_baseline_of_masks_is_the_share_of_the_background(workdir, task):
    # An image has 32 x 40 pixels. The object has 16 x 16 pixels, and one row is ignored.
    share = 100 * (31 * 40 - 256) / (31 * 40)
    for metric, baseline in run_baselines(
        make_probe_args(task, "voc2012", voc(workdir / "voc"))
    ).items():
        assert baseline.answer == "constant class background"
        expected = share if metric == "pixel_accuracy" else share / 2
        assert baseline.value == pytest.approx(expected)


@pytest.mark.parametrize("task", ["knn", "classification"])
def test_the_class_baseline_is_the_share_of_the_largest(workdir, task):
    words = make_probe_args(task, "class_folders", coloured_classes(workdir / "classes"))
    for metric, baseline in run_baselines(words).items():
        # Each of the six classes has two images.
        assert baseline.value == pytest.approx(100 * (5 if "top5" in metric else 1) / 6)


@pytest.mark.parametrize(("strength", "is_still"), [("0.001", True), ("0.33", False)])
def test_the_baseline_of_warps_is_perfect_only_if_nothing_moves(workdir, strength, is_still):
    words = make_probe_args("correspondence", "folder", workdir / "photos", "probe.warp=homography")
    baseline = run_baselines([*words, f"probe.strength={strength}"])["pck_0.05"]
    assert (baseline == Baseline("same place", 100.0)) == is_still
    assert is_still or baseline.value < 100


def cell_with_baseline(**changes):
    return replace(build_record(**changes), details=Baseline("centre box", 31.25).as_details())


def test_tables_state_the_baseline_once_and_csv_in_every_row():
    rows = [cell_with_baseline(layer=0), cell_with_baseline(layer=1)]
    (table,) = depth_tables(rows)

    assert "image-independent baseline (centre box): 31.2\n" in render_tables([table], "text")
    assert [row["baseline"] for row in table.csv_rows()] == [31.25, 31.25]
    assert table.as_json()["cells"][0]["baseline"] == {"answer": "centre box", "value": 31.25}
    assert baseline_note([build_record()]) == ""
    other = replace(build_record(), details=Baseline("centre box", 40.0).as_details())
    assert baseline_note([rows[0], other]).endswith(": 31.2 to 40.0")


def test_the_report_draws_the_baseline_within_the_axes():
    rows = [
        cell_with_baseline(layer=0, value=5.0, ci95=None),
        cell_with_baseline(layer=1, value=6.0, ci95=None),
    ]

    (panel,) = group_into_panels(rows, list_checkpoints(rows))
    chart = draw_chart([curve(5.0, 6.0)], baselines=panel.baselines)

    assert panel.baselines == (("centre box 31.2", 31.25),)
    (floor,) = chart.baselines
    assert floor.label == "centre box 31.2"
    assert chart.top <= floor.position < min(marker.y for marker in chart.curves[0].markers)


@pytest.mark.parametrize(
    "damaged", [{"answer": "box"}, {"answer": "box", "value": 120.0}, {"answer": 3, "value": 1}, 7]
)
def test_a_record_with_an_impossible_baseline_is_refused(tmp_path, damaged):
    store = ResultStore(tmp_path)
    store.save(replace(build_record(), details={"baseline": damaged}))

    with pytest.raises(DataError, match="baseline"):
        store.records()
