"""What the README shows is run as it stands there."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.evaluation import Evaluation, Probe, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_probe_of_the_readme_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {
        "dataclass": dataclass,
        "FeatureExtractor": FeatureExtractor,
        "Score": Score,
        "torch": torch,
        "__name__": __name__,
    }
    exec(code, names)
    Image.fromarray(np.full((20, 30, 3), 90, np.uint8)).save(tmp_path / "a.png")
    config = ViTConfig(image_size=16, patch_size=8, dim=12, depth=2, num_heads=2)
    encoder = encoder_from_model(build_vit(config, seed=0), name="tiny")

    probe = names["Norms"]()
    assert isinstance(probe, Probe)
    evaluation = Evaluation(
        encoder=encoder,
        dataset=ImageFolder(tmp_path),
        probe=probe,
        layers=(0, 1),
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    records = evaluation.run(ResultStore(tmp_path / "out"), say=lambda _: None)

    assert [record.layer for record in records] == [0, 1]
    assert all(record.value > 0 for record in records)
