"""Whether each system of the papers trains: its first 200 steps on real images, on one core.

    python -m tests.benchmarks.first_steps DATA --json FILE [--out RUNS] [--table FILE]

DATA holds cifar10 and mnist, each with train/CLASS/PICTURE and test/CLASS/PICTURE; the digits are
made by `tests.benchmarks.mnist_pictures`. Every arm is `ssl-bench pretrain` with the words of
`ARMS`, then `ssl-bench probe --task knn` where it leaves an encoder; each is a process with one
thread, one after the other. What is finished stands in FILE and is not run again, also where its
folder is gone. `--finished` prints the page of what FILE has.
"""

import argparse
import json
import resource
import sys
from functools import partial
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from safetensors import safe_open

from pretrain.checkpoints import LOG
from ssl_bench.models.loading.addresses import LAST
from ssl_bench.results import ResultStore
from tests.benchmarks.first_steps_arms import ARMS, STEPS, Arm
from tests.benchmarks.first_steps_page import EDGE, page
from tests.benchmarks.ledger import Ledger
from tests.benchmarks.processes import said_in
from tests.benchmarks.provenance import provenance

_KNN = (
    "--task knn --dataset class_folders --limit 1000 data.fingerprint=stat dataset.val_split=test "
    "probe.neighbours=[20] probe.facet=patch_mean probe.crop_share=1.0 probe.num_workers=1"
)


def train(arm: Arm, data: Path, out: Path) -> dict[str, Any]:
    """Train an arm from its first step and say what its log and its weights have."""
    run = out / arm.name
    root = ["--data-root", str(data / arm.data)] if arm.data else []
    began = _core_seconds()
    words = arm.words(after=str(out / arm.after) if arm.after else None)
    _ssl_bench(["pretrain", *words, *root, "--out", str(run), "--overwrite"], run)
    seconds = _core_seconds() - began
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    assert rows[-1]["step"] == STEPS, (run, rows[-1]["step"])
    first, last = ([row["loss"] for row in some] for some in (rows[:EDGE], rows[-EDGE:]))
    return {
        "weights": _weights(run / LAST),
        "loss": [fmean(first), fmean(last)],
        "falls": falls(first, last),
        "core_seconds": round(seconds, 1),
        "score": score(rows),
        "provenance": provenance(),
    }


def _ssl_bench(words: list[str], run: Path) -> None:
    said_in([sys.executable, "-m", "ssl_bench", *words], run.parent / f"{run.name}.txt")


def falls(first: list[float], last: list[float]) -> bool:
    """Whether the mean loss fell by more than twice its standard error, steps taken as draws."""
    error = (variance(first) / len(first) + variance(last) / len(last)) ** 0.5
    return fmean(first) - fmean(last) > 2 * error


def score(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What a run says of itself beside its loss, by name.

    Top-1 of its head on test images and letters that it copies, by the length of the string, in
    percent; the loss of MAE as a share of what the mean colour of the hidden patches costs.
    """
    last = rows[-1]
    if "mean_loss" in last:
        shares = [row["loss"] / row["mean_loss"] for row in rows[-EDGE:]]
        return {"of the mean's loss": fmean(shares)}
    names = [n for n in last if n == "val_top1" or n.startswith("letters_")]
    return {name: last[name] for name in names}


def probe(arm: Arm, data: Path, out: Path) -> dict[str, Any]:
    """k-NN top-1 in percent of the asked blocks of a trained arm."""
    run, store = out / arm.name, out / "probed" / arm.name
    images = ["--data-root", str(data / arm.data.partition("/")[0]), "--out", str(store)]
    words = [*_KNN.split(), "--layer", arm.layers, "--checkpoint", str(run), *images]
    _ssl_bench(["probe", *words], run)
    records = [one for one in ResultStore(store).records() if one.metric.startswith("top1")]
    return {
        "top1": {str(one.layer): one.value for one in records},
        "ci95": {str(one.layer): one.ci95 for one in records},
        "provenance": provenance(),
    }


def _core_seconds() -> float:
    """Of all processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _weights(checkpoint: Path) -> int:
    with safe_open(checkpoint, "pt") as tensors:
        sizes = [tensors.get_tensor(name).numel() for name in tensors.keys()]  # noqa: SIM118
    return sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/first_steps"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--finished", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(options.json)
    for arm in () if options.finished else ARMS:
        ran = ledger.of(arm.name, partial(train, arm, options.data, options.out))
        print(f"{arm.name}: loss {ran['loss'][0]:.3f} -> {ran['loss'][1]:.3f}", flush=True)
        if arm.layers:
            name = f"{arm.name} knn"
            found = ledger.of(name, partial(probe, arm, options.data, options.out))
            print(f"{name}: {found['top1']}", flush=True)
    if options.table:
        options.table.write_text(page(ledger.runs))


if __name__ == "__main__":
    main()
