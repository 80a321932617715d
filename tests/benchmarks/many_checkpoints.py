"""What the plan of a sweep takes over many checkpoints, and how it grows with their number.

    python -m tests.benchmarks.many_checkpoints --json FILE

Run folders with tiny encoders of different weights, asked one question of the generated scenes.
Each plan is a process of its own, from the start of Python to its end; nothing has been recorded.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.apart import rounded, usage_of
from tests.benchmarks.provenance import provenance
from tests.support.faults import encoder_file

_TASK = "tokencut"


def write_runs(folder: Path, count: int) -> None:
    """Run folders, a hundred in each folder."""
    for number in range(count):
        name = f"{number // 100:02}/run{number:05}"
        encoder_file(folder / name / "last.safetensors", seed=number)


def measured(folder: Path, hundreds: int) -> Mapping[str, float]:
    """The plan over the runs of the first folders."""
    runs = [str(folder / f"{number:02}" / "*") for number in range(hundreds)]
    checkpoints = [word for pattern in runs for word in ("--checkpoint", pattern)]
    words = ["sweep", "--task", _TASK, "--dataset", "toy", *checkpoints, "--dry-run"]
    usage, printed = usage_of("ssl_bench", [*words, "--out", str(folder / "results")])
    assert f"\n{hundreds * 100} jobs, " in printed, printed[-300:]
    return rounded(usage)


def report(figures: Mapping[int, Mapping[str, float]]) -> None:
    print("| checkpoints | seconds | CPU seconds | peak MiB |\n|---:|---:|---:|---:|")
    for count, row in figures.items():
        print(
            f"| {count:,} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} | "
            f"{row['peak_mebibytes']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hundreds", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder), 100 * max(options.hundreds))
        figures = {100 * n: measured(Path(folder), n) for n in options.hundreds}
    print(f"{provenance()}\n`sweep --task {_TASK} --dataset toy --dry-run`\n")
    report(figures)
    if options.json:
        record = {"provenance": provenance(), "task": _TASK, "figures": figures}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
