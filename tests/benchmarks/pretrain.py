"""Compare a DINO training step of this suite with a plain restatement of the official one.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.pretrain
    python -m tests.benchmarks.pretrain --device cuda --json pretrain.json

On a GPU the default is the full size: ViT-S/16, 224 pixels, 2 + 8 crops, batch 256, 65,536
prototypes. Images are cropped beforehand. A step of this suite augments 8-bit crops on the device,
while the plain loop gets augmented crops, as from the official data workers. The candidates
alternate in turns of ten steps, so that other load on the machine affects all of them and each turn
of SOAP has one refresh. Without a GPU, times are processor times; use one thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.batches import make_sample_generator
from pretrain.distributed import TrainingRanks
from pretrain.objectives.dino import Dino, DinoLearner
from pretrain.optimizers.recipes import AdamW, OptimizerRecipe, Soap
from pretrain.options import TrainOptions
from pretrain.resources import measure_product_rate, synchronize
from pretrain.schedules import Timeline
from pretrain.step import Trainer
from ssl_bench.data.samples import Sample
from ssl_bench.models import ViTConfig
from tests.benchmarks.memory import MEBIBYTE, peak_mebibytes
from tests.benchmarks.plain_dino import PlainDino
from tests.benchmarks.provenance import provenance

# Longer axes keep their own coordinates: of the official sizes only the 65,536 prototypes do, of
# the small ones the 8,192, whose basis would take a processor minutes.
SOAP_RECIPE = Soap(max_precond_dim=4_096)
PERIOD = SOAP_RECIPE.precondition_frequency
TIMELINE = Timeline(total_steps=100_000, steps_per_epoch=1_000)
PLAIN, ADAMW, SOAP = "plain loop", "ours, AdamW", "ours, SOAP"
LOW, COMPILED = "ours, AdamW, bfloat16", "ours, AdamW, compiled"


@dataclass(frozen=True)
class Setting:
    """Components and options of a training step."""

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
        """Return 8-bit crops of a batch of random images, as data workers return them."""
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


def clock_of(device: torch.device) -> Callable[[], float]:
    return time.perf_counter if device.type == "cuda" else time.thread_time


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of `work`: wall time on a GPU, processor time on a CPU."""
    clock = clock_of(device)
    synchronize(device)
    start = clock()
    work()
    synchronize(device)
    return 1e3 * (clock() - start)


@dataclass
class Candidate:
    """A training loop whose speed and memory are measured.

    Attributes:
        step_ms: Mean milliseconds per step in each turn.
    """

    take_step: Callable[[int], Any]
    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    device: torch.device
    steps: int = 0
    step_ms: list[float] = field(default_factory=list)

    def run(self, steps: int) -> float:
        """Take steps; return milliseconds per step, synchronised at the end."""

        def work() -> None:
            for _ in range(steps):
                self.take_step(self.steps)
                self.steps += 1

        return milliseconds(work, self.device) / steps

    def peak(self) -> float:
        """Return the peak MiB of a step, weights and optimizer state included."""
        return self._held() + peak_mebibytes(lambda: self.take_step(self.steps), self.device)

    def _held(self) -> float:
        tensors = [t for m in self.modules for t in (*m.parameters(), *m.buffers())]
        tensors += list(_tensors(list(self.optimizer.state.values())))
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) / MEBIBYTE


def ours(setting: Setting, recipe: OptimizerRecipe, groups: Any) -> tuple[Candidate, Trainer]:
    crops, device = setting.objective.crops, setting.device
    trainer = Trainer(
        setting.learner(), recipe, setting.train, TIMELINE, TrainingRanks(device=device)
    )

    def take_step(step: int) -> object:
        return trainer.take_step(step, (crops.finish(part, device) for part in [groups]))

    learner = trainer.learner
    assert isinstance(learner, nn.Module)
    return Candidate(take_step, [learner], trainer.optimizer, device), trainer


def plain(setting: Setting, groups: Any, rates: Callable[[int], dict[str, float]]) -> Candidate:
    dino = PlainDino(setting.learner(), setting.device, fused_attention=setting.fused_attention)
    finished = setting.objective.crops.finish(groups, torch.device("cpu"))
    crops = [view for group in finished for view in group.split(setting.batch)]
    if setting.device.type == "cuda":
        crops = [crop.pin_memory() for crop in crops]

    def take_step(step: int) -> object:
        return dino.step(crops, rates(step), setting.train.max_grad_norm or 0.0)

    return Candidate(take_step, [dino.student, dino.teacher], dino.optimizer, setting.device)


def step_records(setting: Setting, turns: int) -> list[dict[str, Any]]:
    """Return the measurements of the plain loop and of ours with several options."""
    groups = setting.groups()
    adamw, trainer = ours(setting, AdamW(), groups)
    soap, _ = ours(setting, SOAP_RECIPE, groups)
    candidates = {PLAIN: plain(setting, groups, trainer.values), ADAMW: adamw, SOAP: soap}
    if setting.device.type == "cpu":
        low, _ = ours(replace(setting, precision="bfloat16"), AdamW(), groups)
        compiled, _ = ours(replace(setting, compile=True), AdamW(), groups)
        candidates |= {LOW: low, COMPILED: compiled}
    for candidate in candidates.values():
        # Compiles, and builds the bases of SOAP.
        candidate.run(2)
    peaks = {name: candidate.peak() for name, candidate in candidates.items()}
    looks_ms: list[float] = []
    for _ in range(turns):
        for candidate in candidates.values():
            candidate.step_ms.append(candidate.run(PERIOD))
        looks_ms.append(finishing_ms(setting, groups))
    dtype = torch.bfloat16 if setting.train.uses_bfloat16(setting.device) else torch.float32
    # A run measures by the wall clock, which is not what steps are measured with on a processor.
    rates_apart = measure_product_rate(setting.device, dtype) / measure_product_rate(
        setting.device, dtype, clock_of(setting.device)
    )
    medians = {name: median(candidate.step_ms) for name, candidate in candidates.items()}
    return [
        {
            "row": name,
            "step_ms": ms,
            "turns_ms": candidates[name].step_ms,
            "images_per_second": 1e3 * setting.batch / ms,
            "times_plain": medians[PLAIN] / ms,
            "peak_mebibytes": peaks[name],
            "mfu": trainer.utilisation(ms / 1e3) * rates_apart,
            "augmentation_share": None if name == PLAIN else 100 * median(looks_ms) / ms,
            "times_adamw": None if name == PLAIN else ms / medians[ADAMW],
        }
        for name, ms in medians.items()
    ]


def finishing_ms(setting: Setting, groups: Any) -> float:
    """Return the milliseconds that the augmentations of a batch take on the device."""

    def work() -> None:
        for _ in range(PERIOD):
            setting.objective.crops.finish(groups, setting.device)

    return milliseconds(work, setting.device) / PERIOD


def measured_head(
    name: str, batch: int, *, device: torch.device, out_dim: int, num_views: int = 10
) -> tuple[float, float]:
    """Return peak MiB and milliseconds of a pass through projection head and loss.

    The forward and backward pass is measured without the encoder, which is replaced by flattened
    images of 3 x 8 x 16 values: 384 features. The peak includes the gradients of weights. `name` is
    PLAIN or ADAMW.
    """
    config = ViTConfig(image_size=8, patch_size=8, dim=384, depth=1)
    learner = Dino(out_dim=out_dim).build(config, TIMELINE, seed=0)
    learner.student.backbone = learner.teacher.backbone = nn.Flatten(1)
    views = torch.randn(num_views * batch, 3, 8, 16, device=device, requires_grad=True)
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list):
        for entry in value:
            yield from _tensors(entry)


def print_steps(records: list[dict[str, Any]]) -> None:
    print("| | step ms | images/s | x plain | peak MiB | MFU % | augmentation % | x AdamW |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in records:
        share, ratio = (
            "-" if row[key] is None else format(row[key], style)
            for key, style in (("augmentation_share", ".1f"), ("times_adamw", ".2f"))
        )
        print(
            f"| {row['row']} | {row['step_ms']:.0f} | {row['images_per_second']:.1f} "
            f"| {row['times_plain']:.2f} | {row['peak_mebibytes']:.0f} | {row['mfu']:.1f} "
            f"| {share} | {ratio} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--turns", type=int, default=2, help=f"turns of {PERIOD} steps each")
    parser.add_argument("--json", type=Path, help="file for the records")
    options = parser.parse_args()
    device, is_large = torch.device(options.device), options.device == "cuda"
    print(provenance())
    model, batch = ViTConfig(), 256
    if not is_large:
        model = ViTConfig(image_size=64, patch_size=8, dim=192, depth=4, num_heads=3)
        batch = 16
    objective = Dino(
        out_dim=65_536 if is_large else 8_192,
        # Bases of 2,048 directions would take a processor minutes.
        hidden_dim=2_048 if is_large else 384,
        # Every parameter takes part from the first step on.
        freeze_last_layer_epochs=0.0,
    )
    print(
        f"dim {model.dim}, depth {model.depth}, patch {model.patch_size}, {model.image_size} "
        f"pixels, 2 + 8 crops, batch {batch}, {objective.out_dim} prototypes"
    )
    records = step_records(Setting(device, model, objective, batch), options.turns)
    print_steps(records)
    if options.json:
        content = {"provenance": provenance(), "records": records}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
