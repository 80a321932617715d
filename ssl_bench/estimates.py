"""Estimate how long jobs take, from the stored results of earlier runs on fewer images."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ssl_bench.errors import DataError
from ssl_bench.results import Record, ResultKey, ResultStore, encoder_id
from ssl_bench.results.record import ENCODER_FIELDS
from ssl_bench.sweep import Job


class EarlierRun(NamedTuple):
    """Earlier evaluation of a job's encoder with the job's probe, on some of the job's images.

    Attributes:
        ids: Ids of the scored images.
        num_images: Number of scored images and training images.
        seconds: Wall-clock time.
        device: Device that ran the evaluation, such as "cpu: x86_64, 2 threads".
        created: Time at which the evaluation ended, in UTC and ISO 8601.
    """

    ids: frozenset[str]
    num_images: int
    seconds: float
    device: str
    created: str


def estimate_seconds(jobs: Sequence[Job], store: ResultStore) -> list[float | None]:
    """Estimate the wall-clock time of jobs from stored results on some of their images.

    A job evaluates one encoder with one probe on one dataset. To get results for an estimate, run
    the same command with `--limit 12`, for example. The time is extrapolated linearly to all
    images. Only results of the most recently used device are used.

    Args:
        jobs: The planned jobs.
        store: The results folder.

    Returns:
        Seconds for each job. A job without pending results takes 0 s. The time is None if there are
        no earlier results.
    """
    records = _load_records([job for job in jobs if job.pending], store)
    return [
        _estimate_from_runs(job, _find_earlier_runs(job, records, store)) if job.pending else 0.0
        for job in jobs
    ]


def _estimate_from_runs(job: Job, runs: Sequence[EarlierRun]) -> float | None:
    """Estimate the seconds of a job from earlier runs, which are ordered by time.

    Images take no time if the probe reuses their stored results (`Probe.reuses_results`).
    """
    seconds, copied = dict[int, float](), frozenset[str]()
    for run in runs:
        num_images = run.num_images - len(run.ids & copied)
        if run.device == runs[-1].device and num_images:
            seconds[num_images] = run.seconds
        if job.planned.probe.reuses_results:
            copied |= run.ids
    return extrapolate(seconds, job.num_images - len(copied)) if seconds else None


def extrapolate(seconds: Mapping[int, float], num_images: int) -> float:
    """Estimate the time for a number of images.

    With one measurement, assume that the time is proportional to the number of images. With several
    measurements, fit a line that includes a constant start-up time. If the fitted time does not
    grow with the number of images, return the time that was measured for the most images. The
    estimate is never negative.

    Args:
        seconds: Measured seconds by number of images.
        num_images: Number of images to estimate the time for.
    """
    largest = max(seconds)
    if len(seconds) == 1:
        return seconds[largest] * num_images / largest
    slope, start = np.polyfit(list(seconds), list(seconds.values()), deg=1)
    # Some probes use a limited number of images, so that more images take no more time.
    return max(0.0, float(start + slope * num_images)) if slope > 0 else seconds[largest]


def _load_records(jobs: Sequence[Job], store: ResultStore) -> list[Record]:
    """Load the readable records (stored results) for the encoders and tasks of the given jobs."""
    encoders = {encoder_id(job.encoder.identity()) for job in jobs}
    folders = {f"/records/{job.planned.probe.task}/" for job in jobs}
    try:
        paths = [
            path
            for encoder, own in store.encoders().items()
            if encoder.encoder_id in encoders
            for path in own
            if any(folder in path for folder in folders)
        ]
        return store.records(paths)
    except DataError:
        return []


def _find_earlier_runs(job: Job, records: Sequence[Record], store: ResultStore) -> list[EarlierRun]:
    wanted, ids = _identify_probe(job.keys[0], job), frozenset(job.images.ids)
    by_images: dict[str, list[Record]] = {}
    for record in records:
        if _identify_probe(record, job) == wanted:
            by_images.setdefault(record.dataset_fingerprint, []).append(record)
    runs = []
    for fingerprint, same_images in by_images.items():
        scored = frozenset(store.image_ids(fingerprint) or ())
        layers = {record.layer for record in same_images}
        if scored and ids.issuperset(scored) and layers.issuperset(job.layers):
            slowest = max(same_images, key=lambda record: record.seconds)
            num_images = len(scored) + slowest.num_training_images
            runs.append(
                EarlierRun(scored, num_images, slowest.seconds, slowest.device, slowest.created)
            )
    return sorted(runs, key=lambda run: run.created)


def _identify_probe(key: ResultKey, job: Job) -> tuple[object, ...]:
    """Return a key of the encoder, the probe and the settings that affect the time per image."""
    probe = job.planned.probe
    names = {*probe.settings(), "dtype"}.difference(probe.excluded_from_timing)
    settings = {name: key.settings.get(name) for name in names}
    encoder = [getattr(key, name) for name in ENCODER_FIELDS]
    return encoder, key.task, key.protocol, key.split, settings
