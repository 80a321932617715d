"""Connect the processes of `torchrun`, which train one model together."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from typing import Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ssl_bench.errors import MachineError, SslBenchError
from ssl_bench.system.process import get_process_info

T = TypeVar("T")
# The process of rank 0 may read all images or write the last checkpoint for hours while others
# wait.
_OBJECT_TIMEOUT = timedelta(days=1)
# torch 2.15 renamed the option `broadcast_buffers`, and the old name prints a warning.
_NEW_OPTION, _OLD_OPTION = "forward_sync_buffers", "broadcast_buffers"
_has_new_option = _NEW_OPTION in signature(DistributedDataParallel).parameters
_BUFFER_OPTION = _NEW_OPTION if _has_new_option else _OLD_OPTION


class LostProcess(MachineError):
    """Error for a distributed run in which another process has ended or does not answer.

    All remaining processes raise this error, because they can no longer exchange data.
    """


@dataclass(frozen=True)
class TrainingRanks:
    """The processes that train together and share every batch, and the rank of this process.

    Each process has its own device. If one process fails inside a `synchronize_errors` block, all
    processes raise an error. Without `synchronize_errors`, the other processes would wait forever
    for a failed process.

    Attributes:
        device: Device of this process.
        rank: Rank of this process, from 0.
        world_size: Number of processes that train together.
        group: Process group that exchanges values in CPU memory, with a timeout of one day. The
            group is None if there is only one process.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    group: "dist.ProcessGroup | None" = None

    @property
    def is_main(self) -> bool:
        """Return whether this process has rank 0, which writes files and prints messages."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return a module whose gradients are averaged over all processes.

        Buffers, such as batch statistics, are not synchronised.
        """
        if self.world_size == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        no_buffers: dict[str, Any] = {_BUFFER_OPTION: False}
        return DistributedDataParallel(module, device_ids=devices, **no_buffers)

    def average(self, values: Tensor) -> Tensor:
        """Average a tensor over all processes in place, and return the tensor."""
        if self.world_size > 1:
            with _explain_lost_process():
                dist.all_reduce(values)
            values /= self.world_size
        return values

    def raise_on_all(self, error: Exception | None = None) -> None:
        """Raise an error in all processes if at least one process passes an error to this method.

        All processes must call this method the same number of times, because they exchange their
        errors. A `LostProcess` error is raised without exchanging errors, because another process
        can no longer answer. An error whose attribute `is_raised_on_all_ranks` is true is raised
        without exchanging errors, because all processes already have an error.

        Args:
            error: Error of this process, or None.

        Raises:
            Exception: The unchanged `error`, if there is only one process. If there are several
                processes, any error other than an `SslBenchError` becomes a `MachineError`. A
                process without an error of its own raises the error of the failed process with the
                lowest rank.
        """
        is_everywhere = getattr(error, "is_raised_on_all_ranks", False)
        if self.world_size > 1 and not (is_everywhere or isinstance(error, LostProcess)):
            error = self._exchange_errors(error)
        if error is not None:
            raise error

    def _exchange_errors(self, error: Exception | None) -> SslBenchError | None:
        if error is None or isinstance(error, SslBenchError):
            own = error
        else:
            own = MachineError(f"process {self.rank} failed: {type(error).__name__}: {error}")
            own.__cause__ = error
        errors: list[SslBenchError | None] = [None] * self.world_size
        has_failed = torch.tensor(int(own is not None))
        with _explain_lost_process():
            dist.all_reduce(has_failed, group=self.group)
            if not has_failed:
                return None
            dist.all_gather_object(errors, own, group=self.group)
        raised = own or next(other for other in errors if other is not None)
        raised.is_raised_on_all_ranks = True
        return raised

    @contextmanager
    def synchronize_errors(self) -> Generator[None]:
        """Raise an error in all processes if one process raises an error inside the `with` block.

        Processes without an error of their own raise the error at the end of the `with` block.
        """
        try:
            yield
        except Exception as error:
            self.raise_on_all(error)
        else:
            self.raise_on_all()

    def compute_on_main(self, compute: Callable[[], T]) -> T:
        """Call a function in the process of rank 0, and return its result in all processes.

        The other processes wait up to one day for the result of the process of rank 0. If the
        function raises an error, all processes raise an error.
        """
        results: list[T | None] = [None]
        with self.synchronize_errors():
            if self.is_main:
                results[0] = compute()
        if self.world_size > 1:
            with _explain_lost_process():
                dist.broadcast_object_list(results, src=0, group=self.group)
        return cast(T, results[0])

    def all_gather(self, value: T) -> list[T]:
        """Collect one value from each process, and return the values in the order of the ranks.

        The collected values should be small, because each value is pickled and sent to all
        processes.
        """
        if self.world_size == 1:
            return [value]
        self.raise_on_all()
        values: list[T | None] = [None] * self.world_size
        with _explain_lost_process():
            dist.all_gather_object(values, value, group=self.group)
        return cast(list[T], values)


@contextmanager
def init_distributed(device: torch.device, timeout: timedelta) -> Generator[TrainingRanks]:
    """Inside a `with` block, connect the processes that torchrun has started.

    Args:
        device: Device of this process. CUDA devices exchange tensors through NCCL.
        timeout: Maximum time to wait for the tensors of another process within a step.

    Raises:
        ConfigurationError: An environment variable of torchrun is missing or invalid.
        MachineError: The processes cannot connect.
    """
    world_size = get_process_info().world_size
    if world_size == 1:
        yield TrainingRanks(device)
        return
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MachineError(
            f"the {world_size} processes cannot connect at "
            f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']} "
            f"({reason}). Start them with torchrun"
        ) from error
    try:
        group = dist.new_group(backend="gloo", timeout=_OBJECT_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        yield TrainingRanks(device, dist.get_rank(), world_size, group)
    finally:
        dist.destroy_process_group()


@contextmanager
def _explain_lost_process() -> Generator[None]:
    """Inside a `with` block, replace torch's errors about lost connections by `LostProcess`."""
    try:
        yield
    except RuntimeError as error:
        raise lost_process_error(error) from error


def lost_process_error(error: RuntimeError) -> LostProcess:
    """Return the error for a lost connection to another process."""
    reason = str(error).strip().partition("\n")[0].partition(". ")[0]
    # Without a saved state, `--resume` starts the run again.
    return LostProcess(
        f"another process of this command has ended or does not answer ({reason})",
        hint=("--resume",),
    )


def is_connection_error(error: Exception) -> TypeGuard[RuntimeError]:
    """Return whether an error of torch says that the connection to another process is lost."""
    # NCCL has its own class of errors. Errors of Gloo name its C++ file.
    is_of_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return isinstance(error, dist.DistError) or is_of_gloo
