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
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD, Encoder
from ssl_bench.planning import plan_probes
from ssl_bench.results import ResultStore
from tests.support import heads
from tests.support.coloured_classes import scored, tiny
from tests.support.colours import Counter
from tests.support.faults import encoder_file, photo_folder

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
        # More than is asked for is enough, less is not.
        ({"facet": ["cls", "patch_mean"]}, {}, 0),
        ({}, {"facet": ["cls", "patch_mean"]}, TRAIN + VAL),
        ({}, {"crop_share": 0.5}, TRAIN + VAL),
        ({}, {"image_size": 24}, TRAIN + VAL),
        # Other training images vote, the same ones are asked about.
        ({}, {"train_images": 20}, 20),
    ],
)
def test_what_differs_passes_again(root, encoder, tmp_path, first, second, again):
    probes = [KNN(neighbours=[1], **first), KNN(neighbours=[2], **second)]
    asked = [evaluation(probe, encoder, root) for probe in probes]

    assert passes(encoder, ResultStore(tmp_path), *asked) == TRAIN + VAL + again


def test_another_encoder_or_arithmetic_has_features_of_its_own(root, encoder, tmp_path):
    other = tiny(seed=1)
    features, store = FeatureCache(), ResultStore(tmp_path)
    counters = [Counter(encoder), Counter(other)]
    for one, dtype in ((encoder, "float32"), (other, "float32"), (encoder, "bfloat16")):
        knn = evaluation(KNN(neighbours=[1]), one, root, dtype=getattr(torch, dtype))
        knn.run(store, say=lambda _: None, features=features)

    assert [counter.images for counter in counters] == [2 * (TRAIN + VAL), TRAIN + VAL]


@pytest.mark.parametrize(
    ("task", "protocol"),
    [("knn", "dinov2"), ("classification", "dinov2"), ("classification", "dino")],
)
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


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    return photo_folder(tmp_path / "photos")


def cut_records() -> dict[str, Any]:
    """What both protocols of TokenCut found, by the files of records, logs and pictures."""
    values = {
        record.digest: (record.value, record.ci95, record.details)
        for record in ResultStore(Path("results")).records()
        if record.task == "tokencut"
    }
    files = {
        str(path): path.read_bytes()
        for path in Path("results/pictures/tokencut").rglob("*")
        if path.is_file()
    }
    return {"values": values, "files": files}


@pytest.mark.parametrize("command", ["probe", "sweep", "python"])
def test_an_image_of_a_folder_passes_once_for_each_task(photos, monkeypatch, command):
    count, shown = len(list(photos.iterdir())), Shown(monkeypatch)
    words = (*PROBED, "--dataset", "folder", "--data-root", str(photos))

    if command == "python":
        asked: dict[str, Any] = {"dataset": "folder", "data_root": photos, "layer": 1}
        ssl_bench.probe("encoder.safetensors", task="all", **asked)
    else:
        assert main([command, *words]) == 0

    # Each image, and a warp of it or ten crops.
    expected = {"correspondence": 2 * count, "geometry": 11 * count, "tokencut, adaptive": 0}
    assert {task: shown.times(task) for task in shown.by_task} == {
        task: [1] * expected.get(task, count) for task in shown.by_task
    }
    assert {"tokencut", "tokencut, adaptive", "pca", "conditioning"} < shown.by_task.keys()


@pytest.mark.slow
def test_an_image_of_masks_or_classes_passes_once_for_each_task(photos, monkeypatch):
    shown = Shown(monkeypatch)
    for dataset in ("toy", "toy_objects"):
        assert main(["probe", *PROBED, "--dataset", dataset, *FEW]) == 0
        if dataset == "toy":
            # Those that are drawn pass once more.
            assert shown.times("segmentation") == [1] * 6 + [2] * 4
            assert len(shown.times("discovery")) == 10
            assert not shown.times("tokencut") + shown.times("tokencut, adaptive")
            del shown.by_task["segmentation"]
    assert not shown.times("knn")
    assert {times for task in shown.by_task for times in shown.times(task)} == {1}


def test_protocols_that_share_a_pass_find_what_each_finds_alone(photos):
    words = ("--checkpoint", "encoder.safetensors", "--dataset", "folder", "--layer", "0,1")
    words = (*words, "--data-root", str(photos), "--pictures", "1")
    for protocol in ("adaptive", "reference"):
        alone = ("--task", "tokencut", f"probe.protocol={protocol}")
        assert main(["probe", *alone, *words]) == 0
    apart = cut_records()
    assert len(apart["values"]) == 4
    Path("results").rename("apart")

    assert main(["probe", "--task", "all", *words]) == 0

    assert cut_records() == apart


def test_overwriting_passes_images_once_more_and_ends_with_whole_logs(photos, monkeypatch):
    words = ("probe", *PROBED, "--dataset", "folder", "--data-root", str(photos))
    assert main([*words]) == 0
    before, shown = cut_records(), Shown(monkeypatch)

    assert main([*words, "--overwrite"]) == 0

    assert len(shown.times("tokencut")) == len(list(photos.iterdir()))
    assert not shown.times("tokencut, adaptive")
    assert cut_records() == before


def test_a_protocol_with_other_blocks_to_do_passes_on_its_own(photos, monkeypatch):
    """What one protocol has finished is not searched again for the other."""
    words = ("--checkpoint", "encoder.safetensors", "--dataset", "folder")
    words = (*words, "--data-root", str(photos))
    first = ("--task", "tokencut", "probe.protocol=adaptive", "--layer", "1")
    assert main(["probe", *first, *words]) == 0
    shown = Shown(monkeypatch)

    assert main(["probe", "--task", "all", "--layer", "0,1", *words]) == 0

    assert len(shown.times("tokencut")) == len(shown.times("tokencut, adaptive"))
