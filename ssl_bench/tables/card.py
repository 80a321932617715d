"""Build cards of encoders: the score, time and memory of each evaluation in one table."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ssl_bench.layers import INNER_FACETS
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.output import format_duration, format_memory
from ssl_bench.tables.depth import main_metrics
from ssl_bench.tables.entries import (
    ScoreEntry,
    average_over_seeds,
    comparable_groups,
    describe_provenance,
    explain_dagger,
    metric_notes,
    model_names,
    series_as_json,
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
    "features of an earlier one in the same command. Memory is that of tensors on a GPU, or of the "
    "process on a CPU, including features that are kept for later probes"
)


class StoredEvaluation(NamedTuple):
    """Stored scores of one evaluation (a probe with its settings on one dataset), and its cost.

    Attributes:
        title: The task, dataset and protocol (preset of settings).
        records: The stored scores.
        num_images: Number of scored images and training images, or None if it is unknown.
        seconds: Wall-clock time.
        peak_memory: Peak memory use in bytes, or None if it is unknown.
    """

    title: str
    records: Sequence[Record]
    num_images: int | None
    seconds: float
    peak_memory: int | None

    @property
    def images_per_second(self) -> float | None:
        return self.num_images / self.seconds if self.num_images and self.seconds else None

    def cost_texts(self) -> tuple[str, str, str, str]:
        """Return the number of images, the time, the images per second and the peak memory."""
        rate, memory = self.images_per_second, self.peak_memory
        return (
            "" if self.num_images is None else str(self.num_images),
            format_duration(self.seconds),
            "" if rate is None else f"{rate:.3g}",
            "" if memory is None else format_memory(memory),
        )


def list_evaluations(store: ResultStore, records: Sequence[Record]) -> list[StoredEvaluation]:
    """Group the records (stored scores) of one encoder by evaluation, sorted by title.

    If an evaluation was repeated with other seeds, its cost is that of the slowest seed.
    """
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        title = (
            f"{record.task} on {record.dataset} {record.split}, protocol {record.protocol_label}"
        )
        settings = (record.dataset_fingerprint, sorted(record.settings.items()))
        groups[title, repr(settings)].append(record)
    evaluations = []
    for (title, _), members in sorted(groups.items()):
        # The seconds and the memory of a record count from the start of the evaluation.
        last = max(members, key=lambda record: record.seconds)
        peaks = [record.peak_memory for record in members if record.peak_memory is not None]
        evaluations.append(
            StoredEvaluation(
                title, members, store.count_images(last), last.seconds, max(peaks, default=None)
            )
        )
    return evaluations


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
        first, rows = self.evaluations[0].records[0], []
        for evaluation, entry in zip(self.evaluations, self.entries, strict=True):
            record = entry.records[0]
            texts = (
                f"{record.task}, {record.protocol_label}",
                f"{record.dataset} {record.split}",
                f"{record.metric} {record.facet}",
                f"{entry.text()} {blocks_text(entry)}",
                *evaluation.cost_texts(),
            )
            rows.append(tuple(map(Cell, texts)))
        seconds = sum(evaluation.seconds for evaluation in self.evaluations)
        peaks = [e.peak_memory for e in self.evaluations if e.peak_memory is not None]
        memory = format_memory(max(peaks)) if peaks else ""
        total = ("total", "", "", "", "", format_duration(seconds), "", memory)
        blocks = f"{first.depth} block{'s' * (first.depth != 1)}"
        return PrintedTable(
            title=f"{self.name}: {blocks}, sha256 {first.checkpoint_sha256[:12]}",
            header=(
                *("task", "dataset", "metric", "score @block"),
                *("images", "time", "images/s", "peak memory"),
            ),
            rows=(*rows, tuple(map(Cell, total))),
            notes=self._notes(),
            symbol_notes=tuple(
                filter(None, [explain_dagger(entry.degenerate_percent for entry in self.entries)])
            ),
        )

    def _notes(self) -> tuple[str, ...]:
        records = [record for entry in self.entries for record in entry.records]
        notes = choice_notes(self.entries, "holdout")
        if last := sorted({e.records[0].metric for e in self.entries if not e.candidate_layers}):
            notes.append(f"{', '.join(last)}: no block was chosen, so the last one is shown")
        return (*notes, *metric_notes(records), COST_NOTE, describe_provenance(records))

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
        "images": evaluation.num_images,
        "seconds": evaluation.seconds,
        "images_per_second": evaluation.images_per_second,
        "peak_memory": evaluation.peak_memory,
    }


def build_cards(store: ResultStore, records: Sequence[Record]) -> list[Card]:
    """Build a card for each encoder of the given records (stored scores).

    An evaluation is represented by the main metric of its task. The block is chosen on held-out
    images. If no block can be chosen, for example because a higher value is not better, the last
    block is shown.
    """
    cards = []
    for encoder, name in model_names(records).items():
        own = [record for record in records if record.encoder_id == encoder]
        evaluations = list_evaluations(store, own)
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
