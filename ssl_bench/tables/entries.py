"""Group comparable records (stored scores), average them over seeds, and write notes on tables.

A `ScoreEntry` is one value of a table. The notes state, for example, the number of images and the
software versions.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ssl_bench.data.files.fingerprints import abbreviate_fingerprint, fingerprint_kind
from ssl_bench.results import (
    CORRUPTION_KEY,
    ENCODER_FIELDS,
    MAX_DEGENERATE_PERCENT,
    TRAINING_IMAGES_KEY,
    Baseline,
    Record,
    RecordedEncoder,
    is_degenerate,
)
from ssl_bench.system.output import escape_unprintable
from ssl_bench.tables.sheets import NO_VALUE
from ssl_bench.tables.tasks import task_texts

K = TypeVar("K", bound=Hashable)
MEASUREMENT_FIELDS = ("task", "dataset", "split", "metric", "unit", "facet", "protocol")
"""Fields of a record (a stored score) that state what was measured."""
_PROVENANCE = (
    "num_images", "version", "git_commit", "torch", "device", "seconds", "peak_memory", "created",
)  # fmt: skip


def comparable_groups(records: Sequence[Record]) -> list[list[Record]]:
    """Group records (stored scores) that can be compared in one table.

    All records of a group have the same task, dataset, split, metric, protocol (preset of
    settings), facet (kind of feature), images and settings. The records of a group may differ in
    block, encoder and seed. Groups are sorted by the fields that their records share.
    """
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    # Cache texts by object identity, because records that were read together share a settings
    # object.
    texts: dict[int, str] = {}
    for record in records:
        settings = id(record.settings)
        if settings not in texts:
            texts[settings] = _settings_text(record)
        names = (record.task, record.dataset, record.split, record.metric, record.protocol)
        key = (*names, record.facet, record.dataset_fingerprint, texts[settings])
        groups[key].append(record)
    return [group for _, group in sorted(groups.items())]


def table_titles(groups: Sequence[Sequence[Record]]) -> list[str]:
    """Return a table title for each group of comparable records (stored scores).

    If several groups have the same title, the settings that differ are appended in brackets.
    """
    titles = [table_title(group[0]) for group in groups]
    namesakes: dict[str, list[Record]] = defaultdict(list)
    for title, group in zip(titles, groups, strict=True):
        namesakes[title].append(group[0])
    return [
        f"{title} [{', '.join(words)}]"
        if (words := differing_settings(group[0], namesakes[title]))
        else title
        for title, group in zip(titles, groups, strict=True)
    ]


def differing_settings(record: Record, other_records: Sequence[Record]) -> list[str]:
    """Return the settings of a record (a stored score) that differ in at least one other record.

    Each setting is a text such as "lr=0.1". Settings that the table title already states are left
    out. If the images differ, the last text identifies the images by their digest, such as "data
    3f9a01".
    """
    in_title = {*record.changed, TRAINING_IMAGES_KEY, CORRUPTION_KEY}
    differing = [
        f"{name}={value}"
        for name, value in sorted(record.settings.items())
        if name not in in_title and any(r.settings.get(name) != value for r in other_records)
    ]
    others = [r for r in other_records if r.dataset_fingerprint != record.dataset_fingerprint]
    if others:
        is_older = any(other.created > record.created for other in others)
        data = f"data {abbreviate_fingerprint(record.dataset_fingerprint)}"
        differing.append(f"older {data}" if is_older else data)
    return differing


def table_title(record: Record) -> str:
    """Return the title of a table that contains a record (a stored score).

    The title states the task, metric, dataset, split, kind of feature and protocol (preset).
    """
    return (
        f"{record.task}: {metric_with_unit(record)} on {record.dataset} {record.split}, "
        f"{record.facet}, protocol {record.protocol_label}{training_suffix(record)}"
    )


def training_suffix(record: Record) -> str:
    """Return the part of a table title that states on which images the probe was trained.

    An example is ", trained on train (1464 images, 3f9a01)", where 3f9a01 identifies the images.
    The text is "" for a probe without training.
    """
    return "" if record.trained_on is None else f", trained on {record.trained_on}"


def metric_with_unit(record: Record) -> str:
    """Return the metric of a record (a stored score) with its unit, such as "corloc (%)"."""
    return f"{record.metric} ({record.unit})" if record.unit else record.metric


def model_names(records: Iterable[Record | RecordedEncoder]) -> dict[str, str]:
    """Return a unique name for each encoder in the records (stored scores), by the encoder's id.

    If encoders share a name, the first digits of each encoder's id are appended to its name.
    """
    names = {record.encoder_id: record.model for record in records}
    digits = 6
    # Repeat, because a third encoder may already have the new name.
    while len(set(names.values())) < len(names):
        uses = Counter(names.values())
        names = {
            encoder: f"{name} {encoder[:digits]}" if uses[name] > 1 else name
            for encoder, name in names.items()
        }
        digits = None
    return names


def choose_main_metric(task: str, metrics: Sequence[tuple[str, bool]]) -> str:
    """Return the metric that represents a task in overviews.

    Prefer the first metric of `TaskTexts.metrics` that was measured. Otherwise, return the first
    metric in `metrics`, preferably one for which higher is better.

    Args:
        task: Name of the task.
        metrics: The measured metrics, each as a pair: its name, and whether higher is better.
    """
    names = [name for name, _ in sorted(metrics, key=lambda metric: not metric[1])]
    return next((name for name in task_texts(task).metrics if name in names), names[0])


def series_as_json(record: Record) -> dict[str, Any]:
    """Return the fields that a record (a stored score) shares with all records of the same table.

    All values have JSON types.
    """
    return {
        **{name: getattr(record, name) for name in MEASUREMENT_FIELDS},
        "dataset_fingerprint": record.dataset_fingerprint,
        "settings": dict(record.settings),
        "settings_digest": settings_digest(record),
    }


def settings_digest(record: Record) -> str:
    """Return twelve hexadecimal digits that identify the settings of a record (a stored score).

    The digits are the start of the SHA-256 of the settings.
    """
    return hashlib.sha256(_settings_text(record).encode()).hexdigest()[:12]


def _settings_text(record: Record) -> str:
    return json.dumps(dict(record.settings), sort_keys=True, default=list)


@dataclass(frozen=True, eq=False)
class ScoreEntry:
    """One value of a table: the mean over seeds with its 95 % interval.

    Attributes:
        value: The mean over seeds, in the unit of the records. It may be NaN.
        low: Lower end of the 95 % interval, or None if there is no interval.
        high: Upper end of the 95 % interval, or None if there is no interval.
        degenerate_percent: Percentage of degenerate images, whose result is arbitrary. None if the
            task does not measure this percentage.
        records: The records (stored scores) from which the value was computed. There are several if
            there are several seeds, or if different blocks were chosen for parts of the images.
        candidate_layers: The blocks from which a block was chosen. Empty if no choice was made.
        omitted_seeds: Seeds that are left out, because they were probed at other blocks than the
            remaining seeds.
        shows_seed_count: Whether the printed text states the number of seeds.
    """

    value: float
    low: float | None
    high: float | None
    degenerate_percent: float | None
    records: tuple[Record, ...]
    candidate_layers: tuple[int, ...] = ()
    omitted_seeds: tuple[int, ...] = ()
    shows_seed_count: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({record.seed for record in self.records}))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({record.layer for record in self.records}))

    @property
    def layer(self) -> int:
        """Index of the block, for an entry that has a single block."""
        return self.records[0].layer

    @property
    def unit(self) -> str:
        """Unit of the value: "%", or "" for plain numbers."""
        return self.records[0].unit

    @property
    def is_degenerate(self) -> bool:
        """Whether more than `MAX_DEGENERATE_PERCENT` % of the images are degenerate.

        The result of a degenerate image is arbitrary, for example because rounding errors decide
        it.
        """
        return is_degenerate(self.degenerate_percent)

    @property
    def is_rankable(self) -> bool:
        """Whether the value can be marked as the best of a table column.

        A higher value of the metric must be better, and the value must not be NaN. At most half of
        the images may have an arbitrary result.
        """
        is_ranked = self.records[0].is_ranked and not math.isnan(self.value)
        return is_ranked and not self.is_degenerate

    @property
    def text_parts(self) -> tuple[str, ...]:
        """The printed text, split into the value and its additions, such as ("32.3", "± 1.2 †2").

        The additions are the interval and the signs. The tuple may contain only the value.
        """
        return tuple(filter(None, self.text().partition(" ")[::2]))

    @property
    def reason(self) -> str:
        """The reason why the value is NaN, or "" if it is a number or the reason is unknown."""
        reasons = (record.details.get("undefined") for record in self.records)
        return next((str(text) for text in reasons if text), "") if math.isnan(self.value) else ""

    @property
    def sort_key(self) -> str:
        """The value as text that JavaScript can convert to a number for sorting, or "" for NaN."""
        if math.isnan(self.value):
            return ""
        return "Infinity" if self.value == math.inf else str(self.value)

    def text(self) -> str:
        """Return the value as printed text, such as "32.3 ± 1.2 †2" or "1.2e+04 [9e+03, ∞]".

        The number after "±" is half of the width of a symmetric 95 % interval. "†2" states that the
        results of 2 % of the images are arbitrary.
        """
        if math.isnan(self.value):
            return NO_VALUE
        count = len(self.seeds)
        seeds = f" ({count} seed{'s' if count > 1 else ''})" if self.shows_seed_count else ""
        if self.records[0].unit != "%":
            return _format_plain(self.value) + self._interval_text(_format_plain) + seeds
        below, above = (
            "" if end is None else f"{abs(end - self.value):.1f}" for end in (self.low, self.high)
        )
        is_symmetric = below and below == above
        interval = f" ± {above}" if is_symmetric else self._interval_text("{:.1f}".format)
        return f"{self.value:.1f}{interval}{format_dagger(self.degenerate_percent)}{seeds}"

    def _interval_text(self, format_value: Callable[[float], str]) -> str:
        if self.low is None or self.high is None:
            return ""
        low, high = format_value(self.low), format_value(self.high)
        return "" if low == high else f" [{low}, {high}]"

    def csv_fields(self) -> dict[str, Any]:
        first = self.records[0]
        baseline = Baseline.from_details(first.details)
        return {
            "value": self.value,
            "low_95": "" if self.low is None else self.low,
            "high_95": "" if self.high is None else self.high,
            "baseline": "" if baseline is None else baseline.value,
            "baseline_answer": "" if baseline is None else baseline.answer,
            "degenerate_percent": ""
            if self.degenerate_percent is None
            else self.degenerate_percent,
            **{name: getattr(first, name) for name in MEASUREMENT_FIELDS},
            "num_images": first.num_images,
            "seeds": " ".join(map(str, self.seeds)),
            "checkpoint_sha256": first.checkpoint_sha256,
            "encoder_id": first.encoder_id,
            "trained_on": "" if first.trained_on is None else str(first.trained_on),
            "settings_digest": settings_digest(first),
        }

    def as_json(self) -> dict[str, Any]:
        first = self.records[0]
        return {
            "model": first.model,
            **{name: getattr(first, name) for name in ENCODER_FIELDS},
            "depth": first.depth,
            "value": self.value,
            "ci95": [self.low, self.high],
            "baseline": first.details.get("baseline"),
            "degenerate_percent": self.degenerate_percent,
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


def _format_plain(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.3g}"


def average_over_seeds(records: Sequence[Record]) -> ScoreEntry:
    """Return the mean score of records (stored scores) that differ only in the seed."""
    entries = []
    for record in records:
        low, high = record.ci95 or (None, None)
        # If only one end of an interval is known, leave the interval out.
        if low is None or high is None or math.isnan(low + high):
            low = high = None
        entries.append(ScoreEntry(record.value, low, high, record.degenerate_percent, (record,)))
    return average_entries(entries)


def average_entries(entries: Sequence[ScoreEntry]) -> ScoreEntry:
    """Return the mean of table entries that belong to different seeds.

    The ends of the intervals are averaged, so the resulting interval is about as wide as the
    interval of a single seed.
    """
    return ScoreEntry(
        value=sum(entry.value for entry in entries) / len(entries),
        low=average_known([entry.low for entry in entries]),
        high=average_known([entry.high for entry in entries]),
        degenerate_percent=average_known([entry.degenerate_percent for entry in entries]),
        records=tuple(record for entry in entries for record in entry.records),
    )


def average_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def group_and_average(records: Iterable[Record], key: Callable[[Record], K]) -> dict[K, ScoreEntry]:
    """Group records (stored scores) by the function `key`, and average each group over seeds.

    The values that the function `key` returns are the keys of the result.
    """
    groups: dict[K, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return show_seed_counts({at: average_over_seeds(group) for at, group in groups.items()})


def show_seed_counts(entries: Mapping[K, ScoreEntry]) -> dict[K, ScoreEntry]:
    """Return table entries that state their numbers of seeds, unless all numbers are equal."""
    differ = len({len(entry.seeds) for entry in entries.values()}) > 1
    return {at: replace(entry, shows_seed_count=differ) for at, entry in entries.items()}


def format_dagger(percent: float | None) -> str:
    """Return a suffix that states the percentage of degenerate images, such as " †24".

    The result of a degenerate image is arbitrary. The suffix is empty if no image is degenerate.
    Percentages below 1 are rounded to one decimal, and others to whole numbers. A percentage
    slightly above `MAX_DEGENERATE_PERCENT` gets as many decimals as needed, so that the printed
    number is also above this limit.
    """
    if not percent:
        return ""
    decimals = 0 if percent >= 1 else 1
    while is_degenerate(percent) and not is_degenerate(round(percent, decimals)):
        decimals += 1
    return f" †{percent:.{decimals}f}"


def explain_dagger(percents: Iterable[float | None]) -> str:
    """Return an explanation of the sign † if any of the percentages is above 0, otherwise ""."""
    if not any(percents):
        return ""
    return (
        "†N: N % of the images are degenerate. Their result is arbitrary, for example because all "
        "patches are alike. "
        f"A value above †{MAX_DEGENERATE_PERCENT:.0f} is never the best"
    )


def metric_notes(records: Iterable[Record]) -> list[str]:
    """Return notes that explain words in the metric names of the records (stored scores).

    The explained words are "oracle", "holdout" and "degenerate".
    """
    metrics = {record.metric for record in records}
    notes = []
    if any(metric.endswith("_oracle") for metric in metrics):
        notes.append(
            "oracle: the best hyperparameter on the scored images themselves, which is optimistic. "
            "holdout: the hyperparameter is chosen on other images"
        )
    if "degenerate" in metrics:
        notes.append(
            "degenerate: percentage of images whose result is arbitrary, for example because all "
            "patches are alike"
        )
    return notes


def collect_baselines(records: Iterable[Record]) -> dict[str, list[float]]:
    """Return the scores of each image-independent baseline in the records, by name of the baseline.

    A baseline, such as "centre box", has several scores if encoders received images of different
    sizes. The scores of a baseline are in ascending order.
    """
    scores: dict[str, set[float]] = defaultdict(set)
    for record in records:
        baseline = Baseline.from_details(record.details)
        if baseline is not None:
            scores[baseline.answer].add(baseline.value)
    return {answer: sorted(values) for answer, values in scores.items()}


def list_baselines(records: Iterable[Record]) -> tuple[tuple[str, float], ...]:
    """Return the label and the lowest score of each image-independent baseline in the records.

    An example of a label and a score is ("centre box 43.0", 43.0). A record is a stored score.
    """
    values = {answer: scores[0] for answer, scores in collect_baselines(records).items()}
    return tuple((f"{answer} {value:.1f}", value) for answer, value in values.items())


def baseline_note(records: Sequence[Record]) -> str:
    """Return a note on the baselines, such as "image-independent baseline (centre box): 31.2".

    The note is "" if no record (stored score) has a baseline.
    """
    notes = []
    for answer, values in collect_baselines(records).items():
        ends = dict.fromkeys(f"{value:.1f}" for value in (values[0], values[-1]))
        notes.append(f"image-independent baseline ({answer}): {' to '.join(ends)}")
    return ", ".join(notes)


def table_notes(records: Sequence[Record]) -> list[str]:
    """Return the notes below a table: baselines, warnings, and how the scores were computed.

    `records` contains the stored scores of the table.
    """
    notes = metric_notes(records)
    if baseline := baseline_note(records):
        notes.append(baseline)
    # The mean over seeds has an interval if any seed has an interval.
    with_interval = {record.layer for record in records if record.ci95}
    no_interval: dict[str, set[int]] = defaultdict(set)
    no_value: dict[str, set[int]] = defaultdict(set)
    warned: dict[str, set[int]] = defaultdict(set)
    for record in records:
        warnings = record.details.get("warnings")
        for warning in warnings if isinstance(warnings, list) else ():
            warned[escape_unprintable(str(warning))].add(record.layer)
        if undefined := record.details.get("undefined"):
            no_value[escape_unprintable(str(undefined))].add(record.layer)
            continue
        default = "not defined for these images" if with_interval else ""
        reason = record.details.get("no_interval", default)
        if reason and record.layer not in with_interval:
            no_interval[escape_unprintable(str(reason))].add(record.layer)
    for reason, layers in no_interval.items():
        blocks = f" for {_block_list(layers)}" if with_interval else ""
        notes.append(f"no interval{blocks}: {reason}")
    for reason, layers in no_value.items():
        notes.append(f"no value for {_block_list(layers)}: {reason}")
    for warning, layers in warned.items():
        concerns_all = layers == {record.layer for record in records}
        notes.append(warning if concerns_all else f"{_block_list(layers)}: {warning}")
    limits = [r.details["rank_limit"] for r in records if r.details.get("limited_by_images")]
    if limits:
        notes.append(
            f"values cannot exceed {max(limits)}, because the number of images is too small"
        )
    return [*notes, describe_provenance(records, records[0].changed)]


def format_footnote(records: Sequence[Record]) -> str:
    return "; ".join(table_notes(records))


def _block_list(layers: Iterable[int]) -> str:
    ordered = sorted(layers)
    return f"block{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def describe_provenance(records: Sequence[Record], title_settings: Container[str] = ()) -> str:
    """Return one line of text that states how the scores in `records` were computed.

    The line contains the numbers of images, the seeds, the versions of ssl-bench and PyTorch, and
    the devices. Settings in the table title (`title_settings`) are left out.
    """

    def distinct(values: Sequence[object]) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    commits = [(record.git_commit or "wheel")[:10] for record in records]
    numbers = distinct([record.num_images for record in records])
    return (
        f"{numbers} image{'s' if numbers != '1' else ''}{image_size_note(records, title_settings)}"
        f"{_unreadable_note(records)}{trusted_note(records)}{_corruption_note(records)}; "
        f"seeds {distinct([r.seed for r in records])}; "
        f"ssl-bench {distinct([r.version for r in records])} ({distinct(commits)}); "
        f"torch {distinct([r.torch for r in records])}; "
        f"{distinct([r.device for r in records])}; "
        f"{max(record.created for record in records)[:10]}"
    )


def image_size_note(records: Iterable[Record], title_settings: Container[str] = ()) -> str:
    """Return the image size in the stored scores as the end of a note, such as ", image_size=224".

    If encoders received images of different sizes, each size is followed by the tasks and encoders
    with this size. Settings in the table title (`title_settings`), such as "longer_side", are left
    out.
    """
    users: dict[str, set[str]] = defaultdict(set)
    for record in records:
        settings = record.settings
        # If one of these settings is set, `image_size` has no effect.
        replacing = {
            name: settings[name] for name in ("longer_side", "squash") if settings.get(name)
        }
        sizes = {name: size for name, size in replacing.items() if name not in title_settings}
        if "image_size" in settings and not replacing:
            native = record.details.get("image_size", record.architecture.get("image_size"))
            sizes["image_size"] = settings["image_size"] or native
        text = "".join(f", {name}={size}" for name, size in sizes.items() if size)
        users[text].add(f"{record.task} of {escape_unprintable(record.model)}")
    if len(users) == 1:
        return next(iter(users))
    return "".join(f"{text} ({', '.join(sorted(of))})" for text, of in users.items() if text)


def _unreadable_note(records: Sequence[Record]) -> str:
    # The recorded text is, for example, "2 of train (3f9a01)" or "2 of all (3f9a01)".
    counts = {
        re.sub(r" \(\w+\)$| of all\b", "", str(record.settings["left_out"]))
        for record in records
        if "left_out" in record.settings
    }
    if not counts:
        return ""
    left_out = [split for r in records for split in r.details.get("left_out", {}).values()]
    names = dict.fromkeys(escape_unprintable(name) for split in left_out for name in split["first"])
    return f", without {', '.join(sorted(counts))} that cannot be read: {', '.join(names)}"


def trusted_note(records: Iterable[Record]) -> str:
    is_trusted = any(fingerprint_kind(record.dataset_fingerprint) == "stat" for record in records)
    return ", files identified by size and time only" if is_trusted else ""


def _corruption_note(records: Iterable[Record]) -> str:
    severities: dict[str, set[int]] = defaultdict(set)
    is_trained = False
    for record in records:
        if record.corruption is not None:
            severities[record.corruption.name].add(record.corruption.severity)
            is_trained |= record.trained_on is not None
    if not severities:
        return ""
    names = [f"{name} {', '.join(map(str, sorted(at)))}" for name, at in sorted(severities.items())]
    training = ", trained on clean images" if is_trained else ""
    return f", corrupted by {' and '.join(names)}{training}"
