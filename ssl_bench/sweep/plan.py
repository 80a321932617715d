"""Which cells of checkpoints x probes x datasets are pending, and how long they may take."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from ssl_bench.asked import asked_encoders, asked_probes
from ssl_bench.data.opened import OpenedOnce
from ssl_bench.data.samples import ImageSet
from ssl_bench.evaluation import cell_keys, cell_settings
from ssl_bench.evaluation.pending import find_pending, pictures_folder
from ssl_bench.layers import layers_of
from ssl_bench.models import EncoderIdentity, identify_encoder
from ssl_bench.models.loading.addresses import layers_asked
from ssl_bench.planning import PlannedProbe
from ssl_bench.results import CellKey, Record, ResultStore, encoder_id
from ssl_bench.system.progress import say

_SAME_PASS_SECONDS = 2.0


@dataclass(frozen=True)
class Job:
    """The cells of one encoder, one probe and one dataset.

    Attributes:
        layers: Block indices that were asked for.
        seconds: What the pending cells took before, for the same question asked of an encoder of
            the same depth on the same device; None where no record says it.
        arguments: `ssl-bench` with these computes what is pending and nothing else.
    """

    encoder: EncoderIdentity
    planned: PlannedProbe
    layers: tuple[int, ...]
    dataset: str
    split: str
    keys: tuple[CellKey, ...]
    pending: tuple[CellKey, ...]
    seconds: float | None
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        where = f"{self.dataset} {self.split}"
        return f"{self.planned.probe.task} on {where}, {self.encoder.name}"


def plan_sweep(
    options: argparse.Namespace, overrides: Sequence[str], device: str | None
) -> list[Job]:
    """The jobs of a sweep, checkpoint by checkpoint; nothing is computed or written.

    The estimates are for `device`, named as in records.

    Raises:
        SslBenchError: As `probe` with the same arguments.
    """
    uris = asked_encoders(options)
    plan = asked_probes(options, overrides)
    encoders = _distinct(identify_encoder(uri) for uri in uris)
    store = ResultStore(Path(options.out))
    asked = [
        (planned, question.probe.split(question.dataset), cell_settings(question))
        for planned, question in zip(plan, _sharing_datasets(plan), strict=True)
    ]
    times = RecordedTimes(_records_of(store, asked), device)
    if store.unreadable:
        say(store.said_unreadable())
    jobs = []
    for encoder in encoders:
        known_as = encoder_id(encoder.identity())
        asked_layers = layers_asked(encoder.uri, options.layer)
        for planned, images, settings in asked:
            layers = layers_of(planned.probe, asked_layers, encoder.depth)
            keys = cell_keys(
                planned, images, layers, identity=encoder.identity(), settings=settings
            )
            folder = pictures_folder(store, planned.probe.task, images, encoder.name, known_as)
            found = find_pending(planned.probe, keys, images, store, folder)
            # Where pictures alone are missing, the cells that are run for them.
            left = found.cells or [key for key in keys if key.layer in found.layers]
            pending = tuple(key for key in keys if key in left)
            jobs.append(
                Job(
                    encoder=encoder,
                    planned=planned,
                    layers=layers,
                    dataset=images.name,
                    split=images.split,
                    keys=tuple(keys),
                    pending=pending,
                    seconds=times.estimate(pending, encoder.depth),
                    arguments=_arguments(options, planned, encoder.uri),
                )
            )
    return jobs


def _sharing_datasets(plan: Sequence[PlannedProbe]) -> list[PlannedProbe]:
    """The same questions, each dataset opened and its files known once for all tasks and encoders.

    For the plan alone: what runs later looks at the files as they are then.
    """
    opened: list[OpenedOnce] = []
    for planned in plan:
        if not any(planned.dataset == one.dataset for one in opened):
            opened.append(OpenedOnce(planned.dataset))
    return [
        replace(planned, dataset=next(one for one in opened if one.dataset == planned.dataset))
        for planned in plan
    ]


def _distinct(encoders: Iterable[EncoderIdentity]) -> list[EncoderIdentity]:
    """Without those that came before under another address: their cells are the same."""
    found: dict[str, EncoderIdentity] = {}
    for encoder in encoders:
        first = found.setdefault(encoder_id(encoder.identity()), encoder)
        if first is not encoder:
            say(f"{encoder.uri} is the encoder of {first.uri}, which stands for both")
    return list(found.values())


def _records_of(
    store: ResultStore, asked: Iterable[tuple[PlannedProbe, ImageSet, object]]
) -> list[Record]:
    """Those of the tasks and datasets that are asked: no other says how long they take."""
    places = {(planned.probe.task, images.name) for planned, images, _ in asked}
    return [record for place in sorted(places) for record in store.records_of(*place)]


def _arguments(options: argparse.Namespace, planned: PlannedProbe, uri: str) -> tuple[str, ...]:
    task, dataset = planned.choice
    flags = {
        "--task": task,
        "--layer": layers_asked(uri, options.layer),
        "--checkpoint": uri,
        "--dataset": dataset,
        "--data-root": planned.root,
        "--out": options.out,
        "--device": options.device,
        "--on-bad-image": options.on_bad_image,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    return ("probe", *words, *planned.overrides)


@dataclass(frozen=True)
class _Pass:
    """The cells that one forward pass gave."""

    layers: int
    seconds: float


class RecordedTimes:
    """How long passes took, by what was asked.

    Args:
        device: As records name it.
    """

    def __init__(self, records: Iterable[Record], device: str | None) -> None:
        alike: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.device == device:
                alike[_kind(record.key(), record.depth)].append(record)
        self._passes: Mapping[str, list[_Pass]] = {k: _passes(v) for k, v in alike.items()}

    def estimate(self, pending: Sequence[CellKey], depth: int) -> float | None:
        """Seconds for pending cells of one question: the median of passes over as many layers.

        Where there are none of as many layers, other passes scaled by their number of layers.
        """
        if not pending:
            return 0.0
        passes = self._passes.get(_kind(pending[0], depth), [])
        count = len({key.layer for key in pending})
        same = [one.seconds for one in passes if one.layers == count]
        scaled = [one.seconds / one.layers * count for one in passes]
        return median(same or scaled) if passes else None


def _kind(key: CellKey, depth: int) -> str:
    same: tuple[Any, ...] = (key.task, key.protocol, key.dataset, key.split, depth)
    return json.dumps([*same, key.dataset_fingerprint, key.settings], sort_keys=True, default=list)


def _passes(records: Iterable[Record]) -> list[_Pass]:
    """Records of one pass began at the same time, however late each of them was saved."""
    passes: list[list[Record]] = []
    began = None
    for start, record in sorted(_starts(records), key=lambda pair: pair[0]):
        if began is None or start - began > _SAME_PASS_SECONDS:
            began = start
            passes.append([])
        passes[-1].append(record)
    return [
        _Pass(len({one.layer for one in group}), max(one.seconds for one in group))
        for group in passes
    ]


def _starts(records: Iterable[Record]) -> Iterable[tuple[float, Record]]:
    for record in records:
        try:
            yield datetime.fromisoformat(record.created).timestamp() - record.seconds, record
        except ValueError:
            # Somebody's own file; a time that cannot be read gives no estimate.
            continue
