"""The page of the queue's runs: curves, rates, starts and commands, and a picture a row."""

from pathlib import Path
from statistics import fmean

from tests.benchmarks.evidence.rows import (
    ROWS,
    known_names,
    patches_of,
    rate_runs,
    reported_of,
    seed_run,
)
from tests.benchmarks.evidence.verdicts import Runs, first_run
from tests.benchmarks.ledger import Run

_BEGINNING = """\
# The runs behind what this suite has shown

Made by `python -m tests.benchmarks.evidence.page` from `results/benchmarks/evidence-cpu.json`
alone; [evidence.md](evidence.md) has what they say.
"""
_CURVES = {
    "top1": "test accuracy (%)",
    "letters_16": "letters copied at 16 (%)",
    "letters_32": "letters copied at 32 (%)",
    "loss": "training loss (nats)",
}


def runs_page(runs: Runs) -> str:
    """Markdown of a ledger's content."""
    text = _BEGINNING
    drawn = figures(runs)
    if drawn:
        text += "\n## Over the epochs\n"
    for row in drawn:
        lines = {arm for panel in curves(row, runs).values() for arm, _ in panel}
        arms = ", ".join(arm for arm in ROWS[row].arms if arm in lines)
        text += f"\n![{row}: {arms} over the epochs](../figures/{figure_name(row)})\n"
    text += "".join(_compared(row, runs) for row in ROWS if ROWS[row].compared)
    text += _rates(runs)
    made = sorted({run["provenance"] for name, run in runs.items() if name in known_names()})
    return text + "".join(f"\n{one}\n" for one in (["## Runs", *made] if made else []))


_RATES = """
## Rates

What each arm reached on held-out training images after its first run at each rate of the grid, in
percent; the highest is taken. Where that is the first or the last rate of the grid, a wider one
could have found a better.

| row | arm | held-out | edge |
|---|---|---|---|
"""


def _rates(runs: Runs) -> str:
    """How the rate of each arm was chosen; empty where none was."""
    lines = []
    for row, asked in ROWS.items():
        names = {arm: rate_runs(row, arm) for arm in asked.arms if len(asked.kind.rates) > 1}
        for arm, first in names.items():
            if not first or not all(name in runs for name in first):
                continue
            scores = [runs[name][asked.kind.chosen_by][-1] for name in first]
            best = max(range(len(scores)), key=lambda number: scores[number])
            said = [f"{r:g}: {s:.2f}" for r, s in zip(asked.kind.rates, scores, strict=True)]
            said[best] = f"**{said[best]}**"
            edge = {0: "lowest", len(scores) - 1: "highest"}.get(best, "")
            lines.append(f"| {row} | {arm} | {' / '.join(said)} | {edge} |\n")
    return _RATES + "".join(lines) if lines else ""


_COMPARED = """
## Starts that were tried, {row}

Percent of the patches that are one token after each block: their cosine with the mean patch of
their image is above .99. Blocks are counted from 0; loss (of the last epoch) and k-NN (held-out
images, in percent) are those of the same run. A line with an epoch is of a start that was trained
whole.

| start | options | loss | k-NN | cosine | {blocks} |
|---|---|---:|---:|---:|{lines}|
"""


def _compared(row: str, runs: Runs) -> str:
    """How far the patches of each encoder have become one token; empty without runs."""
    first = {arm: run for arm in ROWS[row].arms if (run := first_run(row, arm, runs))}
    if not first:
        return ""
    blocks = range(len(next(iter(first.values()))["merged"]))
    lines = []
    for arm, run in first.items():
        lines.append(_start(arm, " ".join(ROWS[row].arms[arm][1:]), run))
        for name in reported_of(row, [arm]):
            if found := runs.get(patches_of(name)):
                epochs = f"{arm}, epoch {len(runs[name]['loss'])}"
                lines.append(_start(epochs, "", {**runs[name], **found}))
    heading = " | ".join(str(block) for block in blocks)
    table = _COMPARED.format(row=row, blocks=heading, lines="|".join("---:" for _ in blocks))
    return table + "".join(lines)


def _start(name: str, options: str, run: Run) -> str:
    knn = f"{run['knn'][-1]:.1f}" if "knn" in run else "-"
    figures = [f"{run['loss'][-1]:.2f}", knn, f"{fmean(run['cosine']):.2f}"]
    cells = [name, options or "-", *figures, *(f"{one:.0f}" for one in run["merged"])]
    return f"| {' | '.join(cells)} |\n"


def figure_name(row: str) -> str:
    return f"evidence_{row}.svg"


def figures(runs: Runs) -> list[str]:
    """Rows that have something to draw."""
    return [row for row in ROWS if curves(row, runs)]


def curves(row: str, runs: Runs) -> dict[str, dict[tuple[str, int], list[float]]]:
    """What is drawn of a row: by what is measured, arm and seed, a number an epoch."""
    found: dict[str, dict[tuple[str, int], list[float]]] = {}
    for metric in _CURVES:
        lines = {
            (arm, seed): runs[name][metric]
            for arm in ROWS[row].arms
            for seed in ROWS[row].seeds
            if runs.get(name := seed_run(row, arm, seed), {}).get(metric)
        }
        if lines:
            found[metric] = lines
    return found


def draw(row: str, runs: Runs, file: Path) -> None:
    """A panel a measure, a colour an arm, a line a seed; equal runs give equal bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = curves(row, runs)
    with mpl.rc_context({"svg.hashsalt": row}):
        figure, axes = pyplot.subplots(
            *(1, len(panels)),
            figsize=(4.2 * len(panels) + 1.6, 3.4),
            layout="constrained",
            squeeze=False,
        )
        for axis, (metric, lines) in zip(axes[0], panels.items(), strict=True):
            arms = list(ROWS[row].arms)
            for (arm, seed), values in lines.items():
                label = arm if seed == min(s for a, s in lines if a == arm) else f"_{arm}"
                epochs = range(1, len(values) + 1)
                axis.plot(epochs, values, f"C{arms.index(arm)}.-", label=label)
            axis.set(xlabel="epoch", ylabel=_CURVES[metric])
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
        # Beside the panels, where it hides no curve.
        handles = axes[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", fontsize=7)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None, "Creator": "matplotlib"})
        pyplot.close(figure)
