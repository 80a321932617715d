"""Create class folders of coloured images and a small encoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from tests.support.photographs import context_of

COLOURS = ((250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250), (250, 0, 250))
TINY = ViTConfig(image_size=16, patch_size=8, dim=12, depth=3, num_heads=2)


def coloured_classes(root: Path, *, train: int = 5, val: int = 2, noise: int = 90) -> Path:
    """Create a dataset in which each class has its own colour."""
    generator = np.random.default_rng(0)
    for name, colour in enumerate(COLOURS):
        for split, count in (("train", train), ("val", val)):
            folder = root / split / f"class{name}"
            folder.mkdir(parents=True)
            for number in range(count):
                offsets = generator.integers(-noise, noise, (20, 26, 3))
                pixels = np.clip(np.array(colour) + offsets, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def select_train_images(root: Path, kept: Sequence[int]) -> ClassFolders:
    """Return the dataset in `root` with a subset of its training images."""
    dataset = ClassFolders(root)
    some = dataset.train().select("class_folders", list(kept))
    object.__setattr__(dataset, "train", lambda: some)
    return dataset


def tiny(seed: int = 0) -> Encoder:
    return encoder_from_model(build_vit(TINY, seed=seed), name="tiny")


def build_constant_encoder(value: float = 1.0) -> Encoder:
    """Return an encoder whose final features are constant."""
    model = build_vit(TINY, seed=0)
    torch.nn.init.zeros_(model.get_parameter("norm.weight"))
    torch.nn.init.constant_(model.get_parameter("norm.bias"), value)
    return encoder_from_model(model, name="flat")


def class_context(
    dataset: Any, encoder: Encoder | None = None, layers: Sequence[int] = (2, 0), **changes: Any
) -> ProbeContext:
    return context_of(encoder or tiny(), dataset, layers, Path("nowhere"), **changes)


def run_probe(probe: Any, dataset: Any, **changes: Any) -> dict[tuple[int, str, str], Score]:
    """Run a probe and check that it returns all expected scores."""
    # It must announce exactly these scores.
    context = class_context(dataset, **changes)
    scores = {(s.layer, s.facet, s.metric): s for s in probe.run(context)}
    assert sorted(scores) == sorted(probe.list_score_keys(context.layers))
    return scores
