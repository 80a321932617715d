"""The processes of one run: a single one, or those that `torchrun` starts."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that train together."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over the processes."""
        if self.count == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, broadcast_buffers=False)

    def mean(self, values: Tensor) -> Tensor:
        """Average a tensor over the processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.count > 1:
            dist.barrier()

    def from_first(self, compute: Callable[[], T]) -> T:
        """What the first process computes, for all of them, however long it takes."""
        if self.count == 1:
            return compute()
        # Over a group of its own: others give up after minutes, and reading all images takes more.
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(group, dist.ProcessGroup)
        box = [compute() if self.is_first else None]
        dist.broadcast_object_list(box, src=0, group=group)
        return cast(T, box[0])


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun's environment variables name, if there are any."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(device, dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
