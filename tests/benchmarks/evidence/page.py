"""The page of what this suite has shown, and a picture a row, from the ledger alone.

    python -m tests.benchmarks.evidence.page

writes results/tables/evidence.md and results/figures/evidence_ROW.svg, of rows that have a run.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from ssl_bench.intervals import Interval
from tests.benchmarks.evidence.claims import CLAIMS, Claim
from tests.benchmarks.evidence.rows import ROWS, known_names, rate_runs, seed_run
from tests.benchmarks.evidence.verdicts import (
    Found,
    Runs,
    Verdict,
    diverged_of,
    first_run,
    seeds_done,
    verdict,
)
from tests.benchmarks.ledger import Ledger

ROOT = Path(__file__).parents[3]
LEDGER = ROOT / "results/benchmarks/evidence-cpu.json"
PAGE = "results/tables/evidence.md"

_BEGINNING = """\
# What this suite has shown

Made by `python -m tests.benchmarks.evidence.page` from `results/benchmarks/evidence-cpu.json`
alone; `docs/evidence.md` says how the queue runs. Two CPU cores can show order and paired
differences at reduced size, never a published level. What each row may claim and what would refute
it was written in `tests/benchmarks/evidence/claims.py` before its runs; a row without a finished
run says so, and one that is refuted or shows nothing stands like any other. Ours are means over
seeds of every arm; intervals are 95 %, over seeds (Student's t of differences paired by seed) and
over images (bootstrap of differences, the same images in all arms). Hours are those of one core
beside other work, for all runs of the arms that a line names with those that chose the rates.

| | claim, refuted by | published | ours | same direction | difference [interval] | hours | seeds |
|---|---|---|---|---|---|---:|---:|
"""
_DIRECTION = {"supported": "yes", "refuted": "no"}
_CURVES = {
    "top1": "test accuracy (%)",
    "letters_16": "letters copied at 16 (%)",
    "letters_32": "letters copied at 32 (%)",
    "loss": "training loss (nats)",
}


def page(runs: Runs) -> str:
    """Markdown of a ledger's content."""
    lines = [_line(claim, verdict(claim, runs), runs) for claim in CLAIMS]
    text = _BEGINNING + "\n".join(lines) + "\n"
    text += "".join(_compared(row, runs) for row in ROWS if ROWS[row].compared)
    drawn = [row for row in ROWS if curves(row, runs)]
    if drawn:
        text += "\n## Over the epochs\n"
    for row in drawn:
        lines = {arm for panel in curves(row, runs).values() for arm, _ in panel}
        arms = ", ".join(arm for arm in ROWS[row].arms if arm in lines)
        text += f"\n![{row}: {arms} over the epochs](../figures/{figure_name(row)})\n"
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
their image is above .99. Blocks are counted from 0; loss and k-NN (held-out images, in percent) are
those of the same run.

| start | options | loss | k-NN | cosine | {blocks} |
|---|---|---:|---:|---:|{lines}|
"""


def _compared(row: str, runs: Runs) -> str:
    """How far the patches of each arm's first run have become one token; empty without runs."""
    first = {arm: run for arm in ROWS[row].arms if (run := first_run(row, arm, runs))}
    if not first:
        return ""
    blocks = range(len(next(iter(first.values()))["merged"]))
    lines = []
    for arm, run in first.items():
        options = " ".join(ROWS[row].arms[arm][1:]) or "-"
        figures = [f"{run['loss'][-1]:.2f}", f"{run['knn'][-1]:.1f}", f"{fmean(run['cosine']):.2f}"]
        cells = [arm, options, *figures, *(f"{one:.0f}" for one in run["merged"])]
        lines.append(f"| {' | '.join(cells)} |\n")
    heading = " | ".join(str(block) for block in blocks)
    table = _COMPARED.format(row=row, blocks=heading, lines="|".join("---:" for _ in blocks))
    return table + "".join(lines)


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


def _line(claim: Claim, found: Verdict, runs: Runs) -> str:
    says = f"{claim.asks}: **{claim.says}**; refuted by {claim.refuted}"
    says += f" ({claim.limits})" if claim.limits else ""
    ours = [f"{arm} {value:.2f}" for arm, value in found.ours.items()]
    ours += [f"{name} diverged" for name in diverged_of(claim, runs)]
    done, asked = seeds_done(claim, runs)
    cells = [
        claim.name,
        says,
        claim.published_text(),
        " / ".join(ours) or "-",
        _DIRECTION.get(found.word, found.word),
        "<br>".join(_difference(one) for one in found.found if one.value is not None) or "-",
        f"{found.hours:.1f}",
        f"{done} of {asked}",
    ]
    return f"| {' | '.join(cells)} |"


def _difference(found: Found) -> str:
    seeds = _interval(found.over_seeds, "seeds")
    images = _interval(found.over_images, "images")
    return f"{found.text}: {found.value:.2f}{seeds}{images}"


def _interval(interval: Interval | None, over: str) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}] {over}"


def written(root: Path, runs: Runs) -> Sequence[Path]:
    """Write page and pictures below a folder; gives back what was written."""
    text = root / PAGE
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(page(runs), encoding="utf-8")
    pictures = {row: root / "results/figures" / figure_name(row) for row in figures(runs)}
    for row, file in pictures.items():
        draw(row, runs, file)
    return [text, *pictures.values()]


def main() -> None:
    for path in written(ROOT, Ledger(LEDGER).runs):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
