"""Test the normalisation of images in a training run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain.crops.augmentation import normalise
from pretrain.crops.single import SingleCrop
from pretrain.objectives.supervised import Supervised
from pretrain.options import DataOptions
from pretrain.plan import Pretraining
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    identify_encoder,
    load_encoder,
)
from ssl_bench.models.loading.checkpoint import read_metadata
from tests.pretrain.plans import monitored, plan_of

UNIT = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    pixels = np.where(np.indices((16, 16, 3)).sum(0) % 2, 255, 0).astype(np.uint8)
    for split, count in (("train", 4), ("val", 2)):
        for number in range(count):
            folder = root / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            # One pixel differs, because no image may be in both splits.
            own = pixels.copy()
            own[len(split), number] = 255
            Image.fromarray(own).save(folder / f"{number}.png")
    return root


def scaled_plan(root, **data) -> Pretraining:
    whole = SingleCrop((1.0, 1.0), (1.0, 1.0), flip_probability=0.0, num_ops=0)
    plan = plan_of(root, objective=Supervised(crops=whole), data=data, max_steps=2)
    return monitored(plan, accuracy_epochs=1, crop_share=1.0)


def test_the_default_normalisation_is_that_of_imagenet():
    default = build(compose_config("pretraining", [])).data.normalization
    assert default == DataOptions().normalization == (IMAGENET_MEAN, IMAGENET_STD)


def test_a_checkpoint_states_its_normalisation(root, tmp_path):
    scaled_plan(root, **UNIT).run(tmp_path / "unit", device="cpu")
    scaled_plan(root).run(tmp_path / "plain", device="cpu")

    unit, plain = (load_encoder(str(tmp_path / name)) for name in ("unit", "plain"))
    assert (unit.mean, unit.std) == (UNIT["mean"], UNIT["std"])
    assert (plain.mean, plain.std) == (IMAGENET_MEAN, IMAGENET_STD)
    for encoder, name in ((unit, "unit"), (plain, "plain")):
        assert identify_encoder(str(tmp_path / name)).identity() == encoder.identity()
    assert not {"mean", "std"} & read_metadata(tmp_path / "plain/last.safetensors").keys()
    start = str(tmp_path / "unit")
    for name in (None, "mean", "std"):
        part = {} if name is None else {name: UNIT[name]}
        with pytest.raises(ConfigurationError) as caught:
            replace(scaled_plan(root, **part), init_from=start).run(
                tmp_path / "other", device="cpu"
            )
        assert caught.value.hint == ("data.mean=[0.0,0.0,0.0]", "data.std=[1.0,1.0,1.0]")
    replace(scaled_plan(root, **UNIT), init_from=start).run(tmp_path / "same", device="cpu")


def test_training_and_monitor_use_the_same_normalisation(root, tmp_path, monkeypatch):
    ranges = {"pretrain.monitor": [], "pretrain.crops.single": []}
    for module, values in ranges.items():

        def record_range(images, colours, values=values):
            values.append(tuple(value.item() for value in normalise(images, colours).aminmax()))
            return images

        monkeypatch.setattr(f"{module}.normalise", record_range)
    scaled_plan(root, **UNIT).run(tmp_path / "run", device="cpu")
    for values in ranges.values():
        # Memory is measured with a black image.
        assert {*values} - {(0.0, 0.0)} == {(0.0, 1.0)}
