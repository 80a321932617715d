"""Experiment C1: table 2 of "Orthogonal Self-Attention" beside the logs of our runs.

    ssl-bench pretrain experiment=osa_mnist_qr data.root=MNIST --out runs/osa_mnist_qr
    python -m tests.benchmarks.mnist_table runs/osa_mnist_* [--figure FILE]

Runs of one row with several seeds are averaged. A run on its way counts as far as it got, and the
table says so.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from ssl_bench.tables.published import published_table
from tests.benchmarks.provenance import provenance

PUBLISHED = {row: value for (row, _), value in published_table("mnist").values.items()}
"""Percent after 10 epochs: Zhang and Martens, "Orthogonal Self-Attention", table 2."""

_TEST_IMAGES = 10_000


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        accuracies: Test accuracy after each epoch, in percent.
        losses: Mean training loss of each whole epoch, in nats.
        epochs: Planned.
    """

    row: str
    seed: int
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    epochs: int
    hours: float


def read_run(folder: Path) -> Run:
    """What a run's configuration and log say."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if config["monitor"]["val_images"] < _TEST_IMAGES:
        raise ValueError(f"{folder} was not tested on all {_TEST_IMAGES} images")
    accuracies = tuple(row["val_top1"] for row in rows if "val_top1" in row)
    batch = config["train"]["batch_size"]
    return Run(
        row=row_of(config["model"]),
        seed=config["train"]["seed"],
        accuracies=accuracies,
        losses=tuple(_losses(rows, len(accuracies))),
        epochs=config["train"]["epochs"],
        hours=sum(batch / row["images_per_second"] for row in rows) / 3600,
    )


def row_of(model: dict[str, Any]) -> str:
    """Name of the published row that an encoder belongs to."""
    if model["attention"] == "softmax":
        has_skips, has_norms = model["skip_attention"], model["norm"] == "layernorm"
        return "ViT" + ("" if has_skips else ", no skip") + ("" if has_norms else ", no layer norm")
    return {"osa_qr": "OSA (QR)", "osa_newton_schulz": "OSA (Newton-Schulz)"}[model["attention"]]


def _losses(rows: list[dict[str, Any]], num_epochs: int) -> list[float]:
    by_epoch: dict[int, list[float]] = {}
    for row in rows:
        by_epoch.setdefault(row["epoch"], []).append(row["loss"])
    return [fmean(by_epoch[epoch]) for epoch in range(num_epochs)]


def half_width(percent: float) -> float:
    """Of the 95 % interval of a share of the test images."""
    share = percent / 100
    return 196 * (share * (1 - share) / _TEST_IMAGES) ** 0.5


def final_cell(runs: list[Run]) -> str:
    """Mean over the seeds with its deviation, or one seed with the interval of its images."""
    done = [run.accuracies[-1] for run in runs if len(run.accuracies) == run.epochs]
    if len(done) > 1:
        return f"{fmean(done):.2f}, sd {stdev(done):.2f} over {len(done)} seeds"
    if done:
        return f"{done[0]:.2f} ± {half_width(done[0]):.2f}"
    on_the_way = max(runs, key=lambda run: len(run.accuracies))
    if not on_the_way.accuracies:
        return "-"
    epochs = f"{len(on_the_way.accuracies)} of {on_the_way.epochs}"
    return f"({on_the_way.accuracies[-1]:.2f} after epoch {epochs})"


def print_tables(runs: list[Run]) -> None:
    print(provenance())
    print("\nMNIST test accuracy (%) after 10 epochs, 10,000 images\n")
    print("| model | published | here | seeds | hours a run |\n|---|---:|---:|---|---:|")
    for name, published in PUBLISHED.items():
        found = [run for run in runs if run.row == name]
        here = final_cell(found) if found else "-"
        seeds = ", ".join(str(run.seed) for run in found)
        hours = f"{fmean(run.hours for run in found):.1f}" if found else ""
        print(f"| {name} | {published} | {here} | {seeds} | {hours} |")
    print("\ntest accuracy in % (mean training loss in nats) after each epoch\n")
    print("| epoch | " + " | ".join(f"{run.row}, seed {run.seed}" for run in runs) + " |")
    print("|---:|" + "---:|" * len(runs))
    for epoch in range(max(run.epochs for run in runs)):
        cells = [
            f"{run.accuracies[epoch]:.2f} ({run.losses[epoch]:.3f})"
            if epoch < len(run.accuracies)
            else ""
            for run in runs
        ]
        print(f"| {epoch + 1} | " + " | ".join(cells) + " |")


def draw(runs: list[Run], figure: Path) -> None:
    """Training loss and test accuracy over the epochs, as in the paper's figure 1."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    colours = dict(
        zip(PUBLISHED, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False)
    )
    for run in runs:
        epochs = range(1, len(run.accuracies) + 1)
        label = f"{run.row}, seed {run.seed}"
        left.plot(epochs, run.losses, label=label, color=colours[run.row])
        right.plot(epochs, run.accuracies, color=colours[run.row])
    for name, published in PUBLISHED.items():
        right.axhline(published, color=colours[name], linestyle=":", linewidth=1)
    left.set(xlabel="epoch", ylabel="mean training loss (nats)", yscale="log")
    right.set(xlabel="epoch", ylabel="test accuracy (%), published dotted")
    left.legend(fontsize=7)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    order = list(PUBLISHED)
    runs = [read_run(folder) for folder in options.runs]
    runs.sort(key=lambda run: (order.index(run.row), run.seed))
    print_tables(runs)
    if options.figure:
        draw(runs, options.figure)


if __name__ == "__main__":
    main()
