"""Which numbers may stand side by side, and what tells them from others."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ssl_bench.data.files.fingerprints import shortened
from ssl_bench.results import CORRUPTED, TRAINED_ON, Record

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
        groups[_comparable(record, texts[place])].append(record)
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
        f"{record.facet}, protocol {record.named_protocol}{said_training(record)}"
    )


def said_training(record: Record) -> str:
    """Such as ", trained on train (1464 images, 3f9a01)"; nothing where nothing was fitted."""
    return "" if record.trained_on is None else f", trained on {record.trained_on}"


def metric_with_unit(record: Record) -> str:
    """Such as "corloc (%)"."""
    return f"{record.metric} ({record.unit})" if record.unit else record.metric


def _comparable(record: Record, settings: str) -> tuple[str, ...]:
    names = (record.task, record.dataset, record.split, record.metric, record.protocol)
    return (*names, record.facet, record.dataset_fingerprint, settings)


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


def chosen_metric(known: Sequence[tuple[str, bool]]) -> str:
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
