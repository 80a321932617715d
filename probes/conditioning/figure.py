"""Figure: condition numbers, ranks and cosines over blocks, and CKA as a heat map."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from ssl_bench.evaluation import Score
from ssl_bench.results.reading import holds
from ssl_bench.system.files import write_atomically


def draw(
    scores: Sequence[Score],
    title: str,
    path: Path,
    likeness: Float64[np.ndarray, "rows columns"] | None = None,
    names: tuple[Sequence[str], Sequence[str]] = ((), ()),
    other: str = "",
) -> None:
    """One panel a metric, one line a facet with its 95 % band; infinite values at the top.

    Args:
        scores: Of all metrics.
        title: Above all panels.
        path: A PNG.
        likeness: CKA of every block with every block, in a panel of its own.
        names: Of its rows and of its columns.
        other: Whose blocks the columns are, where they are another encoder's.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    metrics = list(dict.fromkeys(score.metric for score in scores))
    # A facet has the same colour in all panels.
    facets = list(dict.fromkeys(score.facet for score in scores))
    count = len(metrics) + (likeness is not None)
    columns = min(3, count)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.8 * columns, 3.8 * rows + 0.4), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, metric in zip(axes.flat, metrics, strict=False):
        _draw_metric(axis, [score for score in scores if score.metric == metric], facets)
    if likeness is not None:
        axis = axes.flat[len(metrics)]
        image = axis.imshow(likeness, vmin=0, vmax=1, cmap="magma", origin="lower")
        figure.colorbar(image, ax=axis)
        rows_shown, columns_shown = names
        axis.set_xticks(range(len(columns_shown)), columns_shown, fontsize=7)
        axis.set_yticks(range(len(rows_shown)), rows_shown, fontsize=7)
        axis.set_xlabel(f"block of {other}" if other else "block")
        axis.set_title("linear CKA", fontsize=9)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
    pyplot.close(figure)


def _draw_metric(axis: Any, scores: Sequence[Score], facets: Sequence[str]) -> None:
    metric = scores[0].metric
    for facet in dict.fromkeys(score.facet for score in scores):
        some, number = [s for s in scores if s.facet == facet], facets.index(facet)
        layers = [score.layer for score in some]
        values = [score.value if math.isfinite(score.value) else math.nan for score in some]
        colour = f"C{number}"
        axis.plot(layers, values, marker="o", markersize=3, color=colour, label=facet)
        # As in the records: of one that leaves its own value out nobody knows what it says.
        sure = [
            (s.layer, *s.ci95)
            for s in some
            if s.ci95 and math.isfinite(sum(s.ci95)) and holds(s.ci95, s.value)
        ]
        if sure:
            at, low, high = zip(*sure, strict=True)
            axis.fill_between(at, low, high, alpha=0.15, color=colour)
        for layer in (score.layer for score in some if math.isinf(score.value)):
            axis.annotate(
                "∞", (layer, 0.99 - 0.04 * number), xycoords=("data", "axes fraction"),
                color=colour, ha="center", va="top", fontsize=11, fontweight="bold",
            )  # fmt: skip
    finite = [score.value for score in scores if math.isfinite(score.value)]
    if "condition_number" in metric and finite:
        axis.set_yscale("log")
        if len(finite) < len(scores):
            # Room above the finite values.
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.3)
    layers = sorted({score.layer for score in scores})
    # Not those of the finite values alone, or the infinite ones would stand outside.
    axis.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axis.set_xticks(layers)
    axis.set_title(metric.replace("_", " "), fontsize=9)
    axis.set_xlabel("block")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, framealpha=0.5)
