"""All blocks and learning rates from one pass, against one head and against one run per cell.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.segmentation --json segmentation.json
    python -m tests.benchmarks.segmentation --device cuda --images 64 --epochs 30

Random weights and pictures: the time hardly depends on them. The sizes of the first command are
such that it ends within ten minutes on two cores. Each row runs in a process of its own for the
sake of its peak memory. On the CPU times are CPU seconds, on a GPU wall seconds.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from probes.heads.losses import HistogramLoss, PixelLoss, UpsampledLoss
from probes.heads.sgd import HeadAdamW, ParallelHeads, Standardization
from probes.retrieval import NeighbourSearch
from probes.segmentation import HALF_DECADES
from ssl_bench.data.samples import Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from tests.benchmarks.provenance import provenance
from tests.support.heads import segmentation

PATCH = 16
HEIGHT, WIDTH = 375, 500
LOSSES = ("upsample4", "histogram", "full_resolution")
DEFAULTS = {
    "dim": 384,
    "depth": 12,
    "image-size": 512,
    "images": 4,
    "classes": 21,
    "epochs": 10,
    "memory-patches": 20_000,
}


@dataclass(frozen=True)
class Options:
    """Size of the benchmark; VOC has 1,464 images to train on and 1,449 to score."""

    dim: int
    depth: int
    image_size: int
    images: int
    classes: int
    epochs: int
    memory_patches: int
    device: str

    def encoder(self) -> Encoder:
        heads = max(1, self.dim // 64)
        config = ViTConfig(dim=self.dim, depth=self.depth, num_heads=heads, patch_size=PATCH)
        return encoder_from_model(build_vit(config, seed=0), name="random")

    @property
    def batch_size(self) -> int:
        return min(16, self.images)

    @property
    def steps(self) -> int:
        return self.epochs * -(-self.images // self.batch_size)


class Pictures:
    """Random pictures of VOC's usual size with blocks of classes."""

    name, split = "random", "train"

    def __init__(self, options: Options):
        self.class_names = tuple(map(str, range(options.classes)))
        self.ids = tuple(map(str, range(options.images)))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        generator = np.random.default_rng(index)
        image = generator.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
        blocks = generator.integers(0, len(self.class_names), (6, 8), np.uint8)
        mask = np.kron(blocks, np.ones((64, 64), np.uint8))[:HEIGHT, :WIDTH]
        return Sample(str(index), image, np.ascontiguousarray(mask))

    def fingerprint(self) -> str:
        return "random"


class RandomDataset:
    name = "random"
    supports = frozenset({"segmentation"})

    def __init__(self, options: Options):
        self.train = self.val = self.discovery = self.images = lambda: Pictures(options)


def probe_seconds(options: Options, loss: str, *, layers: int, rates: int) -> float:
    """Train and score with the probe as users run it."""
    probe = segmentation(
        loss=loss,
        learning_rates=HALF_DECADES[:rates],
        epochs=options.epochs,
        batch_size=options.batch_size,
        image_size=options.image_size,
        holdout=0.0,
        panels=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        context = ProbeContext(
            encoder=options.encoder(),
            dataset=RandomDataset(options),
            layers=tuple(range(options.depth))[-layers:],
            device=torch.device(options.device),
            dtype=torch.float32,
            seed=0,
            artifacts=Path(folder),
            progress=lambda items, description, total=None: items,  # noqa: ARG005
        )
        return seconds(lambda: list(probe.run(context)), options.device)


def naive_seconds(options: Options) -> float:
    """One run per block and rate: the encoder in every step, logits upsampled to the input.

    Steps and scored images are timed for three depths; a run to the depth of each block is read
    off the straight line through them. Blocks above the probed one are not computed.
    """
    depths = sorted({0, options.depth // 2, options.depth - 1})
    encoder = options.encoder()
    step = [naive_step(options, encoder, depth) for depth in depths]
    score = [naive_score(options, encoder, depth) for depth in depths]
    cells = np.arange(options.depth)
    per_step = np.polyval(np.polyfit(depths, step, 1), cells)
    per_score = np.polyval(np.polyfit(depths, score, 1), cells)
    run = options.steps * per_step + options.images * per_score
    return float(len(HALF_DECADES) * run.sum())


def naive_step(options: Options, encoder: Encoder, layer: int) -> float:
    extractor = FeatureExtractor(encoder, layers=(layer,), device=options.device)
    head = nn.Conv2d(options.dim, options.classes, 1, device=options.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    size = (options.image_size, options.image_size)
    images = torch.rand(options.batch_size, 3, *size, device=options.device)
    labels = torch.randint(0, options.classes, (options.batch_size, *size), device=options.device)

    def step() -> None:
        features = extractor(images)[layer]["token"].movedim(-1, 1)
        optimizer.zero_grad()
        F.cross_entropy(F.interpolate(head(features), size, mode="bilinear"), labels).backward()
        optimizer.step()

    return best_seconds(step, options.device)


def naive_score(options: Options, encoder: Encoder, layer: int) -> float:
    extractor = FeatureExtractor(encoder, layers=(layer,), device=options.device)
    head = nn.Conv2d(options.dim, options.classes, 1, device=options.device)
    image = torch.rand(1, 3, options.image_size, options.image_size, device=options.device)
    target = torch.randint(0, options.classes, (HEIGHT, WIDTH), device=options.device)

    @torch.no_grad()
    def score() -> None:
        features = extractor(image)[layer]["token"].movedim(-1, 1)
        predicted = F.interpolate(head(features), (HEIGHT, WIDTH), mode="bilinear").argmax(1)
        torch.bincount((target * options.classes + predicted).flatten())

    return best_seconds(score, options.device)


def loss_seconds(options: Options, loss: str) -> float:
    """Logits, loss, gradient and optimizer step of the whole bank, a head and image."""
    losses: dict[str, PixelLoss] = {
        "upsample4": UpsampledLoss(4),
        "histogram": HistogramLoss(),
        "full_resolution": UpsampledLoss(PATCH),
    }
    if loss == "naive":
        return naive_loss_seconds(options)
    grid, rates, images = options.image_size // PATCH, len(HALF_DECADES), 2
    sources = options.depth
    side = losses[loss].label_size(grid, PATCH)
    labels = torch.randint(0, options.classes, (images, side, side), dtype=torch.uint8)
    labels = labels.to(options.device)
    shape = (sources, images, grid, grid, options.dim)
    features = torch.randn(shape, device=options.device).half()
    zeros = torch.zeros(sources, options.dim, device=options.device)
    bank = ParallelHeads(
        Standardization(zeros, zeros + 1),
        classes=options.classes,
        rates=HALF_DECADES,
        optimizer=HeadAdamW(),
        seed=0,
    )

    def step() -> None:
        targets = losses[loss].targets(labels, options.classes, (grid, grid))
        bank.step(features, losses[loss], targets, rate_factor=1.0)

    return best_seconds(step, options.device) / (sources * rates * images)


def naive_loss_seconds(options: Options) -> float:
    grid, size = options.image_size // PATCH, (options.image_size, options.image_size)
    head = nn.Conv2d(options.dim, options.classes, 1, device=options.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    features = torch.randn(2, options.dim, grid, grid, device=options.device)
    labels = torch.randint(0, options.classes, (2, *size), device=options.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(F.interpolate(head(features), size, mode="bilinear"), labels).backward()
        optimizer.step()

    return best_seconds(step, options.device) / 2


def retrieval_figures(options: Options) -> dict[str, float]:
    """Recall of the 30 nearest patches against float64, and the time of a thousand searches."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(options.memory_patches, options.dim), (1000, options.dim)]
    memory, queries = (
        torch.randn(shape, generator=generator).to(options.device) for shape in shapes
    )
    search = NeighbourSearch.of(memory)
    spent = best_seconds(lambda: search.nearest(queries, 30), options.device)
    _, index = search.nearest(queries, 30)
    units = [F.normalize(features.double(), dim=1) for features in (queries, memory)]
    exact = (units[0] @ units[1].T).topk(30).indices
    recall = (index[:, :, None] == exact[:, None]).any(2).double().mean()
    return {"seconds": spent, "recall": float(recall)}


def seconds(run: Callable[[], object], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def best_seconds(run: Callable[[], object], device: str, repetitions: int = 3) -> float:
    run()
    return min(seconds(run, device) for _ in range(repetitions))


def measure(options: Options, row: str) -> dict[str, float]:
    """One row of the report, in this process."""
    kind, _, loss = row.partition(" ")
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "all": lambda: {"seconds": probe_seconds(options, loss, layers=options.depth, rates=8)},
        "one": lambda: {"seconds": probe_seconds(options, loss, layers=1, rates=1)},
        "naive": lambda: {"seconds": naive_seconds(options)},
        "loss": lambda: {"seconds": loss_seconds(options, loss)},
        "retrieval": lambda: retrieval_figures(options),
    }
    start = peak_bytes(options.device)
    figures = kinds[kind]()
    return {**figures, "bytes": peak_bytes(options.device), "bytes_before": start}


def peak_bytes(device: str) -> int:
    """Of this process, with all that its libraries take."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(options: Options, rows: dict[str, dict[str, float]]) -> None:
    print(provenance())
    print(f"{options}")
    cells, naive = f"{options.depth} x {len(HALF_DECADES)}", rows["naive"]
    print(f"\n| | seconds | against one head | {cells} runs against it | peak GiB |")
    print("|---|---|---|---|---|")
    line = "| {} | {:.1f} | {:.1f} x | {:.0f} x | {:.2f} |"
    for loss in LOSSES:
        one, many = rows[f"one {loss}"], rows[f"all {loss}"]
        print(f"| one head, {loss} | {one['seconds']:.1f} | | | {one['bytes'] / 2**30:.2f} |")
        times = (many["seconds"] / one["seconds"], naive["seconds"] / many["seconds"])
        print(line.format(f"{cells}, {loss}", many["seconds"], *times, many["bytes"] / 2**30))
    print(f"| {cells} runs (modelled from a few steps) | {naive['seconds']:.0f} | | 1 x | |")
    size = f"{options.image_size} x {options.image_size}"
    print(f"\n| loss | ms per head and image | {size} by autograd against it |")
    print("|---|---|---|")
    reference = rows["loss naive"]["seconds"]
    for loss in ("naive", *LOSSES):
        spent = rows[f"loss {loss}"]["seconds"]
        print(f"| {loss} | {1e3 * spent:.2f} | {reference / spent:.1f} x |")
    found = rows["retrieval"]
    print(
        f"\nretrieval, {options.memory_patches} patches: recall {found['recall']:.4f} of the 30 "
        f"nearest, {1e3 * found['seconds']:.2f} us a patch"
    )
    print(f"libraries alone: {rows['one upsample4']['bytes_before'] / 2**30:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--row", help="measure only this, print JSON")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = vars(parser.parse_args())
    row, path = arguments.pop("row"), arguments.pop("json")
    options = Options(**arguments)
    if row:
        print(json.dumps(measure(options, row)))
        return
    names = [f"{kind} {loss}" for kind in ("one", "all", "loss") for loss in LOSSES]
    found = {}
    for name in (*names, "loss naive", "naive", "retrieval"):
        command = [sys.executable, "-m", "tests.benchmarks.segmentation", *sys.argv[1:]]
        result = subprocess.run([*command, "--row", name], stdout=subprocess.PIPE, check=True)
        found[name] = json.loads(result.stdout)
    report(options, found)
    if path:
        figures = {"provenance": provenance(), "options": asdict(options), "rows": found}
        Path(path).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
