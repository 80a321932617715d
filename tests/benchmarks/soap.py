"""Compare the time per step of several optimizers on the same ViT.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.soap --dim 192 --depth 12

The gradients are random. Forward and backward passes are not measured.
"""

import argparse
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytorch_optimizer
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.optimizers.recipes import AdamW, Soap, parameter_groups
from pretrain.resources import synchronize
from ssl_bench.models import ViTConfig, build_vit
from tests.benchmarks.provenance import print_table

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
# SOAP refreshes each of its bases once in this number of steps.
PERIOD = 10
BUILDERS: dict[str, Build] = {
    "AdamW": AdamW().build,
    "SOAP": Soap().build,
    "SOAP, staggered": Soap(stagger=True).build,
    "pytorch_optimizer SOAP": lambda groups: pytorch_optimizer.SOAP(groups, lr=5e-4),
}


class OpCounter(TorchDispatchMode):
    """A `TorchDispatchMode` that counts all tensor operations except views."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += not func.is_view and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


class Candidate:
    """A model with an optimizer. The steps of the optimizer are timed."""

    def __init__(self, build: Build, config: ViTConfig, device: torch.device) -> None:
        self.device = device
        self.model = build_vit(config, seed=0).to(device)
        self.optimizer = build(parameter_groups(self.model.named_parameters()))
        # SOAP builds its bases in the first step.
        self.first_seconds = self._time_step()
        self.milliseconds: list[float] = []

    def run_period(self) -> None:
        self.milliseconds += [1e3 * self._time_step() for _ in range(PERIOD)]

    def count_operations(self) -> float:
        """Return the mean number of tensor operations per optimizer step."""
        with OpCounter() as counter:
            for _ in range(PERIOD):
                self.optimizer.step()
        return counter.total / PERIOD

    def _time_step(self) -> float:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        synchronize(self.device)
        start = time.perf_counter()
        self.optimizer.step()
        synchronize(self.device)
        return time.perf_counter() - start

    def row(self, name: str, adamw_ms: float) -> dict[str, str]:
        times = self.milliseconds
        return {
            "optimizer": name, "first s": f"{self.first_seconds:.2f}",
            "fastest ms": f"{min(times):.1f}", "slowest ms": f"{max(times):.1f}",
            "mean ms": f"{fmean(times):.1f}", "x AdamW": f"{fmean(times) / adamw_ms:.1f}",
            "ops a step": f"{self.count_operations():.0f}",
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--periods", type=int, default=2, help="refresh periods to average over")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = ViTConfig(dim=options.dim, depth=options.depth, num_heads=options.dim // 64)
    candidates = {
        name: Candidate(build, config, torch.device(options.device))
        for name, build in BUILDERS.items()
    }
    # The optimizers alternate, so that other load on the machine affects all of them.
    for _ in range(options.periods):
        for candidate in candidates.values():
            candidate.run_period()
    print(f"dim {options.dim}, depth {options.depth}, {options.device}, one CPU thread, float32")
    adamw = fmean(candidates["AdamW"].milliseconds)
    print_table([candidate.row(name, adamw) for name, candidate in candidates.items()])


if __name__ == "__main__":
    main()
