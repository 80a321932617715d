"""The processors of this machine, known without torch."""

import os

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
