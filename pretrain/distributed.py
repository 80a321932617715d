"""The processes that train one model together: a single one, or those that `torchrun` starts."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ssl_bench.errors import MachineError, SslBenchError
from ssl_bench.system.process import get_process_info

T = TypeVar("T")
_PATIENCE = timedelta(days=1)
_known = signature(DistributedDataParallel).parameters
# The older name warns since torch 2.15.
_UNSENT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _known else "broadcast_buffers": False
}


@dataclass(frozen=True)
class TrainingRanks:
    """Where this process stands among those that share every batch, each on a device of its own.

    What they give each other begins with the question whether one of them met an error, so that
    an error anywhere within `fail_together` ends all of them, and none waits for one that is gone.

    Attributes:
        group: For what is not on a device; waits as long as it takes.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    group: "dist.ProcessGroup | None" = None

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over the processes."""
        if self.world_size == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, **_UNSENT_BUFFERS)

    def average(self, values: Tensor) -> Tensor:
        """Average a tensor over the processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
            values /= self.world_size
        return values

    def raise_on_all(self, error: Exception | None = None) -> None:
        """Raise in every process the error that one of them met.

        All processes must call this equally often, and between two calls they may meet as often as
        they like for other reasons. An error raised here is raised on every rank and marked as
        `is_raised_on_all_ranks`.

        Raises:
            SslBenchError: its own in a process that met one, elsewhere that of the first that did.
        """
        if self.world_size > 1 and not getattr(error, "is_raised_on_all_ranks", False):
            failed = torch.tensor(int(error is not None))
            met: list[SslBenchError | None] = [None] * self.world_size
            sent: Any = error
            if error is not None and not isinstance(error, SslBenchError):
                sent = MachineError(f"process {self.rank} failed: {type(error).__name__}: {error}")
            with _meeting():
                dist.all_reduce(failed, group=self.group)
                if failed:
                    dist.all_gather_object(met, sent, group=self.group)
            if failed:
                error = error or next(found for found in met if found is not None)
            if isinstance(error, SslBenchError):
                error.is_raised_on_all_ranks = True
        if error is not None:
            raise error

    @contextmanager
    def fail_together(self) -> Generator[None]:
        """Leave with what one of the processes met, or go on in all of them."""
        try:
            yield
        except Exception as error:
            self.raise_on_all(error)
        else:
            self.raise_on_all()

    def compute_on_main(self, compute: Callable[[], T]) -> T:
        """What the first process computes, for all of them, however long it takes."""
        box: list[T | None] = [None]
        with self.fail_together():
            if self.is_main:
                box[0] = compute()
        if self.world_size > 1:
            with _meeting():
                dist.broadcast_object_list(box, src=0, group=self.group)
        return cast(T, box[0])

    def gather(self, value: T) -> list[T]:
        """What each process gives, in their order; for what is small."""
        if self.world_size == 1:
            return [value]
        self.raise_on_all()
        values: list[T | None] = [None] * self.world_size
        with _meeting():
            dist.all_gather_object(values, value, group=self.group)
        return cast(list[T], values)


@contextmanager
def _meeting() -> Generator[None]:
    """What the library says where another process is gone, in words."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        gone = MachineError(f"another process of this command has ended ({reason}); start again")
        # There is nobody left to ask.
        gone.is_raised_on_all_ranks = True
        raise gone from error


@contextmanager
def join_ranks(device: torch.device, timeout: timedelta) -> Generator[TrainingRanks]:
    """Join the processes that torchrun's environment variables name, if there are others.

    Args:
        device: Of this process; between GPUs tensors are exchanged directly.
        timeout: How long one waits for another's part of a step before it gives up.

    Raises:
        ConfigurationError: as `get_process_info`.
        MachineError: they cannot meet.
    """
    count = get_process_info().world_size
    if count == 1:
        yield TrainingRanks(device)
        return
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MachineError(
            f"the {count} processes cannot meet at MASTER_ADDR={os.environ['MASTER_ADDR']}, "
            f"MASTER_PORT={os.environ['MASTER_PORT']} ({reason}); start them with torchrun"
        ) from error
    try:
        # Reading all images takes as long as it takes, and so does writing at the end.
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(group, dist.ProcessGroup)
        yield TrainingRanks(device, dist.get_rank(), count, group)
    finally:
        dist.destroy_process_group()
