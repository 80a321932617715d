"""The page of `first_steps`: what its runs reached, beside the published values."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from ssl_bench.tables.published import PublishedTable, published_tables
from tests.benchmarks.first_steps_arms import BATCH, SECTIONS, SHARED, STEPS, Arm

# Steps over which losses are averaged, at the beginning and at the end.
EDGE = 20
Runs = Mapping[str, Mapping[str, Any]]

_HEAD = f"""# The first {STEPS} steps of every system

Made by `tests/benchmarks/first_steps.py`; `results/benchmarks/first_steps-cpu.json` has every
figure. Each system of the papers was made small and trained for {STEPS} steps of {BATCH} images of
CIFAR-10 or MNIST (Mamba: 32 strings), with one thread. That each of them trains, is probed and
stands beside what is published is all that this page says. It says nothing of which one is better:
one seed, {STEPS} steps, sizes that no paper has. Published values are those of whole trainings at
the sizes of the papers, many of them on ImageNet-1k. Made small, arms of two papers can be the same
run, and then have the same figures.

- `loss`: mean of the first {EDGE} steps and of the last {EDGE}. `falls` is yes where the difference
  exceeds twice its standard error.
- `weights`: numbers in the checkpoint of the encoder. `seconds`: of a core, from the start of the
  process to its end, tests included; other work on the machine makes them somewhat longer.
- `own score`: top-1 of the run's head on 1,000 test images; of MAE the loss as a percentage of what
  painting the hidden patches in their mean colour costs; of Mamba the letters that are right, by
  the length of the string, of which {100 / 26:.1f} % are by chance.
- `k-NN`: top-1 on 1,000 test images by the 20 nearest of 1,000 training images, mean patch: of the
  first and of the last block; of models with stages those of the last stage, whose width the final
  norm has. A state space model is not probed.
- `published`: what the row of `configs/papers` has that the experiment stands for.
"""


def page(runs: Runs) -> str:
    """Markdown of all arms that are finished, and the names of those that are not."""
    arms = [arm for some in SECTIONS.values() for arm in some]
    missing = [arm.name for arm in arms if arm.name not in runs]
    still = [name for name, run in runs.items() if not run.get("falls", True)]
    lines = [_HEAD]
    lines += [f"Not finished: {', '.join(missing)}.\n"] if missing else []
    lines += [f"The loss does not fall: {', '.join(still)}.\n"] if still else []
    for heading, some in SECTIONS.items():
        finished = [arm for arm in some if arm.name in runs]
        lines += [_section(heading, finished, runs)] if finished else []
    lines += [_commands([arm for arm in arms if arm.name in runs])]
    lines += [_origins(runs)]
    return "\n".join(lines)


def _section(heading: str, arms: list[Arm], runs: Runs) -> str:
    rows = [
        f"## {heading}\n",
        "| system | weights | loss | falls | own score | k-NN % | seconds | published |",
        "|---|---:|---:|---|---:|---:|---:|---|",
    ]
    return "\n".join([*rows, *(_row(arm, runs) for arm in arms)]) + "\n"


def _row(arm: Arm, runs: Runs) -> str:
    run = runs[arm.name]
    first, last = run["loss"]
    cells = (
        f"`{arm.name}`",
        f"{run['weights']:,}",
        f"{first:.3f} → {last:.3f}",
        "yes" if run["falls"] else "**no**",
        ", ".join(_score(name, value) for name, value in run["score"].items()),
        _knn(arm, runs),
        f"{run['core_seconds']:.0f}",
        published(arm.run, published_tables()) or "-",
    )
    return f"| {' | '.join(cells)} |"


def _score(name: str, value: float) -> str:
    if name.startswith("letters_"):
        return f"{value:.1f} % of {name.removeprefix('letters_')} letters"
    return f"{value:.1f} %" if name == "val_top1" else f"{100 * value:.1f} % {name}"


def _knn(arm: Arm, runs: Runs) -> str:
    if not arm.layers:
        return "-"
    if f"{arm.name} knn" not in runs:
        return "not finished"
    found = runs[f"{arm.name} knn"]["top1"]
    blocks = sorted(found, key=int)
    return ", ".join(f"block {block}: {found[block]:.1f}" for block in blocks)


def published(run: str, tables: tuple[PublishedTable, ...]) -> str:
    """What the rows of a run have, each value with where it stands; empty where nothing is."""
    places: dict[str, list[str]] = {}
    for table in tables:
        rows = [row for row, stands_for in table.runs.items() if stands_for == run]
        for row, column in product(rows, table.columns):
            if (row, column.name) in table.values:
                value = f"{table.cell(row, column.name)} {column.name} on {column.dataset}"
                places.setdefault(value, []).append(table.where)
    return "; ".join(f"{value} ({', '.join(where)})" for value, where in places.items())


def _commands(arms: list[Arm]) -> str:
    shared = [f"{name}='{words}'" for name, words in SHARED.items()]
    typed = [_typed(arm) for arm in arms]
    return "\n".join(["## Commands\n", "```", *shared, "", *typed, "```\n"])


def _typed(arm: Arm) -> str:
    data = f" --data-root {arm.data}" if arm.data else ""
    words = " ".join(arm.own).replace("$after", f"runs/first_steps/{arm.after}")
    return f"ssl-bench pretrain {words}{data} --out runs/first_steps/{arm.name}"


def _origins(runs: Runs) -> str:
    lines = dict.fromkeys(run["provenance"] for run in runs.values())
    return "\n".join(["## Where and when\n", *(f"- {line}" for line in lines)]) + "\n"
