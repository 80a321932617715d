"""What `data.root` may be, and that a run does not depend on it."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pretrain.crops.multi import MultiCrop
from pretrain.objectives.dino import Dino
from pretrain.options import DataOptions, TrainOptions
from pretrain.runtime.folder import ENCODER, LOG
from pretrain.train import Pretraining
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ViTConfig


@pytest.fixture(scope="module")
def album(tmp_path_factory) -> Path:
    """Thirteen pictures of two classes in train/, and all of it in two archives."""
    root = tmp_path_factory.mktemp("album")
    generator = np.random.default_rng(0)
    with (
        tarfile.open(root / "first.tar", "w") as first,
        tarfile.open(root / "second.tar.gz", "w:gz") as second,
    ):
        for number in range(13):
            path = root / f"train/class{number % 2}/{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((24, 20)).save(path)
            (first if number < 5 else second).add(path, path.relative_to(root))
    return root


def plan_of(data: DataOptions, **train: Any) -> Pretraining:
    options: dict[str, Any] = {"batch_size": 2, "max_steps": 8, "num_workers": 0} | train
    return Pretraining(
        model=ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2),
        objective=Dino(out_dim=32, hidden_dim=16, bottleneck_dim=8, crops=MultiCrop(num_locals=2)),
        data=data,
        train=TrainOptions(**options),
    )


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / LOG).read_text().splitlines()]


@pytest.mark.parametrize("encoded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_archives_as_it_would_from_their_folder(album, tmp_path, encoded):
    folder = DataOptions(root=f"{album}/train")
    root = f"{album}/{{first.tar,second.tar.gz}}/train"
    archives = DataOptions(root, in_memory=True, keep_encoded=encoded)
    assert archives.decodes_once != encoded
    plan_of(folder).run(tmp_path / "whole", device="cpu")
    plan_of(folder, max_minutes=0.0).run(tmp_path / "stopped", device="cpu")
    assert len(losses(tmp_path / "stopped")) == 1

    plan_of(archives, num_workers=1).run(tmp_path / "stopped", device="cpu", resume=True)

    one, other = (tmp_path / name for name in ("whole", "stopped"))
    assert losses(one) == losses(other)
    assert (one / ENCODER).read_bytes() == (other / ENCODER).read_bytes()


def test_labels_come_from_folders_and_archives_alike(album):
    archives = f"{album}/{{first.tar,second.tar.gz}}/train"
    folder, packed = (
        DataOptions(root, in_memory=True, labels=True).open() for root in (str(album), archives)
    )

    assert folder.class_names == packed.class_names == ("class0", "class1")
    assert folder.ids == packed.ids
    assert [s.label for s in folder] == [s.label for s in packed] == [0] * 7 + [1] * 6
    assert DataOptions(archives, in_memory=True).open()[0].label is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"keep_encoded": True}, "data.keep_encoded=true needs data.in_memory=true"),
        (
            {"root": ".", "in_memory": True, "keep_encoded": True},
            "keep_encoded=true is for archives; .* system's own cache",
        ),
        ({"labels": True}, r"data\.labels=true.* needs .* data\.root=DIR"),
    ],
)
def test_what_cannot_be_kept_or_labelled_is_refused(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        DataOptions(**options).open()
