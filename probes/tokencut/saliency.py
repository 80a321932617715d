"""Maximal F-beta, IoU and accuracy of the masks that were found, on images of one object.

An answer is the first object's patches, each pixel with the answer of the patch over it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from probes.tokencut.cuts import Discovery
from probes.tokencut.files import cell_name
from probes.tokencut.log import ImageResult
from probes.tokencut.options import PatchGrid, at_pixels
from probes.tokencut.scores import centre_baseline, centre_box, flagged
from ssl_bench.data.samples import IGNORED, Sample
from ssl_bench.evaluation import Score
from ssl_bench.intervals import mean_estimate
from ssl_bench.scores import OBJECT_SCORES, object_iou


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


def centre_counts(truth: UInt8[np.ndarray, "height width"]) -> Int64[np.ndarray, " 4"]:
    """`object_counts` of the pixels whose middles lie in `centre_box`."""
    height, width = truth.shape
    x0, y0, x1, y1 = centre_box((height, width))
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    return object_counts(((y > y0) & (y < y1))[:, None] & ((x > x0) & (x < x1)), truth)


def against_mask(
    result: ImageResult, sample: Sample, found: Mapping[str, Sequence[Discovery]], grid: PatchGrid
) -> ImageResult:
    """What is kept of an image, with the counts of every cell; a hit has an IoU of half or more.

    Of several objects the first counts.
    """
    assert sample.mask is not None
    cells = {}
    for name, (first, *_) in found.items():
        pixels = at_pixels(first.mask, (grid.height, grid.width), grid.patch_size)
        counts = object_counts(pixels, sample.mask)
        is_hit = bool(object_iou(counts) >= 50)
        cells[name] = {**result.cells[name], "object": counts.tolist(), "hit": is_hit}
    return replace(result, cells=cells, centre=centre_counts(sample.mask).tolist())


def saliency_scores(layer: int, facet: str, results: Sequence[ImageResult]) -> Iterator[Score]:
    """Mean over images of what `OBJECT_SCORES` say of each; all of them have a true mask."""
    name = cell_name(layer, facet)
    cells = [result.cells[name] for result in results]
    counts = np.array([cell["object"] for cell in cells], np.int64)
    blind = np.array([result.centre for result in results], np.int64)
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
                **flagged("degenerate", cells),
                **flagged("tied_cutoff", cells),
                **centre_baseline(float(score(blind).mean())),
                "images_without_object": int((counts[:, 2] == 0).sum()),
            },
            per_image=counts,
        )
