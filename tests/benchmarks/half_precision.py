"""Measure how much each score changes if the encoder computes in float16 or bfloat16.

    python -m tests.benchmarks.half_precision --data DIR --encoder NAME=URI [--encoder NAME=URI]

Each probe runs three times on the same images with the same seed. DIR contains the datasets that
the constant `RUNS` lists. Results that are already in `--out` are not computed again. The program
writes results/benchmarks/half_precision-cpu.json and results/tables/half_precision.md.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssl_bench.cli.__main__ import main as ssl_bench
from ssl_bench.results import Record, ResultStore
from tests.benchmarks.provenance import provenance

ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "results/benchmarks/half_precision-cpu.json"
PAGE = ROOT / "results/tables/half_precision.md"
PRECISIONS = ("float32", "float16", "bfloat16")
LAYERS, PICTURES = "2,5,8,11", ("--pictures", "1")
SMALL = 0.2
"""Changes of at most this number of percentage points are counted as small."""
RUNS = (
    ("segmentation,retrieval,clustering,tokencut,discovery,pca,correspondence,geometry",
     "voc2012", "voc2012_real100",
     ("--limit", "20", "probe.image_size=224", "probe.training.epochs=20")),
    ("attention", "ecssd", "ecssd", ("--limit", "20")),
    ("knn,classification", "class_folders", "classes", ("--limit", "200")),
    ("depth", "nyu", "nyu_v2", ("--limit", "16", "probe.image_size=224", "probe.epochs=10")),
    ("tracking", "davis2016", "davis2016", ("--limit", "1", "probe.image_size=224")),
    ("instances", "holidays", "holidays", ("data.first=60",)),
)  # fmt: skip
"""Tasks, dataset, folder of the dataset below DIR, and further flags of each command."""


def run(data: Path, out: Path, uri: str) -> None:
    """Run all probes on the encoder at `uri` in float32, float16 and bfloat16."""
    for tasks, dataset, folder, flags in RUNS:
        for precision in PRECISIONS:
            words = ["probe", "--task", tasks, "--dataset", dataset, "--checkpoint", uri, *flags]
            words += ["--layer", LAYERS, *PICTURES * (dataset != "class_folders")]
            words += ["--data-root", str(data / folder), "--out", str(out), f"dtype={precision}"]
            if code := ssl_bench(words):
                raise SystemExit(code)


def measure(records: list[Record]) -> list[dict[str, Any]]:
    """Return how much each score changes in float16 and bfloat16, compared with float32."""
    scores: dict[tuple[str, ...], dict[int, dict[str, Record]]] = defaultdict(dict)
    for record in records:
        # Other scores have different units.
        if record.unit == "%":
            name = (record.task, record.dataset, record.facet, record.metric)
            scores[name].setdefault(record.layer, {})[record.settings["dtype"]] = record
    rows = []
    for (task, dataset, facet, metric), blocks in sorted(scores.items()):
        complete = [block for block in blocks.values() if len(block) == len(PRECISIONS)]
        row: dict[str, Any] = {"score": f"{task}, {dataset}, {facet} {metric}"}
        row["images"] = complete[0]["float32"].num_images
        for precision in PRECISIONS[1:]:
            changes = [block[precision].value - block["float32"].value for block in complete]
            row[precision] = {
                "largest": max(changes, key=abs), "mean": sum(changes) / len(changes)
            }  # fmt: skip
        rows.append(row)
    return rows


def page(measurements: Mapping[str, Any]) -> str:
    lines = [
        "# float16 and bfloat16",
        "",
        "See how much each score changes with `dtype=float16` and `dtype=bfloat16`. Each probe ran",
        "three times on the same images with the same seed. Everything after the encoder is always",
        "float32.",
        "",
        f"A cell has the largest change in the blocks {LAYERS} in percentage points, and the mean",
        "change in parentheses. One image of 20 is 5 points, and one of 200 is 0.5 points.",
    ]
    for name, encoder in measurements.items():
        rows = encoder["rows"]
        half, brain = (
            sum(abs(row[precision]["largest"]) <= SMALL for row in rows)
            for precision in PRECISIONS[1:]
        )
        lines += [
            "",
            f"## {name}",
            "",
            f"{encoder['provenance']}",
            "",
            f"With float16, {half} of {len(rows)} scores change by at most {SMALL} points in every",
            f"block, and with bfloat16 {brain}.",
            "",
            "| score | images | float16 | bfloat16 |",
            "|---|---:|---:|---:|",
        ]
        for row in rows:
            cells = [f"{row[p]['largest']:+.2f} ({row[p]['mean']:+.2f})" for p in PRECISIONS[1:]]
            lines.append(f"| {row['score']} | {row['images']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--encoder", action="append", required=True, metavar="NAME=URI")
    parser.add_argument("--out", type=Path, default=Path("runs/half_precision"), metavar="DIR")
    options = parser.parse_args()
    known = json.loads(MEASUREMENTS.read_text()) if MEASUREMENTS.is_file() else {}
    for encoder in options.encoder:
        name, _, uri = encoder.partition("=")
        run(options.data, options.out / name, uri)
        rows = measure(ResultStore(options.out / name).records())
        known[name] = {"provenance": provenance(), "rows": rows}
        MEASUREMENTS.write_text(json.dumps(known, indent=1) + "\n")
        PAGE.write_text(page(known))


if __name__ == "__main__":
    main()
