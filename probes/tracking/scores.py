"""Score the masks of objects in videos with the region and contour metrics (J and F) of DAVIS 2017.

Source: davis2017/metrics.py, davis2017/utils.py and davis2017/evaluation.py of
https://github.com/davisvideochallenge/davis2017-evaluation/tree/ac7c43fc.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
from jaxtyping import Bool, Float64, UInt8

from ssl_bench.intervals import Jackknife, mean_estimate

PERCENTAGES = ("j_and_f", "j_mean", "f_mean", "j_recall", "f_recall")
DECAYS = ("j_decay", "f_decay")
# Maximum distance at which contours match, relative to the diagonal of the image.
_TOLERANCE = 0.008
_RECALL_THRESHOLD = 0.5
_QUARTERS = 4

BinaryMask = Bool[np.ndarray, "height width"]


@dataclass(frozen=True)
class ObjectMask:
    """The mask of one object, and its contour for computing the contour accuracy F.

    Attributes:
        mask: Pixels of the object.
        contour: Pixels whose value in the mask differs from that of their right, lower or lower
            right neighbour.
        band: Pixels near the contour, at a distance of at most 0.8 % of the image diagonal,
            rounded up to whole pixels.
    """

    mask: BinaryMask
    contour: BinaryMask
    band: BinaryMask

    @classmethod
    def from_mask(cls, mask: BinaryMask) -> "ObjectMask":
        # The last row and column are their own neighbours.
        padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
        contour = (mask != padded[:-1, 1:]) | (mask != padded[1:, :-1]) | (mask != padded[1:, 1:])
        radius = math.ceil(_TOLERANCE * math.hypot(*mask.shape))
        y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
        disk = (y**2 + x**2 <= radius**2).astype(np.uint8)
        band = cv2.dilate(contour.astype(np.uint8), disk).astype(bool)
        return cls(mask, contour, band)


def region_similarity(predicted: BinaryMask, true: BinaryMask) -> float:
    """Return the region similarity J, the intersection over union of two masks.

    J is 1 if both masks are empty.
    """
    union = np.count_nonzero(predicted | true)
    return np.count_nonzero(predicted & true) / union if union else 1.0


def contour_accuracy(predicted: ObjectMask, true: ObjectMask) -> float:
    """Return the contour accuracy F, the harmonic mean of precision and recall of contour pixels.

    Precision is the fraction of the predicted contour that lies in the band around the true
    contour. Recall is the fraction of the true contour that lies in the band around the predicted
    contour. F is 1 if both contours are empty, and 0 if only one contour is empty.
    """
    lengths = np.count_nonzero(predicted.contour), np.count_nonzero(true.contour)
    if not all(lengths):
        return float(not any(lengths))
    precision = np.count_nonzero(predicted.contour & true.band) / lengths[0]
    recall = np.count_nonzero(true.contour & predicted.band) / lengths[1]
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@dataclass
class ObjectScores:
    """Region similarity J and contour accuracy F of each object in the scored frames of a video.

    Attributes:
        region: J of the objects, one list for each frame.
        contour: F of the objects, one list for each frame.
    """

    region: list[list[float]] = field(default_factory=list)
    contour: list[list[float]] = field(default_factory=list)

    def add_frame(self, predicted: Sequence[ObjectMask], true: Sequence[ObjectMask]) -> None:
        """Score the predicted masks of all objects in a frame, and store the scores.

        `predicted` and `true` contain the mask and the contour of each object.
        """
        pairs = list(zip(predicted, true, strict=True))
        self.region.append([region_similarity(own.mask, other.mask) for own, other in pairs])
        self.contour.append([contour_accuracy(own, other) for own, other in pairs])

    def statistics(self) -> dict[str, Float64[np.ndarray, " objects"]]:
        """Return the metrics of each object by name, such as "j_mean", in percent."""
        metrics = {}
        for letter, frames in (("j", self.region), ("f", self.contour)):
            values = 100 * np.array(frames, np.float64)
            metrics[f"{letter}_mean"] = values.mean(0)
            metrics[f"{letter}_recall"] = 100 * (values > 100 * _RECALL_THRESHOLD).mean(0)
            metrics[f"{letter}_decay"] = decay(values)
        metrics["j_and_f"] = (metrics["j_mean"] + metrics["f_mean"]) / 2
        return metrics


def decay(values: Float64[np.ndarray, "frames objects"]) -> Float64[np.ndarray, " objects"]:
    """Return how much the score of each object decreases from the first to the last frames.

    The decay is the mean score over the first quarter of the frames minus the mean score over the
    last quarter. Adjacent quarters share a frame. The code of DAVIS stores frame numbers in 8 bits,
    and therefore uses other quarters for videos with more than 256 frames.
    """
    ends = np.round(np.linspace(1, len(values), _QUARTERS + 1) + 1e-10).astype(int) - 1
    return values[: ends[1] + 1].mean(0) - values[ends[-2] :].mean(0)


def video_estimate(
    values: Sequence[Float64[np.ndarray, " _objects"]],
) -> tuple[Float64[np.ndarray, " videos"], Jackknife]:
    """Estimate the mean of a metric over all objects of all videos, with its uncertainty.

    `values` contains the scores of the objects of each video. The estimate is the mean m over all
    objects, so videos with more objects have a larger influence. To estimate the uncertainty of m,
    each video gets the value m + n / mean(n) * (own - m), where n is the number of objects in the
    video and own is their mean score. The mean of the values of all videos is m, and the spread of
    the values gives the confidence interval of m (linearised ratio estimator).

    Returns:
        The value of each video, and the estimate of m with its uncertainty. If each video has one
        object, the value of a video is the score of this object.
    """
    counts = np.array([len(own) for own in values])
    mean = float(np.concatenate(values).mean())
    means = np.array([own.mean() for own in values])
    contributions = mean + counts / counts.mean() * (means - mean)
    return contributions, mean_estimate(contributions)


def symmetric_ci95(estimate: Jackknife) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of an estimate, without clipping it to 0 to 100 %.

    Decays and area ratios need an interval without clipping, because they can lie outside 0 to 100.
    Return None if the margin is unknown, for example with a single video.
    """
    margin = estimate.margin
    return None if math.isnan(margin) else (estimate.value - margin, estimate.value + margin)


def split_objects(
    numbers: UInt8[np.ndarray, "height width"], objects: UInt8[np.ndarray, " objects"]
) -> list[ObjectMask]:
    """Return the mask and the contour of each object in `objects`.

    `numbers` contains the number of the object at each pixel. For each object, all pixels with
    other numbers are background.
    """
    return [ObjectMask.from_mask(numbers == number) for number in objects]
