"""How often the host waits for the device in each unit of work; no more than is said here."""

import io
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pretrain import resources
from pretrain.crops.multi import MultiCrop
from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe, Soap
from pretrain.options import TrainOptions
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from probes.features.image import ImagePass
from probes.features.stream import KeptState
from probes.heads.logistic import minimise
from probes.heads.scored_images import ImageCounts
from probes.knn import KNN
from probes.pca import PCA, features_of
from probes.retrieval import Retrieval
from probes.segmentation import Segmentation, SegmentationRun
from probes.tokencut.probe import TokenCut, find_in_batch
from ssl_bench.cli.__main__ import main
from ssl_bench.data.samples import Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from tests.benchmarks.pretrain import Setting
from tests.device.runs import OBJECTIVES, SMALL
from tests.support.colours import ColourDataset, probe_context
from tests.support.faults import class_folders
from tests.support.heads import segmentation
from tests.support.simulated_cuda import LEDGER, is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_simulated(), reason="counts on the simulated device"),
]
CUDA = torch.device("cuda")
LAYERS = 12
_BATCH = 3
_TINY = ViTConfig(image_size=32, patch_size=8, dim=12, depth=LAYERS, num_heads=2)


class Counts(NamedTuple):
    """What so many units cost, by place."""

    units: int
    waits: Counter[str]
    uploads: Counter[str]


def counts_of(work: Callable[[int], object], few: int, many: int, *, parts: int = 1) -> Counts:
    """What `many` cost more than `few`, each of so many parts."""
    # Moves the encoder, for one.
    work(few)
    with LEDGER.counting() as less:
        work(few)
    with LEDGER.counting() as more:
        work(many)
    more.waits.subtract(less.waits)
    more.uploads.subtract(less.uploads)
    return Counts((many - few) * parts, more.waits, more.uploads)


class _Steps:
    """Optimizer steps on the same views."""

    def __init__(self, model: ViTConfig, recipe: OptimizerRecipe) -> None:
        timeline = Timeline(total_steps=1000, steps_per_epoch=10)
        objective = Dino(out_dim=32, hidden_dim=16, bottleneck_dim=8, crops=MultiCrop(num_locals=1))
        groups = Setting(CUDA, model, objective, batch=2).groups()
        learner = objective.build(model, timeline, seed=0)
        options = TrainOptions(batch_size=2, compile=False)
        # The rate of a real device's products is measured with larger matrices.
        with patch.dict(resources._SIDE, cuda=64):
            self._trainer = Trainer(learner, recipe, options, timeline, TrainingRanks(device=CUDA))
        self._views, self._step = objective.crops.finish(groups, CUDA), 0
        # Counting operations, and the bases of the first gradients.
        self.take(2)

    def take(self, number: int) -> None:
        for _ in range(number):
            self._trainer.take_step(self._step, [self._views])
            self._step += 1


def training_step(**model: Any) -> Counts:
    """Of DINO with AdamW, two blocks."""
    config = ViTConfig(
        **{"image_size": 32, "patch_size": 8, "dim": 24, "depth": 2, "num_heads": 2, **model}
    )
    return counts_of(_Steps(config, AdamW()).take, 1, 2)


def soap_step() -> Counts:
    """With SOAP, a refresh in each."""
    model = ViTConfig(image_size=32, patch_size=8, dim=12, depth=1, num_heads=2)
    return counts_of(_Steps(model, Soap(precondition_frequency=1)).take, 1, 3)


def step_of_a_run(folder: Path, objective: str) -> Counts:
    """All of it: reading, cutting, training, the log."""
    root = class_folders(folder / objective)
    data = root if objective == "supervised" else root / "train"
    words = ["pretrain", "--data-root", str(data), "--device", "cuda", "--overwrite"]
    words += ["--out", str(folder / f"{objective}-run"), f"objective={objective}"]

    def work(number: int) -> None:
        more = [*SMALL, *OBJECTIVES[objective], f"train.max_steps={number}"]
        with patch.dict(resources._SIDE, cuda=64), redirect_stderr(io.StringIO()):
            assert main([*words, *more]) == 0

    return counts_of(work, 2, 4)


def _encoder(config: ViTConfig = _TINY) -> Any:
    return encoder_from_model(build_vit(config, seed=0), name="tiny")


def _context(folder: Path, num_images: int) -> ProbeContext:
    dataset = ColourDataset(num_train=num_images, num_val=num_images)
    layers = tuple(range(LAYERS))
    context = probe_context(folder, _encoder(), dataset, layers)
    return replace(context, device=CUDA)


def _segmentation(**changes: Any) -> Segmentation:
    fixed = {
        "image_size": 32, "epochs": 1, "batch_size": _BATCH, "holdout": 0.0, "panels": 0,
        "learning_rates": (1e-3, 1e-2),
    }  # fmt: skip
    return segmentation(fixed, **changes)


def feature_cache_batch(folder: Path) -> Counts:
    """Three images, twelve blocks."""
    probe = _segmentation()

    def work(number: int) -> None:
        SegmentationRun(probe, _context(folder, number * _BATCH)).features()

    return counts_of(work, 1, 3)


def heads_step(folder: Path, loss: str, **changes: Any) -> Counts:
    """Two learning rates for each of twelve blocks."""
    probe = _segmentation(loss=loss, **changes)
    run = SegmentationRun(probe, _context(folder, 2 * _BATCH))
    features = run.features()

    def work(number: int) -> None:
        training: Any = run.probe.training
        run.probe = replace(run.probe, training=replace(training, epochs=number))
        run.train(features)

    return counts_of(work, 1, 3, parts=2)


def scored_segmentation(folder: Path, scoring: str) -> Counts:
    """A batch of three images, heads of twelve blocks and two rates."""
    probe = _segmentation(inference=scoring)
    run = SegmentationRun(probe, _context(folder, _BATCH))
    heads = run.train(run.features())
    kept = KeptState(folder / "counts", 10.0, print)

    def work(number: int) -> None:
        images = ColourDataset(num_val=number * _BATCH).val()
        items = [run.prepare(images[i]) for i in range(len(images))]
        run.count(heads, items, ImageCounts(*heads.bias.shape), kept)

    return counts_of(work, 1, 3)


def scored_retrieval(folder: Path) -> Counts:
    """A batch of three images, memories of twelve blocks."""
    probe = Retrieval(image_size=32, neighbours=5, batch_size=_BATCH)
    context = _context(folder, _BATCH)

    def work(number: int) -> None:
        dataset = ColourDataset(num_train=_BATCH, num_val=number * _BATCH)
        list(probe.run(replace(context, dataset=dataset)))

    return counts_of(work, 1, 3)


class Labelled:
    """Pictures with a class each."""

    name, split, class_names = "pictures", "val", ("a", "b")

    def __init__(self, count: int) -> None:
        self.ids = tuple(str(number) for number in range(count))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        pixels = np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        return Sample(self.ids[index], pixels, label=index % 2)

    def fingerprint(self) -> str:
        return "none"


def image_vectors_batch(folder: Path) -> Counts:
    """Three images, [CLS] and mean patch of twelve blocks."""
    probe = KNN(facet=["cls", "patch_mean"], num_workers=1)
    image_pass = ImagePass(probe, _context(folder, 1), _BATCH)

    def work(number: int) -> None:
        images: Any = Labelled(number * _BATCH)
        # Otherwise those that passed in the round before would not pass.
        image_pass.context.passed.clear()
        image_pass.run(images, range(len(images)), range(LAYERS))

    return counts_of(work, 1, 3)


def tokencut_batch(facets: Iterable[str] = ("key",)) -> Counts:
    """Three images of 100 patches, twelve blocks."""
    probe = TokenCut(facet=tuple(facets), panels=0)
    config = replace(_TINY, dim=24)
    extractor = FeatureExtractor(
        _encoder(config), layers=range(LAYERS), facets=probe.facets, device=CUDA
    )
    samples = [_blob(number) for number in range(_BATCH)]

    def work(number: int) -> None:
        for _ in range(number):
            find_in_batch(probe, extractor, samples)

    return counts_of(work, 1, 2)


def _blob(seed: int) -> Sample:
    """A bright square on noise."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 120, (80, 80, 3), dtype=np.uint8)
    pixels[16:48, 24:64] += 120
    return Sample(str(seed), pixels)


def lbfgs_iteration() -> Counts:
    """Of four problems."""
    target = torch.linspace(1, 9, 24, dtype=torch.float64, device=CUDA).view(4, 6)

    def objective(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distance = values - target
        return distance.pow(4).sum(1) / 4, distance.pow(3)

    def work(number: int) -> None:
        minimise(objective, torch.zeros_like(target), max_iterations=number)

    return counts_of(work, 4, 10)


def pca_image(folder: Path) -> Counts:
    """Twelve blocks."""
    context = _context(folder, 1)

    def work(number: int) -> None:
        images: Any = Labelled(number)
        samples = [images[index] for index in range(number)]
        features_of(PCA(image_size=32), context, images, samples, context.layers)

    return counts_of(work, 1, 3)


# Waits, and uploads from memory that is not pinned, that each may cost at most.
UNITS: dict[str, tuple[Callable[[Path], Counts], int, int]] = {
    "training step, softmax": (lambda _: training_step(), 0, 0),
    "training step, linear": (lambda _: training_step(attention="linear"), 0, 0),
    "training step, osa_qr": (lambda _: training_step(attention="osa_qr", qkv_bias=False), 0, 0),
    "training step, osa_newton_schulz": (
        lambda _: training_step(attention="osa_newton_schulz", qkv_bias=False),
        0,
        0,
    ),
    "training step, graying svd": (lambda _: training_step(graying="svd"), 0, 0),
    "training step, graying dct": (lambda _: training_step(graying="dct"), 0, 0),
    "training step, SOAP with a refresh": (lambda _: soap_step(), 0, 0),
    # Small ones, of the augmentation, which do not wait.
    "step of a run, dino": (partial(step_of_a_run, objective="dino"), 0, 40),
    "step of a run, mae": (partial(step_of_a_run, objective="mae"), 0, 1),
    "step of a run, supervised": (partial(step_of_a_run, objective="supervised"), 0, 1),
    "TokenCut, batch": (lambda _: tokencut_batch(), 1, 0),
    "feature cache, batch": (feature_cache_batch, 1, 0),
    "heads' step, upsample4": (partial(heads_step, loss="upsample4"), 0, 0),
    "heads' step, full_resolution": (partial(heads_step, loss="full_resolution"), 0, 0),
    "heads' step, histogram": (partial(heads_step, loss="histogram"), 0, 0),
    "heads' step, majority": (partial(heads_step, loss="majority"), 0, 0),
    "heads' step, labels of 100 x 100": (partial(heads_step, loss="resampled", size=100), 0, 0),
    # Decoded and encoded in every epoch; features that are not finite are known before the step.
    "heads' step, streamed": (partial(heads_step, loss="upsample4", tier="stream"), 1, 0),
    "L-BFGS, iteration": (lambda _: lbfgs_iteration(), 1, 0),
    "scored segmentation, batch, squash": (partial(scored_segmentation, scoring="squash"), 1, 0),
    "scored segmentation, batch, patch": (partial(scored_segmentation, scoring="patch"), 1, 0),
    "scored segmentation, batch, slide": (partial(scored_segmentation, scoring="slide"), 1, 0),
    "scored retrieval, batch": (scored_retrieval, 1, 0),
    "k-NN and classification, batch": (image_vectors_batch, 1, 0),
    "PCA, image": (pca_image, 1, 0),
}
"""A training step and a run are of two blocks, which pass three times; all else is of twelve
blocks, a batch of three images."""


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_waits_no_more_often_than_is_said(tmp_path, unit):
    work, most_waits, most_uploads = UNITS[unit]

    counts = work(tmp_path)

    assert counts.waits.total() <= counts.units * most_waits, counts
    assert counts.uploads.total() <= counts.units * most_uploads, counts
