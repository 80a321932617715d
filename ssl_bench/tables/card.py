"""Build cards of encoders: the score, time and memory of each evaluation in one table."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from ssl_bench.layers import INNER_FACETS
from ssl_bench.results import Baseline, Record, ResultStore
from ssl_bench.system.output import format_duration, format_memory, format_rate
from ssl_bench.tables.depth import main_metrics
from ssl_bench.tables.entries import (
    ScoreEntry,
    average_over_seeds,
    comparable_groups,
    describe_provenance,
    explain_dagger,
    metric_notes,
    metric_with_unit,
    model_names,
    series_as_json,
    settings_digest,
)
from ssl_bench.tables.layer_selection import (
    blocks_text,
    choice_as_json,
    choice_notes,
    choose_block,
)
from ssl_bench.tables.sheets import Cell, PrintedTable, Table

COST_NOTE = (
    "The number of images includes training images. An evaluation takes less time if it uses "
    "features of an earlier one in the same command. On a GPU, peak memory counts only tensors. On "
    "a CPU, it is the memory of the whole process, including PyTorch and what earlier probes left "
    "in memory"
)
"""Explanation of the costs in cards and reports."""

_LAST_BLOCK_NOTE = (
    "‡: the last block, because no block could be chosen: a higher value is not better, per-image "
    "values are missing, or most images are degenerate at every block"
)


class CostTexts(NamedTuple):
    """Printed texts of the cost of an evaluation. A text is empty if the value is unknown."""

    num_images: str
    time: str
    rate: str
    memory: str


class StoredEvaluation(NamedTuple):
    """Stored scores of one evaluation (a probe with its settings on one dataset), and its cost.

    Attributes:
        title: The task, dataset and protocol (preset of settings).
        records: The stored scores.
        num_images: Number of scored images and training images.
        seconds: Wall-clock time in which the records were computed.
        peak_memory: Peak memory use in bytes, or None if it is unknown.
    """

    title: str
    records: Sequence[Record]
    num_images: int
    seconds: float
    peak_memory: int | None

    def cost_texts(self) -> CostTexts:
        memory = self.peak_memory
        return CostTexts(
            f"{self.num_images:,}",
            format_duration(self.seconds),
            format_rate(self.num_images, self.seconds) if self.seconds else "",
            "" if memory is None else format_memory(memory),
        )


def list_evaluations(records: Sequence[Record]) -> list[StoredEvaluation]:
    """Group the records (stored scores) of one encoder by evaluation, sorted by task.

    If an evaluation was repeated with other seeds, its cost is that of the slowest seed.
    """
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        names = (record.task, record.dataset, record.split, record.protocol_label)
        groups[*names, record.dataset_fingerprint, settings_digest(record)].append(record)
    evaluations = []
    for (task, dataset, split, protocol, *_), members in sorted(groups.items()):
        by_seed: dict[int, list[Record]] = defaultdict(list)
        for record in members:
            by_seed[record.seed].append(record)
        costs = [(_measure_seconds(own), seed, own) for seed, own in sorted(by_seed.items())]
        seconds, _, slowest = max(costs)
        peaks = [record.peak_memory for record in slowest if record.peak_memory is not None]
        evaluations.append(
            StoredEvaluation(
                title=f"{task} on {dataset} {split}, protocol {protocol}",
                records=members,
                num_images=max(
                    record.num_images + record.num_training_images for record in slowest
                ),
                seconds=seconds,
                peak_memory=max(peaks, default=None),
            )
        )
    return evaluations


def _measure_seconds(records: Sequence[Record]) -> float:
    """Return the wall-clock time in which the records (stored scores) of an evaluation were made.

    Several runs may have computed different blocks, one after the other or at the same time.
    """
    total, latest_end = 0.0, -math.inf
    for start, seconds in sorted((_find_start(record), record.seconds) for record in records):
        total += max(0.0, min(seconds, start + seconds - latest_end))
        latest_end = max(latest_end, start + seconds)
    return total


def _find_start(record: Record) -> float:
    """Return when the run that computed a record began, in seconds, or 0 if this is unknown."""
    try:
        return datetime.fromisoformat(record.created).timestamp() - record.seconds
    except (ValueError, OverflowError):
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Card(Table):
    """A table with the scores of one encoder, and the time and memory of each evaluation.

    Attributes:
        name: Name of the encoder.
        evaluations: The evaluations.
        entries: The score that represents each evaluation.
    """

    name: str
    evaluations: Sequence[StoredEvaluation]
    entries: Sequence[ScoreEntry]

    def to_printed_table(self) -> PrintedTable:
        first = self.evaluations[0].records[0]
        rows = list(map(self._row, self.evaluations, self.entries))
        seconds = sum(evaluation.seconds for evaluation in self.evaluations)
        peaks = [e.peak_memory for e in self.evaluations if e.peak_memory is not None]
        are_known = len(peaks) == len(self.evaluations)
        memory = format_memory(max(peaks)) if are_known else ""
        total = ("total", "", "", "", "", "", format_duration(seconds), "", memory)
        blocks = f"{first.depth} block{'s' * (first.depth != 1)}"
        dagger = explain_dagger(entry.degenerate_percent for entry in self.entries)
        has_last = not all(entry.candidate_layers for entry in self.entries)
        return PrintedTable(
            title=f"{self.name}: {blocks}, sha256 {first.checkpoint_sha256[:12]}",
            header=(
                "task", "dataset", "metric", "baseline", "score @block",
                "images", "time", "images/s", "peak memory",
            ),
            rows=(*rows, tuple(map(Cell, total))),
            notes=self._notes(),
            symbol_notes=(*([dagger] if dagger else []), *([_LAST_BLOCK_NOTE] if has_last else [])),
        )  # fmt: skip

    def _row(self, evaluation: StoredEvaluation, entry: ScoreEntry) -> tuple[Cell, ...]:
        record = entry.records[0]
        baseline = Baseline.from_details(record.details)
        mark = "" if entry.candidate_layers else " ‡"
        texts = (
            f"{record.task}, {record.protocol_label}",
            f"{record.dataset} {record.split}",
            f"{metric_with_unit(record)}, {record.facet}",
            "" if baseline is None else f"{baseline.value:.1f}",
            f"{entry.text()} {blocks_text(entry)}{mark}",
            *evaluation.cost_texts(),
        )
        return tuple(map(Cell, texts))

    def _notes(self) -> tuple[str, ...]:
        records = [record for entry in self.entries for record in entry.records]
        return (
            *choice_notes(self.entries, "holdout"),
            *metric_notes(records),
            COST_NOTE,
            "`ssl-bench table --task TASK` prints all metrics, facets and blocks of a task",
            describe_provenance(records),
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "encoder": self.name,
                "blocks": " ".join(map(str, entry.layers)),
                **{name: "" if v is None else v for name, v in _cost_fields(evaluation).items()},
                **entry.csv_fields(),
            }
            for evaluation, entry in zip(self.evaluations, self.entries, strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "card",
            "title": self.name,
            "evaluations": [
                {
                    **series_as_json(entry.records[0]),
                    **_cost_fields(evaluation),
                    **choice_as_json(entry),
                    **entry.as_json(),
                }
                for evaluation, entry in zip(self.evaluations, self.entries, strict=True)
            ],
        }


def _cost_fields(evaluation: StoredEvaluation) -> dict[str, Any]:
    return {
        "num_images_with_training": evaluation.num_images,
        "seconds": evaluation.seconds,
        "peak_memory": evaluation.peak_memory,
    }


def build_cards(store: ResultStore, records: Sequence[Record]) -> list[Card]:
    """Build a card for each encoder of the given records (stored scores).

    An evaluation is represented by the main metric of its task. If there are several facets (kinds
    of features), the facet with the most scores is shown. The block is chosen on held-out
    images. If no block can be chosen, for example because a higher value is not better, the last
    block is shown.
    """
    cards = []
    for encoder, name in model_names(records).items():
        own = [record for record in records if record.encoder_id == encoder]
        evaluations = list_evaluations(own)
        entries = [_represent(evaluation.records, store) for evaluation in evaluations]
        cards.append(Card(name=name, evaluations=evaluations, entries=entries))
    return cards


def _represent(records: Sequence[Record], store: ResultStore) -> ScoreEntry:
    """Return the score that represents an evaluation, whose records (stored scores) are given."""
    (metric,) = main_metrics(records).values()
    groups = comparable_groups([record for record in records if record.metric == metric])
    group = min(groups, key=lambda group: (-len(group), group[0].facet in INNER_FACETS))
    chosen = choose_block(group, store, "holdout")
    if chosen is not None:
        return chosen
    last = max(record.layer for record in group)
    return average_over_seeds([record for record in group if record.layer == last])
