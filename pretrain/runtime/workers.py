"""Data workers, and the shared memory in which they hand over what they have cut.

Every worker has a few pieces of a batch in work or ready, and one more is being read. A piece is
as large as that lets it be: a whole part of a batch, or as few images as fit.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from multiprocessing import active_children
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pretrain.runtime.batches import Batches
from pretrain.runtime.signals import deaths_of_workers_wait, leave_signals_to_the_parent
from ssl_bench.data.samples import Sample
from ssl_bench.errors import MachineError
from ssl_bench.system.launch import processes_here
from ssl_bench.system.memory import free_shared_memory

# Pieces that a worker has in work or ready.
_PREFETCH = 2
# Each tensor begins a page of its own.
_PAGE = 4096
_GIB = 2**30


@dataclass(frozen=True)
class Workers:
    """How the batches of one process come from its data workers.

    Attributes:
        asked: Workers that this process would have.
        count: Those that it has; with 0 it reads itself.
        pieces: That each part of a batch comes in.
        shared_bytes: What all processes of this machine hold in shared memory at most.
        free_bytes: Of shared memory, where they are what limits.
    """

    asked: int = 0
    count: int = 0
    pieces: int = 1
    shared_bytes: int = 0
    free_bytes: int | None = None

    def __str__(self) -> str:
        each = f" for each of {processes_here()} processes" if processes_here() > 1 else ""
        line = f"data workers: {self.count}{each}, up to {self.shared_bytes / _GIB:.2g} GiB"
        line += " of shared memory"
        if self.pieces > 1:
            line += f", batches in {self.pieces} pieces"
        if self.free_bytes is not None:
            line += f"; /dev/shm has {self.free_bytes / _GIB:.2g} GiB free"
        return line


def plan_workers(batches: Batches, asked: int, most_gib: float) -> Workers:
    """As many workers as asked for, with pieces so small that they fit.

    What is free is halved, since other programs want some. Where not even pieces of one image fit,
    there are fewer workers.

    Args:
        batches: Not cut into pieces yet.
        asked: Workers of this process.
        most_gib: Shared memory for all processes of this machine.
    """
    if not asked:
        return Workers()
    budget, free = _budget(int(most_gib * _GIB))
    image, edges = image_bytes(batches)
    count = min(asked, (budget // (image + edges) - 1) // _PREFETCH)
    if count < 1:
        return Workers(asked, free_bytes=free)
    held, size = count * _PREFETCH + 1, batches.share.size
    most_images = min(size, (budget // held - edges) // image)
    pieces = -(-size // most_images)
    largest = -(-size // pieces)
    shared = processes_here() * held * (largest * image + edges)
    return Workers(asked, count, pieces, shared, free)


def _budget(most: int) -> tuple[int, int | None]:
    """Bytes for each process, and what is free where that is why they are not more."""
    free = free_shared_memory()
    if free is None or free // 2 >= most:
        return most // processes_here(), None
    return free // 2 // processes_here(), free


def image_bytes(batches: Batches) -> tuple[int, int]:
    """Bytes of what is cut from one image, and what a piece of any size has beside them."""
    blank = Sample("blank", np.zeros((8, 8, 3), np.uint8), label=0)
    tensors = list(_tensors(batches.cut([blank], [np.random.default_rng(0)])))
    return sum(tensor.nbytes for tensor in tensors), _PAGE * len(tensors)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))


def arriving(
    batches: Batches, workers: Workers, parts: range, device: torch.device
) -> Generator[Any, None, None]:
    """The pieces of all those parts, in order; the last is an error if a data worker dies."""
    loader = DataLoader(
        replace(batches, pieces=workers.pieces),
        batch_size=None,
        sampler=range(parts.start * workers.pieces, parts.stop * workers.pieces),
        num_workers=workers.count,
        prefetch_factor=_PREFETCH if workers.count else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals_to_the_parent,
        # It draws a number when iterated, which must not come out of the global generator.
        generator=torch.Generator(),
    )
    pieces, before = None, active_children()
    try:
        pieces = iter(loader)
        with deaths_of_workers_wait():
            yield from pieces
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        yield MachineError(
            f"a data worker died ({str(error).splitlines()[0]}); memory or /dev/shm may be too "
            "small: lower train.shared_memory_gib or try train.num_workers=0"
        )
    finally:
        # A traceback may keep this frame alive, and with it the workers.
        del pieces
        # torch forgets those of a loader that could not begin. They pass over the one SIGTERM that
        # comes when this process ends, which would wait for them for ever.
        for worker in active_children():
            if worker not in before:
                worker.kill()
                worker.join()
