"""Properties of the running process: its rank under torchrun, CPU cores, memory and code.

The rank is the number of a process among those that torchrun starts. `hatch_build.py` imports this
file when a wheel is built. At that time no package is installed, so the top level of this file only
imports the standard library.
"""

import ctypes
import gc
import os
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from ssl_bench.errors import ConfigurationError, MachineError

_MAX_PROCESSES = 1_000_000
# Options of mallopt, with their numbers in malloc.h and sizes in bytes. M_MMAP_THRESHOLD (-3): a
# larger block is returned to the system when it is freed. M_TRIM_THRESHOLD (-1): free memory at the
# end of the heap is returned to the system if it exceeds this size.
_MALLOC_OPTIONS = ((-3, 2**28), (-1, 2**29))


@dataclass(frozen=True)
class ProcessInfo:
    """The rank (number) of this process and the number of all processes, as torchrun sets them.

    `local_rank` and `local_world_size` count only the processes on this machine. `local_rank` is
    None if the environment variable LOCAL_RANK is not set.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int = 1


def get_process_info() -> ProcessInfo:
    """Read this process's rank and the number of processes from torchrun's environment variables.

    If WORLD_SIZE is not set, there is a single process.

    Raises:
        ConfigurationError: A variable is missing or has an invalid value.
    """
    world_size = _read_number("WORLD_SIZE", range(1, _MAX_PROCESSES), "1")
    if world_size == 1:
        _read_number("RANK", range(1), "0")
        return ProcessInfo()
    if not os.environ.get("MASTER_ADDR"):
        raise _wrong_variable("MASTER_ADDR", "an address")
    _read_number("MASTER_PORT", range(1, 65_536))
    local_rank = None
    if os.environ.get("LOCAL_RANK"):
        local_rank = _read_number("LOCAL_RANK", range(world_size))
    local_world_size = _read_number("LOCAL_WORLD_SIZE", range(1, world_size + 1), "1")
    rank = _read_number("RANK", range(world_size))
    return ProcessInfo(rank, world_size, local_rank, local_world_size)


def _read_number(name: str, allowed: range, default: str = "") -> int:
    text = os.environ.get(name) or default
    if text.isascii() and text.isdecimal() and int(text) in allowed:
        return int(text)
    bounds = f"a number from {allowed[0]} to {allowed[-1]}" if len(allowed) > 1 else "0"
    raise _wrong_variable(name, bounds)


def _wrong_variable(name: str, expected: str) -> ConfigurationError:
    value, world_size = (os.environ.get(key) or "not set" for key in (name, "WORLD_SIZE"))
    reason = "" if name == "WORLD_SIZE" else f" because WORLD_SIZE is {world_size}"
    return ConfigurationError(
        f"environment variable {name} is {value}, expected {expected}{reason}. Start several "
        "processes with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK to run a single process"
    )


def is_main_process() -> bool:
    """Return whether this process has rank 0. Only the process of rank 0 prints messages.

    If torchrun's variables are invalid, return True, so that the error is printed.
    """
    try:
        return get_process_info().rank == 0
    except ConfigurationError:
        return True


def local_world_size() -> int:
    """Return the number of processes that run this command on this machine."""
    return get_process_info().local_world_size


def require_single_process(command: str) -> None:
    """Raise ConfigurationError if torchrun started several processes.

    Call this function in commands that would repeat the same work in each process.
    """
    world_size = get_process_info().world_size
    if world_size > 1:
        raise ConfigurationError(
            f"`ssl-bench {command}` expects one process, but WORLD_SIZE is {world_size}. Start it "
            f"without torchrun, or run probes in parallel with `ssl-bench sweep --jobs "
            f"{world_size}`",
            hint=("ssl-bench", "sweep", "--jobs", str(world_size)),
        )


_OPENMP_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use.

    A scheduler may assign fewer cores to the process than the machine has.
    """
    # Windows and macOS do not have this function.
    get_affinity = getattr(os, "sched_getaffinity", None)
    return len(get_affinity(0)) if get_affinity else os.cpu_count() or 1


def use_passive_openmp_waiting() -> None:
    """Let OpenMP threads sleep while they wait, unless the environment already configures this.

    By default a waiting thread keeps its core busy, which slows down all other programs on the
    machine (results/tables/waiting_threads.md). Call this function before torch is imported.
    """
    if not any(name in os.environ for name in _OPENMP_WAIT_VARIABLES):
        os.environ[_OPENMP_WAIT_VARIABLES[0]] = "PASSIVE"


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for reuse.

    By default, glibc returns large blocks of memory to the operating system, which must then clear
    every memory page of the next tensor. After a call of this function, glibc keeps free memory
    between used blocks, and up to 512 MiB after the last used block. The function changes nothing
    if the user has configured memory allocation by environment variables.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    # Other C libraries have no such function.
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        for option, num_bytes in _MALLOC_OPTIONS:
            library.mallopt(option, num_bytes)


def return_freed_memory() -> None:
    """Return freed memory to the operating system, as far as the C library can do this."""
    # Other C libraries have no such function.
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


# NumPy, Pillow and Python raise MemoryError if memory runs out. Errors of other libraries can only
# be recognised by these phrases in the message.
_OUT_OF_MEMORY_PHRASES = (
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


_SMALLER_SETTINGS = {
    "probe": "probe.batch_size={smaller} or probe.image_size={smaller} or "
    "probe.training.batch_size={smaller} or --layer {blocks}",
    "sweep": "--jobs 1 or probe.batch_size={smaller} or --layer {blocks}",
    "pretrain": "train.batch_size={smaller} or train.accumulation={larger} or train.num_workers=0",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, means that CPU or GPU memory ran out."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, MemoryError):
            return True
        is_exit = isinstance(current, KeyboardInterrupt | SystemExit)
        text = str(current).lower()
        if not is_exit and any(phrase in text for phrase in _OUT_OF_MEMORY_PHRASES):
            return True
        current = current.__cause__
    return False


def reraise_out_of_memory(error: Exception) -> None:
    """Raise `error` again if it was caused by a lack of memory.

    Call this function if an `except` block treats all other errors as a sign of a damaged file.
    """
    if is_out_of_memory(error):
        raise error


def out_of_memory_error(error: BaseException, command: str) -> MachineError:
    """Return the error to report for a command that ran out of memory.

    The hint of the error suggests smaller settings for the command, such as "probe".
    """
    detail = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    hint = _SMALLER_SETTINGS.get(command, "").split()
    return MachineError(f"out of memory ({detail[:200]})", hint=hint)


_SHARED_MEMORY = "/dev/shm"
_CGROUPS = Path("/sys/fs/cgroup")
# Files with the memory limit and the memory use of a control group, for cgroup versions 2 and 1.
_LIMIT_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Entries of the file memory.stat that count cached files. Both versions use these names.
_CACHE_ENTRIES = ("active_file", "inactive_file")


def free_shared_memory() -> int | None:
    """Return the number of free bytes in /dev/shm, or None if the system does not have it."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def free_host_memory() -> int:
    """Return the number of bytes that this process can still allocate.

    The result is the minimum of the free memory of the machine and of each control group (cgroup)
    of the process.
    """
    return min([_free_machine_memory(), *_free_cgroup_memory()])


def _free_machine_memory() -> int:
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    # Systems without /proc/meminfo only report the total memory. Assume that half of it is free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_cgroup_memory() -> Iterator[int]:
    """Yield the number of free bytes in each control group of the process, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        innermost = _CGROUPS / controllers / path.lstrip("/")
        for group in (innermost, *innermost.parents):
            for limit_file, use_file in _LIMIT_FILES:
                # If the group has no limit, the file contains "max", and `int` raises ValueError.
                with suppress(OSError, ValueError):
                    limit = int((group / limit_file).read_text())
                    used = int((group / use_file).read_text())
                    yield max(0, limit - used + _file_cache_bytes(group))
            if group == _CGROUPS:
                break


def _file_cache_bytes(group: Path) -> int:
    """Return the size in bytes of a control group's file cache, which is freed on demand."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(number) for name, number in lines if name in _CACHE_ENTRIES)
    return 0


@contextmanager
def pause_garbage_collection() -> Generator[None]:
    """Turn off Python's cyclic garbage collector in this context.

    Turn the collector off while many result records (stored results) are read. Result records
    contain no reference cycles, so the collector would only cost time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Provenance of a result: the git commit, the versions, the hardware and the time.

_PACKAGE = Path(__file__).parents[1]

COMMIT_FILE = "COMMIT"
"""Name of a file in the package. It states the git commit of a wheel or source archive."""


def provenance_fields(hardware: str, seconds: float) -> dict[str, Any]:
    """Return the fields of a `Record` (stored result) about the code, the hardware and the time.

    Args:
        hardware: Description of the device, as `describe_device` returns it.
        seconds: Wall-clock time of the computation.
    """
    import torch

    from ssl_bench import __version__

    return {
        "version": __version__,
        "git_commit": source_commit(),
        "torch": torch.__version__,
        "device": hardware,
        "seconds": round(seconds, 3),
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


@cache
def source_commit() -> str | None:
    """Return the commit of the running code from git or `COMMIT_FILE`, or None if it is unknown."""
    checkout = _PACKAGE.parent
    if (checkout / ".git").exists():
        return read_git_commit(checkout)
    try:
        return (_PACKAGE / COMMIT_FILE).read_text().strip() or None
    except OSError:
        return None


def read_git_commit(checkout: Path) -> str | None:
    """Return the commit of a git checkout, or None if git is missing or fails.

    If a tracked file has uncommitted changes, "-dirty" is appended.
    """

    def git(*arguments: str) -> str:
        words = ["git", "-C", str(checkout), *arguments]
        run = subprocess.run(words, capture_output=True, check=True, text=True, timeout=10)
        return run.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if changes else "")
