"""Discovery: how many of the objects of an image do the cuts of a block's features find?"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float64, Int64, Integer

from probes.tokencut.cuts import Tau
from probes.tokencut.log import ImageResult, cell_name
from probes.tokencut.probe import CONSTANT_BOXES, TokenCut, corloc_score, flags
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import bootstrap_estimate
from ssl_bench.results import Baseline
from ssl_bench.scores import (
    IOU_THRESHOLDS,
    MOST_DETECTIONS,
    average_precision,
    average_recall,
    coco_average_precision,
)

COCO = "ap_coco"
METRICS = ("ap", "ap50", "ar100", COCO, "corloc")
# COCO's own, so that boxes that are the same overlap enough at any threshold.
_ENOUGH = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)
Boxes = Float64[np.ndarray, "_boxes 4"]
AllCounts = Integer[np.ndarray, "images ranks_and_truth thresholds_and_all"]


@dataclass(frozen=True)
class ObjectDiscovery(TokenCut):
    """Boxes of several objects an image against all true boxes, whatever their class.

    Attributes:
        protocol: MaskCut as `tokencut` has it, with the tau of CutLER's commands.
        method: maskcut, or lost, which finds one object.

    Source: CutLER, https://arxiv.org/abs/2301.11320, whose metrics these are. MaskCut says not how
    sure it is of a mask; that an earlier one is surer is ours.
    """

    protocol: Literal["ssl_bench"] = "ssl_bench"
    truth: Literal["boxes"] = "boxes"
    tau: Tau = 0.15
    method: Literal["maskcut", "lost"] = "maskcut"

    task = "discovery"
    further_protocols = ()
    metrics_of_sets = (COCO,)
    # Since `ap_coco` is that of pycocotools, which rounds otherwise.
    metric_version = 2

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        del roles
        return {}

    @property
    def role(self) -> str:
        """Of pictures without boxes TokenCut already shows what is found."""
        return "boxes"

    @property
    def num_ranks(self) -> int:
        """How many boxes of an image count at most, one of each rank."""
        return min(self.max_objects, MOST_DETECTIONS) if self.method == "maskcut" else 1

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return list(product(layers, self.facets, METRICS))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "confidence": "order"}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets after one forward pass an image; see `TokenCut.run`."""
        results = self.searched(context)
        baselines = constant_baselines(results)
        for layer, facet in product(context.layers, self.facets):
            yield from scores_of_block(layer, facet, results, self.num_ranks, baselines)
            yield corloc_score(layer, facet, results)


def scores_of_block(
    layer: int,
    facet: str,
    results: Sequence[ImageResult],
    num_ranks: int,
    baselines: Mapping[str, Baseline],
) -> Iterator[Score]:
    """Average precision and recall over the images with ground truth, also without any box.

    Args:
        layer: The block.
        facet: What of it was cut.
        results: Of all images.
        num_ranks: How many boxes an image may have.
        baselines: See `constant_baselines`.
    """
    name, judged = cell_name(layer, facet), judged_images(results)
    cells = [result.cells[name] for result in judged]
    true = [boxes_of(result.true_boxes) for result in judged]
    found = [boxes_of([cell["box"], *cell.get("further_boxes", [])]) for cell in cells]
    counts = counted(found, true, num_ranks)
    details = {
        **flags(cells),
        "found_boxes": int(counts[:, 1:, 0].sum()),
        "true_boxes": int(counts[:, 0, 0].sum()),
        "images_without_boxes": int((counts[:, 0, 0] == 0).sum()),
    }
    for metric, (part, score) in _METRICS.items():
        those = part(counts)
        estimate = bootstrap_estimate(those, score)
        more = baselines[metric].as_details()
        if metric != "ar100":
            more["if_equally_sure"] = float(score(in_one_rank(those).sum(0)))
        value, ci95, kept = estimate.value, estimate.ci95(), those.astype(np.uint16)
        more = {**details, **more}
        yield Score(
            *(layer, facet, metric, value, ci95, len(judged), more),
            per_image=kept,
            per_image_kind="average_recall" if metric == "ar100" else "average_precision",
        )
    details |= baselines[COCO].as_details()
    yield Score(layer, facet, COCO, coco_average_precision(found, true), None, len(judged), details)


def constant_baselines(results: Sequence[ImageResult]) -> dict[str, Baseline]:
    """Return by metric the best constant box, whose score is the same for every block."""
    judged = judged_images(results)
    true = [boxes_of(result.true_boxes) for result in judged]
    by_metric: dict[str, dict[str, float]] = {metric: {} for metric in (*_METRICS, COCO)}
    for answer, box in CONSTANT_BOXES.items():
        found = [boxes_of(box(result.size)) for result in judged]
        counts = counted(found, true, 1)
        for metric, (part, score) in _METRICS.items():
            by_metric[metric][answer] = float(score(part(counts).sum(0)))
        by_metric[COCO][answer] = coco_average_precision(found, true)
    return {metric: Baseline.best(scores) for metric, scores in by_metric.items()}


def judged_images(results: Sequence[ImageResult]) -> list[ImageResult]:
    """Return the images with ground truth."""
    return [result for result in results if result.true_boxes is not None]


def counted(found: Sequence[Boxes], true: Sequence[Boxes], num_ranks: int) -> AllCounts:
    """Return `detection_counts` of each image, whose found boxes have the surest first."""
    pairs = zip(found, true, strict=True)
    return np.stack(
        [detection_counts(f, np.arange(len(f)), t, num_ranks=num_ranks) for f, t in pairs]
    )


def boxes_of(corners: Any) -> Boxes:
    """One box or several as an array; none as an empty one."""
    return np.array(corners, np.float64).reshape(-1, 4)


def in_one_rank(counts: AllCounts) -> Integer[np.ndarray, "images 2 thresholds_and_all"]:
    """The same boxes, each as sure as the others."""
    return np.stack([counts[:, 0], counts[:, 1:].sum(1)], axis=1)


_METRICS: dict[str, tuple[Callable[[AllCounts], np.ndarray], Callable[[Any], Any]]] = {
    "ap": (lambda counts: counts, average_precision),
    # All boxes, and those that are right at the first IoU, 1/2.
    "ap50": (lambda counts: counts[:, :, :2], average_precision),
    "ar100": (in_one_rank, average_recall),
}
"""What of the counts a metric takes, and what it makes of their sum."""


def detection_counts(
    found: Float64[np.ndarray, "found 4"],
    ranks: Int64[np.ndarray, " found"],
    true: Float64[np.ndarray, "true 4"],
    *,
    num_ranks: int,
) -> Int64[np.ndarray, "ranks_and_truth thresholds_and_all"]:
    """What an image contributes to `ssl_bench.scores.average_precision`.

    At each of `IOU_THRESHOLDS` a found box takes, in turn, the true box that it overlaps most of
    those that none has taken before it, the last one of several, and is right if that is enough.

    Args:
        found: Of which the surest `MOST_DETECTIONS` count.
        ranks: How sure each is, 0 the most; of one rank the first box matches first.
        true: All true boxes.
        num_ranks: How many ranks there are.

    Source: evaluateImg of pycocotools' COCOeval, without crowds.
    """
    # Here, because a plan need not wait for torchvision.
    from torchvision.ops import box_iou

    order = np.argsort(ranks, kind="stable")[:MOST_DETECTIONS]
    counts = np.zeros((1 + num_ranks, 1 + len(IOU_THRESHOLDS)), np.int64)
    counts[0, 0] = len(true)
    free = np.ones((len(_ENOUGH), len(true)), bool)
    ious = box_iou(torch.from_numpy(found[order]), torch.from_numpy(true)).numpy()
    for rank, overlaps in zip(ranks[order], ious, strict=True):
        counts[1 + rank, 0] += 1
        if len(true):
            fitting = np.where(free & (overlaps >= _ENOUGH[:, None]), overlaps, -1.0)
            taken = len(true) - 1 - fitting[:, ::-1].argmax(1)
            right = fitting.max(1) >= 0
            free[right, taken[right]] = False
            counts[1 + rank, 1:] += right
    return counts
