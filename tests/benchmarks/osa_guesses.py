"""Which guess about orthogonal attention on MNIST moves its accuracy: one at a time, short runs.

    python -m tests.benchmarks.osa_guesses MNIST --json FILE [--out RUNS] [--jobs 1]

MNIST is what `tests.benchmarks.mnist_pictures` makes. What the paper leaves open, or the first runs
did otherwise, is changed in the two rows of its table 2 that came out farthest from it: QR, and the
ViT without skips and LayerNorm. Every arm is `experiment=osa_mnist_*` with one thing changed
against the first runs, for a part of the first of ten epochs; rates are constant, so that it is the
beginning of the whole run. Each is a process with one thread, `--jobs` at once; what is finished in
RUNS is not run again. Tested are all 10,000 test images.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from pretrain.runtime.folder import LOG
from pretrain.runtime.state import has_state, load_state
from ssl_bench.intervals import Share
from tests.benchmarks.mnist_table import PUBLISHED
from tests.benchmarks.provenance import provenance

_TEST_IMAGES = 10_000
# Of the end of an arm, over which the training loss is averaged.
_LAST = 50
FIRST_RUNS = {
    "train.global_norm": "false",
    "model.truncated_tokens": "false",
    "train.seed": "0",
}


@dataclass(frozen=True)
class Row:
    """A row of the published table.

    Attributes:
        steps: Of 128 images each; as many as two minutes of one thread take.
    """

    name: str
    experiment: str
    steps: int


ROWS = (
    Row("OSA (QR)", "osa_mnist_qr", 100),
    Row("ViT, no skip, no layer norm", "osa_mnist_vit_no_skip_no_norm", 200),
)


def of_scale(mean: float, std: float) -> dict[str, str]:
    """Options that normalise all three channels alike."""
    return {"data.mean": f"[{mean},{mean},{mean}]", "data.std": f"[{std},{std},{std}]"}


GUESSES = {
    "as in the first runs": {},
    "whole gradient clipped": {"train.global_norm": "true"},
    "tokens truncated at two deviations": {"model.truncated_tokens": "true"},
    "pixels in [0, 1]": of_scale(0.0, 1.0),
    "MNIST's mean and deviation": of_scale(0.1307, 0.3081),
    "another seed": {"train.seed": "1"},
    "pixels in [-1, 1]": of_scale(0.5, 0.5),
}


def trained(row: Row, guess: str, data: str, out: Path) -> Path:
    """The folder of a finished arm."""
    folder = out / f"{row.experiment}-{list(GUESSES).index(guess)}-{row.steps}"
    if has_state(folder) and load_state(folder, torch.device("cpu"))[0]["step"] >= row.steps:
        return folder
    options = FIRST_RUNS | GUESSES[guess] | {"train.max_steps": str(row.steps)}
    # Few of the images are looked at.
    options |= {"data.in_memory": "false", "data.fingerprint": "stat", "data.root": data}
    command = [sys.executable, "-m", "ssl_bench", "pretrain", "--out", str(folder), "--resume"]
    subprocess.run(
        [*command, f"experiment={row.experiment}", *(f"{k}={v}" for k, v in options.items())],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return folder


def measured(row: Row, guess: str, folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    accuracy = rows[-1]["val_top1"]
    hits = np.arange(_TEST_IMAGES) < round(accuracy * _TEST_IMAGES / 100)
    return {
        "row": row.name,
        "guess": guess,
        "options": FIRST_RUNS | GUESSES[guess],
        "steps": row.steps,
        "accuracy": accuracy,
        "ci95": Share(hits).ci95(),
        "loss": fmean(one["loss"] for one in rows[-_LAST:]),
        "published_after_10_epochs": PUBLISHED[row.name],
        "provenance": provenance(),
    }


def print_table(found: list[dict[str, Any]]) -> None:
    print(found[0]["provenance"])
    for row in ROWS:
        epochs = f"{row.steps} steps of 128 images, {row.steps * 128 / 60_000:.2f} of 10 epochs"
        print(f"\n{row.name}: {epochs}; published after 10 epochs: {PUBLISHED[row.name]}\n")
        print(
            "| guess | test accuracy % [95 % interval] | against the first runs | training loss |"
        )
        print("|---|---:|---:|---:|")
        arms = [one for one in found if one["row"] == row.name]
        for one in arms:
            low, high = one["ci95"]
            change = one["accuracy"] - arms[0]["accuracy"]
            cells = f"{one['accuracy']:.2f} [{low:.1f}, {high:.1f}] | {change:+.2f}"
            print(f"| {one['guess']} | {cells} | {one['loss']:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, default=Path("runs/osa_guesses"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        arms = [(row, guess) for guess in GUESSES for row in ROWS]
        runs = [pool.submit(trained, *arm, options.data, options.out) for arm in arms]
        found = []
        for arm, run in zip(arms, runs, strict=True):
            found.append(measured(*arm, run.result()))
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)


if __name__ == "__main__":
    main()
