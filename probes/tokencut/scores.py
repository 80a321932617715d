"""CorLoc from the results of images, with its uncertainty and where it comes from."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from probes.tokencut.files import cell_name
from probes.tokencut.log import Cell, ImageResult
from probes.tokencut.probe import DEGENERATE
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Share
from ssl_bench.results import Baseline
from ssl_bench.scores import corloc, is_hit

# Percent of the image that the largest object covers.
_SIZES = {
    "below_10_percent": (0.0, 10.0),
    "10_to_40_percent": (10.0, 40.0),
    "from_40_percent": (40.0, np.inf),
}
_COUNTS = {"1": (1.0, 2.0), "2_to_3": (2.0, 4.0), "from_4": (4.0, np.inf)}


_CENTRE = "centre box"


def centre_box(size: tuple[int, int]) -> Float64[np.ndarray, " 4"]:
    """The box in the middle of an image that has its shape and half of its area.

    Args:
        size: Height and width in pixels.

    Returns:
        (x0, y0, x1, y1) in pixels.
    """
    height, width = size
    sides = np.array([width, height, width, height], np.float64)
    return sides * (0.5 + np.sqrt(0.125) * np.array([-1.0, -1.0, 1.0, 1.0]))


def centre_boxes(results: Sequence[ImageResult]) -> list[Float64[np.ndarray, " 4"]] | None:
    """Of all images; None if lines of an older run do not tell the size of one."""
    boxes = [centre_box(result.size) for result in results if result.size is not None]
    return boxes if len(boxes) == len(results) else None


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
            **_baseline(scored),
            "images_without_boxes": len(results) - len(scored),
            "by_object_size": _breakdown(name, scored, _SIZES, lambda r: r.largest_box),
            "by_num_objects": _breakdown(name, scored, _COUNTS, lambda r: r.num_boxes or 0),
        },
        per_image=hits,
    )


def degenerate_score(layer: int, facet: str, results: Sequence[ImageResult]) -> Score:
    """Percent of the images whose graph says nothing, for those that nothing is known of."""
    flags = np.array([result.cells[cell_name(layer, facet)]["degenerate"] for result in results])
    return Score(
        layer=layer,
        facet=facet,
        metric=DEGENERATE,
        value=100 * float(flags.mean()),
        ci95=Share(flags).ci95(),
        num_images=len(flags),
        per_image=flags,
    )


def centre_baseline(value: float) -> dict[str, Any]:
    """Details of a score that answering with `centre_box` would have."""
    return Baseline(_CENTRE, value).as_details()


def _baseline(scored: Sequence[ImageResult]) -> dict[str, Any]:
    boxes = centre_boxes(scored)
    if boxes is None:
        return {}
    pairs = zip(boxes, scored, strict=True)
    hits = [is_hit(box, np.array(result.true_boxes, np.float64)) for box, result in pairs]
    return centre_baseline(corloc(np.array(hits)))


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
