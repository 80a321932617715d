"""CorLoc from the results of images, with its uncertainty and where it comes from."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from probes.tokencut.files import cell_name
from probes.tokencut.log import Cell, ImageResult
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Share
from ssl_bench.scores import corloc

# Percent of the image that the largest object covers.
_SIZES = {
    "below_10_percent": (0.0, 10.0),
    "10_to_40_percent": (10.0, 40.0),
    "from_40_percent": (40.0, np.inf),
}
_COUNTS = {"1": (1.0, 2.0), "2_to_3": (2.0, 4.0), "from_4": (4.0, np.inf)}


def corloc_score(layer: int, facet: str, results: Sequence[ImageResult]) -> Score:
    """CorLoc of one block and facet over the images that have boxes, at least one."""
    name = cell_name(layer, facet)
    scored = [result for result in results if result.num_boxes]
    hits = np.array([result.cells[name]["hit"] for result in scored])
    cells = [result.cells[name] for result in results]
    return Score(
        layer=layer,
        facet=facet,
        metric="corloc",
        value=corloc(hits),
        ci95=Share(hits).ci95(),
        num_images=len(hits),
        details={
            **flagged("degenerate", cells),
            **flagged("tied_cutoff", cells),
            "images_without_boxes": len(results) - len(scored),
            "by_object_size": _breakdown(name, scored, _SIZES, lambda r: r.largest_box),
            "by_num_objects": _breakdown(name, scored, _COUNTS, lambda r: r.num_boxes or 0),
        },
        per_image=hits,
    )


def flagged(flag: str, cells: Sequence[Cell]) -> dict[str, float]:
    """Percent of the images that carry a flag; nothing where the method knows no such flag."""
    values = [cell[flag] for cell in cells if flag in cell]
    return {f"{flag}_percent": 100 * float(np.mean(values))} if values else {}


def _breakdown(
    name: str,
    scored: Sequence[ImageResult],
    groups: dict[str, tuple[float, float]],
    measure: Callable[[ImageResult], float],
) -> dict[str, Any]:
    found = {}
    for group, (low, high) in groups.items():
        hits = [r.cells[name]["hit"] for r in scored if low <= measure(r) < high]
        if hits:
            found[group] = {"num_images": len(hits), "corloc": corloc(np.array(hits))}
    return found
