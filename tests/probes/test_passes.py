"""How often an image passes the encoder for several probes of one command."""

import collections
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

import ssl_bench
from probes.knn import KNN
from ssl_bench.cli.__main__ import main
from ssl_bench.data.corruptions import Corruption, corrupt_dataset
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.samples import Dataset
from ssl_bench.evaluation import Evaluation, FeatureCache, Probe, display_name
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD, Encoder, load_encoder
from ssl_bench.planning import evaluate, plan_probes, plan_request
from ssl_bench.request import ProbeRequest
from ssl_bench.results import ResultStore
from tests.support import heads
from tests.support.coloured_classes import scored, tiny
from tests.support.colours import Counter

TRAIN, VAL = 30, 12


@pytest.fixture
def encoder() -> Encoder:
    return tiny()


def evaluation(probe: Probe, encoder: Encoder, root: Path, **changes: Any) -> Evaluation:
    values: dict[str, Any] = {"layers": (0, 1, 2), "seed": 0, "dtype": torch.float32}
    values |= {"encoder": encoder, "dataset": ClassFolders(root), "probe": probe}
    return Evaluation(**{**values, **changes}, device=torch.device("cpu"))


def classification(**changes: Any) -> Probe:
    return heads.classification({"c_values": [1e-2, 1.0], "max_iterations": 5}, **changes)


def passes(encoder: Encoder, store: ResultStore, *asked: Evaluation) -> int:
    counter, features = Counter(encoder), FeatureCache()
    for one in asked:
        one.run(store, say=lambda _: None, features=features)
    return counter.images


def test_images_pass_once_for_probes_that_ask_for_the_same(root, encoder, tmp_path):
    knn = KNN(neighbours=[1, 2])
    asked = [evaluation(probe, encoder, root) for probe in (classification(), knn)]

    assert passes(encoder, ResultStore(tmp_path / "together"), *asked) == TRAIN + VAL

    for one in asked:
        assert passes(encoder, ResultStore(tmp_path / "apart"), one) == TRAIN + VAL
    together, apart = (ResultStore(tmp_path / name).records() for name in ("together", "apart"))
    cells = [(r.task, r.layer, r.metric, r.value, r.ci95) for r in together]
    assert cells == [(r.task, r.layer, r.metric, r.value, r.ci95) for r in apart]
    assert {task for task, *_ in cells} == {"classification", "knn"}


@pytest.mark.parametrize("probe", [KNN(neighbours=[3]), classification()])
def test_little_memory_takes_more_passes_and_gives_the_same(root, probe):
    found, images = [], []
    for gib in (8.0, 1e-9):
        encoder = tiny()
        counter = Counter(encoder)
        some = scored(replace(probe, memory_gib=gib), ClassFolders(root), encoder=encoder)
        found.append({cell: score.value for cell, score in some.items()})
        images.append(counter.images)
    assert found[0] == found[1]
    assert images == [TRAIN + VAL, 2 * (TRAIN + VAL)]


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        # Features of more facets than are needed suffice, features of fewer do not.
        ({"facet": ["cls", "patch_mean"]}, {}, 0),
        ({}, {"facet": ["cls", "patch_mean"]}, TRAIN + VAL),
        ({}, {"crop_share": 0.5}, TRAIN + VAL),
        ({}, {"image_size": 24}, TRAIN + VAL),
        # Other training images vote, but the scored images are the same.
        ({}, {"train_images": 20}, 20),
        ({}, {"dtype": torch.bfloat16}, TRAIN + VAL),
    ],
)
def test_images_pass_again_only_for_other_features(root, encoder, tmp_path, first, second, again):
    dtype = second.pop("dtype", torch.float32)
    one = evaluation(KNN(neighbours=[1], **first), encoder, root)
    asked = [one, evaluation(KNN(neighbours=[2], **second), encoder, root, dtype=dtype)]
    if dtype != torch.float32:
        # The features of another encoder do not serve either.
        asked.insert(1, evaluation(KNN(neighbours=[1]), tiny(seed=1), root))

    assert passes(encoder, ResultStore(tmp_path), *asked) == TRAIN + VAL + again


@pytest.mark.parametrize(("task", "protocol"), [("knn", "dinov2"), ("classification", "dino")])
def test_a_protocol_shows_the_squares_of_its_authors(root, encoder, tmp_path, task, protocol):
    few = ["neighbours=[1]"] if task == "knn" else ["training.epochs=1"]
    words = [f"probe.{word}" for word in (f"protocol={protocol}", "batch_size=5", *few)]
    words[1] = words[1] if task == "knn" else "probe.encoder_batch_size=5"
    (plan,) = plan_probes([task], ["class_folders"], words)
    seen: list[torch.Tensor] = []
    encoder.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))

    passes(encoder, ResultStore(tmp_path), evaluation(plan.probe, encoder, root))

    bicubic = transforms.InterpolationMode.BICUBIC
    theirs = transforms.Compose([transforms.Resize(256, bicubic), transforms.CenterCrop(224)])
    val = ClassFolders(root).val()
    expected = np.array([np.array(theirs(Image.fromarray(val[n].image))) for n in range(len(val))])
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (IMAGENET_MEAN, IMAGENET_STD))
    found = 255 * (torch.cat(seen)[-VAL:] * std + mean).permute(0, 2, 3, 1)
    assert np.abs(found.numpy() - expected).max() < 1.01


def corrupted(root: Path, *corruptions: str) -> list[Dataset]:
    return [corrupt_dataset(ClassFolders(root), Corruption.parse(one)) for one in corruptions]


def test_images_that_are_fitted_to_pass_once_for_all_corruptions(root, encoder, tmp_path):
    datasets = [ClassFolders(root), *corrupted(root, "snow:1", "fog:1", "snow:2")]
    asked = [evaluation(KNN(neighbours=[1]), encoder, root, dataset=one) for one in datasets]

    assert passes(encoder, ResultStore(tmp_path / "together"), *asked) == TRAIN + 4 * VAL

    assert passes(encoder, ResultStore(tmp_path / "apart"), asked[2]) == TRAIN + VAL
    alone = {record.digest: record.value for record in ResultStore(tmp_path / "apart").records()}
    found = {record.digest: record.value for record in ResultStore(tmp_path / "together").records()}
    assert alone.items() <= found.items()


def test_only_features_used_since_the_last_corruption_are_kept(encoder):
    features = FeatureCache()
    features.select(encoder, "segmentation", "photographs")
    features["images"] = "features"
    features.select(encoder, "classification", "others")
    features["images"] = "features"
    for name in ("snow:1", "fog:1", "snow:2"):
        features.select(encoder, "classification", "photographs", name)
        features.setdefault("train", "features")
        features[name] = "features"

    assert set(features) == {"train", "fog:1", "snow:2"}


class Shown:
    """How often each task of a command shows each image to an encoder, told apart by its pixels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_task: dict[str, collections.Counter[bytes]] = {}
        run, extract, task = Evaluation.run, FeatureExtractor.extract_unchecked, list[str]()

        def noting(evaluation: Evaluation, *values: Any, **options: Any) -> Any:
            task[:] = [display_name(evaluation.probe)]
            self.by_task[task[0]] = collections.Counter()
            return run(evaluation, *values, **options)

        def counting(extractor: FeatureExtractor, images: torch.Tensor) -> Any:
            self.by_task[task[0]].update(image.numpy().tobytes() for image in images)
            return extract(extractor, images)

        monkeypatch.setattr(Evaluation, "run", noting)
        monkeypatch.setattr(FeatureExtractor, "extract_unchecked", counting)

    def times(self, task: str) -> list[int]:
        return sorted(self.by_task[task].values())


PROBED = ("--task", "all", "--checkpoint", "encoder.safetensors", "--layer", "1")
FEW = ("dataset.num_train=6", "dataset.num_val=4")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sweep", "python"])
def test_an_image_of_a_folder_passes_once_for_each_task(workdir, monkeypatch, command):
    shown, count = Shown(monkeypatch), 4

    if command == "python":
        ssl_bench.probe(PROBED[3], task="all", dataset="folder", data_root="photos", layer=1)
    else:
        assert main([command, *PROBED, "--dataset", "folder", "--data-root", "photos"]) == 0

    # Each image, and a warp of it or ten crops.
    expected = {"correspondence": 2 * count, "geometry": 11 * count, "tokencut, adaptive": 0}
    assert {task: shown.times(task) for task in shown.by_task} == {
        task: [1] * expected.get(task, count) for task in shown.by_task
    }
    assert {"tokencut", "tokencut, adaptive", "pca", "conditioning"} < shown.by_task.keys()


@pytest.mark.slow
def test_an_image_of_masks_or_classes_passes_once_for_each_task(workdir, monkeypatch):
    shown = Shown(monkeypatch)
    for dataset in ("toy", "toy_objects"):
        assert main(["probe", *PROBED, "--dataset", dataset, *FEW]) == 0
        if dataset == "toy":
            assert len(shown.times("segmentation")) == 10
            assert len(shown.times("discovery")) == 10
            assert not shown.times("tokencut") + shown.times("tokencut, adaptive")
    assert not shown.times("knn")
    assert {times for task in shown.by_task for times in shown.times(task)} == {1}


def cut(out: str, *settings: str, layers: str = "0,1", overwrite: bool = False) -> dict[str, Any]:
    """Run TokenCut in all protocols; return the values, logs and figures that it stored."""
    roots = {"folder": "photos"}
    plan = plan_request(ProbeRequest(["tokencut"], ["folder"], settings, roots, all_tasks=True))
    options = {"layers": layers, "device": torch.device("cpu"), "overwrite": overwrite}
    evaluate(plan, load_encoder("encoder.safetensors"), ResultStore(Path(out)), **options)
    records = ResultStore(Path(out)).records()
    found = {record.digest: (record.value, record.ci95, record.details) for record in records}
    files = (path for path in Path(out, "pictures").rglob("*") if path.is_file())
    return found | {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_protocols_that_share_a_pass_find_what_each_finds_alone(workdir, monkeypatch):
    for protocol in ("adaptive", "reference"):
        apart = cut("apart", f"probe.protocol={protocol}")
    assert len(ResultStore(Path("apart")).records()) == 4
    shown = Shown(monkeypatch)

    assert cut("together") == apart
    assert cut("together", overwrite=True) == apart

    assert shown.times("tokencut") == [1] * 4
    assert not shown.times("tokencut, adaptive")


def test_a_protocol_with_other_blocks_to_do_passes_on_its_own(workdir, monkeypatch):
    cut("results", "probe.protocol=adaptive", layers="1")
    shown = Shown(monkeypatch)

    cut("results")

    assert len(shown.times("tokencut")) == len(shown.times("tokencut, adaptive")) == 4
