"""Test that cached files are reused only for the same settings and data.

Most functions in this file return the name of a cached file. The argument `facts` contains probe
settings and properties of the dataset.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from probes.depth.probe import Depth
from probes.knn import KNN
from probes.segmentation import SegmentationRun
from probes.tokencut.probe import TokenCut
from ssl_bench.data.layouts.toy import Toy
from ssl_bench.data.samples import Sample
from ssl_bench.evaluation import Evaluation, ProbeContext
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from tests.support.colours import quick_probe
from tests.support.photographs import context_of

pytestmark = pytest.mark.slow

TINY = ViTConfig(image_size=16, patch_size=8, dim=12, depth=4, num_heads=2)
Facts = Mapping[str, Any]


class Change(NamedTuple):
    """New settings that must lead to a new name of the cached file."""

    changed: Facts
    # Facts that are set both before and after the change.
    usual: Facts = {}  # noqa: RUF012


@dataclass(frozen=True)
class Pictures:
    """A set of four images with annotations for every task."""

    name: str = "pictures"
    split: str = "some"
    stamp: str = "f00d"  # The fingerprint.
    prefix: str = ""
    class_names: tuple[str, ...] = ("dark", "bright")
    labels: tuple[int, ...] = (0, 1, 0, 1)
    has_depth: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}{index}" for index in range(4))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        mask = np.tile(np.array([index % 2, 1 - index % 2], np.uint8).repeat(8), (16, 1))
        noise = np.random.default_rng(index).integers(0, 90, (16, 16, 3), dtype=np.uint8)
        image = (noise + 100 * mask[..., None]).astype(np.uint8)
        boxes = np.array([[0.0, 0.0, 8.0, 8.0]])
        depth = (1 + mask).astype(np.float32) if self.has_depth else None
        return Sample(self.ids[index], image, mask, boxes=boxes, label=index % 2, depth=depth)

    def fingerprint(self) -> str:
        return self.stamp


@dataclass(frozen=True)
class Data:
    trained: Pictures
    scored: Pictures
    name: str = "pictures"
    supports: frozenset[str] = frozenset({"segmentation", "classification", "discovery"})

    def train(self) -> Pictures:
        return self.trained

    def val(self) -> Pictures:
        return self.scored

    images = discovery = val


def context(folder: Path, facts: Facts) -> ProbeContext:
    def select(*names: str) -> dict[str, Any]:
        return {name: facts[name] for name in names if name in facts}

    def pictures(part: str) -> Pictures:
        given = {name.removeprefix(f"{part}_"): value for name, value in facts.items()
                 if name.startswith(f"{part}_")}  # fmt: skip
        return Pictures(**given)

    encoder = encoder_from_model(build_vit(TINY, seed=facts.get("weights", 0)), name="tiny")
    return context_of(
        replace(encoder, **select("mean", "std", "architecture")),
        Data(pictures("train"), pictures("val")),
        facts.get("layers", (0, 1, 2, 3)),
        folder / "pictures",
        **select("dtype", "seed"),
    )


def probe_options(facts: Facts, **usual: Any) -> dict[str, Any]:
    own = {n.removeprefix("probe."): v for n, v in facts.items() if n.startswith("probe.")}
    return {**usual, **own}


def discovery_log(folder: Path, facts: Facts) -> str:
    list(TokenCut(**probe_options(facts, panels=0)).run(context(folder, facts)))
    (path,) = folder.glob("pictures/*/images_*.jsonl")
    # The key "entry" identifies the image of a line and its settings.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return f"{path.name} {sorted({line['entry'] for line in lines if 'entry' in line})}"


def features(folder: Path, facts: Facts) -> str:
    usual = {"tier": "disk", "cache": str(folder), "image_size": 16, "holdout": 0.0}
    probe = quick_probe(**probe_options(facts, **usual))
    SegmentationRun(probe, context(folder, facts)).features()
    (path,) = (folder / "features").glob("*.npy")
    return path.name


def name_after_first_score(prefix: str) -> Callable[[Path, Facts], str]:
    def name(folder: Path, facts: Facts) -> str:
        usual = {"tier": "memory", "cache": str(folder), "image_size": 16, "holdout": 0.25}
        sgd = {"epochs": 1, "learning_rates": [1e-3]} if "probe.training" not in facts else {}
        options = probe_options(facts, **usual, **sgd, keep_minutes=0.0)
        next(quick_probe(**options).run(context(folder, facts)))
        (path,) = (folder / "heads").glob(f"{prefix}_*.jsonl")
        return path.name

    return name


def depth_heads(folder: Path, facts: Facts) -> str:
    usual = {"cache": str(folder), "image_size": 16, "holdout": 0.25, "epochs": 1, "panels": 0}
    options = probe_options(facts, **usual, learning_rates=[1e-3], keep_minutes=0.0)
    scenes = context(folder, {**facts, "train_has_depth": True, "val_has_depth": True})
    next(Depth(**options).run(scenes))
    (path,) = (folder / "heads").glob("depth_*.jsonl")
    return path.name


def shared_features(folder: Path, facts: Facts) -> str:
    shared = context(folder, facts)
    list(KNN(**probe_options(facts, neighbours=[1], num_workers=1)).run(shared))
    return str(next(iter(shared.features)))


def records(folder: Path, facts: Facts) -> str:
    run_context = context(folder, {**facts, "layers": (1,)})
    shared = {name: getattr(run_context, name) for name in ("encoder", "dataset", "layers", "seed")}
    probe = KNN(**probe_options(facts, neighbours=[1], num_workers=1))
    run = Evaluation(probe=probe, **shared, device=run_context.device, dtype=run_context.dtype)
    run.run(ResultStore(folder), say=lambda _: None)
    return min(path.name for path in folder.glob("records/**/*top1*.json"))


def toy_scenes(folder: Path, facts: Facts) -> str:
    kind = facts.get("kind", "toy")
    options = {n: value for n, value in facts.items() if "." not in n and n != "kind"}
    return Toy(cache=folder, **options).generate_once(kind, lambda _: None).name


ENCODER = {
    "weights": 1,
    "architecture": {"kind": "another use of these weights"},
    "mean": (0.5, 0.4, 0.3),
    "std": (0.5, 0.4, 0.3),
    "dtype": torch.bfloat16,
}
# The other caches identify the encoder by the same function as the stored features.
SHORT = {name: ENCODER[name] for name in ("weights", "mean")}
CACHES: dict[str, tuple[Callable[[Path, Facts], str], dict[str, Any]]] = {
    "log of discovery": (
        discovery_log,
        {
            **ENCODER,
            "val_stamp": "beef",
            "probe.tau": 0.3,
            "probe.eps": 1e-4,
            "probe.method": "lost",
            "probe.longer_side": 24,
            "probes.tokencut.probe.__version__": "0.0.0",
            "probes.tokencut.probe._LOG_FORMAT": 99,
        },
    ),
    "features": (
        features,
        {
            **ENCODER,
            "layers": (0, 1, 3),
            "other layers": Change({"layers": (0, 2, 3)}, {"layers": (0, 1, 3)}),
            "train_stamp": "beef",
            "train_name": "others",
            "train_split": "other",
            "train_prefix": "other",
            "drawn": Change({"seed": 1}, {"probe.train_images": 2}),
            "probe.facet": "key",
            "probe.norm": "final",
            "probe.image_size": 24,
            "probe.views": 2,
            "probe.crops": "resized",
            "seed of crops": Change({"seed": 1}, {"probe.crops": "resized"}),
            "probes.features.tiers.VERSION": 99,
        },
    ),
    "heads": (
        name_after_first_score("heads"),
        {
            **SHORT,
            "train_stamp": "beef",
            "train_prefix": "other",
            "sources": Change({"probe.layers_mode": "last4"}),
            "probe.holdout": 0.5,
            "probe.learning_rates": [1e-3, 1e-1],
            "probe.epochs": 2,
            "probe.batch_size": 3,
            "probe.loss": "histogram",
            "seed": 1,
        },
    ),
    "counts": (
        name_after_first_score("counts"),
        {
            **SHORT,
            "train_stamp": "beef",
            "val_stamp": "beef",
            "val_prefix": "other",
            "sources": Change({"probe.layers_mode": "last4"}),
            "probe.holdout": 0.5,
            "probe.learning_rates": [1e-3, 1e-1],
            "probe.score_size": 8,
            "refit": Change(
                {"probe.refit": True},
                {"probe.training": "lbfgs", "probe.c_values": [1.0], "probe.max_iterations": 2},
            ),
        },
    ),
    "heads of depth": (
        depth_heads,
        {
            **SHORT,
            "dtype": torch.bfloat16,
            "layers": (0, 1),
            "train_stamp": "beef",
            "seed": 1,
            "probe.facet": "key",
            "probe.holdout": 0.5,
            "probe.image_size": 24,
            "probe.max_depth": 9.0,
        },
    ),
    "features shared by probes": (
        shared_features,
        {
            **SHORT,
            "train_stamp": "beef",
            "drawn": Change({"seed": 1}, {"probe.train_images": 2}),
            "probe.image_size": 24,
            "probe.crop_share": 0.5,
        },
    ),
    "records": (
        records,
        {
            **ENCODER,
            "val_stamp": "beef",
            "train_stamp": "beef",
            "train_split": "other",
            "val_split": "other",
            "val_name": "others",
            "seed": 1,
            "probe.crop_share": 0.5,
            "probe.temperature": 0.1,
            "probe.protocol": "dinov2",
        },
    ),
    "toy scenes": (
        toy_scenes,
        {
            "num_train": 7,
            "num_val": 7,
            "seed": 7,
            "kind": "other",
            "ssl_bench.data.layouts.toy.VERSION": 99,
        },
    ),
}


@pytest.mark.parametrize("cache", CACHES)
def test_cache_names_depend_on_every_relevant_fact(tmp_path, monkeypatch, cache):
    compute_name, facts = CACHES[cache]
    numbers, usual_names = count(), dict[str, str]()

    def name_in_new_folder(facts: Facts) -> str:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        return compute_name(folder, facts)

    for fact, value in facts.items():
        changed, usual = value if isinstance(value, Change) else Change({fact: value})
        if str(usual) not in usual_names:
            usual_names[str(usual)] = name_in_new_folder(usual)
            assert name_in_new_folder(usual) == usual_names[str(usual)]
        with monkeypatch.context() as patch:
            if fact.startswith(("probes.", "ssl_bench.")):
                patch.setattr(fact, value)
                changed = {}
            assert name_in_new_folder({**usual, **changed}) != usual_names[str(usual)], fact
