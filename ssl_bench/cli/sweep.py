"""`ssl-bench sweep`: probe many encoders on this machine or with SLURM, or print the commands."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ssl_bench.errors import ConfigurationError
from ssl_bench.estimates import estimate_seconds
from ssl_bench.request import ProbeRequest
from ssl_bench.results import ResultStore
from ssl_bench.slurm import array_settings, submit_array
from ssl_bench.sweep import (
    Job,
    format_plan,
    plan_sweep,
    probe_command,
    run_in_processes,
    run_in_this_process,
)
from ssl_bench.system.device import choose_device, visible_devices
from ssl_bench.system.endings import Outcome
from ssl_bench.system.output import dump_json, print_message, quote_command
from ssl_bench.system.process import require_single_process

Outcomes = Mapping[tuple[str, ...], Outcome]
"""The outcome of each job, by the arguments of its command."""


def command(options: argparse.Namespace, request: ProbeRequest) -> int:
    """Print a table of the jobs, then run, print or submit the jobs that lack results.

    A job evaluates one encoder with one probe on one dataset.

    Returns:
        The exit code of the first failed job, or 0.
    """
    require_single_process("sweep")
    if options.jobs < 1:
        raise ConfigurationError(
            f"--jobs must be at least 1, got {options.jobs}", hint=("--jobs", "1")
        )
    jobs = plan_sweep(request, min_jobs=options.jobs)
    is_plan_the_output = options.dry_run and not (options.json or options.print)
    stream = sys.stdout if is_plan_the_output else sys.stderr
    seconds = estimate_seconds(jobs, ResultStore(request.out)) if options.dry_run else []
    print(format_plan(jobs, seconds), file=stream, flush=True)
    pending = [job for job in jobs if job.pending]
    outcomes: Outcomes = {}
    if options.slurm and options.dry_run:
        settings = ", ".join(f"{k}={value}" for k, value in _array_settings(options).items())
        array = f"SLURM array of {len(pending)} tasks: {settings}, logs in {_logs(options)}"
        print(array, file=stream)
    elif options.slurm and pending:
        _submit(pending, options)
    elif options.print and not options.json:
        for job in pending:
            print(quote_command(["ssl-bench", *job.arguments]))
    elif not (options.dry_run or options.print or options.slurm):
        outcomes = _run(pending, options)
        _log_summary(jobs, outcomes, options.out)
    if options.json:
        summary = {
            "cells": sum(len(job.keys) for job in jobs),
            "pending": sum(len(job.pending) for job in jobs),
            "jobs": [
                _job_as_json(job, outcomes.get(job.arguments), estimate)
                for job, estimate in zip_longest(jobs, seconds)
            ],
        }
        print(dump_json(summary))
    return next((one.exit_code for one in outcomes.values() if one.exit_code), 0)


def _run(jobs: Sequence[Job], options: argparse.Namespace) -> Outcomes:
    """Run jobs, and return the outcome (duration and exit code) of each job in the given order."""
    device = choose_device(options.device)
    store = ResultStore.create(Path(options.out))
    if options.jobs > 1:
        # Distribute the jobs over all GPUs. If the user chose a device, all jobs share it. Without
        # a GPU, all jobs share the CPU.
        devices = visible_devices() if options.device in (None, "cuda") else []
        running = run_in_processes(jobs, options.jobs, devices)
    else:
        running = run_in_this_process(jobs, store, device, debug=options.debug)
    outcomes: dict[tuple[str, ...], Outcome] = {}
    for job, outcome in running:
        outcomes[job.arguments] = outcome
        print_message(outcome.line(f"{len(outcomes)} of {len(jobs)}", job.title))
    return {job.arguments: outcomes[job.arguments] for job in jobs}


def _log_summary(jobs: Sequence[Job], outcomes: Outcomes, out: str) -> None:
    counts = Counter(outcome.state for outcome in outcomes.values())
    table = quote_command(["ssl-bench", "table", "--out", out])
    print_message(
        f"{counts['finished']} jobs finished, {counts['failed']} failed, "
        f"{len(jobs) - len(outcomes)} skipped because their results exist"
    )
    print_message(f"run `{table}` to print the results")
    if counts["failed"]:
        print_message("run the same command again to retry the failed jobs")


def _submit(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    ResultStore.create(Path(options.out))
    logs = _logs(options)
    submitted = submit_array(
        [probe_command(job) for job in jobs], settings=_array_settings(options), logs=logs
    )
    array = submitted[0].job_id.partition("_")[0]
    print_message(f"{len(submitted)} jobs submitted as SLURM array {array}, logs in {logs}")
    print_message(
        "when the array has ended, run the same command again to submit the unfinished jobs"
    )


def _logs(options: argparse.Namespace) -> Path:
    return Path(options.slurm_logs or Path(options.out) / "slurm")


def _array_settings(options: argparse.Namespace) -> dict[str, Any]:
    return array_settings(
        partition=options.slurm_partition,
        minutes=options.slurm_minutes,
        gpus=options.slurm_gpus,
        cpus=options.slurm_cpus,
    )


def _job_as_json(
    job: Job, outcome: Outcome | None, estimated_seconds: float | None
) -> dict[str, Any]:
    state = outcome.state if outcome else "pending" if job.pending else "skipped"
    return {
        "checkpoint": job.encoder.uri,
        "model": job.encoder.name,
        "checkpoint_sha256": job.encoder.sha256,
        "task": job.planned.probe.task,
        "protocol": job.planned.probe.protocol,
        "dataset": job.images.name,
        "split": job.images.split,
        "layers": list(job.layers),
        "cells": len(job.keys),
        "pending": len(job.pending),
        "estimated_seconds": estimated_seconds,
        "command": quote_command(["ssl-bench", *job.arguments]),
        "state": state,
        "exit_code": outcome.exit_code if outcome else 0,
        "error": outcome.error if outcome else "",
    }
