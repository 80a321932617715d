"""The processors of this machine, known without torch."""

import os
import platform
import sys
from pathlib import Path

# What drivers of NVIDIA, of AMD, and of Windows below Linux leave there.
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cores() -> int:
    """How many cores this process may use; a scheduler gives fewer than the machine has."""
    return len(_usable())


def numeric_threads() -> int:
    """What `torch.get_num_threads` gives where nobody sets it: as MKL decides.

    The first of MKL_NUM_THREADS and OMP_NUM_THREADS that is a number, but at most one thread for
    each physical core that this process may use.
    """
    physical = len({_siblings(core) for core in _usable()})
    return min([physical, *_asked_threads()])


def let_threads_sleep() -> None:
    """Threads of OpenMP that wait for each other sleep, unless the environment says otherwise.

    Their default is to keep the processor busy while they wait. Whoever shares the machine then
    waits for threads that do nothing: see results/tables/waiting_threads.md. OpenMP reads this
    when torch is imported, so that later calls change nothing.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ[_WAITING[0]] = "PASSIVE"


def cpu_name() -> str:
    """This machine without a GPU, as `ssl_bench.results.provenance.device_name` has it."""
    return f"cpu: {platform.machine()}, {numeric_threads()} threads"


def may_have_gpu() -> bool:
    """Whether there is a driver, or no saying without torch."""
    if sys.platform not in ("linux", "darwin"):
        return True
    return any(Path(driver).exists() for driver in _DRIVERS)


def _usable() -> list[int]:
    # Not every system tells.
    asked = getattr(os, "sched_getaffinity", None)
    return sorted(asked(0)) if asked else list(range(os.cpu_count() or 1))


def _siblings(core: int) -> str:
    """Text that is the same for all threads of one physical core."""
    try:
        return Path(_TOPOLOGY.format(core)).read_text()
    except OSError:
        return str(core)


def _asked_threads() -> list[int]:
    """One number, or none."""
    said = (os.environ.get(name, "") for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    # OpenMP takes a list, a number for each level of loops inside of loops.
    numbers = [text.partition(",")[0].strip() for text in said]
    return [int(text) for text in numbers if text.isdigit() and int(text)][:1]
