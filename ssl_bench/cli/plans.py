"""What `sweep` and `probe --dry-run` show of cells that are to be computed."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ssl_bench.evaluation import called
from ssl_bench.results import encoder_id
from ssl_bench.sweep.plan import Job
from ssl_bench.system.escaping import printable


def plan_table(jobs: Sequence[Job]) -> str:
    """A line for each job with its cells, and one for all."""
    names = _names(jobs)
    rows = [("checkpoint", "task", "dataset", "finished", "pending")]
    for job in jobs:
        done = len(job.keys) - len(job.pending)
        what = (
            names[encoder_id(job.encoder.identity())],
            called(job.planned.probe) + job.blocks,
            f"{job.dataset} {job.split}",
        )
        rows.append((*what, str(done), str(len(job.pending))))
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
    scores, pending = sum(len(job.keys) for job in jobs), sum(len(job.pending) for job in jobs)
    many = "job" if len(jobs) == 1 else "jobs"
    total = f"{len(jobs)} {many}, {scores} scores: {scores - pending} finished, {pending} pending"
    if any(job.is_share for job in jobs):
        return f"{total}; for so many --jobs blocks are shared out, and each job encodes the images"
    return total
