"""What the commands that read records take where there are 50,000 of hundreds of encoders.

    python -m tests.benchmarks.many_records --results results/records,... --json FILE
    python -m tests.benchmarks.many_records --build DIR

The records are those of the folders of results that are named, again and again under other names
of encoders, other weights and other seeds; what single images contributed is a hard link to the
original's, so that all images of two encoders can be compared. Each command runs in a process of
its own, from the start of Python to its end, with the records in the memory of the system.
"""

import argparse
import hashlib
import json
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from ssl_bench.results import Record, ResultStore
from tests.benchmarks.apart import rounded, usage_of
from tests.benchmarks.provenance import provenance
from tests.support.faults import encoder_file

_SOURCES = ("results/photographs", "results/dino_photographs")
# Every third encoder was probed with a second seed.
_SECOND_SEED_EVERY = 3
_EPOCHS = (100, 200, 300)
_COLUMNS = {"seconds": 1, "cpu_seconds": 1, "peak_mebibytes": 0}


@dataclass(frozen=True)
class Template:
    """A record to be written under other names, and what images contributed to it."""

    record: Record
    per_image: Path | None


def templates(sources: Sequence[Path]) -> list[list[Template]]:
    """Records by encoder, in the order of their names."""
    found: dict[str, list[Template]] = defaultdict(list)
    for source in sources:
        store = ResultStore(source)
        for record in store.records():
            path = store.per_image_path(record)
            found[record.encoder_id].append(Template(record, path if path.is_file() else None))
    return [found[name] for name in sorted(found)]


def many_records(sources: Sequence[Sequence[Template]]) -> Iterator[Template]:
    """Without end: encoder by encoder, one of three of them with two seeds."""
    for number in count():
        run, epoch = divmod(number, len(_EPOCHS))
        weights = hashlib.sha256(str(number).encode()).hexdigest()
        for seed in (0, 1) if number % _SECOND_SEED_EVERY == 0 else (0,):
            for one in sources[run % len(sources)]:
                name = f"{one.record.model.partition('@')[0]}_{run:03}@{_EPOCHS[epoch]}"
                renamed = replace(one.record, model=name, checkpoint_sha256=weights, seed=seed)
                epochs = {**renamed.details, "epoch": float(_EPOCHS[epoch])}
                yield replace(one, record=_varied(replace(renamed, details=epochs), one))


def _varied(record: Record, template: Template) -> Record:
    """Another value, where it does not have to be that of the images."""
    if template.per_image is not None or record.unit != "%":
        return record
    share = 1 - 0.1 * random.Random(f"{record.checkpoint_sha256} {record.layer}").random()
    ends = record.ci95
    scaled = None if ends is None else (share * ends[0], share * ends[1])
    return replace(record, value=share * record.value, ci95=scaled)


def write_records(root: Path, sources: Sequence[Path], number: int) -> None:
    """Without waiting for the disk at each of them, as `ResultStore.save` does."""
    store = ResultStore(root)
    for one in islice(many_records(templates(sources)), number):
        path = store.path(one.record.key())
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(one.record.as_json(), indent=1, sort_keys=True, default=list)
        path.write_text(text + "\n", encoding="utf-8")
        if one.per_image is not None:
            os.link(_beside(one.per_image, root), path.with_suffix(".npz"))


def _beside(original: Path, root: Path) -> Path:
    """A copy on the file system of `root`, to which links can be made."""
    copy = root / "originals" / original.name
    if not copy.exists():
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(original.read_bytes())
    return copy


def commands(root: Path, models: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """What is typed, by what it stands for in the table."""
    out = ["--out", str(root)]
    pages = [*out, "--into", str(root / "pages")]
    sweep = ["--task", "pca", "--dataset", "toy", "--checkpoint", str(root / "encoder"), *out]
    oracle = ["--pivot", "--best-layer", "oracle"]
    return {
        "table": ["table", *out],
        "table --format json": ["table", "--format", "json", *out],
        "table --pivot --best-layer oracle": ["table", *oracle, *out],
        "compare A B": ["compare", *models, *out],
        "report": ["report", *pages],
        "report --pair A B": ["report", "--pair", *models, *pages],
        "sweep --dry-run": ["sweep", "--dry-run", *sweep],
    }


def compared_models(root: Path) -> tuple[str, str]:
    """Names of two encoders with values of single images."""
    store = ResultStore(root)
    found = sorted({r.model for r in store.records() if store.per_image_path(r).is_file()})
    return found[0], found[1]


def measured(root: Path, rounds: int, only: str) -> dict[str, list[dict[str, float]]]:
    """Figures of each command, one a round."""
    encoder_file(root / "encoder" / "last.safetensors")
    asked = {
        title: words
        for title, words in commands(root, compared_models(root)).items()
        if only in title
    }
    figures: dict[str, list[dict[str, float]]] = {title: [] for title in asked}
    for _ in range(rounds):
        for title, words in asked.items():
            figures[title].append(rounded(usage_of("ssl_bench", words)[0]))
    return figures


def report(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    print("| command | seconds | CPU seconds | peak MiB |\n|---|---:|---:|---:|")
    for title, rows in figures.items():
        spans = (_span(rows, name, digits) for name, digits in _COLUMNS.items())
        print(f"| `{title}` | {' | '.join(spans)} |")


def _span(rows: Sequence[Mapping[str, float]], name: str, digits: int) -> str:
    low, high = (
        f"{end:.{digits}f}" for end in (min(r[name] for r in rows), max(r[name] for r in rows))
    )
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=",".join(_SOURCES), help="folders, with commas")
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--build", type=Path, help="write the records there and measure nothing")
    parser.add_argument("--root", type=Path, help="measure those that --build wrote there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="commands whose title holds this")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    sources = [Path(folder) for folder in options.results.split(",")]
    if options.build:
        write_records(options.build, sources, options.records)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = options.root or Path(folder) / "results"
        if not options.root:
            write_records(root, sources, options.records)
        figures = measured(root, options.rounds, options.only or "")
    what = f"{options.records:,} records, {options.rounds} rounds"
    print(f"{provenance()}\n{what}\n")
    report(figures)
    if options.json:
        record = {"provenance": provenance(), "what": what, "figures": figures}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
