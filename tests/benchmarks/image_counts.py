"""Memory and time of the counts of scored images: kept where a class is predicted, and all of them.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.image_counts --json FILE

Twelve blocks, eight rates. An image holds some classes; each head predicts these, and some others
in few pixels. `adding` are CPU seconds for all images in batches of 16, `reading` for the mean IoU
of every rate, intervals of the best one's mean IoU and accuracy, and its counts, block by block.
Peak memory is beyond what the process held before. Each row is a process of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from probes.heads.image_counts import ImageCounts
from probes.heads.scores import HeadScores
from tests.benchmarks.provenance import provenance

_SOURCES, _VALUES, _BATCH = 12, 8, 16
_TRUE, _OTHERS, _PIXELS = 8, 4, 20_000
# Images, classes: VOC, ADE20K, COCO-Stuff.
CASES = [(1449, 21), (2000, 150), (5000, 171)]


class AllCounts:
    """The former way: int32 for every image, head and class."""

    def __init__(self, images: int, classes: int) -> None:
        self.counts = torch.empty(images, _SOURCES, _VALUES, 3, classes, dtype=torch.int32)
        self._filled = 0

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, counts: Tensor) -> None:
        self.counts[self._filled : self._filled + len(counts)] = counts
        self._filled += len(counts)

    @property
    def total(self) -> "AllCounts":
        return self

    def __getitem__(self, source: int) -> Int64[np.ndarray, "values 3 classes"]:
        return self.counts[:, source].numpy().sum(0, dtype=np.int64)

    def of(self, source: int, value: int) -> np.ndarray:
        return self.counts[:, source, value].numpy()


def batches(images: int, classes: int) -> Iterator[Tensor]:
    """The same few batches over and over."""
    made = [_batch(number, classes) for number in range(2)]
    for start in range(0, images, _BATCH):
        yield made[start // _BATCH % 2][: images - start]


def _batch(seed: int, classes: int) -> Int64[Tensor, "images sources values 3 classes"]:
    random = np.random.default_rng(seed)
    counts = np.zeros((_BATCH, _SOURCES * _VALUES, 3, classes), np.int64)
    for image in counts:
        true = random.permutation(classes)[:_TRUE]
        image[:, 2, true] = _PIXELS
        for head in image:
            head[1, random.permutation(classes)[:_OTHERS]] = random.integers(1, 500, _OTHERS)
            head[1, true] = random.integers(_PIXELS // 2, _PIXELS, _TRUE)
            head[0, true] = head[1, true] - random.integers(1, 1000, _TRUE)
    return torch.from_numpy(counts).unflatten(1, (_SOURCES, _VALUES))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, images: int, classes: int) -> dict[str, Any]:
    kept: Any = AllCounts(images, classes)
    if way == "ours":
        kept = ImageCounts(_SOURCES, _VALUES, classes)
    given = batches(images, classes)
    first = next(given)
    before, start = peak_mib(), time.process_time()
    kept.add(first)
    for counts in given:
        kept.add(counts)
    added, mib = time.process_time(), peak_mib() - before
    digest = [_read(HeadScores(kept, source)) for source in range(_SOURCES)]
    return {
        "way": way, "images": images, "classes": classes, "adding": added - start,
        "reading": time.process_time() - added, "adding_mib": mib, "mib": peak_mib() - before,
        "digest": digest,
    }  # fmt: skip


def _read(scores: HeadScores) -> list[Any]:
    best = scores.best()
    counts = int((scores.counts(best).astype(np.int64) * np.arange(1, 4)[:, None]).sum())
    return [*scores.miou(), scores.miou_ci95(best), scores.accuracy_ci95(best), counts]


def measured_apart(way: str, images: int, classes: int) -> dict[str, Any]:
    words = [way, str(images), str(classes)]
    command = [sys.executable, "-m", "tests.benchmarks.image_counts", "--measure", *words]
    answer = subprocess.run(command, capture_output=True, check=True, text=True)
    return json.loads(answer.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "IMAGES", "CLASSES"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.measure:
        way, *numbers = options.measure
        print(json.dumps(measure(way, *map(int, numbers))))
        return
    said = provenance()
    print(f"{said}\n")
    print("| images | classes | kept | MiB, adding | MiB, with reading | adding, s | reading, s |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    rows = []
    for images, classes in CASES:
        former, ours = (measured_apart(way, images, classes) for way in ("all", "ours"))
        assert former.pop("digest") == ours.pop("digest"), "scores differ"
        rows += [former, ours]
        for row in (former, ours):
            figures = [f"{row[name]:.0f}" for name in ("adding_mib", "mib")]
            figures += [f"{row[name]:.2f}" for name in ("adding", "reading")]
            print(f"| {images} | {classes} | {row['way']} | {' | '.join(figures)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"provenance": said, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
