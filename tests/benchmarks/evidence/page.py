"""Generate pages and figures about our experiments.

results/tables/evidence.md lists the claims. results/tables/evidence_runs.md describes the training
runs. results/figures/evidence_NAME.svg shows the training curves of the experiment NAME.
"""

from pathlib import Path
from statistics import fmean

from ssl_bench.intervals import Interval
from tests.benchmarks.evidence.claims import CLAIMS
from tests.benchmarks.evidence.rows import EXPERIMENTS, patches_of, rate_runs, reported_of, seed_run
from tests.benchmarks.evidence.verdicts import (
    Claim,
    Measurement,
    Run,
    Runs,
    Verdict,
    first_run,
    verdict,
)

_BEGINNING = """\
# What this suite has shown

Compare claims of the papers with runs on two CPU cores. The runs are small, so they show the order
of methods and paired differences, but not published values. [The runs](evidence_runs.md) have
curves, learning rates, commits and commands. `python -m tests.benchmarks.generated --write` makes
this page from `results/benchmarks/evidence-cpu.json`.

- Each claim, and the result that would refute it, was written in
  `tests/benchmarks/evidence/claims.py` before its runs. Only the wording has changed since. Refuted
  and undecided claims are shown too.
- "Ours" lists the mean over seeds of each variant, which is a test accuracy in percent unless the
  claim states another measure.
- Unless a row states another rule, a claim has the same direction if the intervals of all
  differences are above 0. They are intervals over seeds, or over images if there is one seed.
- The proposed skipless initialisation had uniform noise (`model.init_options.noise=uniform`). The
  paper and today's default have normal noise, as have `as_written`, `no_logit_scale` and `no_gain`
  in V11.
- Intervals are 95 %. Over seeds, they are Student's t of differences paired by seed. Over images,
  they are a bootstrap of differences on the same images.
- Hours are of one core that other programs also used. They include the runs that chose the learning
  rates.

| | claim | published | ours | same direction | difference [interval] | hours | seeds |
|---|---|---|---|---|---|---:|---:|
"""
_DIRECTION = {"supported": "yes", "refuted": "no"}


def page(runs: Runs) -> str:
    lines = [_line(claim, verdict(claim, runs)) for claim in CLAIMS]
    return _BEGINNING + "\n".join(lines) + "\n"


def _line(claim: Claim, result: Verdict) -> str:
    text = f"{_sentence(claim.comparison)} **{_sentence(claim.statement)}** {claim.refutation}"
    text += f" Limits: {claim.limits}." if claim.limits else ""
    ours = " / ".join(f"{variant} {value:.2f}" for variant, value in result.ours.items())
    differences = "<br>".join(_difference(one) for one in result.measurements)
    cells = [claim.name, text, claim.published_text(), ours or "-"]
    cells += [_DIRECTION.get(result.outcome, result.outcome), differences or "-"]
    return f"| {' | '.join([*cells, f'{result.hours:.1f}', str(result.seeds)])} |"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _difference(one: Measurement) -> str:
    seeds = _interval(one.over_seeds, "seeds")
    images = _interval(one.over_images, "images")
    return f"{one.text}: {one.value:.2f}{seeds}{images}"


def _interval(interval: Interval | None, over: str) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}] {over}"


_RUNS_BEGINNING = """\
# The runs behind what this suite has shown

Look up the curves, learning rates and commands of the runs behind
[the claims](evidence.md). `python -m tests.benchmarks.generated --write` makes this page from
`results/benchmarks/evidence-cpu.json`. The programs are in the repository at the commits below:
`git show COMMIT:tests/benchmarks/evidence/running.py`, and `rows.py` in the same folder.
"""
_CURVES = {
    "top1": "test accuracy (%)",
    "letters_16": "letters copied at 16 (%)",
    "letters_32": "letters copied at 32 (%)",
    "loss": "training loss (nats)",
}


def runs_page(runs: Runs) -> str:
    text = _RUNS_BEGINNING + "\n## Over the epochs\n"
    for experiment in figures(runs):
        lines = {variant for panel in curves(experiment, runs).values() for variant, _ in panel}
        variants = ", ".join(one for one in EXPERIMENTS[experiment].variants if one in lines)
        file = f"../figures/{figure_name(experiment)}"
        text += f"\n![{experiment}: {variants} over the epochs]({file})\n"
    text += "".join(
        _patch_table(name, runs) for name, one in EXPERIMENTS.items() if one.model_options
    )
    provenance = sorted({run["provenance"] for run in runs.values()})
    return text + _RATES + _rates(runs) + "".join(f"\n{one}\n" for one in ["## Runs", *provenance])


_RATES = """
## Rates

Each variant was first run for one epoch at each learning rate of the grid. The table shows its
score on held-out training images in percent. The rate with the highest score is used. If this rate
is the first or the last of the grid, a wider grid might have a better rate. The rates are those of
a step of 128 images, and of 64 images in `dino`. `optimizer.lr` is for 256 images, so it was 2 and
4 times as large.

| row | arm | held-out | edge |
|---|---|---|---|
"""


def _rates(runs: Runs) -> str:
    """Return the rows of a Markdown table with the score at each learning rate."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        for variant in (
            experiment.variants if experiment.chosen_by and len(experiment.rates) > 1 else ()
        ):
            scores = [runs[run][experiment.chosen_by][-1] for run in rate_runs(name, variant)]
            best = scores.index(max(scores))
            cells = [f"{rate:g}: {s:.2f}" for rate, s in zip(experiment.rates, scores, strict=True)]
            cells[best] = f"**{cells[best]}**"
            edge = {0: "lowest", len(scores) - 1: "highest"}.get(best, "")
            lines.append(f"| {name} | {variant} | {' / '.join(cells)} | {edge} |\n")
    return "".join(lines)


_PATCH_TABLE = """
## Skipless variants, {experiment}

The table shows the percentage of patches after each block whose cosine with the mean patch of their
image is above 0.99. Blocks are counted from 0. The mean cosine over all blocks and the loss of the
last epoch stand before it. k-NN is the accuracy on held-out images in percent. A row with an epoch
shows a variant that was trained for that many epochs of all images. The others had one epoch of
18,000 images.

| variant | options | loss | k-NN | cosine | {blocks} |
|---|---|---:|---:|---:|{lines}|
"""


def _patch_table(experiment: str, runs: Runs) -> str:
    """Return a Markdown table with the similarity of patch tokens in each block."""
    lines, blocks = [], range(0)
    for variant, options in EXPERIMENTS[experiment].model_options.items():
        first = first_run(experiment, variant, runs)
        blocks = range(len(first["merged"]))
        lines.append(_patch_line(variant, options, first))
        for name in reported_of(experiment, [variant]):
            epochs = f"{variant}, epoch {len(runs[name]['loss'])}"
            lines.append(_patch_line(epochs, "-", {**runs[name], **runs[patches_of(name)]}))
    heading, rule = " | ".join(map(str, blocks)), "|".join("---:" for _ in blocks)
    return _PATCH_TABLE.format(experiment=experiment, blocks=heading, lines=rule) + "".join(lines)


def _patch_line(name: str, options: str, run: Run) -> str:
    knn = f"{run['knn'][-1]:.1f}" if "knn" in run else "-"
    cells = [name, options, f"{run['loss'][-1]:.2f}", knn, f"{fmean(run['cosine']):.2f}"]
    return f"| {' | '.join([*cells, *(f'{one:.0f}' for one in run['merged'])])} |\n"


def figure_name(experiment: str) -> str:
    return f"evidence_{experiment}.svg"


def figures(runs: Runs) -> list[str]:
    """Return the names of the experiments that have training curves."""
    return [experiment for experiment in EXPERIMENTS if curves(experiment, runs)]


def curves(experiment: str, runs: Runs) -> dict[str, dict[tuple[str, int], list[float]]]:
    """Return the training curves of an experiment."""
    reported = {
        (variant, seed): runs.get(seed_run(experiment, variant, seed), {})
        for variant in EXPERIMENTS[experiment].variants
        for seed in EXPERIMENTS[experiment].seeds
    }
    panels = {
        metric: {key: run[metric] for key, run in reported.items() if run.get(metric)}
        for metric in _CURVES
    }
    return {metric: lines for metric, lines in panels.items() if lines}


def draw(experiment: str, runs: Runs, file: Path) -> None:
    """Draw the training curves of an experiment, with one chart per metric."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = curves(experiment, runs)
    # The same runs always give the same file, byte for byte.
    with mpl.rc_context({"svg.hashsalt": experiment}):
        size = (4.2 * len(panels) + 1.6, 3.4)
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=size, layout="constrained", squeeze=False
        )
        for axis, (metric, lines) in zip(axes[0], panels.items(), strict=True):
            variants = list(EXPERIMENTS[experiment].variants)
            for (variant, seed), values in lines.items():
                label = (
                    variant if seed == min(s for a, s in lines if a == variant) else f"_{variant}"
                )
                epochs = range(1, len(values) + 1)
                axis.plot(epochs, values, f"C{variants.index(variant)}.-", label=label)
            axis.set(xlabel="epoch", ylabel=_CURVES[metric])
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
        # The legend is next to the panels, so that it hides no curve.
        handles = axes[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", fontsize=7)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None, "Creator": "matplotlib"})
        pyplot.close(figure)
