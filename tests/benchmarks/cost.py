"""Measure the processor time and peak memory of each probe.

    python -m tests.benchmarks.cost --data-root DIR

DIR contains photographs in the layout of VOC2012. Each probe runs in a process of its own with one
thread, and evaluates all blocks of `demo:skip` on at most 20 images. The time is the processor time
of the process minus that of the same command with `--dry-run`, which loads the same libraries. The
measurements are written to results/benchmarks/cost-cpu.json, and the pages of the probes show them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_bench.composition.choices import choices
from ssl_bench.results import ResultStore
from tests.benchmarks.provenance import hardware, provenance

ROOT = Path(__file__).parents[2]
FILE = ROOT / "results/benchmarks/cost-cpu.json"
TASKS_WITH_CLASSES = ("knn", "classification")
"""Tasks that need class labels, which the photographs do not have."""


def measure(words: Sequence[str]) -> tuple[float, float]:
    """Run `ssl-bench` and return its processor time in seconds and its peak memory in GiB."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "ssl_bench", *words],
        cwd=ROOT, env={**os.environ, **threads},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"`ssl-bench {' '.join(words)}` ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def measure_task(task: str, data_root: str, limit: int) -> dict[str, Any]:
    """Return the cost of one task as JSON values."""
    dataset = "toy_objects" if task in TASKS_WITH_CLASSES else "voc2012"
    words = ["probe", "--task", task, "--checkpoint", "demo:skip", "--dataset", dataset]
    words += ["--limit", str(limit), "--device", "cpu"]
    shown = [*words, *([] if dataset == "toy_objects" else ["--data-root", "DIR"])]
    words += [] if dataset == "toy_objects" else ["--data-root", data_root]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--out", folder]
        start, _ = measure([*words, "--dry-run"])
        total, peak = measure(words)
        records = ResultStore(Path(folder)).records()
    return {
        "command": f"ssl-bench {' '.join(shown)}",
        "images": max(record.num_images for record in records),
        "blocks": len({record.layer for record in records}),
        "results": len(records),
        "seconds": round(total - start, 1),
        "peak_gib": round(peak, 2),
    }


def read_measurements() -> dict[str, Any]:
    """Return the committed measurements."""
    return json.loads(FILE.read_text())


def table(task: str, measured: Mapping[str, Any]) -> str:
    """Return the Markdown table of one task, for its page."""
    one = measured["tasks"][task]
    images = "generated images" if "toy_objects" in one["command"] else "photographs"
    share = one["seconds"] / one["images"]
    return f"""\
| images | seconds per image | seconds in all | peak memory |
|---:|---:|---:|---:|
| {one["images"]} | {_seconds(share)} | {_seconds(one["seconds"])} | {one["peak_gib"]:.1f} GiB |

Processor time without start-up, on one core of {measured["hardware"]} at commit
`{measured["commit"][:8]}`. Other programs used the machine at the same time. The run evaluates all
{one["blocks"]} blocks of `demo:skip`, a ViT with {measured["encoder"]}, on {images}:

```
{one["command"].replace(" --dataset", f" {chr(92)}{chr(10)}  --dataset")}
```
"""


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True, metavar="DIR")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="images of each task")
    parser.add_argument("--task", help="tasks, separated by commas (default: all)")
    options = parser.parse_args()
    kept = json.loads(FILE.read_text()) if FILE.is_file() else {"tasks": {}}
    wanted = options.task.split(",") if options.task else choices("probe")
    tasks = dict(kept["tasks"])
    for task in wanted:
        tasks[task] = measure_task(task, options.data_root, options.limit)
        print(f"{task}: {tasks[task]}", flush=True)
        said = provenance()
        content = {
            "said": said.replace(options.data_root, "DIR"),
            "hardware": hardware().partition(",")[0],
            "commit": said.partition("commit ")[2].partition(",")[0],
            "encoder": "patches of 8 pixels and 5 MB of weights",
            "tasks": dict(sorted(tasks.items())),
        }
        FILE.write_text(f"{json.dumps(content, indent=1)}\n")


if __name__ == "__main__":
    main()
