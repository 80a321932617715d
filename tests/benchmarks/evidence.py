"""What two CPU cores can show of the papers' tables: paired arms at reduced size, run by run.

    python -m tests.benchmarks.evidence CIFAR --out runs/evidence --json FILE --rows skipless

CIFAR is a folder with CLASS/PICTURE in its train/ and test/. Each arm is trained for one epoch at
each rate of one grid, without `HELD_OUT` images of every class of train/; the rate that is best on
those trains the arm on all of train/ with every seed, and only that is measured on test/. Each
run has one thread and goes on where it was stopped; what is finished stands in FILE and is not
run again, also where its folder is gone. The queue is in the order of `--rows`; a run that was
stopped keeps its place.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.runtime.folder import LOG
from tests.benchmarks.ledger import Ledger, said_by, ssl_bench
from tests.benchmarks.provenance import provenance

HELD_OUT = 500
BATCH = 128
RATES = (2.5e-4, 1e-3, 4e-3)
BASE = (
    "objective=supervised",
    "data.image_size=32",
    "data.in_memory=true",
    "data.labels=true",
    "objective.label_smoothing=0.0",
    "objective.crops.scale=[0.75,1.0]",
    "objective.crops.aspect_ratio=[1.0,1.0]",
    "objective.crops.num_ops=0",
    "model.dim=96",
    "model.patch_size=4",
    "model.num_heads=3",
    f"train.batch_size={BATCH}",
    "train.weight_decay=0.05",
    "train.final_weight_decay=0.05",
    "train.max_grad_norm=1.0",
    "train.num_workers=0",
    "monitor.accuracy_epochs=1",
    "monitor.crop_share=1.0",
)


@dataclass(frozen=True)
class Row:
    """One question: arms that differ in one thing each, and how long each is trained."""

    arms: Mapping[str, Sequence[str]]
    depth: int
    epochs: int
    seeds: Sequence[int]


def _skipless(optimizer: str) -> dict[str, list[str]]:
    chosen = f"optimizer={optimizer}"
    return {
        f"skip_{optimizer}": ["model=vit_tiny_skip", chosen],
        f"skipless_{optimizer}": ["model=vit_tiny_skipless", chosen],
        f"skipless_default_{optimizer}": ["model=vit_tiny_skipless", "model.init=default", chosen],
    }


ROWS = {
    "skipless": Row({**_skipless("adamw"), **_skipless("soap")}, depth=6, epochs=4, seeds=(0, 1)),
    "skipless_deep": Row(_skipless("soap"), depth=12, epochs=4, seeds=(0,)),
    "one_skip": Row(
        {
            "both": ["model=vit_tiny_skip"],
            "no_attention_skip": ["model=vit_tiny_skip", "model.skip_attention=false"],
            "no_mlp_skip": ["model=vit_tiny_skip", "model.skip_mlp=false"],
        },
        depth=6,
        epochs=4,
        seeds=(0, 1),
    ),
}


def choosing_folder(cifar: Path, out: Path) -> Path:
    """Links to train/ without the last images of every class, and to these as val/."""
    folder = out / "cifar10_choosing"
    if folder.exists():
        return folder
    unfinished = out / "cifar10_choosing.unfinished"
    for class_folder in sorted((cifar / "train").iterdir()):
        pictures = sorted(class_folder.iterdir())
        parts = {"train": pictures[:-HELD_OUT], "val": pictures[-HELD_OUT:]}
        for part, some in parts.items():
            there = unfinished / part / class_folder.name
            there.mkdir(parents=True, exist_ok=True)
            for picture in some:
                if not (there / picture.name).exists():
                    os.link(picture, there / picture.name)
    unfinished.rename(folder)
    return folder


def train(out: Path, row: Row, arm: str, more: Sequence[str]) -> Path:
    """The folder of a finished run."""
    # `model=` names the file whose values the others change.
    options = [*row.arms[arm], *BASE, f"model.depth={row.depth}", *more]
    ssl_bench(["pretrain", "--out", str(out), "--resume", *options], said_by(out))
    return out


def top1(ledger: Ledger, run: Path, train_it: Callable[[], Path]) -> float:
    """Percent of the monitored images that are right after the last epoch of a run."""
    return ledger.reached(run.name, lambda: finished(train_it()))["top1"][-1]


def finished(run: Path) -> dict[str, Any]:
    """Top-1 in percent after each epoch, the hours of training and where it was trained."""
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    seconds = sum(BATCH / row["images_per_second"] for row in rows if "images_per_second" in row)
    return {
        "top1": [row["val_top1"] for row in rows if row.get("val_top1") is not None],
        "hours": round(seconds / 3600, 3),
        "provenance": provenance(),
    }


def _schedule(epochs: int) -> list[str]:
    return [f"train.epochs={epochs}", f"train.warmup_epochs={epochs / 10}"]


def _rate(rate: float) -> str:
    # The option counts for 256 images a step.
    return f"optimizer.lr={rate * 256 / BATCH}"


def best_rate(ledger: Ledger, out: Path, name: str, arm: str, data: Path) -> float:
    """The rate of the highest accuracy on the held-out images after one epoch."""
    found = {}
    for rate in RATES:
        images = [f"data.root={data}", "monitor.val_split=val"]
        run = out / f"{name}-{arm}-rate{rate:g}"
        options = [*_schedule(1), *images, _rate(rate), "train.seed=0"]
        found[rate] = top1(ledger, run, partial(train, run, ROWS[name], arm, options))
        print(f"{name} {arm} rate {rate:g}: {found[rate]:.2f} % held-out", flush=True)
    return max(found, key=lambda rate: found[rate])


def run_row(ledger: Ledger, out: Path, name: str, cifar: Path) -> None:
    """All runs of a row: seed by seed, so that an unfinished row has whole pairs."""
    row, choosing = ROWS[name], choosing_folder(cifar, out)
    rates = {arm: best_rate(ledger, out, name, arm, choosing) for arm in row.arms}
    for seed in row.seeds:
        for arm, rate in rates.items():
            run = out / f"{name}-{arm}-seed{seed}"
            images = [f"data.root={cifar}", "monitor.val_split=test", "monitor.val_images=10000"]
            options = [*_schedule(row.epochs), *images, _rate(rate), f"train.seed={seed}"]
            reached = top1(ledger, run, partial(train, run, row, arm, options))
            print(f"{name} {arm} seed {seed} rate {rate:g}: {reached:.2f} % test", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="what finished runs reached")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.rows:
        run_row(Ledger(options.json), options.out, name, options.cifar)


if __name__ == "__main__":
    main()
