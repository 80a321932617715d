"""Create segmentation images that consist of two coloured halves."""

import collections
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probes.segmentation import Segmentation
from ssl_bench.data.samples import Sample, unsupported_role_error
from ssl_bench.evaluation import ProbeContext
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from tests.support.heads import segmentation
from tests.support.photographs import context_of

CLASS_NAMES = ("red", "green", "blue", "never")
SIZES = ((24, 32), (32, 24), (40, 28))
QUICK: dict[str, Any] = {
    "learning_rates": [1e-3, 1e-2, 3e-2],
    "epochs": 8,
    "batch_size": 4,
    "image_size": 32,
    "panels": 0,
    "num_workers": 1,
}


@dataclass
class Colours:
    """A dataset of images with two halves. The colour of each half depends on its class."""

    split: str
    count: int
    first: int = 0  # shifts the classes of the left halves
    name: str = "colours"
    class_names: tuple[str, ...] = CLASS_NAMES
    # Class that fills the whole mask, by image index.
    masks: dict[int, int] = field(default_factory=dict)
    stamp: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"{self.split}/{index}" for index in range(self.count))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        height, width = SIZES[index % len(SIZES)]
        classes = ((index + self.first) % 3, (index // 3) % 3)
        mask = np.full((height, width), classes[0], np.uint8)
        mask[:, width // 2 :] = classes[1]
        noise = np.random.default_rng(index).integers(0, 40, (height, width, 3))
        image = (noise + 200 * np.eye(3)[mask]).astype(np.uint8)
        mask[:2] = 255
        if index in self.masks:
            mask[:] = self.masks[index]
        return Sample(self.ids[index], image, mask)

    def fingerprint(self) -> str:
        return f"{self.split} {self.count} {self.stamp}"


@dataclass
class ColourDataset:
    name: str = "colours"
    supports: frozenset[str] = frozenset({"segmentation"})
    num_train: int = 18
    num_val: int = 7
    masks: dict[int, int] = field(default_factory=dict)
    val_masks: dict[int, int] = field(default_factory=dict)
    stamp: str = ""

    def train(self) -> Colours:
        return Colours("train", self.num_train, masks=self.masks, stamp=self.stamp)

    def val(self) -> Colours:
        return Colours("val", self.num_val, first=1, masks=self.val_masks)

    def discovery(self) -> Colours:
        raise unsupported_role_error(self.name, "discovery")

    def images(self) -> Colours:
        raise unsupported_role_error(self.name, "images")


def tiny_encoder(seed: int = 0) -> Encoder:
    config = ViTConfig(image_size=32, patch_size=8, dim=24, depth=4, num_heads=2)
    return encoder_from_model(build_vit(config, seed=seed), name="tiny")


def probe_context(
    folder: Path,
    encoder: Encoder | None = None,
    dataset: ColourDataset | None = None,
    layers: tuple[int, ...] = (0, 1, 3),
    seed: int = 0,
) -> ProbeContext:
    data = dataset or ColourDataset()
    return context_of(encoder or tiny_encoder(), data, layers, folder / "pictures", seed=seed)


class Counter:
    """A counter of the images that an encoder processes."""

    def __init__(self, encoder):
        self.passes = collections.Counter()
        encoder.module.register_forward_pre_hook(self._count)

    @property
    def images(self) -> int:
        return self.passes.total()

    def _count(self, _module, inputs):
        self.passes.update(image.numpy().tobytes() for image in inputs[0])


def quick_probe(**changes: Any) -> Segmentation:
    return segmentation(QUICK, **changes)


def score_values(scores):
    return {(score.layer, score.metric): score.value for score in scores}
