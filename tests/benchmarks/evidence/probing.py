"""Probes of the queue's encoders, on every block and beside random weights."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_bench.intervals import Share
from ssl_bench.models import identify_encoder
from ssl_bench.models.loading.addresses import kept_epoch
from ssl_bench.results import Record, ResultStore
from tests.benchmarks.ledger import Run
from tests.benchmarks.processes import said_in
from tests.benchmarks.provenance import provenance

TRAINED, RANDOM = "trained", "random"


@dataclass(frozen=True)
class Question:
    """A probe, its data and the number that is kept.

    Attributes:
        root: Of its data, in the folder of data.
        images: What these are.
        options: Of `probe`.
        cut: What makes it seconds long.
    """

    task: str
    metric: str
    facet: str
    dataset: str
    root: str
    images: str
    options: Sequence[str]
    cut: Sequence[str]


_CIFAR = ("dataset.val_split=test", "probe.image_size=64")
_FEW = ("--limit", "40")
KNN = Question(
    *("knn", "top1_k20", "cls", "class_folders", "cifar10", "CIFAR-10"),
    (*_CIFAR, "--limit", "10000", "probe.neighbours=[20]"),
    (*_CIFAR, *_FEW, "probe.neighbours=[20]"),
)
QUESTIONS = (
    KNN,
    Question(
        *("classification", "top1_holdout", "cls", "class_folders", "cifar10", "CIFAR-10"),
        (*_CIFAR, "--limit", "10000"),
        (*_CIFAR, *_FEW, "probe.training.c_values=[1e-2]"),
    ),
    Question(
        *("retrieval", "miou", "token", "voc2012", "photos", "photographs"),
        ("probe.image_size=256",),
        ("probe.image_size=64", "--limit", "4"),
    ),
    Question(
        *("tokencut", "corloc", "key", "voc2012", "photos", "photographs"), (), ("--limit", "1")
    ),
    Question(
        *("geometry", "rankme", "cls", "folder", "tiny_imagenet_choosing/val", "Tiny-ImageNet"),
        (),
        (*_FEW, "probe.view_images=2", "probe.views=2"),
    ),
)


def probed(data: Path, out: Path, run: str, *, cut: bool) -> Run:
    """What every block of a run's encoder knows, and of random weights, and k-NN on the way.

    Args:
        data: The folder of data.
        out: Folder of run folders; records stay in one below it.
        run: Name of a finished run.
        cut: Few images, to see that it starts.

    Returns:
        `cells`, a value a question, encoder and block, and `above_random`: for every block how far
        k-NN is above random weights, with the interval over images.
    """
    start, folder = time.monotonic(), out / run
    records = out / (f"{run}-probes" if cut else "dino-probes")
    encoders = {TRAINED: str(folder), RANDOM: f"random:{folder}"}
    epochs = sorted(n for one in folder.iterdir() if (n := kept_epoch(one)) is not None)
    on_the_way = {f"epoch {epoch}": f"{folder}@{epoch}" for epoch in epochs}
    said = out / f"{run}-probes.txt"
    for question in QUESTIONS:
        asked = encoders | (on_the_way if question is KNN else {})
        _probe(question, asked.values(), data, records, said, cut=cut)
    store = ResultStore(records)
    found = {name: _of(store, uri) for name, uri in (encoders | on_the_way).items()}
    hours = round((time.monotonic() - start) / 3600, 3)
    return {
        "cells": [_cell(name, record) for name, those in found.items() for record in those],
        "above_random": _above(store, found[TRAINED], found[RANDOM]),
        "hours": hours,
        "provenance": provenance(),
    }


def _probe(
    question: Question, uris: Any, data: Path, records: Path, said: Path, *, cut: bool
) -> None:
    command = [sys.executable, "-m", "ssl_bench", "probe", "--task", question.task]
    command += [part for uri in uris for part in ("--checkpoint", uri)]
    command += ["--dataset", question.dataset, "--data-root", str(data / question.root)]
    command += ["--out", str(records), *(question.cut if cut else question.options)]
    said_in(command, said)


def _of(store: ResultStore, uri: str) -> list[Record]:
    """The numbers that are kept of an encoder, by block."""
    digest = identify_encoder(uri).sha256
    kept = {(one.task, one.metric, one.facet) for one in QUESTIONS}
    found = [
        record
        for record in store.records()
        if record.checkpoint_sha256 == digest and (record.task, record.metric, record.facet) in kept
    ]
    order = [one.task for one in QUESTIONS]
    return sorted(found, key=lambda record: (order.index(record.task), record.layer))


def _cell(encoder: str, record: Record) -> dict[str, Any]:
    named = {"task": record.task, "metric": record.metric, "encoder": encoder}
    measured = {"layer": record.layer, "value": record.value, "ci95": record.ci95}
    (data,) = (one.images for one in QUESTIONS if one.task == record.task)
    return {**named, "dataset": data, "images": record.num_images, **measured}


def _above(
    store: ResultStore, trained: Sequence[Record], random: Sequence[Record]
) -> list[dict[str, Any]]:
    """k-NN of each block minus that of random weights, the same images in both."""
    pairs = {
        record.layer: [record, other]
        for record in trained
        for other in random
        if record.task == other.task == KNN.task and record.layer == other.layer
    }
    found = []
    for layer, pair in sorted(pairs.items()):
        one, other = (Share(_hits(store, record)) for record in pair)
        interval = one.difference_ci95(other)
        found.append({"layer": layer, "difference": one.value - other.value, "ci95": interval})
    return found


def _hits(store: ResultStore, record: Record) -> Any:
    hits = store.per_image(record)
    assert hits is not None, record
    return hits.astype(bool)
