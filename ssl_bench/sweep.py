"""Split a request for probes into jobs, and run the jobs that have pending results.

There is at least one job for each combination of encoder, probe and dataset. If a job fails, the
other jobs continue. `ssl_bench.slurm` submits the same commands as a SLURM array.
"""

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
from itertools import pairwise, zip_longest
from typing import Any

import torch

from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import MachineError, UnsupportedEncoderError, with_hint
from ssl_bench.evaluation import (
    FeatureCache,
    Probe,
    display_name,
    find_pending,
    result_keys,
    result_settings,
)
from ssl_bench.layers import select_layers
from ssl_bench.models import EncoderIdentity, identify_encoder
from ssl_bench.models.loading.addresses import is_baseline, layers_of_encoder
from ssl_bench.models.loading.load import encoder_addresses, load_and_log, require_layers
from ssl_bench.planning import PlannedProbe, evaluate, plan_request, share_datasets
from ssl_bench.request import ProbeRequest
from ssl_bench.results import TRAINING_IMAGES_KEY, ResultKey, ResultStore, encoder_id
from ssl_bench.results.store import summarise_problems
from ssl_bench.system.endings import Outcome, run_and_catch
from ssl_bench.system.output import align_columns, format_duration, print_message
from ssl_bench.system.process import is_out_of_memory


@dataclass(frozen=True)
class Job:
    """The evaluation of one encoder with one probe on one dataset, for some or all blocks.

    Attributes:
        encoder: Identity of the encoder, whose weights are not loaded yet.
        planned: The probe and the dataset.
        layers: Block indices, 0-based.
        is_partial: Whether the job evaluates only some of the requested blocks, and other jobs
            evaluate the rest.
        images: The scored images.
        keys: Keys that identify all results of the job, each of type `ResultKey`.
        pending: Keys of the results that are not stored yet. If only figures are missing, the
            results of the blocks in these figures count as pending.
        arguments: Arguments of the command `ssl-bench` that computes the pending results.
    """

    encoder: EncoderIdentity
    planned: PlannedProbe
    layers: tuple[int, ...]
    is_partial: bool
    images: ImageSet
    keys: tuple[ResultKey, ...]
    pending: tuple[ResultKey, ...]
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        task = f"{self.planned.probe.task}{self.layer_suffix}"
        return f"{task} on {self.dataset_label}, {self.encoder.name}"

    @property
    def dataset_label(self) -> str:
        """Return the name and split of the scored images, such as "voc2012-limit8 val"."""
        return f"{self.images.name} {self.images.split}"

    @property
    def num_images(self) -> int:
        """Return the number of scored images and training images."""
        training = self.keys[0].settings.get(TRAINING_IMAGES_KEY)
        return len(self.images) + (training["num_images"] if training else 0)

    @property
    def layer_suffix(self) -> str:
        """Return text such as ", blocks 0 to 3", or "" for a job with all requested blocks."""
        ends = dict.fromkeys([self.layers[0], self.layers[-1]])
        return f", blocks {' to '.join(map(str, ends))}" if self.is_partial else ""


def plan_sweep(
    request: ProbeRequest, *, min_jobs: int = 1, skip_unsupported: bool = True
) -> list[Job]:
    """Divide a request into jobs, and return them ordered by encoder. No result is computed.

    Args:
        request: The requested encoders, probes, datasets and blocks.
        min_jobs: Desired minimum number of jobs. To reach this number, the blocks that a probe
            evaluates are divided among several jobs where possible. Each of these jobs encodes all
            images again.
        skip_unsupported: Whether to leave out probes that do not support an encoder, with a
            message. If False, an unsupported encoder raises `UnsupportedEncoderError`. Probes that
            do not support a baseline encoder, such as one with random weights, are always left out.
    """
    require_layers(request.layers, request.checkpoints)
    uris = encoder_addresses(request.checkpoints, baselines=request.baselines)
    plan = plan_request(request)
    inputs = [_open_images(planned) for planned in share_datasets(plan)]
    encoders = _distinct_encoders(uris)
    store = ResultStore(request.out)
    min_shares = -(-min_jobs // (len(encoders) * len(plan)))
    jobs, unsupported = list[Job](), list[UnsupportedEncoderError]()
    for encoder in encoders:
        for planned, (images, settings) in zip(plan, inputs, strict=True):
            try:
                probe = planned.adapt_to(encoder)
            except UnsupportedEncoderError as error:
                if not skip_unsupported and not is_baseline(encoder.uri):
                    raise
                unsupported.append(error)
                print_message(f"left out: {planned.probe.task} on {planned.dataset.name}: {error}")
                continue
            requested = layers_of_encoder(encoder.uri, request.layers)
            layers = select_layers(probe.facet_spec, requested, encoder.depth)
            shares = _split_layers(planned, probe, layers, images, min_shares)
            for share in shares:
                keys = result_keys(
                    probe,
                    images,
                    share,
                    identity=encoder.identity(),
                    settings={**settings, **probe.settings()},
                    seed=planned.seed,
                )
                work = find_pending(probe, encoder, keys, images, store)
                # If only figures are missing, the results of their blocks count as pending.
                pending = work.pending or [key for key in keys if key.layer in work.layers]
                is_partial = len(shares) > 1
                words = ",".join(map(str, share)) if is_partial else str(requested)
                jobs.append(
                    Job(
                        encoder=encoder,
                        planned=planned,
                        layers=share,
                        is_partial=is_partial,
                        images=images,
                        keys=tuple(keys),
                        pending=tuple(key for key in keys if key in pending),
                        arguments=_probe_arguments(request, planned, encoder.uri, words),
                    )
                )
    if unsupported and not jobs:
        raise unsupported[0]
    if store.unreadable:
        print_message(
            f"damaged records will be computed again: {summarise_problems(store.unreadable)}"
        )
    return jobs


def _open_images(planned: PlannedProbe) -> tuple[ImageSet, dict[str, Any]]:
    """Return the images that a probe scores, and the settings that affect its results.

    The settings of the probe itself are left out, because they depend on the encoder. The returned
    settings describe, for example, the precision and the training images.
    """
    planned.require_images()
    probe, dataset = planned.probe, planned.dataset
    settings = result_settings(probe, dataset, planned.dtype, allow_overlap=planned.allow_overlap)
    own = probe.settings()
    return probe.scored_images(dataset), {k: value for k, value in settings.items() if k not in own}


def _distinct_encoders(uris: Sequence[str]) -> list[EncoderIdentity]:
    encoders: dict[str, EncoderIdentity] = {}
    for encoder in map(identify_encoder, uris):
        first = encoders.setdefault(encoder_id(encoder.identity()), encoder)
        if first is not encoder:
            print_message(f"{encoder.uri} is the same encoder as {first.uri}, so it is probed once")
    return list(encoders.values())


def _split_layers(
    planned: PlannedProbe, probe: Probe, layers: tuple[int, ...], images: ImageSet, count: int
) -> list[tuple[int, ...]]:
    """Split the block indices `layers` into groups of consecutive blocks, one group for each job.

    If a result or a figure combines several blocks, all blocks form a single group. If all blocks
    are independent, there are `count` groups, but not more groups than blocks.
    """
    count = min(count, len(layers))
    ends = [len(layers) * number // count for number in range(count + 1)]
    shares = [layers[start:end] for start, end in pairwise(ends)]
    separate = {key for share in shares for key in probe.list_score_keys(share)}
    if separate != {*probe.list_score_keys(layers)}:
        return [layers]
    figures = probe.list_figures(layers, images, planned.seed) if count > 1 else {}
    if any(len(shown) > 1 for shown in figures.values()):
        line = f"{display_name(probe)} runs as one job, because a figure shows several blocks"
        # Other probes, such as PCA maps, score their figures, so they must draw them.
        hint = ("probe.panels=0",) if probe.task == "segmentation" else ()
        print_message(with_hint(line, hint=hint))
        return [layers]
    return shares


def _probe_arguments(
    request: ProbeRequest, planned: PlannedProbe, uri: str, layers: str
) -> tuple[str, ...]:
    task, dataset = planned.task_and_dataset
    flags = {
        "--task": task,
        "--layer": layers,
        "--checkpoint": uri,
        "--dataset": dataset,
        "--data-root": planned.root,
        "--out": str(request.out),
        "--device": request.device,
        "--on-bad-image": request.on_bad_image,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    return ("probe", *words, *planned.overrides)


def format_plan(jobs: Sequence[Job], seconds: Sequence[float | None] = ()) -> str:
    """Return a text table with one row for each job, followed by a line with the totals.

    The table states how many results of each job are finished and how many are pending.

    Args:
        jobs: The jobs.
        seconds: Estimated time of each job, or None if it is unknown. The table has no column for
            the times if none is known.
    """
    names = {encoder_id(job.encoder.identity()): job.encoder.name for job in jobs}
    counts = Counter(names.values())
    known = [one for one in seconds if one]
    rows = [("checkpoint", "task", "dataset", "finished", "pending", "time")]
    for job, time_left in zip_longest(jobs, seconds):
        name, digest = job.encoder.name, encoder_id(job.encoder.identity())
        rows.append(
            (
                # Different encoders may have the same name.
                name if counts[name] == 1 else f"{name} {digest[:8]}",
                display_name(job.planned.probe) + job.layer_suffix,
                job.dataset_label,
                str(len(job.keys) - len(job.pending)),
                str(len(job.pending)),
                "unknown" if time_left is None else format_duration(time_left),
            )
        )
    scores, pending = sum(len(job.keys) for job in jobs), sum(len(job.pending) for job in jobs)
    noun = "job" if len(jobs) == 1 else "jobs"
    total = f"{len(jobs)} {noun}, {scores} scores: {scores - pending} finished, {pending} pending"
    if known:
        total += f", about {format_duration(sum(known))}"
        if None in seconds:
            total += " without the jobs of unknown time"
    if any(job.is_partial for job in jobs):
        total += "\nthe blocks of some probes are split into jobs, and each job encodes all images"
    return f"{align_columns(rows if known else [row[:-1] for row in rows])}\n{total}"


def probe_command(job: Job) -> list[str]:
    """Return the command that runs a job, as a list of words that starts with the Python path."""
    return [sys.executable, "-m", "ssl_bench", *job.arguments]


def run_in_this_process(
    jobs: Sequence[Job], store: ResultStore, device: torch.device, *, debug: bool
) -> Iterator[tuple[Job, Outcome]]:
    """Run jobs one after the other, and yield each job with its outcome (success or error).

    If consecutive jobs have the same encoder, it is loaded only once. Consecutive probes of the
    same images share features.

    Args:
        jobs: The jobs to run.
        store: Results folder.
        device: Device of the computation.
        debug: Whether to raise the first error instead of continuing with the next job.
    """
    load, features = lru_cache(maxsize=1)(load_and_log), FeatureCache()

    def compute(job: Job, later_jobs: Sequence[Job]) -> None:
        evaluate(
            [job.planned],
            load(job.encoder.uri),
            store,
            layers=job.layers,
            device=device,
            features=features,
            later_probes=[
                other.planned
                for other in later_jobs
                if (other.encoder.uri, other.layers) == (job.encoder.uri, job.layers)
            ],
        )

    for number, job in enumerate(jobs, 1):
        print_message(f"job {number} of {len(jobs)}: {job.title}")
        yield job, run_and_catch(partial(compute, job, jobs[number:]), "sweep", debug=debug)


def run_in_processes(
    jobs: Sequence[Job], count: int, devices: Sequence[str] = ()
) -> Iterator[tuple[Job, Outcome]]:
    """Run jobs in separate processes, and yield each job with its outcome (success or error).

    The CPU cores are divided among the processes. If a job runs out of memory, it is run again
    alone after all other jobs.

    Args:
        jobs: The jobs to run.
        count: Maximum number of jobs that run at the same time.
        devices: Values of CUDA_VISIBLE_DEVICES, such as "0" and "1". Each process gets the value
            that the fewest running jobs use. If `devices` is empty, each process sees all GPUs that
            this process sees.
    """
    retried, load, lock = list[Job](), dict.fromkeys(devices, 0), threading.Lock()
    # All numerical libraries read OMP_NUM_THREADS.
    threads = max(1, torch.get_num_threads() // count)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    @contextmanager
    def acquire_device() -> Generator[Mapping[str, str]]:
        """Yield the environment variables of a job, and count its GPU as used in the context."""
        if not load:
            yield environment
            return
        with lock:
            device = min(load, key=lambda name: load[name])
            load[device] += 1
        try:
            yield {**environment, "CUDA_VISIBLE_DEVICES": device}
        finally:
            with lock:
                load[device] -= 1

    for job, outcome in _run_pool(jobs, count, acquire_device):
        if outcome.ran_out_of_memory and count > 1:
            is_certain = is_out_of_memory(MachineError(outcome.error))
            reason = (
                "ran out of memory" if is_certain else "was killed, perhaps for lack of memory,"
            )
            print_message(f"{job.title} {reason} and is retried alone after the other jobs")
            retried.append(job)
        else:
            yield job, outcome
    yield from _run_pool(retried, 1, acquire_device)


def _run_pool(
    jobs: Sequence[Job],
    count: int,
    acquire_device: Callable[[], AbstractContextManager[Mapping[str, str]]],
) -> Iterator[tuple[Job, Outcome]]:
    running: set[subprocess.Popen[str]] = set()

    def compute(job: Job) -> tuple[Job, Outcome]:
        start = time.monotonic()
        with acquire_device() as environment:
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
                stderr = process.communicate()[1]
            running.discard(process)
        code, error = process.returncode, ""
        if code < 0:
            line = f"killed by signal {-code}, perhaps for lack of memory"
            hint = ("--jobs", "1") if count > 1 else ("--layer", "{blocks}")
            error = with_hint(line, hint=hint)
        elif code:
            last = "".join(stderr.strip().splitlines()[-1:])
            error = last.removeprefix("ssl-bench: ") or f"exit code {code}"
        # The system kills processes with this signal if memory is short.
        is_killed = code == -getattr(signal, "SIGKILL", 9)
        no_memory = is_killed or is_out_of_memory(MachineError(error))
        code = code if code >= 0 else MachineError.exit_code
        return job, Outcome(time.monotonic() - start, code, error, ran_out_of_memory=no_memory)

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(compute, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            # Without this, Ctrl-C would wait until all jobs have ended.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise
