"""Labels at original size: ours, `F.interpolate` and argmax, and other ways, in turn.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.pixels --json FILE

`heads`: logits of linear heads on the features of a ViT with random weights, trained on generated
scenes at eight learning rates, of which every second is scored, to tell apart as many groups of
their patches as there are classes; scored on another scene. `noisy`: independent normal logits.
Times are of a head, medians over rounds in which every way has its turn; ratios are medians of the
rounds' ratios. CPU time with one thread, wall time with two: there, what else runs is in it.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from probes.features.views import WholeImage
from probes.heads.pixels.prediction import predict_pixels, predict_upsampled
from ssl_bench.data.layouts.toy_scenes import Painter
from ssl_bench.data.samples import Sample
from ssl_bench.features import FeatureExtractor
from ssl_bench.metrics import class_counts
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from tests.benchmarks.pixel_candidates import by_gaps, by_resizing
from tests.benchmarks.provenance import provenance

_PATCH, _DIM, _SCENES, _STEPS = 16, 192, 16, 60
_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
_SIZES = {14: (375, 500), 28: (480, 640), 32: (375, 500), 37: (512, 683)}

Predict = Callable[[Tensor, int, int], Tensor]


def whole_gaps(logits: Tensor, height: int, width: int) -> Tensor:
    """Ours with blocks as large as the gaps between patches."""
    with patch("probes.heads.pixels.axes._SIDE", 10_000):
        return predict_pixels(logits, height, width)


WAYS: dict[str, Predict] = {
    "ours": predict_pixels,
    "upsampled": predict_upsampled,
    "former": by_gaps,
}
MORE: dict[str, Predict] = {"whole gaps": whole_gaps, "resized by OpenCV": by_resizing}


@dataclass(frozen=True)
class Case:
    """What one row measures; `scale` and `offset` change the logits."""

    kind: str
    classes: int
    grid: int
    scale: float = 1.0
    offset: float = 0.0

    @property
    def size(self) -> tuple[int, int]:
        return _SIZES[self.grid]

    def logits(self) -> Float[Tensor, "heads rows cols classes"]:
        shape = (len(_RATES[::2]), self.grid, self.grid, self.classes)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(shape, generator=generator)
        plain = noise if self.kind == "noisy" else head_logits(self.classes, self.grid)
        return plain * self.scale + self.offset


CASES = [
    Case(kind, classes, grid)
    for kind in ("heads", "noisy")
    for classes in (21, 150, 171)
    for grid in _SIZES
]
CHANGED = [
    Case("heads", 21, 32, scale, offset)
    for scale, offset in [(0.01, 0.0), (100.0, 0.0), (1.0, 100.0), (1.0, 10_000.0)]
]


@cache
def extractor() -> FeatureExtractor:
    config = ViTConfig(dim=_DIM, depth=4, num_heads=3, patch_size=_PATCH)
    encoder = encoder_from_model(build_vit(config, seed=0), name="random")
    return FeatureExtractor(encoder, layers=(3,))


@torch.no_grad()
def features(split: str, count: int, grid: int) -> tuple[Tensor, Tensor]:
    """Tokens of scenes, and colours with the share of objects below each patch."""
    painter, view, side = Painter(split, 0), WholeImage(), grid * _PATCH
    tokens, seen = [], []
    for number in range(count):
        scene = painter.scene(number)
        image, mask = view.view(Sample(str(number), scene.image, scene.mask), 0, side)
        tokens.append(extractor()(image[None])[3]["token"][0])
        of_mask = F.adaptive_avg_pool2d((mask > 0)[None].float(), grid)
        seen.append(torch.cat([F.avg_pool2d(image, _PATCH), of_mask]).movedim(0, -1))
    return torch.stack(tokens), torch.stack(seen)


def groups(seen: Float[Tensor, "patches values"], number: int) -> Int64[Tensor, " patches"]:
    """Nearest of some patches that were drawn."""
    drawn = torch.randperm(len(seen), generator=torch.Generator().manual_seed(1))[:number]
    return torch.cdist(seen, seen[drawn]).argmin(1)


@cache
def trained_heads(classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and deviation of the features, weight and bias of all heads."""
    tokens, seen = features("train", _SCENES, 14)
    flat, labels = tokens.flatten(0, 2), groups(seen.flatten(0, 2), classes)
    mean, deviation = flat.mean(0), flat.std(0) + 1e-6
    flat = (flat - mean) / deviation
    weight = torch.zeros(len(_RATES), _DIM, classes, requires_grad=True)
    bias = torch.zeros(len(_RATES), 1, classes, requires_grad=True)
    rates = torch.tensor(_RATES)[:, None, None]
    for _ in range(_STEPS):
        logits = (flat @ weight + bias).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.repeat(len(_RATES)), reduction="sum") / len(flat)
        for part, gradient in zip(
            (weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True
        ):
            part.data -= 10 * rates * gradient
    return mean, deviation, weight.detach(), bias.detach()


def head_logits(classes: int, grid: int) -> Float[Tensor, "heads rows cols classes"]:
    mean, deviation, weight, bias = trained_heads(classes)
    tokens, _ = features("val", 1, grid)
    flat = (tokens[0].flatten(0, 1) - mean) / deviation
    return (flat @ weight[::2] + bias[::2]).unflatten(1, (grid, grid))


def measured(case: Case, ways: dict[str, Predict], rounds: int) -> dict[str, Any]:
    logits, size = case.logits(), case.size
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = {name: way(logits, *size) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = clock()
            way(logits, *size)
            times[name].append(1000 * (clock() - start) / len(logits))
    ratios = {
        name: [other / ours for other, ours in zip(spent, times["ours"], strict=True)]
        for name, spent in times.items()
    }
    differ = {name: int((labels != found["ours"]).sum()) for name, labels in found.items()}
    return {
        **asdict(case),
        "height": size[0],
        "width": size[1],
        "ms": {name: median(spent) for name, spent in times.items()},
        "times": {name: median(some) for name, some in ratios.items()},
        "lowest": {name: min(some) for name, some in ratios.items()},
        "labels_that_differ": differ,
        "labels": found["ours"].numel(),
    }


def counting(rounds: int) -> dict[str, Any]:
    """`class_counts` beside the labels it counts, of a head in milliseconds."""
    case = Case("heads", 21, 32)
    logits, size = case.logits(), case.size
    labels = predict_pixels(logits, *size)
    target = labels[0].clone()
    target[:20] = 255
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        class_counts(labels, target, case.classes)
        spent.append(1000 * (time.process_time() - start) / len(logits))
    return {"ms": median(spent)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0]["ms"])
    others = [name for name in names if name != "ours"]
    heads = ["logits", "classes", "grid", "size", *(f"{name}, ms" for name in names)]
    heads += [f"x {name}" for name in others] + [f"unlike {name}" for name in others]
    lines = ["| " + " | ".join(heads) + " |", "|---" * 4 + "|---:" * (len(heads) - 4) + "|"]
    for row in rows:
        kind = row["kind"] + (f" x {row['scale']:g}" if row["scale"] != 1 else "")
        kind += f" + {row['offset']:g}" if row["offset"] else ""
        cells = [kind, row["classes"], row["grid"], f"{row['width']} x {row['height']}"]
        cells += [f"{row['ms'][name]:.2f}" for name in names]
        cells += [f"{row['times'][name]:.1f} ({row['lowest'][name]:.1f})" for name in others]
        cells += [row["labels_that_differ"][name] for name in others]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {"provenance": provenance(), "load": [os.getloadavg()[0]]}
    print(record["provenance"])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cases = CASES if threads == 1 else [case for case in CASES if case.classes == 21]
        rows = [measured(case, WAYS, options.rounds) for case in cases]
        record[f"threads_{threads}"] = rows
        record["load"].append(os.getloadavg()[0])
        print(f"\n{threads} threads\n\n{table(rows)}", flush=True)
    torch.set_num_threads(1)
    record["changed"] = [measured(case, WAYS, options.rounds) for case in CHANGED]
    several = [case for case in CASES if case.classes < 171 and case.grid == 32]
    record["ways"] = [measured(case, WAYS | MORE, options.rounds) for case in several]
    record["counting"] = counting(options.rounds)
    record["load"].append(os.getloadavg()[0])
    for name in ("changed", "ways"):
        print(f"\n{name}\n\n{table(record[name])}")
    print(f"\n{record['counting']}\nload {record['load']}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
