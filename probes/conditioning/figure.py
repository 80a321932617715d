"""Figure: condition numbers, ranks and cosines over blocks, and CKA as a heat map."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from ssl_bench.evaluation import Score
from ssl_bench.intervals import holds
from ssl_bench.system.files import write_atomically


@dataclass(frozen=True)
class CkaMatrix:
    """CKA of every block with every block.

    Attributes:
        other: Whose blocks the columns are, where they are another encoder's.
    """

    values: Float64[np.ndarray, "rows columns"]
    row_names: Sequence[str]
    column_names: Sequence[str]
    other: str


def draw(scores: Sequence[Score], likeness: CkaMatrix | None, title: str, path: Path) -> None:
    """One panel a metric, one line a facet with its 95 % band; infinite values at the top."""
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
        _draw_likeness(figure, axes.flat[len(metrics)], likeness)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
    pyplot.close(figure)


def _draw_metric(axis: Any, scores: Sequence[Score], facets: Sequence[str]) -> None:
    metric = scores[0].metric
    for facet in dict.fromkeys(score.facet for score in scores):
        some = [score for score in scores if score.facet == facet]
        _draw_line(axis, some, facet, facets.index(facet))
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


def _draw_line(axis: Any, scores: Sequence[Score], facet: str, number: int) -> None:
    colour = f"C{number}"
    layers = [score.layer for score in scores]
    values = [score.value if math.isfinite(score.value) else math.nan for score in scores]
    axis.plot(layers, values, marker="o", markersize=3, color=colour, label=facet)
    # As in the records: of one that leaves its own value out nobody knows what it says.
    sure = [
        (s.layer, *s.ci95)
        for s in scores
        if s.ci95 and math.isfinite(sum(s.ci95)) and holds(s.ci95, s.value)
    ]
    if sure:
        at, low, high = zip(*sure, strict=True)
        axis.fill_between(at, low, high, alpha=0.15, color=colour)
    for layer in (score.layer for score in scores if math.isinf(score.value)):
        axis.annotate(
            "∞", (layer, 0.99 - 0.04 * number), xycoords=("data", "axes fraction"), color=colour,
            ha="center", va="top", fontsize=11, fontweight="bold",
        )  # fmt: skip


def _draw_likeness(figure: Any, axis: Any, likeness: CkaMatrix) -> None:
    image = axis.imshow(likeness.values, vmin=0, vmax=1, cmap="magma", origin="lower")
    figure.colorbar(image, ax=axis)
    axis.set_xticks(range(len(likeness.column_names)), likeness.column_names, fontsize=7)
    axis.set_yticks(range(len(likeness.row_names)), likeness.row_names, fontsize=7)
    axis.set_xlabel(f"block of {likeness.other}" if likeness.other else "block")
    axis.set_title("linear CKA", fontsize=9)
