"""Choose the images of each optimizer step, and load their crops with data worker processes.

An optimizer step trains on one batch, which the processes of torchrun share equally. Each process
divides its share into `train.accumulation` micro-batches, whose gradients are averaged.

A chunk is a whole micro-batch or, if shared memory is too small, a part of a micro-batch. A data
worker crops the images of one chunk at a time, and passes the crops to the training process through
shared memory.

The images and crops of a step depend only on the seed and the step number. Data workers therefore
have no state that a resumed run must restore.
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
from ssl_bench.errors import DataError, MachineError, UnreadableImageError
from ssl_bench.system.endings import STOP_SIGNALS
from ssl_bench.system.process import free_shared_memory, local_world_size

# The first number of each seed. It makes the random numbers for the order of images, for crops and
# for steps independent.
_ORDER, _SAMPLE, _STEP = range(3)
# Number of chunks that a data worker prepares in advance.
_PREFETCH = 2
# In shared memory, each tensor starts at a multiple of this number of bytes.
_PAGE = 4096
_GIB = 2**30

Samples = ImageSet | Sequence[Sample]


@dataclass(frozen=True)
class BatchChunks(Dataset[Any]):
    """A dataset whose items (chunks) contain the crops of a micro-batch or of a part of it.

    In each process, chunk numbers start with 0 at the start of the run. For example, with two
    micro-batches per step and three chunks per micro-batch, chunks 0 to 5 belong to step 0. The
    crops of an image do not depend on the sizes of batches, micro-batches and chunks.

    An item of this dataset is the return value of `cut`, except in two cases:

    - If unreadable images were replaced by other images, the item is a `ChunkWithReplacements`.
    - If an image cannot be read and must not be replaced, the item is a `DataError`. If the dataset
      raised the error, PyTorch would replace its message by a traceback of the data worker.

    Source of repeated augmentation (several crops of an image in one batch):
    https://arxiv.org/abs/1901.09335, and `RASampler` of
    https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/samplers.py
    This dataset keeps the repeated crops of an image together, but `RASampler` distributes them
    over processes.

    Attributes:
        cut: Function that returns the crops of a list of images. Its second argument contains one
            random generator for each image.
        batch_size: Number of images in an optimizer step, over all processes. An image that occurs
            several times in the step counts several times.
        seed: Seed of the run.
        num_micro_batches: Number of micro-batches that each process computes in a step.
        num_ranks: Number of processes that share a batch.
        repeats: Number of times that an image occurs in an epoch, each time with other crops.
            Repeats do not change the number of steps in an epoch, so an epoch uses only a random
            fraction 1 / `repeats` of the images.
        num_chunks: Number of chunks in a micro-batch. The chunk sizes differ by at most one image.
        image_ids: Ids of all images, or an empty sequence. If ids are given, an unreadable image is
            replaced by the next readable image. Without ids, an unreadable image leads to an error.
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
        """Return the number of images in a micro-batch of one process."""
        return self.batch_size // (self.num_micro_batches * self.num_ranks)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of complete batches in an epoch."""
        return len(self.images) // self.batch_size

    def __getitem__(self, index: int) -> Any:
        micro_batch, chunk = divmod(index, self.num_chunks)
        first, end = (self.micro_batch_size * n // self.num_chunks for n in (chunk, chunk + 1))
        keys = self.list_sample_keys(micro_batch)[first:end]
        indices, may_replace = sorted({key.index for key in keys}), bool(self.image_ids)
        try:
            samples = {i: _read_image(self.images, i, may_replace=may_replace) for i in indices}
        except UnreadableImageError as error:
            return suggest_skipping(error)
        except DataError as error:
            return error
        crops = self.cut(
            [samples[key.index] for key in keys],
            [make_sample_generator(self.seed, *key) for key in keys],
        )
        if not may_replace:
            return crops
        left_out = tuple(i for i in indices if samples[i].image_id != self.image_ids[i])
        return ChunkWithReplacements(crops, left_out) if left_out else crops

    def list_sample_keys(self, micro_batch: int) -> list["SampleKey"]:
        """Return the images to crop for one micro-batch of this process.

        In a batch, the first micro-batches of all processes come first, then the second
        micro-batches of all processes, and so on. The images of a batch do not depend on the
        numbers of processes and micro-batches.

        Args:
            micro_batch: Number of the micro-batch, counted from 0 at the start of the run.
        """
        step, number = divmod(micro_batch, self.num_micro_batches)
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = draw_epoch_order(len(self.images), self.seed, epoch)
        start = batch * self.batch_size
        start += (number * self.num_ranks + self.rank) * self.micro_batch_size
        positions = range(start, start + self.micro_batch_size)
        places = (divmod(position, self.repeats) for position in positions)
        return [SampleKey(epoch, int(order[place]), repeat) for place, repeat in places]

    def mark_used_images(self, num_steps: int) -> Bool[np.ndarray, " images"]:
        """Return for each image whether any process trains on it in the first `num_steps` steps."""
        is_used = np.zeros(len(self.images), bool)
        for epoch in range(-(-num_steps // self.steps_per_epoch)):
            steps = min(num_steps - epoch * self.steps_per_epoch, self.steps_per_epoch)
            num_crops = steps * self.batch_size
            order = draw_epoch_order(len(self.images), self.seed, epoch)
            is_used[order[: -(-num_crops // self.repeats)]] = True
            if is_used.all():
                break
        return is_used


class SampleKey(NamedTuple):
    """Three numbers that identify one use of an image in training, all counted from 0.

    `index` is the position of the image in the dataset. `repeat` is the number of earlier uses of
    the image in the same epoch.
    """

    epoch: int
    index: int
    repeat: int


class ChunkWithReplacements(NamedTuple):
    """The crops of a chunk (part of a micro-batch) after unreadable images have been replaced.

    Attributes:
        crops: Crops of the readable images and of the replacements, as returned by `cut`.
        left_out: Dataset indices of the unreadable images.
    """

    crops: Any
    left_out: tuple[int, ...]


@lru_cache(maxsize=2)
def draw_epoch_order(num_images: int, seed: int, epoch: int) -> Int64[np.ndarray, " images"]:
    """Return the indices of all images in random order, for one epoch.

    An epoch consists of complete batches, so the last images of the random order may be left out.
    """
    return np.random.default_rng((_ORDER, seed, epoch)).permutation(num_images)


def make_sample_generator(
    seed: int, epoch: int, index: int, repeat: int = 0
) -> np.random.Generator:
    """Return the random number generator for the crops of an image.

    An image is cropped differently in each epoch and, with repeated augmentation, in each use
    within an epoch. The crops of an image do not depend on the batch, the process or the data
    worker.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        index: Index of the image in the dataset.
        repeat: Number of earlier uses of this image in the same epoch. With repeated augmentation,
            an epoch uses an image several times.
    """
    key = (_SAMPLE, seed, epoch, index)
    # The first repeat has the same crops as in a run without repeats.
    return np.random.default_rng((*key, repeat) if repeat else key)


def derive_step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of PyTorch's random generators for one step of one process.

    The seed depends only on the arguments, so a resumed run draws the same random numbers as an
    uninterrupted run.

    Args:
        seed: Seed of the run.
        step: Number of the optimizer step, from 0.
        rank: Rank of the process.
    """
    (state,) = np.random.SeedSequence((_STEP, seed, step, rank)).generate_state(1, np.uint64)
    return int(state)


def decode_images(images: Samples, *, skip: bool = False) -> list[Sample]:
    """Decode all images once, so that data workers can share the decoded images in memory.

    The returned samples contain images and labels, but no masks or boxes.

    Args:
        images: Training images.
        skip: Whether to replace an unreadable image by the next readable image.

    Raises:
        DataError: An image is unreadable and `skip` is false, or all images are unreadable.
    """
    try:
        samples = (_read_image(images, index, may_replace=skip) for index in range(len(images)))
        return [replace(sample, mask=None, boxes=None) for sample in samples]
    except UnreadableImageError as error:
        raise suggest_skipping(error) from error


def _read_image(images: Samples, index: int, *, may_replace: bool) -> Sample:
    """Read an image, or the next readable image if this image is unreadable and may be replaced."""
    if not may_replace:
        return images[index]
    for offset in range(len(images)):
        with suppress(UnreadableImageError):
            return images[(index + offset) % len(images)]
    raise DataError(f"none of the {len(images)} images can be read. Download or copy them again")


@dataclass(frozen=True)
class WorkerPlan:
    """Number of data workers of a process, and their use of shared memory (/dev/shm).

    Attributes:
        num_requested: Number of data workers that `train.num_workers` requests.
        num_workers: Number of data workers for which there is enough shared memory. If the number
            is 0, the training process reads images itself.
        num_chunks: Number of chunks (parts) into which each micro-batch is divided. A data worker
            crops one chunk at a time.
        shared_bytes: Maximum use of shared memory in bytes, by all processes of this machine.
        free_bytes: Free shared memory in bytes, or None if the numbers of data workers and chunks
            are not limited by the free memory.
    """

    num_requested: int = 0
    num_workers: int = 0
    num_chunks: int = 1
    shared_bytes: int = 0
    free_bytes: int | None = None

    def __str__(self) -> str:
        """Describe the data workers and their use of shared memory in one line, for a message."""
        processes = f" for each of {local_world_size()} processes" if local_world_size() > 1 else ""
        line = f"data workers: {self.num_workers}{processes}, up to "
        line += f"{self.shared_bytes / _GIB:.2g} GiB of shared memory"
        if self.num_chunks > 1:
            line += f", batches in {self.num_chunks} chunks"
        if self.free_bytes is not None:
            line += f", because /dev/shm has {self.free_bytes / _GIB:.2g} GiB free"
        return line


def plan_workers(batches: BatchChunks, num_requested: int, max_gib: float) -> WorkerPlan:
    """Choose the numbers of data workers and chunks so that crops fit into shared memory.

    Shared memory holds two chunks (parts of a micro-batch) of each data worker, and one chunk that
    the training process reads. Chunks are as large as the limit of shared memory allows. If chunks
    of a single image do not fit into shared memory, fewer data workers than requested are used.

    At most half of the free shared memory is used, because other programs may need the rest.

    Args:
        batches: Dataset in which each micro-batch is one chunk (`num_chunks` = 1).
        num_requested: Number of data workers to use if shared memory is large enough.
        max_gib: Limit of shared memory in GiB, for all processes of this machine together.
    """
    if not num_requested:
        return WorkerPlan()
    max_bytes, free = int(max_gib * _GIB), free_shared_memory()
    if free is not None and free // 2 < max_bytes:
        max_bytes = free // 2
    else:
        free = None
    budget = max_bytes // local_world_size()
    # The crops of a blank image need as much memory as the crops of any other image.
    blank = Sample("blank", np.zeros((8, 8, 3), np.uint8), label=0)
    tensors = list(_iterate_tensors(batches.cut([blank], [np.random.default_rng(0)])))
    image_bytes, padding = sum(tensor.nbytes for tensor in tensors), _PAGE * len(tensors)

    max_chunks = budget // (image_bytes + padding)
    num_workers = min(num_requested, (max_chunks - 1) // _PREFETCH)
    if num_workers < 1:
        return WorkerPlan(num_requested, free_bytes=free)
    chunks_in_memory = num_workers * _PREFETCH + 1
    max_images = (budget // chunks_in_memory - padding) // image_bytes
    num_chunks = -(-batches.micro_batch_size // min(batches.micro_batch_size, max_images))
    largest_chunk = -(-batches.micro_batch_size // num_chunks)
    shared = local_world_size() * chunks_in_memory * (largest_chunk * image_bytes + padding)
    return WorkerPlan(num_requested, num_workers, num_chunks, shared, free)


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for item in fields(value):
            yield from _iterate_tensors(getattr(value, item.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _iterate_tensors(item)


def load_chunks(
    batches: BatchChunks, workers: WorkerPlan, micro_batches: range, device: torch.device
) -> Generator[Any, None, None]:
    """Load the crops of some micro-batches with data workers, and yield them in order.

    A yielded value contains the crops of one chunk (part of a micro-batch). If a data worker dies,
    the last yielded value is a `MachineError`. Closing the generator ends all data workers.

    Args:
        batches: The dataset, whose `num_chunks` is replaced by `workers.num_chunks`.
        workers: Number of data workers, and number of chunks (parts) of each micro-batch.
        micro_batches: Numbers of the micro-batches, counted from the start of the run.
        device: Device of this process. For CUDA devices, tensors are copied to pinned memory.
    """
    num_chunks = workers.num_chunks
    loader = DataLoader(
        replace(batches, num_chunks=num_chunks),
        batch_size=None,
        sampler=range(micro_batches.start * num_chunks, micro_batches.stop * num_chunks),
        num_workers=workers.num_workers,
        prefetch_factor=_PREFETCH if workers.num_workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_ignore_stop_signals,
        # Without this argument, DataLoader would draw from PyTorch's global generator.
        generator=torch.Generator(),
    )
    chunks, children_before = None, active_children()
    try:
        chunks = iter(loader)
        with _postpone_worker_deaths():
            yield from chunks
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        yield MachineError(
            f"a data worker died ({str(error).splitlines()[0]}). Main memory or /dev/shm may be "
            "too small",
            hint=("train.shared_memory_gib={number}", "or", "train.num_workers=0"),
        )
    finally:
        # A traceback may keep this frame and its variables alive, and with them the data workers.
        del chunks
        # If a loader fails to start, torch does not end the data workers that it has already
        # started. They ignore the first SIGTERM, so the training process would wait for them.
        for child in active_children():
            if child not in children_before:
                child.kill()
                child.join()


@contextmanager
def _postpone_worker_deaths() -> Generator[None]:
    """Inside a `with` block, do not interrupt the current step if a data worker dies.

    By default, a signal handler of torch raises an error as soon as a data worker dies. Inside the
    `with` block, the error for a dead data worker is raised when the training process next waits
    for crops, because a waiting DataLoader checks its workers every five seconds.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or not hasattr(signal, "SIGCHLD"):
        yield
        return
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous)


def _ignore_stop_signals(worker: int) -> None:
    """Keep a data worker alive when a signal stops the whole process group.

    A data worker ignores signals such as Ctrl-C, so that it can deliver the crops of the last step.
    Only the first SIGTERM is ignored, so that a second SIGTERM can end a hanging data worker.
    """
    del worker
    for name in (*STOP_SIGNALS, "SIGINT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _restore_default_handler)


def _restore_default_handler(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
