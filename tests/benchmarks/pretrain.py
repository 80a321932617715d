"""Compare the speed and memory of our DINO training step with those of plain PyTorch code.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.pretrain
    python -m tests.benchmarks.pretrain --device cuda --json pretrain.json

On a GPU, the default is a ViT-S/16 with batch size 256 and 65,536 prototypes. Images are cropped
before the measurement. Our training step also augments the 8-bit crops on the device. The official
training step receives augmented crops, because the official code augments images in data workers.

The training loops take turns of ten steps, so that other processes slow all of them down equally.
SOAP computes its eigenvectors every ten steps. Without a GPU, the program measures CPU time and
should run with one thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pretrain.batches import make_sample_generator
from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino, DinoLearner
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe, Soap
from pretrain.options import TrainOptions
from pretrain.resources import synchronize
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.data.samples import Sample
from ssl_bench.models import ViTConfig
from tests.benchmarks.memory import MEBIBYTE, peak_mebibytes
from tests.benchmarks.plain_dino import PlainDino
from tests.benchmarks.provenance import print_table, provenance

# SOAP does not rotate longer axes. The only such axis is that of the prototypes, whose basis would
# take minutes on a processor.
SOAP_RECIPE = Soap(max_precond_dim=4_096)
PERIOD = SOAP_RECIPE.precondition_frequency
TIMELINE = Timeline(total_steps=100_000, steps_per_epoch=1_000)
PLAIN, ADAMW, SOAP = "plain loop", "ours, AdamW", "ours, SOAP"
LOW, COMPILED = "ours, AdamW, bfloat16", "ours, AdamW, compiled"


@dataclass(frozen=True)
class Setting:
    device: torch.device
    model: ViTConfig
    objective: Dino
    batch: int
    fused_attention: bool = False
    precision: Literal["auto", "bfloat16"] = "auto"
    compile: bool | None = None

    @property
    def train(self) -> TrainOptions:
        return TrainOptions(batch_size=self.batch, precision=self.precision, compile=self.compile)

    def learner(self) -> DinoLearner:
        return self.objective.build(self.model, TIMELINE, seed=0)

    def groups(self) -> Any:
        """Return crops of random images, as the workers of a data loader do."""
        crops, generator = self.objective.crops, np.random.default_rng(0)
        pictures = generator.integers(0, 256, (self.batch, 8, 10, 3), dtype=np.uint8)
        samples = [
            Sample(str(i), picture.repeat(32, axis=0).repeat(32, axis=1))
            for i, picture in enumerate(pictures)
        ]
        generators = [make_sample_generator(0, 0, index) for index in range(self.batch)]
        sizes = crops.sizes(self.model.image_size, self.model.patch_size)
        groups = crops.cut(samples, generators, sizes)
        return [g.pin_memory() for g in groups] if self.device.type == "cuda" else groups


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    synchronize(device)
    start = clock()
    work()
    synchronize(device)
    return 1e3 * (clock() - start)


@dataclass
class Candidate:
    """A training loop whose speed and memory are measured."""

    take_step: Callable[[int], Any]
    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    device: torch.device
    steps: int = 0
    step_ms: list[float] = field(default_factory=list)  # The mean of each turn.

    def run(self, steps: int) -> float:
        """Run `steps` training steps and return the mean time per step in milliseconds."""

        def work() -> None:
            for _ in range(steps):
                self.take_step(self.steps)
                self.steps += 1

        return milliseconds(work, self.device) / steps

    def peak(self) -> float:
        """Return the peak memory of a step in MiB, including weights and optimizer state."""
        state = [t for t in tree_leaves([*self.optimizer.state.values()]) if isinstance(t, Tensor)]
        weights = [t for m in self.modules for t in (*m.parameters(), *m.buffers())]
        storages = [t.untyped_storage() for t in (*weights, *state)]
        permanent = sum({s._cdata: s.nbytes() for s in storages}.values()) / MEBIBYTE
        return permanent + peak_mebibytes(lambda: self.take_step(self.steps), self.device)


def build_suite_candidate(
    setting: Setting, recipe: OptimizerRecipe, groups: Any
) -> tuple[Candidate, Trainer]:
    crops, device, learner = setting.objective.crops, setting.device, setting.learner()
    trainer = Trainer(learner, recipe, setting.train, TIMELINE, TrainingRanks(device=device))

    def take_step(step: int) -> object:
        return trainer.take_step(step, (crops.augment_on_device(part, device) for part in [groups]))

    return Candidate(take_step, [learner], trainer.optimizer, device), trainer


def build_plain_candidate(
    setting: Setting, groups: Any, rates: Callable[[int], dict[str, float]]
) -> Candidate:
    dino = PlainDino(setting.learner(), setting.device, fused_attention=setting.fused_attention)
    finished = setting.objective.crops.augment_on_device(groups, torch.device("cpu"))
    crops = [view for group in finished for view in group.split(setting.batch)]
    if setting.device.type == "cuda":
        crops = [crop.pin_memory() for crop in crops]

    def take_step(step: int) -> object:
        return dino.step(crops, rates(step), setting.train.max_grad_norm or 0.0)

    return Candidate(take_step, [dino.student, dino.teacher], dino.optimizer, setting.device)


def step_records(setting: Setting, turns: int) -> list[dict[str, Any]]:
    """Measure each training loop and return one table row per loop."""
    groups = setting.groups()
    adamw, trainer = build_suite_candidate(setting, AdamW(), groups)
    soap, _ = build_suite_candidate(setting, SOAP_RECIPE, groups)
    candidates = {
        PLAIN: build_plain_candidate(setting, groups, trainer.scheduled_values),
        ADAMW: adamw,
        SOAP: soap,
    }
    if setting.device.type == "cpu":
        low, _ = build_suite_candidate(replace(setting, precision="bfloat16"), AdamW(), groups)
        compiled, _ = build_suite_candidate(replace(setting, compile=True), AdamW(), groups)
        candidates |= {LOW: low, COMPILED: compiled}
    for candidate in candidates.values():
        # The first steps compile the model and build the bases of SOAP.
        candidate.run(2)
    peaks = {name: candidate.peak() for name, candidate in candidates.items()}
    augmentation_ms: list[float] = []

    def augment() -> None:
        for _ in range(PERIOD):
            setting.objective.crops.augment_on_device(groups, setting.device)

    for _ in range(turns):
        for candidate in candidates.values():
            candidate.step_ms.append(candidate.run(PERIOD))
        augmentation_ms.append(milliseconds(augment, setting.device) / PERIOD)
    medians = {name: median(candidate.step_ms) for name, candidate in candidates.items()}
    return [
        {
            "row": name,
            "step_ms": ms,
            "turns_ms": candidates[name].step_ms,
            "images_per_second": 1e3 * setting.batch / ms,
            "times_plain": medians[PLAIN] / ms,
            "peak_mebibytes": peaks[name],
            # The peak rate is measured by the wall clock, so other load increases this on a CPU.
            "mfu": trainer.utilisation(ms / 1e3),
            "augmentation_share": None if name == PLAIN else 100 * median(augmentation_ms) / ms,
            "times_adamw": None if name == PLAIN else ms / medians[ADAMW],
        }
        for name, ms in medians.items()
    ]


def measured_head(
    name: str, batch: int, *, device: torch.device, out_dim: int, num_views: int = 10
) -> tuple[float, float]:
    """Measure the peak memory (MiB) and time (ms) of DINO's head in a forward and backward pass."""
    config = ViTConfig(image_size=8, patch_size=8, dim=384, depth=1)
    learner = Dino(out_dim=out_dim).build(config, TIMELINE, seed=0)
    learner.student.backbone = learner.teacher.backbone = nn.Flatten(1)
    views = torch.randn(num_views * batch, 3, 8, 16, device=device, requires_grad=True)
    # ADAMW is the code of this suite.
    if name == PLAIN:
        dino = PlainDino(learner, device, fused_attention=True)
        student, precision = dino.student, torch.float16

        def loss() -> Tensor:
            return dino.loss(views.split(batch), 0.04)
    else:
        student, precision = learner.to(device).student, torch.bfloat16

        def loss() -> Tensor:
            parts = [views[: 2 * batch], views[2 * batch :]]
            value, _ = learner.loss(learner.student, parts, 0)
            learner._teacher_means.clear()
            return value

    def work() -> None:
        student.zero_grad()
        views.grad = None
        with torch.autocast(device.type, precision, enabled=device.type == "cuda"):
            value = loss()
        value.backward()

    work()
    student.zero_grad()
    views.grad = None
    peak = peak_mebibytes(work, device)
    return peak, median(milliseconds(work, device) for _ in range(5))


def format_row(row: dict[str, Any]) -> dict[str, str]:
    share, ratio = row["augmentation_share"], row["times_adamw"]
    return {
        "": row["row"], "step ms": f"{row['step_ms']:.0f}",
        "images/s": f"{row['images_per_second']:.1f}", "x plain": f"{row['times_plain']:.2f}",
        "peak MiB": f"{row['peak_mebibytes']:.0f}", "MFU %": f"{row['mfu']:.1f}",
        "augmentation %": "-" if share is None else f"{share:.1f}",
        "x AdamW": "-" if ratio is None else f"{ratio:.2f}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--turns", type=int, default=2, help=f"turns of {PERIOD} steps each")
    parser.add_argument("--json", type=Path, help="file for the records")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(provenance())
    # All parameters are trained from the first step on.
    objective, model, batch = Dino(freeze_last_layer_epochs=0.0), ViTConfig(), 256
    if device.type == "cpu":
        model = ViTConfig(image_size=64, patch_size=8, dim=192, depth=4, num_heads=3)
        # Bases of 2,048 directions would take minutes on a processor.
        objective, batch = replace(objective, out_dim=8_192, hidden_dim=384), 16
    print(
        f"dim {model.dim}, depth {model.depth}, patch {model.patch_size}, {model.image_size} "
        f"pixels, 2 + 8 crops, batch {batch}, {objective.out_dim} prototypes"
    )
    records = step_records(Setting(device, model, objective, batch), options.turns)
    print_table(list(map(format_row, records)))
    if options.json:
        content = {"provenance": provenance(), "records": records}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
