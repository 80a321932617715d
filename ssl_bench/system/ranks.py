"""The processes of one command: a single one, or those that `torchrun` starts."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from ssl_bench.errors import ConfigurationError, MachineError, SslBenchError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

T = TypeVar("T")
_PATIENCE = timedelta(days=1)
_MOST = 1_000_000


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that work together.

    What they give each other begins with the question whether one of them met an error, so that
    an error anywhere within `together` ends all of them, and none waits for one that is gone.

    Attributes:
        group: For what is not on a device; waits as long as it takes.
    """

    rank: int = 0
    count: int = 1
    group: "dist.ProcessGroup | None" = None

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.rank == 0

    def shares(self, items: int) -> list[range]:
        """Indices of each process, one after the other, their numbers as equal as can be."""
        ends = [-(-items * rank // self.count) for rank in range(self.count + 1)]
        return [range(*pair) for pair in itertools.pairwise(ends)]

    def share(self, items: int) -> range:
        """Indices of this process."""
        return self.shares(items)[self.rank]

    def agree(self, error: Exception | None = None) -> None:
        """Raise in every process the error that one of them met.

        All processes must call this equally often, and between two calls they may meet as often as
        they like for other reasons. What is raised was raised everywhere, `is_shared` says so.

        Raises:
            SslBenchError: its own in a process that met one, elsewhere that of the first that did.
        """
        if self.count > 1 and (error is None or not _is_shared(error)):
            error = self._first_error(error)
        if error is not None:
            raise error

    def _first_error(self, error: Exception | None) -> Exception | None:
        import torch
        import torch.distributed as dist

        failed = torch.tensor(int(error is not None))
        met: list[SslBenchError | None] = [None] * self.count
        with _meeting():
            dist.all_reduce(failed, group=self.group)
            if failed:
                dist.all_gather_object(met, _sendable(error, self.rank), group=self.group)
        if not failed:
            return None
        own = error or next(found for found in met if found is not None)
        if isinstance(own, SslBenchError):
            own.is_shared = True
        return own

    @contextmanager
    def together(self) -> Iterator[None]:
        """Leave with what one of the processes met, or go on in all of them."""
        try:
            yield
        except Exception as error:
            self.agree(error)
        else:
            self.agree()

    def from_first(self, compute: Callable[[], T]) -> T:
        """What the first process computes, for all of them, however long it takes."""
        box: list[T | None] = [None]
        with self.together():
            if self.is_first:
                box[0] = compute()
        if self.count > 1:
            import torch.distributed as dist

            with _meeting():
                dist.broadcast_object_list(box, src=0, group=self.group)
        return cast(T, box[0])

    def after_first(self, compute: Callable[[], T]) -> T:
        """What each computes, the others once the first has, who may leave them files of use."""
        found: list[T] = []
        for is_turn in (self.is_first, not self.is_first):
            with self.together():
                if is_turn:
                    found.append(compute())
        return found[0]

    def gathered(self, value: T) -> list[T]:
        """What each process gives, in their order; for what is small."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        self.agree()
        values: list[T | None] = [None] * self.count
        with _meeting():
            dist.all_gather_object(values, value, group=self.group)
        return cast(list[T], values)

    def completed(self, values: "Tensor", dim: int, parts: Sequence[range]) -> "Tensor":
        """Fill in, in place, what the other processes have of a tensor in host memory.

        Args:
            values: Of one shape in all processes.
            dim: Along which each has filled a part.
            parts: Indices that each has filled.
        """
        if self.count > 1:
            import torch.distributed as dist

            self.agree()
            for rank, part in enumerate(parts):
                own = values.narrow(dim, part.start, len(part))
                sent = own.contiguous()
                with _meeting():
                    dist.broadcast(sent, src=rank, group=self.group)
                own.copy_(sent)
        return values

    def exchanged(self, messages: Sequence["Tensor"], sizes: Sequence[int]) -> list["Tensor"]:
        """Send each process its bytes; those that each has sent here.

        Args:
            messages: uint8, on one device, one for each process.
            sizes: Of what each process sends here.
        """
        import torch
        import torch.distributed as dist

        self.agree()
        sent = torch.cat([*messages])
        got = sent.new_empty(sum(sizes))
        lengths = [len(message) for message in messages]
        group = None if sent.is_cuda else self.group
        with _meeting():
            dist.all_to_all_single(got, sent, [*sizes], lengths, group=group)
        return list(got.split([*sizes]))


ALONE = Ranks()


def _is_shared(error: Exception) -> bool:
    return isinstance(error, SslBenchError) and error.is_shared


def _sendable(error: Exception | None, rank: int) -> SslBenchError | None:
    """An error as another process can raise it."""
    if error is None or isinstance(error, SslBenchError):
        return error
    return MachineError(f"process {rank} failed: {type(error).__name__}: {error}")


@contextmanager
def _meeting() -> Iterator[None]:
    """What the library says where another process is gone, in words."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        gone = MachineError(f"another process of this command has ended ({reason}); start again")
        # There is nobody left to ask.
        gone.is_shared = True
        raise gone from error


@dataclass(frozen=True)
class Place:
    """What torchrun's environment variables say of this process.

    Attributes:
        count: Processes of the command; without others nothing else is said.
        local_rank: Number on this machine, where the variables say it.
        here: Processes that this machine has.
    """

    rank: int = 0
    count: int = 1
    local_rank: int | None = None
    here: int = 1


def place_of_process() -> Place:
    """Which of how many processes this is; a single one where WORLD_SIZE is not there or 1.

    Raises:
        ConfigurationError: a variable is missing or no such number.
    """
    count = _number("WORLD_SIZE", range(1, _MOST), "1")
    if count == 1:
        _number("RANK", range(1), "0")
        return Place()
    if not os.environ.get("MASTER_ADDR"):
        raise _wrong("MASTER_ADDR", "an address")
    _number("MASTER_PORT", range(1, 65_536))
    local_rank = _number("LOCAL_RANK", range(count)) if os.environ.get("LOCAL_RANK") else None
    here = _number("LOCAL_WORLD_SIZE", range(1, count + 1), "1")
    return Place(_number("RANK", range(count)), count, local_rank, here)


def _number(name: str, legal: range, default: str = "") -> int:
    text = os.environ.get(name) or default
    if text.isascii() and text.isdecimal() and int(text) in legal:
        return int(text)
    raise _wrong(name, f"a number of {legal[0]} to {legal[-1]}" if len(legal) > 1 else "0")


def _wrong(name: str, expected: str) -> ConfigurationError:
    size, came = (os.environ.get(key) or "not set" for key in ("WORLD_SIZE", name))
    return ConfigurationError(
        f"the environment variable {name} expects {expected} where WORLD_SIZE is {size}, got "
        f"{came}; start several processes with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK "
        "for a single one"
    )


def is_heard() -> bool:
    """Whether this process says what all of a command meet; of several, one is enough."""
    try:
        return place_of_process().rank == 0
    except ConfigurationError:
        return True


def processes_here() -> int:
    """How many processes of the command this machine has."""
    return place_of_process().here


@contextmanager
def joined(timeout: timedelta = _PATIENCE, *, on_cuda: bool) -> Iterator[Ranks]:
    """Join the processes that torchrun's environment variables name, if there are others.

    Args:
        timeout: How long one waits for another's part of a step before it gives up.
        on_cuda: Whether tensors are exchanged between GPUs, of which the current one is this
            process's.

    Raises:
        ConfigurationError: as `place_of_process`.
        MachineError: they cannot meet.
    """
    count = place_of_process().count
    if count == 1:
        yield ALONE
        return
    import torch.distributed as dist

    try:
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout)
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
        yield Ranks(dist.get_rank(), count, group)
    finally:
        dist.destroy_process_group()
