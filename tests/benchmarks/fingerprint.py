"""What it costs to know files by their content: the first time, and when nothing changed.

    python -m tests.benchmarks.fingerprint --json FILE

Writes files of noise below the folder for temporary files, and takes the fingerprint of a split of
them: with no digest remembered, with all of them, and by sizes and times alone. The system has just
written them and keeps them in memory, so that the disk is not measured. Each figure is of a process
of its own. CPU seconds are of all its threads; what else runs on the machine is in the seconds.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ssl_bench.data.files.read_options import ReadOptions, read_as
from ssl_bench.data.layouts.folder import ImageFolder
from tests.benchmarks.provenance import provenance

# Files that are younger than two seconds are read every time.
_SETTLED_SECONDS = 3.0


def write_files(folder: Path, count: int, size: int) -> None:
    """Files of different content in a hundred folders."""
    noise = np.random.default_rng(0).bytes(size)
    for number in range(count):
        path = folder / f"{number % 100:02}" / f"{number:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(number.to_bytes(8) + noise[8:])
    time.sleep(_SETTLED_SECONDS)


def measure(folder: Path, kind: str) -> dict[str, float | str]:
    """Seconds of this process for one fingerprint, the listing of the folder aside."""
    images = ImageFolder(folder).images()
    images = read_as(images, ReadOptions(kind)) if kind == "stat" else images
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    fingerprint = images.fingerprint()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu, "fingerprint": fingerprint}


def measured_apart(folder: Path, kind: str, cache: Path) -> dict[str, float | str]:
    command = [sys.executable, "-m", "tests.benchmarks.fingerprint", "--measure", kind]
    answer = subprocess.run(
        [*command, "--folder", str(folder)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(answer.stdout)


def rounds(work: Path, count: int) -> dict[str, list[dict[str, float | str]]]:
    """Figures by what is known beforehand; every round begins with nothing."""
    figures: dict[str, list[dict[str, float | str]]] = {"first": [], "again": [], "stat": []}
    for _ in range(count):
        cache = work / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        figures["first"].append(measured_apart(work / "files", "content", cache))
        figures["again"].append(measured_apart(work / "files", "content", cache))
        figures["stat"].append(measured_apart(work / "files", "stat", cache))
    assert len({str(one["fingerprint"]) for one in figures["first"] + figures["again"]}) == 1
    return figures


def report(figures: dict[str, list[dict[str, float | str]]]) -> None:
    titles = {
        "first": "content, nothing remembered",
        "again": "content, all remembered",
        "stat": "sizes and times (`data.fingerprint=stat`)",
    }
    print("| fingerprint | seconds | CPU seconds |\n|---|---|---|")
    for name, rows in figures.items():
        print(f"| {titles[name]} | {_span(rows, 'seconds')} | {_span(rows, 'cpu_seconds')} |")


def _span(rows: Sequence[dict[str, float | str]], name: str) -> str:
    values = [float(row[name]) for row in rows]
    return f"{min(values):.2f} to {max(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--measure", choices=("content", "stat"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.folder, options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "files").mkdir()
        write_files(Path(folder) / "files", options.files, options.bytes)
        figures = rounds(Path(folder), options.rounds)
    what = f"{options.files:,} files of {options.bytes:,} bytes, {options.rounds} rounds"
    print(f"{provenance()}\n{what}\n")
    report(figures)
    if options.json:
        record = {"provenance": provenance(), "what": what, "figures": figures}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
