"""Test the metrics for masks of a single object."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from probes.tokencut.log import unpack_mask
from probes.tokencut.probe import TokenCut
from ssl_bench.cli.__main__ import main
from ssl_bench.planning import plan_probes
from ssl_bench.results import Baseline, ResultStore
from ssl_bench.results.per_image import load_curve
from ssl_bench.scores import OBJECT_SCORES, object_counts
from tests.support.faults import expect_error, make_probe_args, picture

ONE_OBJECT = ("dataset.one_object=true", "dataset.numbers=[0,255]", "dataset.ignored=[]")
SIZES = ((32, 40), (33, 47), (40, 24), (24, 56))
PATCH = 8


def object_folders(root: Path, sizes: Sequence[tuple[int, int]] = SIZES) -> Path:
    """Write images of a bright object on noise, and write the object masks."""
    for folder in ("images/val", "masks/val"):
        (root / folder).mkdir(parents=True)
    for number, size in enumerate(sizes):
        truth = np.zeros(size, np.uint8)
        truth[8 : 20 + number, 8 + number : 24] = 255
        picture(number, *size).save(root / f"images/val/{number}.jpg", quality=95)
        Image.fromarray(truth).save(root / f"masks/val/{number}.png")
    return root


def plain_scores(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Compute F-beta, IoU and accuracy of masks with plain loops."""
    by_threshold, ious, accuracies = [], [], []
    for answer, truth in pairs:
        per_image = []
        for step in range(255):
            found = answer > step / 255
            right = int((found & truth).sum())
            precision = right / found.sum() if found.any() else 1.0
            recall = right / truth.sum() if truth.any() else 1.0
            below = 0.3 * precision + recall
            per_image.append(1.3 * precision * recall / below if below else 0.0)
        by_threshold.append(per_image)
        half = answer > 0.5
        ious.append((half & truth).sum() / (half | truth).sum())
        accuracies.append((half == truth).mean())
    return {
        "max_f_beta": 100 * float(np.mean(by_threshold, axis=0).max()),
        "iou": 100 * float(np.mean(ious)),
        "accuracy": 100 * float(np.mean(accuracies)),
    }


def read_log(out: str = "results") -> Iterator[dict]:
    (path,) = Path(out).glob("pictures/tokencut/*/*/*/images_*.jsonl")
    yield from map(json.loads, path.read_text().splitlines()[1:])


def true_mask(root: Path, image_id: str) -> np.ndarray:
    return np.array(Image.open(root / f"masks/val/{image_id}.png")) > 0


@pytest.mark.parametrize("method", ["tokencut", "lost"])
def test_scores_and_baselines_equal_a_computation_in_numpy(workdir, method):
    root = object_folders(workdir / "objects")
    words = make_probe_args(
        "tokencut", "paired_folders", root, *ONE_OBJECT, f"probe.method={method}"
    )

    assert main(words) == 0

    # Masks are saved as files only if the true masks are unknown.
    assert not list(Path("results").glob("**/masks"))
    found, constant = [], defaultdict(list)
    for line in read_log():
        truth = true_mask(root, line["image"])
        assert ("tied_cutoff" in line["cells"]["1/key"]) == (method == "lost")
        patches = unpack_mask(line["cells"]["1/key"]["mask"], tuple(line["grid"]))
        pixels = np.kron(patches, np.ones((PATCH, PATCH)))[: truth.shape[0], : truth.shape[1]]
        found.append((pixels, truth))
        distances = [abs((np.arange(side) + 0.5) / side - 0.5) for side in truth.shape]
        centre = np.maximum(distances[0][:, None], distances[1]) < np.sqrt(0.125)
        for answer, mask in (("centre box", centre), ("empty mask", 0), ("whole image", 1)):
            constant[answer].append((np.broadcast_to(mask, truth.shape), truth))
    store = ResultStore(Path("results"))
    by_metric = {record.metric: record for record in store.records()}
    assert by_metric.keys() == {"max_f_beta", "iou", "accuracy"}
    for metric, record in by_metric.items():
        assert record.value == pytest.approx(plain_scores(found)[metric])
        assert (record.unit, record.num_images, record.split) == ("%", 4, "val")
        assert record.ci95 is not None
        assert record.ci95[0] < record.value < record.ci95[1]
        baseline = Baseline.from_details(record.details)
        assert baseline is not None
        scores = {answer: plain_scores(pairs)[metric] for answer, pairs in constant.items()}
        assert baseline.value == pytest.approx(max(scores.values()))
        assert baseline.value == pytest.approx(scores[baseline.answer])
        curve = load_curve(store, [record])
        (per_image,) = curve.per_image.values()
        estimate = curve.estimate(per_image)
        assert estimate.value == curve.value(per_image) == pytest.approx(record.value)
        assert estimate.ci95() == pytest.approx(record.ci95)
    assert not store.damaged_files


def test_scores_of_an_image_equal_a_count_by_hand():
    for counts, expected in (
        # Of 100 pixels, 20 are found, 16 true and 10 both. The precision is 1/2, the recall 5/8.
        ([10, 20, 16, 100], (130 * 0.5 * 0.625 / 0.775, 1000 / 26, 84)),
        ([0, 0, 16, 100], (0, 0, 84)),
        ([0, 20, 0, 100], (0, 0, 80)),
        ([0, 20, 16, 100], (0, 0, 64)),
        ([0, 0, 0, 100], (100, 100, 100)),
        ([100, 100, 100, 100], (100, 100, 100)),
    ):
        scores = [float(score(np.array(counts))) for score in OBJECT_SCORES.values()]
        assert scores == pytest.approx(expected)


def test_ignored_pixels_are_not_counted():
    truth = np.array([[0, 1, 255, 1], [0, 0, 255, 255]], np.uint8)
    answer = np.array([[1, 1, 1, 0], [0, 0, 0, 1]], bool)

    assert object_counts(answer, truth).tolist() == [1, 2, 2, 5]


def test_resized_images_are_scored_at_their_new_size(workdir):
    root = object_folders(workdir / "objects", [(32, 40)])
    words = make_probe_args("tokencut", "paired_folders", root, *ONE_OBJECT, "probe.longer_side=20")

    assert main(words) == 0

    (line,) = read_log()
    # At half the size, the object has 6 x 8 pixels.
    assert line["cells"]["1/key"]["object"][2:] == [6 * 8, 16 * 20]
    assert line["size"] == [16, 20]


@pytest.mark.parametrize(
    ("dataset", "truth", "metrics"),
    [
        ("ecssd", "masks", ["max_f_beta", "iou", "accuracy"]),
        ("voc2012", "boxes", ["corloc"]),
        ("folder", "none", ["degenerate"]),
    ],
)
def test_the_annotations_of_a_dataset_decide_what_is_scored(dataset, truth, metrics):
    (planned,) = plan_probes(["tokencut"], [dataset], [])
    (adaptive,) = planned.plan_secondary_protocols()

    for probe in (planned.probe, adaptive.probe):
        assert isinstance(probe, TokenCut)
        assert probe.truth == truth
        assert [metric for _, _, metric in probe.list_score_keys([2])] == metrics
    largest = 640 if dataset == "folder" else None
    assert planned.probe.settings() == TokenCut(max_side=largest).settings()
    assert adaptive.probe.settings()["tau"] == "otsu"
    assert adaptive.probe.settings().get("max_side") == largest


@pytest.mark.parametrize(
    ("task", "dataset", "more", "code"),
    [
        ("tokencut", "paired_folders", [], 3),
        ("tokencut", "voc2012", ["probe.truth=masks"], 3),
        ("discovery", "ecssd", [], 3),
        ("tokencut", "paired_folders", [ONE_OBJECT[0], "dataset.class_names=[a,b,c]"], 2),
    ],
)
def test_data_without_the_required_truth_is_refused(workdir, capsys, task, dataset, more, code):
    root = object_folders(workdir / "objects", [(32, 40)])

    expect_error(capsys, make_probe_args(task, dataset, root, *more), code)
