"""Which images a step sees, in crops, and how they come from data workers.

What a step sees is a pure function of the step: no worker holds any state. Workers hand over what
they have cut in shared memory. Every worker has a few pieces of a batch in work or ready, and one
more is being read. A piece is as large as that lets it be: a whole part of a batch, or less.
"""

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from multiprocessing import active_children
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ssl_bench.data.files.readable import suggest_skipping
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import DataError, MachineError, UnreadableImage
from ssl_bench.system.endings import STOP_SIGNALS
from ssl_bench.system.process import free_shared_memory, local_world_size

# Keeps the streams of one seed apart.
_ORDER, _SAMPLE, _STEP = range(3)
# Pieces that a worker has in work or ready.
_PREFETCH = 2
# Each tensor begins a page of its own.
_PAGE = 4096
_GIB = 2**30


Samples = ImageSet | Sequence[Sample]


def read_image(images: Samples, index: int, *, skip: bool) -> Sample:
    """An image; in place of one that cannot be read, where `skip` says so, the next that can."""
    if not skip:
        return images[index]
    for further in range(len(images)):
        with suppress(UnreadableImage):
            return images[(index + further) % len(images)]
    raise DataError(f"none of the {len(images)} images can be read; fetch them again")


def decode_images(images: Samples, *, skip: bool = False) -> list[Sample]:
    """Decode everything once. Worker processes share the memory."""
    decoded = (read_image(images, index, skip=skip) for index in range(len(images)))
    try:
        return [replace(sample, mask=None, boxes=None) for sample in decoded]
    except UnreadableImage as error:
        raise suggest_skipping(error) from error


class ChunkWithReplacements(NamedTuple):
    """A piece in which others stand for images that were left out, given by their indices."""

    crops: Any
    left_out: tuple[int, ...]


@dataclass(frozen=True)
class BatchChunks(Dataset[Any]):
    """Piece number -> the crops of that piece of a part of a batch.

    Step s has the parts s * num_parts onwards, part p the pieces p * pieces onwards. The views of
    an image are the same in pieces of any size.

    An image that cannot be read comes back as the `DataError` itself, since an exception would
    lose its one line on the way out of a worker process. Where another may stand for it, the piece
    comes as `ChunkWithReplacements`.

    Attributes:
        batch_size: Images in an optimizer step, over all processes and accumulations.
        num_micro_batches: Accumulated parts a step.
        image_ids: Of the images, where the next may stand for one that cannot be read.
        num_chunks: That each part is cut in, equally many images each, give or take one.
        repeats: Times that each image of an epoch comes, one after the other, each time with
            randomness of its own. An epoch is as long as without, and so has as many times fewer
            images, drawn anew.

    Source: repeated augmentation, https://arxiv.org/abs/1901.09335, as `RASampler` of
    https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/samplers.py
    has it; there the repeats of an image go to different processes, here to the same one.
    """

    images: Samples
    cut: Callable[[list[Sample], list[np.random.Generator]], Any]
    batch_size: int
    seed: int
    num_micro_batches: int = 1
    rank: int = 0
    num_ranks: int = 1
    repeats: int = 1
    num_chunks: int = 1
    image_ids: Sequence[str] = ()

    @property
    def micro_batch_size(self) -> int:
        """Images of a part, which one process takes in one go."""
        return self.batch_size // (self.num_micro_batches * self.num_ranks)

    def __getitem__(self, index: int) -> Any:
        """A piece of a part."""
        part, place = divmod(index, self.num_chunks)
        first, end = (
            self.micro_batch_size * edge // self.num_chunks for edge in (place, place + 1)
        )
        keys, skip = self.list_sample_keys(part)[first:end], bool(self.image_ids)
        indices = sorted({key[1] for key in keys})
        try:
            found = {index: read_image(self.images, index, skip=skip) for index in indices}
        except UnreadableImage as error:
            return suggest_skipping(error)
        except DataError as error:
            return error
        samples = [found[index] for _, index, _ in keys]
        crops = self.cut(samples, [make_sample_generator(self.seed, *key) for key in keys])
        left_out = tuple(i for i in indices if skip and found[i].image_id != self.image_ids[i])
        return ChunkWithReplacements(crops, left_out) if left_out else crops

    def mark_used_images(self, steps: int) -> Bool[np.ndarray, " images"]:
        """Which images so many steps have, over all processes."""
        seen, in_epoch = np.zeros(len(self.images), bool), len(self.images) // self.batch_size
        for epoch in range(-(-steps // in_epoch)):
            taken = min(steps - epoch * in_epoch, in_epoch) * self.batch_size
            order = draw_epoch_order(len(self.images), self.seed, epoch)
            seen[order[: -(-taken // self.repeats)]] = True
            if seen.all():
                break
        return seen

    def list_sample_keys(self, part: int) -> list[tuple[int, int, int]]:
        """(epoch, index, repeat) of every image of a part."""
        step, place = divmod(part, self.num_micro_batches)
        epoch, batch = divmod(step, len(self.images) // self.batch_size)
        start = (
            batch * self.batch_size + (place * self.num_ranks + self.rank) * self.micro_batch_size
        )
        order = draw_epoch_order(len(self.images), self.seed, epoch)
        numbers = (
            divmod(number, self.repeats) for number in range(start, start + self.micro_batch_size)
        )
        return [(epoch, int(order[image]), repeat) for image, repeat in numbers]


@lru_cache(maxsize=2)
def draw_epoch_order(num_images: int, seed: int, epoch: int) -> Int64[np.ndarray, " images"]:
    """Every image once, shuffled anew each epoch; what fills no whole batch waits for the next."""
    return np.random.default_rng((_ORDER, seed, epoch)).permutation(num_images)


def make_sample_generator(
    seed: int, epoch: int, index: int, repeat: int = 0
) -> np.random.Generator:
    """Randomness of one image in one epoch, whatever batch or process it lands in."""
    key = (_SAMPLE, seed, epoch, index)
    # The first one's is what it would be without repeats.
    return np.random.default_rng((*key, repeat) if repeat else key)


def derive_step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of PyTorch's own generators for one step of one process."""
    (state,) = np.random.SeedSequence((_STEP, seed, step, rank)).generate_state(1, np.uint64)
    return int(state)


@dataclass(frozen=True)
class WorkerPlan:
    """How the batches of one process come from its data workers.

    Attributes:
        num_requested: Workers that this process would have.
        num_workers: Those that it has; with 0 it reads itself.
        num_chunks: That each part of a batch comes in.
        shared_bytes: What all processes of this machine hold in shared memory at most.
        free_bytes: Of shared memory, where they are what limits.
    """

    num_requested: int = 0
    num_workers: int = 0
    num_chunks: int = 1
    shared_bytes: int = 0
    free_bytes: int | None = None

    def __str__(self) -> str:
        each = f" for each of {local_world_size()} processes" if local_world_size() > 1 else ""
        line = f"data workers: {self.num_workers}{each}, up to {self.shared_bytes / _GIB:.2g} GiB"
        line += " of shared memory"
        if self.num_chunks > 1:
            line += f", batches in {self.num_chunks} pieces"
        if self.free_bytes is not None:
            line += f"; /dev/shm has {self.free_bytes / _GIB:.2g} GiB free"
        return line


def plan_workers(batches: BatchChunks, num_requested: int, max_gib: float) -> WorkerPlan:
    """As many workers as asked for, with pieces so small that they fit.

    What is free is halved, since other programs want some. Where not even pieces of one image fit,
    there are fewer workers.

    Args:
        batches: Not cut into pieces yet.
        num_requested: Workers of this process.
        max_gib: Shared memory for all processes of this machine.
    """
    if not num_requested:
        return WorkerPlan()
    most, free = int(max_gib * _GIB), free_shared_memory()
    if free is not None and free // 2 >= most:
        # Not what limits.
        free = None
    budget = (most if free is None else free // 2) // local_world_size()
    # Bytes of what is cut from one image, and what a piece of any size has beside them.
    blank = Sample("blank", np.zeros((8, 8, 3), np.uint8), label=0)
    tensors = list(_tensors(batches.cut([blank], [np.random.default_rng(0)])))
    image, edges = sum(tensor.nbytes for tensor in tensors), _PAGE * len(tensors)
    count = min(num_requested, (budget // (image + edges) - 1) // _PREFETCH)
    if count < 1:
        return WorkerPlan(num_requested, free_bytes=free)
    held, size = count * _PREFETCH + 1, batches.micro_batch_size
    most_images = min(size, (budget // held - edges) // image)
    pieces = -(-size // most_images)
    largest = -(-size // pieces)
    shared = local_world_size() * held * (largest * image + edges)
    return WorkerPlan(num_requested, count, pieces, shared, free)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        value = [getattr(value, item.name) for item in fields(value)]
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def load_chunks(
    batches: BatchChunks, workers: WorkerPlan, parts: range, device: torch.device
) -> Generator[Any, None, None]:
    """The pieces of all those parts, in order; the last is an error if a data worker dies."""
    loader = DataLoader(
        replace(batches, num_chunks=workers.num_chunks),
        batch_size=None,
        sampler=range(parts.start * workers.num_chunks, parts.stop * workers.num_chunks),
        num_workers=workers.num_workers,
        prefetch_factor=_PREFETCH if workers.num_workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_stop_signals,
        # It draws a number when iterated, which must not come out of the global generator.
        generator=torch.Generator(),
    )
    pieces, before = None, active_children()
    try:
        pieces = iter(loader)
        with postpone_worker_deaths():
            yield from pieces
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        yield MachineError(
            f"a data worker died ({str(error).splitlines()[0]}); memory or /dev/shm may be too "
            "small",
            hint=("train.shared_memory_gib={number}", "or", "train.num_workers=0"),
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


@contextmanager
def postpone_worker_deaths() -> Generator[None]:
    """Keep a data worker's death from raising wherever the main thread is, mid-step included.

    torch's own handler does so once a loader has workers. Without it the loader looks whether
    its workers live while it waits for them, every five seconds, and raises there.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def ignore_stop_signals(worker: int) -> None:
    """Keep a data worker alive when the whole process group is asked to stop.

    Only the first SIGTERM is passed over: with a second one the parent ends a worker that hangs.
    """
    del worker
    for name in (*STOP_SIGNALS, "SIGINT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_the_next)


def _obey_the_next(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
