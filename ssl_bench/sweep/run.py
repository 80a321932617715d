"""Run the jobs of a sweep on this machine; one that fails stops no other."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ssl_bench.asked import announced_encoder
from ssl_bench.errors import MachineError
from ssl_bench.evaluation.passed import PassedImages
from ssl_bench.results import ResultStore
from ssl_bench.sweep.plan import Job
from ssl_bench.system.endings import failure
from ssl_bench.system.memory import is_out_of_memory
from ssl_bench.system.progress import say

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outcome:
    """What became of a job that had pending cells.

    Attributes:
        exit_code: As `ssl-bench probe` ends.
        error: One line, empty where the job finished.
        wants_memory: Whether it ended because memory did not suffice.
    """

    job: Job
    seconds: float
    exit_code: int = 0
    error: str = ""
    wants_memory: bool = False

    @property
    def state(self) -> Literal["finished", "failed"]:
        return "failed" if self.exit_code else "finished"


def probe_command(job: Job) -> list[str]:
    """The words that start a job with the Python of this process."""
    return [sys.executable, "-m", "ssl_bench", *job.arguments]


def run_here(
    jobs: Sequence[Job], store: ResultStore, device: "torch.device", *, debug: bool
) -> Iterator[Outcome]:
    """Run jobs one after the other in this process; `debug` raises the first error.

    An encoder is loaded once where its jobs are neighbours, and images pass it once for those of
    them that look at the same.
    """
    load, passed = lru_cache(maxsize=1)(announced_encoder), PassedImages()

    def compute(job: Job) -> None:
        encoder = load(job.encoder.uri)
        job.planned.evaluation(encoder, job.layers, device).run(store, say=say, passed=passed)

    for number, job in enumerate(jobs, 1):
        say(f"job {number} of {len(jobs)}: {job.title}")
        yield _attempted(job, compute, debug=debug)


def _attempted(job: Job, compute: Callable[[Job], None], *, debug: bool) -> Outcome:
    start = time.monotonic()
    try:
        compute(job)
    # Whatever it is, memory that does not suffice included: the other jobs may fare better.
    except Exception as error:
        if debug:
            raise
        code, text = failure(error, "sweep")
        return Outcome(job, time.monotonic() - start, code, text)
    return Outcome(job, time.monotonic() - start)


def run_in_processes(
    jobs: Sequence[Job], count: int, devices: Sequence[str] = ()
) -> Iterator[Outcome]:
    """Run jobs in `count` processes at a time, which share the cores of this machine.

    Each sees one of `devices`, as CUDA_VISIBLE_DEVICES names them, and no two the same one as long
    as there are as many. Jobs that ended for want of memory are run once more after the others, one
    at a time.
    """
    places = Places(devices, count)
    short: list[Job] = []
    for outcome in _run_at_once(jobs, count, places):
        if outcome.wants_memory and count > 1:
            say(f"memory did not suffice for {outcome.job.title} beside others: later, alone")
            short.append(outcome.job)
        else:
            yield outcome
    yield from _run_at_once(short, 1, places)


class Places:
    """Devices that jobs are at work on.

    Args:
        devices: As CUDA_VISIBLE_DEVICES names them; without any, jobs see what this process does.
        count: How many jobs are at work together.
    """

    def __init__(self, devices: Sequence[str], count: int) -> None:
        self.count = count
        self._at_work = dict.fromkeys(devices, 0)
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[Mapping[str, str]]:
        """The environment of a job on the device with the fewest jobs."""
        import torch

        # What this process may use; the numerical libraries all obey this variable.
        threads = max(1, torch.get_num_threads() // self.count)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if not self._at_work:
            yield environment
            return
        with self._lock:
            device = min(self._at_work, key=lambda one: self._at_work[one])
            self._at_work[device] += 1
        try:
            yield {**environment, "CUDA_VISIBLE_DEVICES": device}
        finally:
            with self._lock:
                self._at_work[device] -= 1


def _run_at_once(jobs: Sequence[Job], count: int, places: Places) -> Iterator[Outcome]:
    running: set[subprocess.Popen[str]] = set()

    def compute(job: Job) -> Outcome:
        start = time.monotonic()
        with places.taken() as environment:
            process = subprocess.Popen(
                probe_command(job),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            running.add(process)
            with process:
                said = process.communicate()[1]
            running.discard(process)
        # A signal has no code of its own; most often it is the system's, for want of memory.
        code = process.returncode if process.returncode >= 0 else MachineError.exit_code
        error = _error(process, said)
        short = process.returncode == -getattr(signal, "SIGKILL", 9) or is_out_of_memory(
            MachineError(error)
        )
        return Outcome(job, time.monotonic() - start, code, error, wants_memory=short)

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(compute, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            # Ctrl-C: without this the pool would wait for all that is left.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise


def _error(process: subprocess.Popen[str], said: str) -> str:
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}; if memory was short, take --jobs 1"
    last = said.strip().splitlines()[-1:]
    return "".join(last).removeprefix("ssl-bench: ") or f"exit code {process.returncode}"
