"""Which of the processes that `torchrun` starts this one is, most often a single one; its cores."""

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ssl_bench.errors import ConfigurationError, MachineError

_MOST = 1_000_000


@dataclass(frozen=True)
class ProcessInfo:
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


def get_process_info() -> ProcessInfo:
    """Which of how many processes this is; a single one where WORLD_SIZE is not there or 1.

    Raises:
        ConfigurationError: a variable is missing or no such number.
    """
    count = _number("WORLD_SIZE", range(1, _MOST), "1")
    if count == 1:
        _number("RANK", range(1), "0")
        return ProcessInfo()
    if not os.environ.get("MASTER_ADDR"):
        raise _wrong("MASTER_ADDR", "an address")
    _number("MASTER_PORT", range(1, 65_536))
    local_rank = _number("LOCAL_RANK", range(count)) if os.environ.get("LOCAL_RANK") else None
    here = _number("LOCAL_WORLD_SIZE", range(1, count + 1), "1")
    return ProcessInfo(_number("RANK", range(count)), count, local_rank, here)


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


def is_main_process() -> bool:
    """Whether this process says what all of a command meet; of several, one is enough."""
    try:
        return get_process_info().rank == 0
    except ConfigurationError:
        return True


def local_world_size() -> int:
    """How many processes of the command this machine has."""
    return get_process_info().here


def require_single_process(command: str) -> None:
    """Refuse to do the same work in several processes.

    Raises:
        ConfigurationError: there are others, or as `get_process_info`.
    """
    count = get_process_info().count
    if count > 1:
        raise ConfigurationError(
            f"`ssl-bench {command}` expects one process, got {count} (WORLD_SIZE); start it alone, "
            "or let jobs share probes",
            hint=("ssl-bench", "sweep", "--jobs", str(count)),
        )


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def count_usable_cores() -> int:
    """How many cores this process may use; a scheduler gives fewer than the machine has."""
    # Not every system tells.
    asked = getattr(os, "sched_getaffinity", None)
    return len(asked(0)) if asked else os.cpu_count() or 1


def use_passive_openmp_waiting() -> None:
    """Threads of OpenMP that wait for each other sleep, unless the environment says otherwise.

    Their default is to keep the processor busy while they wait. Whoever shares the machine then
    waits for threads that do nothing: see results/tables/waiting_threads.md. OpenMP reads this
    when torch is imported, so that later calls change nothing.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ[_WAITING[0]] = "PASSIVE"


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


def reraise_out_of_memory(error: Exception) -> None:
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


def out_of_memory_error(error: BaseException, command: str) -> MachineError:
    """What a command says, with what to lower."""
    remedy = _REMEDIES.get(command, "end other programs or take a machine with more")
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return MachineError(f"memory does not suffice ({first[:200]}); {remedy}")


@contextmanager
def pause_garbage_collection() -> Generator[None]:
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
