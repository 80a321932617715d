"""The jobs of checkpoints x probes x datasets: which cells are pending, and running them here.

A job that fails stops no other. `ssl_bench.slurm` submits the same commands as an array.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import torch

from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import MachineError, UnfitEncoder
from ssl_bench.evaluation import (
    PassedImages,
    Probe,
    called,
    cell_keys,
    cell_settings,
    find_pending,
)
from ssl_bench.layers import layers_of
from ssl_bench.models import EncoderIdentity, identify_encoder
from ssl_bench.models.loading.addresses import is_baseline, layers_asked
from ssl_bench.models.loading.asked import announced_encoder, asked_encoders, require_layers
from ssl_bench.planning import PlannedProbe, evaluate, planned_probes, sharing_datasets
from ssl_bench.results import ResultKey, ResultStore, encoder_id
from ssl_bench.results.store import summarise_problems
from ssl_bench.system.device import named_device
from ssl_bench.system.endings import Outcome, attempted
from ssl_bench.system.escaping import aligned
from ssl_bench.system.memory import is_out_of_memory
from ssl_bench.system.progress import say


@dataclass(frozen=True)
class Job:
    """The cells of one encoder, one probe and one dataset, or those of some of their blocks.

    Attributes:
        layers: Block indices.
        is_share: Whether other jobs have further blocks that were asked for.
        arguments: `ssl-bench` with these computes what is pending and nothing else.
    """

    encoder: EncoderIdentity
    planned: PlannedProbe
    layers: tuple[int, ...]
    is_share: bool
    dataset: str
    split: str
    keys: tuple[ResultKey, ...]
    pending: tuple[ResultKey, ...]
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        where = f"{self.dataset} {self.split}"
        return f"{self.planned.probe.task}{self.blocks} on {where}, {self.encoder.name}"

    @property
    def blocks(self) -> str:
        """Such as ", blocks 0 to 3" of a share."""
        ends = dict.fromkeys([self.layers[0], self.layers[-1]])
        return f", blocks {' to '.join(map(str, ends))}" if self.is_share else ""


def plan_sweep(
    options: argparse.Namespace,
    overrides: Sequence[str],
    *,
    at_least: int = 1,
    needs_all: bool = False,
) -> list[Job]:
    """The jobs of a sweep, checkpoint by checkpoint; nothing is computed or written.

    What does not fit an encoder is said and left out, unless all is needed or nothing else is left.

    Args:
        options: Of the command.
        overrides: KEY=VALUE.
        at_least: So many jobs, if need be by shares of the blocks: each passes the images anew.
        needs_all: What does not fit an encoder is refused.

    Raises:
        SslBenchError: As `probe` with the same arguments.
    """
    if options.device is not None:
        # A word that torch does not know is better met here than by every job.
        named_device(options.device)
    require_layers(options.layer, options.checkpoint)
    uris, plan = asked_encoders(options), planned_probes(options, overrides)
    # For the plan alone: what runs later looks at the files as they are then.
    questions = sharing_datasets(plan)
    for question in questions:
        question.require_images()
    encoders: dict[str, EncoderIdentity] = {}
    for encoder in map(identify_encoder, uris):
        first = encoders.setdefault(encoder_id(encoder.identity()), encoder)
        if first is not encoder:
            # Its cells are the same.
            say(f"{encoder.uri} is the encoder of {first.uri}, which stands for both")
    store = ResultStore(Path(options.out))
    asked = []
    for planned, question in zip(plan, questions, strict=True):
        probe, dataset, overlap = question.probe, question.dataset, question.allow_overlap
        settings = cell_settings(probe, dataset, question.dtype, allow_overlap=overlap)
        # Those of the probe hang on the encoder.
        beside = {name: settings[name] for name in settings.keys() - probe.settings().keys()}
        asked.append((planned, probe.split(dataset), beside))
    jobs, unfit = list[Job](), list[UnfitEncoder]()
    least = -(-at_least // (len(encoders) * len(asked)))
    for encoder in encoders.values():
        asked_layers = layers_asked(encoder.uri, options.layer)
        for planned, images, settings in asked:
            try:
                probe = planned.fitted_to(encoder)
            except UnfitEncoder as error:
                if needs_all and not is_baseline(encoder.uri):
                    raise
                unfit.append(error)
                say(f"left out: {planned.probe.task} on {planned.dataset.name}: {error}")
                continue
            layers = layers_of(probe.asked_facets, asked_layers, encoder.depth)
            shares = _shares(planned, probe, layers, images, least)
            for share in shares:
                keys = cell_keys(
                    probe,
                    images,
                    share,
                    identity=encoder.identity(),
                    settings={**settings, **probe.settings()},
                    seed=planned.seed,
                )
                found = find_pending(probe, encoder, keys, images, store)
                # Where pictures alone are missing, the cells that are run for them.
                left = found.cells or [key for key in keys if key.layer in found.layers]
                is_share = len(shares) > 1
                words = ",".join(map(str, share)) if is_share else asked_layers
                jobs.append(
                    Job(
                        encoder=encoder,
                        planned=planned,
                        layers=share,
                        is_share=is_share,
                        dataset=images.name,
                        split=images.split,
                        keys=tuple(keys),
                        pending=tuple(key for key in keys if key in left),
                        arguments=_arguments(options, planned, encoder.uri, words),
                    )
                )
    if unfit and not jobs:
        raise unfit[0]
    if store.unreadable:
        say(f"to be computed again: {summarise_problems(store.unreadable)}")
    return jobs


def _shares(
    planned: PlannedProbe, probe: Probe, layers: tuple[int, ...], images: ImageSet, count: int
) -> list[tuple[int, ...]]:
    """Blocks of so many jobs; all of one where a cell or a picture is of several of them."""
    count = min(count, len(layers))
    ends = [len(layers) * number // count for number in range(count + 1)]
    shares = [layers[start:end] for start, end in pairwise(ends)]
    if {cell for share in shares for cell in probe.cells(share)} != {*probe.cells(layers)}:
        return [layers]
    drawn = probe.pictures(layers, images, planned.seed) if count > 1 else {}
    if any(len(shown) > 1 for shown in drawn.values()):
        why = "its pictures show several blocks (of segmentation none with probe.panels=0)"
        say(f"{called(probe)} is one job: {why}")
        return [layers]
    return shares


def _arguments(
    options: argparse.Namespace, planned: PlannedProbe, uri: str, layers: str
) -> tuple[str, ...]:
    task, dataset = planned.choice
    flags = {
        "--task": task,
        "--layer": layers,
        "--checkpoint": uri,
        "--dataset": dataset,
        "--data-root": planned.root,
        "--out": options.out,
        "--device": options.device,
        "--on-bad-image": options.on_bad_image,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    return ("probe", *words, *planned.overrides)


def plan_table(jobs: Sequence[Job]) -> str:
    """A line for each job with its cells, and one for all; two encoders may have one name."""
    encoders = {encoder_id(job.encoder.identity()): job.encoder.name for job in jobs}
    counts = Counter(encoders.values())
    rows = [("checkpoint", "task", "dataset", "finished", "pending")]
    for job in jobs:
        name, known_as = job.encoder.name, encoder_id(job.encoder.identity())
        rows.append(
            (
                name if counts[name] == 1 else f"{name} {known_as[:8]}",
                called(job.planned.probe) + job.blocks,
                f"{job.dataset} {job.split}",
                str(len(job.keys) - len(job.pending)),
                str(len(job.pending)),
            )
        )
    scores, pending = sum(len(job.keys) for job in jobs), sum(len(job.pending) for job in jobs)
    many = "job" if len(jobs) == 1 else "jobs"
    total = f"{len(jobs)} {many}, {scores} scores: {scores - pending} finished, {pending} pending"
    if any(job.is_share for job in jobs):
        total += "; for so many --jobs blocks are shared out, and each job encodes the images"
    return f"{aligned(rows)}\n{total}"


def probe_command(job: Job) -> list[str]:
    """The words that start a job with the Python of this process."""
    return [sys.executable, "-m", "ssl_bench", *job.arguments]


def run_in_this_process(
    jobs: Sequence[Job], store: ResultStore, device: torch.device, *, debug: bool
) -> Iterator[tuple[Job, Outcome]]:
    """Run jobs one after the other in this process; `debug` raises the first error.

    An encoder is loaded once where its jobs are neighbours, and images pass it once for those of
    them that look at the same.
    """
    load, passed = lru_cache(maxsize=1)(announced_encoder), PassedImages()

    def compute(job: Job, later: Sequence[Job]) -> None:
        alike = [
            one.planned
            for one in later
            if (one.encoder.uri, one.layers) == (job.encoder.uri, job.layers)
        ]
        evaluate(
            [job.planned],
            load(job.encoder.uri),
            store,
            layers=job.layers,
            device=device,
            passed=passed,
            later=alike,
        )

    for number, job in enumerate(jobs, 1):
        say(f"job {number} of {len(jobs)}: {job.title}")
        yield job, attempted(partial(compute, job, jobs[number:]), "sweep", debug=debug)


def run_in_processes(
    jobs: Sequence[Job], count: int, devices: Sequence[str] = ()
) -> Iterator[tuple[Job, Outcome]]:
    """Run jobs in `count` processes at a time, which share the cores of this machine.

    Each sees one of `devices`, as CUDA_VISIBLE_DEVICES names them, and no two the same one as long
    as there are as many; without any, jobs see what this process does. Jobs that ended for want of
    memory are run once more after the others, one at a time.
    """
    short, at_work, lock = list[Job](), dict.fromkeys(devices, 0), threading.Lock()
    # What this process may use; the numerical libraries all obey this variable.
    threads = max(1, torch.get_num_threads() // count)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    @contextmanager
    def device_taken() -> Generator[Mapping[str, str]]:
        """The environment of a job on the device with the fewest jobs."""
        if not at_work:
            yield environment
            return
        with lock:
            device = min(at_work, key=lambda one: at_work[one])
            at_work[device] += 1
        try:
            yield {**environment, "CUDA_VISIBLE_DEVICES": device}
        finally:
            with lock:
                at_work[device] -= 1

    for job, outcome in _run_at_once(jobs, count, device_taken):
        if outcome.wants_memory and count > 1:
            if is_out_of_memory(MachineError(outcome.error)):
                say(f"memory did not suffice for {job.title} beside others: later, alone")
            else:
                say(f"{job.title} was killed, perhaps for want of memory: later, alone")
            short.append(job)
        else:
            yield job, outcome
    yield from _run_at_once(short, 1, device_taken)


def _run_at_once(
    jobs: Sequence[Job],
    count: int,
    device_taken: Callable[[], AbstractContextManager[Mapping[str, str]]],
) -> Iterator[tuple[Job, Outcome]]:
    running: set[subprocess.Popen[str]] = set()

    def compute(job: Job) -> tuple[Job, Outcome]:
        start = time.monotonic()
        with device_taken() as environment:
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
        code, error = process.returncode, ""
        if code < 0:
            remedy = "take --jobs 1" if count > 1 else "ask for fewer --layer"
            error = f"ended by signal {-code}; if memory was short, {remedy}"
        elif code:
            last = "".join(said.strip().splitlines()[-1:])
            error = last.removeprefix("ssl-bench: ") or f"exit code {code}"
        # A signal has no code of its own; most often it is the system's, for want of memory.
        killed = code == -getattr(signal, "SIGKILL", 9)
        short = killed or is_out_of_memory(MachineError(error))
        code = code if code >= 0 else MachineError.exit_code
        return job, Outcome(time.monotonic() - start, code, error, wants_memory=short)

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
