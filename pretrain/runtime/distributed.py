"""The processes that train one model together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ssl_bench.system.ranks import Ranks, joined

_known = signature(DistributedDataParallel).parameters
# The older name warns since torch 2.15.
_UNSENT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _known else "broadcast_buffers": False
}


@dataclass(frozen=True)
class TrainingRanks(Ranks):
    """Processes that share every batch, each on a device of its own."""

    device: torch.device = field(kw_only=True)

    def wrap(self, module: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over the processes."""
        if self.count == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, **_UNSENT_BUFFERS)

    def mean(self, values: Tensor) -> Tensor:
        """Average a tensor over the processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values


@contextmanager
def training_together(device: torch.device, timeout: timedelta) -> Iterator[TrainingRanks]:
    """Join the processes that torchrun started, if it did; see `joined`."""
    with joined(timeout, on_cuda=device.type == "cuda") as ranks:
        yield TrainingRanks(ranks.rank, ranks.count, ranks.group, device=device)
