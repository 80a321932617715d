"""Discovery: how many objects of an image do MaskCut and LOST find in a block's features?"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int64, Integer
from pycocotools import mask as coco_mask

from probes.tokencut.cuts import Tau
from probes.tokencut.log import ImageResult, layer_facet_name
from probes.tokencut.probe import TokenCut
from probes.tokencut.scores import CONSTANT_BOXES, corloc_score, flag_percentages
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import bootstrap_estimate
from ssl_bench.results import Baseline
from ssl_bench.scores import (
    IOU_THRESHOLDS,
    MAX_DETECTIONS,
    average_precision,
    average_recall,
    coco_average_precision,
)

COCO = "ap_coco"
METRICS = ("ap", "ap50", "ar100", COCO, "corloc")
Boxes = Float64[np.ndarray, "_boxes 4"]
AllCounts = Integer[np.ndarray, "images ranks_and_truth thresholds_and_all"]


@dataclass(frozen=True)
class ObjectDiscovery(TokenCut):
    """A probe that finds several objects per image and compares their boxes with all true boxes.

    The classes of objects are ignored. Average precision needs a confidence for each box, but
    MaskCut gives none. Unlike CutLER, this probe treats masks that MaskCut finds earlier as more
    confident.

    Attributes:
        protocol: Name of the preset. "ssl_bench" uses MaskCut with the threshold `tau` that
            CutLER's authors use in their commands.
        method: Algorithm that finds the objects. "maskcut" finds several objects in each image, and
            "lost" finds one.

    Source: The metrics are those of CutLER, https://arxiv.org/abs/2301.11320.
    """

    protocol: Literal["ssl_bench"] = "ssl_bench"
    truth: Literal["boxes"] = "boxes"
    tau: Tau = 0.15
    method: Literal["maskcut", "lost"] = "maskcut"

    task = "discovery"
    secondary_protocols = ()
    metrics_of_sets = (COCO,)
    # Version 2 computes `ap_coco` with pycocotools.
    metric_version = 2

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        del roles
        return {}

    @property
    def role(self) -> str:
        """Return "boxes", the kind of annotation that a dataset must have for this probe.

        The probe `TokenCut` also accepts images without boxes, and then only draws the found
        objects.
        """
        return "boxes"

    @property
    def num_ranks(self) -> int:
        """Return the maximum number of found boxes that are scored in an image.

        The boxes are ranked by confidence, so the result is also the number of ranks.
        """
        return min(self.max_objects, MAX_DETECTIONS) if self.method == "maskcut" else 1

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return list(product(layers, self.facets, METRICS))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "confidence": "order"}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Find the objects of all images, and yield the scores of all layers and facets.

        A facet is a kind of feature, such as keys. Each image passes through the encoder once.
        """
        results = self.find_objects(context)
        baselines = constant_baselines(results)
        for layer, facet in product(context.layers, self.facets):
            yield from score_block(layer, facet, results, self.num_ranks, baselines)
            yield corloc_score(layer, facet, results)


def score_block(
    layer: int,
    facet: str,
    results: Sequence[ImageResult],
    num_ranks: int,
    baselines: Mapping[str, Baseline],
) -> Iterator[Score]:
    """Yield the average precision and average recall of the boxes that were found with one block.

    All annotated images are scored, including those without objects. Boxes are ranked by
    confidence: the first box of an image has rank 0, and its further boxes have ranks 1, 2, and so
    on.

    In the metrics "ap", "ap50" and "ar100", boxes of different images that have the same rank count
    as equally confident. The metric "ap_coco" instead sorts boxes of equal rank by image, like
    pycocotools. This metric therefore depends on the order of the images, and has no confidence
    interval and no values for single images.

    Args:
        layer: Index of the block.
        facet: Kind of feature that the objects were found with.
        results: Objects that were found in each image, with the true boxes.
        num_ranks: Maximum number of boxes that are scored in an image.
        baselines: Image-independent baseline of each metric.
    """
    annotated = select_annotated(results)
    cells = [result.cells[layer_facet_name(layer, facet)] for result in annotated]
    true = [to_boxes(result.true_boxes) for result in annotated]
    found = [to_boxes([cell["box"], *cell.get("further_boxes", [])]) for cell in cells]
    counts = count_detections(found, true, num_ranks)
    details = {
        **flag_percentages(cells),
        "found_boxes": int(counts[:, 1:, 0].sum()),
        "true_boxes": int(counts[:, 0, 0].sum()),
        "images_without_boxes": int((counts[:, 0, 0] == 0).sum()),
    }
    for metric, (select_counts, score) in _METRIC_FUNCTIONS.items():
        per_image = select_counts(counts)
        estimate = bootstrap_estimate(per_image, score)
        own_details = {**details, **baselines[metric].as_details()}
        if metric != "ar100":
            # The score without the assumption that earlier masks are more confident.
            own_details["if_equally_sure"] = float(score(merge_ranks(per_image).sum(0)))
        yield Score(
            *(layer, facet, metric, estimate.value, estimate.ci95(), len(annotated), own_details),
            per_image=per_image.astype(np.uint16),
            per_image_kind="average_recall" if metric == "ar100" else "average_precision",
        )
    details |= baselines[COCO].as_details()
    value = coco_average_precision(found, true)
    yield Score(layer, facet, COCO, value, None, len(annotated), details)


def constant_baselines(results: Sequence[ImageResult]) -> dict[str, Baseline]:
    """Return the image-independent baseline of each metric.

    `CONSTANT_BOXES` contains two candidates: a box in the centre of each image, and a box around
    the whole image. The candidate with the higher score is the baseline.
    """
    annotated = select_annotated(results)
    true = [to_boxes(result.true_boxes) for result in annotated]
    scores: dict[str, dict[str, float]] = {metric: {} for metric in (*_METRIC_FUNCTIONS, COCO)}
    for name, box in CONSTANT_BOXES.items():
        found = [to_boxes(box(result.size)) for result in annotated]
        counts = count_detections(found, true, 1)
        for metric, (select_counts, score) in _METRIC_FUNCTIONS.items():
            scores[metric][name] = float(score(select_counts(counts).sum(0)))
        scores[COCO][name] = coco_average_precision(found, true)
    return {metric: Baseline.best(by_box) for metric, by_box in scores.items()}


def select_annotated(results: Sequence[ImageResult]) -> list[ImageResult]:
    return [result for result in results if result.true_boxes is not None]


def to_boxes(corners: Any) -> Boxes:
    """Convert one box or a list of boxes to an array with one row for each box."""
    return np.array(corners, np.float64).reshape(-1, 4)


def count_detections(found: Sequence[Boxes], true: Sequence[Boxes], num_ranks: int) -> AllCounts:
    """Match the found boxes of each image to its true boxes, and count the correct ones.

    The found boxes of each image must be sorted by decreasing confidence, and the first box has
    rank 0. `count_image_detections` describes the rows and columns of the counts.
    """
    pairs = zip(found, true, strict=True)
    return np.stack(
        [count_image_detections(f, np.arange(len(f)), t, num_ranks=num_ranks) for f, t in pairs]
    )


def merge_ranks(counts: AllCounts) -> Integer[np.ndarray, "images 2 thresholds_and_all"]:
    """Add up the counts of found boxes, so that all boxes count as equally confident.

    In the counts of an image, row 0 is for true boxes and does not change. All further rows, one
    for each confidence rank of found boxes, are added up to a single row.
    """
    return np.stack([counts[:, 0], counts[:, 1:].sum(1)], axis=1)


_METRIC_FUNCTIONS: dict[str, tuple[Callable[[AllCounts], np.ndarray], Callable[[Any], Any]]] = {
    "ap": (lambda counts: counts, average_precision),
    # Column 0 counts all boxes, and column 1 counts the boxes that are correct at a threshold of
    # 0.5.
    "ap50": (lambda counts: counts[:, :, :2], average_precision),
    "ar100": (merge_ranks, average_recall),
}
"""Two functions for each metric.

The first selects or merges the counts of each image. The second computes the score from the sum of
these counts over all images.
"""


def count_image_detections(
    found: Float64[np.ndarray, "found 4"],
    ranks: Int64[np.ndarray, " found"],
    true: Float64[np.ndarray, "true 4"],
    *,
    num_ranks: int,
) -> Int64[np.ndarray, "ranks_and_truth thresholds_and_all"]:
    """Match the found boxes of an image to its true boxes, and count the correct ones.

    Found boxes are matched in the order of their confidence ranks. The matching is repeated for
    each IoU threshold in `IOU_THRESHOLDS`. A found box is matched to the unmatched true box with
    the largest IoU, if the IoU reaches the threshold. If several true boxes have the largest IoU,
    the found box is matched to the last of them.

    Args:
        found: Found boxes. Only the `MAX_DETECTIONS` most confident boxes are counted.
        ranks: Rank of each found box. Rank 0 is the most confident. Boxes of equal rank are matched
            in the order of `found`.
        true: All true boxes.
        num_ranks: Number of confidence ranks.

    Returns:
        Counts for `ssl_bench.scores.average_precision`. Row 0 counts true boxes, and row 1 + r
        counts found boxes of rank r. Column 0 counts all boxes, and column 1 + t counts the boxes
        that are correct at the threshold with index t.

    Source: `COCOeval.evaluateImg` of pycocotools, without its treatment of crowds.
    """
    order = np.argsort(ranks, kind="stable")[:MAX_DETECTIONS]
    counts = np.zeros((1 + num_ranks, 1 + len(IOU_THRESHOLDS)), np.int64)
    counts[0, 0] = len(true)
    free = np.ones((len(IOU_THRESHOLDS), len(true)), bool)
    ious = _box_iou(found[order], true)
    for rank, overlaps in zip(ranks[order], ious, strict=True):
        counts[1 + rank, 0] += 1
        if len(true):
            reached = overlaps >= IOU_THRESHOLDS[:, None]
            candidates = np.where(free & reached, overlaps, -1.0)
            matched = len(true) - 1 - candidates[:, ::-1].argmax(1)
            is_correct = candidates.max(1) >= 0
            free[is_correct, matched[is_correct]] = False
            counts[1 + rank, 1:] += is_correct
    return counts


def _box_iou(
    found: Float64[np.ndarray, "found 4"], true: Float64[np.ndarray, "true 4"]
) -> Float64[np.ndarray, "found true"]:
    ious = coco_mask.iou(_xyxy_to_xywh(found), _xyxy_to_xywh(true), [0] * len(true))
    # pycocotools returns an empty list if there are no boxes.
    return np.asarray(ious, np.float64).reshape(len(found), len(true))


def _xyxy_to_xywh(boxes: Boxes) -> Boxes:
    # pycocotools reads the memory in C order.
    sizes = boxes.copy(order="C")
    sizes[:, 2:] -= sizes[:, :2]
    return sizes
