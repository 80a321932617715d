"""How often an image passes the encoder for several probes of one command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from probes.knn import KNN
from ssl_bench.data.corruptions import Corruption, corrupted_dataset
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.samples import Dataset
from ssl_bench.evaluation import Evaluation, PassedImages, Probe
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD, Encoder
from ssl_bench.planning import plan_probes
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
    counter, passed = Counter(encoder), PassedImages()
    for one in asked:
        one.run(store, say=lambda _: None, passed=passed)
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
    passed, store = PassedImages(), ResultStore(tmp_path)
    counters = [Counter(encoder), Counter(other)]
    for one, dtype in ((encoder, "float32"), (other, "float32"), (encoder, "bfloat16")):
        knn = evaluation(KNN(neighbours=[1]), one, root, dtype=getattr(torch, dtype))
        knn.run(store, say=lambda _: None, passed=passed)

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
    return [corrupted_dataset(ClassFolders(root), Corruption.of(one)) for one in corruptions]


def test_images_that_are_fitted_to_pass_once_for_all_corruptions(root, encoder, tmp_path):
    datasets = [ClassFolders(root), *corrupted(root, "snow:1", "fog:1", "snow:2")]
    asked = [evaluation(KNN(neighbours=[1]), encoder, root, dataset=one) for one in datasets]

    assert passes(encoder, ResultStore(tmp_path / "together"), *asked) == TRAIN + 4 * VAL

    assert passes(encoder, ResultStore(tmp_path / "apart"), asked[2]) == TRAIN + VAL
    alone = {record.digest: record.value for record in ResultStore(tmp_path / "apart").records()}
    found = {record.digest: record.value for record in ResultStore(tmp_path / "together").records()}
    assert alone.items() <= found.items()


def test_of_the_last_corruption_but_one_only_what_was_asked_for_since_is_held(encoder):
    passed, held = PassedImages(), {}
    # And nothing once probes of other images follow.
    passed.of(encoder, "segmentation", "photographs")["images"] = "features"
    passed.of(encoder, "classification", "others")["images"] = "features"
    for name in ("snow:1", "fog:1", "snow:2"):
        held = passed.of(encoder, "classification", "photographs", name)
        held.setdefault("train", "features")
        held[name] = "features"

    assert set(held) == {"train", "fog:1", "snow:2"}
