"""The accuracy of a finished supervised run as a record, beside those of the probes."""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import nn

from pretrain.monitor import Observer
from pretrain.runtime.fine_tuning import SHA256
from pretrain.schedules import Timeline
from ssl_bench.data.files.readable import counts_and_first
from ssl_bench.intervals import Share
from ssl_bench.models import identify_encoder
from ssl_bench.results import SUPERVISED, TRAINED_ON, CellKey, Record, ResultStore, TrainingImages
from ssl_bench.results.provenance import provenance
from ssl_bench.system.paths import real

_PLACES = frozenset({"data", "monitor", "init_from"})


@dataclass(frozen=True)
class Trained:
    """What a run was.

    Attributes:
        description: As in its state.
        left_out: Ids of the images that it could not read.
    """

    description: Mapping[str, Any]
    images: TrainingImages
    left_out: list[str]


def record_accuracy(
    results: Path, observer: Observer, weights: Path, trained: Trained
) -> list[Path]:
    """Measure how often the head of a run is right, and write it down with the images it was on.

    The dataset has the name of its folder, so that of a paper's needs a folder of that name.

    Args:
        results: Folder of a `ResultStore`, where several runs may stand.
        observer: Its validation images count.
        weights: File of the encoder below the head.
        trained: The run.

    Returns:
        Files of the records, that of top-1 first; none for a head that diverged.

    Raises:
        DataError: an image cannot be read.
        MachineError: the folder cannot be written.
    """
    start = time.monotonic()
    right = observer.hits()
    store, files = ResultStore(results), []
    for most, found in (right or {}).items():
        hits = found.cpu().numpy()
        seconds = time.monotonic() - start
        record = _record(hits, f"top{most}", observer, weights, trained, seconds)
        store.save_image_ids(record.dataset_fingerprint, observer.val.ids)
        files.append(store.save(record, hits))
    return files


def _record(
    hits: Bool[np.ndarray, " images"],
    metric: str,
    observer: Observer,
    weights: Path,
    trained: Trained,
    seconds: float,
) -> Record:
    description, gone = trained.description, {trained.images.split: trained.left_out}
    assert isinstance(observer.learner, nn.Module)
    encoder, count = identify_encoder(str(weights)), observer.fitted_and_scored
    shared = {"fitted_and_scored": count} if count else {}
    key = CellKey(
        task=SUPERVISED,
        dataset=re.sub(r"\W+", "_", real(observer.root).name).lower() or "images",
        split=observer.val.images.split,
        layer=encoder.depth - 1,
        facet="head",
        protocol="central_square",
        metric=metric,
        **encoder.identity(),
        dataset_fingerprint=observer.val.fingerprint(),
        seed=description["train"]["seed"],
        settings={
            "image_size": observer.learner.encoder.config.image_size,
            "crop_share": observer.options.crop_share,
            TRAINED_ON: asdict(trained.images),
            **shared,
        },
    )
    return key.record(
        depth=encoder.depth,
        value=Share(hits).value,
        ci95=Share(hits).ci95(),
        num_images=len(hits),
        model=encoder.name,
        details={
            "training": recipe_of(description, observer.timeline),
            "configuration": _public(description),
            **({"left_out": counts_and_first(gone)} if trained.left_out else {}),
        },
        **provenance(next(observer.learner.parameters()).device, seconds),
    )


def recipe_of(description: Mapping[str, Any], timeline: Timeline) -> str:
    """How the encoder was trained, in words that compare with a paper's."""
    train, optimizer = description["train"], description["optimizer"]
    epochs = timeline.total_steps / timeline.steps_per_epoch
    # Rates hold for a batch of 256, see pretrain/step.py.
    rate = optimizer["lr"] * train["batch_size"] / 256
    kind = optimizer["_target_"].rpartition(".")[2]
    start = f", from weights {description[SHA256][:8]}" if SHA256 in description else ""
    return f"{epochs:g} epochs, batch {train['batch_size']}, {kind} at {rate:g}{start}"


def _public(description: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only says where files lie."""
    return {name: part for name, part in description.items() if name not in _PLACES}
