"""Which of the processes that `torchrun` starts this one is, most often a single one; its cores."""

import os
from dataclasses import dataclass

from ssl_bench.errors import ConfigurationError

_MOST = 1_000_000


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


def require_single_process(command: str) -> None:
    """Refuse to do the same work in several processes.

    Raises:
        ConfigurationError: there are others, or as `place_of_process`.
    """
    count = place_of_process().count
    if count > 1:
        raise ConfigurationError(
            f"`ssl-bench {command}` expects one process, got {count} (WORLD_SIZE); start it alone, "
            "or let jobs share probes",
            hint=("ssl-bench", "sweep", "--jobs", str(count)),
        )


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def usable_cores() -> int:
    """How many cores this process may use; a scheduler gives fewer than the machine has."""
    # Not every system tells.
    asked = getattr(os, "sched_getaffinity", None)
    return len(asked(0)) if asked else os.cpu_count() or 1


def let_threads_sleep() -> None:
    """Threads of OpenMP that wait for each other sleep, unless the environment says otherwise.

    Their default is to keep the processor busy while they wait. Whoever shares the machine then
    waits for threads that do nothing: see results/tables/waiting_threads.md. OpenMP reads this
    when torch is imported, so that later calls change nothing.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ[_WAITING[0]] = "PASSIVE"
