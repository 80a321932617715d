"""One cell of a table: the mean over seeds, its interval, and the records behind it."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ssl_bench.results import ENCODER, Baseline, Record
from ssl_bench.results.record import cell_filename
from ssl_bench.tables.series import SERIES, settings_digest
from ssl_bench.tables.sheets import NO_VALUE

K = TypeVar("K")
_PROVENANCE = ("num_images", "version", "git_commit", "torch", "device", "seconds", "created")


@dataclass(frozen=True, eq=False)
class Entry:
    """One cell: the mean over seeds with its 95 % interval, in the unit of its records.

    Attributes:
        low: Of the interval, the mean over seeds; None without one.
        high: As `low`.
        arbitrary: Percent of the images whose answer rounding chose; None where none can be.
        records: What the numbers are from, one a seed, or several a seed where blocks are mixed.
        says_seeds: Beside it are means of another number of seeds.
    """

    value: float
    low: float | None
    high: float | None
    arbitrary: float | None
    records: tuple[Record, ...]
    says_seeds: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({record.seed for record in self.records}))

    @property
    def layer(self) -> int:
        """Its block, where it is of one."""
        return self.records[0].layer

    @property
    def parts(self) -> tuple[str, ...]:
        """The value and what is behind it, which may stand below it."""
        return tuple(filter(None, self.text().partition(" ")[::2]))

    @property
    def reason(self) -> str:
        """Why there is no value, as the record says it; else empty."""
        reasons = (record.details.get("reason") for record in self.records)
        return next((str(one) for one in reasons if one), "") if math.isnan(self.value) else ""

    @property
    def sort_key(self) -> str:
        """As JavaScript reads numbers; empty where there is no value."""
        if math.isnan(self.value):
            return ""
        return "Infinity" if self.value == math.inf else str(self.value)

    def text(self) -> str:
        """The value as a table shows it, such as "32.3 ± 1.2 †2" or "1.2e+04 [9e+03, ∞]"."""
        if math.isnan(self.value):
            return NO_VALUE
        count = len(self.seeds)
        said = f" ({count} seed{'s' if count > 1 else ''})" if self.says_seeds else ""
        if self.records[0].unit != "%":
            return _plain(self.value) + self._ends(_plain) + said
        dagger = ""
        if self.arbitrary:
            dagger = f" †{self.arbitrary:.{0 if self.arbitrary >= 1 else 1}f}"
        below, above = (
            "" if end is None else f"{abs(end - self.value):.1f}" for end in (self.low, self.high)
        )
        if below and below == above:
            return f"{self.value:.1f} ± {above}{dagger}{said}"
        return f"{self.value:.1f}{self._ends('{:.1f}'.format)}{dagger}{said}"

    def _ends(self, shown: Callable[[float], str]) -> str:
        """The interval, where it is not symmetric."""
        if self.low is None or self.high is None:
            return ""
        low, high = shown(self.low), shown(self.high)
        return "" if low == high else f" [{low}, {high}]"

    def csv_fields(self) -> dict[str, Any]:
        """Value, interval and what tells the experiment from others."""
        first = self.records[0]
        baseline = Baseline.of(first.details)
        return {
            "value": self.value,
            "low_95": "" if self.low is None else self.low,
            "high_95": "" if self.high is None else self.high,
            "baseline": "" if baseline is None else baseline.value,
            "baseline_answer": "" if baseline is None else baseline.answer,
            **{name: getattr(first, name) for name in SERIES},
            "num_images": first.num_images,
            "seeds": " ".join(map(str, self.seeds)),
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
            "value": self.value,
            "ci95": [self.low, self.high],
            "baseline": first.details.get("baseline"),
            "degenerate_percent": self.arbitrary,
            "seeds": list(self.seeds),
            "records": [
                {
                    "layer": record.layer,
                    "seed": record.seed,
                    "value": record.value,
                    "ci95": None if record.ci95 is None else list(record.ci95),
                    **{name: getattr(record, name) for name in _PROVENANCE},
                    "file": cell_filename(record, record.digest),
                }
                for record in self.records
            ],
        }


def _plain(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.3g}"


def mean_entry(seeds: Sequence[Record]) -> Entry:
    """The mean of records of one block that differ in their seed alone."""
    entries = []
    for record in seeds:
        low, high = record.ci95 or (None, None)
        # An interval that knows one end alone says nothing.
        if low is None or high is None or math.isnan(low + high):
            low = high = None
        share = record.details.get("degenerate_percent")
        entries.append(Entry(record.value, low, high, share, (record,)))
    return mean_of(entries)


def mean_of(entries: Sequence[Entry]) -> Entry:
    """The mean over seeds, with all their records.

    Averaging keeps the width of one seed: it never claims more certainty than was measured.
    """
    return Entry(
        value=sum(entry.value for entry in entries) / len(entries),
        low=mean_of_known([entry.low for entry in entries]),
        high=mean_of_known([entry.high for entry in entries]),
        arbitrary=mean_of_known([entry.arbitrary for entry in entries]),
        records=tuple(record for entry in entries for record in entry.records),
    )


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of those that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def with_seeds_said(entries: Mapping[K, Entry]) -> dict[K, Entry]:
    """What stands side by side; each says its number of seeds where it is not the same for all."""
    uneven = len({len(entry.seeds) for entry in entries.values()}) > 1
    return {at: replace(entry, says_seeds=uneven) for at, entry in entries.items()}


def mean_entries(records: Iterable[Record], place: Callable[[Record], K]) -> dict[K, Entry]:
    """Means over seeds that stand side by side, of the records that have the same place."""
    cells: dict[K, list[Record]] = defaultdict(list)
    for record in records:
        cells[place(record)].append(record)
    return with_seeds_said({at: mean_entry(seeds) for at, seeds in cells.items()})
