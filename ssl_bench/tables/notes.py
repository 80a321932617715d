"""What stands below a table: where its numbers are from, and what its signs mean."""

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence

from ssl_bench.data.files.fingerprints import kind_of
from ssl_bench.results import Baseline, Record
from ssl_bench.system.escaping import printable
from ssl_bench.tables.entry import Entry

_DEGENERATE = "degenerate: with patches so alike that rounding, not the image, decides the cut"


def dagger_note(entries: Iterable[Entry]) -> str:
    """What a dagger means, if there is one."""
    if not any(entry.arbitrary for entry in entries):
        return ""
    return f"; †: percent of the images that are {_DEGENERATE}"


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
        baseline = Baseline.of(record.details)
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
    for record in records:
        if undefined := record.details.get("undefined"):
            reasons[printable(str(undefined))].add(record.layer)
        why = record.details.get("no_interval", "these images do not tell" if known else "")
        if why and record.layer not in known and "undefined" not in record.details:
            lacking[printable(str(why))].add(record.layer)
    for why, layers in lacking.items():
        of = f" of block {', '.join(map(str, sorted(layers)))}" if known else ""
        notes.append(f"no interval{of}: {why}")
    for why, layers in reasons.items():
        notes.append(f"no number of block {', '.join(map(str, sorted(layers)))}: {why}")
    limited = [r.details["rank_limit"] for r in records if r.details.get("limited_by_images")]
    if limited:
        notes.append(f"at most {max(limited)}, as there are so few images: more allow more")
    return "; ".join(filter(None, [*notes, provenance(records, records[0].changed)]))


def sizes_note(records: Iterable[Record], said: Container[str] = ()) -> str:
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
        found[words].add(f"{record.task} of {printable(record.model)}")
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
    names = ", ".join(dict.fromkeys(printable(name) for one in counts for name in one["first"]))
    unreadable = f", without {distinct(left_out)} that cannot be read: {names}" if left_out else ""
    return (
        f"{distinct([r.num_images for r in records])} images{sizes_note(records, said)}{unreadable}"
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
