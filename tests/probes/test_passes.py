"""Test how often a command encodes each image."""

import collections
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torchvision import transforms

from probes.features.stream import batched, images_per_pass, map_ahead
from probes.knn import KNN
from ssl_bench.cli.__main__ import main
from ssl_bench.data.corruptions import Corruption, corrupt_dataset
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.evaluation import Evaluation, FeatureCache, Probe, display_name
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD, Encoder, load_encoder
from ssl_bench.planning import evaluate, plan_probes, plan_request
from ssl_bench.request import ProbeRequest
from ssl_bench.results import ResultStore
from ssl_bench.shared_features import SharedExtractor, SharedFeatures
from tests.support import heads
from tests.support.coloured_classes import run_probe, tiny
from tests.support.colours import Counter
from tests.support.faults import TINY, encoder_file

TRAIN, VAL = 30, 12
COST = r"(?P<images>\d+) images in .* s, .* images/s, peak memory (?P<gib>[\d.]+) GiB"


@pytest.fixture
def encoder() -> Encoder:
    return tiny()


def evaluation(probe: Probe, encoder: Encoder, root: Path, **changes: Any) -> Evaluation:
    values: dict[str, Any] = {"layers": (0, 1, 2), "seed": 0, "dtype": torch.float32}
    values |= {"encoder": encoder, "dataset": ClassFolders(root), "probe": probe}
    return Evaluation(**{**values, **changes}, device=torch.device("cpu"))


def classification(**changes: Any) -> Probe:
    return heads.classification({"c_values": [1e-2, 1.0], "max_iterations": 5}, **changes)


def count_passes(encoder: Encoder, store: ResultStore, *evaluations: Evaluation) -> int:
    """Count the images that an encoder processes in several evaluations."""
    counter, features = Counter(encoder), FeatureCache()
    for one in evaluations:
        one.run(store, say=lambda _: None, features=features)
    return counter.images


def test_probes_with_the_same_features_encode_images_once(root, encoder, tmp_path):
    probes = classification(), KNN(neighbours=[1, 2])
    evaluations = [evaluation(probe, encoder, root) for probe in probes]

    assert count_passes(encoder, ResultStore(tmp_path / "together"), *evaluations) == TRAIN + VAL

    for one in evaluations:
        assert count_passes(encoder, ResultStore(tmp_path / "apart"), one) == TRAIN + VAL
    together, apart = (
        [
            (r.task, r.layer, r.metric, r.value, r.ci95)
            for r in ResultStore(tmp_path / name).records()
        ]
        for name in ("together", "apart")
    )
    assert together == apart
    assert {task for task, *_ in together} == {"classification", "knn"}


@pytest.mark.parametrize("probe", [KNN(neighbours=[3]), classification()])
def test_little_memory_needs_more_passes_and_gives_the_same_scores(root, probe):
    found, images = [], []
    for gib in (8.0, 1e-9):
        encoder = tiny()
        counter = Counter(encoder)
        scores = run_probe(replace(probe, memory_gib=gib), ClassFolders(root), encoder=encoder)
        found.append({cell: score.value for cell, score in scores.items()})
        images.append(counter.images)
    assert found[0] == found[1]
    assert images == [TRAIN + VAL, 2 * (TRAIN + VAL)]


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        # Features of more facets can be reused, but not features of fewer facets.
        ({"facet": ["cls", "patch_mean"]}, {}, 0),
        ({}, {"facet": ["cls", "patch_mean"]}, TRAIN + VAL),
        ({}, {"crop_share": 0.5}, TRAIN + VAL),
        ({}, {"image_size": 24}, TRAIN + VAL),
        # The training images differ, but the scored images are the same.
        ({}, {"train_images": 20}, 20),
        ({}, {"dtype": torch.bfloat16}, TRAIN + VAL),
    ],
)
def test_images_are_encoded_again_only_for_other_features(
    root, encoder, tmp_path, first, second, again
):
    dtype = second.pop("dtype", torch.float32)
    one = evaluation(KNN(neighbours=[1], **first), encoder, root)
    evaluations = [one, evaluation(KNN(neighbours=[2], **second), encoder, root, dtype=dtype)]
    if dtype != torch.float32:
        # The features of another encoder cannot be reused either.
        evaluations.insert(1, evaluation(KNN(neighbours=[1]), tiny(seed=1), root))

    assert count_passes(encoder, ResultStore(tmp_path), *evaluations) == TRAIN + VAL + again


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("knn", ["probe.protocol=dinov2", "probe.batch_size=5", "probe.neighbours=[1]"]),
        (
            "classification",
            ["probe.protocol=dino", "probe.encoder_batch_size=5", "probe.training.epochs=1"],
        ),
    ],
)
def test_a_protocol_encodes_the_squares_of_its_authors(root, encoder, tmp_path, task, words):
    (plan,) = plan_probes([task], ["class_folders"], words)
    inputs: list[torch.Tensor] = []
    encoder.module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))

    count_passes(encoder, ResultStore(tmp_path), evaluation(plan.probe, encoder, root))

    bicubic = transforms.InterpolationMode.BICUBIC
    theirs = transforms.Compose([transforms.Resize(256, bicubic), transforms.CenterCrop(224)])
    val = ClassFolders(root).val()
    expected = np.array([np.array(theirs(Image.fromarray(val[n].image))) for n in range(len(val))])
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (IMAGENET_MEAN, IMAGENET_STD))
    found = 255 * (torch.cat(inputs)[-VAL:] * std + mean).permute(0, 2, 3, 1)
    assert np.abs(found.numpy() - expected).max() < 1.01


def test_training_images_are_encoded_once_for_all_corruptions(root, encoder, tmp_path):
    corruptions = (Corruption.parse(name) for name in ("snow:1", "fog:1", "snow:2"))
    corrupted = [corrupt_dataset(ClassFolders(root), corruption) for corruption in corruptions]
    evaluations = [
        evaluation(KNN(neighbours=[1]), encoder, root, dataset=dataset)
        for dataset in (ClassFolders(root), *corrupted)
    ]
    together = ResultStore(tmp_path / "together")

    assert count_passes(encoder, together, *evaluations) == TRAIN + 4 * VAL

    assert count_passes(encoder, ResultStore(tmp_path / "apart"), evaluations[2]) == TRAIN + VAL
    alone = {record.digest: record.value for record in ResultStore(tmp_path / "apart").records()}
    found = {record.digest: record.value for record in together.records()}
    assert alone.items() <= found.items()


@pytest.mark.parametrize(
    ("device", "side", "expected"),
    [("cpu", 64, 100), ("cpu", 256, 8), ("cpu", 1024, 1), ("cuda", 256, 100)],
)
def test_only_a_cpu_encodes_fewer_large_images_together(device, side, expected):
    assert images_per_pass(100, side, torch.device(device)) == expected


def test_calls_run_a_limited_number_ahead_and_keep_their_order():
    read, leads, found = [], [], []
    numbers = (read.append(number) or number for number in range(9))
    for square in map_ahead(lambda number: number**2, numbers, num_workers=2, max_ahead=3):
        found.append(square)
        leads.append(len(read) - len(found))
    assert found == [number**2 for number in range(9)]
    assert leads == [3, 3, 3, 3, 3, 3, 2, 1, 0]
    assert list(batched(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_only_features_used_since_the_last_corruption_are_kept(encoder):
    features = FeatureCache()
    for selected in (
        (encoder, "segmentation", "others"),
        (tiny(seed=1), "segmentation", "others"),
        (encoder, "segmentation", "others"),
        (encoder, "classification", "others"),
        (encoder, "classification", "photographs"),
    ):
        features.evict_unusable(*selected)
        assert not features
        features["images"] = "features"
        features.evict_unusable(*selected)
        assert features
    features.evict_unusable(encoder, "classification", "others")
    for name in ("snow:1", "fog:1", "snow:2"):
        features.evict_unusable(encoder, "classification", "photographs", name)
        features.setdefault("train", "features")
        features[name] = "features"

    assert set(features) == {"train", "fog:1", "snow:2"}


class PassCounter:
    """A counter of how often an encoder processes each image."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_task: dict[str, collections.Counter[bytes]] = {}
        run, extract = Evaluation.run, FeatureExtractor.extract_in_one_precision
        task = list[str]()

        def run_task(evaluation: Evaluation, *values: Any, **options: Any) -> Any:
            task[:] = [display_name(evaluation.probe)]
            self.by_task[task[0]] = collections.Counter()
            return run(evaluation, *values, **options)

        def count_images(
            extractor: FeatureExtractor, images: torch.Tensor, dtype: torch.dtype | None = None
        ) -> Any:
            self.by_task[task[0]].update(image.numpy().tobytes() for image in images)
            return extract(extractor, images, dtype)

        monkeypatch.setattr(Evaluation, "run", run_task)
        monkeypatch.setattr(FeatureExtractor, "extract_in_one_precision", count_images)

    def times(self, task: str) -> list[int]:
        return sorted(self.by_task[task].values())


PROBED = ("--task", "all", "--checkpoint", "encoder.safetensors", "--layer", "1")
FEW = ("dataset.num_train=6", "dataset.num_val=4")


@pytest.fixture
def counter(workdir, monkeypatch) -> PassCounter:
    # Large patches and empty figures save time.
    encoder_file(workdir / "encoder.safetensors", config=replace(TINY, patch_size=16))
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"figure"))
    return PassCounter(monkeypatch)


@pytest.mark.slow
def test_each_task_encodes_each_image_of_a_folder_once(counter):
    assert main(["sweep", *PROBED, "--dataset", "folder", "--data-root", "photos"]) == 0

    # Correspondence also encodes a warp of each image, and geometry ten crops.
    count = 4
    expected = {"correspondence": 2 * count, "geometry": 11 * count, "tokencut, adaptive": 0}
    assert {task: counter.times(task) for task in counter.by_task} == {
        task: [1] * expected.get(task, count) for task in counter.by_task
    }
    assert {"tokencut", "tokencut, adaptive", "pca", "conditioning"} < counter.by_task.keys()


@pytest.mark.slow
def test_each_task_encodes_each_image_with_masks_or_classes_once(counter):
    for dataset in ("toy", "toy_objects"):
        assert main(["probe", *PROBED, "--dataset", dataset, *FEW]) == 0
        if dataset == "toy":
            # Segmentation and retrieval need the features of clustering.
            assert len(counter.times("clustering")) == 10
            assert not counter.times("segmentation") + counter.times("retrieval")
            assert len(counter.times("discovery")) == 10
            assert not counter.times("tokencut") + counter.times("tokencut, adaptive")
    assert not counter.times("knn")
    assert {times for task in counter.by_task for times in counter.times(task)} == {1}


MASK_TASKS = {
    "clustering": (),
    "retrieval": ("probe.neighbours=5",),
    "segmentation": ("probe.protocol=fast", "probe.training.epochs=2"),
}


def run_mask_tasks(
    out: Path, *tasks: str, checkpoints: Sequence[str] = ("encoder.safetensors",)
) -> tuple[dict[str, Any], int]:
    """Run several probes together. Return their scores and the number of encoded images."""
    words = [*FEW, "probe.image_size=32", *(word for task in tasks for word in MASK_TASKS[task])]
    plan, features, num_images = plan_probes(tasks, ["toy"], words), FeatureCache(), 0
    options = {"layers": "0,1", "device": torch.device("cpu"), "features": features}
    for path in checkpoints:
        encoder = load_encoder(path)
        counter = Counter(encoder)
        evaluate(plan, encoder, ResultStore(out), **options)
        num_images += counter.images
    records = ResultStore(out).records()
    found = {one.digest: (one.value, one.ci95, one.per_image_sha256) for one in records}
    return found, num_images


@pytest.mark.parametrize("free", [2**40, 1])
def test_probes_of_masks_share_features_if_there_is_memory(workdir, monkeypatch, free):
    encoder_file(workdir / "encoder.safetensors", config=replace(TINY, patch_size=16))
    apart = dict[str, Any]()
    for task in MASK_TASKS:
        found, images = run_mask_tasks(Path("apart"), task)
        apart |= found
        assert images == 10
    monkeypatch.setattr("ssl_bench.shared_features.free_host_memory", lambda: free)

    together, images = run_mask_tasks(Path("together"), *MASK_TASKS)

    assert together == apart
    assert images == (10 if free > 1 else 30)


def test_features_of_corrupted_images_are_not_kept(encoder, tmp_path):
    (plan,) = plan_probes(
        ["retrieval"], ["toy"], [*FEW, "probe.image_size=16", "probe.neighbours=5"]
    )
    corrupted = corrupt_dataset(plan.dataset, Corruption.parse("snow:1"))
    for dataset, is_kept in ((plan.dataset, True), (corrupted, False)):
        features, one = FeatureCache(), evaluation(plan.probe, encoder, tmp_path, dataset=dataset)
        one.run(ResultStore(tmp_path), say=lambda _: None, features=features, keep_features=True)
        assert (SharedFeatures in features) == is_kept


def test_checkpoints_of_the_same_name_do_not_share_features(workdir):
    paths = [f"{folder}/run/last.safetensors" for folder in ("a", "b")]
    apart = dict[str, Any]()
    for seed, path in enumerate(paths):
        Path(path).parent.mkdir(parents=True)
        encoder_file(workdir / path, seed=seed, config=replace(TINY, patch_size=16))
        apart |= run_mask_tasks(Path("apart"), "clustering", "retrieval", checkpoints=[path])[0]

    together, _ = run_mask_tasks(Path("together"), "clustering", "retrieval", checkpoints=paths)

    assert {one.model for one in ResultStore(Path("together")).records()} == {"run"}
    assert together == apart


def run_tokencut(
    out: str, *settings: str, layers: str = "0,1", overwrite: bool = False
) -> dict[str, Any]:
    """Run TokenCut and return the scores and figures."""
    roots = {"folder": "photos"}
    plan = plan_request(ProbeRequest(["tokencut"], ["folder"], settings, roots, all_tasks=True))
    options = {"layers": layers, "device": torch.device("cpu"), "overwrite": overwrite}
    evaluate(plan, load_encoder("encoder.safetensors"), ResultStore(Path(out)), **options)
    records = ResultStore(Path(out)).records()
    found = {record.digest: (record.value, record.ci95, record.details) for record in records}
    files = (path for path in Path(out, "pictures").rglob("*") if path.is_file())
    return found | {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_protocols_that_share_a_pass_equal_separate_runs(workdir, monkeypatch):
    for protocol in ("adaptive", "reference"):
        apart = run_tokencut("apart", f"probe.protocol={protocol}")
    assert len(ResultStore(Path("apart")).records()) == 4
    passes = PassCounter(monkeypatch)

    assert run_tokencut("together") == apart
    assert run_tokencut("together", overwrite=True) == apart

    assert passes.times("tokencut") == [1] * 4
    assert not passes.times("tokencut, adaptive")


def test_protocols_with_different_pending_blocks_do_not_share_a_pass(workdir, monkeypatch):
    run_tokencut("results", "probe.protocol=adaptive", layers="1")
    passes = PassCounter(monkeypatch)

    run_tokencut("results")

    assert len(passes.times("tokencut")) == len(passes.times("tokencut, adaptive")) == 4


def test_protocols_share_a_pass_if_one_of_them_has_found_its_objects(workdir):
    run_tokencut("results", "probe.protocol=adaptive", "probe.panels=0", layers="1")
    for path in Path("results/records").rglob("*.json"):
        path.unlink()

    found, expected = (
        run_tokencut(out, "probe.panels=0", layers="1") for out in ("results", "apart")
    )

    assert found == expected


def test_a_long_probe_reports_its_images_time_and_memory(root, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("ssl_bench.evaluation._MIN_REPORTED_SECONDS", 0.0)
    messages = list[str]()
    evaluation(KNN(neighbours=[1]), encoder, root).run(ResultStore(tmp_path), say=messages.append)
    (match,) = filter(None, (re.search(COST, message) for message in messages))
    assert int(match["images"]) == TRAIN + VAL
    assert 0.05 < float(match["gib"]) < 16


def test_features_of_known_and_new_images_are_combined_in_order():
    encoder, images = tiny(), torch.rand(4, 3, 16, 16)
    counter, shared = Counter(encoder), SharedFeatures(num_images=4)
    options: dict[str, Any] = {"layers": (0, 2), "facets": ("token", "cls")}
    extractor = SharedExtractor(shared, encoder, **options)

    features, _ = extractor.extract_unchecked(images[[2, 0]])
    # Probes may change the features that they receive.
    features[0]["token"].zero_()
    features, sums = extractor.extract_unchecked(images)

    assert counter.images == 4
    features[0]["token"].zero_()
    features, sums = extractor.extract_unchecked(images)
    expected, expected_sums = FeatureExtractor(encoder, **options).extract_unchecked(images)
    for layer, by_facet in expected.items():
        for facet, values in by_facet.items():
            torch.testing.assert_close(features[layer][facet], values)
    torch.testing.assert_close(sums, expected_sums)

    # Features of other layers or in another precision are not known.
    counter.passes.clear()
    for some in ({"layers": (1, 2), "facets": ("token",)}, {**options, "dtype": torch.bfloat16}):
        found = SharedExtractor(shared, encoder, **some)(images[:1])
        plain = FeatureExtractor(encoder, **some)(images[:1])
        assert all(torch.equal(found[layer]["token"], plain[layer]["token"]) for layer in plain)
    assert counter.images == 4


def test_features_are_kept_up_to_a_quarter_of_the_free_memory(monkeypatch):
    monkeypatch.setattr("ssl_bench.shared_features.free_host_memory", lambda: 4 * 40)
    parts = {(layer, "token"): torch.zeros(2) for layer in (0, 1)}  # 16 bytes

    assert [SharedFeatures(number).has_memory(parts) for number in (2, 3)] == [True, False]
    shared = SharedFeatures(3)
    for shared.keeps_new, digest in ((False, b"a"), (True, b"b"), (True, b"c"), (True, b"d")):
        shared.add(digest, parts)
    assert list(shared.by_image) == [b"b", b"c"]
    shared.add(b"b", {(2, "token"): torch.zeros(2)})
    assert [layer for layer, _ in shared.by_image[b"b"]] == [0, 1, 2]


def test_the_trial_pass_of_an_extractor_is_not_shared():
    encoder, shared = tiny(), SharedFeatures(num_images=4)
    counter = Counter(encoder)
    # Each extractor needs its own trial of two images, which determines the layout of its features.
    for number in (1, 2):
        SharedExtractor(shared, encoder, layers=(1,), facets=("mlp_hidden",))
        assert counter.images == 2 * number
    assert not shared.by_image
