"""Discovery with one encoder on one dataset: what `tokencut` finds, against all true boxes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Integer

from probes.discovery.matching import detection_counts
from probes.tokencut.files import cell_name
from probes.tokencut.log import ImageResult
from probes.tokencut.scores import centre_baseline, centre_boxes, flagged
from ssl_bench.evaluation import Score
from ssl_bench.intervals import bootstrap_estimate
from ssl_bench.scores import average_precision, average_recall, coco_average_precision

AllCounts = Integer[np.ndarray, "images ranks_and_truth thresholds_and_all"]


def scores_of_block(
    layer: int, facet: str, results: Sequence[ImageResult], num_ranks: int
) -> Iterator[Score]:
    """Average precision and recall over the images with ground truth, also without any box."""
    name = cell_name(layer, facet)
    judged = [result for result in results if result.true_boxes is not None]
    found = [_boxes(result, name) for result in judged]
    counts = _counts(judged, found, num_ranks)
    centred = centre_boxes(judged)
    blind = None if centred is None else _counts(judged, [box[None] for box in centred], num_ranks)
    details = {
        **flagged("degenerate", [result.cells[name] for result in judged]),
        **flagged("tied_cutoff", [result.cells[name] for result in judged]),
        "found_boxes": int(counts[:, 1:, 0].sum()),
        "true_boxes": int(counts[:, 0, 0].sum()),
        "images_without_boxes": int((counts[:, 0, 0] == 0).sum()),
    }
    for metric, (part, score) in _METRICS.items():
        those = part(counts)
        estimate, more = bootstrap_estimate(those, score), dict[str, Any]()
        if blind is not None:
            more |= centre_baseline(float(score(part(blind).sum(0))))
        if metric != "ar100":
            more["if_equally_sure"] = float(score(in_one_rank(those).sum(0)))
        yield Score(
            layer=layer,
            facet=facet,
            metric=metric,
            value=estimate.value,
            ci95=estimate.ci95(),
            num_images=len(judged),
            details={**details, **more},
            per_image=those.astype(np.uint16),
        )
    more = {} if blind is None else centre_baseline(coco_average_precision(blind))
    yield Score(
        layer=layer,
        facet=facet,
        metric="ap_coco",
        value=coco_average_precision(counts),
        ci95=None,
        num_images=len(judged),
        details={**details, **more},
    )


def at_half(counts: AllCounts) -> Integer[np.ndarray, "images ranks_and_truth 2"]:
    """All boxes, and those that are right at the first IoU, 1/2."""
    return counts[:, :, :2]


def in_one_rank(counts: AllCounts) -> Integer[np.ndarray, "images 2 thresholds_and_all"]:
    """The same boxes, each as sure as the others."""
    return np.stack([counts[:, 0], counts[:, 1:].sum(1)], axis=1)


_METRICS: dict[str, tuple[Callable[[AllCounts], np.ndarray], Callable[[Any], Any]]] = {
    "ap": (lambda counts: counts, average_precision),
    "ap50": (at_half, average_precision),
    "ar100": (in_one_rank, average_recall),
}
"""What of the counts a metric takes, and what it makes of their sum."""


def _boxes(result: ImageResult, name: str) -> Float64[np.ndarray, "found 4"]:
    cell = result.cells[name]
    return np.array([cell["box"], *cell.get("further_boxes", [])], np.float64).reshape(-1, 4)


def _counts(
    judged: Sequence[ImageResult],
    boxes: Sequence[Float64[np.ndarray, "_ 4"]],
    num_ranks: int,
) -> AllCounts:
    """Of the boxes of each image, the surest first."""
    return np.stack(
        [
            detection_counts(
                found,
                np.arange(len(found)),
                np.array(result.true_boxes, np.float64).reshape(-1, 4),
                num_ranks=num_ranks,
            )
            for result, found in zip(judged, boxes, strict=True)
        ]
    )
