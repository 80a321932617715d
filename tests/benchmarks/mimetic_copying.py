"""How far Mamba copies with and without mimetic initialisation: strings of many lengths, one core.

    python -m tests.benchmarks.mimetic_copying --json FILE [--figure PNG] [--out RUNS] [--finished]

Every arm is `experiment=mimetic_copying_*`, tested at more lengths than it was trained on. Each is
a process with one thread, one after the other; what is finished in RUNS is not run again. The file
says every arm's figures: letters and whole strings that are right, in percent, and the letters of
the training batches on the way.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pretrain.copying.tested import letters_name, strings_name
from pretrain.runtime.folder import LOG
from pretrain.runtime.state import has_state, load_state
from tests.benchmarks.provenance import provenance

# Batches over which training letters are averaged.
_WINDOW = 50


@dataclass(frozen=True)
class Setting:
    """A model and the strings it is trained on.

    Attributes:
        arms: Experiments by what they are called here.
        steps: As the experiments have them.
        length: Letters in training.
        lengths: Letters that are tested.
        again: Arms that have a second seed.
    """

    name: str
    arms: dict[str, str]
    steps: int
    length: int
    lengths: tuple[int, ...]
    again: tuple[str, ...]


SETTINGS = (
    Setting(
        "Mamba 2",
        {
            "all four pieces": "mimetic_copying_mimetic",
            "decay alone": "mimetic_copying_decay",
            "default": "mimetic_copying_default",
        },
        steps=1000,
        length=16,
        lengths=(4, 8, 12, 16, 20, 24, 32, 48, 64),
        again=("all four pieces", "default"),
    ),
    Setting(
        "Mamba 1",
        {
            "decay, step, correlation": "mimetic_copying_mamba1_mimetic",
            "default": "mimetic_copying_mamba1_default",
            "decay alone": "mimetic_copying_mamba1_decay",
        },
        steps=400,
        length=8,
        lengths=(2, 4, 6, 8, 10, 12, 16, 24, 32),
        again=("decay, step, correlation", "default"),
    ),
)


def is_finished(setting: Setting, folder: Path) -> bool:
    return has_state(folder) and load_state(folder, torch.device("cpu"))[0]["step"] >= setting.steps


def train(setting: Setting, experiment: str, seed: int, folder: Path) -> None:
    """Leave a finished run in a folder."""
    options = {
        "experiment": experiment,
        "train.seed": seed,
        "objective.test_lengths": json.dumps(setting.lengths, separators=(",", ":")),
    }
    command = [sys.executable, "-m", "ssl_bench", "pretrain", "--out", str(folder), "--resume"]
    subprocess.run(
        [*command, *(f"{key}={value}" for key, value in options.items())],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )


def measured(setting: Setting, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    last = rows[-1]
    assert last["step"] == setting.steps, (folder, last["step"])
    training = [row["train_letters"] for row in rows]
    return {
        "setting": setting.name,
        "arm": arm,
        "experiment": setting.arms[arm],
        "seed": seed,
        "steps": setting.steps,
        "trained_length": setting.length,
        "letters": {length: last[letters_name(length)] for length in setting.lengths},
        "strings": {length: last[strings_name(length)] for length in setting.lengths},
        "train_letters": {
            start + _WINDOW: fmean(training[start : start + _WINDOW])
            for start in range(0, setting.steps, _WINDOW)
        },
        "seconds": sum(32 / row["images_per_second"] for row in rows),
        "provenance": provenance(),
    }


def settings_of(found: list[dict[str, Any]]) -> list[Setting]:
    """Those of which a run is finished."""
    return [one for one in SETTINGS if any(run["setting"] == one.name for run in found)]


def print_tables(found: list[dict[str, Any]]) -> None:
    print(found[0]["provenance"])
    for setting in settings_of(found):
        runs = [run for run in found if run["setting"] == setting.name]
        once, twice = str(setting.length), str(2 * setting.length)
        print(f"\n{setting.name}, {setting.steps:,} steps, trained on {once} letters\n")
        print(f"| initialisation | seed | letters % at {once} | at {twice} | strings % at {once} |")
        print("|---|---:|---:|---:|---:|")
        for run in runs:
            letters = " | ".join(f"{run['letters'][length]:.1f}" for length in (once, twice))
            print(f"| {run['arm']} | {run['seed']} | {letters} | {run['strings'][once]:.1f} |")


def draw(found: list[dict[str, Any]], figure: Path) -> None:
    """Letters that are right over the length of the string, a line a seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    settings = settings_of(found)
    size = (4.5 * len(settings), 3.5)
    drawing, axes = pyplot.subplots(
        1, len(settings), figsize=size, layout="constrained", squeeze=False
    )
    for axis, setting in zip(axes[0], settings, strict=True):
        for number, arm in enumerate(setting.arms):
            runs = [r for r in found if (r["setting"], r["arm"]) == (setting.name, arm)]
            for run in runs:
                label = arm if run is runs[0] else "_again"
                lengths = [int(length) for length in run["letters"]]
                axis.plot(lengths, run["letters"].values(), f"C{number}.-", label=label)
        axis.axvline(setting.length, color="grey", linestyle=":", linewidth=1)
        axis.set(title=setting.name, xlabel="letters of the string; in training: dotted")
        axis.set(ylabel="letters copied (%)", ylim=(0, 101))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/mimetic_copying"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--finished", action="store_true", help="leave out what is not finished")
    options = parser.parse_args()
    found = []
    for seed in (0, 1):
        for setting in SETTINGS:
            for arm in setting.again if seed else setting.arms:
                experiment = setting.arms[arm]
                folder = options.out / f"{experiment}-{seed}"
                if not is_finished(setting, folder):
                    if options.finished:
                        continue
                    train(setting, experiment, seed, folder)
                found.append(measured(setting, arm, seed, folder))
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    # As read from the file, whose keys are texts.
    found = json.loads(options.json.read_text())
    print_tables(found)
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
