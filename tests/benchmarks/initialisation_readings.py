"""Which reading of the skipless initialisation trains: every reading, optimizer and rate.

    python -m tests.benchmarks.initialisation_readings CIFAR --json FILE [--steps 400] [--jobs 1]

CIFAR is a folder or an archive with CLASS/PICTURE in its train/ and test/. One run of
`experiment=initialisation_readings_*` an arm, `--jobs` at once, each in a process with one thread,
in `runs/initialisation_readings`; what is finished there is not run again, and what was stopped
goes on. Reported are loss and accuracy on the training images over the last fifty steps,
and the share of patches that have become one token: those of unseen images, after the last block,
whose cosine with the mean patch of their image is above .99. Probes see no more than that.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pretrain.runtime.folder import LOG
from pretrain.runtime.state import has_state, load_state
from ssl_bench.data.layouts.archives import open_labelled_archives
from ssl_bench.data.samples import ImageSet
from ssl_bench.models import load_encoder
from tests.benchmarks.patches import closeness
from tests.benchmarks.provenance import provenance

READINGS = ("as_written", "no_logit_scale", "no_gain", "uniform")
# As they are at this batch; the option counts for 256.
BATCH = 32
RATES = {"adamw": (2e-4, 5e-4, 1e-3), "soap": (5e-4, 1e-3, 2e-3)}
ARMS = [(r, o, rate) for o, rates in RATES.items() for r in READINGS for rate in rates]
LAST, IMAGES = 50, 200
OUT = Path("runs/initialisation_readings")


def trained(arm: tuple[str, str, float], data: str, steps: int) -> Path:
    """The folder of a finished run."""
    reading, optimizer, rate = arm
    out = OUT / f"{reading}-{optimizer}-{rate:g}"
    if has_state(out) and load_state(out, torch.device("cpu"))[0]["step"] >= steps:
        return out
    command = [sys.executable, "-m", "ssl_bench", "pretrain", "--out", str(out), "--resume"]
    options = [f"optimizer={optimizer}", f"optimizer.lr={rate * 256 / BATCH}"]
    options += [f"train.batch_size={BATCH}", f"train.max_steps={steps}"]
    subprocess.run(
        [*command, f"experiment=initialisation_readings_{reading}", *options, f"data.root={data}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return out


def merged_share(out: Path, images: ImageSet) -> float:
    """Percent of the patches after the last block that point where the mean one does."""
    encoder = load_encoder(str(out))
    return closeness(encoder, images, IMAGES, [encoder.depth - 1])[0].merged


def measured(
    arm: tuple[str, str, float], out: Path, steps: int, images: ImageSet
) -> dict[str, Any]:
    rows = [json.loads(line) for line in (out / LOG).read_text().splitlines()][-LAST:]
    known = [row for row in rows if row["loss"] is not None]
    return {
        **dict(zip(("reading", "optimizer", "rate"), arm, strict=True)),
        "steps": steps,
        "loss": fmean(row["loss"] for row in known) if known else None,
        "train_top1": fmean(row["train_top1"] for row in known) if known else None,
        "merged_percent": merged_share(out, images),
        "provenance": provenance(),
    }


READ = {
    "as_written": "the factor 1/sqrt(d_h) as in every ViT, the gain, Z normal as the paper has it",
    "no_logit_scale": "no factor 1/sqrt(d_h), as in the formulas",
    "no_gain": "orthogonal matrices of the MLP without max(sqrt(out / in), 1)",
    "uniform": "Z uniform with the variance of the normal one, a departure from the paper",
}


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, with the best reading and the one that is the default here."""
    best = max(rows, key=lambda row: row["train_top1"] or 0)
    lines = [
        "# Which reading of the skipless initialisation trains",
        "",
        "Made by `tests/benchmarks/initialisation_readings.py`: supervised, CIFAR-10 at 32 px,",
        f"width 192, 12 blocks, patch 4, {rows[0]['steps']} steps of {BATCH} images, one seed.",
        f"Loss and accuracy are of the training images, means over the last {LAST} steps.",
        f"`one token`: percent of the patches of {IMAGES} unseen images after the last block whose",
        "cosine with their image's mean patch is above .99; probes see no more than what is left.",
        "",
        *dict.fromkeys(row["provenance"] for row in rows),
        "",
        "The readings:",
        *(f"- `{name}`: {text}." for name, text in READ.items()),
        "",
        f"The highest accuracy at any rate has `{best['reading']}`; the default is `as_written`.",
        "",
        "| reading | optimizer | rate | loss | train top-1 % | one token % |",
        "|---|---|---:|---:|---:|---:|",
        *map(_line, rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    named = f"{row['reading']} | {row['optimizer']} | {row['rate']:g}"
    figures = ("-" if row[n] is None else f"{row[n]:.2f}" for n in ("loss", "train_top1"))
    return f"| {named} | {' | '.join(figures)} | {row['merged_percent']:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    images = open_labelled_archives(f"{options.data}/test", in_memory=True)
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        train = options.data + "/train"
        runs = [pool.submit(trained, arm, train, options.steps) for arm in ARMS]
        for arm, run in zip(ARMS, runs, strict=True):
            row = measured(arm, run.result(), options.steps, images)
            rows.append(row)
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
            print(_line(row), flush=True)
    if options.table:
        options.table.write_text(page(rows))


if __name__ == "__main__":
    main()
