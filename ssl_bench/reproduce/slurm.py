"""A plan as SLURM jobs: each run, its probes once it is finished, and the table at the end."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from ssl_bench.reproduce.papers import full_name
from ssl_bench.reproduce.plan import Plan
from ssl_bench.sweep.slurm import SlurmOptions, submit_array

_MOST_RESTARTS = 1_000


def submit_plan(plan: Plan, slurm: SlurmOptions) -> dict[str, str]:
    """Submit all steps and do not wait.

    A run of more hours than a job may last is queued again until it is finished.

    Returns:
        The job's id by the title of a step; "table" is the one that prints it in the end.

    Raises:
        MachineError: submitit or SLURM is not there, or SLURM refuses.
    """
    ids: dict[str, str] = {}
    for step in plan.steps:
        if not step.is_run or step.run is None:
            continue
        after = _after("afterok", [ids[step.needs]] if step.needs else [])
        (job,) = submit_array(
            [_command(step.words)], replace(slurm, restarts=_MOST_RESTARTS), dependency=after
        )
        ids[step.run] = job.job_id
    probes = list(_submit_probes(plan, slurm, ids))
    last = _after("afterany", [*ids.values(), *probes])
    (job,) = submit_array([_command(_table_words(plan))], slurm, dependency=last)
    return {**ids, "probes": ", ".join(probes), "table": job.job_id}


def _submit_probes(plan: Plan, slurm: SlurmOptions, ids: dict[str, str]) -> Sequence[str]:
    found = []
    for run in (None, *(run.name for run in plan.runs)):
        steps = [step for step in plan.steps if step.run == run and not step.is_run]
        if steps:
            after = _after("afterok", [ids[run]] if run else [])
            jobs = submit_array([_command(s.words) for s in steps], slurm, dependency=after)
            found.append(jobs[0].job_id.partition("_")[0])
    return found


def _table_words(plan: Plan) -> list[str]:
    asked = plan.asked
    rows = [word for row in asked.rows for word in ("--row", row)]
    places = ["--runs", str(asked.runs), "--out", str(asked.out)]
    return ["reproduce", full_name(plan.table), "--table", *places, *rows]


def _after(kind: str, jobs: Sequence[str]) -> str | None:
    """SLURM's word for waiting, where there is something to wait for."""
    return ":".join([kind, *(job.partition("_")[0] for job in jobs)]) if jobs else None


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ssl_bench", *words]
