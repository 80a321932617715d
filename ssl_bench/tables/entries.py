"""What tables are made of: numbers that may stand side by side, cells, and what stands below.

Three parts: which records are comparable and what tells groups of them apart; `Entry`, one cell,
the mean over seeds with its interval; notes on where the numbers are from and what signs mean.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ssl_bench.data.files.fingerprints import kind_of, shortened
from ssl_bench.results import (
    CORRUPTED,
    ENCODER_FIELDS,
    MAX_DEGENERATE_PERCENT,
    TRAINED_ON,
    Baseline,
    Record,
    RecordedEncoder,
    is_degenerate,
)
from ssl_bench.system.escaping import escape_unprintable
from ssl_bench.tables.sheets import NO_VALUE

K = TypeVar("K")
_HEADLINES = (
    "miou_holdout",
    "ap50",
    "corloc",
    "max_f_beta",
    "miou",
    "top1_holdout",
    "top1_k20",
    "top1",
    "pck_0.1",
    "ami",
    "nmi",
    "explained_variance",
    "condition_number",
    "rankme",
)

SERIES = ("task", "dataset", "split", "metric", "unit", "facet", "protocol")


def comparable_groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records whose numbers may stand side by side, whatever the block, the model and the seed."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    # By identity: records that were read together share their settings.
    texts: dict[int, str] = {}
    for record in records:
        place = id(record.settings)
        if place not in texts:
            texts[place] = settings_text(record)
        names = (record.task, record.dataset, record.split, record.metric, record.protocol)
        groups[*names, record.facet, record.dataset_fingerprint, texts[place]].append(record)
    return [group for _, group in sorted(groups.items())]


def differences(groups: Sequence[Sequence[Record]]) -> list[str]:
    """What sets each group apart from the others whose title would be the same, in brackets."""
    titles = [title(group[0]) for group in groups]
    rivals: dict[str, list[Record]] = defaultdict(list)
    for said, group in zip(titles, groups, strict=True):
        rivals[said].append(group[0])
    found = (
        differing_settings(group[0], rivals[said])
        for said, group in zip(titles, groups, strict=True)
    )
    return [f" [{', '.join(differing)}]" if differing else "" for differing in found]


def differing_settings(record: Record, rivals: Sequence[Record]) -> list[str]:
    """Settings and data by which a record differs from some of the others.

    Without those that the title of a table says.
    """
    said = {*record.changed, TRAINED_ON, CORRUPTED}
    differing = [
        f"{name}={value}"
        for name, value in sorted(record.settings.items())
        if name not in said and any(rival.settings.get(name) != value for rival in rivals)
    ]
    others = [r for r in rivals if r.dataset_fingerprint != record.dataset_fingerprint]
    if others:
        # As from before an image was replaced.
        older = "older " if any(other.created > record.created for other in others) else ""
        differing.append(f"{older}data {shortened(record.dataset_fingerprint)}")
    return differing


def title(record: Record) -> str:
    """What was measured, on what and how."""
    return (
        f"{record.task}: {metric_with_unit(record)} on {record.dataset} {record.split}, "
        f"{record.facet}, protocol {record.protocol_label}{training_suffix(record)}"
    )


def training_suffix(record: Record) -> str:
    """Such as ", trained on train (1464 images, 3f9a01)"; nothing where nothing was fitted."""
    return "" if record.trained_on is None else f", trained on {record.trained_on}"


def metric_with_unit(record: Record) -> str:
    """Such as "corloc (%)"."""
    return f"{record.metric} ({record.unit})" if record.unit else record.metric


def model_names(records: Iterable[Record | RecordedEncoder]) -> dict[str, str]:
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


def choose_main_metric(known: Sequence[tuple[str, bool]]) -> str:
    """The metric that stands for a task: of the known ones, or the first in which more is better.

    Args:
        known: Names of metrics, and whether more of them is better.
    """
    metrics = [metric for metric, _ in sorted(known, key=lambda one: not one[1])]
    return next((metric for metric in _HEADLINES if metric in metrics), metrics[0])


def series_json(record: Record) -> dict[str, Any]:
    """What all numbers that are comparable with a record's have in common."""
    return {
        **{name: getattr(record, name) for name in SERIES},
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
    def is_degenerate(self) -> bool:
        """Whether rounding, not the images, decides most of its answers."""
        return is_degenerate(self.arbitrary)

    @property
    def is_rankable(self) -> bool:
        """Whether it takes part where values are ranked."""
        is_ranked = self.records[0].is_ranked and not math.isnan(self.value)
        return is_ranked and not self.is_degenerate

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
        below, above = (
            "" if end is None else f"{abs(end - self.value):.1f}" for end in (self.low, self.high)
        )
        if below and below == above:
            return f"{self.value:.1f} ± {above}{dagger(self.arbitrary)}{said}"
        return f"{self.value:.1f}{self._ends('{:.1f}'.format)}{dagger(self.arbitrary)}{said}"

    def _ends(self, shown: Callable[[float], str]) -> str:
        """The interval, where it is not symmetric."""
        if self.low is None or self.high is None:
            return ""
        low, high = shown(self.low), shown(self.high)
        return "" if low == high else f" [{low}, {high}]"

    def csv_fields(self) -> dict[str, Any]:
        """Value, interval and what tells the experiment from others."""
        first = self.records[0]
        baseline = Baseline.from_details(first.details)
        return {
            "value": self.value,
            "low_95": "" if self.low is None else self.low,
            "high_95": "" if self.high is None else self.high,
            "baseline": "" if baseline is None else baseline.value,
            "baseline_answer": "" if baseline is None else baseline.answer,
            "degenerate_percent": "" if self.arbitrary is None else self.arbitrary,
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
            **{name: getattr(first, name) for name in ENCODER_FIELDS},
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
                    "file": record.filename(),
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
        entries.append(Entry(record.value, low, high, record.degenerate_percent, (record,)))
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


_DEGENERATE = "degenerate: with patches so alike that rounding, not the image, decides the cut"


def dagger(percent: float | None) -> str:
    """Return the mark of a value with degenerate images, such as " †2"; empty if there are none."""
    return f" †{percent:.{0 if percent >= 1 else 1}f}" if percent else ""


def dagger_meaning(percents: Iterable[float | None]) -> str:
    """Explain the dagger; empty if none of these percents of degenerate images has one."""
    if not any(percents):
        return ""
    return (
        f"†: percent of the images that are {_DEGENERATE}; a value with more than "
        f"{MAX_DEGENERATE_PERCENT:.0f} is never the best"
    )


def metric_notes(records: Iterable[Record]) -> list[str]:
    """What a word in the names of some metrics means."""
    metrics = {record.metric for record in records}
    notes = []
    if any(metric.endswith("_oracle") for metric in metrics):
        notes.append(
            "oracle: of the rates that were tried the best on the scored images themselves, which "
            "flatters; holdout chooses on others"
        )
    if "degenerate" in metrics:
        notes.append(_DEGENERATE)
    return notes


def trusted_note(records: Iterable[Record]) -> str:
    """What the numbers rest on where nobody read the files to know that they are the same."""
    is_trusted = any(kind_of(record.dataset_fingerprint) == "stat" for record in records)
    return ", their files known by size and time alone" if is_trusted else ""


def corruption_note(records: Iterable[Record]) -> str:
    """What the scored images went through, and that the others did not."""
    found: dict[str, set[int]] = defaultdict(set)
    fitted = False
    for record in records:
        if record.corrupted is not None:
            found[record.corrupted.name].add(record.corrupted.severity)
            fitted |= record.trained_on is not None
    if not found:
        return ""
    words = [f"{name} {', '.join(map(str, sorted(at)))}" for name, at in sorted(found.items())]
    clean = ", fitted to images as they are" if fitted else ""
    return f", corrupted by {' and '.join(words)}{clean}"


def baselines(records: Iterable[Record]) -> dict[str, list[float]]:
    """What answers that look at no image score, each value once, ascending, by the answer.

    One answer has several values where encoders are shown the images in several sizes.
    """
    found: dict[str, set[float]] = defaultdict(set)
    for record in records:
        baseline = Baseline.from_details(record.details)
        if baseline is not None:
            found[baseline.answer].add(baseline.value)
    return {answer: sorted(values) for answer, values in found.items()}


def baseline_note(records: Sequence[Record]) -> str:
    """Such as "without a look at the images: centre box 31.2"; empty where no record says it."""
    words = []
    for answer, values in baselines(records).items():
        ends = dict.fromkeys(f"{value:.1f}" for value in (values[0], values[-1]))
        words.append(f"{answer} {' to '.join(ends)}")
    return f"without a look at the images: {', '.join(words)}" if words else ""


def footnote(records: Sequence[Record]) -> str:
    """All that stands below the numbers of one metric on one set of images, in one line.

    Without what the name of the protocol above them says.
    """
    notes = [*metric_notes(records), baseline_note(records)]
    # One of a mean over seeds is that of the seeds that have one.
    known = {record.layer for record in records if record.ci95}
    lacking: dict[str, set[int]] = defaultdict(set)
    reasons: dict[str, set[int]] = defaultdict(set)
    warned: dict[str, set[int]] = defaultdict(set)
    for record in records:
        warnings = record.details.get("warnings")
        for warning in warnings if isinstance(warnings, list) else ():
            warned[escape_unprintable(str(warning))].add(record.layer)
        if undefined := record.details.get("undefined"):
            reasons[escape_unprintable(str(undefined))].add(record.layer)
        why = record.details.get("no_interval", "these images do not tell" if known else "")
        if why and record.layer not in known and "undefined" not in record.details:
            lacking[escape_unprintable(str(why))].add(record.layer)
    for why, layers in lacking.items():
        of = f" of block {', '.join(map(str, sorted(layers)))}" if known else ""
        notes.append(f"no interval{of}: {why}")
    for why, layers in reasons.items():
        notes.append(f"no number of block {', '.join(map(str, sorted(layers)))}: {why}")
    for warning, layers in warned.items():
        is_of_all = layers == {record.layer for record in records}
        of = "" if is_of_all else f"block {', '.join(map(str, sorted(layers)))}: "
        notes.append(f"{of}{warning}")
    limited = [r.details["rank_limit"] for r in records if r.details.get("limited_by_images")]
    if limited:
        notes.append(f"at most {max(limited)}, as there are so few images: more allow more")
    return "; ".join(note for note in (*notes, provenance(records, records[0].changed)) if note)


def image_size_note(records: Iterable[Record], said: Container[str] = ()) -> str:
    """At which size encoders saw the images, where records say it; of several sizes whose."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        settings = record.settings
        # Either of them stands in the place of the encoder's size.
        sizes = {name: settings[name] for name in ("longer_side", "squash") if settings.get(name)}
        shown = {name: size for name, size in sizes.items() if name not in said}
        if "image_size" in settings and not sizes:
            own = record.details.get("image_size", record.architecture.get("image_size"))
            shown["image_size"] = settings["image_size"] or own
        words = "".join(f", {name}={size}" for name, size in shown.items() if size)
        found[words].add(f"{record.task} of {escape_unprintable(record.model)}")
    if len(found) == 1:
        return next(iter(found))
    return "".join(f"{words} ({', '.join(sorted(of))})" for words, of in found.items() if words)


def provenance(records: Sequence[Record], said: Container[str] = ()) -> str:
    """Images, seeds, versions and machines behind some records, in one line.

    Args:
        records: One at least.
        said: Names of sizes that stand above them already.
    """

    def distinct(values: Sequence[object]) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    commits = [(record.git_commit or "wheel")[:10] for record in records]
    left_out = [_plain_count(r.settings["left_out"]) for r in records if "left_out" in r.settings]
    counts = [one for r in records for one in r.details.get("left_out", {}).values()]
    names = ", ".join(
        dict.fromkeys(escape_unprintable(name) for one in counts for name in one["first"])
    )
    unreadable = f", without {distinct(left_out)} that cannot be read: {names}" if left_out else ""
    return (
        f"{distinct([r.num_images for r in records])} images"
        f"{image_size_note(records, said)}{unreadable}"
        f"{trusted_note(records)}"
        f"{corruption_note(records)}; "
        f"seeds {distinct([r.seed for r in records])}; "
        f"ssl-bench {distinct([r.version for r in records])} ({distinct(commits)}); "
        f"torch {distinct([r.torch for r in records])}; "
        f"{distinct([r.device for r in records])}; "
        f"{max(record.created for record in records)[:10]}"
    )


def _plain_count(left_out: object) -> str:
    """Of what a record says, `2 of train (3f9a01)`, what a reader needs."""
    return re.sub(r" \(\w+\)$| of all\b", "", str(left_out))
