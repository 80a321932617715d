"""Too little memory, under all the names that libraries have for it; the search for cycles."""

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ssl_bench.errors import MachineError

_SHARED = "/dev/shm"
_CGROUPS = Path("/sys/fs/cgroup")
# Limit and use of a group, in version 2 and in version 1.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# In memory.stat of a group; version 1 has the same words for the group without those below it.
_FILES = ("active_file", "inactive_file")
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
    one: BaseException | None = error
    while one is not None:
        text = str(one).lower()
        is_ending = isinstance(one, KeyboardInterrupt | SystemExit)
        if isinstance(one, MemoryError) or (not is_ending and any(w in text for w in _WORDS)):
            return True
        one = one.__cause__
    return False


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


def free_host_memory() -> int:
    """Bytes that this process may still take of the machine's memory.

    What a scheduler or a container leaves to its group counts, where the system tells it.
    """
    return min([_available(), *_left_to_groups()])


def _available() -> int:
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    # Other systems tell how much there is, and not how much of it is free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_to_groups() -> Iterator[int]:
    """What each group that this process is in leaves, from its own up to the outermost."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        inner = _CGROUPS / controllers / path.lstrip("/")
        for group in (inner, *inner.parents):
            for limit, use in _LIMITS:
                # "max" where there is no limit.
                with suppress(OSError, ValueError):
                    most = int((group / limit).read_text())
                    yield max(0, most - int((group / use).read_text()) + _of_files(group))
            if group == _CGROUPS:
                break


def _of_files(group: Path) -> int:
    """Bytes of files that the group has read, which the system takes back where it needs them."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(number) for name, number in lines if name in _FILES)
    return 0


def memory_error(error: BaseException, command: str) -> MachineError:
    """What a command says, with what to lower."""
    remedy = _REMEDIES.get(command, "end other programs or take a machine with more")
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return MachineError(f"memory does not suffice ({first[:200]}); {remedy}")


@contextmanager
def without_collections() -> Generator[None]:
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
