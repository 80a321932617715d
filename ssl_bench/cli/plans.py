"""What `sweep` and `probe --dry-run` show of cells that are to be computed."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from ssl_bench.errors import MachineError
from ssl_bench.results import encoder_id
from ssl_bench.sweep.plan import Job
from ssl_bench.system.escaping import printable
from ssl_bench.system.processors import cpu_name, may_have_gpu
from ssl_bench.system.progress import in_words


def device_of_estimates(options: argparse.Namespace) -> str | None:
    """The device as records name it, None where jobs run on machines that are not known here."""
    if getattr(options, "slurm", False):
        return None
    is_cpu = options.device == "cpu" or (options.device is None and not may_have_gpu())
    if is_cpu and "torch" not in sys.modules:
        return cpu_name()
    from ssl_bench.results.provenance import device_name
    from ssl_bench.system.device import choose_device

    try:
        return device_name(choose_device(options.device))
    except MachineError:
        if options.dry_run or getattr(options, "print", False):
            return None
        raise


def plan_table(jobs: Sequence[Job]) -> str:
    """A line for each job with its cells and how long they may take, and one for all."""
    names = _names(jobs)
    rows = [("checkpoint", "task", "dataset", "finished", "pending", "time")]
    for job in jobs:
        done = len(job.keys) - len(job.pending)
        time = duration(job.seconds) if job.pending else "-"
        what = (
            names[encoder_id(job.encoder.identity())],
            job.planned.probe.task,
            f"{job.dataset} {job.split}",
        )
        rows.append((*what, str(done), str(len(job.pending)), time))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, _total(jobs)])


def _names(jobs: Iterable[Job]) -> dict[str, str]:
    """A name in the table by id; two encoders may have one name."""
    encoders = {encoder_id(job.encoder.identity()): job.encoder for job in jobs}
    counts = Counter(encoder.name for encoder in encoders.values())
    return {
        one: printable(encoder.name if counts[encoder.name] == 1 else f"{encoder.name} {one[:8]}")
        for one, encoder in encoders.items()
    }


def _total(jobs: Sequence[Job]) -> str:
    cells, pending = sum(len(job.keys) for job in jobs), sum(len(job.pending) for job in jobs)
    known = [job.seconds for job in jobs if job.pending and job.seconds is not None]
    unknown = sum(1 for job in jobs if job.pending and job.seconds is None)
    parts = [f"{len(jobs)} jobs, {cells} cells: {cells - pending} finished, {pending} pending"]
    if known:
        parts.append(f"about {duration(sum(known))}, one after the other, as records tell")
    if unknown:
        parts.append(f"time unknown for {unknown} jobs: no record of the like on this device")
    return "; ".join(parts)


def duration(seconds: float | None) -> str:
    """In words."""
    return "unknown" if seconds is None else in_words(seconds)
