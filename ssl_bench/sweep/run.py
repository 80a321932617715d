"""Run the jobs of a sweep on this machine; one that fails stops no other."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ssl_bench.asked import announced_encoder
from ssl_bench.errors import MachineError
from ssl_bench.results import ResultStore
from ssl_bench.sweep.plan import Job
from ssl_bench.system.endings import failure
from ssl_bench.system.progress import say

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outcome:
    """What became of a job that had pending cells.

    Attributes:
        exit_code: As `ssl-bench probe` ends.
        error: One line, empty where the job finished.
    """

    job: Job
    seconds: float
    exit_code: int = 0
    error: str = ""

    @property
    def state(self) -> Literal["finished", "failed"]:
        return "failed" if self.exit_code else "finished"


def probe_command(job: Job) -> list[str]:
    """The words that start a job with the Python of this process."""
    return [sys.executable, "-m", "ssl_bench.cli", *job.arguments]


def run_here(
    jobs: Sequence[Job], store: ResultStore, device: "torch.device", *, debug: bool
) -> Iterator[Outcome]:
    """Run jobs one after the other in this process; `debug` raises the first error.

    An encoder is loaded once where its jobs are neighbours.
    """
    load = lru_cache(maxsize=1)(announced_encoder)

    def compute(job: Job) -> None:
        encoder = load(job.encoder.uri)
        job.planned.evaluation(encoder, job.layers, device).run(store, say=say)

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


def run_in_processes(jobs: Sequence[Job], count: int) -> Iterator[Outcome]:
    """Run jobs in `count` processes at a time, which share the cores of this machine."""
    running: set[subprocess.Popen[str]] = set()
    environment = _with_fewer_threads(count)

    def compute(job: Job) -> Outcome:
        start = time.monotonic()
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
        return Outcome(job, time.monotonic() - start, code, _error(process, said))

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


def _with_fewer_threads(count: int) -> Mapping[str, str]:
    import torch

    # What this process may use; the numerical libraries all obey this variable.
    threads = max(1, torch.get_num_threads() // count)
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def _error(process: subprocess.Popen[str], said: str) -> str:
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}; if memory was short, take --jobs 1"
    last = said.strip().splitlines()[-1:]
    return "".join(last).removeprefix("ssl-bench: ") or f"exit code {process.returncode}"
