"""Create small noise images and run probes on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.samples import Dataset
from ssl_bench.evaluation import Evaluation, Probe, ProbeContext
from ssl_bench.models import Encoder
from ssl_bench.results import Record, ResultStore

# Width and height in pixels.
SIZES = {"a": (60, 40), "b": (40, 60), "c": (50, 50)}


def noise_photographs(folder: Path, sizes: Mapping[str, tuple[int, int]] = SIZES) -> ImageFolder:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, size in sizes.items():
        small = generator.integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize(size).save(folder / f"{name}.png")
    return ImageFolder(folder)


def silent(items: Iterable, description: str, total: int | None = None) -> Iterable:
    return items


def context_of(
    encoder: Encoder, dataset: Any, layers: Sequence[int], folder: Path, **changes: Any
) -> ProbeContext:
    silence: dict[str, Any] = {"progress": silent, "say": lambda _: None}
    return ProbeContext(encoder, dataset, tuple(layers), artifacts=folder, **{**silence, **changes})


def evaluate_probe(
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
