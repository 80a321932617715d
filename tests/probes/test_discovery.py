"""Test the average precision and recall of predicted boxes."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from probes.discovery import (
    METRICS,
    ObjectDiscovery,
    constant_baselines,
    count_image_detections,
    score_block,
)
from probes.tokencut.log import ImageResult
from ssl_bench.results.per_image import ImageCurve
from ssl_bench.scores import average_precision, average_recall, coco_average_precision
from tests.probes.test_tokencut import FAR_AWAY, Pictures, context, tiny_encoder

Boxes = list[list[float]]
NOTHING: Boxes = []
LEFT, RIGHT = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]
OUTSIDE = [50.0, 50.0, 60.0, 60.0]


def count_image(found: Boxes, true: Boxes, ranks=None, num_ranks: int = 3):
    return count_image_detections(
        np.array(found, np.float64).reshape(-1, 4),
        np.array(range(len(found)) if ranks is None else ranks, np.int64),
        # Boxes may be in any memory order, but pycocotools expects rows.
        np.asfortranarray(true, np.float64).reshape(-1, 4, order="A"),
        num_ranks=num_ranks,
    )


def percent(counts) -> list[float]:
    """Compute AP, AP50 and AR100 in percent."""
    whole = np.sum(counts, axis=0)
    found = average_precision(whole), average_precision(whole[:, :2]), average_recall(whole)
    return [float(value) for value in found]


def result(found: Boxes, true: Boxes | None, *, hit: bool = True) -> ImageResult:
    cell = {"box": found[0], "further_boxes": found[1:], "degenerate": False, "hit": hit}
    number = None if true is None else len(true)
    return ImageResult(number, 1.0, (1, 1), {"0/key": cell}, (60, 60), true)


def scored(results: Sequence[ImageResult], num_ranks: int):
    return score_block(0, "key", results, num_ranks, constant_baselines(results))


def random_boxes(seed: int, *, images: int = 12):
    """Return random predicted and true boxes for several images."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(images):
        corners = generator.integers(0, 60, (generator.integers(0, 5), 2))
        true = np.hstack([corners, corners + generator.integers(10, 40, corners.shape)])
        near = true[generator.random(len(true)) < 0.8]
        near = near + generator.integers(-3, 4, near.shape)
        far = np.array([[80, 80, 90, 95]] * int(generator.integers(0, 3))).reshape(-1, 4)
        found.append((np.vstack([near, far]).astype(float), true.astype(float)))
    return found


def annotation(image: int, box: np.ndarray) -> dict[str, Any]:
    return {"image_id": image, "category_id": 1, "bbox": [*box[:2], *(box[2:] - box[:2])]}


def evaluate_with_coco(images, scores) -> list[float]:
    """Compute AP, AP50 and AR100 in percent with pycocotools."""
    true: Any = COCO()
    true.dataset = {
        "images": [{"id": n} for n in range(len(images))],
        "categories": [{"id": 1, "name": "object"}],
        "annotations": [],
    }
    found: Any = []
    for n, ((those, boxes), some) in enumerate(zip(images, scores, strict=True)):
        for box in boxes:
            number, area = len(true.dataset["annotations"]) + 1, (box[2:] - box[:2]).prod()
            one = {"id": number, "iscrowd": 0, "area": area}
            true.dataset["annotations"].append(one | annotation(n, box))
        found += [annotation(n, box) | {"score": s} for box, s in zip(those, some, strict=True)]
    with redirect_stdout(StringIO()):
        true.createIndex()
        evaluation = COCOeval(true, true.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [100 * float(evaluation.stats[number]) for number in (0, 1, 8)]


# Their IoU of 0.62 is sufficient for the thresholds 0.5, 0.55 and 0.6.
SOME, WHOLE = [0.0, 0.0, 62.0, 100.0], [0.0, 0.0, 100.0, 100.0]


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ([([LEFT, RIGHT], [LEFT, RIGHT]), ([LEFT], [LEFT])], [100, 100, 100]),
        ([(NOTHING, [LEFT, RIGHT])], [0, 0, 0]),
        ([([OUTSIDE], [LEFT, RIGHT])], [0, 0, 0]),
        ([([SOME], [WHOLE])], [30, 100, 30]),
        # An IoU of exactly 0.5 is sufficient.
        ([([[0.0, 0.0, 50.0, 100.0]], [WHOLE])], [10, 100, 10]),
        # The second box is a duplicate. The precision is 1 up to a recall of 1/2, and then 2/3.
        ([([LEFT, LEFT, RIGHT], [LEFT, RIGHT])], 2 * [100 * (51 + 50 * 2 / 3) / 101] + [100]),
        # The first box has an IoU of 2/3 with both true boxes and is matched with the last one, so
        # the second box can be matched with the first. From 0.7 on, only the second box is correct.
        (
            [([[2.0, 0.0, 12.0, 10.0], LEFT], [LEFT, [4.0, 0.0, 14.0, 10.0]])],
            [40 + 60 * 51 / 101 / 2, 100, 70],
        ),
        # Half of the boxes with the first rank are correct, at any recall.
        ([([LEFT], [LEFT]), ([OUTSIDE], NOTHING)], [50, 50, 100]),
    ],
)
def test_precision_and_recall_equal_a_count_by_hand(images, expected):
    assert percent([count_image(*one) for one in images]) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(2))
def test_different_ranks_for_all_boxes_give_the_precision_of_coco(seed):
    images = random_boxes(seed)
    total = sum(len(found) for found, _ in images)
    shuffled = np.random.default_rng(seed).permutation(total)
    ends = np.cumsum([len(found) for found, _ in images])[:-1]
    ranks = np.split(shuffled, ends)

    counts = [
        count_image(found.tolist(), true.tolist(), some, num_ranks=total)
        for (found, true), some in zip(images, ranks, strict=True)
    ]

    expected = evaluate_with_coco(images, [(1 - some / total).tolist() for some in ranks])
    assert percent(counts) == pytest.approx(expected, abs=1e-9)
    assert 5 < expected[0] < 95


@pytest.mark.slow
def test_ap_coco_orders_equal_boxes_as_in_the_file(capsys):
    known = [one for one in random_boxes(0, images=40) if len(one[0])]
    results = [result(found.tolist(), true.tolist()) for found, true in known]

    scores = {score.metric: score for score in scored(results, 100)}

    expected = evaluate_with_coco(known, [(-np.arange(len(found))).tolist() for found, _ in known])
    assert scores["ap_coco"].value == pytest.approx(expected[0], abs=1e-9)
    assert scores["ap_coco"].value > scores["ap"].value
    assert scores["ap_coco"].ci95 is None
    assert capsys.readouterr().out == "", "pycocotools prints nothing"
    nothing, one = np.zeros((0, 4)), np.array([LEFT])
    assert coco_average_precision([nothing], [one]) == 0
    assert np.isnan(coco_average_precision([one], [nothing]))
    assert np.isnan(coco_average_precision([nothing], [nothing]))


def test_at_most_100_boxes_of_an_image_count():
    found = [*([OUTSIDE] * 100), LEFT]

    assert percent([count_image(found, [LEFT], num_ranks=101)])[2] == 0
    assert percent([count_image(found[1:], [LEFT], num_ranks=101)])[2] == 100
    assert ObjectDiscovery(max_objects=500).num_ranks == 100


def test_earlier_boxes_of_an_image_count_as_more_confident():
    for found, expected in (([LEFT, OUTSIDE], 100), ([OUTSIDE, LEFT], 50)):
        scores = {score.metric: score for score in scored([result(found, [LEFT])], 2)}

        assert (scores["ap"].value, scores["ap50"].value) == pytest.approx((expected, expected))
        assert scores["ap50"].details["if_equally_sure"] == pytest.approx(50)


def test_scores_depend_on_annotated_images_and_not_on_their_order():
    results = [
        result([LEFT, RIGHT], [LEFT, RIGHT]),
        result([OUTSIDE, LEFT], [LEFT]),
        result([OUTSIDE], NOTHING),
        result([LEFT], None),
    ]

    scores = {score.metric: score for score in scored(results, 3)}
    turned = {score.metric: score for score in scored(results[::-1], 3)}
    # COCO's AP depends on the order, because it uses the best precision at any higher recall.
    assert scores.pop("ap_coco").value > turned.pop("ap_coco").value == pytest.approx(60)

    # One of three boxes with the first rank is correct, and both boxes with the second rank.
    assert scores["ap50"].value == pytest.approx(60)
    assert scores["ar100"].value == pytest.approx(100)
    assert scores["ap50"].details["if_equally_sure"] == pytest.approx(60)
    assert {metric: one.value for metric, one in turned.items()} == {
        metric: one.value for metric, one in scores.items()
    }
    for score in scores.values():
        assert score.num_images == 3
        assert score.details["found_boxes"] == 5
        assert score.details["images_without_boxes"] == 1
    low, high = scores["ap50"].ci95 or (0, 0)
    assert low < 60 < high
    assert scores["ar100"].ci95 is None, "whichever images are drawn, all boxes are found"


def test_per_image_counts_give_the_value_and_interval():
    results = [result([LEFT, RIGHT], [LEFT]), result([OUTSIDE], [LEFT]), result([LEFT], [LEFT])]
    others = [result([LEFT], [LEFT]), result([RIGHT, LEFT], [LEFT]), result([LEFT], [LEFT])]

    for one, other in zip(scored(results, 3), scored(others, 3), strict=True):
        if one.metric == "ap_coco":
            continue
        assert one.per_image is not None
        assert other.per_image is not None
        curve = ImageCurve(one.metric, {0: one.per_image, 1: other.per_image})
        first, second = (curve.estimate(some) for some in curve.per_image.values())

        assert (first.value, first.ci95()) == (one.value, one.ci95)
        assert curve.value(other.per_image) == other.value > one.value
        assert curve.find_best_layer() == 1
        assert second.difference_ci95(second) is None
        low, high = second.difference_ci95(first) or (-1.0, -1.0)
        assert low < second.value - first.value < high


def test_a_run_encodes_images_once_and_can_be_resumed(tmp_path):
    encoder, calls = tiny_encoder(), []
    encoder.module.register_forward_pre_hook(lambda *_: calls.append(1))
    probe = ObjectDiscovery(facet=["key", "token"], panels=1)
    boxes = {"a": [FAR_AWAY, [8.0, 8, 40, 32]], "b": [FAR_AWAY], "c": []}

    scores = list(probe.run(context(tmp_path, Pictures(boxes), (0, 2), encoder)))
    again = list(probe.run(context(tmp_path, Pictures(boxes), (0, 2), encoder)))

    assert [(s.layer, s.facet, s.metric) for s in scores] == probe.list_score_keys([0, 2])
    assert {s.metric for s in scores} == set(METRICS)
    # Images "a" and "c" have the same shape.
    assert len(calls) == 2
    assert again == scores
    assert {s.metric for s in scores if s.per_image is None} == {"ap_coco"}
    assert (probe.settings()["tau"], probe.settings()["confidence"]) == (0.15, "order")
    lost = ObjectDiscovery(method="lost", panels=0)
    found = lost.run(context(tmp_path / "lost", Pictures({"a": [FAR_AWAY]}), [2]))
    assert {s.details["found_boxes"] for s in found if s.metric != "corloc"} == {1}
