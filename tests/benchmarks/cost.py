"""Measure the processor time and peak memory of each probe.

    python -m tests.benchmarks.cost --data-root DIR

DIR contains photographs in the layout of VOC2012. If a probe cannot use VOC2012, the program
generates toy images. Each probe runs in a separate process with one thread and at most 20 images.
The start-up time is measured with `--dry-run` and subtracted. The program also measures the forward
pass of untrained ViTs. The measurements are saved in results/benchmarks/cost-cpu.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ssl_bench.composition.choices import choices
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from tests.benchmarks.provenance import hardware, provenance

ROOT = Path(__file__).parents[2]
FILE = ROOT / "results/benchmarks/cost-cpu.json"
COLUMNS = ("task", "images", "seconds per image", "seconds in all", "peak memory")


def measure(words: Sequence[str]) -> tuple[float, float]:
    """Return the CPU time (seconds) and peak memory (GiB) of an `ssl-bench` command."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "ssl_bench", *words],
        cwd=ROOT, env={**os.environ, **threads},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(
            f"`ssl-bench {' '.join(words)}` ended with {process.returncode}; run it to see why"
        )
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def measure_task(task: str, data_root: str, limit: int) -> dict[str, Any]:
    """Measure the run time and peak memory of a probe."""
    for dataset in ("voc2012", *(name for name in choices("dataset") if name.startswith("toy"))):
        words = ["probe", "--task", task, "--checkpoint", "demo:skip", "--dataset", dataset]
        words += ["--limit", str(limit), "--device", "cpu"]
        words += ["--data-root", "DIR"] if dataset == "voc2012" else []
        with tempfile.TemporaryDirectory() as folder:
            real = [data_root if word == "DIR" else word for word in words] + ["--out", folder]
            try:
                start, _ = measure([*real, "--dry-run"])
            except SystemExit:
                # The dataset lacks the annotations that the task needs.
                continue
            total, peak = measure(real)
            records = ResultStore(Path(folder)).records()
        return {
            "command": f"ssl-bench {' '.join(words)}",
            "images": max(record.num_images for record in records),
            "blocks": len({record.layer for record in records}),
            "results": len(records),
            "seconds": round(total - start, 1),
            "peak_gib": round(peak, 2),
        }
    raise SystemExit(f"no generated dataset fits {task}; add one to configs/dataset")


def measure_encoders() -> dict[str, float]:
    """Measure how many seconds each ViT takes per image on one CPU thread."""
    torch.set_num_threads(1)
    seconds = {}
    for name, dim, heads in (("ViT-S/16", 384, 6), ("ViT-B/16", 768, 12)):
        model = build_vit(ViTConfig(dim=dim, num_heads=heads), seed=0)
        encoder = encoder_from_model(model, name=name)
        extractor = FeatureExtractor(encoder, layers=range(12), facets=["token"], device="cpu")
        for size in (224, 512):
            images, times = torch.rand(2, 3, size, size), []
            for _ in range(4):
                start = time.process_time()
                extractor(images)
                times.append(time.process_time() - start)
            seconds[f"{name}, {size} px"] = round(min(times) / len(images), 3)
    return seconds


def read_measurements() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def probe_page(root: Path, task: str) -> str:
    """Return the text of docs/probes/TASK.md with new run times and memory use."""
    page = (root / f"docs/probes/{task}.md").read_text(encoding="utf-8")
    text, heading, _ = page.partition("## Cost\n")
    measured = read_measurements()
    one = measured["tasks"][task]
    command = one["command"].replace(" --dataset", " \\\n    --dataset")
    return f"""\
{text}{heading}
{_table({task: one}, COLUMNS[1:])}
The table shows the cost of the command below on one CPU core. The command scores all
{one["blocks"]} blocks of `demo:skip`. The page about [time and memory](../how_to/estimate.md)
covers other encoders and GPUs.

```text
{command}
```
"""


def overview(root: Path) -> str:
    """Return the text of docs/how_to/estimate.md with new measurements."""
    page = (root / "docs/how_to/estimate.md").read_text(encoding="utf-8")
    text, heading, _ = page.partition("## On one CPU core\n")
    measured = read_measurements()
    encoders = "\n".join(
        f"| {name} | {_seconds(seconds)} |" for name, seconds in measured["encoders"].items()
    )
    return f"""\
{text}{heading}
The forward pass takes most of the time with larger encoders:

| encoder and input | seconds per image |
|---|---:|
{encoders}

The next table lists the cost of all 12 blocks of `demo:skip`, a ViT with
{measured["encoder"]}. The time of starting the command is not included:

{_table(measured["tasks"], COLUMNS)}
If VOC 2012 has no annotations for a task, the task was measured on generated images. An image of
`tracking` is a video of 12 frames. The page of each probe shows its command. All times are
processor times on {measured["hardware"]} at commit `{measured["commit"][:8]}`.
"""


def _table(tasks: Mapping[str, Any], columns: Sequence[str]) -> str:
    lines = [f"| {' | '.join(columns)} |"]
    lines.append("|" + "|".join("---" if name == "task" else "---:" for name in columns) + "|")
    for task, one in sorted(tasks.items()):
        values = {
            "task": f"[`{task}`](../probes/{task}.md)",
            "images": str(one["images"]),
            "seconds per image": _seconds(one["seconds"] / one["images"]),
            "seconds in all": _seconds(one["seconds"]),
            "peak memory": f"{one['peak_gib']:.1f} GiB",
        }
        lines.append(f"| {' | '.join(values[name] for name in columns)} |")
    return "\n".join(lines) + "\n"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True, metavar="DIR")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="images of each task")
    parser.add_argument("--task", help="tasks, separated by commas (default: all)")
    options = parser.parse_args()
    tasks = dict(read_measurements()["tasks"]) if FILE.is_file() else {}
    encoders = measure_encoders()
    for task in options.task.split(",") if options.task else choices("probe"):
        tasks[task] = measure_task(task, options.data_root, options.limit)
        print(f"{task}: {tasks[task]}", flush=True)
        text = provenance()
        content = {
            "said": text.replace(options.data_root, "DIR"),
            "hardware": hardware().partition(",")[0],
            "commit": text.partition("commit ")[2].partition(",")[0],
            "encoder": "patches of 8 pixels and 5 MB of weights",
            "encoders": encoders,
            "tasks": dict(sorted(tasks.items())),
        }
        FILE.write_text(f"{json.dumps(content, indent=1)}\n")


if __name__ == "__main__":
    main()
