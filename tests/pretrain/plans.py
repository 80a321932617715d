"""Create small pretraining runs and training images."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pretrain.checkpoints import load_state
from pretrain.crops.multi import MultiCrop
from pretrain.monitor import Monitor
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW
from pretrain.options import DataOptions, TrainOptions
from pretrain.plan import Pretraining
from ssl_bench.models import ViTConfig

CPU = torch.device("cpu")
TINY = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2)
SMALL_DINO = Dino(out_dim=32, hidden_dim=16, bottleneck_dim=8, crops=MultiCrop(num_locals=2))


def album(
    root: Path, count: int = 13, *, folders: Sequence[str] = ("class0", "class1"), seed: int = 0
) -> Path:
    """Save random colour images in class folders."""
    generator = np.random.default_rng(seed)
    for number in range(count):
        folder = root / folders[number % len(folders)]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((24, 20)).save(folder / f"{number}.png")
    return root


def plan_of(root: Path, *, data: dict[str, Any] | None = None, **parts: Any) -> Pretraining:
    """Return a small pretraining run of eight steps."""
    names = ("model", "objective", "optimizer", "monitor", "init_from")
    components = {name: parts.pop(name) for name in names if name in parts}
    defaults = {"model": TINY, "objective": SMALL_DINO, "optimizer": AdamW(lr=0.05)}
    train = {
        "batch_size": 2, "max_steps": 8, "num_workers": 0, "seed": 3,
        # With the default, the first message depends on the CPU.
        "precision": "float32", **parts,
    }  # fmt: skip
    options = DataOptions(root=str(root), **data or {})
    return Pretraining(
        **{**defaults, **components, "data": options, "train": TrainOptions(**train)}
    )


def stopped_after_a_step(plan: Pretraining, out: Path) -> None:
    replace(plan, train=replace(plan.train, max_minutes=0.0)).run(out, device="cpu")
    assert state_of(out)["step"] == 1


def state_of(out: Path) -> dict[str, Any]:
    return load_state(out, CPU)[0]


def monitored(plan: Pretraining, **options: Any) -> Pretraining:
    return replace(plan, monitor=Monitor(**options))
