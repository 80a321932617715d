"""What datasets of the published size take before any network runs, and how fast they decode.

    python -m tests.benchmarks.full_size --photos VOCdevkit --json FILE
    python -m tests.benchmarks.full_size --photos VOCdevkit --build DIR --counts voc_trainaug

The datasets are made of a few photographs with masks, encoded at the size that is usual there into
a pool of files. All names are hard links to these: links of one file share its number on disk and
its bytes in the memory of the system, so that nothing here measures a disk; every one of them is
nevertheless opened, read and digested. Each figure is of a process of its own; seconds are those of
the work, memory is the most that the process had.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# What imports torch is imported where it is used: other figures should be free of its memory.
from ssl_bench.data.files.read_options import ReadOptions, read_as
from ssl_bench.data.samples import Dataset, ImageSet
from tests.benchmarks.apart import rounded, usage_of
from tests.benchmarks.full_size_layouts import LAYOUTS, build, photographs

_IMAGE_SIZE = 512
# Files that are younger than two seconds are read every time.
_SETTLED_SECONDS = 3.0


def _open(dataset: Dataset) -> None:
    dataset.train()
    dataset.val()


def _fingerprint(dataset: Dataset, clock: "Clock", seen: Callable[[ImageSet], ImageSet]) -> None:
    images = [seen(dataset.train()), seen(dataset.val())]
    with clock.work():
        for one in images:
            one.fingerprint()


def _decode(dataset: Dataset, clock: "Clock", workers: int, most: int) -> None:
    import torch

    from probes.features.stream import read_ahead
    from probes.features.views import WholeImage

    torch.set_num_threads(1)
    images = dataset.train()
    views = WholeImage()
    prepared = read_ahead(
        images,
        range(min(most, len(images))),
        lambda sample: views.view(sample, 0, _IMAGE_SIZE),
        workers=workers,
    )
    with clock.work():
        for _ in prepared:
            pass


class Clock:
    """Seconds of the part that counts, and of all threads."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    @contextmanager
    def work(self) -> Iterator[None]:
        start, before = time.perf_counter(), _cpu_seconds()
        yield
        self.seconds, self.cpu_seconds = time.perf_counter() - start, _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(name: str, folder: Path, kind: str, most: int) -> dict[str, float]:
    """One figure of a dataset, in this process."""
    dataset, clock = LAYOUTS[name].open(folder), Clock()
    if kind == "open":
        with clock.work():
            _open(dataset)
    elif kind == "content":
        _fingerprint(dataset, clock, lambda images: images)
    elif kind == "stat":
        _fingerprint(dataset, clock, lambda images: read_as(images, ReadOptions("stat")))
    else:
        _decode(dataset, clock, int(kind.removeprefix("decode")), most)
    return {"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds}


def measured_apart(name: str, folder: Path, kind: str, cache: Path, most: int) -> dict[str, float]:
    """One figure of a dataset, in a process of its own."""
    words = ["--measure", kind, "--counts", name, "--root", str(folder), "--images", str(most)]
    usage, printed = usage_of(
        "tests.benchmarks.full_size", words, environment={"XDG_CACHE_HOME": str(cache)}
    )
    return {**json.loads(printed), "peak_mebibytes": usage.peak_mebibytes}


def planned_apart(
    name: str, folder: Path, kind: str, cache: Path, encoder: Path
) -> dict[str, float]:
    """The plan of a sweep over a dataset, from the start of Python to the end."""
    dataset, *overrides = LAYOUTS[name].choice
    flags = {
        "--task": "segmentation",
        "--dataset": dataset,
        "--data-root": str(folder),
        "--checkpoint": str(encoder),
        "--out": str(cache / "results"),
    }
    words = [word for pair in flags.items() for word in pair]
    usage, _ = usage_of(
        "ssl_bench",
        ["sweep", *words, "--dry-run", f"data.fingerprint={kind}", *overrides],
        environment={"XDG_CACHE_HOME": str(cache)},
    )
    return rounded(usage)


FIGURES = {
    "open": "open: every file is looked for",
    "first": "fingerprint by content, the first time",
    "again": "fingerprint by content, all remembered",
    "stat": "fingerprint by sizes and times",
    "plan": "`sweep --dry-run`, all remembered",
    "plan_stat": "`sweep --dry-run data.fingerprint=stat`",
    "decode1": "decode and prepare, one worker",
    "decode2": "decode and prepare, two workers",
}
"""What is measured, in this order: what is remembered has been read before."""


def figures_of(name: str, folder: Path, work: Path, most: int) -> dict[str, dict[str, float]]:
    """All of `FIGURES` for one dataset."""
    from tests.support.faults import encoder_file

    encoder = encoder_file(work / "encoder" / "last.safetensors")
    cache = work / f"cache-{name}"
    apart = partial(measured_apart, name, folder, cache=cache, most=most)
    plan = partial(planned_apart, name, folder, cache=cache, encoder=encoder)
    return {
        "open": apart("open"),
        "first": apart("content"),
        "again": apart("content"),
        "stat": apart("stat"),
        "plan": plan("content"),
        "plan_stat": plan("stat"),
        "decode1": apart("decode1"),
        "decode2": apart("decode2"),
    }


def report(figures: dict[str, Any], most: int) -> None:
    """A table for each dataset."""
    for name, rows in figures.items():
        counts = " + ".join(f"{part.count:,}" for part in LAYOUTS[name].parts)
        width, height = LAYOUTS[name].size
        print(f"\n**{name}: {counts} images of {width} x {height}**\n")
        print("| | seconds | CPU seconds | peak MiB | images/s |\n|---|---:|---:|---:|---:|")
        for key, title in FIGURES.items():
            row = rows[key]
            speed = f"{most / row['seconds']:.0f}" if key.startswith("decode") else ""
            print(
                f"| {title} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f} | "
                f"{row['peak_mebibytes']:.0f} | {speed} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, help="a VOCdevkit with some photographs and masks")
    parser.add_argument("--counts", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--build", type=Path, help="write the datasets there, measure nothing")
    parser.add_argument("--root", type=Path, help="measure what --build wrote there")
    parser.add_argument("--images", type=int, default=1000, help="to decode")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.counts.split(",")
    if options.measure:
        print(json.dumps(measure(names[0], options.root, options.measure, options.images)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = options.root or options.build or Path(folder)
        if not options.root:
            _build_all(root, names, options.photos)
        if options.build:
            return
        figures = {n: figures_of(n, root / n, Path(folder), options.images) for n in names}
    from tests.benchmarks.provenance import provenance

    print(provenance())
    report(figures, options.images)
    if options.json:
        record = {"provenance": provenance(), "images_decoded": options.images, "figures": figures}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def _build_all(root: Path, names: Sequence[str], photos: Path) -> None:
    samples = list(photographs(photos))
    for name in names:
        build(root / name, LAYOUTS[name], samples)
        print(f"{name}: {root / name}", flush=True)
    time.sleep(_SETTLED_SECONDS)


if __name__ == "__main__":
    main()
