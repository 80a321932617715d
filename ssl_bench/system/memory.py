"""Too little memory, under all the names that libraries have for it; the search for cycles."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ssl_bench.errors import MachineError

_SHARED = "/dev/shm"
# NumPy, Pillow and Python raise MemoryError; the rest says it in words alone.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "insufficient memory",
    "cannot allocate memory",
    "alloc_failed",
    "std::bad_alloc",
    "can't start new thread",
    "storage size calculation overflowed",
    "numel: integer multiplication overflow",
    "unable to mmap",
    "failed to map segment",
)
_REMEDIES = {
    "probe": "lower probe.batch_size (of linear heads probe.training.batch_size), "
    "probe.image_size or probe.memory_gib where the task has them, or ask for fewer --layer",
    "sweep": "take --jobs 1, lower probe.batch_size or probe.memory_gib, or ask for fewer --layer",
    "pretrain": "lower train.batch_size, raise train.accumulation, take train.num_workers=0 or a "
    "smaller model",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that memory did not suffice."""
    return any(_says_so(one) for one in _causes(error))


def pass_on_memory(error: Exception) -> None:
    """Raise an error of memory once more, where any other means that a file is damaged."""
    if is_out_of_memory(error):
        raise error


def free_shared_memory() -> int | None:
    """Bytes that processes may still share through /dev/shm; None where there is no such place."""
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def memory_error(error: BaseException, command: str) -> MachineError:
    """What a command says, with what to lower."""
    remedy = _REMEDIES.get(command, "end other programs or take a machine with more")
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return MachineError(f"memory does not suffice ({first[:200]}); {remedy}")


def _says_so(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        not isinstance(error, (KeyboardInterrupt, SystemExit))
        and any(words in text for words in _WORDS)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@contextmanager
def without_collections() -> Iterator[None]:
    """Python looks for no cycles meanwhile: records have none, and are many objects to look at.

    What is in no cycle is freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
