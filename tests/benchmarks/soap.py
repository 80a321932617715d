"""Compare the time of a step of several optimizers on the parameters of one encoder.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.soap --dim 192 --depth 12

Gradients are random, and forward and backward passes are not measured.
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
from ssl_bench.models import ViTConfig, build_vit

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
PERIOD = 10
BUILDERS: dict[str, Build] = {
    "AdamW": AdamW().build,
    "SOAP": Soap().build,
    "SOAP, staggered": Soap(stagger=True).build,
    "pytorch_optimizer SOAP": lambda groups: pytorch_optimizer.SOAP(groups, lr=5e-4),
}


class OpCounter(TorchDispatchMode):
    """Count tensor operations other than views."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += not func.is_view and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


class Candidate:
    """An optimizer with its own model and the durations of its steps.

    Attributes:
        first_seconds: Seconds of the first step, in which SOAP builds its bases.
        milliseconds: Milliseconds of all later steps.
    """

    def __init__(self, build: Build, config: ViTConfig, device: str) -> None:
        self.device = device
        self.model = build_vit(config, seed=0).to(device)
        self.optimizer = build(parameter_groups(self.model.named_parameters()))
        self.first_seconds = self._timed_step()
        self.milliseconds: list[float] = []

    def run_period(self) -> None:
        self.milliseconds += [1e3 * self._timed_step() for _ in range(PERIOD)]

    def ops(self) -> float:
        """Return the operations per step, averaged over a refresh period."""
        with OpCounter() as counter:
            for _ in range(PERIOD):
                self.optimizer.step()
        return counter.total / PERIOD

    def _timed_step(self) -> float:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self._wait()
        start = time.perf_counter()
        self.optimizer.step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def print_table(candidates: dict[str, Candidate]) -> None:
    print("| optimizer | first s | fastest ms | slowest ms | mean ms | x AdamW | ops a step |")
    print("|---|---|---|---|---|---|---|")
    adamw = fmean(candidates["AdamW"].milliseconds)
    for name, candidate in candidates.items():
        times, ops = candidate.milliseconds, candidate.ops()
        print(
            f"| {name} | {candidate.first_seconds:.2f} | {min(times):.1f} | {max(times):.1f} "
            f"| {fmean(times):.1f} | {fmean(times) / adamw:.1f} | {ops:.0f} |"
        )


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
        name: Candidate(build, config, options.device) for name, build in BUILDERS.items()
    }
    # Alternate, so that other load on the machine affects all of them.
    for _ in range(options.periods):
        for candidate in candidates.values():
            candidate.run_period()
    print(f"dim {options.dim}, depth {options.depth}, {options.device}, one CPU thread, float32")
    print_table(candidates)


if __name__ == "__main__":
    main()
