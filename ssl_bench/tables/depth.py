"""Tables over depth, rendered from records alone."""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_bench.data.files.fingerprints import kind_of, shortened
from ssl_bench.errors import DataError
from ssl_bench.results import ENCODER, TRAINED_ON, Record
from ssl_bench.system.files import write_text_atomically
from ssl_bench.tables.deviations import changed_settings, named_protocol
from ssl_bench.tables.sheets import NO_VALUE, Sheet, Word, set_tables

_SERIES = ("task", "dataset", "split", "metric", "unit", "facet", "protocol")
_PROVENANCE = ("num_images", "version", "git_commit", "torch", "device", "seconds", "created")
Row = int | float
"""A block, or an epoch."""
_JSON_NAMES = {"block": "layer"}
MARKERS = ("<!-- ssl-bench table -->", "<!-- end of ssl-bench table -->")


@dataclass(frozen=True)
class Entry:
    """One cell: the mean over seeds with its 95 % interval, in the unit of its records.

    Attributes:
        low: Of the interval, the mean over seeds; None without one; likewise `high`.
        arbitrary: Percent of the images whose answer rounding chose; None where none can be.
        records: What the numbers are from, one a seed, or several a seed where blocks are mixed.
    """

    value: float
    low: float | None
    high: float | None
    arbitrary: float | None
    records: tuple[Record, ...]

    def text(self) -> str:
        """The value as a table shows it, such as "32.3 ± 1.2 †2" or "1.2e+04 [9e+03, ∞]"."""
        if math.isnan(self.value):
            return NO_VALUE
        if self.records[0].unit != "%":
            return _number(self.value) + self._ends(_number)
        below, above = (
            "" if end is None else f"{abs(end - self.value):.1f}" for end in (self.low, self.high)
        )
        if below and below == above:
            return f"{self.value:.1f} ± {above}{self._dagger()}"
        return f"{self.value:.1f}{self._ends('{:.1f}'.format)}{self._dagger()}"

    def _ends(self, shown: Callable[[float], str]) -> str:
        """The interval, where it is not symmetric."""
        if self.low is None or self.high is None:
            return ""
        low, high = shown(self.low), shown(self.high)
        return "" if low == high else f" [{low}, {high}]"

    def _dagger(self) -> str:
        if not self.arbitrary:
            return ""
        return f" †{self.arbitrary:.{0 if self.arbitrary >= 1 else 1}f}"

    def csv_fields(self) -> dict[str, Any]:
        """Value, interval and what tells the experiment from others."""
        first = self.records[0]
        return {
            "value": self.value,
            "low_95": "" if self.low is None else self.low,
            "high_95": "" if self.high is None else self.high,
            **{name: getattr(first, name) for name in _SERIES},
            "num_images": first.num_images,
            "seeds": " ".join(str(seed) for seed in sorted({r.seed for r in self.records})),
            "checkpoint_sha256": first.checkpoint_sha256,
            "encoder_id": first.encoder_id,
            "trained_on": "" if first.trained_on is None else str(first.trained_on),
            "settings_digest": settings_digest(first),
        }

    def as_json(self) -> dict[str, Any]:
        """Value, interval and every record behind them."""
        first = self.records[0]
        return {
            "model": first.model,
            **{name: getattr(first, name) for name in ENCODER},
            "depth": first.depth,
            "value": finite(self.value),
            "ci95": [finite(self.low), finite(self.high)],
            "degenerate_percent": self.arbitrary,
            "records": [_record_json(record) for record in self.records],
        }


@dataclass(frozen=True)
class DepthTable:
    """One metric over blocks (rows) and models (columns).

    Attributes:
        rows: What they are: blocks, or something else that a score is followed over.
    """

    title: str
    models: tuple[str, ...]
    layers: tuple[Row, ...]
    entries: dict[tuple[Row, str], Entry]
    provenance: str
    rows: str = "block"

    @property
    def unit(self) -> str:
        """Of all values."""
        return next(iter(self.entries.values())).records[0].unit

    def best_layer(self, model: str) -> Row | None:
        """The block with the highest value of a model; None when none has one or is better."""
        return next(iter(self._ranked(model)), None)

    def _ranked(self, model: str) -> list[Row]:
        values = {
            layer: self.entries[layer, model].value
            for layer in self.layers
            if (layer, model) in self.entries
            and not math.isnan(self.entries[layer, model].value)
            and self.entries[layer, model].records[0].is_ranked
        }
        return sorted(values, key=lambda layer: -values[layer])

    def sheet(self, style: str) -> Sheet:
        """The best block of each model is marked; the second one in LaTeX alone.

        Neighbouring blocks are close: which of them comes second says little.
        """
        ranked = {model: self._ranked(model) for model in self.models}
        rows = [
            (
                Word(f"{layer:g}"),
                *(self._word(layer, model, ranked, style) for model in self.models),
            )
            for layer in self.layers
        ]
        note = self.provenance + dagger_note(self.entries.values())
        return Sheet(self.title, (self.rows, *self.models), tuple(rows), (note,))

    def _word(
        self, layer: Row, model: str, ranked: Mapping[str, Sequence[Row]], style: str
    ) -> Word:
        if (layer, model) not in self.entries:
            return Word("")
        text = self.entries[layer, model].text()
        second = style == "latex" and ranked[model][1:2] == [layer]
        return Word(text, marked=ranked[model][:1] == [layer], second=second)

    def csv_rows(self) -> list[dict[str, Any]]:
        """Fields of every cell, by block and model."""
        return [
            {"title": self.title, self.rows: layer, "model": model, **entry.csv_fields()}
            for layer, model, entry in self._cells()
        ]

    def as_json(self) -> dict[str, Any]:
        """Cells with what is needed to trust them."""
        cells = [
            {_JSON_NAMES.get(self.rows, self.rows): layer, "column": model, **entry.as_json()}
            for layer, model, entry in self._cells()
        ]
        series = series_json(next(iter(self.entries.values())).records[0])
        return {"kind": f"{self.rows}s", "title": self.title, **series, "cells": cells}

    def _cells(self) -> list[tuple[Row, str, Entry]]:
        return [
            (layer, model, self.entries[layer, model])
            for layer in self.layers
            for model in self.models
            if (layer, model) in self.entries
        ]


def depth_tables(records: Sequence[Record]) -> list[DepthTable]:
    """Group records into tables whose numbers are comparable.

    Numbers that differ in dataset, protocol, facet, settings or images never share a table.
    """
    ordered, names = comparable_groups(records), model_names(records)
    return [_depth_table(group, difference(group[0], ordered), names) for group in ordered]


def comparable_groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records whose numbers may stand side by side, whatever the block, the model and the seed."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[_comparable(record)].append(record)
    return [group for _, group in sorted(groups.items())]


def difference(record: Record, groups: Sequence[Sequence[Record]]) -> str:
    """What sets a group apart from the others whose title would be the same."""
    rivals = [group[0] for group in groups if title(group[0]) == title(record)]
    differing = differing_settings(record, rivals)
    return f" [{', '.join(differing)}]" if differing else ""


def differing_settings(record: Record, rivals: Sequence[Record]) -> list[str]:
    """Settings and data by which a record differs from some of the others.

    Without those that the title of a table says.
    """
    said = {*changed_settings(record), TRAINED_ON}
    differing = [
        f"{name}={value}"
        for name, value in sorted(record.settings.items())
        if name not in said and any(rival.settings.get(name) != value for rival in rivals)
    ]
    if any(rival.dataset_fingerprint != record.dataset_fingerprint for rival in rivals):
        differing.append(f"data {shortened(record.dataset_fingerprint)}")
    return differing


def title(record: Record) -> str:
    """What was measured, on what and how."""
    return (
        f"{record.task}: {metric_with_unit(record)} on {record.dataset} {record.split}, "
        f"{record.facet}, protocol {named_protocol(record)}{said_training(record)}"
    )


def said_training(record: Record) -> str:
    """Such as ", trained on train (1464 images, 3f9a01)"; nothing where nothing was fitted."""
    return "" if record.trained_on is None else f", trained on {record.trained_on}"


def metric_with_unit(record: Record) -> str:
    """Such as "corloc (%)"."""
    return f"{record.metric} ({record.unit})" if record.unit else record.metric


def _number(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.3g}"


def _comparable(record: Record) -> tuple[str, ...]:
    names = (record.task, record.dataset, record.split, record.metric, record.protocol)
    return (*names, record.facet, record.dataset_fingerprint, settings_text(record))


def _depth_table(records: Sequence[Record], differing: str, names: Mapping[str, str]) -> DepthTable:
    columns = {record.encoder_id: names[record.encoder_id] for record in records}
    cells: dict[tuple[Row, str], list[Record]] = defaultdict(list)
    for record in records:
        cells[record.layer, columns[record.encoder_id]].append(record)
    return DepthTable(
        title=title(records[0]) + differing,
        models=tuple(sorted(set(columns.values()))),
        layers=tuple(sorted({record.layer for record in records})),
        entries={cell: mean_entry(seeds) for cell, seeds in cells.items()},
        provenance=provenance(records),
    )


def model_names(records: Sequence[Record]) -> dict[str, str]:
    """Name of each encoder by its id; of two of the same name with its first digits."""
    names = {record.encoder_id: record.model for record in records}
    digits = 6
    # Again, because a third one may be called as the first one is now.
    while len(set(names.values())) < len(names):
        uses = Counter(names.values())
        names = {
            one: f"{name} {one[:digits]}" if uses[name] > 1 else name for one, name in names.items()
        }
        digits = None
    return names


def mean_entry(seeds: Sequence[Record]) -> Entry:
    """The mean of records of one block that differ in their seed alone."""
    value = sum(record.value for record in seeds) / len(seeds)
    # Averaging keeps the width of one seed: it never claims more certainty than was measured.
    known = [r.ci95 for r in seeds if r.ci95 is not None and not math.isnan(sum(r.ci95))]
    lows, highs = [low for low, _ in known], [high for _, high in known]
    return Entry(
        value=value,
        low=sum(lows) / len(lows) if lows else None,
        high=sum(highs) / len(highs) if highs else None,
        arbitrary=arbitrary_percent(seeds),
        records=tuple(seeds),
    )


def arbitrary_percent(records: Sequence[Record]) -> float | None:
    """Mean percent of the images whose answer rounding chose; None where none can be."""
    shares = [r.details["degenerate_percent"] for r in records if "degenerate_percent" in r.details]
    return sum(shares) / len(shares) if shares else None


def dagger_note(entries: Iterable[Entry]) -> str:
    """What a dagger means, if there is one."""
    if not any(entry.arbitrary for entry in entries):
        return ""
    return "; †: percent of the images that are degenerate, their box is arbitrary"


def series_json(record: Record) -> dict[str, Any]:
    """What all numbers that are comparable with a record's have in common."""
    return {
        **{name: getattr(record, name) for name in _SERIES},
        "dataset_fingerprint": record.dataset_fingerprint,
        "settings": dict(record.settings),
        "settings_digest": settings_digest(record),
    }


def settings_digest(record: Record) -> str:
    """Twelve hexadecimal digits that are the same for the same settings."""
    return hashlib.sha256(settings_text(record).encode()).hexdigest()[:12]


def settings_text(record: Record) -> str:
    """The same for the same settings."""
    return json.dumps(dict(record.settings), sort_keys=True, default=list)


def finite(value: float | None) -> float | None:
    """None for what JSON has no number for."""
    return None if value is None or not math.isfinite(value) else value


def _record_json(record: Record) -> dict[str, Any]:
    return {
        "layer": record.layer,
        "seed": record.seed,
        "value": finite(record.value),
        "ci95": None if record.ci95 is None else [finite(end) for end in record.ci95],
        **{name: getattr(record, name) for name in _PROVENANCE},
        "file": record.key().filename(),
    }


def trusted_note(records: Iterable[Record]) -> str:
    """What the numbers rest on where nobody read the files to know that they are the same."""
    is_trusted = any(kind_of(record.dataset_fingerprint) == "stat" for record in records)
    return ", their files known by size and time alone" if is_trusted else ""


def provenance(records: Sequence[Record]) -> str:
    """Images, seeds, versions and machines behind some records, in one line."""

    def distinct(values: Sequence[object]) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    commits = [(record.git_commit or "wheel")[:10] for record in records]
    left_out = [r.settings["left_out"] for r in records if "left_out" in r.settings]
    unreadable = f", unreadable and left out: {distinct(left_out)}" if left_out else ""
    return (
        f"{distinct([r.num_images for r in records])} images{unreadable}{trusted_note(records)}; "
        f"seeds {distinct([r.seed for r in records])}; "
        f"ssl-bench {distinct([r.version for r in records])} ({distinct(commits)}); "
        f"torch {distinct([r.torch for r in records])}; "
        f"{distinct([r.device for r in records])}; "
        f"{max(record.created for record in records)[:10]}"
    )


def render(table: DepthTable, style: str) -> str:
    """One table as text, markdown, latex, csv or json; the best block of each model is in bold.

    Raises:
        ConfigurationError: another style.
    """
    return set_tables([table], style)


def insert_between_markers(document: Path, text: str) -> None:
    """Replace what stands between the two `MARKERS` of a document.

    Raises:
        DataError: the document does not hold each marker once, in order.
    """
    begin, end = MARKERS
    try:
        text_before = document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {document} ({error}); name a text file") from error
    before, found, rest = text_before.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise DataError(f"{document} has no lines {begin!r} and {end!r} to put the table between")
    write_text_atomically(document, f"{before}{begin}\n{text}{end}{after}")
