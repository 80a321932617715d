"""What an answer that looks at no image scores: by hand, and from the labels alone."""

from dataclasses import replace

import numpy as np
import pytest

from probes.clustering.agreement import image_independent_baselines
from probes.discovery import constant_baselines, score_block
from probes.tokencut.log import ImageResult
from probes.tokencut.scores import centre_box, corloc_score, saliency_scores
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import DataError
from ssl_bench.report.drawing import draw_chart
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.results import Baseline, ResultStore
from ssl_bench.scores import mean_iou, pixel_accuracy, predict_constant_class
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.entries import baseline_note
from ssl_bench.tables.sheets import render_tables
from tests.support.coloured_classes import coloured_classes
from tests.support.faults import probing, records, voc
from tests.support.report_cells import cell, curve
from tests.support.spair import PAIRS, spair, write_annotation

CELL = {"0/key": {"box": [0, 0, 1, 1], "hit": False, "degenerate": False}}


def searched(true, size=(100, 200)) -> ImageResult:
    return ImageResult(len(true), 1.0, (1, 1), CELL, size, true)


def test_the_centre_box_has_the_shape_of_the_image_and_half_of_its_area():
    x0, y0, x1, y1 = centre_box((100, 200))

    assert (x1 - x0) * (y1 - y0) == pytest.approx(100 * 200 / 2)
    assert (x1 - x0) / (y1 - y0) == pytest.approx(2)
    assert ((x0 + x1) / 2, (y0 + y1) / 2) == pytest.approx((100, 50))


def test_the_centre_box_is_right_where_half_of_it_and_a_true_box_is_shared():
    # A square of 100: the middle 70.7. The whole image shares 50 % with it, a strip at the rim 0.
    whole, strip = [[0.0, 0.0, 100.0, 100.0]], [[0.0, 0.0, 10.0, 100.0]]
    images = [searched(true, (100, 100)) for true in (whole, strip, strip, strip)]

    score = corloc_score(0, "key", images)
    average = next(
        s
        for s in score_block(0, "key", images, 1, constant_baselines(images))
        if s.metric == "ap50"
    )

    assert Baseline.from_details(score.details) == Baseline("centre box", 25.0)
    baseline = Baseline.from_details(average.details)
    assert baseline is not None
    # One of four boxes right, all equally sure: precision 1/4 up to a recall of 1/4.
    assert baseline.value == pytest.approx(100 * 26 / 101 / 4)


def test_the_whole_image_is_the_baseline_where_a_box_in_its_middle_is_wrong():
    # The middle 70.7 of 100 shares 41 % with the upper three fifths, the whole image 60 %.
    images = [searched([[0.0, 0.0, 100.0, 60.0]], (100, 100))]

    scores = [
        corloc_score(0, "key", images),
        *score_block(0, "key", images, 1, constant_baselines(images)),
    ]

    found = {score.metric: Baseline.from_details(score.details) for score in scores}
    for metric in ("corloc", "ap50"):
        assert found[metric] == Baseline("whole image", 100.0)
    # At three of ten IoUs: .5, .55 and .6.
    for metric in ("ar100", "ap", "ap_coco"):
        baseline = found[metric]
        assert baseline is not None
        assert (baseline.answer, baseline.value) == ("whole image", pytest.approx(30.0))


@pytest.mark.parametrize(("side", "of_accuracy"), [(2, "empty mask"), (9, "whole image")])
def test_no_constant_mask_beats_the_baseline_of_masks(side, of_accuracy):
    # Of 10 x 10 pixels the middle ones, and squares near and in a corner.
    box = np.zeros((10, 10), bool)
    box[1:8, 1:8] = True
    masks = [np.zeros((10, 10), bool) for _ in range(2)]
    masks[0][1 : 1 + side, 1 : 1 + side] = masks[1][:side, :side] = True
    constant = {"centre box": box, "empty mask": box & False, "whole image": box | True}

    def counts(answer, truth):
        return [int(some.sum()) for some in (answer & truth, answer, truth, truth | True)]

    def by_hand(metric, answer):
        def one(truth):
            both, found, true = (answer & truth).sum(), answer.sum(), truth.sum()
            if metric == "accuracy":
                return (answer == truth).mean()
            if metric == "iou":
                return both / (answer | truth).sum()
            precision, recall = both / found if found else 1.0, both / true
            total = 0.3 * precision + recall
            return 1.3 * precision * recall / total if total else 0.0

        return 100 * np.mean([one(truth) for truth in masks])

    cells = {"0/key": {"object": [0, 0, 1, 100], "degenerate": False}}
    images = [
        ImageResult(0, 1.0, (1, 1), cells, (10, 10), [], centre=counts(box, mask)) for mask in masks
    ]
    for score in saliency_scores(0, "key", images):
        values = {name: by_hand(score.metric, answer) for name, answer in constant.items()}
        best = max(values, key=lambda name: values[name])
        assert score.metric != "accuracy" or best == of_accuracy
        baseline = Baseline.from_details(score.details)
        assert baseline is not None
        assert (baseline.answer, baseline.value) == (best, pytest.approx(values[best]))


def test_a_single_cluster_is_the_baseline_where_one_class_is_frequent():
    # Random halves, each standing for another class, are right in about half of the images.
    met = np.array([[48, 2], [42, 8]])

    found = image_independent_baselines(met, ["accuracy_matched", "miou_matched", "purity", "ami"])

    assert found["accuracy_matched"] == Baseline("single cluster", 90.0)
    assert found["miou_matched"] == Baseline("single cluster", 45.0)
    assert (found["purity"].answer, found["ami"].answer) == ("random clusters", "random clusters")


def test_the_best_of_several_answers_is_the_baseline_and_the_first_of_equals():
    assert Baseline.best({"a": 1.0, "b": 2.0, "c": 2.0}) == Baseline("b", 2.0)
    assert Baseline.best({"a": float("nan"), "b": -5.0}) == Baseline("b", -5.0)


def test_the_middle_is_the_baseline_of_points_that_end_there(place):
    pair = PAIRS[0]
    base = spair(place / "spair", (pair,))
    ends = {"src_kps": [[4, 4], [40, 4], [40, 28]], "trg_kps": [[20, 30], [21, 29], [19, 31]]}
    write_annotation(base, pair, **ends)
    words = ["--task", "correspondence", "--dataset", "spair71k", "--layer", "1"]
    files = ["--checkpoint", "encoder.safetensors", "--data-root", str(place / "spair")]
    assert main(["probe", *words, *files, "probe.protocol=spair", "probe.image_size=64"]) == 0

    found = baselines()

    assert found["pck_0.1"] == Baseline("middle", 100.0)


def test_the_constant_class_is_the_most_frequent_one():
    named, counts = predict_constant_class(np.array([[0, 0, 0, 0], [0, 5, 5, 0], [3, 6, 1, 0]]))

    assert named == 1
    assert mean_iou(counts) == pytest.approx(60 / 3)
    assert pixel_accuracy(counts) == pytest.approx(60)
    assert Baseline.most_frequent([5, 3, 2], 1) == Baseline("most frequent class", 50.0)
    assert Baseline.most_frequent([2, 3, 5], 2) == Baseline("2 most frequent classes", 80.0)


def baselines(out: str = "results") -> dict[str, Baseline | None]:
    """By metric."""
    return {record.metric: Baseline.from_details(record.details) for record in records(out)}


@pytest.mark.parametrize("task", ["segmentation", "retrieval"])
def test_of_masks_the_baseline_is_that_of_their_pixels(place, task):
    assert main(probing(task, "voc2012", voc(place / "voc"))) == 0

    found = baselines()

    # Of 32 x 40 pixels 16 x 16 are of an object and one row is ignored.
    share = 100 * (31 * 40 - 256) / (31 * 40)
    for metric, baseline in found.items():
        assert baseline is not None
        assert baseline.answer == "constant class background"
        expected = share if metric == "pixel_accuracy" else share / 2
        assert baseline.value == pytest.approx(expected)


@pytest.mark.parametrize("task", ["knn", "classification"])
def test_of_classes_the_baseline_is_the_largest_one(place, task):
    assert main(probing(task, "class_folders", coloured_classes(place / "classes"))) == 0

    found = baselines()

    assert found
    for metric, baseline in found.items():
        assert baseline is not None
        # Six classes of two pictures each.
        assert baseline.value == pytest.approx(100 * (5 if "top5" in metric else 1) / 6)


def test_where_nothing_moves_the_same_place_is_always_right(place):
    asked = probing("correspondence", "folder", place / "photos")
    for out, strength in (("still", "0.001"), ("moved", "0.33")):
        warp = ["--out", out, "probe.warp=homography", f"probe.strength={strength}"]
        assert main([*asked, *warp]) == 0

    still, moved = baselines("still")["pck_0.05"], baselines("moved")["pck_0.05"]

    assert still == Baseline("same place", 100.0)
    assert moved is not None
    assert moved.value < 100


def baselined(**changes):
    baseline = Baseline("centre box", 31.25)
    return replace(cell(**changes), details=baseline.as_details())


def test_tables_say_it_once_and_scripts_with_every_number():
    rows = [baselined(layer=0), baselined(layer=1)]
    (table,) = depth_tables(rows)

    assert "image-independent baseline (centre box): 31.2\n" in render_tables([table], "text")
    assert [row["baseline"] for row in table.csv_rows()] == [31.25, 31.25]
    assert table.as_json()["cells"][0]["baseline"] == {"answer": "centre box", "value": 31.25}
    assert baseline_note([cell()]) == ""
    other = replace(cell(), details=Baseline("centre box", 40.0).as_details())
    assert baseline_note([rows[0], other]).endswith(": 31.2 to 40.0")


def test_the_report_draws_it_from_side_to_side_within_the_axes():
    rows = [baselined(layer=0, value=5.0, ci95=None), baselined(layer=1, value=6.0, ci95=None)]

    (panel,) = group_into_panels(rows, list_checkpoints(rows))
    chart = draw_chart([curve(5.0, 6.0)], baselines=panel.baselines)

    assert panel.baselines == (("centre box 31.2", 31.25),)
    (floor,) = chart.baselines
    assert floor.label == "centre box 31.2"
    assert chart.top <= floor.position < min(mark.y for mark in chart.curves[0].marks)


@pytest.mark.parametrize(
    "spoilt",
    [{"answer": "box"}, {"answer": "box", "value": 120.0}, {"answer": 3, "value": 1.0}, 7],
)
def test_a_record_with_a_strange_baseline_is_damaged(tmp_path, spoilt):
    store = ResultStore(tmp_path)
    store.save(replace(cell(), details={"baseline": spoilt}))

    with pytest.raises(DataError, match="baseline"):
        store.records()
