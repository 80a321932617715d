"""What token graying costs, as shares of the same training step without it, and what it does.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.graying --data PHOTOS [--json FILE]

A step is the trainer's: supervised, AdamW, on a GPU bfloat16 and compiled. Turns of the three kinds
alternate, so that a busy moment of the machine falls on all; without a GPU milliseconds are those
that the processor worked. Then the condition numbers of the tokens that enter each block, as its
attention sees them, and that leave it, at initialisation, for photographs.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, get_args

import torch
from torch import Tensor

from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import TrainOptions
from pretrain.runtime.distributed import TrainingRanks
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.models import ViTConfig, build_vit, token_statistics
from ssl_bench.models.fields import GrayingKind
from ssl_bench.system.progress import show_progress
from tests.benchmarks.initialisation import photographs
from tests.benchmarks.pretrain import milliseconds
from tests.benchmarks.provenance import provenance

TIMELINE = Timeline(total_steps=100_000, steps_per_epoch=1_000)
NUM_CLASSES = 200
SMALL = ViTConfig()
TINY = ViTConfig(dim=192, num_heads=3)
MODELS = {
    "ViT-S/16, 224 pixels": SMALL,
    "ViT-Ti/16, 224 pixels": TINY,
    "ViT-Ti/8, 64 pixels": replace(TINY, image_size=64, patch_size=8),
}
BATCHES = {"cuda": (256, 256, 1024), "cpu": (4, 8, 32)}
# Of the paper's table 3 the best exponents.
EXPONENTS: dict[str, float] = {"none": 1.0, "dct": 0.95, "svd": 0.7}
Row = dict[str, Any]


@dataclass
class Candidate:
    """A trainer with its batch, and what its turns took."""

    trainer: Trainer
    views: tuple[Tensor, Tensor, Tensor]
    device: torch.device
    steps: int = 0
    turns_ms: list[float] = field(default_factory=list)

    def run(self, steps: int) -> float:
        """Milliseconds a step."""

        def work() -> None:
            for _ in range(steps):
                self.trainer.take_step(self.steps, iter([self.views]))
                self.steps += 1

        return milliseconds(work, self.device) / steps


def grayed(config: ViTConfig, kind: GrayingKind) -> ViTConfig:
    return replace(config, graying=kind, graying_exponent=EXPONENTS[kind])


def candidate(config: ViTConfig, batch: int, device: torch.device) -> Candidate:
    names = [str(number) for number in range(NUM_CLASSES)]
    learner = Supervised().build(config, TIMELINE, seed=0, class_names=names)
    trainer = Trainer(
        learner, AdamW(), TrainOptions(batch_size=batch), TIMELINE, TrainingRanks(device=device)
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, config.image_size, config.image_size, generator=generator)
    labels = torch.randint(NUM_CLASSES, (batch,), generator=generator)
    own_share = torch.tensor(1.0)
    return Candidate(trainer, (images.to(device), labels.to(device), own_share.to(device)), device)


def step_rows(name: str, batch: int, device: torch.device, turns: int, steps: int) -> list[Row]:
    """One row a kind of graying."""
    candidates = {
        kind: candidate(grayed(MODELS[name], kind), batch, device)
        for kind in ("none", "dct", "svd")
    }
    for one in candidates.values():
        # Compiles, and makes the state of the optimizer.
        one.run(2 if device.type == "cuda" else 1)
    for _ in range(turns):
        for one in candidates.values():
            one.turns_ms.append(one.run(steps))
    plain = candidates["none"].turns_ms
    return [
        {
            "model": name,
            "batch": batch,
            "graying": kind,
            "step_ms": median(one.turns_ms),
            "times_plain": [ms / base for ms, base in zip(one.turns_ms, plain, strict=True)],
        }
        for kind, one in candidates.items()
    ]


@torch.no_grad()
def condition_rows(images: Sequence[Tensor], seeds: int) -> list[Row]:
    """Mean logarithms over images, one row a kind, seed and block of ViT-S/16."""
    rows = []
    cases = [(kind, seed) for kind in get_args(GrayingKind) for seed in range(seeds)]
    for kind, seed in show_progress(cases, "condition numbers"):
        model = build_vit(grayed(SMALL, kind), seed=seed).eval()
        x = model.embed(torch.stack(list(images)))
        for layer, block in enumerate(model.blocks):
            gray = block.get_submodule("graying")(x)
            left = block(x)
            found = {"before": _log_condition(x), "grayed": _log_condition(gray)}
            found["after"] = _log_condition(left)
            rows.append({"graying": kind, "seed": seed, "layer": layer} | found)
            x = left
    return rows


def _log_condition(tokens: Tensor) -> float:
    """Natural, as in the paper's table 3; mean over images."""
    numbers = torch.tensor([token_statistics(image).condition_number for image in tokens])
    return float(numbers.log().mean())


def print_steps(rows: Sequence[Row]) -> None:
    print("\n| model | batch | graying | step ms | x plain: median (all turns) |")
    print("|---|---:|---|---:|---:|")
    for row in rows:
        ratios = row["times_plain"]
        turns = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(
            f"| {row['model']} | {row['batch']} | {row['graying']} | {row['step_ms']:.0f} "
            f"| {median(ratios):.3f} ({turns}) |"
        )


def print_conditions(rows: Sequence[Row]) -> None:
    """Before, as attention sees them, after: mean over seeds, and the standard deviation."""
    kinds = list(dict.fromkeys(row["graying"] for row in rows))
    print("\n| block | " + " | ".join(f"{kind}: before, seen, after" for kind in kinds) + " |")
    print("|---:|" + "---|" * len(kinds))
    for layer in sorted({row["layer"] for row in rows}):
        cells = []
        for kind in kinds:
            here = [row for row in rows if (row["graying"], row["layer"]) == (kind, layer)]
            cells.append(", ".join(_cell(here, name) for name in ("before", "grayed", "after")))
        print(f"| {layer} | " + " | ".join(cells) + " |")


def _cell(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows]
    spread = f" ({stdev(values):.1g})" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder of photographs; without it steps alone")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, help="in a turn")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", help="write the values of every turn, seed and block there")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = options.steps or (20 if device.type == "cuda" else 1)
    sizes = dict(zip(MODELS, BATCHES[device.type], strict=True))
    names = show_progress(options.models, "models")
    rows = [r for n in names for r in step_rows(n, sizes[n], device, options.turns, steps)]
    print(provenance())
    print(f"\nexponents: {EXPONENTS}; steps in a turn: {steps}")
    print_steps(rows)
    if options.data:
        conditions = condition_rows(photographs(options.data, options.images), options.seeds)
        print("\nln of the condition number of the tokens, ViT-S/16 at 224 pixels, float32")
        print_conditions(conditions)
        rows += conditions
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
