"""What `tokencut` says of a block, from the results of its images: CorLoc, or scores of masks.

An answer is the first object's; that of a mask has at each pixel the answer of the patch over it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8

from probes.tokencut.cuts import Discovery, PatchGrid, at_pixels
from probes.tokencut.log import Cell, ImageResult, cell_name
from ssl_bench.data.samples import IGNORED, Sample
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Share, mean_estimate
from ssl_bench.results import Baseline
from ssl_bench.scores import OBJECT_SCORES, corloc, is_hit, object_iou

DEGENERATE = "degenerate"
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
    centred = [
        is_hit(centre_box(result.size), np.array(result.true_boxes, np.float64))
        for result in scored
    ]

    def by_group(
        groups: Mapping[str, tuple[float, float]], measure: Callable[[ImageResult], float]
    ) -> dict[str, Any]:
        found = {}
        for group, (low, high) in groups.items():
            some = hits[[low <= measure(result) < high for result in scored]]
            if len(some):
                found[group] = {"num_images": len(some), "corloc": corloc(some)}
        return found

    return Score(
        layer=layer,
        facet=facet,
        metric="corloc",
        value=corloc(hits),
        ci95=Share(hits).ci95(),
        num_images=len(hits),
        details={
            **flags([result.cells[name] for result in results]),
            **centre_baseline(corloc(np.array(centred))),
            "images_without_boxes": len(results) - len(scored),
            "by_object_size": by_group(_SIZES, lambda result: result.largest_box),
            "by_num_objects": by_group(_COUNTS, lambda result: result.num_boxes or 0),
        },
        per_image=hits,
    )


def saliency_scores(layer: int, facet: str, results: Sequence[ImageResult]) -> Iterator[Score]:
    """Mean over images of what `OBJECT_SCORES` say of each; all of them have a true mask."""
    cells = [result.cells[cell_name(layer, facet)] for result in results]
    counts = np.array([cell["object"] for cell in cells], np.int64)
    centred = np.array([result.centre for result in results], np.int64)
    for metric, score in OBJECT_SCORES.items():
        estimate = mean_estimate(score(counts))
        yield Score(
            layer=layer,
            facet=facet,
            metric=metric,
            value=estimate.value,
            ci95=estimate.ci95(),
            num_images=len(counts),
            details={
                **flags(cells),
                **centre_baseline(float(score(centred).mean())),
                "images_without_object": int((counts[:, 2] == 0).sum()),
            },
            per_image=counts,
        )


def degenerate_score(layer: int, facet: str, results: Sequence[ImageResult]) -> Score:
    """Percent of the images whose graph says nothing, for those that nothing is known of."""
    flagged = np.array([result.cells[cell_name(layer, facet)]["degenerate"] for result in results])
    return Score(
        layer=layer,
        facet=facet,
        metric=DEGENERATE,
        value=100 * float(flagged.mean()),
        ci95=Share(flagged).ci95(),
        num_images=len(flagged),
        per_image=flagged,
    )


def flags(cells: Sequence[Cell]) -> dict[str, float]:
    """Percent of the images that carry a flag, of the flags that the method knows."""
    found = {}
    for flag in ("degenerate", "tied_cutoff"):
        values = [cell[flag] for cell in cells if flag in cell]
        if values:
            found[f"{flag}_percent"] = 100 * float(np.mean(values))
    return found


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


def centre_baseline(value: float) -> dict[str, Any]:
    """Details of a score that answering with `centre_box` would have."""
    return Baseline("centre box", value).as_details()


def with_mask_counts(
    result: ImageResult, sample: Sample, found: Mapping[str, Sequence[Discovery]], grid: PatchGrid
) -> ImageResult:
    """What is kept of an image, with the counts of every cell; a hit has an IoU of half or more."""
    assert sample.mask is not None
    cells = {}
    for name, (first, *_) in found.items():
        pixels = at_pixels(first.mask, result.size, grid.patch_size)
        counts = object_counts(pixels, sample.mask)
        is_found = bool(object_iou(counts) >= 50)
        cells[name] = {**result.cells[name], "object": counts.tolist(), "hit": is_found}
    # Of the pixels whose middles lie in the centre box.
    height, width = result.size
    x0, y0, x1, y1 = centre_box(result.size)
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    centre = ((y > y0) & (y < y1))[:, None] & ((x > x0) & (x < x1))
    return replace(result, cells=cells, centre=object_counts(centre, sample.mask).tolist())


def object_counts(
    answer: Bool[np.ndarray, "height width"], truth: UInt8[np.ndarray, "height width"]
) -> Int64[np.ndarray, " 4"]:
    """What an image contributes: `ssl_bench.scores.ObjectCounts`.

    Args:
        answer: Where the object is said to be.
        truth: 0 where the background is, 1 where the object is, `IGNORED` where neither counts.
    """
    counted, is_true = truth != IGNORED, truth == 1
    is_found = answer & counted
    parts = (is_found & is_true, is_found, is_true, counted)
    return np.array([part.sum() for part in parts], np.int64)
