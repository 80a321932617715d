"""The loss of pretraining runs from their logs, as a table and a picture.

python -m tests.benchmarks.loss_curves runs/* --figure results/figures/dino_photographs.png
"""

import argparse
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from tests.benchmarks.provenance import provenance

Row = dict[str, Any]


def rows_of(run: Path) -> list[Row]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def means(rows: list[Row], key: str, every: int) -> list[float]:
    """Of every so many steps in a row; what fills no whole group is left out."""
    values = [row[key] for row in rows]
    return [fmean(values[i : i + every]) for i in range(0, len(values) - every + 1, every)]


def ceiling_of(run: Path) -> float:
    """ln(out_dim): where a teacher that says the same of every image keeps the loss."""
    return math.log(yaml.safe_load((run / "config.yaml").read_text())["objective"]["out_dim"])


def print_table(columns: dict[str, list[Row]], every: int) -> None:
    """Loss and, in brackets, the teacher's entropy."""
    print(provenance())
    print(f"\nmean loss (teacher entropy) in nats of every {every} steps\n")
    print("| steps | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    losses = {name: means(rows, "loss", every) for name, rows in columns.items()}
    entropies = {name: means(rows, "teacher_entropy", every) for name, rows in columns.items()}
    for index in range(max(map(len, losses.values()))):
        cells = [
            f"{losses[name][index]:.3f} ({entropies[name][index]:.2f})"
            if index < len(losses[name])
            else ""
            for name in columns
        ]
        print(f"| {index * every + 1}-{(index + 1) * every} | " + " | ".join(cells) + " |")
    speeds = [f"{fmean(row['images_per_second'] for row in rows):.0f}" for rows in columns.values()]
    print("| images/s | " + " | ".join(speeds) + " |")


def draw(columns: dict[str, list[Row]], ceiling: float, figure: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawing, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, rows in columns.items():
        losses = means(rows, "loss", 10)
        axis.plot([10 * i + 5 for i in range(len(losses))], losses, label=name)
    axis.axhline(ceiling, color="grey", linestyle="--", label="ln(out_dim)")
    axis.set(xlabel="step", ylabel="loss, mean of 10 steps (nats)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of one experiment")
    parser.add_argument("--every", type=int, default=50, help="steps a row")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    columns = {run.name: rows_of(run) for run in options.runs}
    print_table(columns, options.every)
    if options.figure:
        draw(columns, ceiling_of(options.runs[0]), options.figure)


if __name__ == "__main__":
    main()
