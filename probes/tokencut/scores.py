"""Compute the result of TokenCut for each image, and the scores of each block."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8

from probes.tokencut.cuts import Discovery, PatchGrid
from probes.tokencut.log import FoundObjects, ImageResult, layer_facet_name, pack_mask
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Score
from ssl_bench.intervals import Proportion, mean_estimate
from ssl_bench.results import Baseline, PerImageKind
from ssl_bench.scores import (
    OBJECT_SCORES,
    centre_box,
    centre_mask,
    corloc,
    count_constant_masks,
    is_hit,
    object_counts,
    object_iou,
)

# Ranges of the percentage of the image that the largest object covers.
_OBJECT_SIZES = {
    "below_10_percent": (0.0, 10.0),
    "10_to_40_percent": (10.0, 40.0),
    "from_40_percent": (40.0, np.inf),
}
_NUM_OBJECTS = {"1": (1.0, 2.0), "2_to_3": (2.0, 4.0), "from_4": (4.0, np.inf)}
_PER_IMAGE_KINDS: Mapping[str, PerImageKind] = {
    "max_f_beta": "object_f_beta",
    "iou": "object_iou",
    "accuracy": "object_accuracy",
}


def image_result(
    sample: Sample, objects: Mapping[str, Sequence[Discovery]], grid: PatchGrid, *, has_mask: bool
) -> ImageResult:
    """Compare the objects that were found in an image with its true boxes or its true mask.

    Args:
        sample: The image with its annotations.
        objects: Found objects by block and facet (kind of feature), with keys such as "11/key".
        grid: Size of the image and of its patches.
        has_mask: Whether to compare with the true mask.

    Raises:
        DataError: `has_mask` is true, but the image has no mask.
    """
    if has_mask and sample.mask is None:
        raise DataError(f"{sample.image_id} has no ground-truth mask", hint=("probe.truth=boxes",))
    truth = sample.mask if has_mask else None
    true_boxes = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
    areas = (true_boxes[:, 2:] - true_boxes[:, :2]).prod(-1)
    return ImageResult(
        num_boxes=None if sample.boxes is None else len(true_boxes),
        largest_box=100 * float(areas.max(initial=0)) / (grid.height * grid.width),
        grid=grid.shape,
        cells={
            cell: _pack_objects(found, grid, sample.boxes, truth) for cell, found in objects.items()
        },
        size=(grid.height, grid.width),
        true_boxes=None if sample.boxes is None else true_boxes.tolist(),
        pixels=zlib.crc32(sample.image.tobytes()),
        centre=None if truth is None else object_counts(centre_mask(truth.shape), truth).tolist(),
    )


def _pack_objects(
    objects: Sequence[Discovery],
    grid: PatchGrid,
    true_boxes: Float64[np.ndarray, "boxes 4"] | None,
    true_mask: UInt8[np.ndarray, "height width"] | None,
) -> FoundObjects:
    """Convert the objects of one image, block and facet to the format of `ImageResult.cells`.

    A facet is a kind of feature, such as keys. If there is a true mask, the first object is a hit
    if its IoU with this mask is at least 0.5.
    """
    first, *others = objects
    cell: FoundObjects = {
        "box": first.box.astype(int).tolist(),
        "mask": pack_mask(first.mask),
        "hit": None if true_boxes is None else is_hit(first.box, true_boxes),
        "degenerate": first.degenerate,
    }
    if first.eigenvalue is None:
        cell["tied_cutoff"] = first.tied_cutoff
    else:
        cell |= {"eigenvalue": first.eigenvalue, "gap": first.gap}
    if others:
        cell["further_boxes"] = [other.box.astype(int).tolist() for other in others]
        cell["further_masks"] = [pack_mask(other.mask) for other in others]
    if true_mask is not None:
        counts = object_counts(grid.to_pixels(first.mask), true_mask)
        cell |= {"object": counts.tolist(), "hit": bool(object_iou(counts) >= 50)}
    return cell


def corloc_score(layer: int, facet: str, results: Sequence[ImageResult]) -> Score:
    """Return CorLoc of a block and facet (kind of feature) over all images with true boxes.

    CorLoc is the percentage of images whose box is a hit. A box is a hit if its IoU with any true
    box is at least 0.5. Degenerate images, whose box is arbitrary, are scored too.
    """
    cell = layer_facet_name(layer, facet)
    scored = [result for result in results if result.num_boxes]
    hits = np.array([result.cells[cell]["hit"] for result in scored])
    true_boxes = [np.array(result.true_boxes, np.float64) for result in scored]
    truths = list(zip([result.size for result in scored], true_boxes, strict=True))
    constant = {
        name: corloc(np.array([is_hit(box(size), boxes) for size, boxes in truths]))
        for name, box in CONSTANT_BOXES.items()
    }

    def score_groups(
        groups: Mapping[str, tuple[float, float]], measure: Callable[[ImageResult], float]
    ) -> dict[str, Any]:
        scores = {}
        for group, (low, high) in groups.items():
            group_hits = hits[[low <= measure(result) < high for result in scored]]
            if len(group_hits):
                scores[group] = {"num_images": len(group_hits), "corloc": corloc(group_hits)}
        return scores

    details = {
        **flag_percentages([result.cells[cell] for result in results]),
        **Baseline.best(constant).as_details(),
        "images_without_boxes": len(results) - len(scored),
        "by_object_size": score_groups(_OBJECT_SIZES, lambda result: result.largest_box),
        "by_num_objects": score_groups(_NUM_OBJECTS, lambda result: result.num_boxes or 0),
    }
    value, ci95 = corloc(hits), Proportion(hits).ci95()
    return Score(layer, facet, "corloc", value, ci95, len(hits), details, per_image=hits)


def saliency_scores(layer: int, facet: str, results: Sequence[ImageResult]) -> Iterator[Score]:
    """Compare the masks of found objects with true masks, and yield the scores of one layer.

    Each metric of `OBJECT_SCORES`, such as IoU, gives one score, averaged over the images. All
    images must have a true mask. `facet` is the kind of feature, such as keys.
    """
    cells = [result.cells[layer_facet_name(layer, facet)] for result in results]
    counts = np.array([cell["object"] for cell in cells], np.int64)
    constant_counts = count_constant_masks(
        np.array([result.centre for result in results], np.int64)
    )
    for metric, score in OBJECT_SCORES.items():
        estimate = mean_estimate(score(counts))
        constant = {name: float(score(own).mean()) for name, own in constant_counts.items()}
        details = {
            **flag_percentages(cells),
            **Baseline.best(constant).as_details(),
            "images_without_object": int((counts[:, 2] == 0).sum()),
        }
        value, ci95, kind = estimate.value, estimate.ci95(), _PER_IMAGE_KINDS[metric]
        yield Score(
            layer, facet, metric, value, ci95, len(counts), details, counts, per_image_kind=kind
        )


def degenerate_score(layer: int, facet: str, results: Sequence[ImageResult]) -> Score:
    """Return the percentage of degenerate images, whose found object is arbitrary.

    This percentage is the only score that needs no ground truth. `facet` is the kind of feature,
    such as keys.
    """
    flags = np.array(
        [result.cells[layer_facet_name(layer, facet)]["degenerate"] for result in results]
    )
    value, ci95 = 100 * float(flags.mean()), Proportion(flags).ci95()
    return Score(layer, facet, "degenerate", value, ci95, len(flags), per_image=flags)


def flag_percentages(cells: Sequence[FoundObjects]) -> dict[str, float]:
    """Return the percentages of images whose found object is unreliable.

    "degenerate_percent" counts images whose object is arbitrary. "tied_cutoff_percent" counts
    images whose object may depend on the order of patches. "tied_cutoff_percent" exists only for
    objects that were found with LOST. Each element of `cells` contains the objects of one image.
    """
    percentages = {}
    for flag in ("degenerate", "tied_cutoff"):
        values = [cell[flag] for cell in cells if flag in cell]
        if values:
            percentages[f"{flag}_percent"] = 100 * float(np.mean(values))
    return percentages


CONSTANT_BOXES: Mapping[str, Callable[[tuple[int, int]], Float64[np.ndarray, " 4"]]] = {
    "centre box": centre_box,
    "whole image": lambda size: np.array([0, 0, size[1], size[0]], np.float64),
}
"""Functions that return a box, given only the height and width of an image.

The box with the higher score is the image-independent baseline.
"""
