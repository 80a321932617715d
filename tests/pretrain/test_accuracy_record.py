"""A finished supervised run leaves its accuracy as a record."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from pretrain.checkpoints import ENCODER, LOG
from pretrain.crops.single import SingleCrop
from pretrain.monitor import Monitor, recipe_of
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import DataOptions, TrainOptions
from pretrain.schedules import Timeline
from pretrain.train import Pretraining
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ViTConfig, load_encoder
from ssl_bench.results import ResultStore


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Eight training and five test pictures, red or blue; one of these lies in the wrong folder."""
    root = tmp_path_factory.mktemp("data") / "MNIST"
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 5)):
        for number in range(count):
            is_red = number % 2 == 0
            name = "red" if is_red != ((split, number) == ("test", 0)) else "blue"
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            colour = np.array((230, 10, 10) if is_red else (10, 10, 230))
            pixels = colour + generator.integers(-9, 10, (16, 16, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def plan_of(root, **monitor) -> Pretraining:
    return Pretraining(
        model=ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2),
        objective=Supervised(label_smoothing=0.0, crops=SingleCrop(num_ops=0)),
        optimizer=AdamW(lr=0.5),
        data=DataOptions(root=str(root), labels=True),
        train=TrainOptions(epochs=5, batch_size=4, num_workers=0, seed=3, max_grad_norm=None),
        monitor=Monitor(accuracy_epochs=1, crop_share=1.0, **monitor),
    )


def the_record(folder):
    (record,) = ResultStore(folder).records()
    return record


def test_the_record_has_the_value_of_the_log_and_the_images_that_were_right(root, tmp_path):
    path = plan_of(root, results=str(tmp_path / "results")).run(tmp_path / "run", device="cpu")

    store, record = ResultStore(tmp_path / "results"), the_record(tmp_path / "results")
    last = json.loads((tmp_path / "run" / LOG).read_text().splitlines()[-1])
    assert record.value == last["val_top1"] == 80.0
    # The classes are told apart by their colour, so the picture in the wrong folder is not right.
    ids = store.image_ids(record.dataset_fingerprint)
    hits = store.per_image(record)
    assert ids is not None
    assert hits is not None
    assert [name for name, hit in zip(ids, hits, strict=True) if not hit] == ["blue/0.png"]
    assert (record.task, record.dataset, record.split) == ("supervised", "mnist", "test")
    assert (record.metric, record.num_images, record.seed) == ("top1", 5, 3)
    assert (record.layer, record.depth) == (1, 2)
    assert record.checkpoint_sha256 == load_encoder(str(path)).sha256
    assert record.ci95 is not None
    assert record.ci95[0] < 80 < record.ci95[1] <= 100
    assert record.details["training"] == "5 epochs, batch 4, AdamW at 0.0078125"
    assert record.details["configuration"]["model"]["depth"] == 2
    assert str(root) not in json.dumps(record.as_json())


def test_a_run_that_was_finished_before_leaves_it_when_it_is_resumed(root, tmp_path):
    plan_of(root).run(tmp_path / "run", device="cpu")
    weights = (tmp_path / "run" / ENCODER).read_bytes()
    assert not (tmp_path / "results").exists()

    later = plan_of(root, results=str(tmp_path / "results"))
    later.run(tmp_path / "run", resume=True, device="cpu")

    assert the_record(tmp_path / "results").value == 80.0
    assert (tmp_path / "run" / ENCODER).read_bytes() == weights


def test_a_run_on_its_way_leaves_none(root, tmp_path):
    plan = plan_of(root, results=str(tmp_path / "results"))
    short = replace(plan, train=replace(plan.train, max_minutes=0.0))

    short.run(tmp_path / "run", device="cpu")

    assert not (tmp_path / "results").exists()


def test_fewer_images_are_other_data(root, tmp_path):
    plan = plan_of(root, results=str(tmp_path / "all"))
    plan.run(tmp_path / "run", device="cpu")
    few = replace(plan, monitor=replace(plan.monitor, val_images=3, results=str(tmp_path / "few")))

    few.run(tmp_path / "run", resume=True, device="cpu")

    whole, part = the_record(tmp_path / "all"), the_record(tmp_path / "few")
    assert part.num_images == 3
    assert part.dataset_fingerprint != whole.dataset_fingerprint
    ids = ResultStore(tmp_path / "few").image_ids(part.dataset_fingerprint)
    assert ids is not None
    assert len(ids) == 3


def test_the_recipe_names_what_was_trained_and_not_what_was_planned():
    plan = {
        "train": {"epochs": 100, "max_steps": 3, "batch_size": 512},
        "optimizer": {"_target_": "pretrain.optimizers.recipes.Soap", "lr": 0.005},
    }

    assert recipe_of(plan, Timeline(3, 4)) == "0.75 epochs, batch 512, Soap at 0.01"
    tuned = recipe_of(plan | {"init_from_sha256": "0123456789abcdef"}, Timeline(400, 4))
    assert tuned == "100 epochs, batch 512, Soap at 0.01, from weights 01234567"


def test_results_need_an_accuracy():
    with pytest.raises(ConfigurationError, match=r"monitor.results=DIR needs monitor.accuracy"):
        Monitor(results="results")


def test_it_stands_beside_the_published_value_and_in_a_report(root, tmp_path, capsys):
    plan = plan_of(root, results=str(tmp_path / "results"))
    plan.run(tmp_path / "run", device="cpu")
    out = ["--out", str(tmp_path / "results")]

    mapped = f"ViT, no skip={tmp_path / 'run'}"
    assert main(["table", *out, "--paper", "mnist", "--as", mapped, "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert r"| ViT, no skip | 94.6 \| 80.0" in printed
    assert "published on 10,000 images if all were used; here: 5 images of mnist test" in printed
    assert "its own head after 5 epochs, batch 4, AdamW at 0.0078125, 16 px" in printed
    assert main(["table", *out, "--task", "supervised"]) == 0
    assert "supervised: top1 (%) on mnist test" in capsys.readouterr().out
    assert main(["report", *out, "--into", str(tmp_path / "report")]) == 0
