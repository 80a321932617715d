"""One cell of a table: the mean over seeds, its interval, and the records behind it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ssl_bench.results import ENCODER, Baseline, Record
from ssl_bench.tables.printing.sheets import NO_VALUE
from ssl_bench.tables.series import SERIES, settings_digest

K = TypeVar("K")
_PROVENANCE = ("num_images", "version", "git_commit", "torch", "device", "seconds", "created")


@dataclass(frozen=True)
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

    def text(self) -> str:
        """The value as a table shows it, such as "32.3 ± 1.2 †2" or "1.2e+04 [9e+03, ∞]"."""
        if math.isnan(self.value):
            return NO_VALUE
        count = len(self.seeds)
        said = f" ({count} seed{'s' if count > 1 else ''})" if self.says_seeds else ""
        return self._number() + said

    def _number(self) -> str:
        if self.records[0].unit != "%":
            return _plain(self.value) + self._ends(_plain)
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
            "records": [_record_json(record) for record in self.records],
        }


def _plain(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.3g}"


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


def with_seeds_said(entries: Mapping[K, Entry]) -> dict[K, Entry]:
    """What stands side by side; each says its number of seeds where it is not the same for all."""
    uneven = len({len(entry.seeds) for entry in entries.values()}) > 1
    return {at: replace(entry, says_seeds=uneven) for at, entry in entries.items()}


def arbitrary_percent(records: Sequence[Record]) -> float | None:
    """Mean percent of the images whose answer rounding chose; None where none can be."""
    shares = [r.details["degenerate_percent"] for r in records if "degenerate_percent" in r.details]
    return sum(shares) / len(shares) if shares else None


def _record_json(record: Record) -> dict[str, Any]:
    return {
        "layer": record.layer,
        "seed": record.seed,
        "value": record.value,
        "ci95": None if record.ci95 is None else list(record.ci95),
        **{name: getattr(record, name) for name in _PROVENANCE},
        "file": record.key().filename(),
    }
