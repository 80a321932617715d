"""Small pictures of noise, and a probe that runs over them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.samples import Dataset
from ssl_bench.evaluation import Evaluation, Probe
from ssl_bench.models import Encoder
from ssl_bench.results import Record, ResultStore

# Width and height.
SIZES = {"a": (60, 40), "b": (40, 60), "c": (50, 50)}


def noise_photographs(folder: Path) -> ImageFolder:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, size in SIZES.items():
        small = generator.integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize(size).save(folder / f"{name}.png")
    return ImageFolder(folder)


def evaluated(
    probe: Probe,
    dataset: Dataset,
    store: ResultStore,
    encoder: Encoder,
    layers: Sequence[int],
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
    overwrite: bool = True,
) -> list[Record]:
    cpu = torch.device("cpu")
    evaluation = Evaluation(encoder, dataset, probe, tuple(layers), seed, cpu, torch.float32)
    return evaluation.run(store, say=say, overwrite=overwrite)
